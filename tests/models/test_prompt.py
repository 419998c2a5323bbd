"""What the target is asked travels whole: inserts reach target, drafter, training and every key, and caches roll back.

An insert of the target's own embeddings of some tokens must change nothing against the tokens themselves, wherever it
goes; one of other embeddings must change everything that depends on it.
"""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.data_gen.states.store import key_of
from draftsmith.data_gen.training_rows.rows import TrainingRow, Turn, rows_of
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.eval.replay.replay import replay
from draftsmith.models.alignment import columns_of
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.prompt import EmbeddingInsert, PlacedInsert, Prompt
from draftsmith.models.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.eval import TreeSection
from draftsmith.train.loss.unroll import UnrollSums, teacher_of
from draftsmith.train.run.batches import collate, collate_as
from draftsmith.train.run.checkpoints import rows_digest
from draftsmith.train.run.state_sources import OnlineStates
from tests.conftest import make_target
from tests.decoding import decode, decode_batch
from tests.drafter_cases import CASES, drafter_of, small_target, trainee_of
from tests.pairs import pair_of

PLACEHOLDER = 3
TEXT = [11, 12, 13, 14, 15, 16]
TREE = TreeSection(nodes=12, draft_calls=3, top_k=4)


def with_insert(target: Target, tokens: list[int], first: int, end: int, scale: float = 1.0) -> Prompt:
    """`tokens`, of which some are given by the target's embeddings of them; times `scale`."""
    rows = scale * target.embedding(torch.tensor(tokens[first:end])).detach()
    hidden = [*tokens[:first], *[PLACEHOLDER] * (end - first), *tokens[end:]]
    return Prompt(hidden, (EmbeddingInsert(first, rows),))


def test_a_prompt_is_its_tokens_and_what_stands_in_their_place() -> None:
    one, other = (EmbeddingInsert(1, torch.full((2, 4), value)) for value in (1.0, 2.0))
    assert Prompt([5, 6]) == [5, 6] and Prompt([5, 6]).inserts_digest == b""
    prompts = [Prompt([5, 3, 3, 7]), *(Prompt([5, 3, 3, 7], (each,)) for each in (one, other, one.at(2)))]
    assert len({prompt.digest for prompt in prompts}) == 4 and len(set(prompts)) == 4
    assert len({one, other, EmbeddingInsert(1, one.rows.clone()), one.at(2)}) == 3
    assert len({PlacedInsert(0, one), PlacedInsert(0, other)}) == 2
    assert {(5, 6): "there"}[Prompt([5, 6])] == "there"  # type: ignore[index]
    longer = prompts[1].then([8, 9])
    assert list(longer) == [5, 3, 3, 7, 8, 9] and longer.inserts == (one,)
    assert [longer.begins_with(prompt) for prompt in prompts] == [False, True, False, False]
    assert longer.begins_with(Prompt([5])) and not longer.begins_with(Prompt([5, 3]))  # the insert reaches beyond
    for wrong in (one.at(3), one.at(-1)):
        with pytest.raises(ValueError, match="an insert covers tokens"):
            Prompt([5, 3, 3, 7], (wrong,))


# Gemma scales its embeddings in their module, Granite in the decoder.
# Gemma scales its embeddings in their module, Granite in the decoder.
@pytest.mark.parametrize("family", ["gemma", "granite", "gpt2"])
def test_an_insert_of_the_target_s_own_embeddings_changes_nothing(family: str) -> None:
    overrides: dict[str, Any] = {"embedding_multiplier": 3.0} if family == "granite" else {}
    target = Target(make_target(family, **overrides))
    asked = with_insert(target, TEXT, 1, 4)

    def read(prompt: Prompt) -> list[torch.Tensor]:
        ids, inserts = torch.tensor([prompt.token_ids]), [PlacedInsert(0, each) for each in prompt.inserts]
        states, embeddings = target.states(ids, inserts=inserts), target.inputs(ids, inserts=inserts).embeddings
        alone = target.captured_states(ids, (0, 3), inserts)
        return [states.captured, states.last, alone, embeddings, target.session((0, 3)).prefill([[7], prompt])[0]]

    plain, blind = read(Prompt(TEXT)), read(Prompt(asked.token_ids))
    for mine, its in zip(read(asked), plain, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-6)
    assert (blind[1] - plain[1]).abs().max() > 1e-2  # the placeholders alone
    text = torch.tensor([TEXT])
    for outside in (-3, len(TEXT)):  # a part of the text has no column of the insert
        [away] = [PlacedInsert(0, each.at(outside)) for each in asked.inserts]
        assert torch.equal(target.inputs(text, inserts=[away]).embeddings, target.inputs(text).embeddings)


