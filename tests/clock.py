"""Time that a test moves by hand."""

from dataclasses import dataclass
from datetime import date

import pytest

from draftsmith.recipes.files import prompt_date


@dataclass
class Clock:
    now: float = 0.0  # seconds


def on(day: str, patch: pytest.MonkeyPatch) -> None:
    """Makes `day` today, for prompts."""

    class Day(date):
        @classmethod
        def today(cls) -> date:
            return date.fromisoformat(day)

    patch.setattr(prompt_date, "date", Day)
