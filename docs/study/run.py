"""Make the cells of a study that are not done: small experiments with `draftsmith`, listed in a YAML table.

    python -m docs.study.run                              # all of docs/study/cells.yaml without a line; or: make study
    python -m docs.study.run --only 'drafter/eagle*' 'fr-spec/*'
    python -m docs.study.run --plan                       # list them
    python -m docs.study.run docs/study/vision.yaml       # another table
    python -m docs.study.run --set runs=runs/again/cells results=runs/again/results.jsonl    # everything anew
    python -m docs.study.tables                           # tables of the lines so far

A cell runs the commands of the table in a folder of its own and appends what they measured, as one JSON line, to the
table's `results`. A cell with a line is done. It runs again, without another line, where a cell reads its files (its
folder stands in that cell's commands) and they are not there. A stopped study goes on: the commands resume by
themselves. After a cell fails, the others still run.
"""

import argparse
import fnmatch
import itertools
import json
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml
from safetensors.numpy import load_file

from draftsmith.recipes.command.cli import run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write

ROOT = Path(__file__).resolve().parents[2]
TABLE = "docs/study/cells.yaml"
TREE = "tree of 60"  # what lines call the main contender
PROGRAMS = {"draftsmith": ["-m", "draftsmith.recipes.command.console"], "python": []}


class Table:
    """A table of cells.

    Attributes:
        results: the file of lines.
        runs: the folder of the cells' folders.
        arms: by name; `name` is what tables call it.
        cells: {name: commands, as lists of words}.
    """

    def __init__(self, path: Path, replaced: Sequence[str] = ()):
        """Raises UserError if there is no such table, for unknown words, and for a word without a value.

        Args:
            replaced: "word=value" for some of the table's words, and for `results`.
        """
        if not (ROOT / path).is_file():
            raise UserError(f"{path}: no such table; docs/study has cells.yaml, smollm2.yaml and vision.yaml")
        content = yaml.safe_load((ROOT / path).read_text(encoding="utf-8"))
        words = content["words"] | {"results": content["results"]}
        given = {word: value for word, _, value in (each.partition("=") for each in replaced)}
        if unknown := given.keys() - words.keys():
            raise UserError(f"--set: {path} has no word {', '.join(unknown)}; there are {', '.join(words)}")
        words |= given
        self.results, self.runs = ROOT / words["results"], Path(words["runs"])
        self.arms: dict[str, dict[str, Any]] = content.get("arms", {})
        self.cells: dict[str, list[list[str]]] = {}
        self.unlisted: set[str] = set()  # cells without a line, made for others
        for group in content["cells"]:
            for chosen in itertools.product(*group.get("each", {}).values()):
                own = {key: value for key, value in group.items() if key not in ("cell", "commands", "each")}
                for key, value in zip(group.get("each", {}), chosen, strict=True):
                    own |= value if isinstance(value, dict) else {key: value}
                values = words | self.arms.get(own.get("arm", ""), {}) | own
                values["cell"] = name = filled(group["cell"], values)
                self.cells[name] = [shlex.split(filled(command, values)) for command in group["commands"]]
                self.unlisted |= {name} if own.get("line") is False else set()

    def folder(self, name: str) -> Path:
        return ROOT / self.runs / name

    def needs(self, name: str) -> list[str]:
        """Other cells in whose folders the commands read, in the table's order."""
        found = set[str]()
        for path in re.findall(rf"{re.escape(str(self.runs))}/([\w./-]+)", " ".join(map(shlex.join, self.cells[name]))):
            parts = path.split("/")
            ends = ("/".join(parts[:end]) for end in range(len(parts), 0, -1))
            found |= {next((each for each in ends if each in self.cells), name)} - {name}
        return [each for each in self.cells if each in found]


