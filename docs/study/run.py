"""Compare the drafters of the EAGLE family on the demo pair: one cell, one line of docs/study/results.jsonl.

    make demo                                            # first: the target's answers are what everyone trains on
    python -m docs.study.run --plan                       # cells, their order, and how long they take
    python -m docs.study.run                              # all that have no line yet; or: make study
    python -m docs.study.run --only 'drafter/eagle*' 'fr-spec/*'
    python -m docs.study.run --jobs 2                     # two cells at a time; several of these may run side by side
    python -m docs.study.page                          # tables and plots of what is there

A cell runs the project's own scripts (`docs.study.cells` says which) and appends one line when all of them are done.
Cells with a line are not run again, unless another cell needs files of theirs that are gone or were made by other
commands; their line then stays, where their weights are the same. Where a search finds another learning rate, or a
drafter was trained anew with other weights, lines of the old one are outdated: reports leave them out, and their cells
run again. Stopped at any moment and started again, the study goes on: a training from its last checkpoint. A cell that
fails is told, and the others go on.

Nothing of ours is imported but recipes: this file starts processes and reads the files that they leave.
"""

import argparse
import fcntl
import fnmatch
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from docs.study.cells import (
    ALL,
    ALL_ARMS,
    ANSWERS,
    MAIN,
    SIZES,
    STEPS,
    TIMED,
    TREE,
    VALIDATION,
    Cell,
    Line,
    Lines,
    Places,
    best_rate,
    cells,
    commands,
    current,
    drafter_name,
    outdated,
    same_training,
)
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.prompts.stdlib import split_of
from draftsmith.recipes.validation import validation_rank

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "docs/study/results.jsonl"
USUAL = Places(Path("runs/study"), Path("runs/demo"))  # what lines name, wherever this run's files lie
# What a report reads of a replayed contender.
KEPT = (
    *("tau", "tau_interval", "rounds", "new_tokens", "accepted_per_round", "tree_nodes_per_round"),
    *("draft_calls_per_round", "acceptance_by_position", "acceptance_by_position_interval"),
)


def main() -> None:
    options = _parser().parse_args()
    places = Places(options.out, options.demo)
    if options.plan:
        lines = current(read_lines(options.results))
        print_plan(chosen(cells(lines), options.only), lines, places)
        return
    if options.jobs < 1:
        raise UserError(f"--jobs: {options.jobs} cells at a time; give 1 or more")
    if not (ROOT / options.demo / "conversations.jsonl").exists():
        raise UserError(f"--demo: {options.demo / 'conversations.jsonl'} does not exist; `make demo` writes it")
    study = Study(places, options.results, options.only)
    study.run(options.jobs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--plan", action="store_true", help="say what would be done, and stop")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="cells with such names, and what they need")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; each takes a core")
    parser.add_argument("--out", type=Path, default=USUAL.out, help="folder of drafters and logs")
    parser.add_argument("--demo", type=Path, default=USUAL.demo, help="what `make demo` wrote")
    parser.add_argument("--results", type=Path, default=Path(RESULTS), help=f"default: {RESULTS}")
    return parser


# What is there, and what is to be done.


