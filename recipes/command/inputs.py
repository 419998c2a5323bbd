"""Checks for input files that another command writes. Imports nothing heavy, because scripts check first."""

from pathlib import Path

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import written
from draftsmith.recipes.schema import Recipe


def need(*inputs: tuple[str, Path, str]) -> None:
    """Checks that every input exists.

    Args:
        inputs: (name, path, the command that writes it).

    Raises:
        UserError: names all missing inputs.
    """
    missing = [
        f"{what}: {path} does not exist; run `draftsmith {command}` first"
        for what, path, command in inputs
        if not written(path).exists()
    ]
    if missing:
        raise UserError(missing)


def prompts(recipe: Recipe) -> list[tuple[str, Path, str]]:
    """The prompts for training that reprompt writes, as `need` takes them; empty where it writes none."""
    return [("data.prompts", recipe.picture_prompts_path, "reprompt")] if recipe.reprompts else []


def conversations(recipe: Recipe) -> tuple[str, Path, str]:
    """The regenerated conversations, as `need` takes them."""
    return "data.conversations", recipe.conversations_path, "regenerate"


def draft_vocab(recipe: Recipe) -> tuple[str, Path, str]:
    """The draft vocabulary, as `need` takes it."""
    return "draft vocabulary", recipe.draft_vocab_path, "rank-vocab"


def drafter(recipe: Recipe) -> tuple[str, Path, str]:
    """The drafter that the recipe trains, as `need` takes it."""
    return "drafter", recipe.drafter_dir, "train"
