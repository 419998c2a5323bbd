"""C2T: a tiny classifier says which drafted nodes deserve a place in the tree (arXiv 2502.13652, section 3).

    P   joint probability of a node: the product of draft probabilities along its path
    H   entropy, in nats, of the distribution that the node was drawn from, its parent's; all siblings share it
    d   depth: the root's children have 0 (everywhere else here they have 1)

    [P, H, d] --Linear(3, h)--> ReLU --Linear(h, 1)--> sigmoid --> C, the chance that the target accepts the node

Nothing in the features belongs to one model or one vocabulary. They are made by `node_features` alone, for decoding and
for training. How a tree grows by C is `eval.policies.C2T`.

A classifier's directory holds config.json and model.safetensors:

    kind              "c2t"
    hidden            h
    entropy_over      M, the likeliest tokens that H is taken over
    depth_convention  "root's children 0"
    negative_ratio    rejected rows kept per accepted one in training: a threshold on C means something only beside it;
                      null: unknown, or not sub-sampled
    drafter           whose nodes it was trained on, in the words of who trained it
    weights_sha256    of model.safetensors, so that two halves of different classifiers are noticed

Shapes: `...` any number of axes, K candidates, Vd draft vocabulary.
"""

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from draftsmith.models.checkpoint import file_digest, sync_to_disk
from draftsmith.recipes.errors import UserError

KIND = "c2t"
DEPTH_CONVENTION = "root's children 0"
FEATURES = 3  # P, H, d


def entropy(log_probs: torch.Tensor, over: int | None = None) -> torch.Tensor:
    """[...] entropy in nats of the distributions [..., Vd]; NaN where a distribution holds a NaN.

    Args:
        over: take the so many likeliest tokens alone, without renormalising (section 3.2's M). None: all.
    """
    if over is not None and over < log_probs.shape[-1]:
        log_probs = log_probs.topk(over, sorted=False).values
    # 0 * log 0 is 0. The clamp changes no product: e^-1000 is 0 in every precision.
    return -(log_probs.exp() * log_probs.clamp(min=-1000)).sum(-1)


def node_features(values: torch.Tensor, log_probs: torch.Tensor, depth: int, entropy_over: int) -> torch.Tensor:
    """[..., K, 3]: P, H and d of K candidates each.

    Args:
        values: [..., K] log of the candidates' joint probability.
        log_probs: [..., Vd] the distributions that they were drawn from.
        depth: of the candidates, as `models.draft_tree` counts: a root's children have 1.
        entropy_over: M.
    """
    spread = entropy(log_probs, entropy_over)[..., None].expand_as(values)
    return torch.stack((values.exp(), spread, torch.full_like(values, depth - 1)), dim=-1)


@dataclass(frozen=True)
class C2tConfig:
    """What config.json says besides the kind and the convention."""

    hidden: int = 48
    entropy_over: int = 1000
    negative_ratio: float | None = None
    drafter: dict[str, Any] = field(default_factory=dict)


class C2tClassifier(nn.Module):
    """3 -> h -> 1; 241 parameters with h = 48."""

    def __init__(self, config: C2tConfig):
        super().__init__()
        self.config = config
        self.hidden = nn.Linear(FEATURES, config.hidden)
        self.output = nn.Linear(config.hidden, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[...] the logit of C, of features [..., 3]."""
        return self.output(torch.relu(self.hidden(features)))[..., 0]

    @torch.no_grad()
    def confidence(self, features: torch.Tensor) -> torch.Tensor:
        """[...] C, of features [..., 3] of any float type; NaN where a feature is."""
        weight = self.output.weight
        return torch.sigmoid(self(features.to(weight.dtype)))

    def save(self, directory: str | Path) -> None:
        """Writes the directory; config.json last, which vouches for the weights."""
        directory = Path(directory)
        directory.mkdir(parents=True, exist_ok=True)
        weights, config = directory / "model.safetensors", directory / "config.json"
        unfinished = weights.with_name(weights.name + ".tmp"), config.with_name(config.name + ".tmp")
        tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in self.state_dict().items()}
        save_file(tensors, unfinished[0], metadata={"format": "pt"})
        words = {
            "kind": KIND,
            "hidden": self.config.hidden,
            "entropy_over": self.config.entropy_over,
            "depth_convention": DEPTH_CONVENTION,
            "negative_ratio": self.config.negative_ratio,
            "drafter": self.config.drafter,
            "weights_sha256": file_digest(unfinished[0]),
        }
        unfinished[1].write_text(json.dumps(words, indent=2) + "\n")
        for path, place in zip(unfinished, (weights, config), strict=True):
            sync_to_disk(path)
            os.replace(path, place)
        sync_to_disk(directory, inside=False)

    @staticmethod
    def load(directory: str | Path) -> "C2tClassifier":
        """The classifier in `directory`, in evaluation mode on the CPU.

        Raises:
            UserError: none there, damaged, or one that counts depths otherwise.
        """
        directory = Path(directory)
        config, digest = read_config(directory)
        weights = directory / "model.safetensors"
        try:
            tensors = load_file(weights)
        except (FileNotFoundError, SafetensorError) as error:
            raise UserError(
                f"{weights}: not a readable safetensors file ({error}); train the classifier again"
            ) from None
        with torch.device("meta"):
            classifier = C2tClassifier(config)
        wanted = {name: tuple(tensor.shape) for name, tensor in classifier.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != wanted:
            raise UserError(
                f"{weights}: holds {_shapes(found)}, config.json (hidden: {config.hidden}) asks for {_shapes(wanted)}; "
                "copy both files of one classifier"
            )
        broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if broken:
            raise UserError(f"{weights}: {', '.join(sorted(broken))} is not finite; train the classifier again")
        if digest is not None and digest != file_digest(weights):
            raise UserError(f"{weights}: not the weights that config.json was written for; copy both files of one run")
        classifier.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
        return classifier.eval().requires_grad_(False)


def read_config(directory: str | Path) -> tuple[C2tConfig, str | None]:
    """(what config.json says, sha256 of the weights it was written for), before any weight is read.

    Raises:
        UserError: no classifier there, or not one that is understood here.
    """
    path = Path(directory) / "config.json"
    try:
        words = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UserError(f"{directory}: no C2T classifier here (config.json is missing)") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: not JSON: {error}") from None
    if not isinstance(words, dict) or words.get("kind") != KIND:
        raise UserError(f"{path}: not a C2T classifier (kind: {KIND})")
    convention = words.get("depth_convention")
    if convention != DEPTH_CONVENTION:
        raise UserError(
            f"{path}: depth_convention is {convention!r}, understood is {DEPTH_CONVENTION!r}: the classifier would "
            "read wrong depths"
        )
    problems = [
        f"{path}: {key}: {words.get(key)!r} must be a whole number above 0"
        for key in ("hidden", "entropy_over")
        if type(words.get(key)) is not int or words[key] < 1
    ]
    ratio = words.get("negative_ratio")
    if ratio is not None and (type(ratio) not in (int, float) or not ratio > 0):
        problems.append(f"{path}: negative_ratio: {ratio!r} must be a number above 0, or null")
    drafter = words.get("drafter", {})
    if not isinstance(drafter, dict):
        problems.append(f"{path}: drafter: {drafter!r} must be an object")
    if problems:
        raise UserError(problems)
    return C2tConfig(words["hidden"], words["entropy_over"], ratio, drafter), words.get("weights_sha256")


def _shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())) or "nothing"
