"""Time that a test moves by hand, and what happens while it passes."""

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import pytest

from draftsmith.recipes.files import prompt_date

POLL_SECONDS = 0.002


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


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextmanager
def meanwhile(ready: Callable[[], bool], do: Callable[[], object]) -> Iterator[None]:
    """Does something in another thread, once, as soon as `ready` says so."""

    def watch() -> None:
        while not ready():
            time.sleep(POLL_SECONDS)
        do()

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    yield
    thread.join(60)


@contextmanager
def signalled_when(ready: Callable[[], bool], number: signal.Signals) -> Iterator[None]:
    """Sends a signal to this process."""
    before = signal.signal(number, signal.default_int_handler)  # unless the run has a handler of its own
    try:
        with meanwhile(ready, lambda: os.kill(os.getpid(), number)):
            yield
    finally:
        signal.signal(number, before)
