"""Progress bars: none for the first two seconds, and plain lines without a terminal."""

import sys
import time
from typing import Any

from tqdm import tqdm

SHOWN_AFTER_SECONDS = 2.0
SECONDS_BETWEEN_LINES = 600.0  # of a log; a sign of life in stages that take hours


class Bar(tqdm):
    """tqdm, with the same arguments.

    On a terminal the bar appears after SHOWN_AFTER_SECONDS. Elsewhere (a log file, a pipe) it prints a line every
    SECONDS_BETWEEN_LINES, and one at the end if it took longer than SHOWN_AFTER_SECONDS.
    """

    def __init__(self, *args: Any, **settings: Any):
        self._on_terminal = sys.stderr.isatty()
        self._last_line = time.monotonic()
        if not self._on_terminal:
            settings["file"] = _Nowhere()
        super().__init__(*args, **{"delay": SHOWN_AFTER_SECONDS, **settings})

    def display(self, msg: str | None = None, pos: int | None = None) -> Any:
        now = time.monotonic()
        if not self._on_terminal and now - self._last_line > SECONDS_BETWEEN_LINES:
            self._last_line = now
            print(self.line(), file=sys.stderr, flush=True)
        return super().display(msg, pos)

    def close(self) -> None:
        last = not self.disable and not self._on_terminal and self.leave
        self._last_line = time.monotonic()
        super().close()
        if last and self.format_dict["elapsed"] >= SHOWN_AFTER_SECONDS:
            print(self.line(), file=sys.stderr, flush=True)

    def line(self) -> str:
        """The progress in words: "decode: 12 of 60 prompts in 00:31, 0.4 prompts/s, tau 2.31"."""
        elapsed = max(self.format_dict["elapsed"], 1e-9)
        amount, rate = (self._shown(number) for number in (self.n, self.n / elapsed))
        total = "" if self.total in (None, self.n) else f" of {self._shown(self.total)}"
        text = f"{amount}{total} {self.unit}s in {self.format_interval(elapsed)}, {rate} {self.unit}s/s"
        return ", ".join(filter(None, [f"{self.desc.removesuffix(': ')}: {text}" if self.desc else text, self.postfix]))

    def _shown(self, number: Any) -> str:
        if self.unit_scale:
            return self.format_sizeof(number)
        return f"{number:,.0f}" if number >= 100 or number == int(number) else f"{number:.3g}"


class _Nowhere:
    """A file for tqdm to draw into."""

    def write(self, text: str) -> None:
        pass

    def flush(self) -> None:
        pass
