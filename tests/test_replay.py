"""Replay takes the rounds that decoding took, answer by answer; and answers of other targets are refused.

Drafters are taught the target's greedy answers almost by heart (`tests.pairs`): much is accepted, and much is not.
"""

import json
import random
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.eval import acceptance
from draftsmith.eval.decoding.contenders import contenders_of
from draftsmith.eval.decoding.decode import Generation, decode, decode_batch
from draftsmith.eval.decoding.policies import C2T, PolicyProposer, TreePolicy, policy_of
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.eval.recorded.answers import (
    RecordedAnswer,
    check_answers,
    check_recorded_from,
    kept_for_validation,
    read_answers,
)
from draftsmith.eval.recorded.replay import (
    Agreement,
    RecordedVerifier,
    batches,
    checking_bytes,
    head_rows,
    plain_rounds,
    read_states,
    replay,
    replay_all,
)
from draftsmith.eval.recorded.replay_contenders import planned_bytes, recording_of
from draftsmith.models.c2t import C2tClassifier, C2tConfig
from draftsmith.models.causal_lm import CausalLMDrafting
from draftsmith.models.chat import render_prompt, tokenizer_fingerprint
from draftsmith.models.checkpoint import save_drafter, target_identity
from draftsmith.models.costs import Meter
from draftsmith.models.draft_tree import DraftTree, Proposer
from draftsmith.models.eagle3 import Eagle3Drafter
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.models.target import Target, load_causal_lm
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe, TargetSection, TreeSection
from draftsmith.train.run.inputs import read_rows
from tests import reference
from tests.conftest import make_target, make_tokenizer
from tests.pairs import blurred_copy, greedy, pair_of, pair_of_kind, taught
from tests.thinning import thinned

# The first four are taught; of the others a drafter knows nothing.
PROMPTS = (
    *([11, 12, 13], [21, 22, 23, 24, 25, 26, 27, 28, 29], [7], [5, 6, 5, 6, 5, 6, 5]),
    *(list(range(30, 60)), [9, 9, 9, 9], [200, 13, 77]),
)

BUDGET = 34
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {"tie_word_embeddings": True},
    "gemma2": {"sliding_window": 8},
}
POLICIES: dict[str, TreeSection] = {
    "chain": TreeSection(policy="chain", nodes=5),
    "static": TreeSection(policy="static"),
    "eagle2": TreeSection(nodes=14, draft_calls=4, top_k=4),
    "ddd": TreeSection.model_validate(
        {"policy": "ddd", "nodes": 14, "draft_calls": 6, "top_k": 4, "ddd": {"at": [2, 4], "threshold": -0.5}}
    ),
    "svip": TreeSection.model_validate({"policy": "svip", "svip": {"c": 0.15, "h": 0.5}, "draft_calls": 8}),
    "svip_tree": TreeSection.model_validate(
        {"policy": "svip_tree", "nodes": 14, "draft_calls": 6, "top_k": 4, "svip": {"c": 0.15, "h": 0.6}}
    ),
}
SAME = ("prompt_token_ids", "token_ids", "accepted_per_round", "last_round_cut", "tree_nodes", "draft_calls")


@cache
def likes_the_likely() -> C2tClassifier:
    """C = sigmoid(20 P - H / 2 + d / 4 + 1)."""
    classifier = C2tClassifier(C2tConfig(hidden=3)).requires_grad_(False)
    classifier.hidden.weight.copy_(torch.eye(3))
    classifier.hidden.bias.zero_()
    classifier.output.weight.copy_(torch.tensor([[20.0, -0.5, 0.25]]))
    classifier.output.bias.fill_(1.0)
    return classifier


def policy(name: str) -> TreePolicy:
    if name == "c2t":
        return C2T(likes_the_likely(), beta=0.5, beam=4, top_k=4, draft_calls=5)
    return policy_of(POLICIES[name])


def proposer_of(family: str, name: str) -> Proposer:
    _, drafter = pair_of(family, None, **FAMILIES[family])
    if name == "causal_lm":
        return PolicyProposer(CausalLMDrafting(blurred_copy(family, **FAMILIES[family])), policy("eagle2"))
    return PolicyProposer(FeatureDrafting(drafter), policy(name))


@cache
def stops_of(family: str) -> frozenset[int]:
    """Tokens that end some of the answers in the middle."""
    target, _ = pair_of(family, None, **FAMILIES[family])
    return frozenset({greedy(target, PROMPTS[0], 20)[14], greedy(target, PROMPTS[3], 20)[7]})


def recorded(generations: Sequence[Generation], sampling: Sampling | None = GREEDY) -> list[RecordedAnswer]:
    return [
        RecordedAnswer(g.prompt_token_ids, g.token_ids, sampling, conversation_id=str(i))
        for i, g in enumerate(generations)
    ]


def accepted_by(generations: Sequence[Generation]) -> int:
    return sum(sum(g.accepted_per_round) for g in generations)


def assert_same_rounds(replayed: Sequence[Generation], decoded: Sequence[Generation]) -> None:
    for mine, its in zip(replayed, decoded, strict=True):
        for name in SAME:
            assert getattr(mine, name) == getattr(its, name), name


# Decoding's own generations.


@pytest.mark.parametrize(("family", "name"), thinned(FAMILIES, [*POLICIES, "c2t", "causal_lm"]))
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


