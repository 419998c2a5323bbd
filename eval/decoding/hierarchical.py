"""The hierarchy of SpecMQuant (arXiv 2505.22179, section 5): a drafter drafts for a small model, which drafts for the
target.

A tree of many nodes is dear to verify where the target's weights are quantised. So a small or more strongly quantised
model with a drafter of its own decodes a few rounds, and the target verifies their tokens, as one chain:

    text                   p p p p r               r the root, unread
    inner round 1                    a b           the small model accepts a of the drafter's tree; b is its own
    inner round 2                        c d e     L = 4 tokens are reached: the chain is a b c d e
    the target verifies            r a b c d e     accepts a b, writes x
    text                   p p p p r a b x         the small model keeps p p p p r a b, and has nothing to read

The chain has at least L tokens (`min_draft_length`) and at most L + R, where R is the most draft calls of an inner
round, because a round that begins with L - 1 adds at most R + 1. It depends on the text alone, so to acceptance it is
chosen by rank (q = 1). Deviations from the authors' code: batches, sampling, any policy for the drafter's trees.

Shapes: B rows, n positions, F captured states.
"""

from collections.abc import Sequence

import torch
from torch.nn.utils.rnn import pad_sequence

from draftsmith.eval.decoding.decode import TargetVerifier, run_round
from draftsmith.eval.decoding.policies import PolicyProposer
from draftsmith.models.draft_tree import Committed, DraftedBy, DraftTree
from draftsmith.models.prompt import Prompt
from draftsmith.models.sampling import Draws
from draftsmith.models.suffix_automaton import common_length
from draftsmith.models.target import Target


class HierarchicalProposer:
    """Proposes what a small model with its own proposer would write: a `models.draft_tree.Proposer`.

    Args:
        small: shares the target's vocabulary and has as many positions or more.
        inner: drafts for the small model.
        min_draft_length: L; chains are shorter only where the small model's positions end.
    """

    capture_layers: tuple[int, ...] = ()

    def __init__(self, small: Target, inner: PolicyProposer, min_draft_length: int):
        self.small, self.inner, self.min_draft_length = small, inner, min_draft_length
        self.verifier = TargetVerifier(small, inner)
        self.texts: list[list[int]] = []  # what the small model and its proposer hold, the unread root last
        # Of each row: where the last chain began, and the captured states of positions read since then; None: unknown.
        self.begun: list[int] = []
        self.states: list[list[torch.Tensor]] | None = None

    def set_rows(self, kept: Sequence[int], new: int = 0, draws: Sequence[Draws] | None = None) -> None:
        if kept:
            self.verifier.keep(kept)
        else:  # frees the small model's cache
            self.verifier = TargetVerifier(self.small, self.inner)
        self.inner.set_rows(kept)
        self.texts = [self.texts[row] for row in kept]
        if self.states is not None:
            self.begun = [self.begun[row] for row in kept]
            self.states = [self.states[row] for row in kept]

    def observe(self, committed: Committed) -> None:
        texts, known = [list(tokens) for tokens in committed.tokens], len(self.texts)
        if known:
            self._follow(texts[:known])
        if texts[known:]:
            inserts = [prompt.inserts for prompt in committed.prompts[known:]] or [()] * (len(texts) - known)
            self.verifier.prefill([Prompt(text[:-1], each) for text, each in zip(texts[known:], inserts, strict=True)])
            self.inner.set_rows(range(known), len(texts) - known)
        self.texts, self.states = texts, None

    def _follow(self, texts: Sequence[Sequence[int]]) -> None:
        """Brings the small model to these texts without their roots. Where it has read all of them in its own chains,
        it forgets the rest and reads nothing."""
        read = self.verifier.session.lengths
        shared = [common_length(*pair) for pair in zip(self.texts, texts, strict=True)]
        if self.states is not None and all(
            min(most, length) >= len(text) - 1 for most, length, text in zip(shared, read, texts, strict=True)
        ):
            self._resume([len(text) - 1 for text in texts])
            return
        # The token behind those kept is right, too, and every row has one token or more to read.
        lengths = [min(most - 1, len(text) - 2) for most, text in zip(shared, texts, strict=True)]
        self.inner.rollback(self.verifier.rollback(lengths))
        self.verifier.read([text[length:-1] for text, length in zip(texts, lengths, strict=True)])

    def _resume(self, lengths: Sequence[int]) -> None:
        """Keeps the first lengths[b] tokens, and hands the proposer the states of those that it has not observed or
        has observed beside another next token: at least the last one's."""
        verifier, states = self.verifier, self.states
        assert states is not None
        observed = [length - count for length, count in zip(verifier.session.lengths, verifier.counts, strict=True)]
        kept = [min(length - 1, seen) for length, seen in zip(lengths, observed, strict=True)]
        verifier.session.rollback(lengths)
        self.inner.rollback(kept)
        verifier.counts = [length - seen for length, seen in zip(lengths, kept, strict=True)]
        if verifier.features is not None:
            bounds = zip(states, self.begun, lengths, strict=True)
            self.states = [[torch.cat(each)[: length - begun]] for each, begun, length in bounds]
            new = [read[seen - begun :] for [read], begun, seen in zip(self.states, self.begun, kept, strict=True)]
            verifier.features = pad_sequence(new, batch_first=True)  # [B, n, F]

    def _make_room(self) -> None:
        """Takes rows that have reached the small model's last position back to the first token of their chains."""
        positions = self.verifier.positions
        if max(map(len, self.texts)) > positions:
            self.texts = [
                text if len(text) <= positions else text[: begun + 2]
                for text, begun in zip(self.texts, self.begun, strict=True)
            ]
            self._resume([len(text) - 1 for text in self.texts])

    def propose(self) -> tuple[DraftTree, list[int]]:
        """Chains, and for each the number of draft calls and of the small model's passes together."""
        verifier = self.verifier
        self.begun = list(verifier.session.lengths)
        self.states = [[] for _ in self.texts]
        roots = [len(text) - 1 for text in self.texts]
        chains: list[list[int]] = [[] for _ in self.texts]  # those that are long enough, each with its root
        calls = [0] * len(self.texts)
        accepted: list[list[int]] = [[] for _ in self.texts]
        # Rows share rounds: a row whose chain is long enough goes on, and what it adds is left out.
        while not all(chains):
            self._make_room()
            done = run_round(verifier, self.inner, self.texts)
            for row, (text, tokens) in enumerate(zip(self.texts, done.new_tokens, strict=True)):
                text += tokens
                if verifier.features is not None:
                    self.states[row].append(verifier.features[row, : verifier.counts[row]])
                if not chains[row]:
                    calls[row] += done.calls[row] + 1
                    accepted[row].append(len(tokens) - 1)
                    if len(text) > min(roots[row] + self.min_draft_length, verifier.positions):
                        chains[row] = text[roots[row] :]
        tree = DraftTree.chains(chains, verifier.device)
        tree.sources = [DraftedBy("", inner_accepted=tuple(counts)) for counts in accepted]
        return tree, calls
