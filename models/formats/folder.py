"""Reads a checkpoint folder that strangers may have written, without trusting it.

    config.json                        at most CONFIG_BYTES, plain JSON
    model.safetensors                  one file, or
    model.safetensors.index.json       shards, named by the index
    pytorch_model.bin                  only on request, by torch's `weights_only` reader

Nothing outside the folder is opened: file names are plain names, and links that lead out are refused. (The Hub's cache
keeps files as links into its own `blobs`, which is allowed.) Sizes are checked before anything is allocated.
"""

import re
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from draftsmith.recipes.errors import UserError, first_line, short
from draftsmith.recipes.files.json_text import parse_json

CONFIG_BYTES = 1 << 20  # published configs have some 2 KiB
HEADER_BYTES = 16 << 20  # of one safetensors file: some 100,000 tensors
MOST_SHARDS = 1000
FLOATS = ("F64", "F32", "F16", "BF16")
DTYPES_OF = {"d2t": ("I64", "I32"), "t2d": ("BOOL",)}  # the rest are weights, in FLOATS
COMPUTED = ".inv_freq"  # rotary frequencies, which older checkpoints hold and their configs tell; left out
SINGLE, INDEX, BIN = "model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"


@dataclass(frozen=True)
class TensorInfo:
    """A tensor's description in a file's header."""

    sizes: list[int]
    dtype: str  # safetensors' name: F32, BF16, I64, BOOL, ...


@dataclass
class Folder:
    """A folder's config and the description of its tensors; `tensor` reads one."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    _files: dict[str, Path] = field(default_factory=dict)  # tensor -> its file
    _loaded: dict[str, torch.Tensor] = field(default_factory=dict)  # of a .bin

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, after a check that all its numbers are finite.

        Raises:
            UserError: it holds a NaN or an infinity, or the file is damaged.
        """
        if name in self._loaded:
            tensor = self._loaded[name]
        else:
            try:
                with safe_open(self._files[name], framework="pt") as file:
                    tensor = file.get_tensor(name)
            except (OSError, SafetensorError) as error:
                raise UserError(f"{self._files[name]}: damaged or cut short: {error}; copy it again") from None
        # In the precision that it is used in: a float64 may be finite, and infinite as a float32.
        if tensor.is_floating_point() and not tensor.float().isfinite().all():
            raise UserError(f"{self.path}: {name} holds numbers that are not finite; the checkpoint is damaged")
        return tensor


def read_folder(path: Path, allow_bin: bool = False) -> Folder:
    """The checkpoint in a folder.

    Args:
        allow_bin: also read pytorch_model.bin where there are no safetensors. It is a pickle; torch's `weights_only`
            reader runs no code from it.

    Raises:
        UserError: with every problem that can be told from names, sizes and headers.
    """
    if not path.is_dir():
        raise UserError(f"{path}: no such folder; name a drafter's folder, or a Hub id")
    config = _read_config(path)
    if (path / SINGLE).exists() or (path / INDEX).exists():
        files = _weight_files(path)
        tensors: dict[str, TensorInfo] = {}
        places: dict[str, Path] = {}
        for file, claimed in files.items():
            for name, info in read_header(file).items():
                if (claimed is not None and name not in claimed) or name.endswith(COMPUTED):
                    continue
                if name in tensors:
                    raise UserError(f"{path}: two files hold {name}; the checkpoint is damaged")
                tensors[name], places[name] = info, file
        named = {name for names in files.values() for name in names or () if not name.endswith(COMPUTED)}
        if lost := sorted(named - tensors.keys()):
            raise UserError(f"{path / INDEX}: names {short(lost[0])}, which its file does not hold")
        return Folder(path, config, tensors, places)
    if not (path / BIN).exists():
        raise UserError(f"{path}: no weights here ({SINGLE}, or shards with {INDEX})")
    if not allow_bin:
        raise UserError(
            f"{path}: the weights are in {BIN}, a pickle; convert them to safetensors, or pass --allow-bin to read "
            "them by torch's weights_only reader, which runs no code from the file"
        )
    loaded = _read_bin(_inside(path, BIN))
    names = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
    names |= {torch.int64: "I64", torch.int32: "I32", torch.bool: "BOOL"}
    described = {
        name: TensorInfo(list(tensor.shape), names.get(tensor.dtype, str(tensor.dtype)))
        for name, tensor in loaded.items()
        if not name.endswith(COMPUTED)
    }
    return Folder(path, config, described, _loaded=loaded)


