"""The decoding loop: draft a tree, verify it in one forward, accept a path, commit it. B answers side by side.

    prefill the prompt  -> first token (the target's)
    round:  observe     target states of what was committed go to the proposer
            propose     a tree below the last token, the root
            verify      one target forward over all nodes
            accept      the longest right path + one bonus token of the target (`eval.decoding.accept`)
            commit      the path stays in the cache, the bonus becomes the next root

Plain decoding is the same loop with a root alone. Accepted positions always reach the drafter with the target's own
states, never with drafted ones. New prompts take the rows of answers that ended (`decode_stream`). A round waits for
the device once, for its tokens; only stopping tests, sampling from trees, relaxed acceptance, SAM beside a drafter and
causal LMs wait for more.
"""

import itertools
import time
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch.nn.utils.rnn import pad_sequence

from draftsmith.eval.decoding.accept import Acceptance, GreedyAcceptance
from draftsmith.models.draft_tree import Committed, DraftTree, Proposer
from draftsmith.models.families import usable_positions
from draftsmith.models.prompt import Prompt
from draftsmith.models.sampling import Draws
from draftsmith.models.target import Target

GREEDY_ACCEPTANCE = GreedyAcceptance()


@dataclass
class Generation:
    """One decoded answer and its cost. Times are in seconds and exclude the prefill, except `prefill_seconds`.

    Answers decoded in the same round share its time evenly, so sums over answers are elapsed time.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]  # stop token included, nothing after it
    accepted_per_round: list[int]  # drafted tokens in token_ids, round by round
    last_round_cut: bool  # a stop token or the budget cut accepted tokens, or the bonus, off the last round
    tree_nodes: list[int] = field(default_factory=list)  # verified nodes of each round, root included
    draft_calls: list[int] = field(default_factory=list)  # forward passes of the drafter in each round
    tried: list[int] = field(default_factory=list)  # draft positions that each round tried
    # Accepted tokens of each round by who drafted them, of proposers with several sources (`DraftedBy`).
    drafted_by: list[dict[str, int]] = field(default_factory=list)
    # Of a hierarchy: drafted tokens that the small model accepted, in each of its rounds.
    inner_accepted: list[int] = field(default_factory=list)
    # Of a relaxed rule: probability moved onto drafted tokens, summed over each round's tokens (`Accepted.moved`).
    moved: list[float] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_seconds: float = 0.0
    # The turn that this answers. Turns of one conversation are not independent.
    benchmark: str = ""
    category: str | None = None
    conversation_id: str = ""
    turn: int = 1  # of its conversation, from 1
    pictures: list[dict[str, str]] = field(default_factory=list)  # of the prompt, in order: `path` and `sha256`
    image: dict[str, str] = field(default_factory=dict)  # that the answer's tokens make, likewise; empty: none

    @property
    def rounds(self) -> int:
        return len(self.accepted_per_round)


@dataclass(frozen=True)
class Verified:
    """What is accepted of verified trees, on the host."""

    new_tokens: list[list[int]]  # of each row: the accepted drafted tokens and the bonus
    nodes: list[int]  # of each row's tree
    moved: list[list[float]] | None = None  # of each new token, by a relaxed rule (`Accepted.moved`)


@dataclass(frozen=True)
class Round(Verified):
    """One round of all rows."""

    tree: DraftTree = field(kw_only=True)
    calls: list[int] = field(kw_only=True)  # draft calls of each row
    # When drafting, verifying and accepting began; plain decoding's drafting takes no time.
    marks: "list[Mark]" = field(kw_only=True)


class Verifier(Protocol):
    """Decides which drafted tokens are the target's, and hands the target's states to the proposer: the target
    (`TargetVerifier`) or a recorded answer (`eval.replay.replay`)."""

    device: torch.device
    positions: int  # of the target

    def prefill(self, prompts: Sequence[Sequence[int]], draws: Sequence[Draws] | None = None) -> list[int]:
        """Appends a row for each prompt and returns the first token of each answer. `draws`: each row's."""
        ...

    def committed(self, tokens: Sequence[Sequence[int]]) -> Committed:
        """What was read or committed since the last round. `tokens`: all of each row, the unread root last."""
        ...

    def verify(self, tree: DraftTree) -> None:
        """Runs the target over all nodes."""

    def accept(self, tree: DraftTree) -> Verified:
        """Commits a path of each verified tree."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps only these rows, in this order."""


