"""The draft vocabulary: the part of the target's vocabulary that a drafter can propose.

    draft id i     0    1    2    3         target_ids, ascending
    target id      5    9   10   42
    d2t[i]         5    8    8   39         an offset, EAGLE-3's form: target = i + d2t[i]
    t2d            True at 5, 9, 10, 42     bool over the target's vocabulary

Decoding can cut the rarest tokens from it (FR-Spec, arXiv 2502.14856). The drafter does not change: only the cut's rows
of its head are multiplied.

    cut id         0    1    2              target ids 5, 9, 42
    rows of head   0    1    3              `cut_head_rows`

V tokens in the target's vocabulary, D in the draft vocabulary.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from draftsmith.models.chat import FINGERPRINT_COVERS
from draftsmith.recipes.errors import UserError, quoted
from draftsmith.recipes.files.atomic import atomic_path

BLEND_SCALE = 1 << 53  # approximate sum of a blend's counts


@dataclass(frozen=True, eq=False)
class DraftVocab:
    """An ascending selection of target tokens."""

    target_ids: torch.Tensor  # [D] int64, ascending, distinct
    target_vocab_size: int  # V

    def __post_init__(self) -> None:
        ids = self.target_ids
        if ids.dtype != torch.int64 or ids.dim() != 1 or len(ids) == 0:
            raise ValueError(f"target_ids must be a non-empty int64 vector, not {ids.dtype} of shape {ids.shape}")
        if not (ids[1:] > ids[:-1]).all() or ids[0] < 0 or ids[-1] >= self.target_vocab_size:
            raise ValueError(f"target_ids must ascend within 0 to {self.target_vocab_size - 1}")

    @property
    def size(self) -> int:
        return len(self.target_ids)

    @property
    def is_full(self) -> bool:
        return self.size == self.target_vocab_size

    @cached_property
    def d2t(self) -> torch.Tensor:
        """[D] int64 offsets: target = i + d2t[i]."""
        return self.target_ids - torch.arange(self.size, device=self.target_ids.device)

    @cached_property
    def t2d(self) -> torch.Tensor:
        """[V] bool: True for target tokens in the draft vocabulary."""
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
        return DraftVocab(self.target_ids.to(device), self.target_vocab_size)

    def same_as(self, other: "DraftVocab") -> bool:
        return self.target_vocab_size == other.target_vocab_size and torch.equal(
            self.target_ids.cpu(), other.target_ids.cpu()
        )

    @staticmethod
    def full(target_vocab_size: int) -> "DraftVocab":
        """Every target token, under its own id."""
        return DraftVocab(torch.arange(target_vocab_size), target_vocab_size)

    @staticmethod
    def from_d2t(d2t: torch.Tensor, t2d: torch.Tensor, where: str = "draft vocabulary") -> "DraftVocab":
        """The vocabulary of EAGLE-3's pair: d2t [D], offsets of any integer type, and t2d [V] bool.

        Raises UserError, which begins with `where`, if the two do not describe one mapping.
        """
        if d2t.dim() != 1 or t2d.dim() != 1 or d2t.is_floating_point():
            raise UserError(f"{where}: d2t and t2d are not vectors of whole numbers and of truth values")
        target_ids, marked = d2t.long() + torch.arange(len(d2t), device=d2t.device), t2d.nonzero().flatten()
        if not len(marked) or not torch.equal(target_ids, marked):
            raise UserError(
                f"{where}: d2t and t2d name different tokens: {quoted(target_ids.tolist())} and "
                f"{quoted(marked.tolist())}; d2t holds offsets (target = i + d2t[i]), not ids"
            )
        return DraftVocab(target_ids, len(t2d))

    def save(self, path: str | Path, metadata: Mapping[str, str] | None = None) -> None:
        """Writes d2t and t2d as safetensors, atomically."""
        tensors = {"d2t": self.d2t.cpu().contiguous(), "t2d": self.t2d.cpu().contiguous()}
        write_tensors(Path(path), tensors, dict(metadata or {}))

    @staticmethod
    def load(path: str | Path) -> "DraftVocab":
        """Reads what `save` wrote. Raises UserError where the file is missing, unreadable or inconsistent."""
        tensors, _ = load_tensors(path, DRAFT_VOCAB)
        if not {"d2t", "t2d"} <= tensors.keys():
            raise UserError(f"{path}: no d2t or no t2d in it; not a draft vocabulary")
        return DraftVocab.from_d2t(tensors["d2t"], tensors["t2d"], where=str(path))


DRAFT_VOCAB = "draft vocabulary; run `draftsmith rank-vocab` first"


def load_metadata(path: str | Path) -> dict[str, str]:
    """A draft vocabulary's metadata: tokenizer_fingerprint, counted_tokens, covered_share."""
    return load_tensors(path, DRAFT_VOCAB)[1]


