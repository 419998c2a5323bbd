"""The input embeddings of a store's pictures, so that training needs no vision tower.

    pictures/<digest>.safetensors    rows [n, H] as `DecoderInputs.embeddings` has them, in the target's dtype

One file for each picture, however many rows show it. Drafters read these embeddings, whole or compressed; the states
behind them are in the shards. Each file has the sha256 of its rows in its header.

Shapes: n tokens of a picture, H hidden size.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draftsmith.data_gen.states.store import HEADER_BYTES, REPAIR, length_of
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.prompt import Insert
from draftsmith.models.target import Target
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.atomic import atomic_path

PICTURES = "pictures"


def inserts_of(rows: Iterable[TrainingRow]) -> dict[str, Insert]:
    """The inserts that training reads, by digest: those that begin behind a row's last span are left out."""
    return {each.digest: each for row in rows for each in row.inserts if each.first < length_of(row)}


def save_pictures(rows: Sequence[TrainingRow], target: Target, store: Path, rank: int) -> None:
    """Writes the embeddings of the rows' inserts that are not there yet.

    Args:
        rank: of this process. Two may write one picture at the same time, each under a name of its own.
    """
    for insert in inserts_of(rows).values():
        path = _path(store, insert)
        if path.exists():
            continue
        path.parent.mkdir(exist_ok=True)
        embeddings = (target.read_insert(insert) * target.scale_behind_embedding).cpu().contiguous()
        own = path.with_name(f"{path.name}.{rank}")
        with atomic_path(own) as partial:
            save_file({"rows": embeddings}, partial, {"sha256": _digest(embeddings)})
        own.replace(path)


def stored_picture(store: Path, insert: Insert) -> torch.Tensor:
    """[n, H] of an insert. Raises UserError if they are missing or damaged."""
    if problem := picture_problem(store, insert):
        raise UserError(f"{problem}; {REPAIR}")
    with safe_open(_path(store, insert), "pt") as file:
        return file.get_tensor("rows")


def picture_problem(store: Path, insert: Insert, verify: bool = False) -> str | None:
    """What is wrong with the file of an insert.

    Args:
        verify: also compare the sha256 of the rows.
    """
    path = _path(store, insert)
    try:
        with safe_open(path, "pt") as file:
            shape = file.get_slice("rows").get_shape()
            if shape[0] != insert.length:
                return f"{path}: it has {shape[0]} embeddings, the picture has {insert.length} tokens"
            if verify and (file.metadata() or {}).get("sha256") != _digest(file.get_tensor("rows")):
                return f"{path}: damaged: its sha256 is another"
    except (OSError, SafetensorError) as error:
        return f"{path}: missing or damaged: {first_line(error)}"
    return None


def drop_damaged(rows: Sequence[TrainingRow], store: Path, verify: bool) -> Iterator[str]:
    """Deletes the damaged pictures of these rows. Yields what was wrong with each, missing ones included."""
    for insert in inserts_of(rows).values():
        if problem := picture_problem(store, insert, verify):
            _path(store, insert).unlink(missing_ok=True)
            yield problem


def picture_bytes(rows: Sequence[TrainingRow], hidden_size: int, itemsize: int, store: Path) -> int:
    """Bytes of the pictures' files that are still to be written."""
    left = (each for each in inserts_of(rows).values() if not _path(store, each).exists())
    return sum(HEADER_BYTES + each.length * hidden_size * itemsize for each in left)


def _path(store: Path, insert: Insert) -> Path:
    return store / PICTURES / f"{insert.digest}.safetensors"


def _digest(rows: torch.Tensor) -> str:
    return hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()
