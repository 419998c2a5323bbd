"""Rows whose states were stored while their answers were written, until they are in a store's shards.

    written/manifest.json    the target, layers and dtype
    written/rows-3f          the rows whose key begins with the byte 3f, one after another:
        key          16 bytes
        size          8 bytes, of what follows behind the digest
        digest       16 bytes, of that
        tensors      safetensors: `captured`, `last` and their scales, as a shard holds them

Rows lie in shards in the order of their keys, which are digests of the answers, so a row's shard is known only when all
answers are. Files by the first byte of the key can be deleted while shards are made: a store takes its own space on
disk and little more.

A kill leaves whole rows and at most one torn end in each file, which the next writer cuts off. Nothing is synced: a
power cut may cost rows, or damage them, and their digests tell. `draftsmith capture` runs the target for such rows.
"""

import hashlib
import struct
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import torch
from safetensors.torch import load, save

from draftsmith.data_gen.rows.training_rows import TrainingRow
from draftsmith.data_gen.states.store import KEY_BYTES, StoreManifest, key_of
from draftsmith.recipes.files.lines import append_line

FOLDER = "written"
_HEAD = struct.Struct(f"<{KEY_BYTES}sQ16s")


class WrittenRows:
    """The rows of a store's folder `written`.

    Attributes:
        manifest: of the folder; None: regeneration has stored nothing.
        bytes: size of all whole rows.
    """

    def __init__(self, store: Path):
        self.folder = store / FOLDER
        self.manifest = StoreManifest.read(self.folder)
        self.bytes = 0
        self._places: dict[bytes, tuple[int, int]] = {}  # where a row's tensors begin, and their size
        self._ends: dict[Path, int] = {}
        for path in sorted(self.folder.glob("rows-??")):
            try:
                self._ends[path] = self._scan(path)
            except FileNotFoundError:  # another process of a capture has emptied it
                continue
            self.bytes += self._ends[path]

    def _scan(self, path: Path) -> int:
        """Finds the rows of a file, and where the last whole one ends."""
        at = 0
        with path.open("rb") as file:
            size = path.stat().st_size
            while at + _HEAD.size <= size:
                file.seek(at)
                key, length, _ = _HEAD.unpack(file.read(_HEAD.size))
                end = at + _HEAD.size + length
                if not length or end > size or self._path(key) != path:
                    break
                self._places[key] = (at, length)
                at = end
        return at

    def _path(self, key: bytes) -> Path:
        return self.folder / f"rows-{key[0]:02x}"

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, row: TrainingRow) -> bool:
        return key_of(row) in self._places

    def cut_torn_ends(self) -> None:
        """For the one that writes."""
        for path, end in self._ends.items():
            if path.stat().st_size > end:
                with path.open("r+b") as file:
                    file.truncate(end)

    def add(self, row: TrainingRow, tensors: dict[str, torch.Tensor]) -> None:
        """Appends a row, once. Raises UserError if the disk is full."""
        key = key_of(row)
        if key in self._places:
            return
        content, path = save({name: each.contiguous() for name, each in tensors.items()}), self._path(key)
        with path.open("ab", buffering=0) as file:
            at = file.seek(0, 2)
            append_line(file, path, _HEAD.pack(key, len(content), _digest(content)) + content)
        self._places[key] = (at, len(content))

    def get(self, row: TrainingRow) -> dict[str, torch.Tensor] | None:
        """The row's tensors; None: they are not here, or damaged."""
        key = key_of(row)
        if key not in self._places:
            return None
        at, length = self._places[key]
        with self._path(key).open("rb") as file:
            file.seek(at)
            found, _, digest = _HEAD.unpack(file.read(_HEAD.size))
            content = file.read(length)
        return load(content) if found == key and _digest(content) == digest else None

    def drop(self, but: Iterable[TrainingRow]) -> None:
        """Deletes the files that hold none of the rows `but`; all of them, and the folder, where there are none."""
        left = {self._path(key_of(row)) for row in but}
        for path in [path for path in self._ends if path not in left]:
            path.unlink(missing_ok=True)
            del self._ends[path]
        if not left:
            # The manifest last: without it, nobody would look for rows.
            for path in [*self.folder.glob("rows-??"), *self.folder.glob("manifest.json*")]:
                path.unlink(missing_ok=True)
            with suppress(FileNotFoundError):
                self.folder.rmdir()


def _digest(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=16).digest()
