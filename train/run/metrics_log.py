"""metrics.jsonl of a run: one line for every logged step, each once, however often the run was killed."""

import json
from pathlib import Path
from typing import Any

from draftsmith.recipes.files.atomic import atomic_write, sync_to_disk
from draftsmith.recipes.files.lines import append_line


class MetricsLog:
    """The file. Of several processes rank 0 alone may use it."""

    def __init__(self, path: Path):
        self.path = path

    def append(self, line: dict[str, Any]) -> None:
        """Raises UserError where the disk is full."""
        with self.path.open("ab", buffering=0) as file:
            append_line(file, self.path, (json.dumps(line) + "\n").encode())

    def sync(self) -> None:
        """Makes its lines outlast a power cut."""
        sync_to_disk(self.path)

    def drop_after(self, step: int) -> None:
        """Lines of steps that a killed run logged but did not save would stand twice; what is no line goes, too."""
        *lines, rest = self.path.read_bytes().split(b"\n") if self.path.exists() else [b""]
        lines += [rest] if rest.endswith(b"}") else []  # else a kill cut it off: it was never a line
        steps = [_step_of(line) for line in lines]
        if damaged := [number for number, at in enumerate(steps, start=1) if at is None]:
            print(f"{self.path}: damaged lines dropped: {len(damaged)}, the first is line {damaged[0]}")
        kept = [line for line, at in zip(lines, steps, strict=True) if at is not None and at <= step]
        atomic_write(self.path, b"".join(line + b"\n" for line in kept))

    def tells_of(self, step: int) -> bool:
        """Whether the step was logged."""
        return step in map(_step_of, self.path.read_bytes().split(b"\n"))

    def values(self, key: str) -> dict[int, float]:
        """What the lines that have this key say, by step."""
        lines = map(_parsed, self.path.read_bytes().split(b"\n") if self.path.exists() else [])
        return {line["step"]: line[key] for line in lines if line is not None and line.get(key) is not None}


def _parsed(line: bytes) -> dict[str, Any] | None:
    """None: it is no line of metrics."""
    try:
        parsed = json.loads(line.decode("utf-8"))
        return parsed if isinstance(parsed["step"], int) else None
    except (ValueError, LookupError, TypeError, RecursionError):
        return None


def _step_of(line: bytes) -> int | None:
    parsed = _parsed(line)
    return None if parsed is None else parsed["step"]
