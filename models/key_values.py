"""Keys and values of B answers in preallocated buffers, written in place.

Row b holds its committed columns from 0 on. The columns of this round, its *slots*, follow; the next round overwrites
them:

    row 0   | 0 1 2 3 4 5 6 7 | slot 0  slot 1  slot 2 |  -  -  -
    row 1   | 0 1 2 3 4 | slot 0  slot 1  slot 2 |  -  -  -  -  -
              committed

A target's slots are the nodes of a draft tree; a drafter's are its drafted columns.

Shapes: B rows, n new slots, S slots of this round so far (the new ones last), L columns looked at, A path length.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional


def check_rollback(held: Sequence[int], wanted: Sequence[int]) -> None:
    """Raises ValueError unless each row can be cut from held[b] columns to wanted[b]."""
    if len(held) != len(wanted) or not all(0 <= new <= old for new, old in zip(wanted, held, strict=True)):
        raise ValueError(f"rows of {list(held)} columns cannot be rolled back to {list(wanted)}")


@dataclass(frozen=True)
class BufferKind:
    """Shape, dtype and device of a layer's keys (or values). Equal layers share a buffer."""

    heads: int
    head_dim: int
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, states: torch.Tensor) -> "BufferKind":
        """The kind of states [B, heads, columns, head_dim]."""
        return cls(states.shape[1], states.shape[3], states.dtype, states.device)


