"""The decoding loop: draft a tree, verify it in one forward, accept a path, commit it.

    prefill the prompt  -> first token (the target's)
    round:  observe     target states of what was committed go to the proposer
            propose     a tree below the last token, the root
            verify      one target forward over all nodes
            accept      the longest right path + one bonus token of the target (`eval.accept`)
            commit      the path stays in the cache, the bonus becomes the next root

Plain decoding is the same loop with a root alone. Accepted positions always reach the drafter with the target's own
states, never with drafted ones.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import torch

from draftsmith.eval.accept import accept_greedy, accept_sampled
from draftsmith.models.draft_tree import DraftTree, Proposer
from draftsmith.models.sampling import GREEDY, Draws, Sampling
from draftsmith.models.target import Target


@dataclass
class Generation:
    """One decoded answer and what it took. Times are in seconds and exclude the prefill, except `prefill_seconds`."""

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


def decode(
    target: Target,
    proposer: Proposer | None,
    prompt_token_ids: Sequence[int],
    stop_ids: Collection[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    draws: Draws | None = None,
) -> Generation:
    """One answer, with `proposer` drafting or plain where it is None.

    Greedy tokens are those of plain greedy decoding whatever the proposer drafts (exactly in float32; in lower
    precision as far as the target's forward over several tokens rounds like the one over a single token). Sampled
    tokens have the law of plain sampling; which ones they are hangs on `draws` and on what was drafted.

    Args:
        draws: the random numbers of this answer; needed unless `sampling` is greedy.
    """
    if draws is None and not sampling.greedy:
        raise ValueError("sampling needs draws: models.sampling.SeededDraws(seed, key)")
    session = target.session(capture=proposer is not None and proposer.reads_features)
    clock = _Clock(target.device)
    logits, features = session.prefill(torch.tensor(prompt_token_ids, device=target.device))
    first = logits.argmax() if draws is None or sampling.greedy else draws.token(sampling.probabilities(logits))
    out = Generation(list(prompt_token_ids), [int(first)], [], last_round_cut=False)
    out.prefill_seconds = clock.lap()
    if proposer is not None:
        proposer.reset(draws)
    committed = [*prompt_token_ids, out.token_ids[0]]
    began = time.perf_counter()
    while out.token_ids[-1] not in stop_ids and len(out.token_ids) < max_new_tokens:
        clock.lap()
        root = committed[-1]
        if proposer is None:
            tree, calls = DraftTree.root_only(root, target.device), 0
        else:
            proposer.observe(committed, features)
            tree, calls = proposer.propose(root)
        out.draft_seconds += clock.lap()
        logits_NV, node_features = session.verify(tree)
        out.verify_seconds += clock.lap()

        if draws is None or sampling.greedy:
            path, bonus = accept_greedy(tree, logits_NV)
        else:
            path, bonus = accept_sampled(tree, logits_NV, sampling, draws)
        session.commit(path)
        features = None if node_features is None else node_features[path]
        new_tokens = torch.cat((tree.tokens[path[1:]], bonus[None])).tolist()
        committed.extend(new_tokens)

        kept = cut(new_tokens, stop_ids, max_new_tokens - len(out.token_ids))
        out.token_ids.extend(new_tokens[:kept])
        out.accepted_per_round.append(min(kept, len(new_tokens) - 1))
        out.last_round_cut = kept < len(new_tokens)
        out.tree_nodes.append(len(tree))
        out.draft_calls.append(calls)
    clock.lap()
    out.decode_seconds = time.perf_counter() - began
    return out


def cut(new_tokens: Sequence[int], stop_ids: Collection[int], budget: int) -> int:
    """How many of a round's tokens count: up to the first stop token, itself included, and within the budget."""
    stop = next((i + 1 for i, token in enumerate(new_tokens) if token in stop_ids), len(new_tokens))
    return min(stop, budget)


class _Clock:
    """Seconds between laps, with the accelerator's queue drained so that work is charged where it was asked for."""

    def __init__(self, device: torch.device):
        self.device = device
        self.last = time.perf_counter()

    def lap(self) -> float:
        if self.device.type != "cpu":
            torch.accelerator.synchronize(self.device)
        now = time.perf_counter()
        passed, self.last = now - self.last, now
        return passed
