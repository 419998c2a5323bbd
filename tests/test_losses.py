"""Losses against their twins and the gradients that are written down for them; the noise on features."""

import math
from collections.abc import Callable

import pytest
import torch

from draftsmith.train.losses import feature_regression, soft_cross_entropy, top_k_cross_entropy
from draftsmith.train.noise import add_noise
from tests import reference, slow_drafters

COUNTED = [True, False, True, True, False, True]


def logits_and_teacher() -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = 2 * torch.randn(6, 11, dtype=torch.float64)
    return logits.requires_grad_(), torch.softmax(2 * torch.randn(6, 11, dtype=torch.float64), -1)


def assert_equals(
    mine: Callable[[torch.Tensor], torch.Tensor],
    twin: Callable[[torch.Tensor], torch.Tensor],
    given: torch.Tensor,
    gradient: torch.Tensor,
) -> None:
    """In value, in the gradient by autograd of the twin, and in the gradient that is written down."""
    value, expected = mine(given), twin(given)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-6)
    (found,) = torch.autograd.grad(value, given)
    (other,) = torch.autograd.grad(expected, given)
    torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found, gradient, rtol=1e-5, atol=1e-6)
    uncounted = [not counts for counts in COUNTED]
    assert found[uncounted].abs().max() == 0


def test_soft_cross_entropy() -> None:
    logits, p = logits_and_teacher()
    counted = torch.tensor(COUNTED)
    assert_equals(
        lambda z: soft_cross_entropy(z, p, counted),
        lambda z: reference.soft_cross_entropy(z, p, COUNTED),
        logits,
        (torch.softmax(logits.detach(), -1) - p) * counted[:, None],  # q - p
    )


@pytest.mark.parametrize("k", [1, 3, 10, 11, 50])
def test_top_k_cross_entropy(k: int) -> None:
    logits, p = logits_and_teacher()
    counted = torch.tensor(COUNTED)

    def twin(z: torch.Tensor) -> torch.Tensor:
        rows = [slow_drafters.top_k_cross_entropy(z[n], p[n], k) for n in range(6) if COUNTED[n]]
        return torch.stack(rows).sum()

    kept = torch.zeros_like(p)
    for n in range(6):
        for v in sorted(range(11), key=lambda v: -float(p[n, v]))[:k]:
            kept[n, v] = p[n, v]
    gradient = kept.sum(-1, keepdim=True) * torch.softmax(logits.detach(), -1) - kept
    assert_equals(lambda z: top_k_cross_entropy(z, p, counted, k), twin, logits, gradient * counted[:, None])
    if k >= 11:  # all tokens: the soft cross-entropy
        whole = soft_cross_entropy(logits, p, counted)
        torch.testing.assert_close(top_k_cross_entropy(logits, p, counted, k), whole)


def test_feature_regression() -> None:
    torch.manual_seed(1)
    outputs = (2 * torch.randn(6, 8, dtype=torch.float64)).requires_grad_()
    features = torch.randn(6, 8, dtype=torch.float64)
    counted = torch.tensor(COUNTED)
    d = outputs.detach() - features
    assert (d.abs() < 1).any() and (d.abs() > 1).any()
    assert_equals(
        lambda x: feature_regression(x, features, counted),
        lambda x: torch.stack([slow_drafters.smooth_l1(x[n], features[n]) for n in range(6) if COUNTED[n]]).sum(),
        outputs,
        d.clamp(-1, 1) / 8 * counted[:, None],
    )


def test_no_column_is_a_loss_of_zero() -> None:
    none = torch.zeros(0, dtype=torch.bool)
    empty = torch.zeros(0, 5, requires_grad=True)
    for loss in (
        soft_cross_entropy(empty, torch.zeros(0, 5), none),
        top_k_cross_entropy(empty, torch.zeros(0, 5), none, 3),
        feature_regression(empty, torch.zeros(0, 5), none),
    ):
        assert loss.item() == 0
        loss.backward()


def test_the_law_of_noise() -> None:
    """Uniform, width * 512 / length of the row wide, around zero; padding stays as it is."""
    clean = torch.full((3, 128, 200), 2.0)
    lengths = [128, 64, 100]
    noise = add_noise(clean, 0.2, lengths, ["a", "b", "c"]) - clean
    for b, length in enumerate(lengths):
        assert not noise[b, length:].any()
        u = noise[b, :length].flatten().double() / (0.2 * 512 / length)
        assert u.min() >= -0.5 - 1e-6 and u.max() < 0.5 + 1e-6
        count = len(u)
        # Five standard errors: of a mean of uniform numbers, of their variance, and of a share.
        assert abs(u.mean()) < 5 / math.sqrt(12 * count)
        assert abs(u.var() - 1 / 12) < 5 / math.sqrt(180 * count)
        for share in (0.1, 0.25, 0.5, 0.75, 0.9):
            assert abs((u < share - 0.5).double().mean() - share) < 5 * math.sqrt(share * (1 - share) / count)
        # Neither neighbours in a state nor neighbouring tokens have the same numbers.
        x = noise[b, :length].double()
        for one, other in ((x[1:], x[:-1]), (x[:, 1:], x[:, :-1])):
            assert abs(torch.corrcoef(torch.stack((one.flatten(), other.flatten())))[0, 1]) < 5 / math.sqrt(count - 200)


def test_noise_is_drawn_by_name() -> None:
    """Equal wherever the row stands and however it is padded, other for another name, repeatable."""
    torch.manual_seed(0)
    captured = torch.randn(2, 30, 8)
    before = captured.clone()
    both = add_noise(captured, 0.2, [30, 20], ["0/0/5", "0/0/9"])
    torch.testing.assert_close(captured, before, rtol=0, atol=0)
    state = torch.get_rng_state()
    alone = add_noise(captured[1:, :20], 0.2, [20], ["0/0/9"])
    assert torch.equal(alone[0], both[1, :20])
    assert torch.equal(torch.get_rng_state(), state)
    for other in ("0/1/9", "1/0/9", "0/0/8"):
        assert (add_noise(captured[1:, :20], 0.2, [20], [other])[0] - both[1, :20]).abs().max() > 1
    lower = add_noise(captured.bfloat16(), 0.2, [30, 20], ["0/0/5", "0/0/9"])
    assert lower.dtype == torch.bfloat16
    torch.testing.assert_close(lower.float(), both, rtol=2e-2, atol=2e-2)
