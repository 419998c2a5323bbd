"""Train the vision demo's target: a tiny LLaVA (CLIP tower, Llama) that describes drawn scenes and bar charts.

    python -m demos.make_vision_target --out runs/demo_vision_target
    python -m demos.make_vision_target --out /tmp/try --tower-steps 20 --steps 20 --measure-pictures 8   # a look

Two stages, both from random weights. First the tower alone: every patch names its cell or bar and what stands there;
without this stage the language model learns to write but not to look. Then the whole, on rows of one picture with a
description and as many questions as fit:

    <|user|> picture (256) | describe it <|end|><|assistant|> description <|end|> | question ... | question ...
    0        1 ... 256       257 ...                                                257 ...        257 ...     positions

A segment sees the picture and itself, so that one pass over the picture's tokens serves all. Some descriptions are of
imagined pictures: they see no picture and begin at position 0, which teaches the target to answer without one. The loss
is on answers only. A stopped run resumes from the last checkpoint in `--out`; the model directory there holds the
weights in bfloat16 and `training.json` with the arguments, the time and the measurements.
"""

import argparse
import json
import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy
import torch
from torch import nn
from tqdm import tqdm
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)

from demos.descriptions import (
    IMAGINE,
    REQUESTS,
    checked_statements,
    description_of,
    questions_about,
)
from demos.make_demo_target import CHAT_TEMPLATE, learn, parsed, train_tokenizer, write_facts
from demos.scenes import (
    BARS,
    CELLS,
    COLOURS,
    MAX_HEIGHT,
    PIXELS,
    SHAPES,
    SIZES,
    WORDS,
    Scene,
    draw,
    scene_at,
)
from draftsmith.models.target_session import behind
from draftsmith.recipes.command.cli import run

PATCH = 8  # pixels
SIDE = PIXELS // PATCH  # patches
PICTURE_TOKENS = SIDE * SIDE
TEXT_TOKENS = 320  # of a training row
TOWER_WIDTH = 128
PREFIX = 1 + PICTURE_TOKENS  # "<|user|>" and the picture
IMAGINED_SHARE = 0.1  # of descriptions: without a picture
IGNORED = -100  # label of a token without loss

# A picture stands where it is named, before the user's text.
VISION_TEMPLATE = CHAT_TEMPLATE.replace(
    "<|{{ message['role'] }}|>{{ message['content'] }}<|end|>",
    "<|{{ message['role'] }}|>"
    "{%- if message['content'] is string -%}{{ message['content'] }}"
    "{%- else -%}{%- for part in message['content'] -%}"
    "{%- if part['type'] == 'image' -%}<image>{%- else -%}{{ part['text'] }}{%- endif -%}"
    "{%- endfor -%}{%- endif -%}<|end|>",
)