def read_lines(path: Path) -> dict[str, Line]:
    """Result lines by cell.

    Raises:
        UserError: a line that is no result, or a cell twice.
    """
    found: dict[str, Line] = {}
    whole = (ROOT / path).read_bytes() if (ROOT / path).exists() else b""
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            record = json.loads(line)
            name = record["cell"]
        except (ValueError, TypeError, KeyError):
            raise UserError(f"{path}:{number}: no line of a study; delete it, and its cell is run again") from None
        if name in found:
            raise UserError(f"{path}:{number}: {name} stands there twice; delete one of the two")
        found[name] = record
    return found


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder, for a file in it may be replaced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Whole or not at all, also beside other workers. In place of a line that is outdated or of other weights, never of
    another that is there."""
    path = ROOT / path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        lines, name = read_lines(path), record["cell"]
        if name in current(lines) and lines[name].get("weights") == record.get("weights"):
            return
        if name in lines:
            others = "".join(json.dumps(line) + "\n" for cell, line in lines.items() if cell != name)
            atomic_write(path, others)
        with path.open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def chosen(every: Sequence[Cell], only: Sequence[str] | None) -> list[Cell]:
    """Cells whose names fit, and all that these need, in the order of `every`.

    Raises:
        UserError: a pattern that fits none.
    """
    if not only:
        return list(every)
    by_name = {cell.name: cell for cell in every}
    if missing := [pattern for pattern in only if not fnmatch.filter(by_name, pattern)]:
        raise UserError(f"--only: no cell is called {', '.join(missing)}; --plan lists them all")
    wanted: set[str] = set()
    reach = [name for pattern in only for name in fnmatch.filter(by_name, pattern)]
    while reach:
        name = reach.pop()
        if name not in wanted:
            wanted.add(name)
            reach += by_name[name].needs
    return [cell for cell in every if cell.name in wanted]


def to_do(wanted: Sequence[Cell], lines: Lines, places: Places) -> list[Cell]:
    """Cells without a line, and those whose files are needed by such a one and gone; in the order of `wanted`."""
    by_name = {cell.name: cell for cell in wanted}
    missing: set[str] = set()

    def look(cell: Cell) -> None:
        if cell.name in missing:
            return
        missing.add(cell.name)
        for name in cell.needs:
            needed = by_name[name]
            if name not in lines or not is_made(needed, places, lines):
                look(needed)

    for cell in wanted:
        if cell.name not in lines:
            look(cell)
    return [cell for cell in wanted if cell.name in missing]


def is_made(cell: Cell, places: Places, lines: Lines) -> bool:
    """Its files are there, of a drafter also those that its commands make now."""
    if not all((ROOT / path).exists() for path in places.made_by(cell)):
        return False
    if cell.kind != "drafter":
        return True
    note = ROOT / places.of(cell.name) / "commands.json"
    wanted = commands(cell, places, lines)
    return note.exists() and without_validation(json.loads(note.read_text())) == without_validation(wanted)


def without_validation(wanted: Sequence[Sequence[str]]) -> list[list[str]]:
    """Validating along answers changes no drafter."""
    return [[part for part in command if not part.startswith("train.eval_replay=")] for command in wanted]


def likely_seconds(cell: Cell, lines: Lines) -> float:
    """By lines of the same arm or kind, where there are some."""
    alike = [
        line["seconds"]
        for line in lines.values()
        if (line["kind"], line["arm"], line.get("steps", STEPS)) == (cell.kind, cell.arm, cell.steps)
        and "resumed" not in line
    ]
    return sum(alike) / len(alike) if alike else cell.seconds


def print_plan(wanted: Sequence[Cell], lines: Lines, places: Places) -> None:
    left = to_do(wanted, lines, places)
    total = 0.0
    for cell in left:
        seconds = likely_seconds(cell, lines)
        total += seconds
        again = "  (has its line; its files are gone)" if cell.name in lines else ""
        print(f"{cell.name:<40}{seconds / 60:>6.1f} min{again}")
    print(
        f"{len(wanted) - len(left)} of {len(wanted)} cells done; {len(left)} to do: {total / 3600:.1f} hours of a core"
    )
    if changed := made_otherwise(wanted, lines):
        print(f"made by other commands than today's; where that matters, delete the line: {', '.join(changed)}")
    print(
        f"a training takes {STEPS} steps of 8 rows, one of a learning rate as well; {ANSWERS} held-out answers are "
        "replayed"
    )


def made_otherwise(wanted: Sequence[Cell], lines: Lines) -> list[str]:
    """Cells whose line names other commands than the design does now."""

    def said(words: Sequence[str]) -> list[list[str]]:
        return without_validation([shlex.split(command) for command in words])

    there = [cell for cell in wanted if cell.name in lines]
    return [
        cell.name
        for cell in there
        if said(lines[cell.name]["commands"]) != said(in_words(commands(cell, USUAL, lines)))
    ]


def in_words(wanted: Sequence[Sequence[str]]) -> list[str]:
    return [shlex.join(["python", *command]) for command in wanted]


# Running.


class Stopped(Exception):
    """Somebody wants the study to end."""


class Study:
    """Workers that take cells until none is left.

    Args:
        only: patterns of the names of cells.
    """

    def __init__(self, places: Places, results: Path, only: Sequence[str] | None = None):
        self.places, self.results, self.only = places, results, only
        self.failed: dict[str, str] = {}
        self.broken: list[BaseException] = []  # what ended a worker that should have gone on
        self.processes: set[subprocess.Popen] = set()
        self.stopping = threading.Event()
        self.turn = threading.Lock()

    def run(self, jobs: int = 1) -> None:
        """Raises UserError where cells failed; Stopped at SIGTERM becomes exit code 143."""
        chosen(cells(read_lines(self.results)), self.only)  # a user's mistakes first
        signal.signal(signal.SIGTERM, self._stop)
        workers = [threading.Thread(target=self._guarded) for _ in range(jobs)]
        for worker in workers:
            worker.start()
        try:
            for worker in workers:
                while worker.is_alive():
                    worker.join(0.5)
        except KeyboardInterrupt:
            self._stop()
            raise
        finally:
            for worker in workers:
                worker.join()
        if self.broken:
            raise self.broken[0]
        if self.stopping.is_set():
            sys.exit(128 + signal.SIGTERM)
        if self.failed:
            raise UserError([f"{name}: {reason}" for name, reason in self.failed.items()])

    def _stop(self, *_: object) -> None:
        self.stopping.set()
        for process in list(self.processes):
            process.terminate()

    def _guarded(self) -> None:
        """A thread's exceptions are nobody's otherwise."""
        try:
            self._work()
        except Exception as error:
            self.broken.append(error)
            self._stop()

    def _work(self) -> None:
        while not self.stopping.is_set():
            lines = current(read_lines(self.results))
            wanted = chosen(cells(lines), self.only)
            left = [cell for cell in to_do(wanted, lines, self.places) if cell.name not in self.failed]
            names = {cell.name for cell in left} | set(self.failed)
            ready = [cell for cell in left if not names.intersection(cell.needs)]
            if not ready:
                return
            for cell in ready:
                with self.claimed(cell) as lock:
                    if lock is None:
                        continue
                    latest = current(read_lines(self.results))
                    if cell.name in latest and is_made(cell, self.places, latest):
                        break  # another worker was faster
                    try:
                        self.make(cell, lines, lock)
                    except Stopped:
                        return
                    except (UserError, OSError, ValueError, KeyError) as error:
                        self.failed[cell.name] = str(error)
                        print(f"{cell.name}: FAILED: {error}", flush=True)
                break
            else:
                self.stopping.wait(5)  # all that could be done is being done by others

    @contextmanager
    def claimed(self, cell: Cell) -> Iterator[int | None]:
        """A lock that lasts as long as this process or one that it started for the cell; None: somebody else has it."""
        path = ROOT / self.places.out / "claims" / cell.name.replace("/", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                yield None
                return
            yield file.fileno()

    def make(self, cell: Cell, lines: Lines, lock: int) -> None:
        """Runs a cell's commands and appends its line.

        Raises:
            UserError: a command failed.
            Stopped: the study is to end.
        """
        folder = ROOT / self.places.of(cell.name)
        if cell.kind != "drafter" and cell.name in outdated(read_lines(self.results)):
            shutil.rmtree(folder, ignore_errors=True)  # of another drafter, by the same commands
        folder.mkdir(parents=True, exist_ok=True)
        wanted = commands(cell, self.places, lines)
        begin_anew_if_changed(folder, wanted)
        prepare(cell, self.places, lines)
        resumed = {"resumed": True} if (folder / "checkpoints").exists() else {}  # its times are not the whole
        print(f"{_now()} {cell.name}: about {likely_seconds(cell, lines) / 60:.1f} min", flush=True)
        seconds = [self._command(command, folder / "log.txt", lock) for command in wanted]
        record = {
            **{"cell": cell.name, "kind": cell.kind, "arm": cell.arm, "conversations": cell.size, "seed": cell.seed},
            **{"commit": commit(), "date": _now(), "seconds": round(sum(seconds), 1)},
            **resumed,
            **found(cell, self.places, lines, seconds),
            "commands": in_words(commands(cell, USUAL, lines)),
        }
        append_line(self.results, record)
        tidy(cell, folder)
        print(f"{_now()} {cell.name}: done in {sum(seconds) / 60:.1f} min {in_short(record)}", flush=True)

    def _command(self, command: Sequence[str], log: Path, lock: int) -> float:
        """Runs it and returns the processor's seconds: the machine may have other work."""
        with log.open("ab") as file:
            file.write(f"\n$ python {shlex.join(command)}\n".encode())
            file.flush()
            with self.turn:
                if self.stopping.is_set():
                    raise Stopped
                # The lock goes along: should this process be killed, its cell stays claimed while the command lives.
                process = subprocess.Popen(
                    [sys.executable, *command], cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, pass_fds=[lock]
                )
                self.processes.add(process)
            try:
                _, status, used = os.wait4(process.pid, 0)
                code = process.returncode = os.waitstatus_to_exitcode(status)
            finally:
                self.processes.discard(process)
        if self.stopping.is_set():
            raise Stopped
        if code:
            last = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1]
            raise UserError(f"{command[0]} ended with {code}: {last} (all of it: {log})")
        return used.ru_utime + used.ru_stime


