"""What training asks of a target beside its states, in a store's folder target/: its weights are not needed then.

    head.safetensors                embedding [V, H]; head [V, H] where it is another matrix; bias [V] if there is one
    config.json, tokenizer files    as the target has them: on a machine without the target, target.model can name this
                                    folder

Shapes: V vocabulary, H hidden size.
"""

from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from transformers import AutoTokenizer

from draftsmith.data_gen.states.store import MEND, Manifest, Store, file_problem
from draftsmith.models.chat import load_config, load_generation_config
from draftsmith.models.checkpoint import file_digest
from draftsmith.models.prompt import Insert
from draftsmith.models.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_folder
from draftsmith.recipes.schema import TargetSection

FOLDER = "target"
HEAD = "head.safetensors"
# What a family reads of its config behind the head (`families.scaled_logits`).
LOGITS = ("model_type", "logits_scaling", "logit_scale", "final_logit_softcapping")


def words_of_config(config: Any) -> dict[str, Any]:
    """What of a text config decides how final states become logits."""
    return {name: getattr(config, name, None) for name in LOGITS}


def save_words(section: TargetSection, directory: Path) -> None:
    """The target's config and tokenizer as it has them: what the recipe says of the template is not written in."""
    load_config(section).save_pretrained(directory)
    load_generation_config(section).save_pretrained(directory)
    tokenizer = AutoTokenizer.from_pretrained(
        section.model, revision=section.revision, trust_remote_code=section.trust_remote_code
    )
    tokenizer.save_pretrained(directory)


def save_target(section: TargetSection, target: Target, store: Path) -> dict[str, dict[str, Any]]:
    """Writes the folder and returns what the manifest says of its files.

    Raises:
        UserError: the head is more than a matrix and a bias.
    """
    check_head(target)
    bias = getattr(target.head, "bias", None)
    tensors = {"embedding": target.embedding_table, "head": target.head_weight, "bias": bias}
    if is_tied(target):
        del tensors["head"]
    given = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items() if tensor is not None}
    with atomic_folder(store / FOLDER, own=_names(store)) as partial:
        save_words(section, partial)
        save_file(given, partial / HEAD)
    return {
        path.relative_to(store / FOLDER).as_posix(): {"bytes": path.stat().st_size, "sha256": file_digest(path)}
        for path in sorted((store / FOLDER).iterdir())
        if path.is_file()
    }


def _names(store: Path) -> set[str]:
    """What earlier captures wrote there, one that was killed while it replaced the folder among them."""
    return {path.name for path in store.glob(f"{FOLDER}*/*")}


def is_tied(target: Target) -> bool:
    return target.head_weight.data_ptr() == target.embedding_table.data_ptr()


@torch.no_grad()
def check_head(target: Target) -> None:
    """Refuses heads whose logits are not those of the matrix that is stored: packed weights, adapters."""
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
    """Stands in for a target whose states are read from a store: head, embeddings and config, but no layers.

    Args:
        config: the text config of the recipe's target, which has been compared with the store's.
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
        self._scale_behind_embedding = 1.0  # inserts are refused

    def read_insert(self, insert: Insert) -> NoReturn:
        raise UserError(f"{self.name} cannot read inserts: a store keeps states of text; leave data.states out")

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise UserError(f"{self.name} is not here, only its head and embeddings: leave data.states out to run it")

    states = captured_states = session = _refuse


def _read_head(store: Store) -> dict[str, torch.Tensor]:
    path = store.directory / FOLDER / HEAD
    said = store.manifest.files.get(HEAD)
    if said is None:
        raise UserError(f"{path}: the manifest does not name it; {MEND}")
    try:
        if file_digest(path) != said["sha256"]:
            raise UserError(f"{path}: damaged: not what was written (its sha256 differs); {MEND}")
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: damaged: {str(error).splitlines()[0]}; {MEND}") from None


def target_is_whole(store: Path, manifest: Manifest, verify: bool = False) -> bool:
    """Whether target/ is what the manifest says; a manifest that says nothing was written before it was there."""
    paths = {store / FOLDER / name: said for name, said in manifest.files.items()}
    if not paths or any(file_problem(path, said) for path, said in paths.items()):
        return False
    return not verify or all(file_digest(path) == said["sha256"] for path, said in paths.items())


def stored_bytes(store: Store) -> int:
    """What a `StoredTarget` holds in memory."""
    return store.manifest.files[HEAD]["bytes"]


def words_bytes(section: TargetSection, directory: Path) -> int:
    """What `save_words` takes; writes it into `directory`, which is empty."""
    save_words(section, directory)
    return sum(path.stat().st_size for path in directory.rglob("*") if path.is_file())


def head_bytes(config: Any, itemsize: int) -> int:
    """What `head.safetensors` takes, by a text config."""
    matrices = 1 if getattr(config, "tie_word_embeddings", False) else 2
    return matrices * config.vocab_size * config.hidden_size * itemsize
