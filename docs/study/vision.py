"""Compare drafters for the vision demo's target: with and without ViSpec's adaptor, three seeds each.

    make demo-vision                                     # first: the target's answers, everyone's training data
    python -m docs.study.vision --plan                   # cells that are not done
    python -m docs.study.vision --jobs 2                 # trains and measures them, then prints docs/vision.md's table
    python -m docs.study.vision --only 'eagle3-*'

All drafters train as recipes/demo-vision.yaml says (order, steps, batch, schedule). They learn from the same answers,
whose states are captured once; those of SHORT learn from answers to questions about the same pictures. Acceptance is
replayed along the target's answers about ANSWERS held-out pictures. Those of the first seed also decode a few, one
drafter after the other, to be timed. A cell takes some MINUTES of a core and ends as a line of docs/study/vision.jsonl.
Cells with a line are done.
"""

import argparse
import fnmatch
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from draftsmith.recipes.command.cli import run
from draftsmith.recipes.demo_vision.descriptions import questions_about
from draftsmith.recipes.demo_vision.prompts import scene_conversations
from draftsmith.recipes.demo_vision.scenes import scene_at
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "recipes/demo-vision.yaml"
RESULTS = ROOT / "docs/study/vision.jsonl"
SEEDS = (0, 1, 2)
PICTURES = 2000  # asked about in training
ANSWERS = 160  # replayed
DECODED = 12
MINUTES = 4
TEMPERATURES = (0, 1)
# The published tree has too few draft calls to tell drafters apart that are right for more than four tokens.
LARGE = "{policy: eagle2, nodes: 60, draft_calls: 8, top_k: 10}"
PUBLISHED = "tree of 30"
_ALSO = f"[{{name: {PUBLISHED}, tree: {{policy: eagle2, nodes: 30, draft_calls: 4, top_k: 8}}}}]"
_LAYERS = "capture_layers: [0, 3, 5]"  # EAGLE-3's usual ones collide in a target of six layers
# What kind eagle has otherwise than vispec (EAGLE-3's kinds are the same with and without adaptor).
_LOSSES = ("train.ttt_steps=2", "train.step_weight=1", "train.feature_loss=0", "train.detach_features=false")
# Of each arm: its name in the table, and the overrides of the recipe.
ARMS: dict[str, tuple[str, tuple[str, ...]]] = {
    "eagle-blind": (
        "EAGLE-2's base, without adaptor: sees no picture",
        ("drafter.compressed_tokens=0", "drafter.global_vector=false"),
    ),
    "eagle-all": ("EAGLE-2's base, all 255 picture columns", ("drafter={kind: eagle}", *_LOSSES)),
    "eagle-q1": ("ViSpec: 1 compressed token, global vector", ()),
    "eagle-q4": ("ViSpec, 4 compressed tokens", ("drafter.compressed_tokens=4",)),
    "eagle-q16": ("ViSpec, 16 compressed tokens", ("drafter.compressed_tokens=16",)),
    "eagle-no-global": ("ViSpec without global vector", ("drafter.global_vector=false",)),
    "eagle-passes": ("ViSpec with the published second pass", ("train.unroll=passes",)),
    "eagle-total-variation": (
        "ViSpec, total variation and ranking loss as published",
        ("train.token_objective=total_variation", "train.token_loss=10", "train.rank_loss=0.05"),
    ),
    "eagle-no-token": ("ViSpec without compressed token", ("drafter.compressed_tokens=0",)),
    "eagle3-blind": (
        "EAGLE-3's base, without adaptor",
        (f"drafter={{kind: vispec, base: eagle3, compressed_tokens: 0, global_vector: false, {_LAYERS}}}",),
    ),
    "eagle3-all": ("EAGLE-3's base, all 255 picture columns", (f"drafter={{kind: eagle3, {_LAYERS}}}",)),
    "eagle3-q1": (
        "ViSpec over EAGLE-3: 1 compressed token, global vector",
        (f"drafter={{kind: vispec, base: eagle3, {_LAYERS}}}",),
    ),
}
# The same drafters, taught by short answers.
SHORT = {f"short-{name.removeprefix('eagle-')}": name for name in ("eagle-blind", "eagle-all", "eagle-q1")}
ARMS |= {name: (f"{ARMS[same][0]}; short answers", ARMS[same][1]) for name, same in SHORT.items()}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--plan", action="store_true", help="print what would be done, and stop")
    parser.add_argument("--only", default="*", metavar="PATTERN", help="arms with such names")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; each takes a core")
    parser.add_argument("--out", type=Path, default=Path("runs/vision-study"), help="folder of drafters and logs")
    parser.add_argument("--demo", type=Path, default=Path("runs/demo-vision"), help="what `make demo-vision` wrote")
    options = parser.parse_args()
    arms = fnmatch.filter(ARMS, options.only)
    if not arms:
        raise UserError(f"--only: no arm is called {options.only}; there are {', '.join(ARMS)}")
    if options.jobs < 1:
        raise UserError(f"--jobs: {options.jobs} cells at a time; give 1 or more")
    done = {(line["arm"], line["seed"]) for line in lines() if "seed" in line}
    left = [(arm, seed) for seed in SEEDS for arm in arms if (arm, seed) not in done]
    if options.plan:
        print("\n".join(f"{arm}, seed {seed}" for arm, seed in left))
        hours = len(left) * MINUTES / 60
        print(f"{len(left)} of {len(SEEDS) * len(arms)} cells to do, about {hours:.1f} hours of a core")
        return
    for name in ("conversations.jsonl", "draft_vocab.safetensors"):
        if left and not (ROOT / options.demo / name).exists():
            raise UserError(f"--demo: {options.demo / name} does not exist; `make demo-vision` writes it")
    if any(arm in SHORT for arm, _ in left):
        ask_questions(ROOT / options.out / "short")
    for base in sorted({states_of(arm) for arm, _ in left}):
        capture(options.out, options.demo, base)
    for temperature in TEMPERATURES if left else ():
        drawn = f"data.max_prompts={ANSWERS}", f"data.generator.temperature={temperature}"
        regenerate(ROOT / options.out / f"answers{temperature}", "scenes:heldout", *drawn)
    with ThreadPoolExecutor(options.jobs) as workers:
        problems = [line for line in workers.map(lambda cell: make(options.out, options.demo, *cell), left) if line]
    timed = {line["arm"] for line in lines() if "decoded" in line}
    for arm in arms:
        if arm not in timed and (ROOT / options.out / f"{arm}-{SEEDS[0]}" / "drafter").exists():
            decode(options.out, options.demo, arm)
    print(table(lines(), arms))
    if problems:
        raise UserError(problems)