def begin_anew_if_changed(folder: Path, wanted: Sequence[Sequence[str]]) -> None:
    """A run that other commands began cannot be gone on with."""
    note = folder / "commands.json"
    text = json.dumps(wanted)
    if note.exists() and note.read_text() != text:
        shutil.rmtree(folder)
        folder.mkdir()
    note.write_text(text)


def prepare(cell: Cell, places: Places, lines: Lines) -> None:
    """Files that no script of ours writes, and what another cell has trained."""
    if cell.kind == "data":
        write_shares(ROOT / places.demo / "conversations.jsonl", places)
    elif cell.kind in ("rate", "drafter", "unrolled", "timing"):
        # A draft vocabulary of all tokens is the same for all shares of the data.
        own = places.of(cell.name)
        for folder in [places.untaught(arm) for arm in MAIN] if cell.kind == "timing" else [own]:
            (ROOT / folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / places.data / "draft_vocab.safetensors", ROOT / folder)
        name, checkpoints = same_training(cell, lines), ROOT / own / "checkpoints"
        if (
            name is not None
            and not checkpoints.exists()
            and (trained := ROOT / places.of(name) / "checkpoints").exists()
        ):
            shutil.copytree(trained, checkpoints)
            shutil.copy(trained.parent / "metrics.jsonl", checkpoints.parent)
    elif cell.name == "fr-spec/library":
        write_library(ROOT / places.library)


