"""Progress bars: none for the first two seconds, and plain lines without a terminal."""

import os
import sys
import time
from threading import Thread
from typing import Any, ClassVar

from tqdm import tqdm

SHOWN_AFTER_SECONDS = 2.0
SECONDS_BETWEEN_LINES = 30.0  # of a log
SECONDS_BETWEEN_LOOKS = 1.0  # at whether a line is due
_NOWHERE = open(os.devnull, "w")  # noqa: SIM115 - for tqdm to draw into
LINE = "{desc}: {n_fmt} of {total_fmt} {unit}s in {elapsed}, {rate_fmt}, {remaining} left{postfix}"


class Bar(tqdm):
    """tqdm, with the same arguments.

    On a terminal the bar appears after SHOWN_AFTER_SECONDS. Elsewhere a thread prints a line every
    SECONDS_BETWEEN_LINES, and the bar one at the end if it took longer than SHOWN_AFTER_SECONDS.
    """

    _last_line: ClassVar[float] = time.monotonic()  # of any bar
    _thread: ClassVar[Thread | None] = None

    def __init__(self, *args: Any, **settings: Any):
        on_terminal = sys.stderr.isatty()
        if not on_terminal:
            settings["file"] = _NOWHERE
        super().__init__(*args, **{"delay": SHOWN_AFTER_SECONDS, **settings})
        self.is_logged = not (self.disable or on_terminal)
        if self.is_logged and (Bar._thread is None or not Bar._thread.is_alive()):  # a fork has no threads
            Bar._thread = Thread(target=_speak_when_due, daemon=True)
            Bar._thread.start()

    @property
    def seconds(self) -> float:
        """Since it was made."""
        return self.format_dict["elapsed"]

    def close(self) -> None:
        last = getattr(self, "is_logged", False) and self.leave  # not of one that was not made to the end
        super().close()
        if last and self.seconds >= SHOWN_AFTER_SECONDS:
            self.print_line()

    def print_line(self) -> None:
        Bar._last_line = time.monotonic()
        sys.stderr.write(self.line() + "\n")  # at once: other threads write, too
        sys.stderr.flush()

    def line(self) -> str:
        """The progress in words: "decode: 12 of 60 prompts in 00:31, 2.58s/prompt, 02:04 left, tau 2.31"."""
        settings = {**self.format_dict, "bar_format": LINE, "rate": None}  # the mean pace since it was made
        return self.format_meter(**settings)


def speak_if_due() -> None:
    """Prints the line of the newest logged bar, if no line was printed for SECONDS_BETWEEN_LINES."""
    if time.monotonic() - Bar._last_line < SECONDS_BETWEEN_LINES:
        return
    with Bar.get_lock():  # tqdm's own register of open bars
        bars = [bar for bar in tqdm._instances if getattr(bar, "is_logged", False)]  # type: ignore[attr-defined]
    if bars := [bar for bar in bars if bar.seconds >= SHOWN_AFTER_SECONDS]:
        max(bars, key=lambda bar: bar.start_t).print_line()


def _speak_when_due() -> None:
    while True:
        time.sleep(SECONDS_BETWEEN_LOOKS)
        speak_if_due()
