"""Replay against decoding: seconds, and whether the rounds are the same, over the same answers in one run.

    python tools/bench/replay.py                                  # the demo pair; `make demo-full` trains the drafter
    python tools/bench/replay.py --answers 100 --batch-sizes 8 32 128 --threads 2

Answers are decoded plainly once, untimed. Then, for each tree, decoding and replay take turns, several times.
Everything counts: prefill on the one side; the target's pass over prompts and answers, the check of whose answers they
are, and batches that run empty on the other. Ratios are of wall time and of the time that the processor worked for us:
where a machine is shared, the latter moves less.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from greedy import greedy_answer

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.decoding.speculator import Speculator
from draftsmith.eval.measurement.benchmarks import load_questions
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.eval.replay.replay import Agreement, replay_all
from draftsmith.models.chat import render_prompt
from draftsmith.models.sampling import GREEDY
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.prompts.prompt_reader import Rejects
from draftsmith.recipes.sections.eval import TreeSection
from draftsmith.recipes.sections.target import TargetSection

ROOT = Path(__file__).parents[2]
TREES = {
    "chain of 5": TreeSection(policy="chain", nodes=6),
    "tree of 60": TreeSection(policy="eagle2", nodes=60),
    "static tree": TreeSection(policy="static"),
    "ddd": TreeSection(policy="ddd"),
    "svip": TreeSection(policy="svip"),
}


def timed(work: Callable[[], list[Generation]]) -> tuple[tuple[float, float], list[Generation]]:
    """((seconds passed, seconds of the processor), what came out)."""
    start = time.perf_counter(), time.process_time()
    result = work()
    return (time.perf_counter() - start[0], time.process_time() - start[1]), result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", default=str(ROOT / "recipes/demo_target"))
    parser.add_argument("--drafter", default=str(ROOT / "runs/demo-full/drafter"))
    parser.add_argument("--prompts", default=str(ROOT / "recipes/demo_prompts/stdlib-heldout.jsonl.gz"))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--answers", type=int, default=64)
    parser.add_argument("--new-tokens", type=int, default=256, help="most tokens of an answer")
    parser.add_argument("--trees", nargs="*", choices=list(TREES), default=["chain of 5", "tree of 60"])
    parser.add_argument("--batch-sizes", type=int, nargs="*", default=[32], help="of replay")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    section = TargetSection(model=args.target, dtype="float32", device=args.device)
    speculator = Speculator.load(section, args.drafter)
    target, stops = speculator.target, speculator.stop_ids
    questions = load_questions(args.prompts, Rejects(), args.answers, first_turns_only=True)
    prompts = [render_prompt(speculator.tokenizer, list(question.turns[0])) for question in questions]
    answers = [
        RecordedAnswer(prompt, greedy_answer(target, None, prompt, stops, args.new_tokens).token_ids, GREEDY)
        for prompt in prompts
    ]
    tokens = sum(len(answer.tokens) for answer in answers)
    prompt_tokens = sum(map(len, prompts))
    print(f"{len(answers)} answers, {tokens:,} tokens, {prompt_tokens:,} of prompts; {args.threads} threads\n")
    for name in args.trees:
        proposer = speculator.proposer(TREES[name])
        decoding: list[tuple[float, float]] = []
        replaying: dict[int, list[tuple[float, float]]] = {size: [] for size in args.batch_sizes}
        decoded: list[Generation] = []
        replayed: dict[int, list[Generation]] = {}
        for _ in range(args.repeats):
            seconds, decoded = timed(
                lambda proposer=proposer: [greedy_answer(target, proposer, p, stops, args.new_tokens) for p in prompts]
            )
            decoding.append(seconds)
            for size in args.batch_sizes:
                seconds, replayed[size] = timed(
                    lambda proposer=proposer, size=size: replay_all(
                        target, {"": proposer}, answers, size, Agreement.of(target)
                    )[""]
                )
                replaying[size].append(seconds)
        for size in args.batch_sizes:
            ratios, busy = (
                [a[clock] / b[clock] for a, b in zip(decoding, replaying[size], strict=True)] for clock in (0, 1)
            )
            differ = [
                i
                for i, (mine, theirs) in enumerate(zip(replayed[size], decoded, strict=True))
                if (mine.accepted_per_round, mine.tree_nodes, mine.draft_calls, mine.last_round_cut)
                != (theirs.accepted_per_round, theirs.tree_nodes, theirs.draft_calls, theirs.last_round_cut)
            ]
            rounds = sum(g.rounds for g in replayed[size])
            passed = [statistics.median(wall for wall, _ in times) for times in (decoding, replaying[size])]
            print(
                f"{name:12} batch {size:4}  tau {(tokens - len(answers)) / rounds:.3f}  decode {passed[0]:6.2f} s  "
                f"replay {passed[1]:5.2f} s  ratio {statistics.median(ratios):4.1f} "
                f"[{min(ratios):.1f}, {max(ratios):.1f}]  of the processor {statistics.median(busy):4.1f}  "
                f"identical {len(answers) - len(differ)} of {len(answers)}" + (f", not: {differ}" if differ else ""),
                flush=True,
            )


if __name__ == "__main__":
    run(main)
