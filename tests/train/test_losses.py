"""Losses against their twins, in value and gradient; the pass over head, teacher and losses; weights of unroll steps;
noise on features."""

import functools
import itertools
import math
from typing import Any, get_args

import pytest
import torch
from torch.nn import functional

from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.sections.train import TokenObjective, TrainSection
from draftsmith.train.loss import head_loss
from draftsmith.train.loss.head_loss import HeadLoss, Teacher
from draftsmith.train.loss.losses import Lesson, LossWeights, feature_regression
from draftsmith.train.loss.step_weights import acceptance_weights
from draftsmith.train.loss.unroll import add_noise
from draftsmith.train.run.engine import trainee_of
from tests import reference, slow_drafters
from tests.thinning import pairwise

equal = functools.partial(torch.testing.assert_close, rtol=1e-10, atol=1e-12)
OBJECTIVES = get_args(TokenObjective)
MIXTURES = {
    **{name: LossWeights(token=0.7, objective=name) for name in OBJECTIVES},
    "soft_ce alone": LossWeights(),
    "top 3": LossWeights(token=0.0, top_k=1.0, top_k_tokens=3),
    "top 50 of 11": LossWeights(token=0.0, top_k=2.0, top_k_tokens=50),
    "HASS": LossWeights(token=0.1, top_k=1.0, top_k_tokens=4),
    "rank": LossWeights(token=0.0, rank=0.1, rank_tokens=5),
    "rank of one": LossWeights(token=0.0, rank=1.0, rank_tokens=1),
    "everything": LossWeights(token=0.5, objective="hybrid", top_k=0.3, top_k_tokens=2, rank=0.2, rank_tokens=11),
    "nothing": LossWeights(token=0.0),
}