@pytest.mark.parametrize(
    ("kind", "name"), thinned(["eagle3.1", "eagle", "poss", "poss over eagle3"], ["chain", "eagle2", "ddd"])
)
def test_every_kind_of_drafter_takes_the_same_rounds(kind: str, name: str) -> None:
    """Each reads states of its own: EAGLE-1's kinds the last one, behind the norm."""
    target, drafter = pair_of_kind(kind, "gemma2", None, **FAMILIES["gemma2"])
    proposer = PolicyProposer(FeatureDrafting(drafter), policy(name))
    decoded = [decode(target, proposer, prompt, stops_of("gemma2"), BUDGET) for prompt in PROMPTS]
    assert accepted_by(decoded) > 20
    for batch_size in (1, 3, 7):
        assert_same_rounds(replay(target, proposer, recorded(decoded), batch_size, Agreement.of(target)), decoded)


def test_kinds_side_by_side_read_their_own_states() -> None:
    """One pass of the target serves drafters that read its last state, and others that do not."""
    kinds = ("eagle", "eagle3", "poss")
    target, _ = pair_of("llama")
    proposers: dict[str, Proposer] = {
        kind: PolicyProposer(FeatureDrafting(pair_of_kind(kind, "llama")[1]), policy("eagle2")) for kind in kinds
    }
    decoded = {
        kind: [decode(target, proposers[kind], prompt, stops_of("llama"), BUDGET) for prompt in PROMPTS]
        for kind in kinds
    }
    replayed = replay_all(target, proposers, recorded(decoded["eagle"]), 3, Agreement.of(target))
    assert len({str([g.accepted_per_round for g in generations]) for generations in decoded.values()}) == 3
    for kind in kinds:
        assert_same_rounds(replayed[kind], decoded[kind])


def test_every_way_to_end_is_met() -> None:
    """Cut by a stop token or the budget, in the middle of a path or behind it; ended by the bonus; without a round."""
    target, _ = pair_of("llama")
    proposer = proposer_of("llama", "chain")
    future = greedy(target, PROMPTS[0], 14)
    met = set()
    for stop, budget in [(-1, budget) for budget in range(1, 13)] + [(stop, 14) for stop in future[:12]]:
        decoded = decode(target, proposer, PROMPTS[0], {stop}, budget)
        assert_same_rounds(replay(target, proposer, recorded([decoded]), 1), [decoded])
        by_stop = decoded.token_ids[-1] == stop
        met.add((by_stop, decoded.last_round_cut, decoded.accepted_per_round[-1] > 0) if decoded.rounds else by_stop)
    assert met == {True, False, *((by, cut, True) for by in (True, False) for cut in (True, False))} | (
        met & {(True, False, False), (False, False, False)}
    )


FEW = 24  # tokens: where there are few, guesses are often right
FEW_PROMPTS = tuple([token % FEW for token in prompt] for prompt in PROMPTS)


@cache
def small_pair() -> tuple[Target, Eagle3Drafter]:
    target = Target(make_target(vocab_size=FEW))
    return target, taught(target, DraftVocab.full(FEW), FEW_PROMPTS[:4])


def test_prompt_lookup_takes_the_same_rounds() -> None:
    target, _ = small_pair()
    lookup = PromptLookup(5, target.device)
    decoded = [decode(target, lookup, prompt, {4}, BUDGET) for prompt in FEW_PROMPTS]
    assert accepted_by(decoded) > 10
    for batch_size in (1, 3, 7):
        assert_same_rounds(replay(target, lookup, recorded(decoded), batch_size), decoded)


