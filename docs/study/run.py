"""Compare the drafters of the EAGLE family on a small target: each cell adds a line to docs/study/results.jsonl.

    draftsmith regenerate docs/study/study.yaml            # first: the answers that all train on
    python -m docs.study.run --plan                       # cells, their order, and their likely time
    python -m docs.study.run                              # all cells without a line; or: make study
    python -m docs.study.run --only 'drafter/eagle*' 'fr-spec/*'
    python -m docs.study.run --jobs 2                     # two cells at a time; several of these may run side by side
    python -m docs.study.page                             # tables and plots of the lines so far

A cell runs the project's own scripts (see `docs.study.cells`) and then appends its line. A cell with a line runs again
only if another cell needs its files and they are gone or were made by other commands; if its new weights are the same,
the line stays. Lines become outdated when a search finds another learning rate, or a drafter is trained anew with other
weights: reports leave them out, and their cells run again. The study can be stopped at any moment: the next start
resumes trainings from their last checkpoints. After a cell fails, the others still run.

This file imports only recipes: it starts processes and reads their files.
"""

import argparse
import fcntl
import fnmatch
import hashlib
import json
import math
import os
import shlex
import shutil
import signal
import subprocess
import sys
import sysconfig
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from docs.study.cells import (
    ALL,
    ALL_ARMS,
    ANSWERS,
    C2T_SETTINGS,
    CAPTURED,
    MORE,
    ON_DEMO,
    RECIPE,
    SIZES,
    STEPS,
    TIMED,
    TIMINGS,
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
    on_demo,
    outdated,
    same_training,
    setting_name,
)
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.prompts.stdlib import KINDS, split_of, stdlib_conversations
from draftsmith.recipes.validation import validation_rank

ROOT = Path(__file__).resolve().parents[2]
RESULTS = "docs/study/results.jsonl"
USUAL = Places(Path("runs/study"), Path("runs/study-demo"))  # lines name these, wherever this run's files are
# The keys of a replayed contender that reports read.
KEPT = (
    *("tau", "tau_interval", "rounds", "new_tokens", "accepted_per_round", "tree_nodes_per_round"),
    *("draft_calls_per_round", "acceptance_by_position", "acceptance_by_position_interval"),
)
FINISHED = "finished"  # a file beside answers and states, which exist before all of them are written
SPEED_KEPT = ("tau", "tau_interval", "tokens_per_second", "speedup", "speedup_interval", "matches_target")


def main() -> None:
    options = _parser().parse_args()
    places = Places(options.out, options.demo)
    lines = current(read_lines(options.results))
    wanted = chosen(cells(lines), options.only)
    if options.plan:
        print_plan(wanted, lines, places)
        return
    if options.jobs < 1:
        raise UserError(f"--jobs: {options.jobs} cells at a time; give 1 or more")
    there = options.demo / "conversations.jsonl"
    if not (ROOT / there).exists() and not all(cell.name.startswith(on_demo("")) for cell in wanted):
        raise UserError(f"--demo: {there} does not exist; `draftsmith regenerate {RECIPE}` writes it")
    Study(places, options.results, options.only).run(options.jobs)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--plan", action="store_true", help="print what would be done, and stop")
    parser.add_argument("--only", nargs="+", metavar="PATTERN", help="cells with such names, and what they need")
    parser.add_argument("--jobs", type=int, default=1, help="cells at a time; each takes a core")
    parser.add_argument("--out", type=Path, default=USUAL.out, help="folder of drafters and logs")
    parser.add_argument("--demo", type=Path, default=USUAL.demo, help="where the answers are that all train on")
    parser.add_argument("--results", type=Path, default=Path(RESULTS), help=f"default: {RESULTS}")
    return parser


# Lines, and the cells without one.


