"""The unroll is chain drafting; padding, splitting and checkpointing change nothing; every parameter is trained."""

from pathlib import Path

import pytest
import torch

from draftsmith.models.alignment import Columns, columns_of
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter, Eagle3Drafting
from draftsmith.models.target import Target, load_causal_lm
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.schema import TargetSection
from draftsmith.train.losses import soft_cross_entropy
from draftsmith.train.unroll import TrainingTimeTest, UnrollSums, simulated_tau, teacher_of, unroll
from tests import reference

STEPS = 5


@pytest.fixture(scope="module")
def target(target_dir: Path) -> Target:
    return Target(load_causal_lm(TargetSection(model=str(target_dir))))


def make_drafter(target: Target, draft_tokens: int | None = None, seed: int = 1) -> Eagle3Drafter:
    torch.manual_seed(seed)
    if draft_tokens is None:
        vocab = DraftVocab.full(target.vocab_size)
    else:
        vocab = DraftVocab(torch.randperm(target.vocab_size)[:draft_tokens].sort().values, target.vocab_size)
    config = Eagle3Config.for_target(target.config, target.vocab_size, target.capture_layers, vocab.size)
    return Eagle3Drafter(config, vocab, target.embedding_table)


def make_rows(lengths: list[int], vocab_size: int, seed: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Right-padded ids and spans; each row has two supervised turns."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    span = torch.zeros_like(ids)
    for b, length in enumerate(lengths):
        ids[b, :length] = torch.randint(1, vocab_size, (length,), generator=generator)
        span[b, 3 : length // 2] = 1
        span[b, length // 2 + 2 : length] = 2
    return ids, span


def sums_of(
    target: Target, drafter: Eagle3Drafter, ids: torch.Tensor, span: torch.Tensor, checkpointing: bool = False
) -> UnrollSums:
    trainee = TrainingTimeTest(drafter, STEPS, 0.8, checkpointing)
    columns = columns_of(span, STEPS)
    states = target.states(ids)
    teacher = teacher_of(target, states.last, ids, columns, drafter.vocab)
    return trainee(states.captured, ids, columns, teacher)


def gradients(drafter: Eagle3Drafter) -> dict[str, torch.Tensor]:
    found = {name: p.grad.clone() for name, p in drafter.named_parameters() if p.grad is not None}
    drafter.zero_grad()
    return found


def test_unroll_equals_drafting_a_chain_with_a_cache(target: Target) -> None:
    """At every step and column: the same outputs as the decoder's cache, whose prefix comes from target states."""
    drafter = make_drafter(target)
    ids, span = make_rows([17, 12], target.vocab_size)
    columns = columns_of(span, STEPS)
    captured = target.states(ids).captured
    outputs = list(unroll(drafter, captured, ids, columns, STEPS))
    compared = 0
    for b, c in columns.counted(0).nonzero().tolist():
        t, row = int(columns.index[b, c]), ids[b].tolist()
        drafting = Eagle3Drafting(drafter)
        drafting.reset(1)
        # In two portions, as rounds deliver them.
        if t > 0:
            drafting.observe([row[: t + 1]], captured[b : b + 1, :t], [t])
        drafting.observe([row[: t + 2]], captured[b : b + 1, t : t + 1], [1])
        for step in range(int(columns.depth[b, c])):
            if step == 0:
                log_probs = drafting.root_log_probs()
            else:
                tokens = ids[b : b + 1, t + 1 + step : t + 2 + step]
                log_probs = drafting.expand(torch.tensor([[step - 1]]), tokens, step)[:, 0]
            torch.testing.assert_close(drafting.outputs[0, step], outputs[step][b, c], atol=1e-5, rtol=1e-5)
            expected = torch.log_softmax(drafter.logits(outputs[step][b, c]), -1)
            torch.testing.assert_close(log_probs[0], expected, atol=1e-5, rtol=1e-5)
            compared += 1
    assert compared == int(columns.depth.sum()) > 30


def test_chains_side_by_side_equal_the_unroll(target: Target) -> None:
    """Columns of a batch drafted at once, each a row with a prefix of its own length; some drop out on the way."""
    drafter = make_drafter(target)
    ids, span = make_rows([17, 12], target.vocab_size)
    columns = columns_of(span, STEPS)
    captured = target.states(ids).captured
    outputs = list(unroll(drafter, captured, ids, columns, STEPS))
    steps = 3
    rows = [(b, c, int(columns.index[b, c])) for b, c in (columns.depth >= steps).nonzero().tolist()]
    assert len({t for *_, t in rows[1:]}) > 3
    drafting = Eagle3Drafting(drafter)
    drafting.reset(len(rows))
    # The columns up to t in two portions of different lengths; padding is far from zero.
    first = [max(1, t // 2) for *_, t in rows]
    rest = [t + 1 - done for (*_, t), done in zip(rows, first, strict=True)]
    for counts, done in ((first, [0] * len(rows)), (rest, first)):
        if counts is rest:
            drafting.keep(range(1, len(rows)))
            rows, counts, done = rows[1:], rest[1:], first[1:]
        features = torch.full((len(rows), max(counts), captured.shape[2]), 1e3)
        for i, (b, _, _) in enumerate(rows):
            features[i, : counts[i]] = captured[b, done[i] : done[i] + counts[i]]
        committed = [ids[b, : d + n + 1].tolist() for (b, *_), d, n in zip(rows, done, counts, strict=True)]
        drafting.observe(committed, features, counts)
    for step in range(steps):
        if step > 0:
            tokens = torch.stack([ids[b, t + 1 + step] for b, _, t in rows])[:, None]
            drafting.expand(torch.full((len(rows), 1), step - 1), tokens, step)
        expected = torch.stack([outputs[step][b, c] for b, c, _ in rows])
        torch.testing.assert_close(drafting.outputs[:, step], expected, atol=1e-5, rtol=1e-5)


def test_unroll_equals_the_slow_twin_in_value_and_gradient(target: Target) -> None:
    """The whole loss in float64, column by column from the definition, against the batched one."""
    drafter = make_drafter(target, draft_tokens=200).double()
    ids, span = make_rows([12, 9], target.vocab_size)
    states = target.states(ids)
    columns = columns_of(span, STEPS)
    teacher = teacher_of(target, states.last, ids, columns, drafter.vocab)
    sums = TrainingTimeTest(drafter, STEPS, 0.8)(states.captured, ids, columns, teacher)
    sums.loss.backward()
    mine = gradients(drafter)

    weights = {name: p.detach().clone().requires_grad_() for name, p in drafter.named_parameters()}
    slow = reference.SlowEagle3(weights, target.embedding_table.double(), drafter.config)
    chosen = drafter.vocab.target_ids.tolist()
    loss, reached, trained, correct = torch.zeros((), dtype=torch.float64), [0] * STEPS, [0] * STEPS, [0] * STEPS
    for b in range(len(ids)):
        row, marks = ids[b].tolist(), span[b].tolist()
        target_logits = target.logits(states.last[b]).double()
        for t in range(len(row)):
            depth = sum(reference.counted(marks, t, k) for k in range(STEPS))
            if depth == 0:
                continue
            for k, output in enumerate(slow.chain(states.captured[b].double(), row, t, depth)):
                if any(token not in chosen for token in row[t + 2 : t + 2 + k]):
                    break
                reached[k] += 1
                z = target_logits[t + 1 + k]
                if int(z.argmax()) not in chosen:
                    continue
                trained[k] += 1
                p = torch.softmax(z[chosen], -1)
                q = slow.logits(output)
                correct[k] += int(chosen[int(q.argmax())] == int(z.argmax()))
                loss = loss + 0.8**k * reference.soft_cross_entropy(q[None], p[None], [True])
    loss.backward()
    assert sums.reached.tolist() == reached
    assert sums.trained.tolist() == trained
    assert sums.correct.tolist() == correct
    assert 0 < sum(trained) < sum(reached)  # some likeliest tokens are outside the draft vocabulary, most inside
    # The product takes the final softmax in float32, whatever the weights' precision.
    torch.testing.assert_close(sums.loss.double(), loss, rtol=1e-5, atol=1e-5)
    for name, weight in weights.items():
        assert weight.grad is not None
        torch.testing.assert_close(mine[name], weight.grad, rtol=1e-4, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


def test_soft_cross_entropy_equals_its_twin() -> None:
    torch.manual_seed(0)
    logits = torch.randn(6, 11, dtype=torch.float64, requires_grad=True)
    teacher = torch.softmax(torch.randn(6, 11, dtype=torch.float64), -1)
    counted = [True, False, True, True, False, True]
    mine = soft_cross_entropy(logits.float(), teacher.float(), torch.tensor(counted))
    twin = reference.soft_cross_entropy(logits, teacher, counted)
    torch.testing.assert_close(mine.double(), twin, rtol=1e-5, atol=1e-5)
    (gradient,) = torch.autograd.grad(mine, logits)
    expected = (torch.softmax(logits, -1) - teacher) * torch.tensor(counted)[:, None]  # q - p
    torch.testing.assert_close(gradient, expected, rtol=1e-5, atol=1e-5)


def test_padding_and_splitting_change_neither_loss_nor_gradient(target: Target) -> None:
    drafter = make_drafter(target, draft_tokens=300)
    ids, span = make_rows([30, 21, 14], target.vocab_size)

    whole = sums_of(target, drafter, ids, span)
    whole.loss.backward()
    expected = gradients(drafter)

    padded_ids = torch.cat((ids, torch.randint(1, 300, (3, 13))), dim=1)  # padding's content must not matter either
    padded = sums_of(target, drafter, padded_ids, torch.cat((span, torch.zeros(3, 13, dtype=torch.long)), dim=1))
    padded.loss.backward()
    torch.testing.assert_close(padded.loss, whole.loss, rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(drafter).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)

    total, columns = torch.zeros(()), 0
    for b, length in enumerate([30, 21, 14]):
        part = sums_of(target, drafter, ids[b : b + 1, :length], span[b : b + 1, :length])
        part.loss.backward()
        total, columns = total + part.loss.detach(), columns + int(part.columns)
    assert columns == int(whole.columns)
    torch.testing.assert_close(total, whole.loss.detach(), rtol=1e-5, atol=1e-5)
    for name, gradient in gradients(drafter).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)


def test_every_parameter_is_trained_with_and_without_checkpointing(target: Target) -> None:
    drafter = make_drafter(target)
    ids, span = make_rows([20, 16], target.vocab_size)
    sums_of(target, drafter, ids, span).loss.backward()
    plain = gradients(drafter)
    assert set(plain) == {name for name, _ in drafter.named_parameters()}
    assert all(gradient.abs().max() > 0 for gradient in plain.values())
    sums_of(target, drafter, ids, span, checkpointing=True).loss.backward()
    for name, gradient in gradients(drafter).items():
        torch.testing.assert_close(gradient, plain[name], rtol=1e-5, atol=1e-6)


def test_a_batch_in_which_nothing_counts_gives_zero(target: Target) -> None:
    drafter = make_drafter(target)
    ids, span = make_rows([8], target.vocab_size)
    sums = sums_of(target, drafter, ids, torch.zeros_like(span))
    sums.loss.backward()
    assert sums.loss.item() == 0 and sums.columns.item() == 0


def test_columns_gather_reads_at_offsets() -> None:
    columns = Columns(index=torch.tensor([[1, 3]]), depth=torch.tensor([[1, 1]]))
    assert columns.gather(torch.tensor([[10, 11, 12, 13, 14, 15]]), 2).tolist() == [[13, 15]]


def test_simulated_tau() -> None:
    assert simulated_tau([0.5, 0.5]) == pytest.approx(1 + 0.5 + 0.25)
    assert simulated_tau([0.0, 1.0]) == 1.0
