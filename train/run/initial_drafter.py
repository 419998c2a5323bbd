"""The drafter that training starts from: fresh weights, or those of a trained drafter (drafter.init_from); LoRA."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from draftsmith.models.checkpoint import check_identity, read_drafter_config, read_drafter_vocab, read_weights
from draftsmith.models.drafter_base import Drafter, DrafterConfig
from draftsmith.models.drafters import build_drafter, kind_text
from draftsmith.models.eagle3 import Eagle3Drafter
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError, naming_problems, quoted
from draftsmith.recipes.sections.drafter import DrafterSection, LoraSection


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
    with naming_problems("drafter.init_from: "):
        given, trained_for = read_drafter_config(directory)
        check_identity(directory, trained_for, identity)
        its_vocab = read_drafter_vocab(directory, given)
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


class LowRankSum(nn.Module):
    """LoRA of a linear layer (drafter.lora; arXiv 2106.09685): two thin matrices learn beside the frozen weight.

        weight [out, in]  =  frozen  +  alpha / r * b a,    a [r, in] random, b [out, r] zero at the start

    As PyTorch's parametrisation it takes the place of the weight, so every reader sees the sum: the head's fused loss
    and the MLP's fused product read weights without calling a layer, and would pass over peft's layers.
    """

    def __init__(self, weight: torch.Tensor, r: int, alpha: float):
        super().__init__()
        self.scale = alpha / r
        self.a = nn.Parameter(weight.new_empty(r, weight.shape[1]))
        self.b = nn.Parameter(weight.new_zeros(weight.shape[0], r))
        nn.init.kaiming_uniform_(self.a, a=math.sqrt(5))

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return torch.addmm(weight, self.b, self.a, alpha=self.scale)


def add_lora(drafter: Drafter, section: LoraSection) -> None:
    """Freezes the drafter and adds trainable matrices to its linear layers. Raises UserError if drafter.lora.modules
    names layers that it has not."""
    drafter.requires_grad_(False)
    linear = {name: module for name, module in drafter.named_modules() if isinstance(module, nn.Linear)}
    known = {name.rpartition(".")[2] for name in linear}
    if unknown := sorted(set(section.modules or ()) - known):
        raise UserError(
            f"drafter.lora.modules: this drafter has no linear layers called {quoted(unknown)}; "
            f"it has {', '.join(sorted(known))}"
        )
    for name, module in linear.items():
        if name.rpartition(".")[2] in (section.modules or known):
            low_rank = LowRankSum(module.weight, section.r, section.alpha)
            parametrize.register_parametrization(module, "weight", low_rank)


def merge_lora(drafter: Drafter) -> None:
    """Makes it an ordinary drafter of the same weights, in place. Without LoRA nothing changes."""
    for module in list(drafter.modules()):
        if parametrize.is_parametrized(module, "weight"):
            parametrize.remove_parametrizations(module, "weight", leave_parametrized=True)