def lines() -> list[dict[str, Any]]:
    """What was measured: a line for each cell, and one for each timing."""
    return [json.loads(line) for line in RESULTS.read_text().splitlines()] if RESULTS.exists() else []


def ask_questions(folder: Path, *overrides: str) -> None:
    """Writes the target's answers to a question about each training picture. Raises UserError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = []
    for index, shown in zip(range(PICTURES), scene_conversations("train"), strict=False):
        question, _ = next(questions_about(scene_at("train", index), random.Random(index)))
        [message] = shown["messages"]
        content = [message["content"][0], {"type": "text", "text": question}]
        asked.append({"id": shown["id"], "messages": [message | {"content": content}]})
    atomic_write(folder / "questions.jsonl", "".join(json.dumps(each) + "\n" for each in asked))
    regenerate(folder, str(folder / "questions.jsonl"), *overrides)


def states_of(arm: str) -> str:
    """The states that an arm learns from: of the short answers, or of the long ones, EAGLE-2's or EAGLE-3's."""
    return "short" if arm in SHORT else arm.partition("-")[0]


def capture(out: Path, demo: Path, states: str) -> None:
    """Captures all columns, so that every arm can read them. Raises UserError if that fails."""
    folder = ROOT / out / f"states-{states}"
    folder.mkdir(parents=True, exist_ok=True)
    kind = f"{{kind: eagle3, {_LAYERS}}}" if states == "eagle3" else "{kind: eagle}"
    words = [f"output_dir={folder}", f"drafter={kind}", *_read(out, demo, states)]
    draftsmith(["capture", RECIPE, *words], folder / "log.txt")


def regenerate(folder: Path, prompts: str, *overrides: str) -> None:
    """Writes the target's own answers to these prompts into the folder. Raises UserError if that fails."""
    folder.mkdir(parents=True, exist_ok=True)
    places = [f"output_dir={folder}", f"data.conversations={folder / 'conversations.jsonl'}", f"data.prompts={prompts}"]
    draftsmith(["regenerate", RECIPE, *places, *overrides], folder / "log.txt")


def decode(out: Path, demo: Path, arm: str) -> None:
    """Times a drafter of the first seed. Raises UserError if that fails."""
    folder = out / f"{arm}-{SEEDS[0]}"
    words = [*_common(out, demo, arm, SEEDS[0]), f"eval.max_prompts={DECODED}", f"eval.out={folder / 'decoded'}"]
    draftsmith(["evaluate", *words], ROOT / folder / "log.txt")
    append({"arm": arm, "decoded": _contenders(folder / "decoded")})


def append(line: dict[str, Any]) -> None:
    line["date"] = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    with RESULTS.open("a") as file:
        file.write(json.dumps(line) + "\n")


def _read(out: Path, demo: Path, states: str) -> list[str]:
    answers = out / "short" if states == "short" else demo
    return [
        f"data.conversations={answers / 'conversations.jsonl'}",
        f"data.states={out / f'states-{states}' / 'states'}",
        "data.capture.dtype=float32",
    ]