def read_lines(path: Path) -> dict[str, Line]:
    """Result lines by cell. Raises UserError for an invalid line or a cell with two lines."""
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
    """Locks the folder of a file, since the file itself may be replaced."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def append_line(path: Path, record: Mapping[str, Any]) -> None:
    """Appends a line, safely beside other workers. Replaces the cell's line only if that is outdated or of other
    weights."""
    path = ROOT / path
    path.parent.mkdir(parents=True, exist_ok=True)
    with _locked(path.parent):
        lines, name = read_lines(path), record["cell"]
        if name in current(lines) and lines[name].get("weights") == record.get("weights"):
            return
        if name in lines:
            atomic_write(path, "".join(json.dumps(line) + "\n" for cell, line in lines.items() if cell != name))
        with path.open("ab") as file:
            file.write(json.dumps(record).encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())


def chosen(every: Sequence[Cell], only: Sequence[str] | None) -> list[Cell]:
    """Cells that match a pattern, and all cells that they need, in the order of `every`.

    Raises:
        UserError: a pattern without a match.
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
    """Cells without a line, and cells that these need if their files are gone; in the order of `wanted`."""
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
    """Whether all of a cell's files are written; a drafter's must be made by today's commands."""
    files = places.made_by(cell)
    if not all((ROOT / path).exists() for path in files):
        return False
    if cell.kind not in ("drafter", "demo"):
        return not files or (ROOT / places.of(cell.name) / FINISHED).exists()
    note = ROOT / places.of(cell.name) / "commands.json"
    try:
        wanted = commands(cell, places, lines)
    except KeyError:  # a rate of its search has no line
        return False
    return note.exists() and without_validation(json.loads(note.read_text())) == without_validation(wanted)


def without_validation(wanted: Sequence[Sequence[str]]) -> list[list[str]]:
    """The commands without train.eval_replay, which changes no drafter."""
    return [[part for part in command if not part.startswith("train.eval_replay=")] for command in wanted]


def likely_seconds(cell: Cell, lines: Lines) -> float:
    """The mean time of lines of the same kind, arm and steps, else the cell's own estimate."""
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
    done, again = (sum(cell.name in lines for cell in cells) for cells in (wanted, left))
    once_more = f", {again} of them again for their files" if again else ""
    print(f"{done} of {len(wanted)} cells done; {len(left)} to do{once_more}: {total / 3600:.1f} hours of a core")
    if changed := of_other_commands(wanted, lines):
        print(f"made by other commands than today's; where that matters, delete the line: {', '.join(changed)}")
    print(
        f"a training takes {STEPS} steps of 8 rows unless its name has others; {ANSWERS} held-out answers are replayed"
    )


def of_other_commands(wanted: Sequence[Cell], lines: Lines) -> list[str]:
    """Cells with a line of other commands than today's; without those whose rate is still to be searched."""
    found = []
    for cell in wanted:
        with suppress(KeyError):
            then = [shlex.split(command)[1:] for command in lines[cell.name]["commands"]]
            if without_validation(then) != without_validation(commands(cell, USUAL, lines)):
                found.append(cell.name)
    return found


# Running.


class Stopped(Exception):
    """The study was asked to end."""


class Study:
    """Workers that take cells until none is left.

    Args:
        only: patterns of cell names; None: all cells.
    """

    def __init__(self, places: Places, results: Path, only: Sequence[str] | None = None):
        self.places, self.results, self.only = places, results, only
        self.failed: dict[str, str] = {}
        self.broken: list[BaseException] = []  # errors that ended a worker
        self.processes: set[subprocess.Popen] = set()
        self.stopping = threading.Event()
        self.turn = threading.Lock()

    def run(self, jobs: int = 1) -> None:
        """Raises UserError where cells failed; Stopped at SIGTERM becomes exit code 143."""
        chosen(cells(read_lines(self.results)), self.only)  # raises for the user's mistakes first
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
        """Works, and keeps an exception for the main thread."""
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
                self.stopping.wait(5)  # other workers hold all ready cells

    @contextmanager
    def claimed(self, cell: Cell) -> Iterator[int | None]:
        """A lock held until this process and the cell's command end; None: another worker has it."""
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
        if cell.kind not in ("drafter", "demo") and cell.name in outdated(read_lines(self.results)):
            shutil.rmtree(folder, ignore_errors=True)  # the same commands measured another drafter
        folder.mkdir(parents=True, exist_ok=True)
        wanted = commands(cell, self.places, lines)
        begin_anew_if_changed(folder, wanted)
        (folder / FINISHED).unlink(missing_ok=True)
        prepare(cell, self.places, lines)
        resumed = {"resumed": True} if (folder / "checkpoints").exists() else {}  # its seconds are incomplete
        print(f"{_now()} {cell.name}: about {likely_seconds(cell, lines) / 60:.1f} min", flush=True)
        seconds = [self._command(command, folder / "log.txt", lock) for command in wanted]
        record = {
            **{"cell": cell.name, "kind": cell.kind, "arm": cell.arm, "seed": cell.seed},
            **{"commit": commit(), "date": _now(), "seconds": round(sum(seconds), 1)},
            **resumed,
            **found(cell, self.places, lines, seconds),
            "commands": [shlex.join(["python", *command]) for command in commands(cell, USUAL, lines)],
        }
        append_line(self.results, record)
        tidy(cell, folder)
        (folder / FINISHED).touch()
        print(f"{_now()} {cell.name}: done in {sum(seconds) / 60:.1f} min {in_short(record)}", flush=True)

    def _command(self, command: Sequence[str], log: Path, lock: int) -> float:
        """Runs a command and returns its processor seconds, which other work on the machine does not change."""
        with log.open("ab") as file:
            file.write(f"\n$ python {shlex.join(command)}\n".encode())
            file.flush()
            with self.turn:
                if self.stopping.is_set():
                    raise Stopped
                # The command inherits the lock: it keeps the cell claimed if this process is killed.
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
    """Empties the folder of a run that other commands began."""
    note = folder / "commands.json"
    text = json.dumps(wanted)
    if note.exists() and note.read_text() != text:
        shutil.rmtree(folder)
        folder.mkdir()
    note.write_text(text)


