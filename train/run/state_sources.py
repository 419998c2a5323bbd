"""Where training takes the target's states from: the target itself, or a store that data_gen/capture.py wrote.

A thread reads a store ahead of training, few shards at a time. Each epoch shuffles the shards, then the rows of each
window of WINDOW_SHARDS neighbouring shards:

    shards     5 2 | 7 0 | 3 ...             here two a window
    rows       those of 5 and 2, shuffled | those of 7 and 0, shuffled | ...
    pools      the micro-batches of POOL_BATCHES * batch size rows each, as `BatchOrder` cuts them, shuffled

Rows lie in random shards, so a window is a fair sample. The order is a pure function of seed and epoch, the same on all
ranks. A store of no more than WINDOW_SHARDS shards is read in the same order as training with the target.

Shapes: B rows, T tokens, F captured states (S layers of H), H hidden size, P tokens of several rows.
"""

import random
from abc import ABC, abstractmethod
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from draftsmith.data_gen.states.store import (
    RowStates,
    Store,
    key_of,
    length_of,
    rows_identity,
    stored_positions,
    teacher_positions,
)
from draftsmith.data_gen.states.stored_target import logit_settings
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.chat import FINGERPRINT_COVERS
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.train.run.batches import BatchOrder, MicroBatch

WINDOW_SHARDS = 8


