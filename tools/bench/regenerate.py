"""Regeneration by the decoding loop against transformers' `generate` and `generate_batch`, and against reading what it
wrote as capture does, alternating in one run.

    python tools/bench/regenerate.py                 # the demo's target and prompts, greedy, float32
    python tools/bench/regenerate.py --prompts more.jsonl --target my-target        # as data.prompts names them
    python tools/bench/regenerate.py --drafter runs/demo/drafter --batch-size 1   # and drafted

Prints tokens per second of each round and each way: the answers', and with the prompts', which reading needs, too. All
answer the same prompts with the same tokens.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig

from draftsmith.data_gen.answers.generators import GenerationSettings, Writer
from draftsmith.models.chat import render_prompt
from draftsmith.models.sampling import GREEDY
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.target_session import batches_by_length
from draftsmith.models.turn_ends import stop_ids
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.prompt_reader import questions, read_conversations
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.sections.data import CaptureSection
from draftsmith.recipes.sections.target import TargetSection

ROOT = Path(__file__).parents[2]
ANSWERS: dict[int, list[int]] = {}  # the loop's


def settings_of(args: argparse.Namespace, stops: tuple[int, ...]) -> GenerationSettings:
    return GenerationSettings(args.max_new_tokens, 1024, stops, GREEDY, batch_size=args.batch_size)


def written(
    write: Writer, model, prompts: list[list[int]], args: argparse.Namespace, stops: tuple[int, ...]
) -> Iterator[int]:
    """By the loop; with a drafter, it has loaded the target once more."""
    for answer in write(iter(list(enumerate(prompts)))):
        ANSWERS[answer.key] = answer.token_ids
        yield len(answer.token_ids)


def read(target: Target, model, prompts: list[list[int]], args: argparse.Namespace, stops) -> Iterator[int]:
    """By capture's passes over prompts and answers."""
    rows = [torch.tensor([*prompt, *ANSWERS[key]]) for key, prompt in enumerate(prompts)]
    for batch in batches_by_length([len(row) for row in rows], CaptureSection().batch_tokens):
        target.states(pad_sequence([rows[i] for i in batch], batch_first=True))
        yield from (len(ANSWERS[i]) for i in batch)


def padded(model, prompts: list[list[int]], args: argparse.Namespace, stops: tuple[int, ...]) -> Iterator[int]:
    """`generate` over left-padded batches of prompts sorted by length."""
    ordered = sorted(prompts, key=len)
    for start in range(0, len(ordered), args.batch_size):
        group = ordered[start : start + args.batch_size]
        width = max(map(len, group))
        ids = torch.tensor([[0] * (width - len(p)) + p for p in group])
        mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in group])
        out = model.generate(input_ids=ids, attention_mask=mask, do_sample=False, max_new_tokens=args.max_new_tokens)
        for row in out[:, width:].tolist():
            yield next((i + 1 for i, token in enumerate(row) if token in stops), len(row))


def continuous(model, prompts: list[list[int]], args: argparse.Namespace, stops: tuple[int, ...]) -> Iterator[int]:
    """transformers' continuous batching."""
    config = GenerationConfig(
        do_sample=False, max_new_tokens=args.max_new_tokens, eos_token_id=list(stops), pad_token_id=0
    )
    for output in model.generate_batch(prompts, generation_config=config).values():
        yield len(output.generated_tokens)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", default=str(ROOT / "recipes/demo_prompts/stdlib-heldout.jsonl.gz"))
    parser.add_argument("--count", type=int, default=128, help="of the prompts, at most")
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--target", default=str(ROOT / "recipes/demo_target"))
    parser.add_argument("--drafter", help="a drafter of the target")
    parser.add_argument("--draft-tokens", type=int, nargs="+", default=[3], help="each number is a way of its own")
    parser.add_argument("--continuous", action="store_true", help="measure generate_batch too: slow on CPUs")
    args = parser.parse_args()
    section = TargetSection(model=args.target, dtype="float32")
    model, tokenizer = TargetFiles(section).load_model(), TargetFiles(section).tokenizer
    stops = stop_ids(tokenizer)
    asked = read_conversations(args.prompts, Rejects(), args.count)
    prompts = [list(render_prompt(tokenizer, next(questions(each.messages)))) for each in asked]
    target = Target(model, capture_layers=(0,))
    ways: dict[str, Callable] = {"loop": partial(written, Writer(target, settings_of(args, stops))), "padded": padded}
    ways["read"] = partial(read, target)
    if args.continuous:
        ways["continuous"] = continuous
    for count in args.draft_tokens if args.drafter else ():
        own = [f"data.generator.drafter={args.drafter}", f"target.model={args.target}"]
        recipe = load_recipe(ROOT / "recipes/demo.yaml", own)
        writer = Writer.of(recipe, TargetFiles(recipe.target), settings_of(args, stops), count)
        ways[f"drafted, {count}"] = partial(written, writer)
    for round_number in range(args.rounds):
        for name, way in ways.items():
            began = time.perf_counter()
            tokens = sum(way(model, prompts, args, stops))
            seconds = time.perf_counter() - began
            rate, all_rate = tokens / seconds, (tokens + sum(map(len, prompts))) / seconds
            print(
                f"round {round_number}  {name:<12} {tokens} tokens, {rate:.0f} a second, with prompts {all_rate:.0f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
