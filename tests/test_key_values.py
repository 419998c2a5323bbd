"""Preallocated keys and values against lists of columns: whatever is written, committed, kept and grown."""

import math
import random

import pytest
import torch

from draftsmith.models.key_values import BufferKind, KeyValues

CPU = torch.device("cpu")


def kind(heads: int, head_dim: int) -> BufferKind:
    return BufferKind(heads, head_dim, torch.float32, CPU)


# Two layers alike, one with other heads and narrower values, one that keeps nothing of its own.
KINDS = [(kind(2, 4), kind(2, 4)), (kind(2, 4), kind(2, 4)), None, (kind(1, 6), kind(1, 3))]


class Columns:
    """The slow twin: for each row and layer a list of (key, value) columns."""

    def __init__(self, rows: int) -> None:
        self.committed = [{layer: [] for layer, pair in enumerate(KINDS) if pair} for _ in range(rows)]
        self.slots = [{layer: [] for layer in row} for row in self.committed]

    def commit(self, counts: list[int], paths: list[list[int]]) -> None:
        for row, slots, count, path in zip(self.committed, self.slots, counts, paths, strict=True):
            for layer, columns in row.items():
                columns += [slots[layer][i] for i in path[:count]]
                slots[layer].clear()


@pytest.mark.parametrize(("rows", "seed"), [(1, 0), (2, 1), (2, 2), (5, 3), (5, 4), (5, 5)])
def test_buffers_hold_what_lists_of_columns_hold(rows: int, seed: int) -> None:
    chance = random.Random(100 * rows + seed)
    torch.manual_seed(seed)
    store, twin = KeyValues(KINDS, [0] * rows, capacity=3), Columns(rows)
    written = 0  # columns that any row ever had
    for _ in range(12):
        first = 0
        for _ in range(chance.randint(1, 3)):  # calls of one round
            count = chance.randint(1, 4)
            store.place(first, count)
            written = max(written, store.end)
            for layer, pair in enumerate(KINDS):
                if pair is None:
                    continue
                keys, values = (torch.randn(len(store.lengths), each.heads, count, each.head_dim) for each in pair)
                all_keys, all_values = store.write(layer, keys, values)
                for b, slots in enumerate(twin.slots):
                    slots[layer] += [(keys[b, :, i], values[b, :, i]) for i in range(count)]
                    expected = twin.committed[b][layer] + slots[layer]
                    end = store.lengths[b] + first + count
                    assert end == len(expected)
                    torch.testing.assert_close(all_keys[b, :, :end], torch.stack([k for k, _ in expected], 1))
                    torch.testing.assert_close(all_values[b, :, :end], torch.stack([v for _, v in expected], 1))
                    assert torch.isfinite(all_keys).all() and torch.isfinite(all_values).all()
            first += count
        paths = [sorted(chance.sample(range(first), chance.randint(1, first))) for _ in store.lengths]
        counts = [len(path) for path in paths]
        if chance.random() < 0.3:  # a chain: nothing has to move
            paths = [list(range(first)) for _ in paths]
            store.commit(counts)
        else:
            padded = [path + [0] * (first - len(path)) for path in paths]
            store.commit(counts, torch.tensor(padded))
        twin.commit(counts, paths)
        assert store.lengths == [len(row[0]) for row in twin.committed]
        if chance.random() < 0.3 and len(store.lengths) > 1:
            kept = chance.sample(range(len(store.lengths)), len(store.lengths) - 1)  # in any order
            for layer in (0, 1, 3):  # behind what is committed, rows that go leave anything
                for buffer in store._views[layer]:
                    for row in set(range(len(store.lengths))) - set(kept):
                        buffer[row, :, store.lengths[row] : written] = math.nan
            store.set_rows(kept)
            twin.committed = [twin.committed[row] for row in kept]
            twin.slots = [twin.slots[row] for row in kept]
        if chance.random() < 0.3 and len(store.lengths) < rows + 2:
            lengths = [chance.choice([0, 1, 7, 40]) for _ in range(chance.randint(1, 2))]
            new = Columns(len(lengths))
            store.set_rows(range(len(store.lengths)), lengths)
            written = max(written, *lengths)
            for b, (row, length) in enumerate(
                zip(new.committed, lengths, strict=True), len(store.lengths) - len(new.slots)
            ):
                for layer, pair in enumerate(KINDS):
                    if pair and length:
                        keys, values = (torch.randn(1, each.heads, length, each.head_dim) for each in pair)
                        store.fill(b, layer, keys, values)
                        row[layer] = [(keys[0, :, i], values[0, :, i]) for i in range(length)]
            twin.committed += new.committed
            twin.slots += new.slots


@pytest.mark.parametrize("lengths", [[3, 3], [4, 1, 2]])
def test_what_new_slots_see_and_where_columns_stand(lengths: list[int]) -> None:
    store = KeyValues([(kind(1, 2), kind(1, 2))], lengths, capacity=4)
    store.place(1, 2)  # one slot stood there already
    visible = torch.tensor([[1, 1, 0], [0, 0, 1]], dtype=torch.bool).expand(len(lengths), 2, 3)
    seen = store.seen(visible)
    positions = store.key_positions(torch.tensor([[100, 101, 101]]).expand(len(lengths), 3))
    assert seen is not None
    assert seen.shape == (len(lengths), 2, max(lengths) + 3)
    for b, length in enumerate(lengths):
        beyond = max(lengths) - length
        for i in range(2):
            expected = [True] * length + visible[b, i].tolist() + [False] * beyond
            assert seen[b, i].tolist() == expected
        assert positions[b, : length + 3].tolist() == [*range(length), 100, 101, 101]
