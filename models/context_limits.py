"""Lengths that a recipe asks for, against the positions that its target has."""

import os

from draftsmith.models.families import positions_text
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.stages import INSIDE_RUN, stages_of
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe


def longest_row(recipe: Recipe, files: TargetFiles) -> int:
    """Most tokens of a row: data.max_length, or the target's positions where they are fewer."""
    return min(recipe.data.max_length, files.positions)


def no_room(recipe: Recipe, files: TargetFiles) -> str | None:
    """A problem if no prompt of the evaluation fits beside its answer, else None."""
    if recipe.eval.max_new_tokens < files.positions:
        return None
    positions = positions_text(files.text_config)
    return f"eval.max_new_tokens {recipe.eval.max_new_tokens:,} leaves no room for a prompt in the target's {positions}"


def check_evaluation(recipe: Recipe, files: TargetFiles) -> None:
    """Raises UserError if `draftsmith run` would end in an evaluation that is refused, as far as configs tell."""
    evaluates = "evaluate" in stages_of(recipe) and recipe.eval.mode != "replay"
    if INSIDE_RUN in os.environ and evaluates and (problem := no_room(recipe, files)):
        raise UserError(problem)


def bounded_rows(recipe: Recipe, files: TargetFiles) -> str | None:
    """A note if the target has fewer positions than data.max_length has tokens, else None."""
    if (longest := longest_row(recipe, files)) == recipe.data.max_length:
        return None
    return (
        f"note: data.max_length is {recipe.data.max_length:,}, and the target has {positions_text(files.text_config)}: "
        f"no row is longer than {longest:,} tokens"
    )