class TargetVerifier:
    """Verifies with the target model. A decoder can be a proposer: `run_round`, then `rollback` and `read`.

    Args:
        proposer: whose `capture_layers` are captured.
        prefill_tokens: as `TargetSession.prefill` takes `at_once`.
    """

    def __init__(
        self,
        target: Target,
        proposer: Proposer | None,
        acceptance: Acceptance = GREEDY_ACCEPTANCE,
        prefill_tokens: int = 0,
    ):
        self.device = target.device
        self.session = target.session(() if proposer is None else proposer.capture_layers)
        self.acceptance, self.prefill_tokens = acceptance, prefill_tokens
        self.draws: list[Draws] = []  # of each row, if given
        self.positions: int = usable_positions(target.config)
        self.logits = torch.empty(0)
        self.prompts: list[Prompt] = []
        # [B, n, F] states of the last read or committed positions; row b uses its first counts[b]
        self.features: torch.Tensor | None = None
        self.counts: list[int] = []

    def prefill(self, prompts: Sequence[Sequence[int]], draws: Sequence[Draws] | None = None) -> list[int]:
        logits_BV, features = self.session.prefill(prompts, at_once=self.prefill_tokens)
        first = self.acceptance.first(logits_BV, draws).tolist()
        if self.counts and self.features is not None and features is not None:
            features = pad_sequence([*self.features, *features], batch_first=True)
        self.features = features
        self.prompts += map(Prompt.of, prompts)
        self.counts = [*self.counts, *map(len, prompts)]
        self.draws = [*self.draws, *(draws or ())]
        return first

    def committed(self, tokens: Sequence[Sequence[int]]) -> Committed:
        return Committed(self.session.target, tokens, self.features, self.counts, self.prompts)

    def verify(self, tree: DraftTree) -> None:
        self.logits, self.features = self.session.verify(tree)

    def accept(self, tree: DraftTree) -> Verified:
        accepted = self.acceptance.accept(tree, self.logits, self.draws)
        sizes = accepted.length if tree.sizes is None else tree.sizes
        on_path = tree.tokens if accepted.path is None else tree.tokens.gather(1, accepted.path)
        numbers = torch.cat((torch.stack((accepted.length, sizes, accepted.bonus), dim=1), on_path), dim=1)
        rows = numbers.tolist()  # the one wait for the device in a round
        self.counts = [length for length, *_ in rows]
        self.session.commit(self.counts, accepted.path)
        if self.features is not None:
            most = max(self.counts)
            if accepted.path is None:
                self.features = self.features[:, :most]
            else:
                rows_B1 = torch.arange(tree.rows, device=self.device)[:, None]
                self.features = self.features[rows_B1, accepted.path[:, :most]]
        return Verified(
            [[*tokens[1:length], bonus] for length, _, bonus, *tokens in rows],
            [tree.nodes if tree.sizes is None else size for _, size, *_ in rows],
            None if accepted.moved is None else accepted.moved.tolist(),
        )

    def rollback(self, lengths: Sequence[int]) -> list[int]:
        """Keeps the first lengths[b] tokens that were read of each row. Returns how many the proposer has observed of
        these. Before the next round, `read` must bring every row at least one token: the one behind those kept.

        Raises:
            ValueError: a row has fewer tokens, or there are more or fewer rows.
        """
        observed = [length - count for length, count in zip(self.session.lengths, self.counts, strict=True)]
        self.session.rollback(lengths)
        self.counts = [max(0, length - seen) for length, seen in zip(lengths, observed, strict=True)]
        return [min(pair) for pair in zip(lengths, observed, strict=True)]

    def read(self, tokens: Sequence[Sequence[int]]) -> None:
        """Reads tokens behind each row's, between rounds; the next round hands their states to the proposer."""
        _, features = self.session.read(tokens)
        new = list(map(len, tokens))
        if self.features is not None and features is not None:
            pairs = zip(self.features, self.counts, features, new, strict=True)
            rows = [torch.cat((before[:count], states[:length])) for before, count, states, length in pairs]
            self.features = pad_sequence(rows, batch_first=True)
        self.counts = [count + length for count, length in zip(self.counts, new, strict=True)]

    def keep(self, rows: Sequence[int]) -> None:
        self.session.keep(rows)
        self.counts = [self.counts[row] for row in rows]
        self.prompts = [self.prompts[row] for row in rows]
        if self.draws:
            self.draws = [self.draws[row] for row in rows]
        if self.features is not None:
            index = torch.tensor(rows, dtype=torch.long, device=self.device)
            self.features = self.features[index][:, : max(self.counts, default=0)]


def run_round(
    verifier: Verifier,
    proposer: Proposer | None,
    texts: Sequence[Sequence[int]],
    mark: "Callable[[], Mark]" = time.perf_counter,
) -> Round:
    """Observes, proposes, verifies and accepts, once. The caller appends the new tokens to the texts.

    Args:
        proposer: None: plain decoding.
        texts: all tokens of each row, the unread root last.
    """
    began = mark()
    if proposer is None:
        tree, calls = DraftTree.chains([tokens[-1:] for tokens in texts], verifier.device), [0] * len(texts)
    else:
        proposer.observe(verifier.committed(texts))
        tree, calls = proposer.propose()
        # A node of depth d stands at the root's position, len(text) - 1, plus d.
        tree = tree.pruned([max(0, verifier.positions - len(text)) for text in texts])
    drafted = mark()
    verifier.verify(tree)
    verified = mark()
    marks = [drafted if proposer is None else began, drafted, verified]
    return Round(**vars(verifier.accept(tree)), tree=tree, calls=calls, marks=marks)


