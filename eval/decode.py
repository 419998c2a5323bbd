"""The decoding loop: draft a tree, verify it in one forward, accept a path, commit it. B answers side by side.

    prefill the prompt  -> first token (the target's)
    round:  observe     target states of what was committed go to the proposer
            propose     a tree below the last token, the root
            verify      one target forward over all nodes
            accept      the longest right path + one bonus token of the target (`eval.accept`)
            commit      the path stays in the cache, the bonus becomes the next root

Plain decoding is the same loop with a root alone. Accepted positions always reach the drafter with the target's own
states, never with drafted ones. A round waits for the device once, for its tokens; policies that grow trees by what
they see wait for their own tests besides (`eval.policies`), and a causal LM looks its drafted tokens up on the host.

Who verifies is a `Verifier`: the target (`TargetVerifier`), or its recorded answer (`eval.replay`).
"""

import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from draftsmith.eval.accept import accept_greedy, accept_sampled
from draftsmith.models.draft_tree import DraftTree, Proposer
from draftsmith.models.sampling import GREEDY, Draws, Sampling
from draftsmith.models.target import Target


@dataclass
class Generation:
    """One decoded answer and what it took. Times are in seconds and exclude the prefill, except `prefill_seconds`.

    The time of a round is shared evenly by the answers that were decoded in it, so that sums over answers are time that
    passed.
    """

    prompt_token_ids: list[int]
    token_ids: list[int]  # stop token included, nothing after it
    accepted_per_round: list[int]  # drafted tokens that stand in token_ids, round by round
    last_round_cut: bool  # a stop token or the budget cut accepted tokens, or the bonus, off the last round
    tree_nodes: list[int] = field(default_factory=list)  # verified nodes of each round, root included
    draft_calls: list[int] = field(default_factory=list)
    prefill_seconds: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    decode_seconds: float = 0.0
    # Whose turn this was; turns of one conversation are not independent.
    benchmark: str = ""
    category: str | None = None
    conversation_id: str = ""
    turn: int = 1  # of its conversation, from 1

    @property
    def rounds(self) -> int:
        return len(self.accepted_per_round)


@dataclass(frozen=True)
class Round:
    """What one round gave, on the host."""

    new_tokens: list[list[int]]  # of each row: the accepted drafted tokens and the bonus
    nodes: list[int]  # of each row's tree


class Verifier(Protocol):
    """Says which drafted tokens are the target's, and hands its states to the proposer."""

    device: torch.device
    features: torch.Tensor | None  # [B, n, F] states of what was read or committed last, row b's in its first counts[b]
    counts: list[int]

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        """Reads the prompts: the first token of each answer."""
        ...

    def limits(self) -> list[int]:
        """How deep the tree of each row may be."""
        ...

    def verify(self, tree: DraftTree) -> None:
        """The target's forward over all nodes."""

    def accept(self, tree: DraftTree) -> Round:
        """Commits a path of each tree that was verified."""
        ...

    def keep(self, rows: Sequence[int]) -> None:
        """Goes on with these rows alone, in this order."""


class TargetVerifier:
    """The target itself.

    Args:
        capture: layers whose states the proposer reads.
        draws: the random numbers of each row; needed unless `sampling` is greedy.
    """

    def __init__(
        self, target: Target, capture: Sequence[int], sampling: Sampling = GREEDY, draws: Sequence[Draws] | None = None
    ):
        if draws is None and not sampling.greedy:
            raise ValueError("sampling needs draws: models.sampling.SeededDraws(seed, key)")
        self.device = target.device
        self.session = target.session(capture)
        self.sampling, self.draws = sampling, None if sampling.greedy or draws is None else list(draws)
        self.positions: int = target.config.max_position_embeddings
        self.logits = torch.empty(0)
        self.features: torch.Tensor | None = None
        self.counts: list[int] = []

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        logits_BV, self.features = self.session.prefill(prompts)
        self.counts = [len(prompt) for prompt in prompts]
        if self.draws is None:
            return logits_BV.argmax(-1).tolist()
        p_BV = self.sampling.probabilities(logits_BV)
        return [int(draw.token(p_V)) for draw, p_V in zip(self.draws, p_BV, strict=True)]

    def limits(self) -> list[int]:
        # A node of depth d stands at position length + d.
        return [max(0, self.positions - 1 - length) for length in self.session.lengths]

    def verify(self, tree: DraftTree) -> None:
        self.logits, self.features = self.session.verify(tree)

    def accept(self, tree: DraftTree) -> Round:
        if self.draws is None:
            accepted = accept_greedy(tree, self.logits)
        else:
            accepted = accept_sampled(tree, self.logits, self.sampling, self.draws)
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
        return Round(
            [[*tokens[1:length], bonus] for length, _, bonus, *tokens in rows],
            [tree.nodes if tree.sizes is None else size for _, size, *_ in rows],
        )

    def keep(self, rows: Sequence[int]) -> None:
        self.session.keep(rows)
        self.counts = [self.counts[row] for row in rows]
        if self.draws is not None:
            self.draws = [self.draws[row] for row in rows]
        if self.features is not None:
            self.features = self.features[torch.tensor(rows, device=self.device)][:, : max(self.counts)]


