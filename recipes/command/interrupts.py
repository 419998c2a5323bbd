"""Ends a command after Ctrl-C with one line, also while its modules are imported: import this before anything slow."""

import os
import sys
from types import TracebackType


def interruption(error: BaseException | None) -> KeyboardInterrupt | None:
    """The Ctrl-C behind an exception. transformers turns one in the middle of an import into an ImportError."""
    while isinstance(error, ImportError):
        error = error.__cause__ or error.__context__
    return error if isinstance(error, KeyboardInterrupt) else None


def print_interrupted(words: str = "") -> None:
    """Prints the interruption once for all processes: `words` of interrupted code that has ended its bar's line."""
    from draftsmith.recipes.command.launch import rank

    if rank() > 0:
        return
    begin = "\n" if sys.stderr.isatty() and not words else ""  # a bar's line, or the terminal's ^C, may be open
    print(f"{begin}{words or 'interrupted'}", file=sys.stderr, flush=True)


def _before_run(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if interruption(error) is None:
        sys.__excepthook__(kind, error, trace)
    else:
        print_interrupted()
        os._exit(130)  # nothing has begun that would have to end


sys.excepthook = _before_run
