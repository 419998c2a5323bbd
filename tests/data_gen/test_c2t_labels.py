"""Labels of C2T: the rows of uncut trees against a slow twin, and the folder that holds them."""

import math
import random
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch

from draftsmith.data_gen.c2t_labels.labelled_trees import Trees
from draftsmith.data_gen.c2t_labels.labelling import Labelled, label
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.models import c2t
from draftsmith.models.draft_tree import Committed
from draftsmith.recipes.sections.train import LabelSection
from tests import reference
from tests.c2t_cases import made_trees, same_trees
from tests.scripted_drafting import VOCAB, Nodes, Scripted, Table, unasked_target


class Along(Scripted):
    """A drafter that knows another table after every committed text."""

    def __init__(self, table: type[Table] = Table) -> None:
        super().__init__([table(0)])
        self.table = table

    def rollback(self, lengths: Sequence[int]) -> None:
        raise AssertionError("nothing is rolled back here")

    def observe(self, committed: Committed) -> None:
        self.tables = [self.table(text_seed(tokens)) for tokens in committed.tokens]


def text_seed(tokens: Sequence[int]) -> int:
    return zlib.crc32(str(list(tokens)).encode())


def written_answer(chance: random.Random, tokens: int, table: type[Table] = Table) -> RecordedAnswer:
    """What a target that often says a likely token would have written; even tokens are in no draft vocabulary."""
    prompt = [2 * chance.randrange(9) for _ in range(chance.randint(1, 4))]
    text = [*prompt, 2 * chance.randrange(9)]
    while len(text) < len(prompt) + tokens:
        here, path = table(text_seed(text)), ()
        while chance.random() < 0.8 and len(text) < len(prompt) + tokens - 1:
            path = (*path, reference.by_likelihood(here(path))[min(int(chance.expovariate(1.2)), VOCAB - 1)])
            text.append(2 * path[-1] + 1)
        text.append(2 * chance.randrange(9))
    if chance.random() < 0.7 and len(text) > len(prompt) + 2:
        text.pop()  # answers may end with a token that was drafted
    return RecordedAnswer(prompt, text[len(prompt) :], conversation_id=str(chance.random()))


def slow_rows(answer: RecordedAnswer, section: LabelSection, over: int) -> tuple[list[list[tuple]], int]:
    """(rows of each tree, sorted; nodes below the end) along one answer, root by root."""
    trees, below, done = [], 0, 1
    while done < len(answer.tokens):
        said = tuple((token - 1) // 2 if token % 2 else -1 for token in answer.tokens[done:])
        table = Table(text_seed([*answer.prompt, *answer.tokens[:done]]))
        rows, accepted, beyond = reference.c2t_rows(table, section.top_k, section.draft_calls, over, said)
        trees.append(sorted(rows))
        below += beyond
        done += accepted + 1
    return trees, below


def fast_rows(labelled: Labelled) -> list[list[tuple]]:
    return [
        sorted((int(d), p, h, accepted) for (p, h, d), accepted in zip(features.tolist(), said.tolist(), strict=True))
        for features, said in zip(labelled.features, labelled.accepted, strict=True)
    ]


SECTIONS = [
    LabelSection(top_k=3, draft_calls=4),
    LabelSection(top_k=1, draft_calls=3),
    LabelSection(top_k=5, draft_calls=1),
    LabelSection(top_k=VOCAB + 2, draft_calls=3),  # more than there are tokens
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: f"{section.top_k} x {section.draft_calls}")
def test_rows_are_those_of_the_slow_twin_answer_by_answer(
    section: LabelSection, monkeypatch: pytest.MonkeyPatch
) -> None:
    over = 5 if section.draft_calls == 4 else 1000
    monkeypatch.setattr(c2t, "ENTROPY_OVER", over)
    chance = random.Random(section.top_k)
    answers = [written_answer(chance, tokens) for tokens in (2, 9, 30, 17, 30)]
    together = label(Along(), answers, None, unasked_target(1000), section)
    accepted = beyond = 0
    for answer, labelled in zip(answers, together, strict=True):
        expected, below = slow_rows(answer, section, over)
        found = fast_rows(labelled)
        for mine, its in zip(found, expected, strict=True):
            assert [(row[0], row[3]) for row in mine] == [(row[0], row[3]) for row in its]
            np.testing.assert_allclose([row[1:3] for row in mine], [row[1:3] for row in its], atol=1e-5)
        assert (labelled.dropped_beyond, labelled.dropped_nan) == (below, 0)
        accepted, beyond = accepted + sum(row[3] for tree in expected for row in tree), beyond + below
        (alone,) = label(Along(), [answer], None, unasked_target(1000), section)
        assert fast_rows(alone) == found
    assert accepted > 5
    assert beyond > 0 or section.draft_calls == 1


class Broken(Table):
    """After some paths a distribution holds a NaN."""

    def row(self, path: Nodes) -> torch.Tensor:
        row = super().row(path).clone()
        if random.Random(f"broken {self.seed} {path}").random() < 0.15:
            row[3] = math.nan
        return row


def test_rows_with_nan_are_dropped_and_counted() -> None:
    section = LabelSection(top_k=3, draft_calls=4)
    answers = [written_answer(random.Random(seed), 20) for seed in range(4)]
    dropped = 0
    for labelled in label(Along(Broken), answers, None, unasked_target(1000), section):
        kept = sum(map(len, labelled.accepted))
        assert not any(features.isnan().any() for features in labelled.features)
        assert list(map(len, labelled.features)) == list(map(len, labelled.accepted))
        assert (kept + labelled.dropped_nan + labelled.dropped_beyond) % (3 + 3 * 9) == 0  # whole trees
        dropped += labelled.dropped_nan
    assert dropped > 20


def test_trees_come_back_as_they_were_written(tmp_path: Path) -> None:
    trees = made_trees(7, 30)
    trees.write(tmp_path / "rows")
    again = Trees.read(tmp_path / "rows")
    assert same_trees(again, trees) and again.sizes.tolist() == [30, 29, 28, 30, 29, 28, 30]
    chosen = again.chosen(torch.tensor([5, 0, 3]))
    for name in ("features", "accepted"):
        parts = getattr(trees, name).split(trees.sizes.tolist())
        assert torch.equal(getattr(chosen, name), torch.cat([parts[tree] for tree in (5, 0, 3)]))
    assert chosen.sizes.tolist() == [28, 30, 30]
    assert same_trees(again.chosen(torch.arange(7)), trees)
