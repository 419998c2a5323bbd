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
        lines = self._lines()
        if damaged := [number for number, (_, at, _) in enumerate(lines, start=1) if at is None]:
            print(f"{self.path}: damaged lines dropped: {len(damaged)}, the first is line {damaged[0]}")
        kept = [line for line, at, _ in lines if at is not None and at <= step]
        atomic_write(self.path, b"".join(line + b"\n" for line in kept))

    def values(self, key: str) -> dict[int, float]:
        """The values of this key by step, of the lines that have it."""
        return {at: parsed[key] for _, at, parsed in self._lines() if at is not None and parsed.get(key) is not None}

    def _lines(self) -> list[tuple[bytes, int | None, dict[str, Any]]]:
        """(line, its step or None if it is damaged, its object)."""
        found = []
        for line in self.path.read_bytes().splitlines() if self.path.exists() else []:
            try:
                parsed = json.loads(line.decode())
                found.append((line, int(parsed["step"]), parsed))
            except (ValueError, LookupError, TypeError, RecursionError):
                found.append((line, None, {}))
        return found