def load_tensors(path: str | Path, what: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors and metadata of a safetensors file; `what` is as `missing` of `open_tensors`."""
    with open_tensors(path, what) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def open_tensors(path: str | Path, missing: str) -> Any:
    """`safe_open` of a file. `missing`: what it is and what writes it, for the error if it does not exist."""
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path}: no such {missing}") from None
    except (OSError, SafetensorError) as error:
        why = "it is a folder" if Path(path).is_dir() else error
        raise UserError(f"{path}: not a readable safetensors file: {why}") from error


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Writes safetensors atomically, the same bytes for the same content."""
    path.resolve().parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as partial:
        # An OSError from Python names the file; safetensors' own errors do not.
        partial.write_bytes(save(tensors, metadata=metadata))
        sort_metadata(partial)


def sort_metadata(path: Path) -> None:
    """Sorts the metadata of a safetensors file: safetensors draws their order anew, and equal contents should have
    equal digests."""
    with path.open("r+b") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
        if "__metadata__" in header:
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= size:  # the same text in another order, and blanks
            file.seek(8)
            file.write(text.ljust(size))


# Ranking.


def cut_vocab(
    vocab: DraftVocab, counts: torch.Tensor, size: int, must_have: Iterable[int], key: str = "eval.tree.vocab_size"
) -> DraftVocab:
    """The `size` most frequent tokens of a vocabulary; ties go to the lower id.

    So the lowest ids, which a BPE tokenizer gives to frequent merges, fill up a size larger than what was counted.
    Deviation: FR-Spec's script appends stop tokens to the list; here they replace the rarest tokens.

    Args:
        vocab: the target's whole vocabulary, or, for decoding, the drafter's.
        counts: [V] occurrences of each target token.
        must_have: target ids to include however rare they are. Those that `vocab` lacks are ignored: some configs name
            stop tokens beyond the target's embedding.
        key: of the recipe, for messages.

    Raises:
        UserError: `size` exceeds the vocabulary or has no room for `must_have`, or the counts are of another one.
    """
    if len(counts) != vocab.target_vocab_size:
        raise UserError(
            f"{key}: the token counts are of a vocabulary of {len(counts)} tokens, the drafter's target has "
            f"{vocab.target_vocab_size}; run `draftsmith rank-vocab` for this target"
        )
    if size > vocab.size:
        whose = "target's" if vocab.is_full else "drafter's"
        raise UserError(f"{key}: {size} is more than the {vocab.size} tokens of the {whose} vocabulary")
    target_ids = vocab.target_ids.cpu()
    inside = torch.isin(target_ids, torch.tensor(list(must_have), dtype=torch.int64))
    if size < int(inside.sum()):
        ids = target_ids[inside].tolist()
        raise UserError(f"{key}: {size} has no room for the {len(ids)} stop and template tokens {ids}")
    priority = counts.cpu().long()[target_ids].masked_fill(inside, torch.iinfo(torch.int64).max)
    rows = priority.sort(descending=True, stable=True).indices[:size].sort().values
    return DraftVocab(target_ids[rows].to(vocab.target_ids.device), vocab.target_vocab_size)


def fill_text(vocab: DraftVocab, counts: torch.Tensor, must_have: Iterable[int]) -> str | None:
    """A sentence about the tokens that fill a vocabulary up; None: all were counted. Arguments as of `cut_vocab`."""
    uncounted = vocab.target_ids.cpu()[counts.cpu()[vocab.target_ids.cpu()] == 0]
    fill = len(set(uncounted.tolist()).difference(must_have))
    if not fill or vocab.is_full:
        return None
    return (
        f"only {vocab.size - fill:,} of {vocab.size:,} draft tokens were counted (stop and template tokens included); "
        "the lowest other ids are the rest. To choose by frequency, regenerate more conversations or set data.ranking"
    )


def cut_head_rows(vocab: DraftVocab, cut: DraftVocab) -> torch.Tensor:
    """[size] int64 rows of the drafter's head for the tokens of `cut`, a part of `vocab`."""
    rows = vocab.to_draft(cut.target_ids.to(vocab.target_ids.device))
    if vocab.target_vocab_size != cut.target_vocab_size or (rows < 0).any():
        raise ValueError("not a cut of this draft vocabulary")
    return rows


def covered_share(counts: torch.Tensor, vocab: DraftVocab) -> float:
    """The share of the counted tokens that are in the vocabulary. `counts`: [V], not all zero."""
    return int(counts[vocab.target_ids.to(counts.device)].sum()) / int(counts.sum())


def blend(parts: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """[V] int64: counts of several corpora as one ranking, independent of their sizes. (FR-Spec ranks by one corpus.)

    The blended frequency of token t is sum_s w_s / W * c_s[t] / n_s, with counts c_s of sum n_s and weights w_s of
    sum W, in exact fractions, rounded once to multiples of 1 / `BLEND_SCALE`. A token that was seen never gets 0. A
    single corpus keeps its own counts.

    Args:
        parts: (counts [V], not all zero; weight above 0) of each corpus.
    """
    if len(parts) == 1:
        return parts[0][0].cpu().long().clone()
    weights = [Fraction(weight) for _, weight in parts]
    shares = [weight / sum(weights) / int(counts.sum()) for (counts, _), weight in zip(parts, weights, strict=True)]
    whole = math.lcm(*(share.denominator for share in shares))
    units = [int(share * whole) for share in shares]  # of 1 / whole, for each time a token was seen
    columns = [counts.tolist() for counts, _ in parts]
    exact = [sum(unit * count for unit, count in zip(units, row, strict=True)) for row in zip(*columns, strict=True)]
    rounded = [max(int(each > 0), (2 * BLEND_SCALE * each + whole) // (2 * whole)) for each in exact]
    return torch.tensor(rounded, dtype=torch.int64)


# Token counts rank the tokens of a cut.


@dataclass(frozen=True, eq=False)
class CorpusCounts:
    """Token counts of one corpus."""

    source: str  # as in the recipe; `answers`: the target's own
    counts: torch.Tensor  # [V] int64
    weight: float | None = None  # in the blend; None: counted for comparison only
    documents: int = 0
    rejected: int = 0  # unusable records

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    def facts(self) -> dict[str, str | int | float | None]:
        """All but the counts, for JSON."""
        read = {"documents": self.documents, "rejected": self.rejected, "tokens": self.tokens}
        return {"source": self.source, "weight": self.weight} | read


def save_token_counts(
    path: str | Path,
    counts: torch.Tensor,
    fingerprint: str,
    stop_ids: Iterable[int],
    template_ids: Iterable[int] = (),
    corpora: Sequence[CorpusCounts] = (),
) -> None:
    """Writes counts [V] of the tokenizer with this fingerprint as safetensors, atomically.

    Args:
        stop_ids, template_ids: part of every cut. The latter are tokens that the chat template writes into answers;
            for foreign texts, which lack control tokens, all of these.
        corpora: the corpora that `counts` were blended from, saved with their own counts.
    """
    metadata = {
        "tokenizer_fingerprint": fingerprint,
        "counted_tokens": str(int(counts.sum())),
        "stop_ids": json.dumps(sorted(stop_ids)),
    }
    tensors = {"counts": counts.cpu().long().contiguous()}
    if template := sorted(template_ids):
        metadata["template_ids"] = json.dumps(template)
    if corpora:
        metadata["corpora"] = json.dumps([corpus.facts() for corpus in corpora], ensure_ascii=False)
        tensors |= {f"counts_of_{i}": corpus.counts.cpu().long().contiguous() for i, corpus in enumerate(corpora)}
    write_tensors(Path(path), tensors, metadata)


def always_inside(metadata: Mapping[str, str]) -> set[int]:
    """Stop and template tokens, part of every cut. `metadata`: from `load_token_counts`."""
    return {*json.loads(metadata["stop_ids"]), *json.loads(metadata.get("template_ids", "[]"))}


def load_token_counts(path: str | Path) -> tuple[torch.Tensor, dict[str, str]]:
    """What `save_token_counts` wrote: counts [V] int64, and metadata.

    Raises:
        UserError: no such file, or another kind of file.
    """
    missing = "token counts; `draftsmith rank-vocab` writes <output_dir>/token_counts.safetensors"
    tensors, metadata = load_tensors(path, missing)
    counts = tensors.get("counts", torch.empty(0))
    named = {"tokenizer_fingerprint", "counted_tokens", "stop_ids"} <= metadata.keys()
    if not named or counts.dtype != torch.int64 or counts.dim() != 1 or not counts.any() or counts.min() < 0:
        raise UserError(f"{path}: these are no token counts; `draftsmith rank-vocab` writes them")
    return counts, metadata


def cut_by_file(path: Path, fingerprint: str, vocab: DraftVocab, size: int, stops: Iterable[int]) -> DraftVocab:
    """The cut of a drafter's vocabulary by the token counts in `path`. Raises UserError as `counts_of` and `cut_vocab`.

    Args:
        fingerprint, stops: of the target's tokenizer.
    """
    counts, metadata = counts_of(path, fingerprint)
    return cut_vocab(vocab, counts, size, always_inside(metadata).union(stops))


def counts_of(path: Path, fingerprint: str) -> tuple[torch.Tensor, dict[str, str]]:
    """`load_token_counts`; another tokenizer's are a UserError, too."""
    counts, metadata = load_token_counts(path)
    counted_with = metadata["tokenizer_fingerprint"]
    if counted_with != fingerprint:
        raise UserError(
            f"eval.token_counts: {path} was counted with a tokenizer of fingerprint {counted_with[:16]}, the target's "
            f"has {fingerprint[:16]} (a fingerprint covers {FINGERPRINT_COVERS}); run `draftsmith rank-vocab` for "
            "this target"
        )
    return counts, metadata
