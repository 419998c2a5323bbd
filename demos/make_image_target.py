"""Train the image demo's target: a tiny Emu3 that draws a handwritten digit from a caption, as 64 codes.

    python -m demos.make_image_target --out runs/demo_lantern_target
    python -m demos.make_image_target --out /tmp/try --autoencoder-steps 200 --code-pictures 500 --steps 20 \\
        --classifier-steps 20 --measure-pictures 50                                                          # a look

Three stages, all from random weights: the autoencoder (transformers' Emu3VQVAE, with a codebook that follows moving
averages and puts dead codes back to work); the language model, on the codes of `--code-pictures` pictures; and the
classifier that judges pictures (`demos/quality.py`). A row of the language model is

    <|bos|> a yellow seven on blue <|image start|> code ... code <|image end|>
    0       1 ................. 5  6               7 ....... 70  71             positions

with the loss on what follows <|image start|>. One row in ten has <null> for each of the caption's words, which makes
guidance possible. A stopped run resumes from the last checkpoint in `--out`; the model directory there holds the
weights in bfloat16 and `training.json` with the arguments, the time and the measurements.
"""

import argparse
import json
import random
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from torch import nn
from torch.distributions import Categorical
from tqdm import tqdm
from transformers import DynamicCache, Emu3Config, Emu3ForConditionalGeneration, PreTrainedTokenizerFast

from demos.classifier import Classifier, save_classifier
from demos.codes import CODES, decoded, encoded, pictures_of_answers, pixel_tensor
from demos.digits import CAPTIONS, Caption, picture_at, sheet
from demos.make_demo_target import learn, parsed, write_facts
from demos.make_vision_target import rate_scale
from demos.quality import picture_quality, real_features, real_pictures
from draftsmith.models.target_session import behind
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.files.atomic import atomic_path

VISUAL = "<|visual token {:06d}|>"  # as Emu3 names its codes
SPECIAL = ["<|pad|>", "<unk>", "<|bos|>", "<null>", "<|image start|>", "<|image end|>"]
WORDS = 5  # of a caption
PROMPT = WORDS + 2  # with <|bos|> and <|image start|>
NULL_SHARE = 0.1  # of training rows: without their caption
GUIDANCE = (1.0, 2.0, 3.0)  # scales that are measured

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "<|image start|>{% generation %}{{ message['content'] }}<|image end|>{% endgeneration %}"
    "{%- else -%}<|bos|>{{ message['content'] }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|image start|>{%- endif -%}"
)


def build_tokenizer(codebook_size: int) -> PreTrainedTokenizerFast:
    """One token a word, one a code. Decoded tokens are separated by blanks, which encoding drops again."""
    words = sorted({word for caption in CAPTIONS for word in caption.text.split()})
    codes = [VISUAL.format(code) for code in range(codebook_size)]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *words, *codes])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\|visual token \d+\|>|[^\s<]+"), "removed", invert=True)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<|pad|>",
        unk_token="<unk>",
        bos_token="<|bos|>",
        eos_token="<|image end|>",
        additional_special_tokens=["<null>", "<|image start|>"],
        model_max_length=128,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def build_model(tokenizer: Any, layers: int, hidden_size: int) -> Emu3ForConditionalGeneration:
    codes = {token: i for token, i in tokenizer.get_vocab().items() if token.startswith("<|visual token")}
    vq = {
        "codebook_size": len(codes),
        "embed_dim": 8,
        "latent_channels": 8,
        "double_latent": False,
        "temporal_downsample_factor": 1,  # pictures, no films
        "base_channels": 32,
        "channel_multiplier": [1, 1, 2],
        "num_res_blocks": 1,
        "attn_resolutions": [],
        "hidden_size": 64,
    }
    text = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "intermediate_size": hidden_size * 8 // 3 // 32 * 32,
        "num_hidden_layers": layers,
        "num_attention_heads": hidden_size // 32,
        "num_key_value_heads": hidden_size // 32 // 3,
        "max_position_embeddings": 128,
        "attention_dropout": 0.0,
        "tie_word_embeddings": True,
        "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
    }
    config = Emu3Config(vq_config=vq, text_config=text, vocabulary_map=codes, tie_word_embeddings=True)
    return Emu3ForConditionalGeneration(config)