def build_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE of descriptions, in which nearly every word is one token."""
    order = random.Random(0)
    texts = [*REQUESTS, *IMAGINE]
    for index in range(4000):
        scene = scene_at("train", index)
        asked = questions_about(scene, order)
        texts += [description_of(scene, order), *next(asked), *next(asked)]
    tokenizer = train_tokenizer(texts, vocab_size, more_special=["<image>"])
    tokenizer.chat_template = VISION_TEMPLATE
    return tokenizer


def build_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    images = CLIPImageProcessorPil(
        size={"shortest_edge": PIXELS},
        crop_size={"height": PIXELS, "width": PIXELS},
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,  # CLIP's class token, which "default" leaves out
        chat_template=VISION_TEMPLATE,
    )


def build_model(tokenizer: Any, layers: int, hidden_size: int, tower_layers: int) -> LlavaForConditionalGeneration:
    vision = CLIPVisionConfig(
        hidden_size=TOWER_WIDTH,
        intermediate_size=4 * TOWER_WIDTH,
        num_hidden_layers=tower_layers,
        num_attention_heads=4,
        image_size=PIXELS,
        patch_size=PATCH,
        projection_dim=TOWER_WIDTH,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=hidden_size * 8 // 3 // 32 * 32,
        num_hidden_layers=layers,
        num_attention_heads=hidden_size // 32,
        num_key_value_heads=hidden_size // 32 // 3,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    config = LlavaConfig(
        vision_config=vision,
        text_config=text,
        image_token_index=tokenizer.convert_tokens_to_ids("<image>"),
        image_seq_length=PICTURE_TOKENS,
        vision_feature_layer=-1,
        tie_word_embeddings=True,
    )
    return LlavaForConditionalGeneration(config)


def pixels_of(scenes: Iterable[Scene]) -> torch.Tensor:
    """[B, 3, PIXELS, PIXELS] in -1 to 1, as the processor makes them."""
    arrays = numpy.stack([numpy.asarray(draw(scene)) for scene in scenes])
    return torch.from_numpy(arrays).permute(0, 3, 1, 2).float() / 127.5 - 1


def patch_features(model: LlavaForConditionalGeneration, pixels: torch.Tensor) -> torch.Tensor:
    """[B, PICTURE_TOKENS, tower's width]: what the projector reads, as `vision_feature_layer` says."""
    layers = model.model.vision_tower(pixels, output_hidden_states=True).hidden_states
    return layers[model.config.vision_feature_layer][:, 1:]


class PatchHeads(nn.Module):
    """What each patch is taught in the first stage; thrown away after it."""

    ASPECTS = (
        ["nothing", "bar", "sign", *SHAPES],
        ["none", *COLOURS],
        ["none", *SIZES, *WORDS, *map(str, range(1, MAX_HEIGHT + 1))],
        [*(f"cell {i}" for i in range(CELLS)), *(f"bar {i}" for i in range(BARS[1]))],
    )

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, sum(map(len, self.ASPECTS)))

    def forward(self, features_BPC: torch.Tensor, labels_BPA: torch.Tensor) -> torch.Tensor:
        """Mean nats per patch, summed over the aspects A."""
        aspects = self.linear(features_BPC).split([len(aspect) for aspect in self.ASPECTS], dim=-1)
        return sum(
            (
                nn.functional.cross_entropy(logits.flatten(0, 1), labels_BPA[..., a].flatten())
                for a, logits in enumerate(aspects)
            ),
            torch.zeros(()),
        )

    @classmethod
    def labels(cls, scene: Scene) -> torch.Tensor:
        """[PICTURE_TOKENS, aspects]: of the cell or bar in which the patch's middle lies."""
        places = []
        if scene.bars:
            for i, bar in enumerate(scene.bars):
                places.append(("bar", bar.colour, str(bar.height), f"bar {i}"))
        else:
            things = {thing.cell: thing for thing in scene.things}
            for cell in range(CELLS):
                thing = things.get(cell)
                said = (thing.shape, thing.colour, thing.size or thing.word) if thing else ("nothing", "none", "none")
                places.append((*said, f"cell {cell}"))
        columns = len(scene.bars) or 3
        named = torch.tensor(
            [[aspect.index(word) for aspect, word in zip(cls.ASPECTS, p, strict=True)] for p in places]
        )
        middle = (torch.arange(SIDE) + 0.5) / SIDE
        row, column = (middle * (1 if scene.bars else 3)).long(), (middle * columns).long()
        return named[(row[:, None] * columns + column).flatten()]


@dataclass
class Rows:
    """A batch of training rows: B pictures, each with T text tokens in segments."""

    pixels: torch.Tensor  # [B, 3, PIXELS, PIXELS]
    ids_BT: torch.Tensor
    labels_BT: torch.Tensor  # the next token of an answer, or IGNORED
    segments_BT: torch.Tensor  # number of the segment, from 1; 0 for padding, negative without picture
    positions_BT: torch.Tensor


