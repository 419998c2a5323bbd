"""The target's embeddings, head, config and tokenizer in a store's folder target/. Training needs no other weights.

    head.safetensors                embedding [V, H]; head [V, H] unless tied; bias [V] if there is one
    config.json, tokenizer and image processor files
                                    the target's; target.model can name this folder on a machine without the target

Shapes: V vocabulary, H hidden size.
"""

from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoTokenizer

from draftsmith.data_gen.states.manifest import StoreManifest, file_problem
from draftsmith.data_gen.states.store import REPAIR, Store
from draftsmith.data_gen.states.stored_pictures import stored_picture
from draftsmith.models.chat import load_config, load_generation_config, processor_template
from draftsmith.models.picture_prompts import PictureProcessor
from draftsmith.models.prompt import Insert
from draftsmith.models.target import Target
from draftsmith.models.vision import is_vision_language
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.atomic import atomic_folder
from draftsmith.recipes.files.digest import file_digest
from draftsmith.recipes.schema import TargetSection

FOLDER = "target"
HEAD = "head.safetensors"
# Settings that change logits behind the head (`families.scaled_logits`).
LOGITS = ("model_type", "logits_scaling", "logit_scale", "final_logit_softcapping")


def logit_settings(config: Any) -> dict[str, Any]:
    """The settings of a text config that determine logits from final states."""
    return {name: getattr(config, name, None) for name in LOGITS}


def save_config_and_tokenizer(section: TargetSection, directory: Path) -> None:
    """Writes the target's own config and tokenizer, without the recipe's changes to the template, and its image
    processor if it has one."""
    config = load_config(section)
    config.save_pretrained(directory)
    if is_vision_language(config):
        with suppress(UserError):  # without a processor it reads text only
            PictureProcessor(section, config).processor.save_pretrained(directory)
    load_generation_config(section).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(
        section.model, revision=section.revision, trust_remote_code=section.trust_remote_code
    )
    if not tokenizer.chat_template and is_vision_language(config):
        tokenizer.chat_template = processor_template(section)  # type: ignore[assignment]
    tokenizer.save_pretrained(directory)


def save_target(section: TargetSection, target: Target, store: Path) -> dict[str, dict[str, Any]]:
    """Writes the folder and returns the manifest's entries. Raises UserError for an unsupported head (`check_head`)."""
    check_head(target)
    bias = getattr(target.head, "bias", None)
    tensors = {"embedding": target.embedding_table, "head": target.head_weight, "bias": bias}
    if is_tied(target):
        del tensors["head"]
    given = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}
    # Files of earlier captures, also of one that was killed while it replaced the folder.
    own = {path.name for path in store.glob(f"{FOLDER}*/*")}
    with atomic_folder(store / FOLDER, own=own) as partial:
        save_config_and_tokenizer(section, partial)
        save_file(given, partial / HEAD)
    return {
        path.relative_to(store / FOLDER).as_posix(): {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for path in sorted((store / FOLDER).iterdir())
        if path.is_file()
    }


def is_tied(target: Target) -> bool:
    return target.head_weight.data_ptr() == target.embedding_table.data_ptr()


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
    """Replaces the target when states are read from a store: head, embeddings and config, but no layers.

    Args:
        config: the text config of the recipe's target, already compared with the store's.
    """

    def __init__(self, store: Store, config: Any, device: torch.device | str = "cpu"):
        tensors = _read_head(store)
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
        """As `Target.read_insert`, but scaled, from the store's file."""
        return stored_picture(self.folder, insert).to(self.device)

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(f"{self.name} is not here, only its head and embeddings: leave data.states out to run it")

    states = captured_states = session = _refuse


def _read_head(store: Store) -> dict[str, torch.Tensor]:
    path = store.directory / FOLDER / HEAD
    entry = store.manifest.files.get(HEAD)
    if entry is None:
        raise UserError(f"{path}: the manifest does not name it; {REPAIR}")
    if problem := file_problem(path, entry, digest=True):
        raise UserError(f"{problem}; {REPAIR}")
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: damaged: {first_line(error)}; {REPAIR}") from None


def target_is_whole(store: Path, manifest: StoreManifest, verify: bool) -> bool:
    """Whether target/ matches the manifest. A manifest without entries for it is older than the folder."""
    problems = [file_problem(store / FOLDER / name, entry, verify) for name, entry in manifest.files.items()]
    return bool(problems) and not any(problems)


def stored_bytes(store: Store) -> int:
    """Memory of a `StoredTarget`."""
    return store.manifest.files[HEAD]["bytes"]


def head_bytes(config: Any, itemsize: int) -> int:
    """Size of `head.safetensors` by a text config."""
    matrices = 1 if getattr(config, "tie_word_embeddings", False) else 2
    return matrices * config.vocab_size * config.hidden_size * itemsize
