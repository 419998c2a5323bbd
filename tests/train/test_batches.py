"""Micro-batches: any layout of the same documents is read the same, by the target and by what counts; nothing leaks.

Targets in float32. One forward over many tokens and forwards over fewer round differently: by 1e-5 of the largest state
at most in these families, so that 1e-4 leaves room for other machines. A key too many changes far more.
"""

import itertools
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.data_gen.states.store import length_of
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.alignment import Documents, columns_of
from draftsmith.models.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.train.run.batches import collate, collate_as
from tests.conftest import make_target
from tests.models.test_targets import FAMILIES, WINDOW, assert_close, some_tokens, target_of
from tests.reference import counted, laid_out
from tests.thinning import a_few
from tests.training_runs import done_path as done_path
from tests.training_runs import metrics, train


def some_rows(count: int, seed: int) -> list[TrainingRow]:
    """Rows of one to three spans: some begin with one, some end with one, some spans touch, some rows go on behind."""
    chance = random.Random(seed)
    rows = []
    for number in range(count):
        spans, at = [], chance.choice((0, 0, 1, 4))
        for _ in range(chance.randint(1, 3)):
            end = at + chance.randint(1, 9)
            spans.append((at, end))
            at = end + chance.choice((0, 1, 3))
        rows.append(TrainingRow("a", some_tokens(spans[-1][1] + chance.choice((0, 0, 5)), 100 * seed + number), spans))
    return rows


def some_layout(count: int, seed: int) -> list[list[int]]:
    """The rows in any order, cut anywhere."""
    chance = random.Random(seed)
    order = chance.sample(range(count), count)
    cuts = sorted(chance.sample(range(1, count), chance.randint(0, count - 1)))
    return [order[start:end] for start, end in zip([0, *cuts], [*cuts, count], strict=True)]


def spans_of(row: TrainingRow) -> list[int]:
    """The number of each token's span, up to the end of the last one."""
    end_of_all = max(end for _, end in row.spans)
    numbers = [0] * end_of_all
    for number, (start, end) in enumerate(row.spans, start=1):
        numbers[start:end] = [number] * (end - start)
    return numbers


def test_layouts_equal_the_slow_twin_in_their_rows_and_packed_into_one() -> None:
    for seed in range(20):
        rows, layout = some_rows(6, seed), some_layout(6, seed)
        batch = collate_as(rows, layout, range(40, 46))
        documents = [[(rows[i].input_ids[: length_of(rows[i])], spans_of(rows[i])) for i in line] for line in layout]
        width = max(sum(len(ids) for ids, _ in line) for line in documents)
        expected = [laid_out(line, width) for line in documents]
        tensors = (batch.ids, batch.span, batch.position)
        assert [list(map(list, each)) for each in zip(*(t.tolist() for t in tensors), strict=True)] == expected
        assert batch.rows == tuple(40 + i for line in layout for i in line)
        ids = [torch.tensor(rows[i - 40].input_ids) for i in batch.rows]  # longer than what is laid out, if rows go on
        assert torch.equal(batch.lay_out(ids), batch.ids)
        brought = [torch.stack((each, -each), dim=-1).double() for each in ids]
        wide = batch.lay_out(brought)
        assert torch.equal(wide, torch.stack((batch.ids, -batch.ids), dim=-1).double())
        assert list(batch.places) == [
            (b, sum(len(ids) for ids, _ in line[:i]), len(line[i][0]))
            for b, line in enumerate(documents)
            for i in range(len(line))
        ]
        assert (batch.documents is None) == all(len(line) == 1 for line in layout)

        one = batch.one_row
        packed = collate_as(rows, [[i for line in layout for i in line]], range(40, 46))
        assert (one.rows, one.places) == (packed.rows, packed.places)
        for name in ("ids", "span", "position", "tokens_at"):
            assert torch.equal(getattr(one, name), getattr(packed, name)), name
        assert torch.equal(batch.in_one_row(wide), packed.lay_out(brought))
    alone = collate(rows[:1])
    assert alone.one_row is alone and alone.in_one_row(alone.ids) is alone.ids


def test_columns_of_a_layout_are_those_of_each_document_alone() -> None:
    """By the definition, token by token: no window holds tokens of two documents, whatever their spans are called."""
    steps, touching = 4, 0
    for seed in range(30):
        rows = some_rows(6, seed)
        batch = collate_as(rows, some_layout(6, seed))
        columns = columns_of(batch.span, steps)
        found = {
            (b, int(columns.index[b, c])): int(columns.depth[b, c]) for b, c in columns.counted(0).nonzero().tolist()
        }
        expected = {}
        for i, (b, start, length) in zip(batch.rows, batch.places, strict=True):
            spans = spans_of(rows[i])
            touching += bool(start and spans[0] and batch.span[b, start - 1])
            depths = [sum(counted(spans, t, k) for k in range(steps)) for t in range(length)]
            expected |= {(b, start + t): depth for t, depth in enumerate(depths) if depth}
        assert found == expected
        runs = columns.runs(Documents(batch.position, batch.places))
        assert [(run.row, run.before + i) for run in runs for i in range(run.end - run.first)] == sorted(expected)
        assert len(runs) == sum((b, t - 1) not in expected for b, t in expected)  # none could be longer
        for run in runs:
            mine = range(run.before, run.before + run.end - run.first)
            assert columns.index[run.row, run.first : run.end].tolist() == list(mine)
            assert any((run.row, run.start) == (b, start) and mine[-1] < start + n for b, start, n in batch.places)
    assert touching > 10  # documents that end with a span, before ones that begin with one