def decode(
    verifier: Verifier,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    stop_ids: Collection[int],
    max_new_tokens: int | Sequence[int],
    draws: Sequence[Draws] | None = None,
    watch: "Watch | None" = None,
) -> list[Generation]:
    """One answer to each prompt, all decoded side by side. Arguments and errors are those of `decode_stream`.

    With a greedy `TargetVerifier` the tokens are those of plain greedy decoding, whatever the proposer drafts: exactly
    in float32; in lower precision as far as the target's forward over several tokens rounds like the one over a single
    token. Sampled tokens have the law of plain sampling; the tokens drawn depend on `draws` and on the drafts.

    Args:
        max_new_tokens: one number for all answers, or one for each.
        draws: the random numbers of each answer; needed if the acceptance samples.
    """
    budgets = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else max_new_tokens
    each = zip(prompts, budgets, draws or [None] * len(prompts), strict=True)
    requests = [Request(i, *request) for i, request in enumerate(each)]
    answers = dict(decode_stream(verifier, proposer, iter(requests), stop_ids, len(requests), watch))
    return [answers[request.key] for request in requests]


@dataclass(frozen=True)
class Request:
    """A prompt to be answered."""

    key: Hashable
    prompt: Sequence[int]
    max_new_tokens: int
    draws: Draws | None = None  # its random numbers; needed if the target samples


class _Row:
    """An answer being decoded."""

    def __init__(self, request: Request, first: int):
        self.request = request
        self.answer = Generation(list(request.prompt), [first], [], last_round_cut=False)
        self.committed = [*request.prompt, first]

    def ended(self, stop_ids: Collection[int]) -> bool:
        tokens = self.answer.token_ids
        return tokens[-1] in stop_ids or len(tokens) >= self.request.max_new_tokens

    def take(self, done: Round, row: int, stop_ids: Collection[int]) -> None:
        answer, new_tokens = self.answer, done.new_tokens[row]
        self.committed.extend(new_tokens)
        kept = count_kept(new_tokens, stop_ids, self.request.max_new_tokens - len(answer.token_ids))
        answer.token_ids.extend(new_tokens[:kept])
        accepted = min(kept, len(new_tokens) - 1)
        answer.accepted_per_round.append(accepted)
        if done.tree.sources is not None:
            source = done.tree.sources[row]
            answer.inner_accepted += source.inner_accepted
            if source.source:
                answer.drafted_by.append(source.credited(new_tokens[:accepted]))
        if done.moved is not None:
            answer.moved.append(sum(done.moved[row][:kept]))
        answer.last_round_cut = kept < len(new_tokens)
        answer.tree_nodes.append(done.nodes[row])
        answer.draft_calls.append(done.calls[row])
        longest = done.nodes[row] - 1
        answer.tried.append(longest if done.tree.tried is None else min(longest, done.tree.tried[row]))


