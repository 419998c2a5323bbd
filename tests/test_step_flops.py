"""The operations that MFU counts are those of the matrix products in a real unroll, of every kind of drafter."""

from dataclasses import replace
from fractions import Fraction

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.data_gen.rows.training_rows import TrainingRow
from draftsmith.models.alignment import columns_of
from draftsmith.models.costs import target_size
from draftsmith.recipes.schema import TargetSection
from draftsmith.train.attention.kernels import BLOCKS
from draftsmith.train.loss.unroll import teacher_of
from draftsmith.train.measure.step_flops import StepFlops
from draftsmith.train.run.batches import collate
from tests.drafter_cases import CASES, VOCAB_SIZE, drafter_of, inputs_of, small_target, states_of, trainee_of

TOKENS = 30


def flops_of(name: str) -> StepFlops:
    """With the target's layers."""
    case, target = CASES[name], small_target()
    size = target_size(target.config, TargetSection(model=""))
    return StepFlops(trainee_of(case, drafter_of(case)), target.config, size, states_are_read=False)


@pytest.mark.parametrize("name", CASES)
def test_operations_are_those_of_a_real_unroll(name: str) -> None:
    """One row, supervised from its second token on: what the unroll does beyond what is needed is known then. It
    multiplies every query of a run with all its keys and masks some, and takes all columns along at every step. A
    column's own later keys it does not multiply with matrices.
    """
    case, target = CASES[name], small_target()
    trainee = trainee_of(case, drafter_of(case))
    trainee.kernel = BLOCKS  # products that the counter knows
    shape = trainee.drafter.config
    ids = torch.randint(1, VOCAB_SIZE, (1, TOKENS))
    columns = columns_of((torch.arange(TOKENS)[None] > 0).long(), case.steps)
    captured, last = states_of(trainee.drafter, ids)
    with FlopCounterMode(display=False) as counter:
        teacher = teacher_of(target, last, ids, columns, trainee.drafter.vocab)
        trainee(captured, inputs_of(trainee.drafter, ids), columns, teacher).loss.backward()
    count = TOKENS - 2
    flops = replace(flops_of(name), states_are_read=True)
    again = Fraction(7, 6)  # scores are multiplied once more on the way back
    expected = flops.of_counts(TOKENS, TOKENS**2 * again, [count] * case.steps, [count**2 * again] * case.steps)
    # The head does stop where a teacher would be beyond the row.
    head, students = 2 * shape.hidden_size * shape.draft_vocab_size, count * case.steps - sum(range(case.steps))
    expected -= (3 if shape.own_head else 2) * head * sum(range(case.steps))
    if case.step_weight == "acceptance":  # weights that hang on all steps: both heads run once more, forwards
        expected += head * students + 2 * flops_of(name).size.head_parameters * count
    assert counter.get_total_flops() == expected


def test_a_batch_is_the_sum_of_its_documents_however_it_is_laid_out() -> None:
    flops = flops_of("eagle3, two layers")
    rows = [
        TrainingRow(str(i), list(range(1, length + 1)), spans)
        for i, (length, spans) in enumerate([(20, [(3, 9), (12, 20)]), (31, [(10, 31)]), (8, [(2, 8)])])
    ]

    def of(chosen: list[TrainingRow], packed: bool) -> float:
        batch = collate(chosen, packed)
        return float(flops.of_batch(batch, columns_of(batch.span, flops.trainee.steps)))

    alone = sum(of([row], False) for row in rows)
    assert of(rows, False) == of(rows, True) == pytest.approx(alone, rel=1e-6)


def test_counts_of_one_column() -> None:
    """Root x[5] of 9 tokens, drafted three deep: queries see 5 columns, and their own later ones."""
    flops = flops_of("eagle3")
    batch = collate([TrainingRow("", list(range(9)), [(5, 9)])])
    seen = {}
    object.__setattr__(flops, "of_counts", lambda **counts: seen.update(counts) or 0)
    flops.of_batch(batch, columns_of(batch.span, 5))
    assert seen["tokens"] == 9 and seen["causal_keys"] == 45
    assert [int(n) for n in seen["pairs"]] == [3, 2, 1, 0, 0]  # x[5] drafts 3 tokens, x[6] 2, x[7] 1
    assert [int(n) for n in seen["keys"]] == [5 + 6 + 7, 6 + 7, 7, 0, 0]


def test_the_targets_layers_count_once() -> None:
    flops = flops_of("eagle")
    target, ids = small_target(), torch.ones(1, TOKENS, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        target.states(ids)
    both = flops, replace(flops, states_are_read=True)
    with_layers, without = (each.of_counts(TOKENS, TOKENS**2, [0], [0]) for each in both)
    assert with_layers - without == pytest.approx(counter.get_total_flops(), rel=0.01)  # norms count as parameters