@pytest.mark.parametrize(
    ("name", "temperature"),
    thinned(["chain", "static", "eagle2", "svip_tree", "c2t", "prompt lookup"], [0.6, 1.0]),
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


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_trees_end_where_the_target_s_positions_end(family: str) -> None:
    """As in decoding: fewer nodes near the end of the context."""
    settings = {"max_position_embeddings": 56, "n_positions": 56, "seed": 1}
    target, drafter = pair_of(family, None, **settings)
    proposer = PolicyProposer(FeatureDrafting(drafter), policy("eagle2"))
    prompts = PROMPTS[:4]
    decoded = [decode(target, proposer, prompt, {-1}, 56 - len(prompt)) for prompt in prompts]
    assert min(g.tree_nodes[-1] for g in decoded) < 14
    assert_same_rounds(replay(target, proposer, recorded(decoded), 3), decoded)


@pytest.mark.slow
def test_a_cut_vocabulary_and_other_layers() -> None:
    """Several proposers at once, who read different layers of the target, in one pass."""
    target, whole = pair_of("llama")
    _, small = pair_of("llama", 60)
    shallow_target = Target(target.model, (1, 5))
    shallow = taught(shallow_target, DraftVocab.full(target.vocab_size), steps=60)
    proposers: dict[str, Proposer] = {
        "whole": PolicyProposer(FeatureDrafting(whole), policy("eagle2")),
        "cut": PolicyProposer(FeatureDrafting(whole, small.vocab), policy("chain")),
        "small": PolicyProposer(FeatureDrafting(small), policy("svip")),
        "shallow": PolicyProposer(FeatureDrafting(shallow), policy("chain")),
        "lookup": PromptLookup(4, target.device),
    }
    decoded = {
        name: [decode(target, proposer, prompt, stops_of("llama"), BUDGET) for prompt in PROMPTS]
        for name, proposer in proposers.items()
    }
    told: list[int] = []
    replayed = replay_all(target, proposers, recorded(decoded["whole"]), 3, Agreement.of(target), told.append)
    assert len({str([g.accepted_per_round for g in generations]) for generations in decoded.values()}) == 5
    for name in proposers:
        assert_same_rounds(replayed[name], decoded[name])
    assert sum(told) == 5 * sum(len(g.token_ids) for g in decoded["whole"])


# Against a slow twin.


@pytest.mark.parametrize("name", ["chain", "eagle2", "svip", "c2t"])
def test_rounds_are_those_of_a_walk_by_hand(name: str) -> None:
    """Any answers, right and wrong ones: a fresh proposer reads the whole text before every root."""
    target, drafter = pair_of("qwen3", None, **FAMILIES["qwen3"])
    chance = random.Random(2)
    answers = []
    for prompt in PROMPTS:
        answer = greedy(target, prompt, chance.randint(2, 30))
        for _ in range(chance.randint(0, 3)):
            answer[chance.randrange(len(answer))] = chance.randrange(320)
        answers.append(RecordedAnswer(prompt, answer))
    replayed = replay(target, PolicyProposer(FeatureDrafting(drafter), policy(name)), answers, 4)
    for answer, mine in zip(answers, replayed, strict=True):
        text = [*answer.prompt, *answer.tokens]
        captured = target.states(torch.tensor([text])).captured

        def tree_below(read: int, text: list[int] = text, captured: torch.Tensor = captured) -> Any:
            """Tokens and parents of the tree below the last of `read` tokens."""
            fresh = PolicyProposer(FeatureDrafting(drafter), policy(name))
            fresh.reset(1)
            fresh.observe([text[:read]], captured[:, : read - 1], [read - 1])
            tree, _ = fresh.propose()
            return tree.tokens[0].tolist(), tree.parents[0].tolist()

        accepted, cut = reference.replayed(tree_below, len(answer.prompt), text)
        assert (mine.accepted_per_round, mine.last_round_cut) == (accepted, cut)


def test_acceptance_by_hand() -> None:
    """Padding, siblings, wrong turnings, and trees that go beyond the end of an answer."""
    answers = [RecordedAnswer([1], [5, 6, 7, 8]), RecordedAnswer([1, 2], [5, 9]), RecordedAnswer([3], [5, 6, 7])]
    verifier = RecordedVerifier(answers, None, 100, torch.device("cpu"))
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
    for longest in (2, 5):
        answers = [RecordedAnswer([1], [5, 6]), RecordedAnswer([1], [5, 6, 6, 6, 6][:longest])]
        verifier = RecordedVerifier(answers, None, 100, torch.device("cpu"))
        verifier.prefill([answer.prompt for answer in answers])
        chain = DraftTree.chains([[5, 6, 6, 6, 6, 6]] * 2, torch.device("cpu"))
        rest = [6] * (longest - 1)
        assert verifier.accept(chain).new_tokens == [[6, -1], [*rest, -1]]


def test_states_are_handed_over_once_and_are_the_target_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every committed position, in the order of its row, also where passes and rows are cut."""
    monkeypatch.setattr("draftsmith.eval.recorded.replay.pass_tokens", lambda device: 50)
    target, _ = pair_of("gemma2", None, **FAMILIES["gemma2"])
    answers = [RecordedAnswer(prompt, greedy(target, prompt, 5 + 3 * i)) for i, prompt in enumerate(PROMPTS)]
    read: dict[int, list[torch.Tensor]] = {i: [] for i in range(len(answers))}

    class Watching(PromptLookup):
        capture_layers: tuple[int, ...] = (1, 4)

        def reset(self, rows: int, draws: Any = None) -> None:
            super().reset(rows)
            self.live = list(range(rows))

        def keep(self, rows: Sequence[int]) -> None:
            super().keep(rows)
            self.live = [self.live[row] for row in rows]

        def observe(self, committed: Any, features: torch.Tensor | None, counts: Sequence[int]) -> None:
            super().observe(committed, features, counts)
            assert features is not None
            for row, tokens, states, count in zip(self.live, committed, features, counts, strict=True):
                read[row].append(states[:count])
                assert sum(map(len, read[row])) == len(tokens) - 1

    order = next(batches(answers, 7))
    replay(target, Watching(4, target.device), answers, 7)
    for place, row in enumerate(order):
        seen = torch.cat(read[place])
        text = torch.tensor([[*answers[row].prompt, *answers[row].tokens]])
        expected = target.states(text, (1, 4)).captured[0, : len(seen)]
        torch.testing.assert_close(seen, expected, rtol=1e-4, atol=1e-4)
        assert len(seen) >= text.shape[1] - 6  # all but the last round's


def test_captured_states_stop_at_the_last_layer_that_is_wanted() -> None:
    target = Target(make_target())
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    calls: list[int] = []
    for number, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
    assert torch.equal(target.captured_states(ids, (0, 3)), target.states(ids, (0, 3)).captured)
    assert calls == [0, 1, 2, *range(7)]


def test_batches_hold_every_answer_once_the_longest_first() -> None:
    chance = random.Random(1)
    answers = [RecordedAnswer([1], [2] * chance.randint(1, 30)) for _ in range(23)]
    groups = list(batches(answers, 5))
    assert sorted(row for rows in groups for row in rows) == list(range(23))
    lengths = [len(answers[row].tokens) for rows in groups for row in rows]
    assert lengths == sorted(lengths, reverse=True)
    assert [len(rows) for rows in groups] == [5, 5, 5, 5, 3]


def test_plain_rounds_are_those_of_plain_decoding() -> None:
    target = Target(make_target())
    decoded = decode(target, None, PROMPTS[0], {4}, 9)
    assert_same_rounds([plain_rounds(recorded([decoded])[0])], [decoded])


# Whose answers are they?


def drawn(target: Target, sampling: Sampling, count: int = 30, seed: int = 3) -> list[RecordedAnswer]:
    prompts = [[11 + i, 12, 13] for i in range(count)]
    draws = [SeededDraws(seed, i) for i in range(count)]
    return recorded(decode_batch(target, None, prompts, {-1}, 40, sampling, draws), sampling)


def nearly(target: Target, noise: float = 0.3) -> Target:
    """The same target, every weight moved by so much of its tensor's spread."""
    changed = make_target()
    changed.load_state_dict(target.model.state_dict())
    torch.manual_seed(5)
    with torch.no_grad():
        for weight in changed.parameters():
            weight += noise * weight.std() * torch.randn_like(weight)
    return Target(changed)


def agreement_with(target: Target, answers: Sequence[RecordedAnswer]) -> Agreement:
    agreement = Agreement.of(target)
    for answer in answers:  # as in batches: every prefix of the file is judged
        if not agreement.enough:
            read_states(target, [answer], (), agreement)
            agreement.check()
    return agreement


SAMPLINGS = (
    *(Sampling(temperature) for temperature in (0.3, 0.7, 1.0, 1.5)),
    *(Sampling(1.0, top_k=5), Sampling(1.0, top_p=0.3), Sampling(1.0, top_p=0.8, top_k=20), Sampling(0.3, top_p=0.9)),
    *(Sampling(1.5, top_p=0.9), Sampling(1.5, top_k=3)),
)


@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLINGS], ids=str)
def test_answers_of_another_target_are_refused(sampling: Sampling) -> None:
    target = Target(make_target())
    answers = drawn(target, sampling)
    for other in (Target(make_target(seed=1)), nearly(target)):
        with pytest.raises(UserError, match="recorded from another target"):
            replay(other, PromptLookup(4, other.device), answers, 8, Agreement.of(other))