def decode_stream(
    verifier: Verifier,
    proposer: Proposer | None,
    requests: Iterator[Request | None],
    stop_ids: Collection[int],
    rows: int,
    watch: "Watch | None" = None,
) -> Iterator[tuple[Any, Generation]]:
    """Decodes `rows` answers side by side. When a quarter of them has ended, the next requests take their rows.

    A small model on a CPU is a tenth faster if the caller is in `torch.inference_mode()`.

    Args:
        proposer: None: plain decoding.
        requests: None means "nothing now, ask again after an answer", for prompts that contain answers.
        watch: called after each round.

    Yields:
        (key, answer), each as it ends.

    Raises:
        ValueError: no rows, or more tokens than the verifier has positions.
    """
    if rows < 1:
        raise ValueError("decoding needs one row or more")
    clock = Clock(verifier.device)
    live: list[_Row] = []
    rounds: list[tuple[list[_Row], list[Mark]]] = []  # not charged yet: rows, and when the parts began and ended
    exhausted, ended = False, clock.mark()
    while True:
        if not exhausted and len(live) <= rows - max(1, rows // 4):  # prompts are read in groups
            new, exhausted = _taken(requests, rows - len(live))
            if new:
                unfinished, finished = _admit(verifier, proposer, new, len(live), stop_ids, clock)
                live = live + unfinished
                yield from ((row.request.key, row.answer) for row in finished)
                if not live:
                    continue
                ended = clock.mark()
        if not live:
            if not exhausted:
                raise RuntimeError("the requests wait for an answer, but none is being written")
            return
        done = run_round(verifier, proposer, [row.committed for row in live], clock.mark)
        for i, row in enumerate(live):
            row.take(done, i, stop_ids)
        before, ended = ended, clock.mark()
        rounds.append((live, [before, *done.marks, ended]))
        if watch is not None:
            watch(done.tree.nodes, max(done.calls), rounds[-1][1])
        kept = _compacted([not row.ended(stop_ids) for row in live])
        if len(kept) < len(live):
            _charge(clock, rounds)
            yield from ((row.request.key, row.answer) for row in live if row.ended(stop_ids))
            ended = clock.mark()  # the caller's time does not count
            live = [live[i] for i in kept]
            verifier.keep(kept)
            if proposer is not None:
                proposer.set_rows(kept)


def _taken(waiting: Iterator[Request | None], most: int) -> tuple[list[Request], bool]:
    """(the next requests, whether they are exhausted); fewer than `most` after a None."""
    new: list[Request] = []
    for one in itertools.islice(waiting, most):
        if one is None:
            return new, False
        new.append(one)
    return new, len(new) < most


def _compacted(kept: Sequence[bool]) -> list[int]:
    """Kept rows in their new order: the last ones move into the gaps, the others stay."""
    count = sum(kept)
    last = iter([i for i in range(len(kept)) if i >= count and kept[i]])
    return [i if kept[i] else next(last) for i in range(count)]


def _admit(
    verifier: Verifier,
    proposer: Proposer | None,
    new: Sequence[Request],
    before: int,
    stop_ids: Collection[int],
    clock: "Clock",
) -> tuple[list[_Row], list[_Row]]:
    """Reads new prompts as further rows. Returns (unfinished rows, rows that ended with their first token); the
    proposer never sees the latter."""
    for request in new:
        prompt_tokens, budget = len(request.prompt), request.max_new_tokens
        if prompt_tokens + budget > verifier.positions:
            raise ValueError(
                f"{prompt_tokens} prompt tokens and {budget} new ones exceed the target's {verifier.positions} "
                "positions"
            )
    began = clock.mark()
    draws = _draws_of(new)
    first = verifier.prefill([request.prompt for request in new], draws)
    read = clock.mark()
    rows = [_Row(request, token) for request, token in zip(new, first, strict=True)]
    for row in rows:
        row.answer.prefill_seconds = clock.seconds(began, read) / len(rows)
    unfinished = [row for row in rows if not row.ended(stop_ids)]
    if len(unfinished) < len(rows):
        verifier.keep([*range(before), *(before + i for i, row in enumerate(rows) if row in unfinished)])
    if proposer is not None and unfinished:
        draws = _draws_of([row.request for row in unfinished])
        proposer.set_rows(range(before), len(unfinished), draws)
    return unfinished, [row for row in rows if row not in unfinished]


def _draws_of(requests: Sequence[Request]) -> list[Draws] | None:
    """Either every request has draws or none does."""
    return [request.draws for request in requests if request.draws is not None] or None


def _charge(clock: "Clock", rounds: list[tuple[list[_Row], list["Mark"]]]) -> None:
    """Shares the time of each round among its answers; empties `rounds`."""
    for rows, marks in rounds:
        _, draft, verify, _ = (clock.seconds(a, b) / len(rows) for a, b in itertools.pairwise(marks))
        for row in rows:
            row.answer.draft_seconds += draft
            row.answer.verify_seconds += verify
            row.answer.decode_seconds += clock.seconds(marks[0], marks[-1]) / len(rows)
    rounds.clear()


def count_kept(new_tokens: Sequence[int], stop_ids: Collection[int], budget: int) -> int:
    """Number of a round's tokens up to and including the first stop token, and within the budget."""
    stop = next((i + 1 for i, token in enumerate(new_tokens) if token in stop_ids), len(new_tokens))
    return min(stop, budget)


Mark = float | torch.Event
# Nodes of the largest tree, most draft calls, and five marks: when the round before ended, when drafting, verifying and
# accepting began, and when the round ended.
Watch = Callable[[int, int, Sequence[Mark]], object]


class Clock:
    """Time marks, and the seconds between them. An accelerator's are events in its queue: the host does not wait."""

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self) -> Mark:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record(torch.accelerator.current_stream(self.device))
        return event

    @staticmethod
    def seconds(first: Mark, second: Mark) -> float:
        """Waits until the device has passed both."""
        if isinstance(first, torch.Event) and isinstance(second, torch.Event):
            second.synchronize()
            return first.elapsed_time(second) / 1000
        assert not isinstance(first, torch.Event) and not isinstance(second, torch.Event)
        return second - first
