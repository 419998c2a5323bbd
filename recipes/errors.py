"""The one exception for mistakes that a user can mend: shown without a traceback, exit code 2."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pydantic import ValidationError


class UserError(Exception):
    """One or more problems, each a full sentence: what is wrong, where, and what to do.

    Scripts print `problems` on stderr and exit with code 2 (`recipes.command.cli.run`); library code just raises it.
    """

    def __init__(self, problems: str | Sequence[str]):
        self.problems = [problems] if isinstance(problems, str) else list(problems)
        super().__init__("\n".join(self.problems))


@contextmanager
def collecting_problems(problems: list[str], before: str = "") -> Iterator[None]:
    """Adds the problems of a UserError in the block to `problems`, each with `before` in front of it."""
    try:
        yield
    except UserError as error:
        problems += [before + problem for problem in error.problems]


@contextmanager
def naming_problems(before: str) -> Iterator[None]:
    """Puts `before` in front of each problem of a UserError in the block."""
    try:
        yield
    except UserError as error:
        raise UserError([before + problem for problem in error.problems]) from error


def first_line(error: Exception) -> str:
    """The first line of another library's error message; two if the first ends with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return " ".join(lines[:2]) if lines[0].endswith(":") else lines[0]


def first_invalid(error: "ValidationError") -> str:
    """What is wrong with the first value that pydantic refuses."""
    first = error.errors()[0]
    given = "missing" if first["type"] == "missing" else f"{quoted(first['input'])}: {first['msg']}"
    return f"{'.'.join(map(str, first['loc']))} is {given}"


def quoted(value: Any, most: int = 200) -> str:
    """`value` as a message shows it: its repr, cut after `most` characters."""
    text = repr(value)
    return text if len(text) <= most else f"{text[:most]}..."
