"""metrics.jsonl of a run: one line for every logged step, exactly once, however often the run is killed."""

import json
from pathlib import Path
from typing import Any

from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.lines import append_line


class MetricsLog:
    """The file. Only rank 0 may use it."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, line: dict[str, Any]) -> None:
        """Raises UserError where the disk is full."""
        with self.path.open("ab", buffering=0) as file:
            append_line(file, self.path, (json.dumps(line) + "\n").encode())

    def drop_after(self, step: int) -> None:
        """Removes lines of later steps, which a killed run logged and a resumed one logs again, and damaged lines."""
        *lines, rest = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        lines += [rest] if rest.endswith(b"}") else []  # otherwise a kill cut it off
        steps = [_step_of(line) for line in lines]
        if damaged := [number for number, at in enumerate(steps, start=1) if at is None]:
            print(f"{self.path}: damaged lines dropped: {len(damaged)}, the first is line {damaged[0]}")
        kept = [line for line, at in zip(lines, steps, strict=True) if at is not None and at <= step]
        atomic_write(self.path, b"".join(line + b"\n" for line in kept))

    def has_step(self, step: int) -> bool:
        """Whether the step was logged."""
        return step in map(_step_of, self.path.read_bytes().split(b"\n"))

    def values(self, key: str) -> dict[int, float]:
        """The values of this key by step, of the lines that have it."""
        lines = map(_parsed, self.path.read_bytes().split(b"\n") if self.path.exists() else [])
        return {line["step"]: line[key] for line in lines if line is not None and line.get(key) is not None}


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The line's object; None: it is not a line of metrics."""
    try:
        parsed = json.loads(line.decode("utf-8"))
        return parsed if isinstance(parsed["step"], int) else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _step_of(line: bytes) -> int | None:
    parsed = _parsed(line)
    return None if parsed is None else parsed["step"]
