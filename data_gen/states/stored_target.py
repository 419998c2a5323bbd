"""What a store holds of the target, so that training needs neither its layers nor its vision tower.

    target/head.safetensors          embedding [V, H]; head [V, H] unless tied; bias [V] if there is one
    target/config.json, tokenizer and image processor files
                                     the target's; target.model can name this folder on a machine without the target
    pictures/<digest>.safetensors    rows [n, H], input embeddings of a picture as `DecoderInputs.embeddings` has them,
                                     in the target's dtype; their sha256 is in the header

Shapes: V vocabulary, H hidden size, n tokens of a picture.
"""

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional

from draftsmith.data_gen.states.store import REPAIR, Store, StoreManifest, length_of
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.prompt import Insert
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.launch import rank
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.atomic import atomic_folder, atomic_path
from draftsmith.recipes.files.reading import file_entry, file_problem

TARGET, HEAD = "target", "head.safetensors"
PICTURES = "pictures"
# Settings that change logits behind the head (`families.scaled_logits`).
LOGITS = ("model_type", "logits_scaling", "logit_scale", "final_logit_softcapping")


def logit_settings(config: Any) -> dict[str, Any]:
    """The settings of a text config that turn final states into logits."""
    return {name: getattr(config, name, None) for name in LOGITS}


def save_target(files: TargetFiles, target: Target, store: Path) -> dict[str, dict[str, Any]]:
    """Writes target/ and returns the manifest's entries. Raises UserError for an unsupported head (`check_head`)."""
    check_head(target)
    tensors = {"embedding": target.embedding_table, "bias": getattr(target.head, "bias", None)}
    if target.head_weight.data_ptr() != target.embedding_table.data_ptr():
        tensors["head"] = target.head_weight
    given = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}
    # Files of earlier captures, also of one that was killed while it replaced the folder.
    own = {path.name for path in store.glob(f"{TARGET}*/*")}
    with atomic_folder(store / TARGET, own=own) as partial:
        files.save_without_weights(partial)
        save_file(given, partial / HEAD)
    return {
        path.relative_to(store / TARGET).as_posix(): file_entry(path)
        for path in sorted((store / TARGET).iterdir())
        if path.is_file()
    }


@torch.no_grad()
def check_head(target: Target) -> None:
    """Raises UserError if the stored matrix does not give the head's logits: packed weights, adapters."""
    weight, bias = target.head_weight, getattr(target.head, "bias", None)
    problem = f"its weight is {list(weight.shape)} of {weight.dtype}"
    if weight.is_floating_point() and tuple(weight.shape) == (target.vocab_size, target.hidden_size):
        states = torch.linspace(-1, 1, 4 * target.hidden_size, device=target.device).view(4, -1).to(weight.dtype)
        ours, its = functional.linear(states, weight, bias).float(), target.head(states).float()
        off = (ours - its).norm().item()
        if off <= 1e-2 * its.norm().item():
            return
        problem = f"its logits are off by {off:.3g} from its weight's"
    raise UserError(
        f"target.model: the head of {target.name} is more than a matrix ({problem}), and cannot be kept in a store; "
        "train with the target in the same process (leave data.states out)"
    )


