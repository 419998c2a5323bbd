"""Labelled draft trees on disk (`data_gen.states.shards`), the training rows of a C2T classifier.

    manifest.json               drafter, target, answers, k, calls, M, depth convention; each shard's answers, trees,
                                rows and sha256
    shard-00000.safetensors     P, H       [R] float32   the features, by `models.c2t.node_features`
                                d          [R] int16     depth; the root's children have 0
                                accepted   [R] bool      the node lies on the path that the target accepts
                                starts     [T + 1]       the rows of tree t are starts[t] to starts[t + 1]
                                answer     [T]           number of the answer, in the order of labelling

Shapes: R rows (nodes), T trees.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from draftsmith.data_gen.states.shards import MANIFEST, Manifest, file_problem, write_shard
from draftsmith.models.c2t import DEPTH_CONVENTION
from draftsmith.recipes.errors import UserError

ROW_BYTES = 4 + 4 + 2 + 1
DTYPES = {
    "P": torch.float32,
    "H": torch.float32,
    "d": torch.int16,
    "accepted": torch.bool,
    "starts": torch.int64,
    "answer": torch.int64,
}


@dataclass(frozen=True)
class Trees:
    """Rows of complete trees; the tensors of a shard."""

    P: torch.Tensor
    H: torch.Tensor
    d: torch.Tensor
    accepted: torch.Tensor
    starts: torch.Tensor
    answer: torch.Tensor

    @property
    def count(self) -> int:
        """T."""
        return len(self.answer)

    @property
    def rows(self) -> int:
        """R."""
        return len(self.P)

    @property
    def features(self) -> torch.Tensor:
        """[R, 3], the classifier's input."""
        return torch.stack((self.P, self.H, self.d.to(self.P.dtype)), dim=-1)

    @classmethod
    def of(cls, features: Sequence[torch.Tensor], accepted: Sequence[torch.Tensor], answer: Sequence[int]) -> "Trees":
        """From each tree's features [rows, 3], labels [rows], and number of its answer."""
        sizes = torch.tensor([0, *map(len, accepted)])
        rows_R3 = torch.cat([torch.empty(0, 3), *features])
        return cls(
            rows_R3[:, 0].contiguous(),
            rows_R3[:, 1].contiguous(),
            rows_R3[:, 2].to(torch.int16),
            torch.cat([torch.empty(0, dtype=torch.bool), *accepted]),
            sizes.cumsum(0),
            torch.tensor(list(answer), dtype=torch.long),
        )

    @classmethod
    def joined(cls, parts: Sequence["Trees"]) -> "Trees":
        found = {name: torch.cat([getattr(part, name) for part in parts]) for name in DTYPES if name != "starts"}
        sizes = [torch.zeros(1, dtype=torch.long), *(part.starts.diff() for part in parts)]
        return cls(**found, starts=torch.cat(sizes).cumsum(0))

    def chosen(self, trees: torch.Tensor) -> "Trees":
        """The trees with these numbers [n], in this order."""
        sizes = self.starts[trees + 1] - self.starts[trees]
        starts = torch.cat((torch.zeros(1, dtype=torch.long), sizes.cumsum(0)))
        # Each row keeps its distance from its tree's first row.
        at = torch.arange(int(starts[-1])) + (self.starts[trees] - starts[:-1]).repeat_interleave(sizes)
        return Trees(self.P[at], self.H[at], self.d[at], self.accepted[at], starts, self.answer[trees])


@dataclass
class TreesManifest(Manifest):
    """The manifest of a folder of labelled trees. `of` counts answers; max_rows may end labelling before the last one.

    Args:
        complete: only a greater max_rows would add rows.
    """

    complete: bool = False

    KIND, OF = "labelled_trees", "of_answers"
    COUNTS = ("answers", "trees", "rows", "accepted", "dropped_nan", "dropped_beyond")
    KEY, COMMAND, VERB, DONE = "labels.out", "label-trees", "label", "labelled"

    def _facts(self) -> dict[str, Any]:
        return {"complete": self.complete}

    def _check(self, fields: dict[str, Any]) -> None:
        if not isinstance(self.made_of, dict) or not isinstance(self.made_of.get("drafter", {}), dict):
            raise ValueError("made_of, and drafter inside it, must be objects")
        if list(self.shards) != list(range(len(self.shards))):
            raise ValueError(f"shards {list(self.shards)} are not in order")
        for shard in self.shards.values():
            if shard["accepted"] > shard["rows"]:
                raise ValueError(f"{shard['file']}: {shard['accepted']:,} of {shard['rows']:,} rows are accepted")
        self.complete = fields.get("complete") is True


