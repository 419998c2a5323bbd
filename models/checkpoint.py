"""Drafter checkpoints: a directory that says what it is, whom it is for and how it was made.

    config.json          kind, shape, and the identity of the target it was trained for
    model.safetensors    parameters, d2t and t2d; the target's embedding table is the target's and is not copied
    recipe.yaml          the resolved recipe
    provenance.json      versions, commit, command line, digests of the data

A directory is written beside its place, as <name>.partial, and renamed into it, so that it is whole or not there. One
that stands there is renamed to <name>.old first. A kill between the two renames leaves no <name>, and the new one whole
in <name>.partial: readers find it there, and the next writer puts it into its place.
"""

import hashlib
import json
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from draftsmith.models.chat import FINGERPRINT_COVERS
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError


def config_identity(config: Any, model: str, revision: str | None, fingerprint: str) -> dict[str, Any]:
    """What can be said of a target before it is loaded.

    Args:
        config: its text config.
        fingerprint: `chat.tokenizer_fingerprint` of its tokenizer.
    """
    return {
        "model": model,
        "revision": revision,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_layers": config.num_hidden_layers,
        "tokenizer_fingerprint": fingerprint,
    }


def target_identity(target: Target, model: str, revision: str | None, fingerprint: str) -> dict[str, Any]:
    """What a drafter must find again in the target it is used with: the config's words and the embeddings."""
    words = config_identity(target.config, model, revision, fingerprint)
    return words | {"embedding_digest": tensor_digest(target.embedding_table)}


def tensor_digest(tensor: torch.Tensor, rows: int = 4096) -> str:
    """sha256 over (at most `rows` evenly spaced rows of) a matrix, in bfloat16: equal for every loading precision."""
    chosen = torch.linspace(0, len(tensor) - 1, min(rows, len(tensor)), dtype=torch.float64).round().long()
    values = tensor.detach()[chosen.to(tensor.device)].to(torch.bfloat16).cpu().contiguous()
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()


