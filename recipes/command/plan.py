"""The form of every `--plan`: one fact a line, and in brackets where it comes from.

    reads          runs/demo/conversations.jsonl  [there]
    rows           688, 32 more for validation  [counted]
    memory         310 MB at most  [dry run]
    writes         runs/demo/drafter  [new]

exact: arithmetic over the recipe and the target's config; counted: in the files; measured: on this machine; dry run:
`train.measure.dry_run`; assumed: an assumption that the line names.
"""

from pathlib import Path
from types import TracebackType

from draftsmith.recipes.command.stages import Input, is_there
from draftsmith.recipes.errors import UserError


class PlanLines:
    """Prints a plan's lines. As a context it ends with a UserError that names everything that cannot work.

    Attributes:
        problems: what cannot work; append to it. A UserError inside the context is added.
    """

    def __init__(self) -> None:
        self.problems: list[str] = []

    def __enter__(self) -> "PlanLines":
        return self

    def __exit__(self, _: object, error: BaseException | None, __: TracebackType | None) -> None:
        if isinstance(error, UserError):
            self.problems += error.problems
        if self.problems and (error is None or isinstance(error, UserError)):
            raise UserError(self.problems) from error

    def line(self, label: str, text: str, basis: str = "") -> None:
        print(f"{label:<14} {text}" + f"  [{basis}]" * bool(basis))

    def reads(self, *inputs: Input) -> None:
        """Files of other commands."""
        for _, path, command in inputs:
            self.line("reads", str(path), "there" if is_there(path) else f"`draftsmith {command}` writes it")

    def writes(self, *paths: Path) -> None:
        for path in paths:
            self.line("writes", str(path), "there" if path.exists() else "new")


def plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count:,} {noun}{ending * (count != 1)}"
