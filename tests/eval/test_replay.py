"""Replay takes the rounds that decoding took, answer by answer; and answers of other targets are refused.

Drafters are taught the target's greedy answers almost by heart (`tests.pairs`): much is accepted, and much is not.
"""

import itertools
import random
from functools import cache
from typing import Any

import pytest
import torch

from draftsmith.eval.decoding.policies import PolicyProposer
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.eval.replay.replay import Agreement, RecordedVerifier, replay
from draftsmith.models.draft_tree import Committed, DraftTree, Proposer
from draftsmith.models.eagle3 import Eagle3Drafter
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.sampling import Sampling, SeededDraws
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from tests import reference
from tests.conftest import make_target
from tests.decoding import decode, decode_batch
from tests.pairs import greedy, pair_of, taught
from tests.replay_cases import (
    BUDGET,
    FAMILIES,
    POLICIES,
    PROMPTS,
    accepted_by,
    assert_same_rounds,
    policy,
    proposer_of,
    recorded,
    stops_of,
)
from tests.scripted_drafting import unasked_target
from tests.thinning import a_few

EVERYTHING = list(itertools.product(FAMILIES, [*POLICIES, "c2t", "causal_lm"]))


@pytest.mark.parametrize(("family", "name"), a_few(EVERYTHING, ("llama", "eagle2"), ("llama", "causal_lm")))
def test_replaying_what_was_decoded_takes_the_same_rounds(family: str, name: str) -> None:
    """With stops in the middle, budgets, and however many answers stand side by side."""
    target, _ = pair_of(family, None, **FAMILIES[family])
    proposer = proposer_of(family, name)
    budgets = [BUDGET - 3 * i for i in range(len(PROMPTS))]
    stops = stops_of(family)
    decoded = [decode(target, proposer, prompt, stops, most) for prompt, most in zip(PROMPTS, budgets, strict=True)]
    assert accepted_by(decoded) > 20
    assert 2 <= sum(g.token_ids[-1] in stops for g in decoded) <= 5
    for batch_size in (1, 3, 7):
        replayed = replay(target, proposer, recorded(decoded), batch_size, Agreement.of(target))
        assert_same_rounds(replayed, decoded)
        assert all(g.decode_seconds == g.prefill_seconds == 0 for g in replayed)


def test_every_way_to_end_is_met() -> None:
    """Cut by a stop token or the budget, in the middle of a path or behind it; ended by the bonus; without a round."""
    target, _ = pair_of("llama", None)
    proposer = proposer_of("llama", "chain")
    future, met = greedy(target, PROMPTS[0], 14), set()
    for stop, budget in [(-1, budget) for budget in range(1, 13)] + [(stop, 14) for stop in future[:12]]:
        decoded = decode(target, proposer, PROMPTS[0], {stop}, budget)
        assert_same_rounds(replay(target, proposer, recorded([decoded]), 1), [decoded])
        by_stop = decoded.token_ids[-1] == stop
        met.add((by_stop, decoded.last_round_cut, decoded.accepted_per_round[-1] > 0) if decoded.rounds else by_stop)
    assert met >= {True, False, *((by, cut, True) for by in (True, False) for cut in (True, False))}


FEW = 24  # tokens: where there are few, guesses are often right
FEW_PROMPTS = tuple([token % FEW for token in prompt] for prompt in PROMPTS)


@cache
def small_pair() -> tuple[Target, Eagle3Drafter]:
    target = Target(make_target(vocab_size=FEW))
    return target, taught(target, DraftVocab.full(FEW), FEW_PROMPTS[:4])


def test_prompt_lookup_takes_the_same_rounds() -> None:
    target = Target(make_target(vocab_size=FEW))
    lookup = PromptLookup(5, target.device)
    decoded = [decode(target, lookup, prompt, {4}, BUDGET) for prompt in FEW_PROMPTS]
    assert accepted_by(decoded) > 10
    assert_same_rounds(replay(target, lookup, recorded(decoded), 3), decoded)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "temperature"),
    a_few(
        itertools.product(["chain", "static", "eagle2", "svip_tree", "c2t", "prompt lookup"], [0.6, 1.0]),
        ("eagle2", 0.6),
    ),
)
def test_drawn_answers_take_the_same_rounds(name: str, temperature: float) -> None:
    """Trees chosen by rank: a token that was drawn after all children were rejected is none of them."""
    target, drafter = small_pair()
    proposer: Proposer = PromptLookup(5, target.device)
    if name != "prompt lookup":
        proposer = PolicyProposer(FeatureDrafting(drafter), policy(name))
    sampling = Sampling(temperature, top_p=0.95, top_k=12)
    decoded = []
    for stop in (4, -1, -1):
        draws = [SeededDraws(stop, len(decoded) + i) for i in range(len(FEW_PROMPTS))]
        decoded += decode_batch(target, proposer, FEW_PROMPTS, {stop}, BUDGET, sampling, draws)
    assert accepted_by(decoded) > (20 if name == "prompt lookup" else 40)
    assert sum(count == 0 for g in decoded for count in g.accepted_per_round) > 20
    assert len({tuple(g.token_ids) for g in decoded}) > len(PROMPTS)
    for batch_size in (1, 3, 7):
        assert_same_rounds(replay(target, proposer, recorded(decoded, sampling), batch_size), decoded)


