"""Train the demo's target model: a small Llama that answers questions about Python code.

    python -m demos.make_demo_target --out runs/study_target      # the study's: 78 minutes on two CPU cores
    make demo-target                                              # the demo's, grown out of it: 39 minutes
    python -m demos.make_demo_target --out /tmp/try --steps 60    # a look at the loss

Reads the running interpreter's standard library (and its test suite, if installed), holds out whole modules
(`demos.stdlib.split_of`), and trains a byte-level BPE tokenizer and the model from random weights. Writes a Hugging
Face model directory in bfloat16 with `training.json`: data, time and measurements. Training starts with answers of up
to 600 characters; while the learning rate decays, answers have the demo's length, which teaches the model to end them.
A stopped run resumes from `--out`'s last checkpoint.
"""

import argparse
import json
import math
import platform
import random
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demos.stdlib import (
    KINDS,
    MAX_ANSWER_CHARACTERS,
    SourceFunction,
    conversation_of,
    library_functions,
    split_of,
    stdlib_conversations,
)
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_path

ROW_TOKENS = 512  # one packed training row
DECAY_SHARE = 0.4  # of all steps: the learning rate falls, and answers have the demo's length
LONG_ANSWER_CHARACTERS = 600  # before that
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{%- else -%}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def llama_config(
    vocab_size: int, layers: int, width: int, inner_width: int, pad_id: int = 0, end_id: int | None = None
) -> LlamaConfig:
    """Heads of 64; half as many, rounded down, for keys and values."""
    return LlamaConfig(
        vocab_size=vocab_size,
        hidden_size=width,
        intermediate_size=inner_width,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 128),
        head_dim=64,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=pad_id,
        bos_token_id=None,
        eos_token_id=end_id,
    )