def _read_config(path: Path) -> dict[str, Any]:
    file = _inside(path, "config.json")
    if not file.exists():
        raise UserError(f"{path}: no config.json here; name the folder that holds it")
    if file.stat().st_size > CONFIG_BYTES:
        raise UserError(f"{file}: {file.stat().st_size:,} bytes; no drafter's config is that large")
    try:
        config = parse_json(file.read_bytes())
    except ValueError as error:
        raise UserError(f"{file}: {error}") from None
    if not isinstance(config, dict):
        raise UserError(f"{file}: not an object")
    return config


def _inside(path: Path, name: str) -> Path:
    """`path / name`, if it lies in the folder. In the Hub's cache, links may also lead to blobs.

    hub/models--org--name/snapshots/<commit>/model.safetensors    the file
    hub/models--org--name/blobs/<etag>                            where its link leads
    hub/blobs/<prefix>/<hash>                                     where that leads, for content that repositories share
    """
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", name):
        raise UserError(f"{path}: names a file {short(name)}; a checkpoint's files are plain names in its folder")
    file = path / name
    real, home = file.resolve(), path.resolve()
    entry = home.parent.parent
    places = [entry, entry.parent / "blobs"] if home.parent.name == "snapshots" else []
    if not any(real.is_relative_to(place) for place in (home, *places)):
        raise UserError(f"{file}: a link that leads out of the folder, to {real}; copy the file itself")
    if file.exists() and not file.is_file():
        raise UserError(f"{file}: not a regular file; copy the file itself")
    return file


def _weight_files(path: Path) -> dict[Path, set[str] | None]:
    """Weight files and the tensors that the index expects in each; None: whatever the file holds."""
    if (path / SINGLE).exists():
        return {_inside(path, SINGLE): None}
    index = _inside(path, INDEX)
    try:
        if index.stat().st_size > HEADER_BYTES:
            raise ValueError(f"{index.stat().st_size:,} bytes; no index is that large")
        places = parse_json(index.read_bytes())
        places = places.get("weight_map") if isinstance(places, dict) else None
        if not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
            raise ValueError("no weight_map from tensors to files")
        if len(set(places.values())) > MOST_SHARDS:
            raise ValueError(f"{len(set(places.values())):,} shards; at most {MOST_SHARDS:,} are read")
    except ValueError as error:
        raise UserError(f"{index}: {error}") from None
    files: dict[Path, set[str] | None] = {}
    for name in sorted(set(places.values())):
        file = _inside(path, name)
        if not file.exists():
            raise UserError(f"{index}: names {name}, which is missing; copy the whole folder again")
        files[file] = {tensor for tensor, place in places.items() if place == name}
    return files


def read_header(file: Path) -> dict[str, TensorInfo]:
    """The tensors that a safetensors file describes, read without its data.

    safetensors checks offsets and sizes when it opens the file; this reader bounds the header before it is parsed.

    Raises:
        UserError: it is not such a file, or its header is larger than HEADER_BYTES.
    """
    try:
        with file.open("rb") as handle:
            start = handle.read(8)
            size = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
            if not 2 <= size <= min(HEADER_BYTES, file.stat().st_size):
                raise ValueError(f"its header claims {size:,} bytes of the file's {file.stat().st_size:,}")
        with safe_open(file, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118
            return {name: TensorInfo(each.get_shape(), each.get_dtype()) for name, each in slices.items()}
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{file}: not a whole safetensors file: {error}; copy it again") from None


def _read_bin(file: Path) -> dict[str, torch.Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch lets many kinds through for a file that is no checkpoint, or a hostile one
        raise UserError(f"{file}: torch's weights_only reader refuses it: {first_line(error)[:200]}") from None
    if not isinstance(loaded, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in loaded.items()
    ):
        raise UserError(f"{file}: not a table of tensors")
    return loaded
