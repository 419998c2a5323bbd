"""Progress bars: silent where all is quick, bars on a terminal, single lines in a log."""

import io
import time
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import logging as transformers_logging

from draftsmith.models import target
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.schema import TargetSection
from tests.clock import Clock


class Screen(io.StringIO):
    def __init__(self, terminal: bool):
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of bars."""
    clock = Clock(1000.0)
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(Bar, "monitor_interval", 0)  # no thread that refreshes
    return clock


def drawn(monkeypatch: pytest.MonkeyPatch, clock: Clock, terminal: bool, seconds: float, steps: int = 4) -> str:
    """What 4 steps of a stage of 8 show, after so many seconds."""
    screen = Screen(terminal)
    monkeypatch.setattr("sys.stderr", screen)
    with Bar(total=8, desc="decode", unit="prompt", mininterval=0) as bar:
        bar.set_postfix_str("tau 2.31", refresh=False)
        for _ in range(steps):
            clock.now += seconds / steps
            bar.update()
    return screen.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_over_in_two_seconds_shows_nothing(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    assert drawn(monkeypatch, clock, terminal, 1.9) == ""


def test_a_terminal_sees_a_bar(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    shown = drawn(monkeypatch, clock, True, 8)
    assert shown.count("\r") > 1 and "4/8" in shown and shown.endswith("\n")


def test_a_log_gets_one_line_a_stage_and_one_every_ten_minutes(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    line = "decode: 4 of 8 prompts in 00:08, 0.5 prompts/s, tau 2.31\n"
    assert drawn(monkeypatch, clock, False, 8) == line
    hours = drawn(monkeypatch, clock, False, 2400, 8).splitlines()
    assert hours[0].startswith("decode: 3 of 8 prompts in 15:00") and len(hours) == 3
    assert hours[-1] == "decode: 8 prompts in 40:00, 0.00333 prompts/s, tau 2.31"


def test_loading_weights_shows_as_our_bars_do(
    target_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    made: list[dict[str, Any]] = []

    class Noted(Bar):
        def __init__(self, *args: Any, **settings: Any):
            made.append(settings)
            super().__init__(*args, **settings)

    transformers_logging.enable_progress_bar()  # a capture in this process has switched it off
    monkeypatch.setattr(target, "Bar", Noted)
    target.load_causal_lm(TargetSection(model=str(target_dir), device="cpu"))
    assert [settings["desc"] for settings in made] == ["Loading weights"] and capsys.readouterr().err == ""