def file_digest(path: Path) -> str:
    """sha256 of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def sync_to_disk(path: Path, inside: bool = True) -> None:
    """Makes a file, or a folder with all inside, outlast a power cut; to be called before a rename makes it count."""
    for each in (*(path.rglob("*") if inside else ()), path):
        if each.is_dir() and os.name == "nt":
            continue  # Windows opens no folders
        handle = os.open(each, os.O_RDONLY if each.is_dir() else os.O_RDWR)  # and syncs no file opened for reading
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def provenance(data: dict[str, Path]) -> dict[str, Any]:
    """Versions, source commit, command line and data digests, for provenance.json."""
    packages = ("draftsmith", "torch", "transformers", "accelerate", "datasets")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "versions": {name: metadata.version(name) for name in packages} | {"python": platform.python_version()},
        "commit": commit.stdout.strip() or None,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "data": {name: {"file": path.name, "sha256": file_digest(path)} for name, path in data.items()},
    }


def save_drafter(
    directory: Path, drafter: Eagle3Drafter, identity: dict[str, Any], recipe_yaml: str, made_by: dict[str, Any]
) -> None:
    """Writes the checkpoint; an older one of the same name is replaced at the very end."""
    partial, retired = _beside(directory)
    if (left := _written(directory)) != directory:
        os.replace(left, directory)  # before `partial` is touched: `_written` must not find half of it
    for leftover in (partial, retired):
        shutil.rmtree(leftover, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    config = {"kind": "eagle3", "drafter": drafter.config.to_dict(), "target": identity}
    (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (partial / "recipe.yaml").write_text(recipe_yaml)
    (partial / "provenance.json").write_text(json.dumps(made_by, indent=2) + "\n")
    sync_to_disk(partial)
    if directory.exists():
        os.replace(directory, retired)
    os.replace(partial, directory)
    sync_to_disk(directory.parent, inside=False)
    shutil.rmtree(retired, ignore_errors=True)


def _beside(directory: Path) -> tuple[Path, Path]:
    """Where a new checkpoint is written, and where the one that it replaces goes."""
    return directory.with_name(directory.name + ".partial"), directory.with_name(directory.name + ".old")


def _written(directory: Path) -> Path:
    """Where the checkpoint lies: in `directory`, but after a kill between the two renames of `save_drafter`."""
    partial, retired = _beside(directory)
    return partial if not directory.exists() and retired.exists() and partial.exists() else directory


def read_config(directory: Path) -> tuple[Eagle3Config, dict[str, Any]]:
    """(shape, identity of its target) from a drafter's config.json.

    Raises:
        UserError: there is none, or it is not a drafter's.
    """
    directory = _written(directory)
    try:
        config = json.loads((directory / "config.json").read_text())
    except FileNotFoundError:
        raise UserError(f"{directory}: no drafter here (config.json is missing); train/eagle3.py writes one") from None
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{directory / 'config.json'}: not JSON: {error}") from None
    if not isinstance(config, dict) or config.get("kind") != "eagle3" or not {"drafter", "target"} <= config.keys():
        raise UserError(f"{directory / 'config.json'}: not a drafter of a kind known here (eagle3)")
    try:
        return Eagle3Config.from_dict(config["drafter"]), dict(config["target"])
    except (TypeError, ValueError, KeyError) as error:
        raise UserError(f"{directory / 'config.json'}: damaged: {error}") from error


def check_identity(directory: Path, trained_for: dict[str, Any], here: dict[str, Any]) -> None:
    """Refuses a drafter made for another target; every difference is named with both sides.

    A model's name may change (it may be moved or copied): what it is decides, not what it is called.
    """
    different = [
        f"{key}: the drafter was trained for {trained_for.get(key)!r}, this target has {here[key]!r}"
        for key in here
        if key not in ("model", "revision") and trained_for.get(key) != here[key]
    ]
    if different:
        raise UserError(
            f"{directory}: a drafter for another target ({trained_for.get('model')}, not {here['model']}): "
            + "; ".join(different)
            + f" (a fingerprint covers {FINGERPRINT_COVERS})" * ("tokenizer_fingerprint: " in "".join(different))
        )


def read_vocab(directory: Path, shape: Eagle3Config) -> DraftVocab:
    """The drafter's vocabulary. Of model.safetensors the header and d2t and t2d are read, no weights: a file that is
    cut short is told by its length.

    Raises:
        UserError: no such file, a damaged one, or another vocabulary than `shape` says.
    """
    path = _written(directory) / "model.safetensors"
    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in {"d2t", "t2d"} & set(file.keys())}
    except FileNotFoundError:
        raise UserError(
            f"{directory}: model.safetensors is missing; copy the whole folder, or run train/eagle3.py again"
        ) from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: damaged or cut short: {error}; copy it again, or train again") from None
    return _vocab_of(directory, tensors, shape)


def _vocab_of(directory: Path, tensors: dict[str, torch.Tensor], shape: Eagle3Config) -> DraftVocab:
    if "d2t" not in tensors or "t2d" not in tensors:
        raise UserError(f"{directory}: model.safetensors holds no draft vocabulary (d2t, t2d)")
    vocab = DraftVocab.from_d2t(tensors["d2t"], tensors["t2d"], where=str(directory / "model.safetensors"))
    if (vocab.size, vocab.target_vocab_size) != (shape.draft_vocab_size, shape.vocab_size):
        raise UserError(
            f"{directory}: model.safetensors maps {vocab.size} draft tokens to {vocab.target_vocab_size} target "
            f"tokens, config.json says {shape.draft_vocab_size} to {shape.vocab_size}"
        )
    return vocab


def load_drafter(
    directory: Path, target: Target, identity: dict[str, Any], capture: Sequence[int] | None = None
) -> Eagle3Drafter:
    """The drafter in `directory`, in evaluation mode on the target's device.

    Args:
        capture: layers whose states the drafter will be given: those it was trained on (`read_config`). None: the
            target's.

    Raises:
        UserError: no checkpoint, one for another target or vocabulary, or tensors that do not fit its config.
    """
    shape, trained_for = read_config(directory)
    check_identity(directory, trained_for, identity)
    try:
        tensors = load_file(_written(directory) / "model.safetensors")
    except (FileNotFoundError, SafetensorError) as error:
        raise UserError(f"{directory}: damaged drafter checkpoint: {error}") from error
    given = tuple(target.capture_layers if capture is None else capture)
    if shape.capture_layers != given:
        raise UserError(
            f"{directory}: the drafter reads target states {list(shape.capture_layers)}, "
            f"this run captures {list(given)}"
        )
    vocab = _vocab_of(directory, tensors, shape)
    drafter = Eagle3Drafter(shape, vocab, target.embedding_table)
    try:
        drafter.load_state_dict(tensors)
    except RuntimeError as error:
        raise UserError(f"{directory}: tensors do not fit config.json: {error}") from error
    return drafter.to(target.device).eval().requires_grad_(False)
