"""A decoder drafts for another: a small target with its own drafter proposes chains to a larger target.

`DecoderProposer` uses public names alone: what a hierarchy of drafters needs of the loop is there.
"""

import copy
import itertools
from collections.abc import Sequence

import torch

from draftsmith.eval.decoding.decode import Request, TargetVerifier, decode_stream, run_round
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.models.draft_tree import Committed, Drafting, DraftTree, Proposer
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.sampling import Draws
from draftsmith.models.target import Target
from draftsmith.recipes.schema import TreeSection
from tests.pairs import PROMPTS, greedy, pair_of


class DecoderProposer:
    """Proposes the tokens of a few rounds of a small target with its own proposer."""

    capture_layers: tuple[int, ...] = ()

    def __init__(self, small: Target, inner: Proposer, rounds: int):
        self.inner, self.rounds = inner, rounds
        self.verifier = TargetVerifier(small, inner)
        self.texts: list[list[int]] = []  # what the small target and its proposer hold, the unread root last

    def reset(self, rows: int, draws: Sequence[Draws] | None = None) -> None:
        if self.texts:
            self.keep([])

    def admit(self, rows: int, draws: Sequence[Draws] | None = None) -> None:
        """Does nothing: `observe` reads new rows."""

    def keep(self, rows: Sequence[int]) -> None:
        self.verifier.keep(rows)
        self.inner.keep(rows)
        self.texts = [self.texts[row] for row in rows]

    def rollback(self, lengths: Sequence[int]) -> None:
        self.verifier.rollback(lengths, self.inner)
        self.texts = [text[: length + 1] for text, length in zip(self.texts, lengths, strict=True)]

    def observe(self, committed: Committed) -> None:
        texts, known = [list(tokens) for tokens in committed.tokens], len(self.texts)
        if known:
            # The token behind those kept is right, too, and every row has one token or more to read.
            pairs = list(zip(self.texts, texts[:known], strict=True))
            self.rollback([min(len(common(*pair)) - 1, len(pair[1]) - 2) for pair in pairs])
            self.verifier.read([new[len(old) - 1 : -1] for old, new in zip(self.texts, texts[:known], strict=True)])
        if texts[known:]:
            self.verifier.prefill([text[:-1] for text in texts[known:]])
            (self.inner.admit if known else self.inner.reset)(len(texts) - known)
        self.texts = texts

    def propose(self) -> tuple[DraftTree, list[int]]:
        roots = [len(text) - 1 for text in self.texts]
        for _ in range(self.rounds):
            done = run_round(self.verifier, self.inner, self.texts)
            for text, tokens in zip(self.texts, done.new_tokens, strict=True):
                text += tokens
        chains = [text[root:] for text, root in zip(self.texts, roots, strict=True)]
        return DraftTree.chains(chains, self.verifier.device), [self.rounds] * len(chains)


def common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    return [a for a, _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))]


class Recorded(PolicyProposer):
    """Keeps the tokens of each tree."""

    trees: list[list[list[int]]]

    def propose(self) -> tuple[DraftTree, list[int]]:
        tree, calls = super().propose()
        self.trees = [*getattr(self, "trees", ()), tree.tokens.tolist()]
        return tree, calls


class Recording(DecoderProposer):
    """Keeps each text, the chain proposed below it, and the trees of the rounds that made the chain."""

    def __init__(self, small: Target, drafting: Drafting):
        self.recorded = Recorded(drafting, policy_of(TreeSection(nodes=8, draft_calls=3, top_k=3)))
        super().__init__(small, self.recorded, rounds=2)
        self.proposed: list[tuple[list[int], list[int], list[list[int]]]] = []

    def propose(self) -> tuple[DraftTree, list[int]]:
        before = [list(text) for text in self.texts]
        found = super().propose()
        for row, (old, new) in enumerate(zip(before, self.texts, strict=True)):
            trees = [trees[row] for trees in self.recorded.trees[-self.rounds :]]
            self.proposed.append((old, new[len(old) :], trees))
        return found


def larger_than(small: Target) -> Target:
    """A target that mostly agrees with `small`."""
    model = copy.deepcopy(small.model)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            weight += 0.008 * weight.abs().mean() * torch.randn(weight.shape, generator=generator)
    return Target(model, small.capture_layers)


def test_a_small_target_with_its_drafter_proposes_to_a_larger_one() -> None:
    small, drafter = pair_of("llama")
    large = larger_than(small)

    decoder = Recording(small, FeatureDrafting(drafter))
    budgets = (36, 9, 30, 30)  # the second ends early, and the fourth takes its row
    requests = [Request(i, prompt, budgets[i]) for i, prompt in enumerate(PROMPTS)]
    with torch.inference_mode():
        answers = dict(decode_stream(TargetVerifier(large, decoder), decoder, iter(requests), (), 3))
    for i, prompt in enumerate(PROMPTS):
        assert answers[i].token_ids == greedy(large, prompt, budgets[i])
    accepted = [count for answer in answers.values() for count in answer.accepted_per_round[:-1]]
    assert 0 in accepted and max(accepted) > 3  # it drafts wrong and right tokens
    for text, chain, trees in decoder.proposed:
        # The small target's own tokens, and the trees of a drafter that was never rolled back.
        assert chain == greedy(small, text, len(chain))
        alone = Recording(small, FeatureDrafting(drafter))
        alone.reset(1)
        alone.observe(Committed(large, [text], None, [len(text) - 1]))
        alone.propose()
        assert alone.proposed == [(text, chain, trees)]
    assert len({len(chain) for _, chain, _ in decoder.proposed}) > 1
