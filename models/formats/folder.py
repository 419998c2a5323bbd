"""Reads a checkpoint folder that strangers may have written, without trusting it.

    config.json                        plain JSON
    model.safetensors                  one file, or
    model.safetensors.index.json       shards, named by the index
    pytorch_model.bin                  only on request, by torch's `weights_only` reader

Nothing outside the folder is opened: file names are plain names, and links that lead out are refused. (The Hub's cache
keeps files as links into its own `blobs`, which is allowed.)
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from draftsmith.recipes.errors import UserError, first_line, quoted
from draftsmith.recipes.files.json_text import json_object

JSON_BYTES = 16 << 20  # of config.json or an index: published configs have 2 KiB, an index of 100,000 tensors 10 MiB
SINGLE, INDEX, BIN = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"
PLAIN_NAME = r"[A-Za-z0-9][\w.-]*"


@dataclass(frozen=True)
class Folder:
    """A checkpoint. Its tensors are mapped into memory, so that only those that are used are read from disk."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor]


def read_folder(path: Path, allow_bin: bool = False) -> Folder:
    """The checkpoint in a folder. Raises UserError if something is missing, damaged or leads out of the folder.

    Args:
        allow_bin: also read pytorch_model.bin where there are no safetensors.
    """
    config = _read_object(path, "config.json")
    files, listed = weight_files(path)
    tensors = {} if files else _read_pickle(path, allow_bin)
    for file in files:
        try:  # safetensors checks the header, and the file's size against it
            tensors |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{file}: not a whole safetensors file: {error}; copy it again") from None
    if lost := sorted(listed - tensors.keys()):
        raise UserError(f"{path / INDEX}: names {quoted(lost[0])}, which no file holds")
    # Rotary frequencies, which some checkpoints hold, are in the config, too.
    return Folder(path, config, {name: tensors[name] for name in tensors if not name.endswith(".inv_freq")})


def _read_pickle(path: Path, allow_bin: bool) -> dict[str, torch.Tensor]:
    file = _inside(path, BIN)
    if not file.exists():
        raise UserError(f"{path}: no weights here ({SINGLE}, or shards with {INDEX})")
    if not allow_bin:
        raise UserError(
            f"{path}: the weights are in {BIN}, a pickle; convert them to safetensors, or pass --allow-bin to read "
            "them by torch's weights_only reader, which runs no code from the file"
        )
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch lets many kinds through for a file that is no checkpoint, or a hostile one
        raise UserError(f"{file}: torch's weights_only reader refuses it: {first_line(error)[:200]}") from None
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in loaded.items()
    ):
        raise UserError(f"{file}: not a table of tensors")
    return loaded


def _read_object(path: Path, name: str) -> dict[str, Any]:
    file = _inside(path, name)
    if not file.exists():
        raise UserError(f"{path}: no {name} here; name the folder that holds it")
    if file.stat().st_size > JSON_BYTES:
        raise UserError(f"{file}: {file.stat().st_size:,} bytes; no drafter's is that large")
    try:
        return json_object(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None


def _inside(path: Path, name: str) -> Path:
    """`path / name`, if it lies in the folder. In the Hub's cache, links may also lead to blobs.

    hub/models--org--name/snapshots/<commit>/model.safetensors    the file
    hub/models--org--name/blobs/<etag>                            where its link leads
    hub/blobs/<prefix>/<hash>                                     where that leads, for content that repositories share
    """
    if not re.fullmatch(PLAIN_NAME, name):
        raise UserError(f"{path}: names a file {quoted(name)}; a checkpoint's files are plain names in its folder")
    file = path / name
    real, home = file.resolve(), path.resolve()
    entry = home.parent.parent
    places = [entry, entry.parent / "blobs"] if home.parent.name == "snapshots" else []
    if not any(real.is_relative_to(place) for place in (home, *places)):
        raise UserError(f"{file}: a link that leads out of the folder, to {real}; copy the file itself")
    if file.exists() and not file.is_file():
        raise UserError(f"{file}: not a regular file; copy the file itself")
    return file


def weight_files(path: Path) -> tuple[list[Path], set[str]]:
    """(safetensors of a folder, names of the tensors that its index expects; empty without an index)."""
    if (path / SINGLE).exists():
        return [_inside(path, SINGLE)], set()
    if not (path / INDEX).exists():
        return [], set()
    places = _read_object(path, INDEX).get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise UserError(f"{path / INDEX}: no weight_map from tensors to files")
    files = [_inside(path, name) for name in sorted(set(places.values()))]
    if missing := [file.name for file in files if not file.exists()]:
        raise UserError(f"{path / INDEX}: names {missing[0]}, which is missing; copy the whole folder again")
    return files, set(places)
