"""The target's states from a store: read ahead by a thread, few shards at a time.

Each epoch shuffles the shards, and then the rows of a few neighbouring ones together (WINDOW_SHARDS):

    shards     5 2 | 7 0 | 3 ...             two a window
    rows       those of 5 and 2, shuffled | those of 7 and 0, shuffled | ...
    pools      cut from these rows for 32 micro-batches each: sorted by length, cut into micro-batches, those shuffled

A pool lies in two windows, or in a few where a window has fewer rows than a pool. Rows lie in shards at random, so that
a window is a fair sample. As everywhere the order is a pure function of seed and epoch, the same for all ranks; a store
of no more shards than a window has is read in the order in which training with the target goes.

Memory holds the micro-batches that were read ahead, as they are stored; what the system keeps of the shards beside them
it takes from memory that nobody needs.
"""

import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch

from draftsmith.data_gen.rows.training_rows import TrainingRow
from draftsmith.data_gen.states.store import RowStates, Store, key_of, teacher_positions, unlike, words_of_rows
from draftsmith.data_gen.states.stored_target import words_of_config
from draftsmith.models.chat import FINGERPRINT_COVERS
from draftsmith.models.checkpoint import config_identity
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.train.run.batches import Batch, BatchOrder

WINDOW_SHARDS = 8
AHEAD = 4  # micro-batches that a thread reads before they are asked for


class ShardOrder(BatchOrder):
    """The order above.

    Args:
        shard_of: the shard of every row.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        batch_size: int,
        seed: int,
        shard_of: Sequence[int],
        window_shards: int = WINDOW_SHARDS,
    ):
        super().__init__(lengths, batch_size, seed)
        self.window_shards = window_shards
        self.by_shard: dict[int, list[int]] = {}
        for row, shard in enumerate(shard_of):
            self.by_shard.setdefault(shard, []).append(row)

    def _cut(self, epoch: int) -> list[list[int]]:
        if len(self.by_shard) <= self.window_shards:
            return super()._cut(epoch)
        chance = random.Random(f"{self.seed}/{epoch}")
        shards = sorted(self.by_shard)
        chance.shuffle(shards)
        rows: list[int] = []
        for start in range(0, len(shards), self.window_shards):
            window = [row for shard in shards[start : start + self.window_shards] for row in self.by_shard[shard]]
            chance.shuffle(window)
            rows += window
        pool, batches = 32 * self.batch_size, []
        for start in range(0, len(rows), pool):
            pooled = sorted(rows[start : start + pool], key=self.lengths.__getitem__)
            cut = [pooled[i : i + self.batch_size] for i in range(0, len(pooled), self.batch_size)]
            chance.shuffle(cut)
            batches += cut
        return batches


@dataclass(frozen=True)
class Turn:
    """Which of the micro-batches are this rank's: of each step's `ranks * each`, `each` in a row."""

    ranks: int
    each: int

    def from_step_of(self, number: int) -> Iterator[int]:
        """The numbers of this rank's micro-batches from the first one of the step on that `number` is in."""
        first = number - number % self.each
        while True:
            yield from range(first, first + self.each)
            first += self.ranks * self.each


