"""The draft vocabulary: the part of the target's vocabulary that a drafter can propose.

    draft id i     0    1    2    3         target_ids, ascending
    target id      5    9   10   42
    d2t[i]         5    8    8   39         an offset, EAGLE-3's form: target = i + d2t[i]
    t2d            True at 5, 9, 10, 42     bool over the target's vocabulary

While decoding, a cut of it leaves the rarest tokens out once more (FR-Spec, arXiv 2502.14856). The drafter stays what
it is: of its head, only the cut's rows are multiplied.

    cut id         0    1    2              target ids 5, 9, 42
    rows of head   0    1    3              `rows_of`

V tokens in the target's vocabulary, D in the draft vocabulary.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from draftsmith.models.chat import FINGERPRINT_COVERS
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.json_text import parse_json

# What the counts of a blend add up to, nearly: float64 holds them, and frequencies that differ by 1e-15 differ in them.
BLEND_SCALE = 1 << 53


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
        for name, tensor in (("d2t", d2t), ("t2d", t2d)):
            if tensor.dim() != 1 or tensor.is_floating_point() or tensor.is_complex():
                raise UserError(
                    f"{where}: {name} is {tensor.dtype} of shape {list(tensor.shape)}, not a vector of whole numbers"
                )
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
        tensors = {"d2t": self.d2t.cpu().contiguous(), "t2d": self.t2d.cpu().contiguous()}
        write_tensors(Path(path), tensors, dict(metadata or {}))

    @staticmethod
    def load(path: str | Path) -> "DraftVocab":
        """Reads what `save` wrote. Raises UserError where the file is missing, unreadable or inconsistent."""
        with _open(path, "draft vocabulary; data_gen/rank_vocab.py writes it") as file:
            missing = {"d2t", "t2d"}.difference(file.keys())
            if missing:
                raise UserError(f"{path}: no {' and no '.join(sorted(missing))} in it; not a draft vocabulary")
            return DraftVocab.from_d2t(file.get_tensor("d2t"), file.get_tensor("t2d").bool(), where=str(path))


def load_metadata(path: str | Path) -> dict[str, str]:
    """The texts saved beside a draft vocabulary: tokenizer_fingerprint, counted_tokens, covered_share."""
    with _open(path, "draft vocabulary; data_gen/rank_vocab.py writes it") as file:
        return file.metadata() or {}


def read_tensors(path: str | Path, what: str) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """All tensors and texts of a safetensors file that is named `what` in messages. Raises UserError."""
    with _open(path, what) as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118


def _open(path: str | Path, missing: str):
    try:
        return safe_open(path, framework="pt")
    except FileNotFoundError:
        raise UserError(f"{path}: no such {missing}") from None
    except (OSError, SafetensorError) as error:
        why = "it is a folder" if Path(path).is_dir() else error
        raise UserError(f"{path}: not a readable safetensors file: {why}") from error


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """The file is complete or not there."""
    # Written by Python: an OSError names the file that could not be, safetensors' own errors do not.
    atomic_write(path, save(tensors, metadata=metadata))


# Ranking.


def rank(counts: torch.Tensor, size: int, must_have: Iterable[int] = (), counted: str | None = None) -> DraftVocab:
    """The `size` most frequent tokens; ties go to the lower id.

    Args:
        counts: [V] how often each target token was seen.
        size: D, exactly.
        must_have: target ids that are inside however rare they are (stop and template tokens), where the target has
            them.
        counted: what was counted, for messages. None: supervised positions.

    Raises:
        UserError: fewer distinct tokens were seen than `size` asks for, or it exceeds the target's vocabulary.
    """
    vocab_size = len(counts)
    # Configs name stop tokens that the target has no row for: it never says them, nor need a drafter.
    fixed = sorted(token for token in set(must_have) if 0 <= token < vocab_size)
    if size > vocab_size:
        raise UserError(f"drafter.vocab_size: {size} is more than the target's vocabulary of {vocab_size} tokens")
    if size == vocab_size:
        return DraftVocab.full(vocab_size)
    if size < len(fixed):
        raise UserError(f"drafter.vocab_size: {size} has no room for the {len(fixed)} stop and template tokens {fixed}")
    inside = torch.zeros(vocab_size, dtype=torch.bool)
    inside[fixed] = True
    available = int(((counts > 0) | inside).sum())
    if available < size:
        what, more = (
            (counted, "count more text") if counted else ("the supervised positions", "regenerate more conversations")
        )
        raise UserError(
            f"drafter.vocab_size: {size} draft tokens asked for, but there are only {available} distinct tokens in "
            f"{what} (stop and template tokens included); set it to {available} or less, or {more}"
        )
    return DraftVocab(_most_frequent(counts, inside, size), vocab_size)


def cut(vocab: DraftVocab, counts: torch.Tensor, size: int, must_have: Iterable[int]) -> DraftVocab:
    """The `size` most frequent tokens of a drafter's vocabulary, for decoding; ties go to the lower id.

    Any size up to the drafter's is possible: tokens that were never counted fill up behind the others, in no order that
    means anything (`check_counted` refuses that). FR-Spec's script appends its stop tokens to the
    list; here they take the place of the rarest tokens, none stands twice, and `size` is exact.

    Args:
        vocab: what the drafter was trained to propose, the target's whole vocabulary or a part.
        counts: [V] how often each target token was seen.
        must_have: target ids that are inside however rare they are (stop tokens, and what `always_inside` reads from
            the counts' file), where `vocab` has them.

    Raises:
        UserError: more tokens than the drafter has, no room for the stop tokens, or counts of another vocabulary.
    """
    if len(counts) != vocab.target_vocab_size:
        raise UserError(
            f"eval.tree.vocab_size: the token counts are of a vocabulary of {len(counts)} tokens, the drafter's target "
            f"has {vocab.target_vocab_size}; run data_gen/rank_vocab.py for this target"
        )
    if size > vocab.size:
        raise UserError(
            f"eval.tree.vocab_size: {size} is more than the {vocab.size} tokens of the drafter's vocabulary"
        )
    target_ids = vocab.target_ids.cpu()
    inside = torch.isin(target_ids, torch.tensor(list(must_have), dtype=torch.int64))
    if size < int(inside.sum()):
        raise UserError(
            f"eval.tree.vocab_size: {size} has no room for the {int(inside.sum())} stop tokens "
            f"{target_ids[inside].tolist()} (template tokens among them, where the token counts name some)"
        )
    rows = _most_frequent(counts.cpu()[target_ids], inside, size)
    return DraftVocab(target_ids[rows].to(vocab.target_ids.device), vocab.target_vocab_size)


def check_counted(vocab: DraftVocab, counts: torch.Tensor, size: int, must_have: Iterable[int]) -> None:
    """A cut reaches no further down than tokens were counted. Arguments as of `cut`.

    Raises:
        UserError: more tokens are asked for, though not all.
    """
    target_ids = vocab.target_ids.cpu()
    inside = torch.isin(target_ids, torch.tensor(list(must_have), dtype=torch.int64))
    available = int(((counts.cpu()[target_ids] > 0) | inside).sum())
    if available < size < vocab.size:
        raise UserError(
            f"eval.tree.vocab_size: {size} draft tokens asked for, but the token counts hold only {available} of the "
            f"drafter's {vocab.size} (stop and template tokens included); set it to {available} or less, or count more "
            "text (data.ranking)"
        )


def rows_of(vocab: DraftVocab, cut: DraftVocab) -> torch.Tensor:
    """[size] int64 draft ids in `vocab` of the tokens of `cut`, a part of it: the rows of the drafter's head."""
    rows = vocab.to_draft(cut.target_ids.to(vocab.target_ids.device))
    if vocab.target_vocab_size != cut.target_vocab_size or (rows < 0).any():
        raise ValueError("not a cut of this draft vocabulary")
    return rows


def covered_share(counts: torch.Tensor, vocab: DraftVocab) -> float:
    """Which share of the counted tokens the vocabulary holds. `counts`: [V], not all zero."""
    return int(counts[vocab.target_ids.to(counts.device)].sum()) / int(counts.sum())


def blend(parts: Sequence[tuple[torch.Tensor, float]]) -> torch.Tensor:
    """[V] int64: counts of several corpora as one ranking, whatever their sizes.

    The blended frequency of token t is sum_s w_s / W * c_s[t] / n_s, for counts c_s that add up to n_s and weights w_s
    that add up to W. It is computed exactly, in fractions, and rounded once, to multiples of 1 / `BLEND_SCALE`: a more
    frequent token never gets a smaller count, and no token that was seen gets none. One corpus keeps its own counts.

    FR-Spec (arXiv 2502.14856) ranks by one corpus; a blend is ours.

    Args:
        parts: counts [V], not all zero, and weight above 0 of each corpus.
    """
    if len(parts) == 1:
        return parts[0][0].cpu().long().clone()
    weights = [Fraction(weight) for _, weight in parts]
    shares = [weight / sum(weights) / int(counts.sum()) for (counts, _), weight in zip(parts, weights, strict=True)]
    whole = math.lcm(*(share.denominator for share in shares))
    units = [int(share * whole) for share in shares]  # of 1 / whole, for each time a token was seen
    blended = torch.zeros(len(parts[0][0]), dtype=torch.int64)
    seen = torch.stack([counts.cpu() > 0 for counts, _ in parts]).any(dim=0).nonzero().flatten().tolist()
    columns = [counts.cpu()[seen].tolist() for counts, _ in parts]
    rounded = [
        max(
            1,
            (2 * BLEND_SCALE * sum(unit * count for unit, count in zip(units, row, strict=True)) + whole)
            // (2 * whole),
        )
        for row in zip(*columns, strict=True)
    ]
    blended[seen] = torch.tensor(rounded, dtype=torch.int64)
    return blended


def _most_frequent(counts: torch.Tensor, inside: torch.Tensor, size: int) -> torch.Tensor:
    """[size] ascending places in `counts` [n]: all that `inside` [n] marks, then the greatest, the first of equals."""
    priority = counts.long().masked_fill(inside, torch.iinfo(torch.int64).max)
    return priority.sort(descending=True, stable=True).indices[:size].sort().values


# Token counts: what a cut ranks by.


@dataclass(frozen=True, eq=False)
class CorpusCounts:
    """What was counted in one corpus."""

    source: str  # as the recipe names it; `answers`: the target's own
    counts: torch.Tensor  # [V] int64
    weight: float | None = None  # in the blend; None: not in it, counted to be compared
    documents: int = 0
    rejected: int = 0  # records that could not be used

    @property
    def tokens(self) -> int:
        return int(self.counts.sum())

    @property
    def distinct(self) -> int:
        """Different tokens that were seen."""
        return int((self.counts > 0).sum())

    def facts(self) -> dict[str, str | int | float | None]:
        """All but the counts, for JSON."""
        return {
            "source": self.source,
            "weight": self.weight,
            "documents": self.documents,
            "rejected": self.rejected,
            "tokens": self.tokens,
            "distinct_tokens": self.distinct,
        }


def save_token_counts(
    path: str | Path,
    counts: torch.Tensor,
    fingerprint: str,
    stop_ids: Iterable[int],
    template_ids: Iterable[int] = (),
    corpora: Sequence[CorpusCounts] = (),
) -> None:
    """Writes counts [V] and what they are of as safetensors; the file is complete or not there.

    Args:
        fingerprint: `models.chat.tokenizer_fingerprint` of the tokenizer that the tokens are of.
        stop_ids: its stop tokens, which belong into every cut.
        template_ids: what else does: what its chat template writes into answers, and of foreign texts, which do not
            hold them, all its control tokens.
        corpora: what `counts` are blended from; each one's own counts are kept beside them.
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
    """Tokens that token counts want in every cut: the stop tokens, and those of the chat template where it has them.

    Args:
        metadata: of `load_token_counts`, which has checked it.
    """
    return {*json.loads(metadata["stop_ids"]), *json.loads(metadata.get("template_ids", "[]"))}


def load_corpora(path: str | Path) -> list[CorpusCounts]:
    """What the counts of a file were blended from; empty where they are of the target's own answers alone."""
    _, metadata = load_token_counts(path)
    with _open(path, "token counts") as file:
        return [
            CorpusCounts(
                facts["source"],
                file.get_tensor(f"counts_of_{i}"),
                facts["weight"],
                facts["documents"],
                facts["rejected"],
            )
            for i, facts in enumerate(json.loads(metadata.get("corpora", "[]")))
        ]


def load_token_counts(path: str | Path) -> tuple[torch.Tensor, dict[str, str]]:
    """Counts [V] int64 and the texts saved beside them: tokenizer_fingerprint, counted_tokens, stop_ids (a JSON list).

    Where the chat template writes more than stop tokens into answers, or other texts than those were counted, also
    template_ids (a JSON list); of other texts also corpora (what `load_corpora` reads). counted_tokens of a blend is
    about `BLEND_SCALE`.

    Raises:
        UserError: no such file, or one that `save_token_counts` did not write.
    """
    with _open(
        path, "token counts; `python data_gen/rank_vocab.py <recipe>` writes <output_dir>/token_counts.safetensors"
    ) as file:
        if "counts" not in file.keys():  # noqa: SIM118 (safetensors' file is no dict)
            raise UserError(f"{path}: no counts in it; not token counts as data_gen/rank_vocab.py writes them")
        counts, metadata = file.get_tensor("counts"), file.metadata() or {}
    missing = {"tokenizer_fingerprint", "counted_tokens", "stop_ids"} - metadata.keys()
    if missing:
        raise UserError(
            f"{path}: its metadata has no {' and no '.join(sorted(missing))}; write it with data_gen/rank_vocab.py or "
            "models.vocab.save_token_counts"
        )
    wrong = _what_is_wrong(counts, metadata)
    if wrong:
        raise UserError(f"{path}: {wrong}; write it anew with data_gen/rank_vocab.py")
    return counts, metadata


def _what_is_wrong(counts: torch.Tensor, metadata: Mapping[str, str]) -> str | None:
    if counts.dtype != torch.int64 or counts.dim() != 1 or len(counts) == 0:
        return f"counts must be a non-empty int64 vector, not {counts.dtype} of shape {tuple(counts.shape)}"
    if int(counts.min()) < 0:
        token = int((counts < 0).nonzero()[0])
        return f"token {token} was seen {int(counts[token])} times"
    total = int(counts.sum())
    if metadata["counted_tokens"] != str(total):
        return f"its counts add up to {total}, its metadata says counted_tokens {metadata['counted_tokens']}"
    if total == 0:
        return "no token was counted"
    for key in ("stop_ids", "template_ids"):
        try:
            ids = parse_json(metadata.get(key, "[]"))
        except ValueError:
            ids = None
        if not isinstance(ids, list) or not all(type(token) is int for token in ids):
            return f"{key} must be a JSON list of token ids, not {metadata[key]}"
    return None


def check_counts(path: str | Path, metadata: Mapping[str, str], fingerprint: str) -> None:
    """Refuses token counts of another tokenizer than the target's, whose fingerprint is given.

    Raises:
        UserError: with both fingerprints.
    """
    counted_with = metadata["tokenizer_fingerprint"]
    if counted_with != fingerprint:
        raise UserError(
            f"eval.token_counts: {path} was counted with a tokenizer of fingerprint {counted_with[:16]}, the target's "
            f"has {fingerprint[:16]} (a fingerprint covers {FINGERPRINT_COVERS}); run data_gen/rank_vocab.py for this "
            "target"
        )