def logits_and_teacher(columns: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    logits = 2 * torch.randn(columns, 11, dtype=torch.float64)
    return logits.requires_grad_(), torch.softmax(2 * torch.randn(columns, 11, dtype=torch.float64), -1)


def twin_of(weights: LossWeights, logits: torch.Tensor, p: torch.Tensor) -> torch.Tensor:
    """Of one column."""
    loss = weights.token * reference.objective(weights.objective, logits, p.tolist())
    loss = loss + weights.top_k * slow_drafters.top_k_cross_entropy(logits, p, weights.top_k_tokens)
    return loss + weights.rank * reference.rank_likelihood(logits, p.tolist(), weights.rank_tokens)


@pytest.mark.parametrize("name", MIXTURES)
def test_losses_equal_their_twins(name: str) -> None:
    """In value, and in the gradient by autograd of the twin against the one that is written out."""
    weights = MIXTURES[name]
    logits, p = logits_and_teacher()
    expected = torch.stack([twin_of(weights, z, q) for z, q in zip(logits, p, strict=True)])
    (gradient,) = torch.autograd.grad(expected.sum(), logits)
    for first in (0, 2):  # students of all columns, and of the last ones alone
        given = logits.detach()[first:].clone()
        equal(Lesson(weights, p).learn(given, first), expected.detach()[first:])
        equal(given, gradient[first:])


def test_a_recipe_s_losses_are_those_that_are_summed() -> None:
    summed: dict[str, Any] = {"token_loss": 0.5, "feature_loss": 0.25, "top_k_loss": 0.125, "rank_loss": 0.75}
    trainee = trainee_of(TrainSection(**summed, token_objective="hybrid"), torch.nn.Module())  # type: ignore[arg-type]
    assert trainee.weights == LossWeights(token=0.5, feature=0.25, top_k=0.125, objective="hybrid", rank=0.75)


def test_losses_from_a_cold_start() -> None:
    """A student far from everything: the logarithm of its acceptance has a gradient where total variation has none."""
    logits = torch.zeros(1, 5)
    logits[0, 0] = 60.0
    certain = torch.tensor([[0.0, 0.0, 0.0, 1.0, 0.0]])
    found = {}
    for name in OBJECTIVES:
        z = logits.clone()
        value = Lesson(LossWeights(objective=name), certain).learn(z)
        assert torch.isfinite(value).all() and torch.isfinite(z).all()
        found[name] = z
        if name in ("hard_ce", "log_acceptance"):
            torch.testing.assert_close(value, torch.tensor([60.0]))
        if name == "reverse_kl":  # of a token that the target never takes: down to the smallest number
            torch.testing.assert_close(value, -torch.tensor([torch.finfo(torch.float32).tiny]).log())
    assert found["total_variation"].abs().max() < 1e-20
    torch.testing.assert_close(found["log_acceptance"], found["hard_ce"])
    torch.testing.assert_close(found["hard_ce"], torch.softmax(logits, -1) - certain)
    # Farther off than the smallest number's logarithm, among many tokens.
    far, among_many = torch.zeros(1, 32_000), torch.zeros(1, 32_000)
    far[0, 0], among_many[0, 3] = 120.0, 1.0
    of_acceptance, of_hard = far.clone(), far.clone()
    Lesson(LossWeights(objective="log_acceptance"), among_many).learn(of_acceptance)
    Lesson(LossWeights(objective="hard_ce"), among_many).learn(of_hard)
    torch.testing.assert_close(of_acceptance, of_hard)


@pytest.mark.parametrize("name", [*OBJECTIVES, "top 3", "rank"])
def test_a_teacher_that_is_not_a_number_is_not_hidden(name: str) -> None:
    logits, p = logits_and_teacher()
    p[2] = math.nan
    given = logits.detach().clone()
    value = Lesson(MIXTURES[name], p).learn(given)
    assert value.isnan().tolist() == [i == 2 for i in range(6)]
    assert given.isnan().any(-1).tolist() == [i == 2 for i in range(6)]


def test_feature_regression() -> None:
    torch.manual_seed(1)
    outputs = (2 * torch.randn(6, 8, dtype=torch.float64)).requires_grad_()
    features = torch.randn(6, 8, dtype=torch.float64)
    distance = (outputs.detach() - features).abs()
    assert (distance < 1).any() and (distance > 1).any()
    weight = torch.tensor([1.0, 0.0, 0.5, 3.0, 0.0, 0.25])
    value = feature_regression(outputs, features, weight)
    expected = sum(float(weight[n]) * slow_drafters.smooth_l1(outputs[n], features[n]) for n in range(6))
    assert isinstance(expected, torch.Tensor)
    torch.testing.assert_close(value.double(), expected, rtol=1e-6, atol=1e-6)
    (found,), (other,) = (torch.autograd.grad(each, outputs) for each in (value, expected))
    torch.testing.assert_close(found, other, rtol=1e-5, atol=1e-6)


# The pass over head, teacher and losses.

ROWS, WIDTH, HIDDEN, VOCAB, STEPS = 2, 9, 8, 23, 4


def softly_capped(logits: torch.Tensor) -> torch.Tensor:
    return 3 * torch.tanh(logits / 3)


def head_pass(dtype: torch.dtype, draft_tokens: int | None) -> dict[str, Any]:
    """Random parts of a pass, in which some columns are reached, and some likeliest tokens cannot be drafted."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    vocab = DraftVocab.full(VOCAB)
    if draft_tokens is not None:
        vocab = DraftVocab(torch.randperm(VOCAB, generator=generator)[:draft_tokens].sort().values, VOCAB)
    target_head = draw(VOCAB, HIDDEN)
    teacher = Teacher(draw(ROWS, WIDTH, HIDDEN), lambda states: states @ target_head.T, torch.ones(ROWS, WIDTH) > 0)
    reached = torch.rand(STEPS, ROWS, WIDTH, generator=generator) < 0.7
    for step in range(STEPS):
        reached[step, :, WIDTH - step :] = False  # a teacher beyond the row
    drafters = {"weight": draw(vocab.size, HIDDEN), "bias": draw(vocab.size), "vocab": vocab}
    read = [draw(ROWS, WIDTH, HIDDEN) for _ in range(STEPS)]
    return {"read": read, "target_head": target_head, "teacher": teacher, "reached": reached, **drafters}


def slow_pass(
    parts: dict[str, Any], weights: LossWeights, scaled: Any
) -> tuple[torch.Tensor, list[int], torch.Tensor, torch.Tensor]:
    """(loss; correct by step; trained and the probability of acceptance, [K, B, C]), column by column."""
    vocab, reached = parts["vocab"], parts["reached"]
    loss, correct, trained = torch.zeros((), dtype=torch.float64), [0] * STEPS, torch.zeros_like(reached)
    alpha = torch.zeros(reached.shape, dtype=torch.float64)
    for step, b, c in itertools.product(range(STEPS), range(ROWS), range(WIDTH)):
        if not reached[step, b, c]:
            continue
        teacher = parts["teacher"].states[b, c + step] @ parts["target_head"].T
        best = int(teacher.argmax())
        logits = parts["weight"] @ parts["read"][step][b, c] + parts["bias"]
        logits = logits if scaled is None else scaled(logits)
        correct[step] += int(vocab.target_ids[int(logits.argmax())]) == best
        if best in vocab.target_ids.tolist():
            trained[step, b, c] = True
            p = functional.softmax(teacher[vocab.target_ids], -1)
            loss = loss + 0.8**step * twin_of(weights, logits, p)
            alpha[step, b, c] = sum(map(min, p.tolist(), functional.softmax(logits, -1).tolist()))
    return loss, correct, trained, alpha


@pytest.mark.parametrize(
    ("elements", "frozen", "scaled", "draft_tokens"),
    pairwise([1, 3 * STEPS * VOCAB, 1 << 21], [False, True], [None, softly_capped], [None, 15]),
)
def test_the_pass_equals_its_twin_however_it_is_cut(
    elements: int, frozen: bool, scaled: Any, draft_tokens: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(head_loss, "ELEMENTS", elements)
    monkeypatch.setattr(head_loss, "LEAST_STUDENTS", 1)
    parts = head_pass(torch.float64, draft_tokens)
    weights = LossWeights(token=0.5, top_k=0.5, top_k_tokens=3, objective="hybrid")
    leaves = [each.requires_grad_() for each in parts["read"]]
    if not frozen:
        leaves.append(parts["weight"].requires_grad_())
    expected, correct, trained, alpha = slow_pass(parts, weights, scaled)
    gradients = torch.autograd.grad(3 * expected, leaves)
    step_weights = 0.8 ** torch.arange(STEPS, dtype=torch.float64)[:, None, None]
    job = HeadLoss(parts["teacher"], parts["vocab"], parts["reached"], weights, step_weights)
    inputs = parts["read"], parts["weight"], parts["bias"], scaled
    found, its_correct, its_trained = job(*inputs)
    equal(found, expected)
    assert its_correct.tolist() == correct and torch.equal(its_trained, trained)
    assert 0 < int(trained.sum()) <= int(parts["reached"].sum()) and sum(correct) > 0
    equal(torch.autograd.grad(3 * found, leaves), gradients, rtol=1e-9)
    with torch.no_grad():
        equal(job(*inputs)[0], expected.detach())
    # Acceptance is measured in a pass of its own; the weights of steps follow from it.
    its_alpha, its_trained = job.acceptance(*inputs)
    assert torch.equal(its_trained, trained) and not its_alpha.requires_grad
    equal(its_alpha[trained], alpha[trained], rtol=1e-9)
    found_weights = acceptance_weights(its_alpha, trained)
    for b, c in itertools.product(range(ROWS), range(WIDTH)):
        accepted = [float(alpha[k, b, c]) * bool(trained[: k + 1, b, c].all()) for k in range(STEPS)]
        wanted = [slow_drafters.step_weight("acceptance", k, accepted) for k in range(STEPS)]
        assert found_weights[:, b, c].tolist() == pytest.approx(wanted, rel=1e-9)


def test_what_does_not_count_may_be_anything_and_what_counts_is_told() -> None:
    """NaN of a student or teacher that nobody asks changes nothing; of one that is asked, the loss is NaN."""
    parts = head_pass(torch.float64, 15)
    step_weights = torch.ones(STEPS, 1, 1, dtype=torch.float64)
    parts["reached"][:, 0, 4:] = False
    job = HeadLoss(parts["teacher"], parts["vocab"], parts["reached"], LossWeights(), step_weights)
    leaves = [*(each.requires_grad_() for each in parts["read"]), parts["weight"].requires_grad_()]

    def run() -> list[torch.Tensor]:
        loss, *_ = job(parts["read"], parts["weight"])
        return [loss.detach(), *torch.autograd.grad(loss, leaves)]

    before = run()
    with torch.no_grad():
        parts["read"][1][0, 5] = math.nan
        parts["teacher"].states[0, 8] = math.nan  # reached columns end before
    equal(run(), before, rtol=1e-12, atol=1e-14)
    with torch.no_grad():
        parts["teacher"].states[1, 0] = math.nan
    parts["reached"][0, 1, 0] = True
    assert run()[0].isnan()


# Weights of unroll steps that follow what decoding gains.


def test_step_weights_are_what_decoding_gains_from_each_step() -> None:
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
        equal(weights[k, 0, :, None] * mine, expected[k, 0], rtol=1e-9)
    weights = acceptance_weights(torch.zeros(3, 1, 1), torch.ones(3, 1, 1, dtype=torch.bool))
    assert weights[:, 0, 0].tolist() == pytest.approx([0.111, 0.011, 0.001])  # an untrained drafter is taught, too


# Noise.


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
