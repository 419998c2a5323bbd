"""Alignment: the tokens that each column reads and predicts, and the columns that count. Only this file decides it.

Tokens x[0], x[1], ...; f[t] is the target's state of position t; k is the unroll step, 0-based.

    column t, step k   reads    f[t] at step 0, its own output of step k-1 afterwards
                       reads    the embedding of x[t+1+k], at position t+k
                       predicts x[t+2+k]; its teacher is the target's distribution at position t+1+k

Decoding starts chains only below a token of the target itself: the root, x[t+1]. So

    column t counts at step k  iff  x[t+1], ..., x[t+2+k] all lie in one supervised span

(a span is the assistant's tokens of one turn, stop token included). An example with a prompt of 4 tokens, an answer of
5 (`.` is its stop token), the next user turn, and K = 3 steps; `*` counts:

    position      0  1  2  3  4  5  6  7  8  9 10
    token         u  u  u  >  A  B  C  D  .  u  u
    span          -  -  -  -  1  1  1  1  1  -  -

    column t      0  1  2  3  4  5  6  7  8
    root x[t+1]   u  u  >  A  B  C  D  .  u
    predicts k=0                B  C  D  .              x[t+2]:  * at t = 3 4 5 6
             k=1                C  D  .                 x[t+3]:  * at t = 3 4 5
             k=2                D  .                    x[t+4]:  * at t = 3 4
    depth         0  0  0  3  3  2  1  0  0             steps at which the column counts, at most K

The prefill gives the first answer token A, so it is never drafted. No prediction crosses the end of a span or of the
text.

Counted columns of one span are consecutive. So, with index c among counted columns, step k of column c has the teacher
teacher[c + k] and reads the token following[c + k]: the unroll shifts an index and never copies.

A row may hold several documents (`Documents`). Each is read as if it were alone: its positions count from 0, its tokens
see only each other. No column's window crosses into the next document, because spans never hold a document's first
token, which is neither a root nor predicted:

    token         u  >  A  B  .  >  C  D  .             two documents
    position      0  1  2  3  4  0  1  2  3
    span          -  -  1  1  1  -  1  1  1             numbered in each document
    depth         0  2  1  0  0  2  1  0  0
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Documents:
    """The places of a batch's documents; some share a row.

    row 0     a a a a b b b c c         places (0, 0, 4), (0, 4, 3), (0, 7, 2)
    position  0 1 2 3 0 1 2 0 1
    row 1     d d d d d d . . .                (1, 0, 6)
    position  0 1 2 3 4 5 0 0 0         each token of padding is a document of its own
    """

    position: torch.Tensor  # [B, T] of each token in its document; 0 in padding
    places: tuple[tuple[int, int, int], ...]  # (row, first column, tokens) of each, row by row, in the columns' order

    def first(self) -> torch.Tensor:
        """[B, T] the column in which the document of each token begins."""
        return torch.arange(self.position.shape[1], device=self.position.device) - self.position


@dataclass(frozen=True)
class Run:
    """The consecutive counted columns of one span."""

    row: int
    first: int  # along C
    end: int  # along C
    start: int  # the document's first token, along T
    before: int  # the run's first column, along T


def runs_of_documents(documents: Documents | None, rows: int, tokens: int) -> list[Run]:
    """The runs if every token is a query: each document is one."""
    places = [(row, 0, tokens) for row in range(rows)] if documents is None else documents.places
    return [Run(row, start, start + length, start, start) for row, start, length in places]


@dataclass(frozen=True)
class Columns:
    """The columns of a batch that count at step 0, padded to the longest row."""

    index: torch.Tensor  # [B, C] position t of each column; 0 on padding
    depth: torch.Tensor  # [B, C] number of steps at which the column counts, 1 to K; 0 on padding
    known_runs: tuple[Run, ...] | None = None  # `runs`, for fake tensors without numbers

    def to(self, device: torch.device) -> "Columns":
        return Columns(self.index.to(device), self.depth.to(device), self.known_runs)

    def counted(self, step: int) -> torch.Tensor:
        """[B, C] bool: the columns that count at unroll step `step`."""
        return self.depth > step

    def gather(self, values_BT: torch.Tensor, offset: int = 0) -> torch.Tensor:
        """values[b, t + offset, ...] for each column t: [B, C, ...], clamped to T."""
        rows = torch.arange(len(self.index), device=self.index.device)[:, None]
        return values_BT[rows, (self.index + offset).clamp(max=values_BT.shape[1] - 1)]

    def runs(self, documents: Documents | None) -> list[Run]:
        """The runs, row by row. None crosses into the next document, since its first token is in no span."""
        if self.known_runs is not None:
            return list(self.known_runs)
        index, counts = self.index.cpu(), (self.depth > 0).cpu()
        begins = counts.clone()
        begins[:, 1:] &= ~counts[:, :-1] | (index[:, 1:] != index[:, :-1] + 1)
        ends = counts.clone()
        ends[:, :-1] &= ~counts[:, 1:] | begins[:, 1:]
        rows, firsts = begins.nonzero(as_tuple=True)
        before = index[rows, firsts]
        start = torch.zeros_like(before) if documents is None else documents.first().cpu()[rows, before]
        ends_at = ends.nonzero(as_tuple=True)[1] + 1
        numbers = (values.tolist() for values in (rows, firsts, ends_at, start, before))
        return [Run(*values) for values in zip(*numbers, strict=True)]


def remaining_in_span(span_BT: torch.Tensor) -> torch.Tensor:
    """[B, T] number of tokens to the end of the span, the position's included; 0 outside spans. `span_BT` is 0 there,
    too, and else a number that differs between touching spans."""
    length = span_BT.shape[1]
    position = torch.arange(length, device=span_BT.device).expand_as(span_BT)
    ends_here = torch.ones_like(span_BT, dtype=torch.bool)
    ends_here[:, :-1] = span_BT[:, :-1] != span_BT[:, 1:]
    last = torch.where(ends_here, position, length)
    last = last.flip(1).cummin(dim=1).values.flip(1)  # [B, T] last position of the run that each position is in
    return torch.where(span_BT > 0, last - position + 1, 0)


def columns_of(span_BT: torch.Tensor, steps: int) -> Columns:
    """The counted columns of a batch for an unroll of `steps` steps.

    Column t counts at step k iff remaining[t + 1] >= k + 2, so its depth is remaining[t + 1] - 1, at most `steps`.
    `span_BT` is 0 at the first token of every document that shares a row.
    """
    remaining = remaining_in_span(span_BT)
    depth_BT = torch.zeros_like(remaining)
    depth_BT[:, :-1] = (remaining[:, 1:] - 1).clamp(0, steps)
    counts = (depth_BT > 0).sum(1)
    width = int(counts.max()) if len(counts) else 0
    # Stable sort moves counted columns to the front of each row and keeps their order.
    order = (depth_BT == 0).long().argsort(dim=1, stable=True)[:, :width]  # [B, C]
    depth = depth_BT.gather(1, order)
    return Columns(index=torch.where(depth > 0, order, 0), depth=depth)