class StateSource(ABC):
    """Gives the loop the states of a micro-batch."""

    @abstractmethod
    def of(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """(captured [B, T, F], last [B, T, H]). `last` may be zero for tokens that teach no column. Raises UserError if
        a store's shard is damaged."""

    def ordered(self, order: BatchOrder) -> BatchOrder:
        """`order`, or another order in which this source is faster to read."""
        return order

    def expect(self, rows: Sequence[int]) -> None:  # noqa: B027 - only a store reads ahead
        """Announces the rows that will be asked for next, in order."""


class OnlineStates(StateSource):
    """Runs the target on every micro-batch."""

    def __init__(self, target: Target):
        self.target = target

    def of(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        states = self.target.states(batch.ids, documents=batch.documents, inserts=batch.inserts)
        return states.captured, states.last


class ShardOrder(BatchOrder):
    """The order of a store; `shard_of` is the shard of every row."""

    def __init__(self, lengths: Sequence[int], batch_size: int, seed: int, shard_of: Sequence[int]):
        super().__init__(lengths, batch_size, seed)
        self.by_shard: dict[int, list[int]] = {}
        for row, shard in enumerate(shard_of):
            self.by_shard.setdefault(shard, []).append(row)

    def batches_of(self, epoch: int) -> list[list[int]]:
        if len(self.by_shard) <= WINDOW_SHARDS:
            return super().batches_of(epoch)
        chance = random.Random(f"{self.seed}/{epoch}")
        shards = sorted(self.by_shard)
        chance.shuffle(shards)
        rows: list[int] = []
        for start in range(0, len(shards), WINDOW_SHARDS):
            window = [row for shard in shards[start : start + WINDOW_SHARDS] for row in self.by_shard[shard]]
            chance.shuffle(window)
            rows += window
        batches = []
        for pool in self.pools_of(rows):
            chance.shuffle(pool)
            batches += pool
        return batches


class StoredStates(StateSource):
    """Reads the states of micro-batches from a store.

    Args:
        rows: training rows, followed by validation rows; `MicroBatch.rows` are indices of this list.
        dtype: precision of the returned states: that of the target's head, which reads them.
    """

    def __init__(self, store: Store, rows: Sequence[TrainingRow], device: torch.device, dtype: torch.dtype):
        self.store, self.all_rows, self.device, self.dtype = store, rows, device, dtype
        self.reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="states")
        self.begun: dict[int, Future[RowStates]] = {}
        self.wanted: list[int] = []

    def ordered(self, order: BatchOrder) -> BatchOrder:
        shard_of = [self.store.shard_of(row) for row in self.all_rows[: len(order.lengths)]]
        return ShardOrder(order.lengths, order.batch_size, order.seed, shard_of)

    def expect(self, rows: Sequence[int]) -> None:
        self.wanted = list(rows)  # the next call of `of` starts to read them

    def of(self, batch: MicroBatch) -> tuple[torch.Tensor, torch.Tensor]:
        now, later = list(batch.rows), set(self.wanted)
        for row in self.begun.keys() - later.union(now):
            self.begun.pop(row).cancel()
        for row in [*now, *self.wanted]:
            if row not in self.begun:
                self.begun[row] = self.reader.submit(self._read, self.all_rows[row])
        decoded = [self._decoded(row, self.begun[row].result()) for row in now]
        for row in set(now):
            del self.begun[row]
        self.wanted = [row for row in self.wanted if row not in now]
        return batch.lay_out([captured for captured, _ in decoded]), batch.lay_out([last for _, last in decoded])

    def captured(self, read: Sequence[tuple[TrainingRow, int]]) -> torch.Tensor:
        """Captured states [P, F] of rows' first tokens, one row after another, from (row, number of its tokens). A row
        may occur several times. Rows read ahead for coming micro-batches are not touched."""
        begun = {id(row): self.reader.submit(self._read, row) for row in {id(row): row for row, _ in read}.values()}
        return torch.cat([self._captured(row, begun[id(row)].result(), tokens).flatten(1) for row, tokens in read])

    def _captured(self, row: TrainingRow, states: RowStates, tokens: int) -> torch.Tensor:
        """[tokens, S, H] of a row's first tokens. Those that the store leaves out are 0: no drafter reads them."""
        positions = stored_positions(row, self.store.picture_states)
        count = int((positions < tokens).sum())
        scales = None if states.captured_scale is None else states.captured_scale[:count].to(self.device)
        values = self.store.encoding.decode(states.captured[:count].to(self.device), scales, self.dtype)
        if count == tokens:
            return values
        whole_TSH = values.new_zeros(tokens, *values.shape[1:])
        whole_TSH[positions[:count].to(self.device)] = values
        return whole_TSH

    def _read(self, row: TrainingRow) -> RowStates:
        states = self.store.read(row)
        return states.pinned() if self.device.type == "cuda" else states

    def _decoded(self, row: int, stored: RowStates) -> tuple[torch.Tensor, torch.Tensor]:
        """(captured [T, F], last [T, H])"""
        training_row, states = self.all_rows[row], stored.to(self.device)
        captured_TSH = self._captured(training_row, states, length_of(training_row))
        if states.last is None:
            return captured_TSH.flatten(1), captured_TSH[:, -1]
        taught = torch.tensor(teacher_positions(training_row.spans), dtype=torch.long, device=self.device)
        last_TH = torch.zeros_like(captured_TSH[:, 0])
        last_TH[taught] = self.store.encoding.decode(states.last, states.last_scale, self.dtype)
        return captured_TSH.flatten(1), last_TH


def store_of(recipe: Recipe, files: TargetFiles, layers: Sequence[int], rows: Sequence[TrainingRow]) -> Store | None:
    """The store that the recipe names; None where it names none. Raises UserError if it is missing, damaged, or made
    for another target, tokenizer, dtype, or other layers or rows."""
    if recipe.data.states is None:
        return None
    store = Store(recipe.states_dir)
    made_of = store.manifest.made_of
    known = files.identity | logit_settings(files.text_config)  # the rest is known only from the weights
    asked = {"target": made_of["target"] | known, "capture_layers": list(layers), "dtype": recipe.data.capture.dtype}
    problems = store.manifest.other_than(asked)
    if recipe.drafter.reads_picture_states and not store.picture_states:
        problems.append(
            f"states of pictures: left out there, because a drafter of kind vispec reads none; kind "
            f"{recipe.drafter.kind} reads them"
        )
    covers = f" (a fingerprint covers {FINGERPRINT_COVERS})" * ("tokenizer_fingerprint: " in "".join(problems))
    if missing := store.missing(rows):
        problems.append(
            f"rows: the store has {made_of['rows']}, asked for are {rows_identity({key_of(row) for row in rows})}; "
            f"{len(missing):,} of these are not in it, the first is {missing[0].id!r} with {len(missing[0].input_ids)} "
            "tokens"
        )
    if problems:
        raise UserError(
            f"data.states: {store.directory} is not what the recipe asks for: {'; '.join(problems)}{covers}; restore "
            "these values, or capture into another folder with `draftsmith capture`"
        )
    return store


def store_identity(store: Store | None) -> dict[str, Any] | None:
    """The parts of a store's manifest that a resumed run must find unchanged: they decide values and reading order."""
    names = ("dtype", "capture_layers", "picture_states", "rows", "computed_in", "shard_megabytes", "batch_tokens")
    return None if store is None else {name: store.manifest.made_of[name] for name in names}
