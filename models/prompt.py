"""The target's prompt: token ids, and inserts that replace the embeddings of some of them.

    token_ids     U   U   P   P   P   U   H        P: placeholder ids, which the chat template writes for a picture
    inserts               [- insert --]            replaces them; `first` is 2, and it covers 3 tokens

Only `Target.inputs` turns a prompt into the first decoder layer's input:

    embeddings    t   t   e   e   e   t   t        t: a row of the embedding table, e: the insert's
    positions     0   1   2   3   4   5   6

Drafters read these `DecoderInputs`, in decoding and in the unroll. A new kind of input needs an `Insert` here and its
embeddings in `Target.read_insert`, but no change in the drafters. Keys of answers, stored states and labels hash the
inserts, too: one question about two pictures is two prompts.

Shapes: B rows, T tokens, n tokens of an insert, H hidden size.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import overload

import torch
from typing_extensions import Self


class RenderError(Exception):
    """A conversation cannot be written as the target's prompt; the message is "kind: detail"."""


@dataclass(frozen=True, eq=False)
class Insert:
    """Non-text input in place of consecutive placeholder tokens: the base class. Equal if kind, place, content are."""

    first: int  # column of its first token in the prompt

    @property
    def length(self) -> int:
        """Number of tokens covered."""
        raise NotImplementedError

    @cached_property
    def digest(self) -> str:
        """Equal for equal content in every process, wherever it stands."""
        raise NotImplementedError

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and (self.first, self.digest) == (other.first, other.digest)  # type: ignore[attr-defined]

    def __hash__(self) -> int:
        return hash((self.first, self.digest))

    def at(self, first: int) -> Self:
        """The same content with its first token at another column."""
        return replace(self, first=first)


@dataclass(frozen=True, eq=False)
class EmbeddingInsert(Insert):
    """Given embeddings, such as a soft prompt or an encoded picture."""

    rows: torch.Tensor  # [n, H] in the scale of `get_input_embeddings()(ids)`

    @property
    def length(self) -> int:
        return len(self.rows)

    @cached_property
    def digest(self) -> str:
        content = self.rows.detach().float().cpu().contiguous()
        return hashlib.sha256(repr(tuple(content.shape)).encode() + content.numpy().tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class Prompt(Sequence[int]):
    """A sequence of token ids with inserts, which must neither overlap nor reach beyond the tokens."""

    token_ids: Sequence[int]
    inserts: tuple[Insert, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for insert in self.inserts:
            if insert.first < end or insert.first + insert.length > len(self.token_ids):
                raise ValueError(
                    f"an insert covers tokens {insert.first} to {insert.first + insert.length - 1}, but the one before "
                    f"ends at {end} and the prompt at {len(self.token_ids)}"
                )
            end = insert.first + insert.length

    @classmethod
    def of(cls, prompt: Sequence[int]) -> "Prompt":
        """`prompt` itself, or token ids without inserts."""
        return prompt if isinstance(prompt, Prompt) else cls(prompt)

    def __len__(self) -> int:
        return len(self.token_ids)

    def __iter__(self) -> Iterator[int]:
        return iter(self.token_ids)

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        return list(self.token_ids[index]) if isinstance(index, slice) else self.token_ids[index]

    def __eq__(self, other: object) -> bool:
        """Token ids alone equal a prompt without inserts."""
        if not isinstance(other, (Prompt, list, tuple)):
            return NotImplemented
        return list(self) == list(other) and self.inserts_digest == Prompt.of(other).inserts_digest

    def __hash__(self) -> int:
        tokens = tuple(self.token_ids)
        return hash((tokens, self.inserts_digest) if self.inserts else tokens)  # a tuple may be equal

    def then(self, tokens: Sequence[int]) -> "Prompt":
        """The prompt with text tokens appended."""
        return Prompt([*self.token_ids, *tokens], self.inserts)

    def until(self, end: int) -> "Prompt":
        """The prompt's first `end` tokens. Raises ValueError where an insert reaches beyond them."""
        return Prompt(self[:end], tuple(insert for insert in self.inserts if insert.first < end))

    def begins_with(self, other: "Prompt") -> bool:
        """Whether `other` is a prefix, inserts included."""
        inside = [insert for insert in self.inserts if insert.first < len(other)]
        return list(self.token_ids[: len(other)]) == list(other) and digest_of(inside) == other.inserts_digest

    @cached_property
    def inserts_digest(self) -> bytes:
        """sha256 of the inserts and their places, for keys; empty without inserts, to keep text's keys."""
        return digest_of(self.inserts)

    @cached_property
    def digest(self) -> str:
        """sha256 of token ids and inserts."""
        return hashlib.sha256(array("q", self.token_ids).tobytes() + self.inserts_digest).hexdigest()


def digest_of(inserts: Sequence[Insert]) -> bytes:
    """sha256 of inserts and their places; empty where there are none."""
    places = [f"{insert.first}+{insert.length}:{insert.digest}" for insert in inserts]
    return hashlib.sha256(" ".join(places).encode()).digest() if places else b""


@dataclass(frozen=True)
class PlacedInsert:
    """An insert in a batch: `insert.first` is its column in row `row`."""

    row: int
    insert: Insert


@dataclass(frozen=True)
class PlacedRows:
    """An insert's embeddings in a batch, whole."""

    row: int
    first: int  # column of its first token; outside the batch's columns if only the rest is inside
    rows: torch.Tensor  # [n, H] as in `DecoderInputs.embeddings`


@dataclass(frozen=True)
class DecoderInputs:
    """The input of the target's first layer for some tokens, and the only form in which drafters read tokens."""

    embeddings: torch.Tensor  # [B, T, H] with the scale of the target's family
    positions: torch.Tensor  # [B, T] of each token in its text
    inserts: tuple[PlacedRows, ...] = ()  # those that reach into the embeddings

    def following(self) -> "DecoderInputs":
        """The inputs of the token behind each column, at the column's position. The last column repeats its own."""
        embeddings = torch.cat((self.embeddings[:, 1:], self.embeddings[:, -1:]), dim=1)
        inserts = tuple(replace(placed, first=placed.first - 1) for placed in self.inserts)
        return DecoderInputs(embeddings, self.positions, inserts)