def decode(
    target: Target,
    proposer: Proposer | None,
    prompt_token_ids: Sequence[int],
    stop_ids: Collection[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    draws: Draws | None = None,
) -> Generation:
    """One answer; see `decode_batch`."""
    rows = None if draws is None else [draws]
    return decode_batch(target, proposer, [prompt_token_ids], stop_ids, max_new_tokens, sampling, rows)[0]


def decode_batch(
    target: Target,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    stop_ids: Collection[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    draws: Sequence[Draws] | None = None,
) -> list[Generation]:
    """One answer to each prompt, decoded side by side, with `proposer` drafting or plain where it is None.

    Greedy tokens are those of plain greedy decoding whatever the proposer drafts (exactly in float32; in lower
    precision as far as the target's forward over several tokens rounds like the one over a single token). Sampled
    tokens have the law of plain sampling; which ones they are hangs on `draws` and on what was drafted.

    Args:
        draws: the random numbers of each answer; needed unless `sampling` is greedy.

    Raises:
        ValueError: nothing to decode, or more than the target has positions for.
    """
    if not prompts or not all(prompts) or max_new_tokens < 1:
        raise ValueError("decoding needs prompts of one token or more, and max_new_tokens of 1 or more")
    if draws is not None and len(draws) != len(prompts):
        raise ValueError(f"{len(draws)} sets of draws for {len(prompts)} prompts")
    positions, longest = target.config.max_position_embeddings, max(map(len, prompts))
    if longest + max_new_tokens > positions:
        raise ValueError(
            f"{longest} prompt tokens and {max_new_tokens} new ones exceed the target's {positions} positions"
        )
    capture = () if proposer is None else proposer.capture_layers
    verifier = TargetVerifier(target, capture, sampling, draws)
    with torch.inference_mode():  # small models on a CPU gain a tenth over no_grad; nothing made inside is kept
        return run_rounds(verifier, proposer, prompts, stop_ids, max_new_tokens, draws)


def run_rounds(
    verifier: Verifier,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    stop_ids: Collection[int],
    max_new_tokens: int | Sequence[int],
    draws: Sequence[Draws] | None = None,
) -> list[Generation]:
    """The loop itself; answers that end drop out, the others go on.

    Args:
        max_new_tokens: of every answer, or of each.
    """
    budgets = [max_new_tokens] * len(prompts) if isinstance(max_new_tokens, int) else list(max_new_tokens)
    clock = Clock(verifier.device)
    began = clock.mark()
    first = verifier.prefill(prompts)
    read = clock.mark()
    answers = [
        Generation(list(prompt), [token], [], last_round_cut=False)
        for prompt, token in zip(prompts, first, strict=True)
    ]
    if proposer is not None:
        proposer.reset(len(prompts), draws)
    live = list(answers)
    committed = [[*answer.prompt_token_ids, *answer.token_ids] for answer in answers]
    rounds: list[tuple[list[Generation], list[Mark]]] = []  # who decoded, and when its parts began and ended
    ended = clock.mark()
    while True:
        going = [
            i
            for i, answer in enumerate(live)
            if answer.token_ids[-1] not in stop_ids and len(answer.token_ids) < budgets[i]
        ]
        if not going:
            break
        if len(going) < len(live):
            live, committed = [live[i] for i in going], [committed[i] for i in going]
            budgets = [budgets[i] for i in going]
            verifier.keep(going)
            if proposer is not None:
                proposer.keep(going)
        marks = [ended, clock.mark()]
        if proposer is None:
            tree, calls = DraftTree.root_only([tokens[-1] for tokens in committed], verifier.device), [0] * len(live)
        else:
            proposer.observe(committed, verifier.features, verifier.counts)
            tree, calls = proposer.propose()
        tree = tree.pruned(verifier.limits())
        marks.append(clock.mark())
        verifier.verify(tree)
        marks.append(clock.mark())
        done = verifier.accept(tree)
        for answer, budget, tokens, text, nodes, call_count in zip(
            live, budgets, done.new_tokens, committed, done.nodes, calls, strict=True
        ):
            text.extend(tokens)
            kept = cut(tokens, stop_ids, budget - len(answer.token_ids))
            answer.token_ids.extend(tokens[:kept])
            answer.accepted_per_round.append(min(kept, len(tokens) - 1))
            answer.last_round_cut = kept < len(tokens)
            answer.tree_nodes.append(nodes)
            answer.draft_calls.append(call_count)
        ended = clock.mark()
        rounds.append((live, [*marks, ended]))
    for answer in answers:
        answer.prefill_seconds = clock.seconds(began, read) / len(answers)
    for live, marks in rounds:
        _, draft, verify, _ = (clock.seconds(a, b) / len(live) for a, b in itertools.pairwise(marks))
        for answer in live:
            answer.draft_seconds += draft
            answer.verify_seconds += verify
            answer.decode_seconds += clock.seconds(marks[0], marks[-1]) / len(live)
    return answers


def cut(new_tokens: Sequence[int], stop_ids: Collection[int], budget: int) -> int:
    """How many of a round's tokens count: up to the first stop token, itself included, and within the budget."""
    stop = next((i + 1 for i, token in enumerate(new_tokens) if token in stop_ids), len(new_tokens))
    return min(stop, budget)


Mark = float | torch.Event


class Clock:
    """Marks in the course of the work, and the seconds between them.

    On an accelerator a mark is an event in its queue: work is charged where it was asked for, and the host goes on
    without waiting.
    """

    def __init__(self, device: torch.device):
        self.device = device

    def mark(self) -> Mark:
        if self.device.type == "cpu":
            return time.perf_counter()
        event = torch.Event(self.device, enable_timing=True)
        event.record()
        return event

    @staticmethod
    def seconds(first: Mark, second: Mark) -> float:
        """Waits until the device has passed both."""
        if isinstance(first, torch.Event) and isinstance(second, torch.Event):
            second.synchronize()
            return first.elapsed_time(second) / 1000
        assert not isinstance(first, torch.Event) and not isinstance(second, torch.Event)
        return second - first
