"""Small drafters of every kind and variant with random weights, and rows to unroll them on."""

import copy
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from draftsmith.models.alignment import Columns, Documents, columns_of
from draftsmith.models.draft_tree import Committed
from draftsmith.models.drafter_base import Drafter
from draftsmith.models.drafters import build_drafter, config_class
from draftsmith.models.feature_drafter import FeatureDrafter, FeatureDrafting
from draftsmith.models.prompt import DecoderInputs
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.sections.train import Detach, StepWeight
from draftsmith.train.loss.losses import LossWeights
from draftsmith.train.loss.unroll import TrainingTimeTest, UnrollSums, teacher_of
from tests.conftest import make_target

VOCAB_SIZE = 48


@dataclass(frozen=True)
class Case:
    """A drafter and how it is trained. `own`: what its config says beyond the target's shape."""

    kind: str
    base: str | None
    own: dict[str, Any]
    steps: int
    detach: Detach
    weights: LossWeights
    step_weight: StepWeight = 1.0
    draft_tokens: int | None = None  # None: the whole vocabulary


EAGLE = LossWeights(token=0.1, feature=1.0)
HASS = LossWeights(token=0.1, feature=1.0, top_k=1.0, top_k_tokens=5)
EAGLE3 = LossWeights()
HYBRID = LossWeights(token=0.5, objective="hybrid", rank=0.2, rank_tokens=4)
ACCEPTANCE = LossWeights(objective="log_acceptance", feature=0.5, top_k=0.1, top_k_tokens=3)


def specialists(positions: int, count: int) -> dict[str, int]:
    return {"positions_per_specialist": positions, "specialists": count}


# Of position specialists, the last one always has more positions than its own.
CASES: dict[str, Case] = {
    "eagle": Case("eagle", None, {}, 1, True, EAGLE),
    "hass": Case("eagle", None, {}, 4, True, HASS),
    "hass, not detached": Case("eagle", None, {"embedding_scale": 3.0}, 3, False, HASS, "acceptance"),
    "eagle, two layers": Case("eagle", None, {"num_layers": 2}, 3, True, EAGLE, [0.5, 0.0, 2.0]),
    "eagle, log acceptance": Case("eagle", None, {}, 3, True, ACCEPTANCE),
    "eagle, other biases": Case("eagle", None, {"attention_bias": True, "fc_bias": False}, 3, True, EAGLE),
    "eagle3": Case("eagle3", None, {}, 5, False, EAGLE3, 0.8, 36),
    "eagle3, fc_norm": Case("eagle3", None, {"fc_norm": True, "num_attention_heads": 6}, 2, False, EAGLE3, 0.8),
    "eagle3, norm_output": Case("eagle3", None, {"norm_output": True}, 8, False, EAGLE3, 0.8),
    "eagle3.1": Case("eagle3", None, {"fc_norm": True, "norm_output": True}, 3, False, EAGLE3, "acceptance", 36),
    "eagle3, hybrid and rank": Case("eagle3", None, {}, 3, False, HYBRID, 0.8, 36),
    "eagle3, two layers": Case("eagle3", None, {"num_layers": 2, "attention_bias": True}, 4, False, EAGLE3, 0.8),
    "poss-1": Case("poss", "eagle", specialists(1, 3), 5, True, EAGLE),
    "poss-2": Case("poss", "eagle", specialists(2, 2), 6, True, EAGLE),
    "poss-2 of three": Case("poss", "eagle", specialists(2, 3) | {"attention_bias": True}, 7, True, EAGLE),
    "poss3-1": Case("poss", "eagle3", specialists(1, 3) | {"norm_output": True}, 5, False, EAGLE3, 0.8, 40),
    "poss3-2": Case("poss", "eagle3", specialists(2, 2), 6, "specialists", EAGLE3, 0.8, 40),
    "poss3-2, detached": Case("poss", "eagle3", specialists(2, 2) | {"fc_norm": True}, 6, True, EAGLE3, 0.8, 40),
}
SPECIALISTS = [name for name in CASES if name.startswith("poss")]
# A few that between them have every part in every place: each kind, several layers, biases with and without, every
# norm, a scaled embedding, a draft vocabulary, specialists of one and of several positions.
STRUCTURES = [
    *("hass, not detached", "eagle, two layers", "eagle, other biases", "eagle3.1", "eagle3, two layers"),
    *("poss-2 of three", "poss3-1", "poss3-2, detached"),
]


@cache
def small_target() -> Target:
    return Target(make_target(num_layers=7, vocab_size=VOCAB_SIZE))


