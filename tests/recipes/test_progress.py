"""Progress bars: silent where all is quick, bars on a terminal, single lines in a log."""

import io
import time
from typing import Any

import pytest

from draftsmith.recipes.command import progress
from draftsmith.recipes.command.progress import Bar, speak_if_due
from tests.clock import Clock


class Screen(io.StringIO):
    def __init__(self, terminal: bool):
        super().__init__()
        self.terminal = terminal

    def isatty(self) -> bool:
        return self.terminal


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of bars. Nothing speaks while it moves, unless the test says so."""
    clock = Clock(1000.0)
    monkeypatch.setattr(Bar, "_last_line", clock.now)
    monkeypatch.setattr(progress, "speak_if_due", lambda: None)  # the thread's
    monkeypatch.setattr("tqdm.std.time", lambda: clock.now)
    monkeypatch.setattr(time, "monotonic", lambda: clock.now)
    monkeypatch.setattr(Bar, "monitor_interval", 0)  # no thread that refreshes
    return clock


def drawn(monkeypatch: pytest.MonkeyPatch, clock: Clock, terminal: bool, seconds: float, **settings: Any) -> str:
    """What 4 steps of a stage of 8 show, after so many seconds."""
    screen = Screen(terminal)
    monkeypatch.setattr("sys.stderr", screen)
    with Bar(total=8, desc="decode", unit="prompt", mininterval=0, **settings) as bar:
        bar.set_postfix_str("tau 2.31", refresh=False)
        for _ in range(4):
            for _ in range(10):
                clock.now += seconds / 40
                speak_if_due()
            bar.update()
    return screen.getvalue()


@pytest.mark.parametrize("terminal", [True, False])
def test_what_is_over_in_two_seconds_shows_nothing(
    terminal: bool, monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    assert drawn(monkeypatch, clock, terminal, 1.9) == ""


def test_a_log_gets_one_line_a_stage_and_one_every_thirty_seconds(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    line = "decode: 4 of 8 prompts in 00:08,  2.00s/prompt, 00:08 left, tau 2.31\n"
    assert drawn(monkeypatch, clock, False, 8) == line
    # Two minutes a prompt: a log cannot wait for them.
    minutes = drawn(monkeypatch, clock, False, 480).splitlines()
    assert minutes[0] == "decode: 0 of 8 prompts in 00:36, ?prompt/s, ? left, tau 2.31"
    assert len(minutes) == 480 // 36 + 1  # looked at every 12 seconds, and the last line
    assert minutes[-1] == "decode: 4 of 8 prompts in 08:00, 120.00s/prompt, 08:00 left, tau 2.31"


def test_a_stage_that_was_resumed_shows_the_pace_since_then(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    line = "decode: 8 of 8 prompts in 00:08,  2.00s/prompt, 00:00 left, tau 2.31\n"
    assert drawn(monkeypatch, clock, False, 8, initial=4) == line