def prepare(cell: Cell, places: Places, lines: Lines) -> None:
    """Puts the files in place that the cell's scripts read but none writes."""
    if cell.kind == "data":
        write_shares(ROOT / places.demo / "conversations.jsonl", places)
    elif cell.kind == "demo":
        own = ROOT / places.of(cell.name)
        own.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / places.of(on_demo("answers")) / "draft_vocab.safetensors", own)
    elif cell.kind == "more-answers":
        write_more_prompts(places)
    elif cell.kind == "states" and cell.size in MORE:
        write_more(cell.size, places)
    elif cell.kind in ("rate", "drafter", "unrolled", "timing"):
        # A draft vocabulary of all tokens is the same for all shares of the data.
        own = places.of(cell.name)
        for folder in [places.briefly_trained(arm) for arm in TIMED] if cell.kind == "timing" else [own]:
            (ROOT / folder).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / places.data / "draft_vocab.safetensors", ROOT / folder)
        if (name := same_training(cell, lines)) is not None and not (ROOT / own / "checkpoints").exists():
            trained = ROOT / places.of(name)
            if (trained / "checkpoints").exists():
                shutil.copy(trained / "metrics.jsonl", ROOT / own)
                partial = ROOT / own / "checkpoints.partial"
                shutil.rmtree(partial, ignore_errors=True)
                shutil.copytree(trained / "checkpoints", partial)
                partial.rename(ROOT / own / "checkpoints")
    elif cell.name == "fr-spec/library":
        write_library(ROOT / places.library)


