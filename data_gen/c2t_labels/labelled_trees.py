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

from draftsmith.models.vocab import load_tensors, write_tensors
from draftsmith.recipes.errors import UserError

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
        write_tensors(path, {name: getattr(self, name) for name in TENSORS}, {ABOUT: json.dumps(self.about)})

    @staticmethod
    def read(path: Path) -> "Trees":
        """Raises UserError for a file that is missing, cut short or of another kind."""
        tensors, said = load_tensors(path, "file of labelled trees; run `draftsmith label-trees` first")
        if ABOUT not in said or not tensors.keys() >= {*TENSORS}:
            raise UserError(f"{path}: not a file of labelled trees; label again")
        return Trees(**{name: tensors[name] for name in TENSORS}, about=json.loads(said[ABOUT]))