@pytest.mark.parametrize("sampling", [GREEDY, *SAMPLINGS], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_a_target_s_own_answers_never_are(sampling: Sampling, seed: int) -> None:
    target = Target(make_target(seed=seed))
    agreement = agreement_with(target, drawn(target, sampling, seed=seed))
    assert agreement.enough and agreement.other == agreement.impossible == 0
    if not sampling.greedy:
        assert abs(agreement.excess) < 4 * agreement.variance**0.5


@pytest.mark.parametrize(
    ("was", "written", "message"),
    [
        (Sampling(0.2), Sampling(1.0), "drawn otherwise than is written .* less surprising"),
        (Sampling(1.0), Sampling(0.2), "or drawn otherwise than is written .* more surprising"),
        (Sampling(1.0, top_k=5), Sampling(1.0), "drawn otherwise than is written .* less surprising"),
        (Sampling(1.0), Sampling(1.0, top_k=5), "or drawn otherwise than is written: .* are cut off by top_k or top_p"),
        (Sampling(1.0, top_p=0.8), Sampling(1.0, top_p=0.3), "are cut off by top_k or top_p"),
    ],
    ids=str,
)
def test_answers_that_were_drawn_otherwise_are_refused(was: Sampling, written: Sampling, message: str) -> None:
    target = Target(make_target())
    answers = [replace(answer, sampling=written) for answer in drawn(target, was)]
    with pytest.raises(UserError, match=message):
        agreement_with(target, answers)


def test_an_improbable_token_among_few_is_no_other_target() -> None:
    """Nearly certain draws hardly vary; one that falls out lies many of their standard deviations off."""
    certain = torch.tensor([[9.0, 0.0]]).expand(40, -1)  # p = 1.2e-4: one such token among 40 in 0.5 % of all answers
    said = torch.tensor([0] * 39 + [1])
    agreement = Agreement(lenient=False)
    agreement.add(RecordedAnswer([1], said.tolist(), Sampling(1.0)), certain, said)
    assert agreement.excess > 8 * agreement.variance**0.5
    agreement.check()


@pytest.mark.parametrize(("top_p", "top_k"), [(1.0, 0), (0.8, 0), (1.0, 2), (0.7, 3)])
def test_surprise_is_measured_against_the_target_s_own_entropy(top_p: float, top_k: int) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0, -1.0], [3.0, 0.1, 0.2, 0.5], [0.0, -float("inf"), 1.0, 0.1]])
    said, temperature = [2, 3, 0], 0.8
    agreement = Agreement(lenient=False)
    answer = RecordedAnswer([1], said, Sampling(temperature, top_p, top_k))
    agreement.add(answer, logits, torch.tensor(said))
    cut_off, excess, variance = reference.surprise(logits.tolist(), said, temperature, top_p, top_k)
    assert agreement.impossible == cut_off == {(1.0, 0): 0, (0.8, 0): 2, (1.0, 2): 1, (0.7, 3): 2}[top_p, top_k]
    assert agreement.excess == pytest.approx(excess, rel=1e-4)
    assert agreement.variance == pytest.approx(variance, rel=1e-4)
    assert agreement.drawn_tokens == 3


