"""Checks for input files that another command writes. Imports nothing heavy, because scripts check first."""

from pathlib import Path

from draftsmith.recipes.command.stages import STAGES
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import current_folder
from draftsmith.recipes.schema import Recipe

Input = tuple[str, Path, str]  # what it is, where, and the command that writes it


def made_by(command: str, recipe: Recipe) -> Input:
    """The output of a stage."""
    what, path = STAGES[command].output
    return what, path(recipe), command


def require_files(*inputs: Input) -> None:
    """Raises UserError with all inputs that are missing."""
    missing = [
        f"{what}: {path} does not exist; run `draftsmith {command}` first"
        for what, path, command in inputs
        if not current_folder(path).exists()
    ]
    if missing:
        raise UserError(missing)