@torch.no_grad()
def grow(deep: Any, shallow: Any) -> None:
    """Gives `deep` the weights of `shallow`, whose depth divides its own, so that it computes the same function.

    Every layer of `shallow` is followed by copies of itself whose two output projections are zero, as in LLaMA Pro
    (arXiv 2401.02415, section 3.2). Training makes use of them.
    """
    times, rest = divmod(len(deep.model.layers), len(shallow.model.layers))
    widths = "vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"
    if rest or not times or any(getattr(deep.config, key) != getattr(shallow.config, key) for key in widths):
        raise UserError("--grow-from: name a target of the same widths, and of a half, a third ... of --layers")
    for i, layer in enumerate(deep.model.layers):
        layer.load_state_dict(shallow.model.layers[i // times].state_dict())
        if i % times:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
    deep.model.embed_tokens.load_state_dict(shallow.model.embed_tokens.state_dict())
    deep.model.norm.load_state_dict(shallow.model.norm.state_dict())


def training_functions() -> tuple[list[SourceFunction], list[SourceFunction]]:
    """(library functions of the training modules, functions of the test suite that do not test a held-out module)."""
    library, tests = {}, {}
    for function in library_functions(include_tests=True):
        parts = function.module.split(".")
        tested = {part.removeprefix("test_") for part in parts}
        if any(split_of(name) == "heldout" for name in tested | {parts[0]}):
            continue
        is_test = not {"test", "tests", "idle_test", "idlelib", "lib2to3", "turtledemo", "ensurepip"}.isdisjoint(parts)
        (tests if is_test else library)[function.id] = function
    return list(library.values()), list(tests.values())


def train_tokenizer(texts: list[str], vocab_size: int, more_special: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with the demo's chat template; ids 0-4 are the special tokens, others follow."""
    special = ["<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", *more_special]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<|pad|>", eos_token="<|end|>", model_max_length=1024
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def pack(documents: list[list[int]], pad_id: int) -> torch.Tensor:
    """Packs whole documents, first fit, into rows [R, ROW_TOKENS] padded with `pad_id`.

    Documents see earlier ones of their row; RoPE is relative, so their place in the row does not matter.
    """
    rows: list[list[int]] = []
    open_rows: list[list[int]] = []
    for document in documents:
        if len(document) > ROW_TOKENS:
            continue
        for row in open_rows:
            if len(row) + len(document) <= ROW_TOKENS:
                row.extend(document)
                break
        else:
            open_rows.append(list(document))
            rows.append(open_rows[-1])
            if len(open_rows) > 32:
                open_rows.remove(max(open_rows, key=len))
    return torch.tensor([row + [pad_id] * (ROW_TOKENS - len(row)) for row in rows])  # [R, ROW_TOKENS]


def is_short(conversation: dict) -> bool:
    """Whether the answer is as short as the demo's."""
    return len(conversation["messages"][1]["content"]) <= MAX_ANSWER_CHARACTERS


def render(tokenizer: Any, conversations: list[dict]) -> list[list[int]]:
    texts: list[Any] = [tokenizer.apply_chat_template(c["messages"], tokenize=False) for c in conversations]
    return tokenizer(texts, add_special_tokens=False)["input_ids"]


@torch.no_grad()
def heldout_loss(model: LlamaForCausalLM, tokenizer: Any, conversations: list[dict]) -> float:
    """Mean nats per answer token (stop token included) over the held-out conversations, the library's answers."""
    total, count = 0.0, 0
    assistant: Any = tokenizer.convert_tokens_to_ids("<|assistant|>")
    for ids in render(tokenizer, conversations):
        start = ids.index(assistant) + 1
        ids_BT = torch.tensor([ids])
        logits_TV = model(ids_BT).logits[0, start - 1 : -1].float()
        total += torch.nn.functional.cross_entropy(logits_TV, ids_BT[0, start:], reduction="sum").item()
        count += len(ids) - start
    return total / count


def is_looping(token_ids: list[int]) -> bool:
    """True where one 4-gram covers 40 % of an answer longer than 40 tokens."""
    if len(token_ids) <= 40:
        return False
    covered: dict[tuple[int, ...], set[int]] = {}
    for i in range(len(token_ids) - 3):
        covered.setdefault(tuple(token_ids[i : i + 4]), set()).update(range(i, i + 4))
    return max(len(positions) for positions in covered.values()) >= 0.4 * len(token_ids)


@torch.no_grad()
def greedy_answers(model: Any, tokenizer: Any, conversations: list[dict], max_new_tokens: int) -> list[list[int]]:
    """Greedy answers without their stop token; those that hit `max_new_tokens` have exactly that many tokens."""
    tokenizer.padding_side = "left"
    answers: list[list[int]] = []
    for start in tqdm(range(0, len(conversations), 32), desc="greedy answers", unit="batch"):
        prompts = [c["messages"][:1] for c in conversations[start : start + 32]]
        texts: list[Any] = [
            tokenizer.apply_chat_template(p, tokenize=False, add_generation_prompt=True) for p in prompts
        ]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        out = model.generate(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            max_new_tokens=max_new_tokens,
            do_sample=False,
        )
        for row in out[:, batch["input_ids"].shape[1] :].tolist():
            answers.append(row[: row.index(tokenizer.eos_token_id)] if tokenizer.eos_token_id in row else row)
    return answers


def learning_rate_scale(step: int, steps: int) -> float:
    """Warm-up over 2 %, constant, then linear to zero over the last DECAY_SHARE."""
    return min(1.0, (step + 1) / max(1, steps * 0.02), (steps - step) / (steps * DECAY_SHARE))


def measure(model: LlamaForCausalLM, tokenizer: Any, prompts: int) -> dict:
    """Held-out loss, and statistics of greedy answers to the first `prompts` held-out questions."""
    conversations = list(stdlib_conversations("heldout"))[:prompts]
    model.eval()
    answers = greedy_answers(model, tokenizer, conversations, max_new_tokens=256)
    return {
        "heldout_prompts": len(conversations),
        "heldout_loss_nats_per_answer_token": round(heldout_loss(model, tokenizer, conversations), 4),
        "looping_share": round(sum(map(is_looping, answers)) / len(answers), 4),
        "unfinished_share": round(sum(len(a) == 256 for a in answers) / len(answers), 4),
        "mean_answer_tokens": round(sum(map(len, answers)) / len(answers), 1),
    }


class Corpus:
    """Rendered documents: long ones for most of the training, those of the demo's length for the rest."""

    def __init__(self, tokenizer: Any, library: list[dict], tests: list[dict], repeats: int):
        self.pad_id: int = tokenizer.convert_tokens_to_ids("<|pad|>")  # type: ignore[assignment]
        ids = {"library": render(tokenizer, library), "tests": render(tokenizer, tests)}
        self.long = ids["library"] * repeats + ids["tests"]
        short_library = [i for i, c in zip(ids["library"], library, strict=True) if is_short(c)]
        short_tests = [i for i, c in zip(ids["tests"], tests, strict=True) if is_short(c)]
        self.short = short_library * repeats + short_tests

    def rows(self, documents: list[list[int]], count: int, order: random.Random) -> Iterator[torch.Tensor]:
        """Endless batches [count, ROW_TOKENS] of packed documents, shuffled anew for every pass."""
        waiting = torch.empty(0, ROW_TOKENS, dtype=torch.long)
        while True:
            shuffled = order.sample(documents, len(documents))
            packed = pack(shuffled, self.pad_id)
            waiting = torch.cat((waiting, packed[torch.randperm(len(packed))]))
            while len(waiting) >= count:
                yield waiting[:count]
                waiting = waiting[count:]


class Optimizers:
    """Muon for matrices, AdamW for embeddings and norms, at one learning rate."""

    def __init__(self, model: Any, learning_rate: float):
        self.model, self.learning_rate = model, learning_rate
        matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
        others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
        self.all = [
            torch.optim.Muon(matrices, lr=learning_rate, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    def step(self, loss: torch.Tensor, scale: float) -> None:
        """Backward and one step at `scale` of the learning rate."""
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        for optimizer in self.all:
            for group in optimizer.param_groups:
                group["lr"] = self.learning_rate * scale
            optimizer.step()
            optimizer.zero_grad()


def likelihood(model: Any, ids_BT: torch.Tensor, pad_id: int) -> torch.Tensor:
    """Mean nats per token of packed rows."""
    logits_BTV = model(ids_BT).logits
    labels_BT = ids_BT.masked_fill(ids_BT == pad_id, -100)
    return torch.nn.functional.cross_entropy(
        logits_BTV[:, :-1].flatten(0, 1).float(), labels_BT[:, 1:].flatten(), ignore_index=-100
    )


def learn(
    module: Any,
    loss_of: Callable[[int], torch.Tensor],
    steps: int,
    rate_scale: Callable[[int, int], float],
    args: argparse.Namespace,
    stage: str = "",
    look: Callable[[], dict] = dict,
) -> float:
    """Trains `module` for `steps` with checkpoints, its products in bfloat16.

    Args:
        loss_of: the loss of each step; a run that goes on begins with a later one.
        rate_scale: share of --learning-rate, by step and steps.
        stage: names a training of several.
        look: measurements for the log, at every checkpoint.

    Returns:
        seconds of the steps, those before a restart included.
    """
    checkpoint = args.out / f"{stage or 'checkpoint'}.pt"
    optimizers = Optimizers(module, args.learning_rate)
    step, seconds = 0, 0.0
    if checkpoint.exists():
        state = torch.load(checkpoint, weights_only=True)
        module.load_state_dict(state["module"])
        for optimizer, saved in zip(optimizers.all, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        step, seconds = state["step"], state["seconds"]
    module.train()
    progress = tqdm(total=steps, initial=step, desc=stage or None, unit="step", mininterval=10)
    while step < steps:
        began = time.perf_counter()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = loss_of(step)
        if not math.isfinite(loss.item()):
            where = f"step {step} of stage {stage}" if stage else f"step {step}"
            raise UserError(f"loss is {loss.item()} at {where}: lower --learning-rate")
        optimizers.step(loss, rate_scale(step, steps))
        step += 1
        seconds += time.perf_counter() - began
        progress.update()
        progress.set_postfix(loss=f"{loss.item():.3f}", refresh=False)
        line: dict[str, Any] = {"stage": stage} if stage else {}
        line |= {"step": step, "loss": round(loss.item(), 4), "seconds": round(seconds, 1)}
        if step % args.checkpoint_every == 0 or step == steps:
            saved = {"module": module.state_dict(), "optimizers": [o.state_dict() for o in optimizers.all]}
            with atomic_path(checkpoint) as partial:
                torch.save(saved | {"step": step, "seconds": seconds}, partial)
            line |= look()
        with (args.out / "training.log.jsonl").open("a") as file:
            file.write(json.dumps(line) + "\n")
    progress.close()
    return seconds


def write_facts(args: argparse.Namespace, facts: dict) -> None:
    """Writes and prints training.json: versions, arguments and `facts`."""
    arguments = {name: str(value) for name, value in vars(args).items() if name != "out"}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    text = json.dumps(versions | {"arguments": arguments} | facts, indent=2)
    (args.out / "training.json").write_text(text + "\n", encoding="utf-8")
    print(text)


def parsed(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """The command line, with the options that `learn` reads. Seeds torch and makes --out."""
    parser.add_argument("--out", type=Path, required=True, help="folder for the model directory")
    parser.add_argument("--learning-rate", type=float, default=3e-3)
    parser.add_argument("--checkpoint-every", type=int, default=100, help="steps")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    return args


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1600, help="optimiser steps of --rows-per-step rows")
    parser.add_argument("--rows-per-step", type=int, default=16, help=f"rows of {ROW_TOKENS} tokens in one step")
    parser.add_argument("--vocab-size", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--hidden-size", type=int, default=256)
    parser.add_argument("--intermediate-size", type=int, default=704)
    parser.add_argument("--grow-from", type=Path, help="trained target of a half or third, ... of the layers")
    parser.add_argument(
        "--start-share",
        type=float,
        default=0.0,
        help="of the weights before training in the result, a mean of both (WiSE-FT, arXiv 2109.01903)",
    )
    parser.add_argument(
        "--library-repeats", type=int, default=2, help="passes over the library per pass over its tests"
    )
    parser.add_argument("--measure-prompts", type=int, default=400, help="held-out questions asked at the end")
    args = parsed(parser)

    if args.grow_from and not (args.grow_from / "config.json").exists():
        raise UserError(f"--grow-from: no target in {args.grow_from}")
    library, tests = training_functions()
    long = LONG_ANSWER_CHARACTERS
    library_documents = [c for f in library for kind in KINDS if (c := conversation_of(f, kind, long))]
    test_documents = [c for i, f in enumerate(tests) if (c := conversation_of(f, KINDS[i % len(KINDS)], long))]
    if args.grow_from or (args.out / "tokenizer.json").exists():
        tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(args.grow_from or args.out)
        tokenizer.save_pretrained(args.out)
    else:
        texts = [m["content"] for c in library_documents + test_documents for m in c["messages"]]
        tokenizer = train_tokenizer(texts, args.vocab_size)
        tokenizer.save_pretrained(args.out)
    corpus = Corpus(tokenizer, library_documents, test_documents, args.library_repeats)
    shape = args.vocab_size, args.layers, args.hidden_size, args.intermediate_size
    config = llama_config(*shape, corpus.pad_id, tokenizer.eos_token_id)
    model: Any = LlamaForCausalLM(config)
    if args.grow_from:
        grow(model, LlamaForCausalLM.from_pretrained(args.grow_from, dtype=torch.float32))
    pass_tokens = sum(map(len, corpus.long))
    seen = args.steps * args.rows_per_step * ROW_TOKENS
    parameters = sum(p.numel() for p in model.parameters())
    print(
        f"{parameters / 1e6:.2f} M parameters; {len(library_documents)} library and {len(test_documents)} test "
        f"documents, {pass_tokens / 1e6:.2f} M tokens a pass; {seen / 1e6:.1f} M to be seen"
    )
    streams: list[Iterator[torch.Tensor]] = []  # of long documents, then of short ones
    decay_begins = int(args.steps * (1 - DECAY_SHARE))

    def loss_of(step: int) -> torch.Tensor:
        if not streams:  # a run that goes on has an order of its own
            order = random.Random(args.seed + step)
            streams.extend(corpus.rows(each, args.rows_per_step, order) for each in (corpus.long, corpus.short))
        return likelihood(model, next(streams[step >= decay_begins]), corpus.pad_id)

    start = [weight.detach().clone() for weight in model.parameters()]
    seconds = learn(model, loss_of, args.steps, learning_rate_scale, args)
    for weight, before in zip(model.parameters(), start, strict=True):
        weight.data.lerp_(before, args.start_share)

    model.bfloat16()
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.generation_config.pad_token_id = corpus.pad_id
    model.save_pretrained(args.out)
    facts = {
        "parameters": parameters,
        "library_documents": len(library_documents),
        "test_documents": len(test_documents),
        "tokens_per_pass": pass_tokens,
        "tokens_seen": seen,
        "training_minutes": round(seconds / 60, 1),
        **measure(model.float(), tokenizer, args.measure_prompts),
    }
    write_facts(args, facts)


if __name__ == "__main__":
    run(main)