class StoredTarget(Target):
    """Head, embeddings and config in place of a target whose states are read from a store.

    Args:
        config: the text config of the recipe's target, already compared with the store's.
    """

    def __init__(self, store: Store, config: Any, device: torch.device | str = "cpu"):
        path = store.directory / TARGET / HEAD
        if problem := file_problem(path, store.manifest.files[HEAD], digest=True):
            raise UserError(f"{problem}; {REPAIR}")
        tensors = load_file(path)
        self.name = f"the target whose states are in {store.directory}"
        self.config = config
        self.num_layers: int = config.num_hidden_layers
        self.embedding = nn.Embedding.from_pretrained(tensors["embedding"]).to(device)
        vocab_size, hidden_size = tensors.get("head", tensors["embedding"]).shape
        self.vocab_size, self.hidden_size = vocab_size, hidden_size
        head = nn.Linear(hidden_size, vocab_size, bias="bias" in tensors, device="meta")
        weight = tensors["head"].to(device) if "head" in tensors else self.embedding.weight
        head.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if "bias" in tensors:
            head.bias = nn.Parameter(tensors["bias"].to(device), requires_grad=False)
        self.head = head
        self.capture_layers = store.capture_layers
        self.embedding_scale = float(store.manifest.made_of["target"]["embedding_scale"])
        self.scale_behind_embedding = 1.0  # stored inserts are scaled
        self.vision_digest = store.manifest.made_of["target"].get("vision_digest")
        self.folder = store.directory

    def read_insert(self, insert: Insert) -> torch.Tensor:
        """As `Target.read_insert`, but scaled. Raises UserError if the store's file is missing or damaged."""
        path = _picture_path(self.folder, insert)
        try:
            return load_file(path)["rows"].to(self.device)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: missing or damaged: {first_line(error)}; {REPAIR}") from None

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(f"{self.name} is not here, only its head and embeddings: leave data.states out to run it")

    states = captured_states = session = _refuse


def target_is_whole(store: Path, manifest: StoreManifest, verify: bool) -> bool:
    """Whether target/ matches the manifest. A manifest without entries for it is older than the folder."""
    problems = [file_problem(store / TARGET / name, entry, verify) for name, entry in manifest.files.items()]
    return bool(problems) and not any(problems)


def head_bytes(files: TargetFiles) -> int:
    """Size of `head.safetensors`."""
    config = files.text_config
    matrices = 1 if getattr(config, "tie_word_embeddings", False) else 2
    return matrices * config.vocab_size * config.hidden_size * files.dtype.itemsize


# Pictures.


def inserts_of(rows: Iterable[TrainingRow]) -> dict[str, Insert]:
    """The inserts that training reads, by digest: those that begin behind a row's last span are left out."""
    return {each.digest: each for row in rows for each in row.inserts if each.first < length_of(row)}


def save_pictures(rows: Sequence[TrainingRow], target: Target, store: Path) -> None:
    """Writes the embeddings of the rows' inserts that are not there yet."""
    for insert in inserts_of(rows).values():
        path = _picture_path(store, insert)
        if path.exists():
            continue
        path.parent.mkdir(exist_ok=True)
        embeddings = (target.read_insert(insert) * target.scale_behind_embedding).cpu().contiguous()
        own = path.with_name(f"{path.name}.{rank()}")  # two processes may write one picture at the same time
        with atomic_path(own) as partial:
            save_file({"rows": embeddings}, partial, {"sha256": _digest(embeddings)})
        own.replace(path)


def drop_damaged(rows: Sequence[TrainingRow], store: Path, verify: bool) -> Iterator[str]:
    """Deletes the rows' damaged pictures, with `verify` also by sha256. Yields a message for these and missing ones."""
    for insert in inserts_of(rows).values():
        path = _picture_path(store, insert)
        try:
            with safe_open(path, "pt") as file:
                if not verify or (file.metadata() or {}).get("sha256") == _digest(file.get_tensor("rows")):
                    continue
        except (OSError, SafetensorError):
            pass
        path.unlink(missing_ok=True)
        yield f"{path}: missing or damaged"


def picture_bytes(rows: Sequence[TrainingRow], files: TargetFiles, store: Path) -> int:
    """Bytes of the pictures that are still to be written."""
    left = (each.length for each in inserts_of(rows).values() if not _picture_path(store, each).exists())
    return sum(left) * files.text_config.hidden_size * files.dtype.itemsize


def _picture_path(store: Path, insert: Insert) -> Path:
    return store / PICTURES / f"{insert.digest}.safetensors"


def _digest(rows: torch.Tensor) -> str:
    return hashlib.sha256(rows.view(torch.uint8).numpy().tobytes()).hexdigest()