def write_shares(path: Path, places: Places) -> None:
    """x1, x2, x4 and x8: the same validation conversations, and one to eight eighths of the others, each share inside
    the next. Which ones, says a hash of their ids."""
    by_id = {json.loads(line)["id"]: line for line in path.read_bytes().splitlines(keepends=True)}
    order = sorted(by_id, key=validation_rank)
    kept, others = order[:VALIDATION], order[VALIDATION:]
    for size in SIZES:
        share = {*kept, *others[: len(others) * size // ALL]}
        target = ROOT / places.conversations(size)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"".join(line for id_, line in by_id.items() if id_ in share))


def write_library(path: Path) -> None:
    """The text of the interpreter's library, comments and docstrings included, without the held-out modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(root.rglob("*.py")):
            parts = source.relative_to(root).with_suffix("").parts
            if {"site-packages", "dist-packages", "__pycache__"}.intersection(parts):
                continue
            if split_of(".".join(parts)) == "train":
                text = source.read_text(encoding="utf-8", errors="ignore")
                file.write(json.dumps({"text": text}) + "\n")


def tidy(cell: Cell, folder: Path) -> None:
    """Away with what is large and read no more; a rate's checkpoints are those of a drafter's cell (`prepare`)."""
    if cell.kind != "rate":
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for name in ("generations.jsonl", "report.html"):
        (folder / "eval" / "replay" / name).unlink(missing_ok=True)


# What a line says.


def found(cell: Cell, places: Places, lines: Lines, seconds: Sequence[float]) -> dict[str, Any]:
    folder = ROOT / places.of(cell.name)
    if cell.kind == "data":
        sizes = {SIZES[size]: _count_lines(ROOT / places.conversations(size)) - VALIDATION for size in SIZES}
        return {"training_conversations": sizes, "validation_conversations": VALIDATION}
    if cell.kind == "answers":
        turns = {
            record["id"]: [len(turn["output_token_ids"]) for turn in record["turns"]]
            for record in map(json.loads, (ROOT / places.answers).read_bytes().splitlines())
        }
        return {"answers": len(turns), "tokens_by_answer": [sum(turns[id_]) for id_ in sorted(turns)]}
    if cell.kind == "rate":
        return {"learning_rate": cell.rate, "steps": cell.steps, "validation": _validation(folder)}
    if cell.kind == "drafter":
        return {
            "learning_rate": best_rate(ALL_ARMS[cell.arm].family, lines),
            "steps": cell.steps,
            "parameters": parameters(folder / "drafter" / "model.safetensors"),
            "weights": weights_of(folder),
            "train_seconds": round(seconds[0], 1),
            "validation": _validation(folder),
            "replay": replayed(folder / "eval" / "replay"),
        }
    if cell.kind in ("sampled", "fr-spec", "c2t", "unrolled"):
        drafter = drafter_name(cell.arm, seed=cell.seed)
        measured = {"drafter": drafter, "learning_rate": lines[drafter]["learning_rate"]}
        measured["drafter_weights"] = weights_of(ROOT / places.of(drafter))
        if cell.kind == "unrolled":
            return measured | {"validation": _validation(folder)}
        if cell.kind == "sampled":
            return measured | {"decoded": decoded(folder / "eval")}
        if cell.kind == "fr-spec":
            return measured | {"replay": replayed(folder / "eval" / "replay")}
        sweep = json.loads((folder / "eval" / "c2t_sweep.json").read_bytes())
        return measured | {key: sweep[key] for key in ("answers", "points", "at_equal_tau")}
    return {"milliseconds": timed(folder), "load_average": round(os.getloadavg()[0], 2), "cores": os.cpu_count()}


def _count_lines(path: Path) -> int:
    return len(path.read_bytes().splitlines())


def _validation(folder: Path) -> dict[str, Any]:
    """The last that metrics.jsonl says of validation."""
    latest: dict[str, Any] = {}
    for line in (folder / "metrics.jsonl").read_bytes().splitlines():
        latest |= {k: v for k, v in json.loads(line).items() if k.startswith(("validation_", "replay_"))}
    return latest


def weights_of(folder: Path) -> str:
    """By which lines know one drafter from another of the same name."""
    return hashlib.sha256((folder / "drafter" / "model.safetensors").read_bytes()).hexdigest()[:16]


def parameters(path: Path) -> int:
    """Floating-point numbers in a safetensors file, by its header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    total = 0
    for name, tensor in header.items():
        if name != "__metadata__" and tensor["dtype"] in ("F64", "F32", "F16", "BF16"):
            count = 1
            for size in tensor["shape"]:
                count *= size
            total += count
    return total


def replayed(folder: Path) -> dict[str, Any]:
    """Of every contender what the report reads, with the rounds of each answer, in the order of their ids. The main
    one is called after its tree."""
    content = json.loads((folder / "acceptance.json").read_bytes())
    rounds: dict[str, dict[tuple[str, int], tuple[int, int]]] = {}
    with (folder / "generations.jsonl").open("rb") as file:
        for record in map(json.loads, file):
            key = record["conversation_id"], record["turn"]
            counted = len(record["accepted_per_round"]), len(record["token_ids"])
            rounds.setdefault(record["contender"], {})[key] = counted
    result = {}
    for name, numbers in content["contenders"].items():
        if name == content["baseline"]:
            continue
        own = rounds[name]
        answers = json.dumps([[*key, own[key][1]] for key in sorted(own)])
        result[TREE if name == content["contender"] else name] = {key: numbers[key] for key in KEPT} | {
            "tree": numbers["tree"],
            "rounds_by_answer": [own[key][0] for key in sorted(own)],
            # Only numbers over the same answers can be compared.
            "answers_sha256": hashlib.sha256(answers.encode()).hexdigest()[:16],
        }
    return result


def decoded(folder: Path) -> dict[str, Any]:
    """Of every contender what the report reads; the main one is called after its tree."""
    content = json.loads((folder / "acceptance.json").read_bytes())
    return {
        TREE if name == content["contender"] else name: {key: numbers[key] for key in KEPT[:4]}
        for name, numbers in content["contenders"].items()
        if name != content["baseline"]
    }


def timed(folder: Path) -> dict[str, dict[str, list[float]]]:
    """{arm: {what: [milliseconds of each pass]}}: a draft call, and all calls of a round, chain and tree."""
    result: dict[str, dict[str, list[float]]] = {}
    for path in sorted(folder.glob("*/eval/plan.json")):
        arm, _, time_ = path.parents[1].name.rpartition("-")
        if int(time_) < TIMED:
            costs = json.loads(path.read_bytes())["costs"]
            own = result.setdefault(arm, {})
            for policy, points in costs["draft_by_calls"].items():
                for calls, milliseconds in points:
                    own.setdefault(f"{policy}, {calls:g} calls", []).append(milliseconds)
            own.setdefault("plain round", []).append(costs["plain_round"])
    return result


def in_short(record: Line) -> str:
    taus = [f"{name}: tau {numbers['tau']:.3f}" for name, numbers in record.get("replay", {}).items()]
    validation = record.get("validation", {})
    if not taus and "replay_tau" in validation:
        taus = [f"validation replay tau {validation['replay_tau']}"]
    return f"({'; '.join(taus)})" if taus else ""


def commit() -> str:
    """Of the working tree; `+` where code differs from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD")[:12] + "+" * bool(git("status", "--porcelain", "-uno", "--", "*.py", "*.yaml"))
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def _now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")


if __name__ == "__main__":
    run(main)
