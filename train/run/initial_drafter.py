"""The drafter that training starts from: fresh weights, or those of a trained drafter (drafter.init_from)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from draftsmith.models.checkpoint import check_identity, read_drafter_config, read_drafter_vocab, read_weights
from draftsmith.models.drafter_base import Drafter, DrafterConfig
from draftsmith.models.drafters import build_drafter, kind_text
from draftsmith.models.eagle3 import Eagle3Drafter
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.drafter import DrafterSection
from draftsmith.train.run.lora import add_lora


def new_drafter(
    section: DrafterSection, shape: DrafterConfig, vocab: DraftVocab, target: Target, identity: dict[str, Any]
) -> Drafter:
    """A drafter with the weights that training starts from, on the CPU. Raises UserError as `check_start` and
    `add_lora`."""
    drafter = build_drafter(shape, vocab, target.frozen_head)
    if section.init_head != "random" and isinstance(drafter, Eagle3Drafter):
        with torch.no_grad():
            drafter.lm_head.weight.copy_(target.head_weight[vocab.target_ids.to(target.device)])
    if section.init_from is not None:
        start_from(Path(section.init_from), drafter, identity)
    if section.lora is not None:
        add_lora(drafter, section.lora)
    return drafter


def start_from(directory: Path, drafter: Drafter, identity: dict[str, Any]) -> None:
    """Copies the weights of a trained drafter: one of the same shape, a single layer into all specialists, a
    text drafter under a new vision adaptor, or both. Raises UserError as `check_start`."""
    given = check_start(directory, drafter.config, drafter.vocab, identity)
    drafter.load_state_dict(drafter.adapted(read_weights(directory), given))


def check_start(
    directory: Path,
    shape: DrafterConfig,
    vocab: DraftVocab | None,
    identity: dict[str, Any],
    unknown: Sequence[str] = (),
) -> DrafterConfig:
    """The shape of the drafter in `directory`, checked: a drafter of `shape` can start from its weights. `vocab`, parts
    of the target's `identity`, and the `unknown` fields of `shape` may not be known yet.

    Raises:
        UserError: the drafter is missing, or differs in target, kind, shape or draft vocabulary.
    """
    try:
        given, trained_for = read_drafter_config(directory)
        check_identity(directory, trained_for, identity)
        its_vocab = read_drafter_vocab(directory, given)
    except UserError as error:
        raise UserError([f"drafter.init_from: {problem}" for problem in error.problems]) from None
    has, wants = given.to_dict(), shape.to_dict()
    if isinstance(shape, type(given)):  # a config inherits those of the drafters that its own extends
        wants = {key: value for key, value in wants.items() if key in has}
    else:
        also = f", which may also start from a single {shape.base}" * (shape.base is not None)
        kinds = f"is a drafter of kind {kind_text(given)}, the recipe asks for {kind_text(shape)}"
        raise UserError(f"drafter.init_from: {directory} {kinds}{also}")
    different = [key for key in wants if key not in unknown and has.get(key) != wants[key]]
    if told := "; ".join(f"{key} is {has.get(key)!r} there, {wants[key]!r} here" for key in different):
        raise UserError(f"drafter.init_from: {directory} has another shape: {told}; ask for the same shape")
    if vocab is not None and not its_vocab.same_as(vocab.to(its_vocab.target_ids.device)):
        raise UserError(
            f"drafter.init_from: {directory} has another draft vocabulary than draft_vocab.safetensors of this run; "
            "run `draftsmith rank-vocab` with this recipe, which takes the drafter's"
        )
    return given