def write_shares(path: Path, places: Places) -> None:
    """Writes x1, x2, x4 and x8: the same validation conversations and one to eight eighths of the others, each share
    inside the next, in the order of a hash of their ids."""
    by_id = {json.loads(line)["id"]: line for line in path.read_bytes().splitlines(keepends=True)}
    order = sorted(by_id, key=validation_rank)
    kept, others = order[:VALIDATION], order[VALIDATION:]
    for size in SIZES:
        share = {*kept, *others[: len(others) * size // ALL]}
        target = ROOT / places.conversations(size)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(b"".join(line for id_, line in by_id.items() if id_ in share))


def write_more_prompts(places: Places) -> None:
    """Writes the questions of the training modules that the recipe does not ask: first those about other functions,
    then the other kind of question about each. None ranks among the validation conversations, which stay the same."""
    asked = {json.loads(line)["id"] for line in (ROOT / places.demo / "conversations.jsonl").read_bytes().splitlines()}
    every = {
        conversation["id"]: conversation
        for kinds in (KINDS, *((kind,) for kind in KINDS))
        for conversation in stdlib_conversations("train", kinds)
    }
    wanted = (len(asked) - VALIDATION) * (max(MORE) // ALL - 1)
    last_kept = sorted(map(validation_rank, asked))[VALIDATION - 1]
    others = [every[id_] for id_ in every if id_ not in asked and validation_rank(id_) > last_kept][:wanted]
    lines = [json.dumps({"id": each["id"], "messages": each["messages"][:1]}) + "\n" for each in others]
    atomic_write(ROOT / places.more_prompts, "".join(lines))


def write_more(size: int, places: Places) -> None:
    """Writes the conversations of a size in MORE: all of ALL, and as many times more."""
    whole = (ROOT / places.conversations(ALL)).read_bytes().splitlines(keepends=True)
    others = (ROOT / places.more_answers).read_bytes().splitlines(keepends=True)
    wanted = (len(whole) - VALIDATION) * (size // ALL - 1)
    atomic_write(ROOT / places.conversations(size), b"".join(whole + others[:wanted]))


def write_library(path: Path) -> None:
    """Writes the source text of the interpreter's library without the held-out modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for source in sorted(root.rglob("*.py")):
            parts = source.relative_to(root).with_suffix("").parts
            if {"site-packages", "dist-packages", "__pycache__"}.intersection(parts):
                continue
            if split_of(".".join(parts)) == "train":
                file.write(json.dumps({"text": source.read_text(encoding="utf-8", errors="ignore")}) + "\n")


def tidy(cell: Cell, folder: Path) -> None:
    """Removes large files that are not read again. A drafter's cell reads a rate's checkpoints (`prepare`)."""
    if cell.kind != "rate":
        shutil.rmtree(folder / "checkpoints", ignore_errors=True)
    for name in ("generations.jsonl", "report.html"):
        (folder / "eval" / "replay" / name).unlink(missing_ok=True)


# The contents of a line.


def found(cell: Cell, places: Places, lines: Lines, seconds: Sequence[float]) -> dict[str, Any]:
    folder = ROOT / places.of(cell.name)
    match cell.kind:
        case "data":
            files = {name: ROOT / places.conversations(size) for size, name in SIZES.items()}
            sizes = {name: len(path.read_bytes().splitlines()) - VALIDATION for name, path in files.items()}
            return {"training_conversations": sizes, "validation_conversations": VALIDATION}
        case "answers" | "demo-answers":
            heldout = places.answers if cell.kind == "answers" else places.demo_heldout
            turns = {
                record["id"]: [len(turn["output_token_ids"]) for turn in record["turns"]]
                for record in map(json.loads, (ROOT / heldout).read_bytes().splitlines())
            }
            return {"answers": len(turns), "tokens_by_answer": [sum(turns[id_]) for id_ in sorted(turns)]}
        case "more-answers":
            return {"answers": len((ROOT / places.more_answers).read_bytes().splitlines())}
        case "states":
            manifest = json.loads((ROOT / places.states(cell.size, CAPTURED[0]) / "manifest.json").read_bytes())
            return {"rows": manifest["rows"], "tokens": manifest["tokens"]}
        case "rate":
            return {"learning_rate": cell.rate, "steps": cell.steps, "validation": _validation(folder)}
        case "drafter" | "demo":
            start, family = ALL_ARMS[cell.arm].start, ALL_ARMS[cell.arm].family
            rate = ON_DEMO[cell.arm] if cell.kind == "demo" else best_rate(family, lines, cell.steps)
            return (drafters_of([drafter_name(start, seed=cell.seed)], places) if start else {}) | {
                "learning_rate": rate,
                "steps": cell.steps,
                "parameters": parameters(folder / "drafter" / "model.safetensors"),
                "weights": weights_of(folder),
                "train_seconds": round(seconds[0], 1),
                "validation": _validation(folder),
                "replay": replayed(folder / "eval" / "replay"),
            }
        case "sampled":
            return measured(cell, places, lines) | {"decoded": decoded(folder / "eval")}
        case "fr-spec":
            return measured(cell, places, lines) | {"replay": replayed(folder / "eval" / "replay")}
        case "unrolled":
            return measured(cell, places, lines) | {"validation": _validation(folder)}
        case "c2t-search":
            tried = {
                setting_name(each): chosen_epoch(ROOT / places.classifier(cell.arm, each)) for each in C2T_SETTINGS
            }
            return measured(cell, places, lines) | {"validation": tried}
        case "c2t":
            sweep = json.loads((folder / "eval" / "c2t_sweep.json").read_bytes())
            return measured(cell, places, lines) | {key: sweep[key] for key in ("answers", "points", "at_equal_tau")}
        case "demo-speed":
            content = json.loads((folder / "eval" / "acceptance.json").read_bytes())["contenders"]
            speeds = {name: {key: own[key] for key in SPEED_KEPT} for name, own in content.items()}
            return {"speeds": speeds} | drafters_of(cell.needs, places) | load()
        case "timing":
            rates = {arm: training_rates(ROOT / places.briefly_trained(arm)) for arm in TIMED}
            return {"milliseconds": timed(folder), "training_tokens_per_second": rates} | load()
    raise ValueError(cell.kind)


def measured(cell: Cell, places: Places, lines: Lines) -> dict[str, Any]:
    """The drafter that a cell measures, as `outdated` reads it."""
    name = drafter_name(cell.arm, seed=cell.seed)
    weights = weights_of(ROOT / places.of(name))
    return {"drafter": name, "learning_rate": lines[name]["learning_rate"], "drafter_weights": weights}


def load() -> dict[str, Any]:
    return {"load_average": round(os.getloadavg()[0], 2), "cores": os.cpu_count()}


def _validation(folder: Path) -> dict[str, Any]:
    """The last validation and replay metrics of metrics.jsonl."""
    latest: dict[str, Any] = {}
    for line in (folder / "metrics.jsonl").read_bytes().splitlines():
        latest |= {k: v for k, v in json.loads(line).items() if k.startswith(("validation_", "replay_"))}
    return latest


def chosen_epoch(classifier: Path) -> dict[str, float]:
    """The line of metrics.jsonl whose weights a classifier has: the first of the highest recall (train/c2t.py)."""
    lines = map(json.loads, (classifier / "metrics.jsonl").read_bytes().splitlines())
    return max(lines, key=lambda line: (line["recall"], -line["positive_rate"]))


def drafters_of(names: Iterable[str], places: Places) -> dict[str, Any]:
    """The drafters that a line hangs on, as `outdated` reads them."""
    return {"drafters": {name: weights_of(ROOT / places.of(name)) for name in names}}


def weights_of(folder: Path) -> str:
    """A digest that tells a drafter from others of the same name."""
    return hashlib.sha256((folder / "drafter" / "model.safetensors").read_bytes()).hexdigest()[:16]


def parameters(path: Path) -> int:
    """The number of floating-point values in a safetensors file, by its header."""
    with path.open("rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    header.pop("__metadata__", None)
    return sum(math.prod(each["shape"]) for each in header.values() if each["dtype"] in ("F64", "F32", "F16", "BF16"))


def replayed(folder: Path) -> dict[str, Any]:
    """The reports' keys of every contender, and the rounds of each answer in the order of ids. The main contender is
    named after its tree."""
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
            # Reports compare only numbers over the same answers.
            "answers_sha256": hashlib.sha256(answers.encode()).hexdigest()[:16],
        }
    return result


def decoded(folder: Path) -> dict[str, Any]:
    """The reports' keys of every contender; the main one is named after its tree."""
    content = json.loads((folder / "acceptance.json").read_bytes())
    return {
        TREE if name == content["contender"] else name: {key: numbers[key] for key in KEPT[:4]}
        for name, numbers in content["contenders"].items()
        if name != content["baseline"]
    }


def timed(folder: Path) -> dict[str, dict[str, list[float]]]:
    """{arm: {calls of a round, chain or tree: [milliseconds of each pass]}}."""
    result: dict[str, dict[str, list[float]]] = {}
    for path in sorted(folder.glob("*/eval/plan.json")):
        arm, _, time_ = path.parents[1].name.rpartition("-")
        if int(time_) < TIMINGS:
            costs = json.loads(path.read_bytes())["costs"]
            own = result.setdefault(arm, {})
            for policy, points in costs["draft_by_calls"].items():
                for calls, milliseconds in points:
                    own.setdefault(f"{policy}, {calls:g} calls", []).append(milliseconds)
            own.setdefault("plain round", []).append(costs["plain_round"])
    return result


def training_rates(folder: Path) -> list[float]:
    """Tokens a second of metrics.jsonl, without its first line, which has the start in it."""
    lines = map(json.loads, (folder / "metrics.jsonl").read_bytes().splitlines())
    return [line["tokens_per_second"] for line in lines][1:]


def in_short(record: Line) -> str:
    taus = [f"{name}: tau {numbers['tau']:.3f}" for name, numbers in record.get("replay", {}).items()]
    validation = record.get("validation", {})
    if not taus and "replay_tau" in validation:
        taus = [f"validation replay tau {validation['replay_tau']}"]
    return f"({'; '.join(taus)})" if taus else ""


def commit() -> str:
    """The working tree's commit, with `+` for uncommitted changes to code."""

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
