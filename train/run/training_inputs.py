"""What a run reads before any weights are loaded: training rows, the draft vocabulary and the store of states."""

from dataclasses import dataclass
from pathlib import Path

from draftsmith.data_gen.states.store import Store
from draftsmith.data_gen.training_rows.rows import TrainingRow, usable_rows
from draftsmith.models.chat import FINGERPRINT_COVERS
from draftsmith.models.checkpoint import shape_of_run
from draftsmith.models.drafter_base import DrafterConfig
from draftsmith.models.formats.named_drafters import yet_to_import
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab, load_metadata
from draftsmith.recipes.command.launch import rank
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.prompt_reader import Rejects
from draftsmith.recipes.prompts.records import validation_rank
from draftsmith.recipes.schema import Recipe
from draftsmith.train.run.initial_drafter import check_start
from draftsmith.train.run.state_sources import store_of


@dataclass(frozen=True)
class Inputs:
    files: TargetFiles
    rows: list[TrainingRow]
    validation_rows: list[TrainingRow]
    shape: DrafterConfig  # the drafter's, as far as it is known without the target's weights
    vocab: DraftVocab
    store: Store | None  # of the target's states; None: the target computes them


def read_inputs(recipe: Recipe, files: TargetFiles) -> Inputs:
    """All ranks read; rank 0 records and prints rejects. Raises UserError if something does not fit the recipe."""
    rejects = Rejects(recipe.training_rejects_path if rank() == 0 else None)
    rows, validation_rows = read_rows(recipe, files, rejects)
    if rejects.total and rank() == 0:
        print(rejects.summary())
    shape, vocab = shape_of_run(recipe, files), read_run_vocab(recipe, files)
    check_start_of_recipe(recipe, files, shape, vocab)
    store = store_of(recipe, files, shape.capture_layers, [*rows, *validation_rows])
    return Inputs(files, rows, validation_rows, shape, vocab, store)


def read_rows(recipe: Recipe, files: TargetFiles, rejects: Rejects) -> tuple[list[TrainingRow], list[TrainingRow]]:
    """(training rows, validation rows). A conversation's rows stay on one side, chosen by a hash of its id."""
    usable = usable_rows(recipe, files, rejects)
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


def read_run_vocab(recipe: Recipe, files: TargetFiles) -> DraftVocab:
    """Raises UserError if it is missing, or made for another target, tokenizer or drafter.vocab_size."""
    path, fingerprint, target_vocab_size = recipe.draft_vocab_path, files.fingerprint, files.text_config.vocab_size
    vocab = DraftVocab.load(path)
    made_with = load_metadata(path).get("tokenizer_fingerprint", fingerprint)
    wanted = recipe.drafter.vocab_size or target_vocab_size
    differences = {
        f"it is for a target of {vocab.target_vocab_size} tokens, this one has {target_vocab_size}": (
            vocab.target_vocab_size != target_vocab_size
        ),
        f"its tokenizer has fingerprint {made_with[:16]}, the target's has {fingerprint[:16]} (a fingerprint covers "
        f"{FINGERPRINT_COVERS})": made_with != fingerprint,
        f"it holds {vocab.size} draft tokens, drafter.vocab_size asks for {wanted}": vocab.size != wanted,
    }
    if problems := "; ".join(difference for difference, applies in differences.items() if applies):
        raise UserError(f"{path}: {problems}; run `draftsmith rank-vocab` with this recipe")
    return vocab


def check_start_of_recipe(recipe: Recipe, files: TargetFiles, shape: DrafterConfig, vocab: DraftVocab | None) -> None:
    """Raises UserError if training cannot start from drafter.init_from, as far as that is known without weights, and
    perhaps without a `vocab`."""
    if recipe.drafter.init_from is not None and not yet_to_import(recipe, recipe.drafter.init_from):
        unknown = ("embedding_scale", *["draft_vocab_size"] * (vocab is None))
        check_start(Path(recipe.drafter.init_from), shape, vocab, files.identity, unknown)