def test_rounds_are_those_of_a_walk_by_hand() -> None:
    """Any answers, right and wrong ones: a fresh proposer reads the whole text before every root."""
    target, drafter = pair_of("qwen3", None, **FAMILIES["qwen3"])
    chance = random.Random(2)
    answers = []
    for prompt in PROMPTS:
        answer = greedy(target, prompt, chance.randint(2, 30))
        for _ in range(chance.randint(0, 3)):
            answer[chance.randrange(len(answer))] = chance.randrange(320)
        answers.append(RecordedAnswer(prompt, answer))
    replayed = replay(target, PolicyProposer(FeatureDrafting(drafter), policy("c2t")), answers, 4)
    for answer, mine in zip(answers, replayed, strict=True):
        text = [*answer.prompt, *answer.tokens]
        captured = target.states(torch.tensor([text])).captured

        def tree_below(read: int, text: list[int] = text, captured: torch.Tensor = captured) -> Any:
            """Tokens and parents of the tree below the last of `read` tokens."""
            fresh = PolicyProposer(FeatureDrafting(drafter), policy("c2t"))
            fresh.set_rows([], 1)
            fresh.observe(Committed(target, [text[:read]], captured[:, : read - 1], [read - 1]))
            tree, _ = fresh.propose()
            return tree.tokens[0].tolist(), tree.parents[0].tolist()

        accepted, cut = reference.replayed(tree_below, len(answer.prompt), text)
        assert (mine.accepted_per_round, mine.last_round_cut) == (accepted, cut)


def test_acceptance_by_hand() -> None:
    """Padding, siblings, wrong turnings, and trees that go beyond the end of an answer."""
    answers = [RecordedAnswer([1], [5, 6, 7, 8]), RecordedAnswer([1, 2], [5, 9]), RecordedAnswer([3], [5, 6, 7])]
    verifier = RecordedVerifier(answers, None, unasked_target(100))
    assert verifier.prefill([answer.prompt for answer in answers]) == [5, 5, 5]
    assert verifier.limits() == [98, 97, 98]
    tree = DraftTree(
        torch.tensor([[5, 4, 6, 7, 7, 8], [5, 9, 1, 0, 0, 0], [5, 6, 2, 7, 1, 6]]),
        torch.tensor([[-1, 0, 0, 1, 2, 3], [-1, 0, 1, 0, 0, 0], [-1, 0, 0, 1, 3, 4]]),
        depth=4,
        sizes=torch.tensor([6, 3, 6]),
    )
    done = verifier.accept(tree)
    # Below 4, which is wrong, 7 and 8 are not: 6, 7 and the bonus 8. All that is left (9; 6, 7): no bonus is recorded.
    assert done.new_tokens == [[6, 7, 8], [9, -1], [6, 7, -1]]
    assert done.nodes == [6, 3, 6]
    assert verifier.counts == [3, 2, 3]
    # Beyond the end nothing is right, not even the last token again.
    answers = [RecordedAnswer([1], [5, 6]), RecordedAnswer([1], [5, 6, 6, 6, 6])]
    verifier = RecordedVerifier(answers, None, unasked_target(100))
    verifier.prefill([answer.prompt for answer in answers])
    chain = DraftTree.chains([[5, 6, 6, 6, 6, 6]] * 2, torch.device("cpu"))
    assert verifier.accept(chain).new_tokens == [[6, -1], [6, 6, 6, 6, -1]]


def test_states_are_handed_over_once_and_are_the_target_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every committed position, in the order of its row, also where passes and rows are cut."""
    monkeypatch.setattr("draftsmith.eval.replay.replay.pass_tokens", lambda device: 50)
    target, _ = pair_of("gemma2", None, **FAMILIES["gemma2"])
    answers = [RecordedAnswer(prompt, greedy(target, prompt, 5 + 3 * i)) for i, prompt in enumerate(PROMPTS)]
    read: dict[tuple[int, ...], torch.Tensor] = {}  # by the text so far

    class Watching(PromptLookup):
        capture_layers: tuple[int, ...] = (1, 4)

        def observe(self, committed: Committed) -> None:
            super().observe(committed)
            assert committed.features is not None
            for tokens, states, count in zip(committed.tokens, committed.features, committed.counts, strict=True):
                before = read.pop(tuple(tokens[: len(tokens) - count]), torch.zeros(0, states.shape[1]))
                read[tuple(tokens)] = torch.cat((before, states[:count]))
                assert len(read[tuple(tokens)]) == len(tokens) - 1

    replay(target, Watching(4, target.device), answers, 7)
    assert len(read) == len(answers)
    for text, seen in read.items():
        [whole] = [each for a in answers if (each := (*a.prompt, *a.tokens))[: len(text)] == text]
        expected = target.states(torch.tensor([whole]), (1, 4)).captured[0, : len(seen)]
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
        assert len(seen) >= len(whole) - 6  # all but the last round's


def test_captured_states_stop_at_the_last_layer_that_is_wanted() -> None:
    target = Target(make_target())
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    calls: list[int] = []
    for number, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
    assert torch.equal(target.captured_states(ids, (0, 3)), target.states(ids, (0, 3)).captured)
    assert calls == [0, 1, 2, *range(7)]