@pytest.mark.parametrize("sampling", [GREEDY, Sampling(0.7), Sampling(1.0, 0.9, 40)], ids=str)
def test_checking_keeps_no_more_alive_than_is_planned(sampling: Sampling, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftsmith.eval.recorded.replay.HEAD_BYTES", 1 << 22)
    vocab_size = 5000
    rows = head_rows(vocab_size)
    assert 1 < rows < 512 and checking_bytes(vocab_size) <= 1 << 22
    logits, said = torch.randn(rows, vocab_size), torch.zeros(rows, dtype=torch.long)
    with Meter(lambda tensor: "") as meter:
        Agreement(lenient=False).add(RecordedAnswer([1], [0] * rows, sampling), logits, said)
    own = logits.numel() * logits.element_size()
    assert own + meter.peak_bytes <= checking_bytes(vocab_size) + 8 * vocab_size  # and some rows' sums
    assert sampling.greedy or meter.peak_bytes > own
    target = Target(make_target(vocab_size=64))
    monkeypatch.setattr("draftsmith.eval.recorded.replay.HEAD_BYTES", 7 * 4 * 12 * 64)
    answers = [RecordedAnswer([5], greedy(target, [5], 30), GREEDY)]
    asked: list[int] = []
    target.head.register_forward_hook(lambda _, inputs, __: asked.append(inputs[0].shape[0]))
    read_states(target, answers, (), agreement := Agreement.of(target))
    assert asked == [7, 7, 7, 7, 2] and (agreement.greedy_tokens, agreement.other) == (30, 0)


def test_a_few_differing_tokens_are_another_precision_s() -> None:
    """Of 1,000 to 50 tokens bfloat16 may turn one; a reader is told that first, and no other target is suspected."""
    for agreement, refused in (
        (
            Agreement(False, greedy_tokens=1000, other=8),
            "^eval.answers: probably this target's own, written in another",
        ),
        (Agreement(False, greedy_tokens=1000, other=51), "^eval.answers: recorded from another target: 51 of 1,000 gr"),
        (Agreement(True, greedy_tokens=1000, other=8), None),
        (Agreement(True, greedy_tokens=1000, other=51), "^eval.answers: recorded from another target"),
        (Agreement(False, drawn_tokens=1000, impossible=8), "^eval.answers: probably this target's own, written in a"),
        (Agreement(False, drawn_tokens=1000, impossible=51), "^eval.answers: recorded from another target or drawn ot"),
        (Agreement(True, drawn_tokens=1000, impossible=8), None),
        (Agreement(False, drawn_tokens=1000, impossible=1), None),
    ):
        if refused is None:
            agreement.check()
            continue
        with pytest.raises(UserError, match=refused):
            agreement.check()


def test_a_few_tokens_may_be_rounding_many_may_not() -> None:
    target = Target(make_target())
    answers = drawn(target, GREEDY)
    for wrong, refused in ((1, False), (3, True)):
        for lenient in (False, True):
            changed = [RecordedAnswer(a.prompt, list(a.tokens), GREEDY) for a in answers]
            for answer in changed[:wrong]:  # its last token: nothing behind it changes
                answer.tokens[-1] = (answer.tokens[-1] + 1) % 320
            agreement = Agreement(lenient)
            read_states(target, changed, (), agreement)
            assert agreement.other == wrong
            if refused and not lenient:
                with pytest.raises(UserError, match=r"3 of 1,\d\d\d greedy tokens \(0\.2%\) are not what this one"):
                    agreement.check()
            else:
                agreement.check()


# Files.


def conversation(number: int, target: Target | None = None, **generator: Any) -> dict[str, Any]:
    """As regenerate writes them: two turns, greedy answers."""
    turns, history = [], []
    for turn in range(2):
        prompt = [*history, 2, 11 + number, 12 + turn, 4, 3]
        answer = greedy(target, prompt, 12) if target else [9, 8, 4]
        turns.append({"prompt_token_ids": prompt, "output_token_ids": answer, "finish_reason": "stop"})
        history = prompt + answer
    return {
        "id": f"c{number}",
        "messages": [{"role": "user", "content": "x"}] * 2,
        "turns": turns,
        "meta": {"benchmark": "mine", "category": "maths"},
        "generator": {"kind": "transformers", "temperature": 0.0, "top_p": 1.0, "top_k": 0} | generator,
    }


def write_lines(path: Path, *lines: Any) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def test_conversations_are_read_turn_by_turn(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", conversation(0), "", conversation(1, temperature=0.7, top_k=5))
    recording = read_answers(path)
    answers = recording.of("anyone", "plain decoding")
    assert [(a.conversation_id, a.turn) for a in answers] == [("c0", 1), ("c0", 2), ("c1", 1), ("c1", 2)]
    assert answers[1].prompt == [2, 11, 12, 4, 3, 9, 8, 4, 2, 11, 13, 4, 3]
    assert answers[1].tokens == [9, 8, 4]
    assert (answers[0].benchmark, answers[0].category) == ("mine", "maths")
    assert [a.sampling for a in answers] == [GREEDY, GREEDY, Sampling(0.7, 1.0, 5), Sampling(0.7, 1.0, 5)]
    assert answers[2].place == f"{path}:3"
    assert len(read_answers(path, limit=1).of("x", "y")) == 2
    assert len(read_answers(path, first_turns_only=True).of("x", "y")) == 2


def generation_line(contender: str, conversation_id: str, tokens: list[int]) -> dict[str, Any]:
    whose = {"benchmark": "b", "category": None, "conversation_id": conversation_id, "turn": 1}
    return {"contender": contender} | whose | {"prompt_token_ids": [5], "token_ids": tokens, "other": 1.5}


def test_everyone_has_its_own_generations_or_plain_decoding_s(tmp_path: Path) -> None:
    lines = [generation_line(name, i, [6, len(name)]) for i in ("a", "b") for name in ("plain decoding", "eagle")]
    path = write_lines(tmp_path / "generations.jsonl", *lines)
    (tmp_path / "acceptance.json").write_text('{"temperature": 0.5, "top_p": 0.9, "top_k": 3, "target_identity": {}}')
    recording = read_answers(path, sampling=GREEDY)
    assert [a.tokens for a in recording.of("eagle", "plain decoding")] == [[6, 5], [6, 5]]
    assert [a.tokens for a in recording.of("lookup", "plain decoding")] == [[6, 14], [6, 14]]
    assert {a.sampling for a in recording} == {Sampling(0.5, 0.9, 3)}
    assert len(read_answers(path, limit=1).of("eagle", "plain decoding")) == 1
    (tmp_path / "acceptance.json").unlink()
    assert {a.sampling for a in read_answers(path, sampling=GREEDY)} == {GREEDY}
    write_lines(path, *(line | {"contender": f"c{i}"} for i, line in enumerate(lines)))
    with pytest.raises(UserError, match="holds answers of 'c0', 'c1', 'c2', 'c3', none of 'eagle' and none of 'plain"):
        read_answers(path).of("eagle", "plain decoding")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", r"c\.jsonl:2: malformed JSON"),
        ({"id": "x", "messages": []}, r"c\.jsonl:2: neither a line of generations\.jsonl nor a regenerated"),
        ({"id": "x", "turns": ["How?", "Why?"]}, r"c\.jsonl:2: turns\.0"),
        ({"id": "x", "turns": []}, r"c\.jsonl:2: turns"),
        (generation_line("e", "x", []), r"c\.jsonl:2: token_ids"),
        (generation_line("e", "x", [1]) | {"prompt_token_ids": []}, r"c\.jsonl:2: prompt_token_ids"),
        (generation_line("e", "x", [-1]), r"c\.jsonl:2: token_ids\.0"),
        (generation_line("e", "x", ["5"]), r"c\.jsonl:2: token_ids\.0"),  # type: ignore[list-item]
        (conversation(0, temperature=-1.0), r"c\.jsonl:2: temperature"),
    ],
)
def test_lines_that_cannot_be_replayed_are_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write_lines(tmp_path / "c.jsonl", conversation(0), line)
    with pytest.raises(UserError, match=message):
        read_answers(path)