# The target over documents that share rows.

LENGTHS = [30, 7, 19, 2, 26]  # of a window of 12 some are far beyond, some within


def documents_of(seed: int = 0) -> list[TrainingRow]:
    return [TrainingRow("a", some_tokens(n, seed + i), [(1, n)]) for i, n in enumerate(LENGTHS)]


@pytest.mark.parametrize(
    ("way", "name"),
    a_few(
        itertools.product(["its own", "masks"], FAMILIES),
        *(("its own", "mistral, all layers slide"), ("masks", "mistral, all layers slide")),
        *(("its own", "gemma2"), ("its own", "gpt_oss")),
    ),
)
@torch.no_grad()
def test_every_family_reads_packed_documents_as_it_reads_them_alone(name: str, way: Any) -> None:
    """In the way that the trial chooses, and by masks, which it falls back on."""
    target = Target(target_of(name).model)
    target._packing = None if way == "its own" else way
    rows = documents_of()
    assert max(LENGTHS) > 2 * WINDOW
    alone = [target.states(torch.tensor([row.input_ids])) for row in rows]
    for layout in ([[0, 1, 2, 3, 4]], [[3, 0], [4], [2, 1]]):
        batch = collate_as(rows, layout)
        states = target.states(batch.ids, documents=batch.documents)
        real = batch.lay_out([torch.ones(n, 1) for n in batch.lengths])
        for found, each in (states.captured, [s.captured[0] for s in alone]), (states.last, [s.last[0] for s in alone]):
            assert torch.isfinite(found).all()
            assert_close(found * real, batch.lay_out([each[i] for i in batch.rows]))
    if way == "its own":
        assert target._packing == ("masks" if name in ("gemma2", "gpt_oss") else "attention")
    configs = [module.config for module in target.decoder.modules() if hasattr(module, "config")]
    assert {config._attn_implementation for config in configs} <= {"sdpa", "eager"}  # packing changes it back


def changed(model: Any, change: Callable[[dict[str, Any]], None]) -> Target:
    """A target whose decoder reads packed documents as `change` makes it."""
    decoder = model.get_decoder()
    forward = decoder.forward

    def other(*args: Any, **inputs: Any) -> Any:
        if not inputs.get("use_cache") and inputs.get("position_ids") is not None:
            change(inputs)
        return forward(*args, **inputs)

    decoder.forward = other
    return Target(model)


def test_decoders_that_mix_documents_are_refused_by_name() -> None:
    def without_mask(inputs: dict[str, Any]) -> None:
        del inputs["attention_mask"], inputs["position_ids"]  # by which transformers makes a mask of its own

    def going_on(inputs: dict[str, Any]) -> None:
        inputs["position_ids"] = torch.arange(inputs["position_ids"].shape[1])[None]

    batch = collate(documents_of(), packed=True)
    for family, change, message in (
        ("llama", without_mask, r"LlamaForCausalLM does not keep documents apart that share .* train\.packing: false"),
        ("gpt2", going_on, "GPT2LMHeadModel does not keep documents apart"),  # rotary positions are distances
    ):
        target = changed(make_target(family), change)
        target.states(batch.ids)  # who does not pack is not troubled
        for _ in range(2):
            with pytest.raises(UserError, match=rf"^train\.packing: {message}"):
                target.states(batch.ids, documents=batch.documents)


# Runs.


def test_a_packed_run_follows_the_padded_one_and_either_goes_on_with_the_other(
    done_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same losses within float32's rounding, step by step, in training and validation."""
    output = done_path.parent / "run"
    padded = metrics(output)
    for kept, said in (("step-0*3", "resumed from"), ("none", "100.0% of the tokens that the target reads are no")):
        for checkpoint in set((output / "checkpoints").iterdir()) - set((output / "checkpoints").glob(kept)):
            shutil.rmtree(checkpoint)
        train(done_path, "train.packing=true")
        assert said in capsys.readouterr().out
        for mine, theirs in zip(metrics(output), padded, strict=True):
            for key in ("loss", "grad_norm", "validation_loss"):
                assert (key in mine) == (key in theirs)
                if key in theirs:
                    assert mine[key] == pytest.approx(theirs[key], rel=1e-4), (kept, mine["step"], key)
            assert mine["accuracy"] == pytest.approx(theirs["accuracy"], abs=0.02)