def write_tree_shard(directory: Path, number: int, trees: Trees, counts: dict[str, int]) -> dict[str, Any]:
    """Writes shard `number` and returns its manifest entry."""
    made = {"trees": trees.count, "rows": trees.rows, "accepted": int(trees.accepted.sum())}
    return write_shard(directory, number, {name: getattr(trees, name) for name in DTYPES}, counts | made)


def check_rows(directory: Path, manifest: TreesManifest | None, entropy_over: int | None = None) -> TreesManifest:
    """Checks, by the manifest alone, that a classifier can be trained on the rows.

    Raises UserError for missing or unfinished rows, another depth convention or M, or rows of one class only; all
    problems at once.

    Args:
        entropy_over: M of the classifier that training starts from; None: any.
    """
    if manifest is None:
        raise UserError(
            f"{directory}: no labelled trees here ({MANIFEST} is missing); run `draftsmith label-trees` first"
        )
    problems = []
    convention, over = manifest.made_of.get("depth_convention"), manifest.made_of.get("entropy_over")
    if convention != DEPTH_CONVENTION:
        problems.append(
            f"{directory}: depth_convention is {convention!r}, understood is {DEPTH_CONVENTION!r}: decoding would use "
            "other depths than training; label again"
        )
    if type(over) is not int or over < 1:
        problems.append(f"{directory}: entropy_over: {over!r} must be a whole number above 0; label again")
    elif entropy_over is not None and over != entropy_over:
        problems.append(
            f"{directory}: entropies over {over} tokens, but classifier.init_from was trained on entropies over "
            f"{entropy_over}; label with labels.entropy_over={entropy_over}"
        )
    if not manifest.complete:
        problems.append(
            f"{directory}: labelled {manifest.total('answers'):,} of {manifest.of:,} answers so far; run "
            "`draftsmith label-trees` again, or end it with labels.max_rows"
        )
    rows, accepted = manifest.total("rows"), manifest.total("accepted")
    if not 0 < accepted < rows:
        problems.append(
            f"{directory}: of {rows:,} rows {'all' if rows and accepted else 'none'} were accepted, and nothing can be "
            "learnt from that; label more answers, or look at the drafter"
        )
    if problems:
        raise UserError(problems)
    return manifest


def read_trees(directory: Path, manifest: TreesManifest) -> Trees:
    """All rows. Raises UserError for shards that are missing, altered, or hold impossible rows."""
    parts, problems = [], []
    for shard in manifest.shards.values():
        path = directory / shard["file"]
        try:
            if (problem := file_problem(path, shard, digest=True)) is None:
                trees = Trees(**load_file(path))
                _check_trees(trees, shard)
                parts.append(trees)
        except (OSError, SafetensorError, ValueError, TypeError) as error:
            problem = f"{path}: damaged: {error}"
        if problem:
            problems.append(f"{problem}; copy the whole folder again, or delete it and label again")
    if problems:
        raise UserError(problems)
    return Trees.joined(parts)


def _check_trees(trees: Trees, shard: dict[str, Any]) -> None:
    """Raises ValueError if a shard's tensors do not match the manifest's counts."""
    for name, dtype in DTYPES.items():
        tensor = getattr(trees, name)
        if tensor.dtype != dtype or tensor.dim() != 1:
            raise ValueError(f"{name} is {tensor.dtype} of shape {list(tensor.shape)}, not a vector of {dtype}")
    rows, count = shard["rows"], shard["trees"]
    sizes = {name: len(getattr(trees, name)) for name in DTYPES}
    if sizes != dict.fromkeys(("P", "H", "d", "accepted"), rows) | {"starts": count + 1, "answer": count}:
        raise ValueError(f"lengths {sizes}, but the manifest counts {rows:,} rows of {count:,} trees")
    ends = trees.starts.tolist()
    if (ends[0], ends[-1]) != (0, rows) or bool((trees.starts.diff() < 0).any()):
        raise ValueError("starts do not divide the rows into trees")
    if int(trees.accepted.sum()) != shard["accepted"]:
        raise ValueError(f"{int(trees.accepted.sum()):,} accepted rows, the manifest counts {shard['accepted']:,}")
    if broken := int((~trees.features.isfinite()).any(-1).sum()):
        raise ValueError(f"P or H of {broken:,} rows is not finite")