class AutoencoderLearner(nn.Module):
    """An Emu3VQVAE and what its codebook's moving averages need.

    N pictures of M cells each, C codes of D numbers.
    """

    KEPT = 0.97  # of the averages, a step
    DEAD = 0.25  # cells a step: a code with fewer begins again at a cell of the batch

    def __init__(self, autoencoder: Any):
        super().__init__()
        self.autoencoder = autoencoder
        self.codebook_CD: torch.Tensor = autoencoder.quantize.embedding.weight.requires_grad_(False)
        self.counts_C: torch.Tensor
        self.sums_CD: torch.Tensor
        self.register_buffer("counts_C", torch.zeros(len(self.codebook_CD)))
        self.register_buffer("sums_CD", torch.zeros_like(self.codebook_CD))

    def loss(self, pixels: torch.Tensor, quantise: bool, revive: int | None) -> torch.Tensor:
        """Squared and absolute error of [N, 3, P, P] through the autoencoder, and the distance of cells to their codes.

        Args:
            quantise: False: decodes the cells as they are, for the first steps.
            revive: the seed by which dead codes choose a cell; None: they stay as they are.
        """
        latents = self.autoencoder.encoder(pixels[:, None]).transpose(1, 2)  # one frame: [N, D, 1, 8, 8]
        latents = self.autoencoder.quant_conv(latents).float()
        commitment = torch.zeros(())
        if quantise:
            codes = self._nearest_code(latents, revive)
            near = self.codebook_CD[codes].permute(0, 4, 1, 2, 3)
            commitment = nn.functional.mse_loss(latents, near)
            latents = latents + (near - latents).detach()  # gradients go straight through
        post = self.autoencoder.post_quant_conv(latents).transpose(1, 2)
        rebuilt = self.autoencoder.decoder(post, latents.transpose(1, 2)).float()
        error = rebuilt - pixels
        return 10 * error.square().mean() + error.abs().mean() + 0.25 * commitment

    @torch.no_grad()
    def _nearest_code(self, latents: torch.Tensor, revive: int | None) -> torch.Tensor:
        """Codes [N, 1, 8, 8] of [N, D, 1, 8, 8]; moves the codebook towards the cells that chose it."""
        cells_MD = latents.permute(0, 2, 3, 4, 1).flatten(0, 3)
        dead = self.counts_C < self.DEAD
        if revive is not None and dead.any():
            chosen = torch.randint(len(cells_MD), (int(dead.sum()),), generator=torch.Generator().manual_seed(revive))
            self.codebook_CD[dead], self.sums_CD[dead], self.counts_C[dead] = cells_MD[chosen], cells_MD[chosen], 1.0
        codes_M = torch.cdist(cells_MD, self.codebook_CD).argmin(-1)
        one_hot_MC = nn.functional.one_hot(codes_M, len(self.codebook_CD)).float()
        self.counts_C.lerp_(one_hot_MC.sum(0), 1 - self.KEPT)
        with torch.autocast("cpu", enabled=False):
            self.sums_CD.lerp_(one_hot_MC.T @ cells_MD, 1 - self.KEPT)
        used = self.counts_C > 1e-3
        self.codebook_CD[used] = self.sums_CD[used] / self.counts_C[used, None]
        return codes_M.view(latents.shape[0], *latents.shape[2:])


def prompt_ids(tokenizer: Any, captions: list[Caption]) -> torch.Tensor:
    """[N, PROMPT], by the chat template."""
    chats = [[{"role": "user", "content": caption.text}] for caption in captions]
    texts = [tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats]
    return torch.tensor(tokenizer(texts, add_special_tokens=False)["input_ids"])


