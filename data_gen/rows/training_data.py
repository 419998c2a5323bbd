"""The rows that a recipe trains and validates on: the same for training and for what is captured for it."""

from typing import Any

from draftsmith.data_gen.rows.overlap import left_out_of_training
from draftsmith.data_gen.rows.training_rows import TrainingRow, training_rows
from draftsmith.recipes.command.inputs import conversations, need
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe


def usable_rows(recipe: Recipe, tokenizer: Any, rejects: Rejects) -> list[TrainingRow]:
    """All rows of the recipe's conversations with an answer of two tokens or more, in the file's order.

    Raises:
        UserError: no conversations, or none that can be trained on.
    """
    need(conversations(recipe))
    rows = training_rows(
        recipe.conversations_path, tokenizer, recipe.data.max_length, rejects, left_out_of_training(recipe)
    )
    return [row for row in rows if any(end - start >= 2 for start, end in row.spans)]
