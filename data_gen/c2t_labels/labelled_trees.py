"""Labelled draft trees on disk, the training rows of a C2T classifier: one safetensors file.

    features   [R, 3] float32   P, H and d of each node (`models.c2t.node_features`)
    accepted   [R] bool         the node lies on the path that the target accepts
    sizes      [T] int64        rows of each tree; the trees stand one after another

Its metadata, JSON, say how the trees were made; the classifier keeps `drafter` (`contenders.loaded_identity`).

Shapes: R rows (nodes), T trees.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_path

TENSORS = ("features", "accepted", "sizes")
ABOUT = "labelled_trees"  # key of the metadata


@dataclass(frozen=True)
class Trees:
    """Rows of complete trees."""

    features: torch.Tensor
    accepted: torch.Tensor
    sizes: torch.Tensor
    about: dict[str, Any]

    def chosen(self, trees: torch.Tensor) -> "Trees":
        """The trees with these numbers [n], in this order."""
        rows = torch.arange(len(self.accepted)).split(self.sizes.tolist())
        chosen = torch.cat([torch.arange(0), *(rows[tree] for tree in trees.tolist())])
        return Trees(self.features[chosen], self.accepted[chosen], self.sizes[trees], self.about)

    def write(self, path: Path) -> None:
        with atomic_path(path) as partial:
            save_file({name: getattr(self, name) for name in TENSORS}, partial, {ABOUT: json.dumps(self.about)})

    @staticmethod
    def read(path: Path) -> "Trees":
        """Raises UserError for a file that is missing, cut short or of another kind."""
        try:
            with safe_open(path, framework="pt") as file:
                features, accepted, sizes = map(file.get_tensor, TENSORS)
                return Trees(features, accepted, sizes, json.loads(file.metadata()[ABOUT]))
        except FileNotFoundError:
            raise UserError(f"{path}: no labelled trees here; run `draftsmith label-trees` first") from None
        except (OSError, SafetensorError, KeyError, TypeError) as error:
            raise UserError(f"{path}: not a file of labelled trees, or damaged ({error}); label again") from None