def without_caption(ids_BT: torch.Tensor, null_id: int) -> torch.Tensor:
    """Prompts, or rows that begin with one, with <null> for each word of the caption."""
    changed = ids_BT.clone()
    changed[:, 1 : 1 + WORDS] = null_id
    return changed


def row_loss(model: Any, ids_BT: torch.Tensor) -> torch.Tensor:
    """[B, CODES + 1] nats of each code, and of the stop token."""
    states = model.model.text_model(ids_BT[:, :-1]).last_hidden_state[:, PROMPT - 1 :]
    logits_BSV = model.lm_head(states).float()
    return nn.functional.cross_entropy(logits_BSV.transpose(1, 2), ids_BT[:, PROMPT:], reduction="none")


@torch.no_grad()
def sampled_answers(model: Any, tokenizer: Any, captions: list[Caption], scale: float, seed: int) -> torch.Tensor:
    """[N, CODES + 1] tokens, sampled from softmax(uncond + scale * (cond - uncond)) of all tokens."""
    prompts = prompt_ids(tokenizer, captions)
    ids = torch.cat((prompts, without_caption(prompts, tokenizer.convert_tokens_to_ids("<null>"))))
    order, cache, found = torch.Generator().manual_seed(seed), DynamicCache(), []
    text_model = model.model.text_model
    for _ in range(CODES + 1):
        states = text_model(ids, **behind(text_model, cache)).last_hidden_state[:, -1]
        cond, uncond = model.lm_head(states).chunk(2)
        chosen = torch.multinomial((uncond + scale * (cond - uncond)).softmax(-1), 1, generator=order)
        found.append(chosen)
        ids = torch.cat((chosen, chosen))
    return torch.cat(found, dim=1)


def drawn_pictures(model: Any, tokenizer: Any, answers: torch.Tensor) -> list[numpy.ndarray | None]:
    """Of answers [N, CODES + 1]; None for one that is not 64 codes and the stop token."""
    code_of = model.model.vocabulary_mapping.bpe2img
    rows = [[code_of.get(token) for token in row[:-1]] for row in answers.tolist()]
    whole = [None not in row and stop == tokenizer.eos_token_id for row, stop in zip(rows, answers[:, -1], strict=True)]
    return pictures_of_answers(
        model.model.vqmodel, [row if good else None for row, good in zip(rows, whole, strict=True)]
    )


@torch.no_grad()
def measure(model: Any, tokenizer: Any, classifier: Classifier, count: int, out: Path) -> dict[str, Any]:
    """The autoencoder's error, the language model's loss and flatness, and the quality of its samples.

    Args:
        count: held-out pictures for each number.
    """
    model.eval()
    autoencoder, first_code = model.model.vqmodel, model.model.vocabulary_mapping.img2bpe[0]
    captions = random.Random(0).choices(CAPTIONS, k=count)
    pictures = real_pictures(captions, "floor")
    codes = encoded(autoencoder, pictures)
    rebuilt = decoded(autoencoder, codes)
    error = (rebuilt.astype(float) - pictures) / 255
    counts_C = torch.tensor(codes).flatten().bincount().double()
    ids_NT = code_rows(tokenizer, captions, torch.tensor(codes), first_code)
    nats, entropy, top, uncaptioned = [], [], [], []
    for ids_BT in ids_NT.split(100):
        states = model.model.text_model(ids_BT[:, :-1]).last_hidden_state[:, PROMPT - 1 : -1]
        log_law = model.lm_head(states).log_softmax(-1)
        nats.append(-log_law.gather(-1, ids_BT[:, PROMPT:-1, None]))
        entropy.append(-(log_law.exp() * log_law).sum(-1))
        top.append(log_law.amax(-1).exp())
        uncaptioned.append(row_loss(model, without_caption(ids_BT, tokenizer.convert_tokens_to_ids("<null>")))[:, :-1])
    real_NRD = real_features(classifier, captions)

    def quality(shown: list[numpy.ndarray | None]) -> dict[str, Any]:
        if sum(picture is not None for picture in shown) < 2:
            return {"pictures": len(shown), "whole": 0.0}  # hardly trained
        rounded: dict[str, Any] = json.loads(
            json.dumps(asdict(picture_quality(classifier, shown, captions, real_NRD))),
            parse_float=lambda number: round(float(number), 4),
        )
        return rounded

    found = {
        "heldout_pictures": count,
        "root_mean_squared_error_of_255": round(255 * float(numpy.sqrt((error**2).mean())), 2),
        "codes_used": len(numpy.unique(codes)),
        "perplexity_of_codes": round(Categorical(counts_C).perplexity().item(), 1),
        "heldout_nats_per_code": round(torch.cat(nats).mean().item(), 4),
        "heldout_nats_per_code_without_caption": round(torch.cat(uncaptioned).mean().item(), 4),
        "mean_entropy_nats": round(torch.cat(entropy).mean().item(), 4),
        "mean_probability_of_the_likeliest_code": round(torch.cat(top).mean().item(), 4),
        "real": quality(list(pictures)),
        "through_the_autoencoder": quality(list(rebuilt)),
    }
    shown = [[real, again] for real, again in zip(pictures, rebuilt, strict=True)]
    for scale in GUIDANCE:
        drawn = drawn_pictures(model, tokenizer, sampled_answers(model, tokenizer, captions, scale, seed=0))
        found[f"guidance_{scale:g}"] = quality(drawn)
        for column, picture in zip(shown, drawn, strict=True):
            column.append(numpy.full_like(pictures[0], 255) if picture is None else picture)
    sheet(list(zip(*shown[:16], strict=True))).save(out / "samples.png", optimize=True)
    return found


