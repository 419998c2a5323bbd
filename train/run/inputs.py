"""What a run reads before any weights are loaded: training rows, the draft vocabulary and the store of states."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data_gen.states.store import Store
from draftsmith.data_gen.training_rows.rows import TrainingRow, usable_rows
from draftsmith.models.chat import FINGERPRINT_COVERS, load_config, tokenizer_fingerprint
from draftsmith.models.checkpoint import config_identity, shape_of_run
from draftsmith.models.feature_drafter import DrafterConfig
from draftsmith.models.formats.named_drafters import yet_to_import
from draftsmith.models.quantize import target_changes
from draftsmith.models.vocab import DraftVocab, load_metadata
from draftsmith.recipes.command.inputs import draft_vocab, need
from draftsmith.recipes.command.launch import rank
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.held_out import validation_rank
from draftsmith.recipes.prompts.reader import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.train.run.initial_drafter import check_start
from draftsmith.train.run.state_sources import store_of


@dataclass(frozen=True)
class Inputs:
    """What a run reads before any weights are loaded.

    Attributes:
        config: the target's text config.
        fingerprint: the tokenizer's.
        shape: the drafter's, as far as it is known without the target's weights.
        store: of the target's states; None: the target computes them.
    """

    rows: list[TrainingRow]
    validation_rows: list[TrainingRow]
    config: Any
    fingerprint: str
    shape: DrafterConfig
    vocab: DraftVocab
    store: Store | None


def read_inputs(recipe: Recipe, tokenizer: Any) -> Inputs:
    """All ranks read; rank 0 records and prints rejects.

    Raises:
        UserError: something is missing, or does not fit the recipe.
    """
    rejects = Rejects(recipe.training_rejects_path if rank() == 0 else None)
    rows, validation_rows = read_rows(recipe, tokenizer, rejects)
    if rejects.total and rank() == 0:
        print(rejects.summary())
    whole, fingerprint = load_config(recipe.target), tokenizer_fingerprint(tokenizer)
    shape, config = shape_of_run(recipe, whole), whole.get_text_config()
    vocab = read_run_vocab(recipe, config.vocab_size, fingerprint)
    check_start_of_recipe(recipe, config, shape, vocab, fingerprint)
    store = store_of(recipe, config, shape.capture_layers, [*rows, *validation_rows], fingerprint)
    return Inputs(rows, validation_rows, config, fingerprint, shape, vocab, store)


def read_rows(recipe: Recipe, tokenizer: Any, rejects: Rejects) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """(training rows, validation rows). A conversation's rows stay on one side, chosen by a hash of its id."""
    usable = usable_rows(recipe, tokenizer, rejects)
    wanted = min(recipe.train.validation_conversations, len({row.id for row in usable}) // 5)
    ids = sorted({row.id for row in usable}, key=validation_rank)
    kept_out = set(ids[:wanted])
    training = [row for row in usable if row.id not in kept_out]
    if not training:
        raise UserError(
            f"data.conversations: {recipe.conversations_path} every answer is a single token; at least two "
            "are needed to train"
        )
    return training, [row for row in usable if row.id in kept_out]


def read_run_vocab(recipe: Recipe, target_vocab_size: int, fingerprint: str) -> DraftVocab:
    """The run's draft vocabulary, checked against the recipe and the target.

    Raises:
        UserError: it is missing, or made for another target, tokenizer or drafter.vocab_size.
    """
    need(draft_vocab(recipe))
    path = recipe.draft_vocab_path
    vocab = DraftVocab.load(path)
    made_with = load_metadata(path).get("tokenizer_fingerprint", fingerprint)
    wanted = recipe.drafter.vocab_size or target_vocab_size
    problems = []
    if vocab.target_vocab_size != target_vocab_size:
        problems.append(f"it is for a target of {vocab.target_vocab_size} tokens, this one has {target_vocab_size}")
    if made_with != fingerprint:
        problems.append(
            f"its tokenizer has fingerprint {made_with[:16]}, the target's has {fingerprint[:16]} "
            f"(a fingerprint covers {FINGERPRINT_COVERS})"
        )
    if vocab.size != wanted:
        problems.append(f"it holds {vocab.size} draft tokens, drafter.vocab_size asks for {wanted}")
    if problems:
        raise UserError(f"{path}: {'; '.join(problems)}; run `draftsmith rank-vocab` with this recipe")
    return vocab


def check_start_of_recipe(
    recipe: Recipe, config: Any, shape: DrafterConfig, vocab: DraftVocab | None, fingerprint: str
) -> None:
    """Raises UserError if training cannot start from drafter.init_from, as far as that can be told without weights.

    Args:
        vocab: None: there is none yet.
    """
    if recipe.drafter.init_from is not None and not yet_to_import(recipe, recipe.drafter.init_from):
        section = recipe.target
        target = config_identity(config, section.model, section.revision, fingerprint, target_changes(section))
        unknown = ("embedding_scale", *["draft_vocab_size"] * (vocab is None))
        check_start(Path(recipe.drafter.init_from), shape, vocab, target, unknown)
