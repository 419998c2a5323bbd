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


def _eagle(
    steps: int, weights: LossWeights = EAGLE, detach: Detach = True, step_weight: StepWeight = 1.0, **own: Any
) -> Case:
    return Case("eagle", None, own, steps, detach, weights, step_weight)


def _eagle3(
    steps: int,
    draft_tokens: int | None = None,
    step_weight: StepWeight = 0.8,
    weights: LossWeights = EAGLE3,
    **own: Any,
) -> Case:
    return Case("eagle3", None, own, steps, False, weights, step_weight, draft_tokens)


def _poss(steps: int, n: int, m: int, **own: Any) -> Case:
    return Case("poss", "eagle", {"positions_per_specialist": n, "specialists": m, **own}, steps, True, EAGLE)


def _poss3(steps: int, n: int, m: int, detach: Detach = "specialists", **own: Any) -> Case:
    own = {"positions_per_specialist": n, "specialists": m, **own}
    return Case("poss", "eagle3", own, steps, detach, EAGLE3, 0.8, 40)


# Of position specialists, the last one always has more positions than its own.
CASES: dict[str, Case] = {
    "eagle": _eagle(1),
    "hass": _eagle(4, HASS),
    "hass, not detached": _eagle(3, HASS, detach=False, step_weight="acceptance", embedding_scale=3.0),
    "eagle, two layers": _eagle(3, step_weight=[0.5, 0.0, 2.0], num_layers=2),
    "eagle, log acceptance": _eagle(3, ACCEPTANCE),
    "eagle, other biases": _eagle(3, attention_bias=True, fc_bias=False),
    "eagle3": _eagle3(5, draft_tokens=36),
    "eagle3, fc_norm": _eagle3(2, fc_norm=True, num_attention_heads=6),
    "eagle3, norm_output": _eagle3(8, norm_output=True),
    "eagle3.1": _eagle3(3, draft_tokens=36, step_weight="acceptance", fc_norm=True, norm_output=True),
    "eagle3, hybrid and rank": _eagle3(3, draft_tokens=36, weights=HYBRID),
    "eagle3, two layers": _eagle3(4, num_layers=2, attention_bias=True),
    "poss-1": _poss(5, 1, 3),
    "poss-2": _poss(6, 2, 2),
    "poss-2 of three": _poss(7, 2, 3, attention_bias=True),
    "poss3-1": _poss3(5, 1, 3, detach=False, norm_output=True),
    "poss3-2": _poss3(6, 2, 2),
    "poss3-2, detached": _poss3(6, 2, 2, detach=True, fc_norm=True),
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


def drafter_of(case: Case, seed: int = 1) -> FeatureDrafter:
    """Random weights; norms, too, which would otherwise all be ones and hide their absence."""
    target = small_target()
    torch.manual_seed(seed)
    vocab = DraftVocab.full(VOCAB_SIZE)
    if case.draft_tokens is not None:
        vocab = DraftVocab(torch.randperm(VOCAB_SIZE)[: case.draft_tokens].sort().values, VOCAB_SIZE)
    shape = config_class(case.kind, case.base, case.own)
    assert shape is not None
    fused = "eagle3" in (case.kind, case.base)
    layers = target.capture_layers if fused else (target.num_layers,)
    own = {"intermediate_size": 24, **case.own}
    config = shape.for_target(target.config, VOCAB_SIZE, layers, vocab.size, **own)
    drafter = build_drafter(config, vocab, target.frozen_head)
    assert isinstance(drafter, FeatureDrafter)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter += 0.3 * torch.randn_like(parameter)
            elif "self_attn" in name:
                parameter *= 2  # attention that looks at something in particular
    return drafter


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


def embedder_of(drafter: Drafter) -> Target:
    """The target, its embeddings scaled as the drafter's config says of it."""
    target = copy.copy(small_target())
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
    drafter: FeatureDrafter, captured_TF: torch.Tensor, ids: list[int], column: int
) -> tuple[FeatureDrafting, list[torch.Tensor]]:
    """Drafts the tokens behind root ids[column + 1], one by one: the drafting, and log-probabilities [Vd] after each.

    The columns up to the root come in two portions, as rounds deliver them.
    """
    drafting, target = FeatureDrafting(drafter), embedder_of(drafter)
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