def code_rows(tokenizer: Any, captions: list[Caption], codes: torch.Tensor, first_code: int) -> torch.Tensor:
    """[N, PROMPT + CODES + 1]: what the language model learns, of codes [N, CODES]."""
    stop = torch.full((len(codes), 1), tokenizer.eos_token_id)
    return torch.cat((prompt_ids(tokenizer, captions), codes + first_code, stop), dim=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--codebook-size", type=int, default=512)
    parser.add_argument("--autoencoder-steps", type=int, default=1100)
    parser.add_argument("--autoencoder-pictures", type=int, default=16, help="in a step of the autoencoder")
    parser.add_argument("--autoencoder-learning-rate", type=float, default=2e-3)
    parser.add_argument("--code-pictures", type=int, default=40_000, help="that the language model learns from")
    parser.add_argument("--steps", type=int, default=1600, help="of the language model")
    parser.add_argument("--pictures", type=int, default=32, help="in a step of the language model")
    parser.add_argument("--layers", type=int, default=6, help="of the language model")
    parser.add_argument("--hidden-size", type=int, default=192)
    parser.add_argument("--classifier-steps", type=int, default=500, help="of 64 pictures")
    parser.add_argument("--measure-pictures", type=int, default=500, help="held-out pictures at the end")
    args = parsed(parser)

    tokenizer = build_tokenizer(args.codebook_size)
    tokenizer.save_pretrained(args.out)
    model: Any = build_model(tokenizer, args.layers, args.hidden_size)
    autoencoder, first_code = model.model.vqmodel, model.model.vocabulary_mapping.img2bpe[0]
    null_id: Any = tokenizer.convert_tokens_to_ids("<null>")

    learner = AutoencoderLearner(autoencoder)
    continuous = min(100, args.autoencoder_steps // 10)  # steps before there are codes
    revived = args.autoencoder_steps * 0.8  # the codebook then comes to rest

    def autoencoder_loss(step: int) -> torch.Tensor:
        first = step * args.autoencoder_pictures
        pictures = [
            picture_at("train", first + i, f"autoencoder {args.seed}")[1] for i in range(args.autoencoder_pictures)
        ]
        autoencoder.eval()  # `learn` asks for training, in which batch norm would learn other statistics than of codes
        return learner.loss(pixel_tensor(numpy.stack(pictures)), step >= continuous, step if step < revived else None)

    slower = argparse.Namespace(**vars(args) | {"learning_rate": args.autoencoder_learning_rate})
    seconds = learn(learner, autoencoder_loss, args.autoencoder_steps, rate_scale, slower, "autoencoder")
    autoencoder.to(torch.bfloat16).to(torch.float32).eval()  # the codes are of the weights that are shipped

    captions, codes_NM = codes_of_pictures(autoencoder, args)
    ids_NT = code_rows(tokenizer, captions, codes_NM, first_code)

    def language_loss(step: int) -> torch.Tensor:
        order = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        ids_BT = ids_NT[torch.randint(len(ids_NT), (args.pictures,), generator=order)]
        bare = torch.rand(args.pictures, 1, generator=order) < NULL_SHARE
        return row_loss(model, torch.where(bare, without_caption(ids_BT, null_id), ids_BT)).mean()

    def look() -> dict[str, float]:
        with torch.no_grad():
            return {"heldout": round(row_loss(model, heldout_NT).mean().item(), 4)}

    looked_at = random.Random(0).choices(CAPTIONS, k=100)
    looked_at_codes = torch.tensor(encoded(autoencoder, real_pictures(looked_at, "look")))
    heldout_NT = code_rows(tokenizer, looked_at, looked_at_codes, first_code)
    seconds += learn(model.model.text_model, language_loss, args.steps, rate_scale, args, "language", look)

    classifier = Classifier()

    def classifier_loss(step: int) -> torch.Tensor:
        """Half of the pictures as they are, half through the autoencoder."""
        chosen = torch.randint(len(codes_NM), (32,), generator=torch.Generator().manual_seed(step)).tolist()
        fresh = [picture_at("train", step * 32 + i, f"classifier {args.seed}") for i in range(32)]
        shown = numpy.concatenate((numpy.stack([p for _, p in fresh]), decoded(autoencoder, codes_NM[chosen].tolist())))
        labels = Classifier.labels([caption for caption, _ in fresh] + [captions[i] for i in chosen])
        logits = zip(classifier(pixel_tensor(shown)), labels.unbind(-1), strict=True)
        return sum((nn.functional.cross_entropy(of.float(), label) for of, label in logits), torch.zeros(()))

    seconds += learn(classifier, classifier_loss, args.classifier_steps, rate_scale, args, "classifier")
    classifier.eval()

    model.to(torch.bfloat16).eval()  # type: ignore[arg-type]
    model.save_pretrained(args.out)
    save_classifier(classifier, args.out)
    facts = {
        "parameters": sum(p.numel() for p in model.parameters()),
        "parameters_of_the_autoencoder": sum(p.numel() for p in autoencoder.parameters()),
        "pictures_seen": args.steps * args.pictures,
        "training_minutes": round(seconds / 60, 1),
        **measure(model.float(), tokenizer, classifier, args.measure_pictures, args.out),
    }
    write_facts(args, facts)


def codes_of_pictures(autoencoder: Any, args: argparse.Namespace) -> tuple[list[Caption], torch.Tensor]:
    """Captions and codes [N, CODES] of `--code-pictures` training pictures; a run that goes on reads its file."""
    path, batch = args.out / "codes.pt", 500
    series = range(args.code_pictures)
    if path.exists() and len(codes_NM := torch.load(path, weights_only=True)) == len(series):
        return [picture_at("train", i, f"codes {args.seed}")[0] for i in series], codes_NM
    captions, codes = [], []
    for start in tqdm(range(0, len(series), batch), desc="codes", unit=f"{batch} pictures", mininterval=10):
        drawn = [picture_at("train", i, f"codes {args.seed}") for i in series[start : start + batch]]
        captions += [caption for caption, _ in drawn]
        codes += encoded(autoencoder, numpy.stack([picture for _, picture in drawn]))
    with atomic_path(path) as partial:
        torch.save(torch.tensor(codes), partial)
    return captions, torch.tensor(codes)


if __name__ == "__main__":
    run(main)