def test_several_bad_lines_are_counted_and_the_first_named(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", "{", conversation(0), "[]", "{}", "x", conversation(1), "y")
    with pytest.raises(UserError) as told:
        read_answers(path)
    first, *faults = told.value.problems
    assert first == f"eval.answers: {path}: 5 lines cannot be used; these are the first 3"
    assert [fault.split(": ")[1] for fault in faults] == [f"{path}:{number}" for number in (1, 3, 4)]


def test_a_file_that_is_cut_off(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", conversation(0), conversation(1))
    whole = path.read_text()
    path.write_text(whole.rstrip())  # no more than the last line's end is missing
    assert len(list(read_answers(path))) == 4
    path.write_text(whole[:-20])
    with pytest.raises(
        UserError, match=r"^eval\.answers: .*c\.jsonl:2: the file is cut off: its last line is not whole"
    ):
        read_answers(path)
    path.write_text("{\n" + whole)
    with pytest.raises(UserError, match=r"^eval\.answers: .*c\.jsonl:1: malformed JSON"):
        read_answers(path)


def test_answers_that_stand_there_twice_are_refused(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", conversation(0), conversation(1), conversation(0))
    with pytest.raises(UserError, match=r"c\.jsonl:3: the answer to turn 1 of 'c0' stands there twice, first at .*:1$"):
        read_answers(path)
    ones = [generation_line(name, i, [6, 7]) for name in ("a", "b") for i in ("x", "y")]
    ones += [ones[0] | {"turn": 2}, ones[0] | {"benchmark": "c"}]
    assert len(list(read_answers(write_lines(path, *ones)))) == 6
    with pytest.raises(
        UserError, match=r"c\.jsonl:7: 'b': the answer to turn 1 of 'y' stands there twice, first at .*:4"
    ):
        read_answers(write_lines(path, *ones, ones[3]))


def test_kept_for_validation_is_what_training_keeps(tmp_path: Path) -> None:
    """The same conversations as `train.run.inputs.read_rows`, whatever their order."""
    lines = [conversation(i) for i in range(40)]
    for number in (3, 4):  # one token alone trains nothing
        for turn in lines[number]["turns"]:
            turn["output_token_ids"] = [9]
    path = write_lines(tmp_path / "run/conversations.jsonl", *lines)
    section = {"output_dir": str(tmp_path / "run"), "target": {"model": "none"}}
    recipes = {most: Recipe.model_validate(section | {"train": {"validation_conversations": most}}) for most in (5, 64)}
    for most, recipe in recipes.items():
        training, validation = read_rows(recipe, make_tokenizer(), Rejects())
        kept = kept_for_validation(path, most)
        assert kept == {row.id for row in validation} and len(kept) == (5 if most == 5 else 7)
        assert not kept & {row.id for row in training}
    write_lines(path, *reversed(lines))
    assert kept_for_validation(path, 64) == kept > kept_for_validation(path, 5)
    assert kept_for_validation(path, 0) == set()


def test_no_file_and_no_answers(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"eval\.answers: .*nowhere\.jsonl cannot be read"):
        read_answers(tmp_path / "nowhere.jsonl")
    with pytest.raises(UserError, match="holds no answer"):
        read_answers(write_lines(tmp_path / "empty.jsonl"))


def test_tokens_and_lengths_that_the_target_has_not(tmp_path: Path) -> None:
    recording = read_answers(write_lines(tmp_path / "c.jsonl", conversation(0), conversation(50)))
    check_answers(recording, 320, 512)
    with pytest.raises(UserError, match=r"c\.jsonl:2: token 61 is outside the target's vocabulary of 60 tokens"):
        check_answers(recording, 60, 512)
    with pytest.raises(UserError, match=r"c\.jsonl:1: prompt and answer are 16 tokens, the target has 15 positions"):
        check_answers(recording, 320, 15)


def test_a_recorded_identity_must_be_this_target_s(tmp_path: Path) -> None:
    lines = [conversation(i, tokenizer_fingerprint="f", embedding_digest="e") for i in range(2)]
    other = conversation(2, tokenizer_fingerprint="f", embedding_digest="another")
    recording = read_answers(write_lines(tmp_path / "c.jsonl", *lines, other))
    check_recorded_from(recording, {"tokenizer_fingerprint": "f"})  # before the weights are loaded
    with pytest.raises(UserError, match=r"c\.jsonl:3: recorded from another target: embedding_digest another there, e"):
        check_recorded_from(recording, {"tokenizer_fingerprint": "f", "embedding_digest": "e"})
    with pytest.raises(UserError, match=r"c\.jsonl:1: .* tokenizer_fingerprint f there, g here \(a fingerprint covers"):
        check_recorded_from(recording, {"tokenizer_fingerprint": "g"})


# The script.


@pytest.fixture(scope="module")
def place(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe over a drafter that was taught its prompts, and questions of one and two turns."""
    folder = tmp_path_factory.mktemp("replay")
    section, tokenizer = TargetSection(model=str(target_dir), dtype="float32"), make_tokenizer()
    texts = ["the cat", "the dog ran after the cat in the rain", "a mat", "rain", "the dog and the cat"]
    prompts = tuple(render_prompt(tokenizer, [{"role": "user", "content": text}]) for text in texts)
    target = Target(load_causal_lm(section))
    drafter = taught(target, DraftVocab.full(target.vocab_size), prompts)
    identity = target_identity(target, section.model, None, tokenizer_fingerprint(tokenizer))
    save_drafter(folder / "run/drafter", drafter, identity, "", {})
    turns = [{"id": f"q{i}", "turns": [text, "and the mat?"][: 1 + i % 2]} for i, text in enumerate(texts)]
    write_lines(folder / "prompts.jsonl", *turns)
    recipe = {
        "output_dir": str(folder / "run"),
        "target": {"model": str(target_dir), "dtype": "float32", "device": "cpu"},
        "eval": {
            "prompts": str(folder / "prompts.jsonl"),
            "max_new_tokens": 24,
            "bootstrap_samples": 100,
            "tree": {"nodes": 12, "draft_calls": 3, "top_k": 4},
            "also": [
                {"name": "chain", "tree": {"policy": "chain", "nodes": 4}},
                {"name": "lookup", "proposer": "prompt_lookup", "tree": {"policy": "chain", "nodes": 6}},
            ],
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture
def measure(place: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(*overrides: str) -> None:
        monkeypatch.setattr(sys, "argv", ["acceptance.py", str(place / "recipe.yaml"), *overrides])
        acceptance.main()

    return run


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("temperature", [0.0, 0.4])
def test_the_script_replays_what_it_decoded(
    place: Path, measure: Callable[..., None], temperature: float, capsys: pytest.CaptureFixture[str]
) -> None:
    out = place / f"run/at {temperature}"
    measure(f"eval.temperature={temperature}", f"eval.out={out}")
    before = (out / "acceptance.json").read_bytes()
    capsys.readouterr()
    # What was recorded says how answers were drawn, not the recipe.
    measure("eval.mode=replay", f"eval.out={out}", "eval.replay_batch_size=3")
    said = capsys.readouterr().out
    assert (out / "acceptance.json").read_bytes() == before
    decoded, replayed = lines_of(out / "generations.jsonl"), lines_of(out / "replay/generations.jsonl")
    assert {line["contender"] for line in decoded} == {line["contender"] for line in replayed}

    def rounds(lines: list[dict[str, Any]]) -> dict[Any, Any]:
        same = (*SAME, "benchmark", "category", "text")
        whose = ("contender", "conversation_id", "turn")
        return {tuple(line[key] for key in whose): {key: line[key] for key in same} for line in lines}

    assert rounds(replayed) == rounds(decoded)
    of_main = [line["accepted_per_round"] for line in decoded if "tree of 12" in line["contender"]]
    assert sum(map(sum, of_main)) > 0
    mine, its = (json.loads((path / "acceptance.json").read_text()) for path in (out / "replay", out))
    assert mine["mode"] == "replay" and mine["temperature"] == temperature
    for name, row in its["contenders"].items():
        for key in ("tau", "tau_interval", "accepted_histogram", "acceptance_by_position", "tree_nodes_per_round"):
            assert mine["contenders"][name][key] == row[key]
        assert mine["contenders"][name]["draft_calls_per_round"] == row["draft_calls_per_round"]
        assert mine["contenders"][name]["tokens_per_second"] is None
        assert mine["contenders"][name]["speedup"] is None and mine["contenders"][name]["speedup_interval"] is None
        assert mine["contenders"][name]["matches_target"] is None
    assert (out / "replay/report.html").exists()
    tokens = sum(len(line["token_ids"]) for line in decoded if line["contender"] == "plain decoding")
    if temperature == 0:
        assert f"0 of {tokens} greedy tokens are not the target's likeliest" in said
    else:
        assert re.search(r"\d+ drawn tokens, [+-]0\.\d{3} nats each beyond its own", said)


def test_the_script_replays_regenerated_conversations(
    place: Path, target_dir: Path, measure: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target(load_causal_lm(TargetSection(model=str(target_dir), dtype="float32")))
    path = write_lines(place / "conversations.jsonl", *(conversation(i, target) for i in range(4)))
    out = place / "run/conversations"
    settings = ("eval.mode=replay", f"eval.answers={path}", f"eval.out={out}")
    measure(*settings, "--plan")
    said = capsys.readouterr().out
    assert f"answers      8 recorded in {path}, 96 tokens" in said
    assert not out.exists()
    measure(*settings)
    numbers = json.loads((out / "replay/acceptance.json").read_text())
    assert numbers["answers"] == 8 and numbers["prompts"] == 4 and list(numbers["benchmarks"]) == ["mine"]
    assert numbers["contenders"]["plain decoding"]["tau"] == 1
    assert numbers["contenders"]["plain decoding"]["rounds"] == 8 * 11


def test_of_what_was_trained_on_the_kept_conversations_are_replayed(
    place: Path, target_dir: Path, measure: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    target = Target(load_causal_lm(TargetSection(model=str(target_dir), dtype="float32")))
    path = write_lines(place / "trained/conversations.jsonl", *(conversation(i, target) for i in range(11)))
    out = place / "run/trained"
    settings = (f"data.conversations={path}", "eval.mode=replay", f"eval.answers={path}", f"eval.out={out}")
    measure(*settings)
    kept = "answers are taken from the 2 conversations that training keeps for validation"
    assert f"note: {path} is what the recipe trains on: {kept}" in capsys.readouterr().out.replace("\n", "")
    ids = {line["conversation_id"] for line in lines_of(out / "replay/generations.jsonl")}
    assert ids == kept_for_validation(path, 64) and len(ids) == 2
    assert kept in json.loads((out / "replay/acceptance.json").read_text())["recorded_answers"]["note"]
    measure(*settings, "train.validation_conversations=0", "--plan")
    said = capsys.readouterr().out
    assert "these answers are known to the drafter" in said and "answers      22 recorded" in said
    copy = write_lines(place / "trained/copy.jsonl", *lines_of(path))
    measure(*settings, f"eval.answers={copy}", "--plan")
    said = capsys.readouterr().out
    assert "note" not in said and "answers      22 recorded" in said


def test_greedy_answers_are_greedy_whatever_else_is_set(place: Path, measure: Callable[..., None]) -> None:
    """top_p means nothing at temperature 0; of answers without a temperature nobody knows."""
    chain = "eval.tree={policy: chain, nodes: 4, draw: sampled}"
    path = write_lines(place / "greedy.jsonl", conversation(0, top_p=0.9, top_k=5))
    measure("eval.mode=replay", f"eval.answers={path}", chain, "--plan")
    write_lines(path, conversation(0, temperature=None))
    with pytest.raises(UserError, match=r"answers that were drawn \(or may have been\)"):
        measure("eval.mode=replay", f"eval.answers={path}", chain, "--plan")


def test_the_plan_counts_caches_of_draft_models_and_the_check(
    place: Path, target_dir: Path, measure: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    path = write_lines(place / "planned.jsonl", conversation(0))
    small = "eval.also=[{name: small, proposer: causal_lm, draft_model: {model: " + str(target_dir) + "}}]"
    counted = {}
    for name, also in (("without", "eval.also=[]"), ("with", small)):
        recipe = load_recipe(place / "recipe.yaml", ["eval.mode=replay", f"eval.answers={path}", also])
        contenders = contenders_of(recipe)
        counted[name] = planned_bytes(recipe, recording_of(recipe, contenders), contenders)
    # Two answers of 16 tokens at most; 7 layers of keys and values, 2 heads of 8, in float32, not the drafter's 1.
    assert counted["with"] - counted["without"] == 2 * 16 * (7 - 1) * 2 * 2 * 8 * 4
    assert counted["without"] > checking_bytes(320)
    measure("eval.mode=replay", f"eval.answers={path}", small, "--plan")
    assert "the drafters' columns, and the check of their tokens" in capsys.readouterr().out.replace("\n", " ")


def test_every_cache_is_gone_when_its_batch_is_done() -> None:
    target, drafter = pair_of("llama")
    mine = FeatureDrafting(drafter)
    answers = [RecordedAnswer(prompt, greedy(target, prompt, 9), GREEDY) for prompt in PROMPTS]
    told: list[list[int]] = []
    proposers: dict[str, Proposer] = {"a": PolicyProposer(mine, policy("chain")), "b": PromptLookup(3, target.device)}
    replay_all(target, proposers, answers, 4, told=lambda _: told.append(list(mine.columns.lengths)))
    assert told == [[]] * 4


def test_what_cannot_be_replayed_is_told_before_weights_are_loaded(
    place: Path, target_dir: Path, measure: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from draftsmith.eval.recorded import replay_contenders as replayed

    def loaded(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(replayed, "Lineup", loaded)
    drawn_ones = write_lines(place / "drawn.jsonl", conversation(0, temperature=1.0))
    foreign = write_lines(place / "foreign.jsonl", conversation(0, tokenizer_fingerprint="another"))
    far = write_lines(place / "far.jsonl", generation_line("plain decoding", "x", [4, 320]))
    some = [generation_line(name, "x", [5, 4]) for name in ("plain decoding", "chain")]
    holes = write_lines(place / "holes.jsonl", *some, generation_line("plain decoding", "y", [5, 4]))
    for path, override, message in (
        (drawn_ones, "eval.tree={policy: chain, draw: sampled}", "eval.tree: draw: sampled cannot be replayed"),
        (drawn_ones, "eval.tree={policy: auto}", "eval.tree: policy auto goes by speeds, and replay has none"),
        (
            foreign,
            "eval.seed=0",
            r"foreign\.jsonl:1: recorded from another target: tokenizer_fingerprint another there",
        ),
        (far, "eval.seed=0", r"far\.jsonl:1: token 320 is outside the target's vocabulary of 320 tokens"),
        (holes, "eval.seed=0", "the answers of 'chain' are not to the same turns as those of plain decoding"),
        (place / "nowhere.jsonl", "eval.seed=0", r"nowhere\.jsonl cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            measure("eval.mode=replay", f"eval.answers={path}", override)


def test_answers_of_another_target_with_the_same_tokenizer_are_refused(
    place: Path, measure: Callable[..., None]
) -> None:
    """By the embeddings where they are recorded, by what it says where they are not."""
    other = Target(make_target(seed=1))
    unknown = write_lines(place / "unknown.jsonl", *(conversation(i, other) for i in range(4)))
    with pytest.raises(UserError, match=r"recorded from another target: \d\d of 96 greedy tokens"):
        measure("eval.mode=replay", f"eval.answers={unknown}")
    known = write_lines(place / "known.jsonl", conversation(0, other, embedding_digest="0" * 64))
    with pytest.raises(UserError, match=r"known\.jsonl:1: recorded from another target: embedding_digest 0000"):
        measure("eval.mode=replay", f"eval.answers={known}")
    assert not (place / "run/eval/replay/acceptance.json").exists()
