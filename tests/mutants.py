"""One-line faults (mutants.yaml), and which of them the quick tests notice.

    .venv/bin/python -m tests.mutants                # every fault, by the tests that it names: half an hour
    .venv/bin/python -m tests.mutants --whole 17 53  # these, by their tests and then by the whole quick suite

A fault is put into a copy of this folder, and the tests run there. It is killed when a test fails, when the tests
cannot even be collected, or when they take too long. Faults that survive the tests that they name are not lost yet:
`--whole` asks every test. The exit code is 1 if a fault survived.
"""

import argparse
import functools
import os
import signal
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from shutil import copytree, ignore_patterns
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[1]
NOT_COPIED = ignore_patterns(".git", ".venv*", ".llama.cpp", "runs", "*cache*", "__pycache__")
SECONDS = {False: 400, True: 3600}  # for the named tests, and for the whole suite


@functools.cache
def mutants() -> list[dict[str, str]]:
    return yaml.safe_load((ROOT / "tests/mutants.yaml").read_text())


def mutated(text: str, mutant: dict[str, str]) -> str:
    """`text` of the mutant's file with its line replaced; ValueError unless the line occurs exactly once."""
    lines = text.split("\n")
    if lines.count(mutant["line"]) != 1:
        raise ValueError(f"{mutant['file']}: {lines.count(mutant['line'])} lines are {mutant['line']!r}")
    lines[lines.index(mutant["line"])] = mutant["becomes"]
    return "\n".join(lines)


def first_failure(tree: Path, tests: list[str], whole: bool) -> str | None:
    """What failed first of the quick tests in the copy `tree`; None if all pass."""
    command = [sys.executable, "-m", "pytest", "-x", "-m", "not slow", "-p", "no:cacheprovider", "--tb=no", *tests]
    settings = {**os.environ, "PYTHONPATH": str(tree / ".typing"), "PYTHONDONTWRITEBYTECODE": "1"}
    process: Any = subprocess.Popen(
        [*command, *(["-n", "auto"] if whole else [])], cwd=tree, env=settings, text=True, start_new_session=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=SECONDS[whole])
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        return "took too long"
    if process.returncode in (0, pytest.ExitCode.NO_TESTS_COLLECTED):  # all of them are slow
        return None
    return next((line for line in printed.splitlines() if line.startswith(("FAILED", "ERROR"))), printed[-200:])


def killed_by(tree: Path, mutant: dict[str, str], whole: bool) -> str | None:
    file = tree / mutant["file"]
    text = file.read_text()
    file.write_text(mutated(text, mutant))
    try:
        return first_failure(tree, mutant["tests"].split(), False) or (whole and first_failure(tree, [], True)) or None
    finally:
        file.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("numbers", nargs="*", type=int, help="of the faults in the list, from 1; default: all")
    parser.add_argument("--whole", action="store_true", help="what survives its own tests meets the whole quick suite")
    parser.add_argument("--workers", type=int, default=2, help="copies at work side by side (default: 2)")
    arguments = parser.parse_args()
    listed = mutants()
    numbers = arguments.numbers or range(1, len(listed) + 1)
    survivors = []
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.workers) as pool:
        trees: SimpleQueue[Path] = SimpleQueue()
        for worker in range(arguments.workers):
            trees.put(copytree(ROOT, Path(folder, str(worker), "draftsmith"), symlinks=True, ignore=NOT_COPIED))

        def tried(number: int) -> tuple[int, str | None]:
            tree = trees.get()
            try:
                return number, killed_by(tree, listed[number - 1], arguments.whole)
            finally:
                trees.put(tree)

        for number, failure in pool.map(tried, numbers):
            mutant = listed[number - 1]
            print(f"{number:3} {mutant['file']}: {mutant['fault']}: {failure or 'SURVIVED'}"[:240], flush=True)
            survivors += [] if failure else [number]
    print(f"{len(survivors)} of {len(numbers)} survived: {' '.join(map(str, survivors))}")
    return bool(survivors)


if __name__ == "__main__":
    sys.exit(main())
