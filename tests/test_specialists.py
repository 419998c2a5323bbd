"""Position specialists: where their gradients end, and the single drafter with as many parameters."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.models.alignment import columns_of
from draftsmith.models.drafters import build_drafter, drafter_config, padded, trainable_parameters
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Detach, DrafterSection
from draftsmith.train.loss.unroll import unroll
from tests.conftest import make_target
from tests.drafter_cases import CASES, SPECIALISTS, drafter_of, gradients, inputs_of, make_rows, states_of


def of_specialist(name: str) -> int | None:
    return int(name.split(".")[1]) if name.startswith("specialists.") else None


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpointed"])
@pytest.mark.parametrize("detach", [False, "specialists", True])
@pytest.mark.parametrize("name", SPECIALISTS)
def test_what_a_specialist_learns_from(name: str, detach: Detach, checkpointing: bool) -> None:
    """One step's outputs give gradients to its specialist and to what is shared; to the specialists before it only
    where nothing is detached."""
    case, drafter = CASES[name], drafter_of(CASES[name])
    ids, span = make_rows([20, 16])
    columns, (captured, _) = columns_of(span, case.steps), states_of(drafter, ids)
    shared = {key for key, _ in drafter.named_parameters() if of_specialist(key) is None}
    for step in range(case.steps):
        outputs = list(unroll(drafter, captured, inputs_of(drafter, ids), columns, case.steps, checkpointing, detach))
        counted = columns.counted(step)
        torch.log_softmax(drafter.logits(outputs[step][counted]), -1)[:, 0].sum().backward()
        found = {key: gradient for key, gradient in gradients(drafter).items() if gradient.abs().max() > 0}
        n, m = case.own["positions_per_specialist"], case.own["specialists"]
        specialist = min(step // n, m - 1)
        before = set() if detach else set(range(specialist))
        assert {of_specialist(key) for key in found} == {None, specialist} | before
        assert shared <= set(found)
        assert {key for key, _ in drafter.named_parameters() if of_specialist(key) == specialist} <= set(found)


@pytest.mark.parametrize("detach", [False, "specialists", True])
@pytest.mark.parametrize("name", SPECIALISTS)
def test_where_a_feature_is_cut_off(name: str, detach: Detach) -> None:
    """The gradient of step k in the output of step j < k: of all, of those that one specialist made, or of none."""
    case, drafter = CASES[name], drafter_of(CASES[name])
    ids, span = make_rows([20, 16])
    columns, (captured, _) = columns_of(span, case.steps), states_of(drafter, ids)
    outputs = list(unroll(drafter, captured, inputs_of(drafter, ids), columns, case.steps, False, detach))
    for k in range(case.steps):
        for j in range(k):
            (gradient,) = torch.autograd.grad(outputs[k].sum(), outputs[j], retain_graph=True, allow_unused=True)
            flows = gradient is not None and bool(gradient.abs().max() > 0)
            assert flows == (not detach or (detach is not True and drafter.stack_of(j) == drafter.stack_of(k))), (j, k)


def test_what_specialists_cost() -> None:
    """A layer each; what stands before and behind is there once."""
    one, three = (drafter_of(CASES[name]) for name in ("eagle", "poss-1"))
    layer = sum(p.numel() for p in one.stacks[0][0].parameters())
    assert trainable_parameters(three.config) == trainable_parameters(one.config) + 2 * layer


@pytest.mark.parametrize("specialists", [2, 4, 7])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
@pytest.mark.parametrize("bias", [False, True])
def test_a_single_drafter_with_as_many_parameters(kind: Any, num_layers: int, specialists: int, bias: bool) -> None:
    """Equal to half a row of the MLP of each layer; a row has a weight in gate, up and down for each hidden unit."""
    config, layers = make_target().config, (2, 3, 4)
    alone = DrafterSection(kind=kind, num_layers=num_layers, match_specialists=specialists, attention_bias=bias)
    beside = DrafterSection(kind="poss", base=kind, specialists=specialists, attention_bias=bias)
    matched = drafter_config(alone, config, layers)
    difference = trainable_parameters(matched) - trainable_parameters(drafter_config(beside, config, layers))
    assert abs(difference) <= 3 * config.hidden_size * num_layers / 2
    narrow = drafter_config(alone.model_copy(update={"match_specialists": None}), config, layers)
    assert replace(matched, intermediate_size=narrow.intermediate_size) == narrow


def test_more_layers_than_specialists_have_narrower_mlps_or_are_refused() -> None:
    section, config = DrafterSection(kind="eagle", num_layers=3, match_specialists=2), make_target().config
    matched = drafter_config(section, config, ())
    assert matched.intermediate_size < config.intermediate_size
    beside = drafter_config(DrafterSection(kind="poss", specialists=2), config, ())
    assert abs(trainable_parameters(matched) - trainable_parameters(beside)) <= 3 * config.hidden_size * 3 / 2
    with pytest.raises(UserError, match=r"drafter.match_specialists: 2 .* 9 layers"):
        drafter_config(section.model_copy(update={"num_layers": 9}), config, ())


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_wider_mlp_begins_as_the_narrow_one(kind: str) -> None:
    """The matched baseline may start where the specialists do: from a trained layer, whose outputs it then has."""
    target = Target(make_target())
    layers = () if kind == "eagle" else (2, 4, 5)
    narrow_section, wide_section = DrafterSection(kind=kind), DrafterSection(kind=kind, match_specialists=3)  # type: ignore[arg-type]
    vocab = DraftVocab.full(target.vocab_size)
    torch.manual_seed(0)
    narrow, wide = (
        build_drafter(drafter_config(section, target.config, layers), vocab, target.frozen_head)
        for section in (narrow_section, wide_section)
    )
    random_rows = wide.stacks[0][0].mlp.gate_proj.weight.detach().clone()
    wide.load_state_dict(padded(narrow.state_dict(), wide))
    width = narrow.config.intermediate_size
    assert wide.config.intermediate_size > width
    x = torch.randn(2, 3, target.hidden_size)
    torch.testing.assert_close(wide.stacks[0][0].mlp(x), narrow.stacks[0][0].mlp(x))
    # What is new is not dead: its rows are random, and down learns to use them.
    assert torch.equal(wide.stacks[0][0].mlp.gate_proj.weight[width:], random_rows[width:])
    wide.stacks[0][0].mlp(x).square().sum().backward()
    gradient = wide.stacks[0][0].mlp.down_proj.weight.grad
    assert gradient is not None and gradient[:, width:].abs().min() > 0
