"""Time that a test moves by hand."""

from dataclasses import dataclass


@dataclass
class Clock:
    now: float = 0.0  # seconds