def random_drafter(
    target: Target, kind: str, base: str | None, own: dict[str, Any], draft_tokens: int | None, seed: int = 1
) -> FeatureDrafter:
    """Random weights; norms, too, whose ones would hide that one is missing.

    `own` is what the config says beyond the target's shape; `draft_tokens` of None is the whole vocabulary.
    """
    torch.manual_seed(seed)
    vocab = DraftVocab.full(target.vocab_size)
    if draft_tokens is not None:
        vocab = DraftVocab(torch.randperm(target.vocab_size)[:draft_tokens].sort().values, target.vocab_size)
    shape = config_class(kind, base, own)
    assert shape is not None
    layers = target.capture_layers if "eagle3" in (kind, base) else (target.num_layers,)
    own = {"intermediate_size": 24, "embedding_scale": target.embedding_scale, **own}
    config = shape.for_target(target.config, target.vocab_size, layers, vocab.size, **own)
    drafter = build_drafter(config, vocab, target.frozen_head)
    assert isinstance(drafter, FeatureDrafter)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "self_attn" in name:
                parameter *= 2  # attention that looks at something in particular
            elif "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
    return drafter


def drafter_of(case: Case, seed: int = 1) -> FeatureDrafter:
    return random_drafter(small_target(), case.kind, case.base, case.own, case.draft_tokens, seed)


def make_rows(lengths: list[int], seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and spans; each row has two supervised turns."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    span = torch.zeros_like(ids)
    for b, length in enumerate(lengths):
        ids[b, :length] = torch.randint(1, VOCAB_SIZE, (length,), generator=generator)
        span[b, 2 : length // 3] = 1
        span[b, length // 3 + 2 : length] = 2
    return ids, span


def states_of(drafter: Drafter, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(captured [B, T, F], last [B, T, H]) of the target."""
    states = small_target().states(ids, drafter.config.capture_layers)
    return states.captured, states.last


def embedder_of(drafter: Drafter, target: Target | None = None) -> Target:
    """The target, its embeddings scaled as the drafter's config says of it."""
    target = copy.copy(target or small_target())
    target.embedding_scale = drafter.config.embedding_scale
    return target


def inputs_of(drafter: Drafter, ids: torch.Tensor, documents: Documents | None = None) -> DecoderInputs:
    """What drafters are handed of these tokens."""
    positions = None if documents is None else documents.position
    return embedder_of(drafter).inputs(ids, positions, dtype=drafter.dtype)


def trainee_of(case: Case, drafter: FeatureDrafter, checkpointing: bool = False) -> TrainingTimeTest:
    return TrainingTimeTest(drafter, case.steps, case.step_weight, checkpointing, case.weights, case.detach)


def sums_of(trainee: TrainingTimeTest, ids: torch.Tensor, span: torch.Tensor) -> UnrollSums:
    """What a micro-batch adds up to."""
    captured, last = states_of(trainee.drafter, ids)
    columns = columns_of(span, trainee.steps)
    teacher = teacher_of(small_target(), last, ids, columns, trainee.drafter.vocab)
    return trainee(captured, inputs_of(trainee.drafter, ids), columns, teacher)


def gradients(drafter: Drafter) -> dict[str, torch.Tensor]:
    """Of the parameters that have one; they are taken away from them."""
    found = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    return found


def assert_same_gradients(
    mine: dict[str, torch.Tensor], others: dict[str, torch.Tensor], tolerance: float = 2e-5
) -> None:
    """Each parameter's, up to a share of its largest element: what float32 makes of sums in another order."""
    assert set(mine) == set(others)
    for name, gradient in mine.items():
        largest = float(others[name].abs().max())
        difference = float((gradient - others[name]).abs().max())
        assert difference <= tolerance * largest, f"{name}: {difference:.3g} apart, the largest is {largest:.3g}"


def chain_of(
    drafter: FeatureDrafter,
    captured_TF: torch.Tensor,
    ids: list[int],
    column: int,
    target: Target | None = None,
    cut: DraftVocab | None = None,
) -> tuple[FeatureDrafting, list[torch.Tensor]]:
    """Drafts the tokens behind root ids[column + 1], one by one: the drafting, and log-probabilities [Vd] after each.

    The columns up to the root come in two portions, as rounds deliver them.
    """
    drafting, target = FeatureDrafting(drafter, cut), embedder_of(drafter, target)
    drafting.set_rows([], 1)
    if column > 0:
        drafting.observe(Committed(target, [ids[: column + 1]], captured_TF[None, :column], [column]))
    drafting.observe(Committed(target, [ids[: column + 2]], captured_TF[None, column : column + 1], [1]))
    log_probs = [drafting.root_log_probs()[0]]
    for depth, token in enumerate(ids[column + 2 :], start=1):
        log_probs.append(drafting.expand(torch.tensor([[depth - 1]]), torch.tensor([[token]]), depth)[0, 0])
    return drafting, log_probs


def column_alone(column: int, steps: int) -> Columns:
    """One row of which one column counts."""
    return Columns(torch.tensor([[column]]), torch.tensor([[steps]]))
