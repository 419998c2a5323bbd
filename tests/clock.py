"""Time that a test moves by hand."""

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from typing import Any

import pytest

from draftsmith.recipes.files import prompt_date


@dataclass
class Clock:
    now: float = 0.0  # seconds


def slowed(patch: pytest.MonkeyPatch, clock: Clock, owner: Any, name: str, seconds: Callable[..., float]) -> None:
    """Lets each call of that method take so many seconds of its arguments."""
    method = getattr(owner, name)

    def slow(*arguments: Any, **more: Any) -> Any:
        clock.now += seconds(*arguments)
        return method(*arguments, **more)

    patch.setattr(owner, name, slow)


def on(day: str, patch: pytest.MonkeyPatch) -> None:
    """Makes `day` today, for prompts."""

    class Day(date):
        @classmethod
        def today(cls) -> date:
            return date.fromisoformat(day)

    patch.setattr(prompt_date, "date", Day)
