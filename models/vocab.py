"""The draft vocabulary: the part of the target's vocabulary that a drafter can propose.

    draft id i     0    1    2    3         target_ids, ascending
    target id      5    9   10   42
    d2t[i]         5    8    8   39         an offset, EAGLE-3's form: target = i + d2t[i]
    t2d            True at 5, 9, 10, 42     bool over the target's vocabulary

V tokens in the target's vocabulary, D in the draft vocabulary.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draftsmith.recipes.errors import UserError


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """An ascending selection of target tokens."""

    target_ids: torch.Tensor  # [D] int64, ascending, distinct
    target_vocab_size: int  # V

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.dtype != torch.int64 or ids.dim() != 1 or len(ids) == 0:
            raise ValueError(
                f"target_ids must be a non-empty int64 vector, not {ids.dtype} of shape {tuple(ids.shape)}"
            )
        if not (ids[1:] > ids[:-1]).all() or ids[0] < 0 or ids[-1] >= self.target_vocab_size:
            raise ValueError(f"target_ids must ascend within 0 to {self.target_vocab_size - 1}")

    @property
    def size(self) -> int:
        """D."""
        return len(self.target_ids)

    @property
    def is_full(self) -> bool:
        """Is every target token a draft token, with the same id?"""
        return self.size == self.target_vocab_size

    @cached_property
    def d2t(self) -> torch.Tensor:
        """[D] int64 offsets: target = i + d2t[i]."""
        return self.target_ids - torch.arange(self.size, device=self.target_ids.device)

    @cached_property
    def t2d(self) -> torch.Tensor:
        """[V] bool: is this target token in the draft vocabulary?"""
        return self._draft_ids >= 0

    @cached_property
    def _draft_ids(self) -> torch.Tensor:
        """[V] int64: draft id of every target token, -1 outside."""
        ids = torch.full((self.target_vocab_size,), -1, dtype=torch.int64, device=self.target_ids.device)
        ids[self.target_ids] = torch.arange(self.size, device=self.target_ids.device)
        return ids

    def to_target(self, draft_ids: torch.Tensor) -> torch.Tensor:
        """Target ids of draft ids, any shape."""
        return self.target_ids[draft_ids]

    def to_draft(self, target_ids: torch.Tensor) -> torch.Tensor:
        """Draft ids of target ids, any shape; -1 for tokens outside the draft vocabulary."""
        return self._draft_ids[target_ids]

    def to(self, device: torch.device | str) -> "DraftVocab":
        """The same mapping on another device."""
        return DraftVocab(self.target_ids.to(device), self.target_vocab_size)

    def same_as(self, other: "DraftVocab") -> bool:
        """Do both map the same draft ids to the same target ids, over equally large vocabularies?"""
        return self.target_vocab_size == other.target_vocab_size and torch.equal(
            self.target_ids.cpu(), other.target_ids.cpu()
        )

    @staticmethod
    def full(target_vocab_size: int) -> "DraftVocab":
        """Every target token, under its own id."""
        return DraftVocab(torch.arange(target_vocab_size), target_vocab_size)

    @staticmethod
    def from_d2t(d2t: torch.Tensor, t2d: torch.Tensor, where: str = "draft vocabulary") -> "DraftVocab":
        """From EAGLE-3's pair, checked against each other.

        Args:
            d2t: [D] offsets, any integer type.
            t2d: [V] bool.
            where: opens the error message.

        Raises:
            UserError: the two do not describe one mapping; both sides are printed.
        """
        size, marked = len(d2t), int(t2d.sum())
        target_ids = d2t.long() + torch.arange(size, device=d2t.device)
        if size == 0 or size != marked:
            raise UserError(f"{where}: d2t has {size} draft tokens, t2d marks {marked} target tokens; they must agree")
        lowest, highest = int(target_ids.min()), int(target_ids.max())
        if lowest < 0 or highest >= len(t2d):
            raise UserError(
                f"{where}: d2t leads to target ids {lowest} to {highest}, t2d covers 0 to {len(t2d) - 1}; "
                "d2t holds offsets (target = i + d2t[i]), not ids"
            )
        from_t2d = t2d.nonzero().flatten()
        wrong = (target_ids != from_t2d).nonzero().flatten()
        if len(wrong):
            i = int(wrong[0])
            raise UserError(
                f"{where}: draft token {i} is target token {int(target_ids[i])} by d2t and {int(from_t2d[i])} by t2d "
                f"({len(wrong)} of {size} differ)"
            )
        return DraftVocab(target_ids, len(t2d))

    def save(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
        """Writes d2t and t2d as safetensors; the file is complete or not there. Metadata values are text."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".tmp")
        tensors = {"d2t": self.d2t.cpu().contiguous(), "t2d": self.t2d.cpu().contiguous()}
        save_file(tensors, unfinished, metadata=dict(metadata or {}))
        os.replace(unfinished, path)

    @staticmethod
    def load(path: str | Path) -> "DraftVocab":
        """Reads what `save` wrote. Raises UserError where the file is missing, unreadable or inconsistent."""
        with _open(path) as file:
            missing = {"d2t", "t2d"}.difference(file.keys())
            if missing:
                raise UserError(f"{path}: no {' and no '.join(sorted(missing))} in it; not a draft vocabulary")
            return DraftVocab.from_d2t(file.get_tensor("d2t"), file.get_tensor("t2d").bool(), where=str(path))


def load_metadata(path: str | Path) -> dict[str, str]:
    """The texts saved beside a draft vocabulary: tokenizer_fingerprint, counted_tokens, covered_share."""
    with _open(path) as file:
        return file.metadata() or {}


def _open(path: str | Path):
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path}: no such draft vocabulary; data_gen/rank_vocab.py writes it") from None
    except (OSError, SafetensorError) as error:
        raise UserError(f"{path}: not a readable safetensors file: {error}") from error


def rank(counts: torch.Tensor, size: int, must_have: Iterable[int] = ()) -> DraftVocab:
    """The `size` most frequent tokens; ties go to the lower id.

    Args:
        counts: [V] how often each target token was seen.
        size: D, exactly.
        must_have: target ids that are inside however rare they are (stop tokens).

    Raises:
        UserError: fewer distinct tokens were seen than `size` asks for, or it exceeds the target's vocabulary.
    """
    vocab_size, fixed = len(counts), sorted(set(must_have))
    if size > vocab_size:
        raise UserError(f"drafter.vocab_size: {size} is more than the target's vocabulary of {vocab_size} tokens")
    if size == vocab_size:
        return DraftVocab.full(vocab_size)
    if size < len(fixed):
        raise UserError(f"drafter.vocab_size: {size} has no room for the {len(fixed)} stop tokens {fixed}")
    priority = counts.long().clone()
    priority[torch.tensor(fixed, dtype=torch.int64)] = torch.iinfo(torch.int64).max
    available = int((priority > 0).sum())
    if available < size:
        raise UserError(
            f"drafter.vocab_size: {size} draft tokens asked for, but supervised positions hold only {available} "
            f"distinct tokens (stop tokens included); set it to {available} or less, or regenerate more conversations"
        )
    chosen = priority.sort(descending=True, stable=True).indices[:size]
    return DraftVocab(chosen.sort().values, vocab_size)