class KeyValues:
    """The buffers of all layers, which grow as needed. `kinds` has None for a layer without keys of its own."""

    def __init__(self, kinds: Sequence[tuple[BufferKind, BufferKind] | None], lengths: Sequence[int], capacity: int):
        self.kinds, self.lengths = list(kinds), list(lengths)
        count = Counter[BufferKind]()
        self._places: list[list[tuple[BufferKind, int]]] = []  # (buffer, index in it) of each layer's keys and values
        for pair in self.kinds:
            self._places.append([])
            for kind in pair or ():
                self._places[-1].append((kind, count[kind]))
                count[kind] += 1
        self.device = next((kind.device for kind in count), torch.device("cpu"))
        rows = len(self.lengths)
        # [states of that kind, B or more rows, heads, capacity, head_dim]; zeros, because masks do not hide NaN.
        self._allocated = {
            kind: torch.zeros((n, rows, kind.heads, capacity, kind.head_dim), dtype=kind.dtype, device=kind.device)
            for kind, n in count.items()
        }
        self._buffers = dict(self._allocated)  # the rows in use
        self._written = 0  # columns that any row has ever written; behind them are zeros
        self._rebuilt(capacity)

    def _rebuilt(self, capacity: int) -> None:
        self.capacity = capacity
        self._views = [[self._buffers[kind][i] for kind, i in places] for places in self._places]
        self._moved()

    def _moved(self) -> None:
        """The lengths changed."""
        self.even = min(self.lengths, default=0) == max(self.lengths, default=0)
        self.end = max(self.lengths, default=0)
        self._written = max(self._written, self.end)
        if len(self.lengths) > 1:  # copied now, while the device is idle; a later copy would wait for queued work
            self._starts_B1 = torch.tensor(self.lengths, device=self.device)[:, None]
            self._rows_B1 = torch.arange(len(self.lengths), device=self.device)[:, None]

    def positions(self, count: int, first_slot: int = 0) -> torch.Tensor:
        """[B, count] columns of slots, from `first_slot` on."""
        if len(self.lengths) == 1:  # nothing to copy
            first = self.lengths[0] + first_slot
            return torch.arange(first, first + count, device=self.device)[None]
        return self._starts_B1 + torch.arange(first_slot, first_slot + count, device=self.device)

    def place(self, first_slot: int, count: int) -> None:
        """Prepares to write `count` slots from `first_slot` on."""
        end = max(self.lengths) + first_slot + count
        self.reserve(end)  # which sets `end` anew if it grows
        self.end, self._first, self.count = end, first_slot, count
        self._written = max(self._written, end)
        self._columns_Bn = None if self.even else self.positions(count, first_slot)

    def write(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes [B, heads, n, head_dim] each; returns all columns up to the last one written, [B, heads, L, head_dim].

        Columns beyond a row's own hold arbitrary numbers: masks hide them (`seen`).
        """
        buffers = self._views[layer]
        for buffer, states in zip(buffers, (keys, values), strict=True):
            if self._columns_Bn is None:
                buffer[:, :, self.end - self.count : self.end] = states
            else:
                buffer[self._rows_B1, :, self._columns_Bn] = states.transpose(1, 2)
        return buffers[0][:, :, : self.end], buffers[1][:, :, : self.end]

    def seen(self, visible_BnS: torch.Tensor | None) -> torch.Tensor | None:
        """[B, n, L] bool: the columns that new slots see, committed ones and those in `visible_BnS`.

        None stands for one new slot that sees all; the result is None if it sees every column, which is faster.
        """
        if visible_BnS is None and self.even:
            return None
        if visible_BnS is None:
            visible_BnS = torch.ones((len(self.lengths), 1, self._first + 1), dtype=torch.bool, device=self.device)
        if self.even:
            return functional.pad(visible_BnS, (self.lengths[0], 0), value=True)
        committed = torch.arange(self.end, device=self.device) < self._starts_B1  # [B, L]
        at = self.positions(visible_BnS.shape[2])[:, None].expand_as(visible_BnS)
        return committed[:, None].repeat(1, visible_BnS.shape[1], 1).scatter_(2, at, visible_BnS)

    def key_positions(self, slot_positions_BS: torch.Tensor) -> torch.Tensor:
        """[B, L] positions of all columns: 0, 1, 2, ... for committed ones, then the slots' given positions."""
        columns = torch.arange(self.end, device=self.device).repeat(len(self.lengths), 1)
        return columns.scatter_(1, self.positions(slot_positions_BS.shape[1]), slot_positions_BS)

    def commit(self, counts: Sequence[int], path_BA: torch.Tensor | None = None) -> None:
        """Commits the first counts[b] slots of path_BA[b], in ascending order, and drops the others.

        Behind these a path is arbitrary. None stands for slots 0, 1, 2, ..., which need no move.
        """
        if path_BA is not None:
            path_BA = path_BA.to(self.device)
            for buffer in self._buffers.values():  # all slots are read before any is written
                if len(self.lengths) == 1:
                    first, kept = self.lengths[0], counts[0]
                    buffer[:, :, :, first : first + kept] = buffer.index_select(3, path_BA[0, :kept] + first)
                else:
                    source, place = self._starts_B1 + path_BA, self.positions(path_BA.shape[1])
                    buffer[:, self._rows_B1, :, place] = buffer[:, self._rows_B1, :, source]
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        self._moved()

    def rollback(self, lengths: Sequence[int]) -> None:
        """Keeps the first lengths[b] committed columns of each row (`check_rollback`)."""
        check_rollback(self.lengths, lengths)
        self.lengths = list(lengths)
        self._moved()

    def fill(self, row: int, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Writes columns 0, 1, ... of one row and layer, [1, heads, columns, head_dim] each."""
        for buffer, states in zip(self._views[layer], (keys, values), strict=True):
            buffer[row, :, : states.shape[2]] = states[0]

    def set_rows(self, kept: Sequence[int], new: Sequence[int] = ()) -> None:
        """Keeps these rows, in this order, and adds rows of `new` committed columns, for `fill` to write.

        Rows that keep their index cost nothing.
        """
        end = self.end  # slots before it may yet be committed
        places = [place for place, row in enumerate(kept) if row != place]
        for kind, buffer in self._buffers.items():
            rows = buffer[:, : len(kept)]
            if places:
                moved = [kept[place] for place in places]
                # Rows that move into gaps are copied one by one; where some trade places, all are read first.
                states = buffer[:, :, :, : self.end]
                if not set(moved).isdisjoint(places):
                    states = states.clone()
                for place, row in zip(places, moved, strict=True):
                    rows[:, place, :, : self.end] = states[:, row]
                    rows[:, place, :, self.end : self._written] = 0  # another row may have left NaN there
            self._buffers[kind] = rows
        self.lengths = [self.lengths[row] for row in kept]
        before, count = len(self.lengths), len(self.lengths) + len(new)
        if any(count > buffer.shape[1] for buffer in self._allocated.values()):
            self._allocate(count, self.capacity)
        for kind, buffer in self._allocated.items():
            buffer[:, before:count, :, : self._written] = 0  # another row may have left NaN there
            self._buffers[kind] = buffer[:, :count]
        self.lengths += new
        self._rebuilt(self.capacity)
        self.reserve(max(self.lengths, default=0))
        self.end = max(self.end, end)

    def reserve(self, columns: int) -> None:
        """Makes room for so many columns, slots included."""
        if columns > self.capacity:
            self._allocate(len(self.lengths), max(columns, 2 * self.capacity))

    def _allocate(self, rows: int, capacity: int) -> None:
        """Replaces the buffers by larger ones with the same content."""
        for kind, buffer in self._buffers.items():
            grown = buffer.new_zeros((len(buffer), rows, kind.heads, capacity, kind.head_dim))
            grown[:, : buffer.shape[1], :, : self.capacity] = buffer
            self._allocated[kind], self._buffers[kind] = grown, grown[:, : buffer.shape[1]]
        self._rebuilt(capacity)


class SlotTree:
    """A mask of a round's drafted slots: each sees its ancestors and itself. Slots count from 1; slot 0, the root's, is
    committed.

        slot     1 2 3 4 5        1   2       below the root
        1        x . . . .        |\\   \\
        2        . x . . .        3 4   5     3 and 4 below 1, 5 below 2
        3        x . x . .
        4        x . . x .
        5        . x . . x
    """

    def __init__(self, rows: int, device: torch.device, capacity: int = 128):
        self.count = 0  # slots so far
        self._chain = True  # one slot at each depth so far, so no mask is stored
        self._seen = torch.zeros((rows, 1 + capacity, capacity), dtype=torch.bool, device=device)  # row 0 is slot 0's

    def extend(self, parent_slots_Bb: torch.Tensor, depth: int) -> torch.Tensor | None:
        """Adds slots of one depth. Returns [B, b, S] bool, the slots that they see; None: one slot, which sees all."""
        before, (rows, count) = self.count, parent_slots_Bb.shape
        self.count += count
        if self._chain and self.count == depth:
            return None
        capacity = self._seen.shape[2]
        if self.count > capacity:
            more = max(self.count, 2 * capacity) - capacity
            self._seen = functional.pad(self._seen, (0, more, 0, more))
        if self._chain:
            self._seen[:, 1 : before + 1, :before] = self._seen.new_ones(before, before).tril_()
            self._chain = False
        new = self._seen[:, before + 1 : self.count + 1]
        if rows == 1:
            new[0] = self._seen[0].index_select(0, parent_slots_Bb[0])
        else:
            new[:] = self._seen[torch.arange(rows, device=new.device)[:, None], parent_slots_Bb]
        new[:, :, before : self.count].diagonal(dim1=1, dim2=2).fill_(True)
        return new[:, :, : self.count]
