"""Checks for input files that another command writes. Imports nothing heavy, because scripts check first."""

from pathlib import Path

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import written
from draftsmith.recipes.schema import Recipe


def need(*inputs: tuple[str, Path, str]) -> None:
    """Checks that every input exists.

    Args:
        inputs: (name, path, the script that writes it).

    Raises:
        UserError: names all missing inputs.
    """
    missing = [
        f"{what}: {path} does not exist; {writer} writes it"
        for what, path, writer in inputs
        if not written(path).exists()
    ]
    if missing:
        raise UserError(missing)


def conversations(recipe: Recipe) -> tuple[str, Path, str]:
    """The regenerated conversations, as `need` takes them."""
    return "data.conversations", recipe.conversations_path, "data_gen/regenerate.py"


def draft_vocab(recipe: Recipe) -> tuple[str, Path, str]:
    """The draft vocabulary, as `need` takes it."""
    return "draft vocabulary", recipe.draft_vocab_path, "data_gen/rank_vocab.py"


def drafter(recipe: Recipe) -> tuple[str, Path, str]:
    """The drafter that the recipe trains, as `need` takes it."""
    return "drafter", recipe.drafter_dir, f"train/{recipe.drafter.kind}.py"