def test_decoding_reads_inserts_as_the_text_that_they_are() -> None:
    """Target and drafter: the same tokens in the same rounds, alone and beside text; replay likewise."""
    target, drafter = pair_of("llama", None)
    proposer = PolicyProposer(FeatureDrafting(drafter), policy_of(TREE))
    prompts = [[21, 22, 23, 24, 25, 26, 27, 28, 29], [11, 12, 13]]
    asked = [with_insert(target, prompts[0], 0, 7), Prompt(prompts[1])]
    expected = decode_batch(target, proposer, prompts, {-1}, 30)
    assert sum(expected[0].accepted_per_round) > 8
    for found in (decode_batch(target, proposer, asked, {-1}, 30), [decode(target, proposer, asked[0], {-1}, 30)]):
        for answer, wanted in zip(found, expected, strict=False):
            assert (answer.token_ids, answer.accepted_per_round) == (wanted.token_ids, wanted.accepted_per_round)
    recorded = [RecordedAnswer(each, answer.token_ids) for each, answer in zip(asked, expected, strict=True)]
    rounds = replay(target, proposer, recorded, 2)
    assert [answer.accepted_per_round for answer in rounds] == [answer.accepted_per_round for answer in expected]


def test_an_input_that_a_target_cannot_read_is_refused() -> None:
    target = small_target()
    too_wide = Prompt(TEXT, (EmbeddingInsert(1, torch.zeros(2, 7)),))
    with pytest.raises(UserError, match="reads text, and embeddings 32 wide"):
        target.session().prefill([too_wide])


# Training.


def rows_and_texts() -> tuple[list[TrainingRow], list[TrainingRow]]:
    """Two rows with inserts, one of them at the row's beginning, and the same as text."""
    target, texts = small_target(), [[*range(20, 34)], [*range(30, 41)]]
    spans = [[(6, 14)], [(4, 7), (8, 11)]]
    plain = [TrainingRow(str(i), text, span) for i, (text, span) in enumerate(zip(texts, spans, strict=True))]
    asked = [with_insert(target, texts[0], 2, 6), with_insert(target, texts[1], 0, 3)]
    return [
        replace(row, input_ids=list(prompt), inserts=prompt.inserts) for row, prompt in zip(plain, asked, strict=True)
    ], plain


@pytest.mark.parametrize("packed", [False, True])
def test_training_reads_inserts_as_the_text_that_they_are(packed: bool) -> None:
    case, target = CASES["eagle3"], small_target()

    def sums(rows: list[TrainingRow]) -> UnrollSums:
        drafter = drafter_of(case)
        batch = collate(rows, packed)
        captured, last = (batch.in_one_row(each) for each in OnlineStates(target).of(batch))
        row, columns = batch.one_row, columns_of(batch.one_row.span, case.steps)
        inputs = target.inputs(row.ids, row.position, row.inserts, drafter.dtype)
        teacher = teacher_of(target, last, row.ids, columns, drafter.vocab)
        return trainee_of(case, drafter)(captured, inputs, columns, teacher, row.documents)

    mine, plain = map(sums, rows_and_texts())
    assert mine.columns == plain.columns > 8
    torch.testing.assert_close(mine.loss, plain.loss, rtol=1e-5, atol=1e-5)
    blind = [replace(row, inserts=()) for row in rows_and_texts()[0]]
    assert (sums(blind).loss - plain.loss).abs() > 1e-2


def test_inserts_move_with_their_rows() -> None:
    """Into one row, from rows of a batch that hold several documents."""
    rows = rows_and_texts()[0]
    batch = collate_as([*rows, rows[0]], [[1, 0], [2]]).one_row
    assert [placed.row for placed in batch.inserts] == [0, 0, 0]
    inserts = [placed.insert for placed in batch.inserts]
    covered = [each.first + i for each in inserts for i in range(each.length)]
    assert covered == (batch.ids[0] == PLACEHOLDER).nonzero()[:, 0].tolist()


def test_turns_join_to_rows_only_where_their_inserts_do() -> None:
    target = small_target()
    first = with_insert(target, TEXT, 1, 4)
    again, other = first.then([7, 8, 9]), with_insert(target, TEXT, 1, 4, 2.0).then([7, 8, 9])
    assert [row.spans for row in rows_of("a", [Turn(first, [7, 8]), Turn(again, [10])])] == [[(6, 8), (9, 10)]]
    rows = list(rows_of("a", [Turn(first, [7, 8]), Turn(other, [10])]))
    assert [row.spans for row in rows] == [[(6, 8)], [(9, 10)]]
    assert [row.inserts for row in rows] == [first.inserts, other.inserts]


# Keys.


def test_two_inserts_under_one_question_have_two_keys() -> None:
    (row, _), (text, _) = rows_and_texts()
    other = replace(row, inserts=(with_insert(small_target(), [*range(20, 34)], 2, 6, 2.0).inserts))
    blind = replace(row, inserts=())
    assert len({key_of(each) for each in (row, other, blind, text)}) == 4
    assert len({rows_digest([each]) for each in (row, other, blind)}) == 3
