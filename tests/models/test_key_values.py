"""Preallocated keys and values against lists of columns: written, committed, rolled back, kept and grown."""

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule, run_state_machine_as_test
from torch.nn import functional

from draftsmith.models.key_values import BufferKind, KeyValues, SlotTree
from draftsmith.models.layers import grouped_attention
from tests.thinning import MANY, effort

CPU = torch.device("cpu")
SEEDS = st.integers(0, 10**6)


def kind(heads: int, head_dim: int) -> BufferKind:
    return BufferKind(heads, head_dim, torch.float32, CPU)


# Two layers alike, one with other heads and narrower values, one that keeps nothing of its own.
KINDS = [(kind(2, 4), kind(2, 4)), (kind(2, 4), kind(2, 4)), None, (kind(1, 6), kind(1, 3))]
LAYERS = [layer for layer, pair in enumerate(KINDS) if pair]


class Buffers(RuleBasedStateMachine):
    """The slow twin: for each row a list of columns, each with a (key, value) pair of every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.store = KeyValues(KINDS, [0, 0, 0], capacity=3)
        self.rows: list[list[list[tuple[torch.Tensor, torch.Tensor]]]] = [[], [], []]
        self.written = 0  # columns that any row ever had

    def columns(self, rows: int, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [
            tuple(torch.randn(rows, each.heads, count, each.head_dim) for each in KINDS[layer])  # type: ignore[misc]
            for layer in LAYERS
        ]

    @rule(calls=st.lists(st.integers(1, 4), min_size=1, max_size=3), in_place=st.booleans(), seed=SEEDS)
    def round(self, calls: list[int], in_place: bool, seed: int) -> None:
        """Slots in several calls, of which each row commits a path."""
        chance, first = random.Random(seed), 0
        torch.manual_seed(seed)
        slots: list[list[list[tuple[torch.Tensor, torch.Tensor]]]] = [[] for _ in self.rows]
        for count in calls:
            self.store.place(first, count)
            self.written = max(self.written, self.store.end)
            new = self.columns(len(self.rows), count)
            for b, its in enumerate(slots):
                its += [[(keys[b, :, i], values[b, :, i]) for keys, values in new] for i in range(count)]
            for place, layer in enumerate(LAYERS):
                found = self.store.write(layer, *new[place])
                for b, its in enumerate(slots):
                    wanted = self.rows[b] + its
                    for part, states in enumerate(found):
                        assert torch.isfinite(states).all()
                        expected = torch.stack([column[place][part] for column in wanted], 1)
                        assert torch.equal(states[b, :, : len(wanted)], expected)
            first += count
        paths = [
            list(range(first)) if in_place else sorted(chance.sample(range(first), chance.randint(1, first)))
            for _ in self.rows
        ]
        padded = torch.tensor([path + [0] * (first - len(path)) for path in paths])
        self.store.commit([len(path) for path in paths], None if in_place else padded)
        self.rows = [row + [its[i] for i in path] for row, its, path in zip(self.rows, slots, paths, strict=True)]
        assert self.store.lengths == list(map(len, self.rows))

    @rule(seed=SEEDS)
    def rollback(self, seed: int) -> None:
        lengths = [random.Random(f"{seed} {b}").randint(0, len(row)) for b, row in enumerate(self.rows)]
        with pytest.raises(ValueError, match="cannot be rolled back"):
            self.store.rollback([len(self.rows[0]) + 1, *lengths[1:]])
        self.store.rollback(lengths)
        self.rows = [row[:length] for row, length in zip(self.rows, lengths, strict=True)]

    @precondition(lambda self: len(self.rows) > 1)
    @rule(lengths=st.lists(st.sampled_from([0, 1, 7, 40]), max_size=2), seed=SEEDS)
    def keep(self, lengths: list[int], seed: int) -> None:
        """In any order, and rows that come. Behind what is committed, rows that go leave anything."""
        count = len(self.rows)
        kept = random.Random(seed).sample(range(count), random.Random(seed).randint(1, count))
        for layer in LAYERS:
            for buffer in self.store._views[layer]:
                for row in set(range(count)) - set(kept):
                    buffer[row, :, self.store.lengths[row] : self.written] = math.nan
        self.store.set_rows(kept, lengths)
        self.rows = [self.rows[row] for row in kept]
        self.fill(lengths, seed)

    @precondition(lambda self: len(self.rows) < 5)
    @rule(lengths=st.lists(st.sampled_from([0, 1, 7, 40]), min_size=1, max_size=2), seed=SEEDS)
    def admit(self, lengths: list[int], seed: int) -> None:
        self.store.set_rows(range(len(self.rows)), lengths)
        self.fill(lengths, seed)

    def fill(self, lengths: list[int], seed: int) -> None:
        """Columns of rows that came."""
        torch.manual_seed(seed)
        self.written = max(self.written, *lengths, 0)
        for b, length in enumerate(lengths, start=len(self.rows)):
            new = self.columns(1, length)
            for place, layer in enumerate(LAYERS):
                self.store.fill(b, layer, *new[place])
            self.rows.append([[(keys[0, :, i], values[0, :, i]) for keys, values in new] for i in range(length)])


@pytest.mark.parametrize("examples", [8, pytest.param(MANY, marks=pytest.mark.slow)])
def test_buffers_hold_what_lists_of_columns_hold(examples: int) -> None:
    run_state_machine_as_test(Buffers, settings=effort(examples, steps=15))


@settings(effort(15))
@given(counts=st.lists(st.sampled_from([1, 1, 2, 5, 130]), min_size=1, max_size=4), rows=st.integers(1, 3), seed=SEEDS)
def test_drafted_slots_see_their_ancestors_and_themselves(counts: list[int], rows: int, seed: int) -> None:
    chance, slots = random.Random(seed), SlotTree(rows, CPU, capacity=4)
    lines: list[list[set[int]]] = [[set()] for _ in range(rows)]  # of each row and slot: its ancestors and itself
    levels = [[0]] * rows
    for depth, count in enumerate(counts, start=1):
        parents = [[chance.choice(level) for _ in range(count)] for level in levels]
        seen = slots.extend(torch.tensor(parents), depth)
        for row, line in enumerate(lines):
            levels[row] = list(range(len(line), len(line) + count))
            line += [line[parent] | {slot} for parent, slot in zip(parents[row], levels[row], strict=True)]
        if seen is None:
            assert all(line[-1] == set(range(1, len(line))) for line in lines)
        else:
            found = [[set((each.nonzero().flatten() + 1).tolist()) for each in row] for row in seen]
            assert found == [line[-count:] for line in lines]


def test_attention_takes_what_a_gpu_s_kernel_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Heads innermost in memory, unlike a CPU's: no view of it has the shape of the heads."""
    generator = torch.Generator().manual_seed(0)
    query, keys, values = (torch.randn(2, heads, n, 8, generator=generator) for heads, n in ((4, 3), (2, 5), (2, 5)))
    mask = torch.ones(2, 3, 5, dtype=torch.bool).tril(2)
    attend = functional.scaled_dot_product_attention
    expected = attend(query, keys.repeat_interleave(2, 1), values.repeat_interleave(2, 1), attn_mask=mask[:, None])
    monkeypatch.setattr(
        functional,
        "scaled_dot_product_attention",
        lambda *given, **more: attend(*given, **more).transpose(1, 2).contiguous().transpose(1, 2),
    )
    torch.testing.assert_close(grouped_attention(query, keys, values, mask), expected)


def test_slots_move_with_their_rows_until_they_are_committed() -> None:
    store = KeyValues([(kind(1, 2), kind(1, 2))], [3, 2, 1], capacity=8)
    store.place(0, 2)
    slots = torch.randn(3, 1, 2, 2)
    store.write(0, slots, -slots)
    store.set_rows([2, 0])  # row 0 goes to the place of row 1, and row 2 to its own: all are read before
    store.commit([2, 2])
    store.place(0, 1)
    for sign, found in zip((1, -1), store.write(0, *torch.zeros(2, 2, 1, 1, 2)), strict=True):
        for b, (row, first) in enumerate(((2, 1), (0, 3))):
            assert torch.equal(found[b, :, first : first + 2], sign * slots[row])
