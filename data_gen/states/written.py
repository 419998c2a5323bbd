"""Rows whose states were stored while their answers were written, until they are in a store's shards.

    written/manifest.json           the target, layers and dtype
    written/<key>.safetensors       a row: `captured`, `last` and their scales, as a shard holds them

Rows lie in shards in the order of their keys, which are digests of the answers, so a row's shard is known only when all
answers are. A row's file goes when its shard is written: a store takes its own space on disk and little more.

Files are written atomically. `draftsmith capture` runs the target for rows whose file is missing or damaged.
"""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftsmith.data_gen.states.manifest import StoreManifest
from draftsmith.data_gen.states.store import key_of
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_path

FOLDER = "written"


class WrittenRows:
    """The rows of a store's folder `written`.

    Attributes:
        manifest: of the folder; None: regeneration has stored nothing.
    """

    def __init__(self, store: Path):
        self.folder = store / FOLDER
        self.manifest = StoreManifest.read(self.folder)

    @property
    def bytes(self) -> int:
        """Size of all rows."""
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def __contains__(self, row: TrainingRow) -> bool:
        return self._path(row).exists()

    def add(self, row: TrainingRow, tensors: dict[str, torch.Tensor]) -> None:
        """Writes a row, once. Raises UserError if the disk is full."""
        if row in self:
            return
        try:
            with atomic_path(self._path(row)) as partial:
                save_file({name: each.contiguous() for name, each in tensors.items()}, partial)
        except (OSError, SafetensorError) as error:
            raise UserError(
                f"{self._path(row)}: cannot be written ({error}): make room and run the same command again"
            ) from error

    def get(self, row: TrainingRow) -> dict[str, torch.Tensor] | None:
        """The row's tensors; None: they are not here, or damaged."""
        try:
            return load_file(self._path(row))
        except (OSError, SafetensorError):
            return None

    def drop(self, rows: Iterable[TrainingRow]) -> None:
        for row in rows:
            self._path(row).unlink(missing_ok=True)

    def _path(self, row: TrainingRow) -> Path:
        return self.folder / f"{key_of(row).hex()}.safetensors"