def filled(text: str, values: Mapping[str, Any]) -> str:
    """`text` with a value for each {word}; values may hold further words."""

    def value(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise UserError(f"`{text}`: no value for {match[0]}; add it to `words`, the group or the arm")
        return str(values[match[1]])

    while (more := re.sub(r"\{([\w-]+)\}", value, text)) != text:
        text = more
    return text


def read_lines(path: Path) -> dict[str, dict[str, Any]]:
    """Result lines by cell; a later line replaces an earlier one. Raises UserError for an invalid line."""
    found = {}
    for number, line in enumerate(path.read_bytes().splitlines() if path.exists() else [], start=1):
        try:
            record = json.loads(line)
            found[record["cell"]] = record
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{path}:{number}: no line of a study; delete it, and its cell is run again") from None
    return found


class Study:
    """Makes cells one after the other.

    Attributes:
        done: cells with a line.
        failed: {cell: reason}.
    """

    def __init__(self, table: Table):
        """Raises UserError for a damaged file of results."""
        self.table, self.failed = table, dict[str, str]()
        self.done = set(read_lines(table.results))

    def make(self, name: str) -> None:
        """Runs a cell, and before it those that it needs and whose files are not there. Raises UserError if a command
        fails, or has failed before."""
        if name in self.failed:
            raise UserError(f"needs {name}, which failed")
        folder = self.table.folder(name)
        try:
            for other in self.table.needs(name):
                if not (self.table.folder(other) / "line.json").exists():
                    self.make(other)
            print(f"{datetime.now():%H:%M:%S} {name}", flush=True)
            line = self._run(name, folder)
        except UserError as error:
            self.failed[name] = str(error)
            print(f"{name}: FAILED: {error}", flush=True)
            raise
        if name not in self.table.unlisted and name not in self.done:
            self.table.results.parent.mkdir(parents=True, exist_ok=True)
            with self.table.results.open("a") as file:
                file.write(f"{line}\n")
            self.done.add(name)
        atomic_write(folder / "line.json", line)
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)

    def _run(self, name: str, folder: Path) -> str:
        """Runs a cell's commands, which write log.txt, and returns its line."""
        folder.mkdir(parents=True, exist_ok=True)
        line: dict[str, Any] = {"cell": name, "commit": commit(), "date": f"{datetime.now(timezone.utc):%F %T UTC}"}
        line |= {"resumed": True} if (folder / "checkpoints").exists() else {}  # its seconds are incomplete
        line["seconds"] = 0.0  # of a processor, which other work on the machine does not change
        for program, *words in self.table.cells[name]:
            before = resource.getrusage(resource.RUSAGE_CHILDREN)
            start = [sys.executable, *PROGRAMS[program]] if program in PROGRAMS else [program]
            with (folder / "log.txt").open("ab") as log:
                code = subprocess.run([*start, *words], cwd=ROOT, stdout=log, stderr=log, check=False).returncode
            if code:
                raise UserError(f"{program} {words[0]} ended with {code}; see {folder / 'log.txt'}")
            after = resource.getrusage(resource.RUSAGE_CHILDREN)
            used = round(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, 1)
            line["seconds"] = round(line["seconds"] + used, 1)
            line |= {"train_seconds": used} if words[0] == "train" else {}
        line |= measured(folder) | {"commands": [shlex.join(words) for words in self.table.cells[name]]}
        return json.dumps(line)


# What a cell's files say.


def measured(folder: Path) -> dict[str, Any]:
    """What the commands wrote into a cell's folder."""
    found: dict[str, Any] = {}
    if (folder / "x8.jsonl").exists():
        sizes = {size: len((folder / f"{size}.jsonl").read_bytes().splitlines()) for size in ("x1", "x2", "x4", "x8")}
        found["training_conversations"] = {size: count - 48 for size, count in sizes.items()}
    if (folder / "conversations.jsonl").exists():
        turns = {record["id"]: record["turns"] for record in json_lines(folder / "conversations.jsonl")}
        lengths = {id_: sum(len(turn["output_token_ids"]) for turn in own) for id_, own in turns.items()}
        found |= {"answers": len(turns), "tokens_by_answer": [lengths[id_] for id_ in sorted(lengths)]}
    if (folder / "metrics.jsonl").exists():
        latest = {key: value for line in json_lines(folder / "metrics.jsonl") for key, value in line.items()}
        found["validation"] = {k: v for k, v in latest.items() if k.startswith(("validation_", "replay_"))}
    if (weights := folder / "drafter" / "model.safetensors").exists():
        found["parameters"] = sum(each.size for each in load_file(weights).values() if each.dtype.kind == "f")
    for key, place in (("replay", "eval/replay"), ("decoded", "eval")):
        if (folder / place / "acceptance.json").exists():
            found[key] = contenders(folder / place)
    return found


def json_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def contenders(folder: Path) -> dict[str, Any]:
    """Numbers of every contender of an evaluation, and the rounds of each answer in the order of ids."""
    content = json.loads((folder / "acceptance.json").read_bytes())
    rounds: dict[str, dict[Any, int]] = {}
    for record in json_lines(folder / "generations.jsonl"):
        key = record["conversation_id"], record["turn"]
        rounds.setdefault(record["contender"], {})[key] = len(record["accepted_per_round"])
    result = {}
    for name, numbers in content["contenders"].items():
        if name != content["baseline"]:
            by_answer = [rounds[name][key] for key in sorted(rounds[name])]
            result[TREE if name == content["contender"] else name] = numbers | {"rounds_by_answer": by_answer}
    return result


def commit() -> str:
    """The working tree's commit, with `+` for uncommitted changes to code."""

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "-uno", "--", "*.py", "*.yaml")
    return git("rev-parse", "--short=12", "HEAD") + "+" * bool(changed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("table", nargs="?", default=TABLE, type=Path, help=f"default: {TABLE}")
    parser.add_argument("--set", nargs="+", default=[], metavar="WORD=VALUE", help="words that replace the table's")
    parser.add_argument("--only", nargs="+", default=["*"], metavar="PATTERN", help="cells with such names")
    parser.add_argument("--plan", action="store_true", help="list the cells that would run, and stop")
    options = parser.parse_args()
    table = Table(options.table, options.set)
    if unknown := [pattern for pattern in options.only if not fnmatch.filter(table.cells, pattern)]:
        raise UserError(f"--only: no cell is called {', '.join(unknown)}; --plan lists them")
    study, wanted = Study(table), {name for pattern in options.only for name in fnmatch.filter(table.cells, pattern)}
    left = [name for name in table.cells if name in wanted - study.done - table.unlisted]
    if options.plan:
        print("\n".join([*left, f"{len(left)} of {len(table.cells) - len(table.unlisted)} cells to do"]))
        return
    for name in left:
        if name not in study.done:  # since others needed it
            with suppress(UserError):  # told, and told again at the end
                study.make(name)
    if study.failed:
        raise UserError([f"{name}: {reason}" for name, reason in study.failed.items()])


if __name__ == "__main__":
    run(main)