def training_rows(scenes: list[Scene], tokenizer: Any, order: random.Random, imagine: bool = True) -> Rows:
    """One row a scene: a description, then questions while they fit."""
    end: int = tokenizer.eos_token_id
    assistant: int = tokenizer.convert_tokens_to_ids("<|assistant|>")
    user: int = tokenizer.convert_tokens_to_ids("<|user|>")
    blank = [[0, IGNORED, 0, 0]] * TEXT_TOKENS
    rows = []
    for scene in scenes:
        imagined = imagine and order.random() < IMAGINED_SHARE
        asked = questions_about(scene, order)
        texts = [(order.choice(IMAGINE if imagined else REQUESTS), description_of(scene, order))]
        texts += [next(asked) for _ in range(TEXT_TOKENS // 12)]
        ids = iter(tokenizer([text for pair in texts for text in pair], add_special_tokens=False)["input_ids"])
        row: list[list[int]] = []
        for segment, (request, answer) in enumerate(zip(ids, ids, strict=True), 1):
            without = segment == 1 and imagined
            tokens = [user] * without + [*request, end, assistant, *answer, end]
            if len(row) + len(tokens) > TEXT_TOKENS:
                break
            labels = [IGNORED] * (len(tokens) - len(answer) - 2) + [*answer, end, IGNORED]
            first = 0 if without else PREFIX
            row += [[t, labels[i], -segment if without else segment, first + i] for i, t in enumerate(tokens)]
        rows.append((row + blank)[:TEXT_TOKENS])
    columns = torch.tensor(rows).unbind(-1)
    return Rows(pixels_of(scenes), *columns)


def attention_mask(segments_BT: torch.Tensor) -> torch.Tensor:
    """[B, 1, T, PREFIX + T], True where a text token sees a key: its own segment and, unless that is without one, the
    picture."""
    batch, text = segments_BT.shape
    own = (segments_BT[:, :, None] == segments_BT[:, None]) & torch.ones(text, text, dtype=torch.bool).tril()
    picture = (segments_BT >= 0)[:, :, None].expand(batch, text, PREFIX)  # padding's too: nobody reads it
    return torch.cat((picture, own), dim=-1)[:, None]


def answer_loss(model: LlavaForConditionalGeneration, rows: Rows, user_id: int) -> torch.Tensor:
    """Mean nats per answer token."""
    batch = len(rows.ids_BT)
    language, cache = model.model.language_model, DynamicCache()
    pictures = model.model.multi_modal_projector(patch_features(model, rows.pixels))
    prefix = torch.cat((language.embed_tokens(torch.full((batch, 1), user_id)), pictures), dim=1)
    language(inputs_embeds=prefix, **behind(language, cache))  # causal, hence faster than with a mask
    states_BTH = language(
        inputs_embeds=language.embed_tokens(rows.ids_BT),
        attention_mask=attention_mask(rows.segments_BT),
        position_ids=rows.positions_BT,
        **behind(language, cache),
    ).last_hidden_state
    answered = rows.labels_BT != IGNORED
    logits_NV = model.lm_head(states_BTH[answered])
    return nn.functional.cross_entropy(logits_NV.float(), rows.labels_BT[answered])


@torch.no_grad()
def descriptions_of(model: Any, processor: Any, scenes: list[Scene]) -> list[str]:
    """Greedy descriptions, by the processor and `generate` alone."""
    content = [{"type": "image"}, {"type": "text", "text": REQUESTS[0]}]
    prompt = processor.apply_chat_template([{"role": "user", "content": content}], add_generation_prompt=True)
    answers = []
    for start in range(0, len(scenes), 32):
        pictures = [draw(scene) for scene in scenes[start : start + 32]]
        inputs = processor(images=pictures, text=[prompt] * len(pictures), return_tensors="pt")
        out = model.generate(**inputs, max_new_tokens=256, do_sample=False)
        answers += processor.batch_decode(out[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    return answers


def measure(model: Any, processor: Any, pictures: int) -> dict:
    """Shares of true statements in greedy descriptions of held-out pictures."""
    model.eval()
    scenes = [scene_at("heldout", index) for index in range(pictures)]
    answers = descriptions_of(model, processor, scenes)
    model.train()
    own = [checked_statements(answer, scene) for answer, scene in zip(answers, scenes, strict=True)]
    # The answer of the next picture, checked against this one: what is true without looking.
    other = [checked_statements(answer, scene) for answer, scene in zip(answers[1:] + answers[:1], scenes, strict=True)]
    checkable = [statement for statements in own for statement in statements if statement.holds is not None]
    kinds = sorted({statement.kind for statement in checkable})
    return {
        "heldout_pictures": pictures,
        "statements_true": true_share(checkable),
        "statements_true_with_another_picture": true_share(s for statements in other for s in statements),
        "statements_per_picture": round(len(checkable) / pictures, 1),
        "sentences_not_understood": round(
            sum(not s.kind for statements in own for s in statements) / max(1, sum(map(len, own))), 4
        ),
        "true_by_kind": {kind: true_share(s for s in checkable if s.kind == kind) for kind in kinds},
    }


def true_share(statements: Iterable[Any]) -> float:
    """Of the checkable ones; 0 without any."""
    verdicts = [statement.holds for statement in statements if statement.holds is not None]
    return round(sum(verdicts) / len(verdicts), 4) if verdicts else 0.0


def rate_scale(step: int, steps: int) -> float:
    """Warm-up over 50 steps, constant, then linear to zero over the last fifth."""
    return min(1.0, (step + 1) / 50, (steps - step) / (steps * 0.2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tower-steps", type=int, default=600, help="steps of the first stage")
    parser.add_argument("--tower-pictures", type=int, default=32, help="pictures in a step of the first stage")
    parser.add_argument("--steps", type=int, default=6000, help="steps of the second stage")
    parser.add_argument("--pictures", type=int, default=8, help="pictures in a step of the second stage")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=6, help="of the language model")
    parser.add_argument("--tower-layers", type=int, default=3)
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--look-pictures", type=int, default=24, help="held-out pictures at every checkpoint")
    parser.add_argument("--measure-pictures", type=int, default=400, help="held-out pictures at the end")
    args = parsed(parser)

    tokenizer = build_tokenizer(args.vocab_size)
    processor = build_processor(tokenizer)
    model = build_model(tokenizer, args.layers, args.hidden_size, args.tower_layers)
    heads = PatchHeads(TOWER_WIDTH)
    user_id: Any = tokenizer.convert_tokens_to_ids("<|user|>")

    def scenes(stage: str, step: int, count: int) -> list[Scene]:
        return [scene_at("train", step * count + i, seed=f"{stage} {args.seed}") for i in range(count)]

    def tower_loss(step: int) -> torch.Tensor:
        shown = scenes("tower", step, args.tower_pictures)
        labels = torch.stack([PatchHeads.labels(scene) for scene in shown])
        return heads(patch_features(model, pixels_of(shown)), labels)

    def whole_loss(step: int) -> torch.Tensor:
        shown = scenes("whole", step, args.pictures)
        return answer_loss(model, training_rows(shown, tokenizer, random.Random(f"{args.seed} {step}")), user_id)

    def look() -> dict:
        found = measure(model, processor, args.look_pictures)
        tqdm.write(json.dumps(found))
        return found

    tower = nn.ModuleList([model.model.vision_tower, heads])
    seconds = learn(tower, tower_loss, args.tower_steps, rate_scale, args, "tower")
    seconds += learn(model, whole_loss, args.steps, rate_scale, args, "whole", look)

    model.to(torch.bfloat16).eval()  # type: ignore[arg-type]
    model.save_pretrained(args.out)
    processor.save_pretrained(args.out)
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "pictures_seen": args.steps * args.pictures,
        "training_minutes": round(seconds / 60, 1),
        **measure(
            model.float(), processor, args.measure_pictures
        ),  # bfloat16's values, the processors' fastest products
    }
    write_facts(args, facts)


if __name__ == "__main__":
    run(main)
