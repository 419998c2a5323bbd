"""Weights of unroll steps: those that a recipe names, and those that follow what decoding gains."""

import itertools

import pytest
import torch
from torch.nn import functional

from draftsmith.train.loss import head_loss
from draftsmith.train.loss.head_loss import HeadLoss
from draftsmith.train.loss.losses import Lesson, LossWeights
from draftsmith.train.loss.step_weights import acceptance_weights, fixed_weights
from tests.slow_drafters import step_weight
from tests.train.test_losses import STEPS, head_pass


def test_weights_that_a_recipe_names() -> None:
    assert fixed_weights(0.5, 4) == [1.0, 0.5, 0.25, 0.125]
    assert fixed_weights([3.0, 0.0], 2) == [3.0, 0.0]
    assert fixed_weights("acceptance", 3) is None
    with pytest.raises(ValueError, match="2 step weights for 3 unroll steps"):
        fixed_weights([3.0, 0.0], 3)


def test_they_are_what_decoding_gains_from_each_step() -> None:
    """-log alpha, weighted by them as constants, has the gradient of minus the expected accepted length."""
    torch.manual_seed(0)
    steps, columns, vocab = 4, 5, 7
    p = torch.randn(steps, 1, columns, vocab, dtype=torch.float64).softmax(-1)
    logits = torch.randn_like(p).requires_grad_()
    alpha = torch.minimum(p, logits.softmax(-1)).sum(-1)
    goes_on = torch.ones(alpha.shape, dtype=torch.bool)
    goes_on[2:, 0, 1] = goes_on[0:, 0, 3] = False
    length = sum(
        torch.stack([alpha[k, 0, c] for k in range(j + 1)]).prod()
        for j, c in itertools.product(range(steps), range(columns))
        if goes_on[: j + 1, 0, c].all()
    )
    assert isinstance(length, torch.Tensor)
    (expected,) = torch.autograd.grad(-length, logits)
    weights = acceptance_weights(alpha, goes_on, floor=0.0)
    assert not weights.requires_grad and (weights[2:, 0, 1] == 0).all() and (weights[:, 0, 3] == 0).all()
    for k in range(steps):
        mine = logits[k, 0].detach().clone()
        Lesson(LossWeights(objective="log_acceptance"), p[k, 0]).learn(mine)
        torch.testing.assert_close(weights[k, 0, :, None] * mine, expected[k, 0], rtol=1e-9, atol=1e-12)


def test_an_untrained_drafter_is_taught_too() -> None:
    weights = acceptance_weights(torch.zeros(3, 1, 1), torch.ones(3, 1, 1, dtype=torch.bool))
    assert weights[:, 0, 0].tolist() == pytest.approx([0.111, 0.011, 0.001])


@pytest.mark.parametrize("elements", [1, 3 * STEPS * 31, 1 << 21])
@pytest.mark.parametrize("draft_tokens", [None, 15])
def test_the_pass_that_measures_acceptance_equals_its_twin(
    elements: int, draft_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "ELEMENTS", elements)
    monkeypatch.setattr(head_loss, "LEAST_STUDENTS", 1)
    parts = head_pass(torch.float64, draft_tokens)
    job = HeadLoss(parts["teacher"], parts["vocab"], parts["reached"], LossWeights(), torch.ones(STEPS, 1, 1))
    inputs = parts["read"], parts["weight"].requires_grad_(), parts["bias"]
    alpha, trained = job.acceptance(*inputs)
    assert torch.equal(trained, job(*inputs)[2]) and not alpha.requires_grad
    for step, b, c in itertools.product(range(STEPS), *map(range, trained.shape[1:])):
        if trained[step, b, c]:
            z = parts["teacher"].states[b, c + step] @ parts["target_head"].T
            p = functional.softmax(z[parts["vocab"].target_ids], -1)
            q = functional.softmax(parts["weight"] @ parts["read"][step][b, c] + parts["bias"], -1)
            assert float(alpha[step, b, c]) == pytest.approx(sum(map(min, p.tolist(), q.tolist())), rel=1e-9)
    weights = acceptance_weights(alpha, trained)
    for b, c in itertools.product(*map(range, trained.shape[1:])):
        accepted = [float(alpha[k, b, c]) * bool(trained[: k + 1, b, c].all()) for k in range(STEPS)]
        for k in range(STEPS):
            assert float(weights[k, b, c]) == pytest.approx(step_weight("acceptance", k, accepted), rel=1e-9)