class AheadOrder(BatchOrder):
    """An order that tells the source what comes next, whenever a micro-batch is asked for."""

    def __init__(self, order: BatchOrder, source: "StoredStates", turn: Turn):
        self.order, self.source, self.turn = order, source, turn
        self.batches_per_epoch = order.batches_per_epoch

    def rows(self, number: int) -> list[int]:
        epoch, most = number // self.batches_per_epoch, self.turn.each + max(self.turn.each, AHEAD)
        coming = islice(self.turn.from_step_of(number), most)
        # Of this epoch alone: an order has the epoch at hand that it was last asked for.
        wanted = [self.order.rows(n) for n in coming if n // self.batches_per_epoch == epoch]
        self.source.expect([row for batch in wanted for row in batch])
        return self.order.rows(number)


class StoredStates:
    """Micro-batches of a store.

    Args:
        rows: of training, and behind them those of validation: what `Batch.rows` numbers.
        dtype: what the states are turned into: that of the target's head, which reads them.
    """

    def __init__(self, store: Store, rows: Sequence[TrainingRow], device: torch.device, dtype: torch.dtype):
        self.store, self.all_rows, self.device, self.dtype = store, rows, device, dtype
        self.reader = ThreadPoolExecutor(max_workers=1, thread_name_prefix="states")
        self.begun: dict[int, Future[RowStates]] = {}
        self.wanted: list[int] = []

    def ordered(self, order: BatchOrder, ranks: int, micro_batches_per_step: int) -> BatchOrder:
        shard_of = [self.store.shard_of(row) for row in self.all_rows[: len(order.lengths)]]
        by_shards = ShardOrder(order.lengths, order.batch_size, order.seed, shard_of)
        return AheadOrder(by_shards, self, Turn(ranks, micro_batches_per_step))

    def expect(self, rows: Sequence[int]) -> None:
        """What will be asked for next, in this order. Reading begins with the next call of `of`."""
        self.wanted = list(rows)

    def of(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        """As `StateSource.of`. Raises UserError where a shard is not what was written."""
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
        """The captured states [P, F] of the first so many tokens of each row, one after another; a row may come again.

        What is read ahead for the micro-batches to come is left as it is.
        """
        begun = {id(row): self.reader.submit(self._read, row) for row in {id(row): row for row, _ in read}.values()}
        parts = []
        for row, tokens in read:
            states = begun[id(row)].result()
            scales = None if states.captured_scale is None else states.captured_scale[:tokens].to(self.device)
            values = states.captured[:tokens].to(self.device)
            parts.append(self.store.encoding.decode(values, scales, self.dtype).flatten(1))
        return torch.cat(parts)

    def _read(self, row: TrainingRow) -> RowStates:
        states = self.store.read(row)
        return states.pinned() if self.device.type == "cuda" else states

    def _decoded(self, row: int, stored: RowStates) -> tuple[torch.Tensor, torch.Tensor]:
        """(captured [T, F], last [T, H])"""
        encoding, states = self.store.encoding, stored.to(self.device)
        captured_TSH = encoding.decode(states.captured, states.captured_scale, self.dtype)
        if states.last is None:
            return captured_TSH.flatten(1), captured_TSH[:, -1]
        taught = torch.tensor(teacher_positions(self.all_rows[row].spans), dtype=torch.long, device=self.device)
        last_TH = torch.zeros_like(captured_TSH[:, 0])
        last_TH[taught] = encoding.decode(states.last, states.last_scale, self.dtype)
        return captured_TSH.flatten(1), last_TH


# What a recipe asks for.


def store_of(
    recipe: Recipe, config: Any, layers: Sequence[int], rows: Sequence[TrainingRow], fingerprint: str
) -> Store | None:
    """The store that the recipe names, checked; None where it names none.

    Args:
        config: the text config of the target.
        layers: what the drafter reads.
        rows: of training and validation; the store may hold others beside them.

    Raises:
        UserError: there is none, it is damaged, or it is of another target, tokenizer, dtype, or other layers or rows.
    """
    if recipe.data.states is None:
        return None
    store, section = Store(recipe.states_dir), recipe.target
    target = config_identity(config, section.model, section.revision, fingerprint)
    made_of = store.manifest.made_of
    asked = {
        "target": made_of["target"] | target | words_of_config(config),  # the rest is in the weights alone
        "capture_layers": list(layers),
        "dtype": recipe.data.capture.dtype,
    }
    problems = unlike(store.manifest, asked)
    covers = f" (a fingerprint covers {FINGERPRINT_COVERS})" * ("tokenizer_fingerprint: " in "".join(problems))
    if missing := store.missing(rows):
        problems.append(
            f"rows: the store has {made_of['rows']}, asked for are {words_of_rows({key_of(row) for row in rows})}; "
            f"{len(missing):,} of these are not in it, the first is {missing[0].id!r} with {len(missing[0].input_ids)} "
            "tokens"
        )
    if problems:
        raise UserError(
            f"data.states: {store.directory} is not what the recipe asks for: {'; '.join(problems)}{covers}; restore "
            "these values, or capture into another folder with data_gen/capture.py"
        )
    return store


def words_of_store(store: Store | None) -> dict[str, Any] | None:
    """What a resumed run must find again: what decides the values, and the order in which they are read."""
    names = ("dtype", "capture_layers", "rows", "computed_in", "shard_megabytes", "batch_tokens")
    return None if store is None else {name: store.manifest.made_of.get(name) for name in names}
