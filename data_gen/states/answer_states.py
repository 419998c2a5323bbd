"""Stores the target's states while `draftsmith regenerate` writes answers; then `draftsmith capture` need not run it.

A row's states are written before its conversation's line: what has a line has states, unless it was written without
data.states. Rows without a line are made again. After the last answer the rows go into shards (`capturing.complete`).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from safetensors import SafetensorError

from draftsmith.data_gen.states.manifest import StoreManifest, make_folder
from draftsmith.data_gen.states.recording import RecordingSession
from draftsmith.data_gen.states.store import Encoded, RowShape, states_length
from draftsmith.data_gen.states.store_plan import WantedStates, store_summary
from draftsmith.data_gen.states.stored_target import save_target, target_is_whole
from draftsmith.data_gen.states.written import FOLDER, WrittenRows
from draftsmith.data_gen.training_rows.rows import TrainingRow, Turn, is_usable, rows_of
from draftsmith.models.prompt import Prompt
from draftsmith.models.target import Target
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import output_problem
from draftsmith.recipes.schema import Recipe


class AnswerStates:
    """The states of answers under way.

    Args:
        layers: that the store captures.
        num_layers: of the target; its last state has this number.
    """

    def __init__(self, written: WrittenRows, shape: RowShape, layers: Sequence[int], num_layers: int):
        self.written, self.shape = written, shape
        self.recorded = (*layers, num_layers) if shape.has_last else tuple(layers)
        # By conversation, its turns. A turn that the next one continues needs no states: the next one has them, too.
        self._turns: dict[str, list[tuple[Turn, Encoded | None]]] = {}

    def session(self, target: Target, capture: Sequence[int]) -> RecordingSession:
        """A session whose rows `take` is given. Its caller gets the states of the layers `capture`."""
        return RecordingSession(target, capture, self.recorded, self.shape.encoding)

    def take(self, key: tuple[str, int], prompt: Sequence[int], output: list[int], states: Encoded) -> None:
        """Keeps the states of a turn: of its prompt and its answer, at least up to the answer's last token but one.

        Args:
            key: the conversation's id, and the turn's number in it.
        """
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
                self.written.add(row, self._tensors(row, states))

    def _tensors(self, row: TrainingRow, states: Encoded) -> dict[str, torch.Tensor]:
        """A row's states by their names in a shard."""
        tensors, shape = dict[str, torch.Tensor](), self.shape
        for name, part in zip(("", "_scale"), states, strict=True):
            if part is not None:
                tensors[f"captured{name}"] = shape.stored(row, part[: states_length(row), : shape.states])
                if shape.has_last:
                    tensors[f"last{name}"] = shape.taught(row, part[:, shape.states])
        return tensors


def wanted_states(recipe: Recipe, fingerprint: str) -> WantedStates | None:
    """What is to be stored, before anything is loaded; None: nothing.

    Raises UserError if the folder cannot be used, or holds rows of other states.
    """
    directory, generator = recipe.states_dir, recipe.data.generator
    if recipe.data.states is None or generator.kind != "transformers":
        return None
    if (problem := output_problem(directory, folder=True)) is not None:
        raise UserError(f"data.states: {problem}")
    asked = WantedStates.of(recipe, fingerprint)
    if (store := StoreManifest.read(directory)) is not None:
        print(
            f"note: {directory} holds a store already ({store_summary(store)}); the states of further answers are not "
            "added. To store them, delete that folder or name another data.states"
        )
        return None
    if (written := StoreManifest.read(directory / FOLDER)) is not None:
        written.refuse_if_other(asked.made_of, directory)
    return asked


@contextmanager
def storing(recipe: Recipe, asked: WantedStates, target: Target, fingerprint: str) -> Iterator[AnswerStates]:
    """Locks the folder of states and opens it for rows.

    Raises UserError if it cannot be written, if another run is writing there, or if it holds rows of other states.
    """
    directory, made_of = recipe.states_dir, asked.made_with(target, recipe, fingerprint)
    make_folder(directory)
    with alone_in(directory):
        written = WrittenRows(directory)
        if written.manifest is not None:
            written.manifest.refuse_if_other(made_of, directory)
        if written.manifest is None or not target_is_whole(directory, written.manifest, verify=False):
            try:
                files = save_target(recipe.target, target, directory)
                StoreManifest(made_of | {"rows": "of answers being written"}, 0, files).write(written.folder)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{directory}: cannot be written ({first_line(error)}): make room") from error
        yield AnswerStates(written, asked.shape, asked.layers, target.num_layers)
