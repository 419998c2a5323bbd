"""What is known about a target before its weights are loaded."""

import os
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.models.chat import load_config, load_tokenizer, tokenizer_fingerprint
from draftsmith.models.checkpoint import config_identity
from draftsmith.models.families import positions_text, usable_positions
from draftsmith.models.quantize import target_changes
from draftsmith.models.turn_ends import stop_ids
from draftsmith.recipes.command.stages import INSIDE_RUN, stages_of
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe, TargetSection


@dataclass(frozen=True)
class TargetFacts:
    """The config and the tokenizer of a target."""

    section: TargetSection
    config: Any  # its text config
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str  # of the tokenizer

    @classmethod
    def read(cls, section: TargetSection) -> "TargetFacts":
        """Raises UserError if there is no such target."""
        config, tokenizer = load_config(section).get_text_config(decoder=True), load_tokenizer(section)
        return cls(section, config, tokenizer, tokenizer_fingerprint(tokenizer))

    @property
    def positions(self) -> int:
        return usable_positions(self.config)

    @property
    def stop_ids(self) -> list[int]:
        return sorted(stop_ids(self.tokenizer))

    @property
    def identity(self) -> dict[str, Any]:
        """`checkpoint.config_identity`."""
        section = self.section
        return config_identity(self.config, section.model, section.revision, self.fingerprint, target_changes(section))


def positions_of(section: TargetSection) -> int:
    """`usable_positions` of a target. Raises UserError if there is no such target."""
    return usable_positions(load_config(section).get_text_config(decoder=True))


def longest_row(recipe: Recipe) -> int:
    """Most tokens of a row that regeneration writes and that training, capture and plans read: data.max_length, or
    the target's positions where they are fewer. It reads and learns nothing that the target could not read itself."""
    return min(recipe.data.max_length, positions_of(recipe.target))


def no_room(recipe: Recipe) -> str | None:
    """A problem if no prompt of the evaluation fits beside its answer, else None."""
    if recipe.eval.max_new_tokens < positions_of(recipe.target):
        return None
    positions = positions_text(load_config(recipe.target).get_text_config(decoder=True))
    return f"eval.max_new_tokens {recipe.eval.max_new_tokens:,} leaves no room for a prompt in the target's {positions}"


def check_evaluation(recipe: Recipe) -> None:
    """Raises UserError if `draftsmith run` would end in an evaluation that is refused, as far as configs tell."""
    evaluates = "evaluate" in stages_of(recipe) and recipe.eval.mode != "replay"
    if INSIDE_RUN in os.environ and evaluates and (problem := no_room(recipe)):
        raise UserError(problem)


def bounded_rows(recipe: Recipe) -> str | None:
    """A note if the target has fewer positions than data.max_length has tokens, else None."""
    if (longest := longest_row(recipe)) == recipe.data.max_length:
        return None
    positions = positions_text(load_config(recipe.target).get_text_config(decoder=True))
    return (
        f"note: data.max_length is {recipe.data.max_length:,}, and the target has {positions}: no row is longer than "
        f"{longest:,} tokens"
    )
