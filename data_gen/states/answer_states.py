"""Stores the target's states while `draftsmith regenerate` writes answers; then `draftsmith capture` need not run it.

A row's states are written before its conversation's line; rows without a line are made again. After the last answer the
rows go into shards (`capturing.complete`). A store of earlier answers is taken apart before the first row is written
(`WrittenRows.take_apart`), if it has no others' rows.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache

import torch

from draftsmith.data_gen.states.capturing import WantedStates
from draftsmith.data_gen.states.store import (
    WRITTEN,
    Encoded,
    Encoding,
    StoreManifest,
    WrittenRows,
    key_of,
    keys_in,
    writing,
)
from draftsmith.data_gen.states.stored_target import save_target, target_is_whole
from draftsmith.data_gen.training_rows.rows import Turn, is_usable, rows_of, usable_rows
from draftsmith.models.prompt import Prompt
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.target_session import TargetSession
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe


class RecordingSession(TargetSession):
    """A session whose caller gets the states of `capture`. Those of `recorded`, of prompts and committed tokens, are
    kept, encoded, in the host's memory until they are taken.

    Shapes: B rows, n tokens, U captured layers of width H, R recorded ones.
    """

    def __init__(self, target: Target, capture: Sequence[int], recorded: Sequence[int], encoding: Encoding):
        super().__init__(target, sorted({*capture, *recorded}))
        self._asked, self._recorded, self._encoding = tuple(capture), tuple(recorded), encoding
        self._rows: list[list[Encoded]] = []
        self._untaken: dict[int, list[Encoded]] = {}  # rows by the id of their prompt, which its caller keeps
        self._appended: torch.Tensor | None = None  # [B, n, U H] of the last forward

    def prefill(
        self, prompts: Sequence[Sequence[int]], room: int = 256, at_once: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits_BV, states = super().prefill(prompts, room, at_once)
        assert states is not None
        for prompt, states_nF in zip(prompts, states, strict=True):
            row = self._untaken[id(prompt)] = [self._encoded(states_nF[: len(prompt)])]
            self._rows.append(row)
        return logits_BV, self._for_caller(states)

    def append(
        self, tokens_Bn: torch.Tensor, depths_BS: torch.Tensor, visible_BnS: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        last, self._appended = super().append(tokens_Bn, depths_BS, visible_BnS)
        assert self._appended is not None
        return last, self._for_caller(self._appended)

    def commit(self, counts: Sequence[int], path_BA: torch.Tensor | None = None) -> None:
        super().commit(counts, path_BA)
        states, most = self._appended, max(counts)
        assert states is not None
        self._appended = None
        if path_BA is not None:
            states = states[torch.arange(len(states), device=states.device)[:, None], path_BA[:, :most]]
        values, scales = self._encoded(states[:, :most])
        for b, count in enumerate(counts):
            self._rows[b].append((values[b, :count], None if scales is None else scales[b, :count]))

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self._rows = [self._rows[row] for row in rows]

    def take(self, prompt: Sequence[int]) -> Encoded:
        """The states [n, R, H] of a row's committed tokens, by the object that `prefill` was given; forgets them."""
        row = self._untaken.pop(id(prompt))
        values, scales = zip(*row, strict=True)
        row.clear()
        return torch.cat(values), None if scales[0] is None else torch.cat(scales)

    def _encoded(self, states: torch.Tensor) -> Encoded:
        values, scales = self._encoding.encode(self._layers(states, self._recorded))
        return values.cpu(), None if scales is None else scales.cpu()

    def _for_caller(self, states: torch.Tensor) -> torch.Tensor | None:
        return self._layers(states, self._asked).flatten(-2) if self._asked else None

    def _layers(self, states: torch.Tensor, layers: Sequence[int]) -> torch.Tensor:
        """[..., len(layers), H]"""
        each = states.unflatten(-1, (len(self.capture), -1))
        if tuple(layers) == self.capture:
            return each
        return each.index_select(-2, torch.tensor([self.capture.index(layer) for layer in layers], device=each.device))


class AnswerStates:
    """The states of answers under way."""

    def __init__(self, written: WrittenRows, wanted: WantedStates, prepare: Callable[[], None]):
        """`prepare` is called before the first row is written: a run may have nothing to write."""
        self.written, self.wanted, self._prepare = written, wanted, cache(prepare)
        # By conversation, its turns. A turn that the next one continues needs no states: the next one has them, too.
        self._turns: dict[str, list[tuple[Turn, Encoded | None]]] = {}

    def session(self, target: Target, capture: Sequence[int]) -> RecordingSession:
        """A session whose rows `take` is given. Its caller gets the states of the layers `capture`."""
        last = [target.num_layers] if self.wanted.has_last else []
        return RecordingSession(target, capture, [*self.wanted.layers, *last], self.wanted.encoding)

    def take(self, key: tuple[str, int], prompt: Sequence[int], output: list[int], states: Encoded) -> None:
        """Keeps the states of a turn: of its prompt and its answer, at least up to the answer's last token but one."""
        turns, asked = self._turns.setdefault(key[0], []), Prompt.of(prompt)
        if turns and asked.begins_with(turns[-1][0].prompt.then(turns[-1][0].output)):
            turns[-1] = (turns[-1][0], None)
        turns.append((Turn(asked, output), states))

    def store(self, conversation_id: str) -> None:
        """Writes the rows of a conversation after its last turn. Raises UserError if the disk is full."""
        turns = self._turns.pop(conversation_id)
        rows = rows_of(conversation_id, [turn for turn, _ in turns])
        for row, states in zip(rows, [each for _, each in turns if each is not None], strict=True):
            if is_usable(row):
                self._prepare()
                self.written.add(row, self.wanted.parts(row, states))


def wanted_states(recipe: Recipe, files: TargetFiles) -> WantedStates | None:
    """What is to be stored, or None. Raises UserError if the folder cannot be used, or holds rows of other states."""
    directory, generator = recipe.states_dir, recipe.data.generator
    if recipe.data.states is None or generator.kind != "transformers":
        return None
    asked = WantedStates.of(recipe, files)
    store = StoreManifest.read(directory)
    for there in filter(None, (store, StoreManifest.read(directory / WRITTEN))):
        there.refuse_if_other(asked.made_of, directory)
    if store is not None:
        own = set[bytes]()
        with suppress(UserError):  # nothing is answered yet
            own.update(map(key_of, usable_rows(recipe, files, Rejects())))
        if not keys_in(directory, store) <= own:
            print(
                f"note: {directory} has states of other conversations ({store.summary()}); those of further answers "
                "are not added. To store them, name another data.states"
            )
            return None
    return asked


@contextmanager
def storing(recipe: Recipe, asked: WantedStates, files: TargetFiles, target: Target) -> Iterator[AnswerStates]:
    """Locks the folder of states and opens it. Raises UserError if it is locked, or holds rows of other states."""
    directory = recipe.states_dir
    made_of = asked.made_of | {"target": asked.target_identity(files, target)}
    with alone_in(directory):
        written, store = WrittenRows(directory), StoreManifest.read(directory)
        for there in filter(None, (store, written.manifest)):
            there.refuse_if_other(made_of, directory)

        def prepare() -> None:
            if written.manifest is None or not target_is_whole(directory, written.manifest, verify=False):
                there = store is not None and target_is_whole(directory, store, verify=False)
                with writing(directory):
                    entries = store.files if there and store else save_target(files, target, directory)
                    StoreManifest(made_of, 0, entries).write(written.folder)
            if store is not None:
                print(f"{directory}: opened for the states of further answers: {store.summary()}")
                written.take_apart(store)

        yield AnswerStates(written, asked, prepare)
