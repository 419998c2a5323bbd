"""Checks for input files that another command writes. Imports nothing heavy, because scripts check first."""

from pathlib import Path

from draftsmith.recipes.command.stages import STAGES
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import current_folder
from draftsmith.recipes.schema import Recipe

Input = tuple[str, Path, str]  # what it is, where, and the command that writes it


def made_by(command: str, recipe: Recipe) -> Input:
    """The first file of a stage."""
    stage = STAGES[command]
    return stage.makes, stage.writes(recipe)[0], command


def is_there(path: Path) -> bool:
    """Whether the file exists, also in a folder that a kill left half renamed."""
    return (current_folder(path.parent) / path.name).exists()


def require_files(*inputs: Input) -> None:
    """Raises UserError with all inputs that are missing."""
    missing = [
        f"{what}: {path} does not exist; run `draftsmith {command}` first"
        for what, path, command in inputs
        if not is_there(path)
    ]
    if missing:
        raise UserError(missing)
