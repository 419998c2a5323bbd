"""Where the gradients of position specialists end, and that a single drafter with as many parameters is one."""

import pytest
import torch

from draftsmith.models.alignment import columns_of
from draftsmith.models.drafters import trainable_parameters
from draftsmith.recipes.schema import Detach
from draftsmith.train.loss.unroll import unroll
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