def draftsmith(words: list[str], log: Path) -> None:
    """Runs a command on one core. Raises UserError if it fails."""
    command = [str(Path(sys.executable).with_name("draftsmith")), *words]
    with log.open("ab") as file:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run(command, cwd=ROOT, stdout=file, stderr=file, env=environment, check=False)
    if ended.returncode:
        raise UserError(f"{words[0]} ended with {ended.returncode}; see {log}")


def _common(out: Path, demo: Path, arm: str, seed: int) -> list[str]:
    folder = f"output_dir={out / f'{arm}-{seed}'}"
    trees = f"eval.tree={LARGE}", f"eval.also={_ALSO}"
    return [RECIPE, folder, *_read(out, demo, states_of(arm)), f"train.seed={seed}", *trees, *ARMS[arm][1]]


def commands(out: Path, demo: Path, arm: str, seed: int) -> list[list[str]]:
    """Arguments of `draftsmith`: a training, and a replay for each temperature."""
    common = _common(out, demo, arm, seed)
    replays = [
        [
            *("evaluate", *common, "eval.mode=replay", f"eval.temperature={each}", f"eval.max_prompts={ANSWERS}"),
            *(
                f"eval.answers={out / f'answers{each}' / 'conversations.jsonl'}",
                f"eval.out={_measured(out, arm, seed, each)}",
            ),
        ]
        for each in TEMPERATURES
    ]
    return [["train", *common], *replays]


def make(out: Path, demo: Path, arm: str, seed: int) -> str:
    """Trains and measures a cell. Returns what failed, or nothing."""
    folder = ROOT / out / f"{arm}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / demo / "draft_vocab.safetensors", folder)  # all tokens, so every arm's is the same
    replayed = [ROOT / _measured(out, arm, seed, each) / "replay" for each in TEMPERATURES]
    done = [folder / "drafter", *(each / "acceptance.json" for each in replayed)]
    for command, result in zip(commands(out, demo, arm, seed), done, strict=True):
        if result.exists():
            continue
        began = time.monotonic()
        try:
            draftsmith(command, folder / "log.txt")
        except UserError as error:
            return f"{arm}, seed {seed}: {error}"
        if command[0] == "train":
            atomic_write(folder / "seconds.json", json.dumps(time.monotonic() - began))
    seconds = round(json.loads((folder / "seconds.json").read_text()), 1)
    found = {f"temperature {t}": _contenders(each) for t, each in zip(TEMPERATURES, replayed, strict=True)}
    append({"arm": arm, "seed": seed, "training_seconds": seconds} | found)
    print(f"{arm}, seed {seed}: done", flush=True)
    return ""


def table(measured: list[dict[str, Any]], arms: list[str]) -> str:
    """docs/vision.md's table: means over the seeds that are done, each seed's value, and the time of a round's draft
    calls where it was measured."""
    rows = [
        "| drafter | tau, greedy | tau, temperature 1 | tau of the tree of 30, greedy | ms of drafting |",
        "|---|---|---|---|---|",
    ]
    decoded = {line["arm"]: line["decoded"]["main"] for line in measured if "decoded" in line}
    for arm in arms:
        found = sorted(
            (line for line in measured if line["arm"] == arm and "seed" in line), key=lambda line: line["seed"]
        )
        if found:
            greedy, sampled = ([line[f"temperature {each}"] for line in found] for each in TEMPERATURES)
            timed = decoded.get(arm)
            drafting = (
                f"{timed['draft_milliseconds_per_call'] * timed['draft_calls_per_round']:.1f}" if timed else "\u2013"
            )
            rows.append(
                f"| {ARMS[arm][0]} | {_mean([each['main']['tau'] for each in greedy])} | "
                f"{_mean([each['main']['tau'] for each in sampled])} | "
                f"{_mean([each[PUBLISHED]['tau'] for each in greedy])} | {drafting} |"
            )
    return "\n".join(rows)


def _mean(values: list[float]) -> str:
    each = ", ".join(f"{value:.2f}" for value in values)
    return each if len(values) == 1 else f"{statistics.mean(values):.2f} ({each})"


def _measured(out: Path, arm: str, seed: int, temperature: int) -> Path:
    return out / f"{arm}-{seed}" / f"temperature{temperature}"


def _contenders(folder: Path) -> dict[str, Any]:
    """The table's numbers of its two trees."""
    content = json.loads((ROOT / folder / "acceptance.json").read_bytes())
    found = content["contenders"]
    kept = (
        *("tau", "tau_interval", "accepted_per_round", "rounds", "new_tokens", "draft_calls_per_round"),
        *("draft_milliseconds_per_call", "verify_milliseconds_per_round", "speedup", "matches_target"),
    )
    both = {"main": found[content["contender"]], PUBLISHED: found[PUBLISHED]}
    return {name: {key: numbers.get(key) for key in kept} for name, numbers in both.items()}


if __name__ == "__main__":
    run(main)
