"""Compare drafters for the vision demo's target: with and without ViSpec's adaptor, three seeds each.

    make demo-vision                                     # first: the target's answers, everyone's training data
    python -m docs.study.vision --plan                   # cells that are not done
    python -m docs.study.vision --jobs 2                 # trains and measures them, then prints docs/vision.md's table
    python -m docs.study.vision --only 'eagle3-*'

All drafters train as recipes/demo-vision.yaml says (the same answers, order, steps, batch and schedule) and answer its
held-out questions. A cell takes about 6 minutes of a core. Stopped and started again, the study goes on.
"""

import argparse
import fnmatch
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from draftsmith.recipes.command.cli import run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write

ROOT = Path(__file__).resolve().parents[2]
RECIPE = "recipes/demo-vision.yaml"
SEEDS = (0, 1, 2)
TEMPERATURES = (0, 1)
# The published tree has too few draft calls to tell drafters apart that are right for more than four tokens.
LARGE = "{policy: eagle2, nodes: 60, draft_calls: 8, top_k: 10}"
PUBLISHED = "tree of 30"
_ALSO = f"[{{name: {PUBLISHED}, tree: {{policy: eagle2, nodes: 30, draft_calls: 4, top_k: 8}}}}]"
_LAYERS = "capture_layers: [0, 3, 5]"  # EAGLE-3's usual ones collide in a target of six layers
# ViSpec's losses for a drafter without its adaptor (those of EAGLE-3's kinds are the same with and without).
_LOSSES = (
    *("train.ttt_steps=2", "train.step_weight=1", "train.token_objective=total_variation", "train.token_loss=20"),
    *("train.rank_loss=0.1", "train.feature_loss=0", "train.detach_features=false"),
)
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
    cells = [(arm, seed) for seed in SEEDS for arm in arms]
    left = [cell for cell in cells if not all(_measured(options.out, *cell, t).exists() for t in TEMPERATURES)]
    if options.plan:
        print("\n".join(f"{arm}, seed {seed}" for arm, seed in left))
        print(f"{len(left)} of {len(cells)} cells to do, about {len(left) * 6 / 60:.1f} hours of a core")
        return
    for name in ("conversations.jsonl", "draft_vocab.safetensors"):
        if left and not (ROOT / options.demo / name).exists():
            raise UserError(f"--demo: {options.demo / name} does not exist; `make demo-vision` writes it")
    with ThreadPoolExecutor(options.jobs) as workers:
        failed = [line for line in workers.map(lambda cell: make(options.out, options.demo, *cell), left) if line]
    print(table(options.out, arms))
    if failed:
        raise UserError(failed)


def commands(out: Path, demo: Path, arm: str, seed: int) -> list[list[str]]:
    """Arguments of `draftsmith`: a training, and an evaluation for each temperature."""
    common = [
        *(RECIPE, f"output_dir={out / f'{arm}-{seed}'}", f"data.conversations={demo / 'conversations.jsonl'}"),
        *(f"train.seed={seed}", f"eval.tree={LARGE}", f"eval.also={_ALSO}", *ARMS[arm][1]),
    ]
    evaluations = [
        ["evaluate", *common, f"eval.temperature={each}", f"eval.out={_measured(out, arm, seed, each).parent}"]
        for each in TEMPERATURES
    ]
    return [["train", *common], *evaluations]


def make(out: Path, demo: Path, arm: str, seed: int) -> str:
    """Trains and measures a cell. Returns what failed, or nothing."""
    folder = ROOT / out / f"{arm}-{seed}"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / demo / "draft_vocab.safetensors", folder)  # all tokens, so every arm's is the same
    done = [folder / "drafter", *(ROOT / _measured(out, arm, seed, each) for each in TEMPERATURES)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    for command, result in zip(commands(out, demo, arm, seed), done, strict=True):
        if result.exists():
            continue
        began = time.monotonic()
        with (folder / "log.txt").open("ab") as log:
            whole = [str(Path(sys.executable).with_name("draftsmith")), *command]
            code = subprocess.run(whole, cwd=ROOT, stdout=log, stderr=log, env=environment, check=False).returncode
        if code:
            return f"{arm}, seed {seed}: {command[0]} ended with {code}; see {folder / 'log.txt'}"
        if command[0] == "train":
            atomic_write(folder / "seconds.json", json.dumps(time.monotonic() - began))
    print(f"{arm}, seed {seed}: done", flush=True)
    return ""


def table(out: Path, arms: list[str]) -> str:
    """docs/vision.md's table, of the cells that are done. Means over seeds, and each seed's value."""
    rows = [
        "| drafter | tau, greedy | tau, temperature 1 | tau of the tree of 30, greedy | ms of a draft call | minutes |",
        "|---|---|---|---|---|---|",
    ]
    for arm in arms:
        greedy, sampled = ([_contenders(out, arm, seed, each) for seed in SEEDS] for each in TEMPERATURES)
        seconds = [ROOT / out / f"{arm}-{seed}" / "seconds.json" for seed in SEEDS]
        if all(greedy) and all(sampled):
            rows.append(
                f"| {ARMS[arm][0]} | {_mean([each['main']['tau'] for each in greedy])} | "
                f"{_mean([each['main']['tau'] for each in sampled])} | "
                f"{_mean([each[PUBLISHED]['tau'] for each in greedy])} | "
                f"{statistics.median(each['main']['draft_milliseconds_per_call'] for each in greedy):.2f} | "
                f"{statistics.median(json.loads(path.read_text()) for path in seconds) / 60:.1f} |"
            )
    return "\n".join(rows)


def _mean(values: list[float]) -> str:
    return f"{statistics.mean(values):.2f} ({', '.join(f'{value:.2f}' for value in values)})"


def _measured(out: Path, arm: str, seed: int, temperature: int) -> Path:
    return out / f"{arm}-{seed}" / f"eval{temperature}" / "acceptance.json"


def _contenders(out: Path, arm: str, seed: int, temperature: int) -> dict[str, Any]:
    """The table's two trees; {}: not measured yet."""
    path = ROOT / _measured(out, arm, seed, temperature)
    if not path.exists():
        return {}
    content = json.loads(path.read_bytes())
    found = content["contenders"]
    return {"main": found[content["contender"]], PUBLISHED: found[PUBLISHED]}


if __name__ == "__main__":
    run(main)
