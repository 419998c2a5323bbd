"""Replay takes the rounds that decoding took, answer by answer; and answers of other targets are refused.

Drafters are taught the target's greedy answers almost by heart (`tests.pairs`): much is accepted, and much is not.
"""

import itertools
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.eval.decoding.contenders import contenders_of
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.decoding.policies import PolicyProposer
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.eval.replay import recorded_answers
from draftsmith.eval.replay.recorded_answers import RecordedAnswer, kept_for_validation, read_answers
from draftsmith.eval.replay.replay import Agreement, RecordedVerifier, read_states, replay
from draftsmith.models.draft_tree import Committed, DraftTree, Proposer
from draftsmith.models.feature_drafter import FeatureDrafter, FeatureDrafting
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.train.run.training_inputs import read_rows
from tests import pairs, reference
from tests.conftest import make_target
from tests.decoding import decode, decode_batch
from tests.eval.test_lossless import FAMILIES, POLICIES, policy_called, proposer_of
from tests.evaluation_cases import assert_same_rounds, conversation, measure, read_lines, recorded, write_lines
from tests.evaluation_cases import place as place
from tests.pairs import blurred_copy, greedy, pair_of, taught
from tests.scripted_drafting import unasked_target
from tests.thinning import a_few

# Of the last three a drafter knows nothing.
PROMPTS = (*pairs.PROMPTS, list(range(30, 60)), [9, 9, 9, 9], [200, 13, 77])
BUDGET = 34
PROPOSERS = ("causal_lm", "sam", "eagle3 routed with sam", "eagle3 fused with sam")  # all others are EAGLE-3's policies
EVERYTHING = list(itertools.product(("llama", "qwen3", "gemma2"), [*POLICIES, "c2t", *PROPOSERS]))
FAST = [("llama", name) for name in ("eagle2", "causal_lm", *PROPOSERS[2:])]


def accepted_by(generations: Sequence[Generation]) -> int:
    return sum(sum(g.accepted_per_round) for g in generations)


@pytest.mark.parametrize(("family", "name"), a_few(EVERYTHING, *FAST))
def test_replaying_what_was_decoded_takes_the_same_rounds(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stops in the middle, budgets, however many answers stand side by side, and where passes and rows are cut."""
    target, _ = pair_of(family, None, **FAMILIES[family])
    proposer = proposer_of(family, *((name, "eagle2") if name in PROPOSERS else ("eagle3", name)))
    budgets = [BUDGET - 3 * i for i in range(len(PROMPTS))]
    stops = {greedy(target, PROMPTS[0], 20)[14], greedy(target, PROMPTS[3], 20)[7]}
    decoded = [decode(target, proposer, prompt, stops, most) for prompt, most in zip(PROMPTS, budgets, strict=True)]
    assert accepted_by(decoded) > 20
    assert 2 <= sum(g.token_ids[-1] in stops for g in decoded) <= 5
    for batch_size in (1, 3, 7):
        replayed = replay(target, proposer, recorded(decoded), batch_size, Agreement.of(target))
        assert_same_rounds(replayed, decoded)
        assert all(g.decode_seconds == g.prefill_seconds == 0 for g in replayed)
        monkeypatch.setattr("draftsmith.eval.replay.replay.pass_tokens", lambda device: 50)


def test_every_way_to_end_is_met() -> None:
    """Cut by a stop token or the budget, in the middle of a path or behind it; ended by the bonus; without a round."""
    target, _ = pair_of("llama", None)
    proposer = proposer_of("llama", "eagle3", "chain")
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
def small_pair() -> tuple[Target, FeatureDrafter]:
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
        proposer = PolicyProposer(FeatureDrafting(drafter), policy_called(name))
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


def test_rounds_are_those_of_a_walk_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any answers, right and wrong ones: a fresh proposer reads the whole text before every root."""
    monkeypatch.setattr("draftsmith.eval.replay.replay.pass_tokens", lambda device: 50)
    target, drafter = pair_of("qwen3", None, **FAMILIES["qwen3"])
    chance = random.Random(2)
    answers = []
    for prompt in PROMPTS:
        answer = greedy(target, prompt, chance.randint(2, 30))
        for _ in range(chance.randint(0, 3)):
            answer[chance.randrange(len(answer))] = chance.randrange(320)
        answers.append(RecordedAnswer(prompt, answer))
    replayed = replay(target, PolicyProposer(FeatureDrafting(drafter), policy_called("c2t")), answers, 4)
    for answer, mine in zip(answers, replayed, strict=True):
        text = [*answer.prompt, *answer.tokens]
        captured = target.states(torch.tensor([text])).captured

        def tree_below(read: int, text: list[int] = text, captured: torch.Tensor = captured) -> Any:
            """Tokens and parents of the tree below the last of `read` tokens."""
            fresh = PolicyProposer(FeatureDrafting(drafter), policy_called("c2t"))
            fresh.set_rows([], 1)
            fresh.observe(Committed(target, [text[:read]], captured[:, : read - 1], [read - 1]))
            tree, _ = fresh.propose()
            return tree.tokens[0].tolist(), tree.parents[0].tolist()

        accepted, cut = reference.replayed(tree_below, len(answer.prompt), text)
        assert (mine.accepted_per_round, mine.last_round_cut) == (accepted, cut)


def test_beyond_the_end_nothing_is_right() -> None:
    """Not even the last token again."""
    answers = [RecordedAnswer([1], [5, 6]), RecordedAnswer([1], [5, 6, 6, 6, 6])]
    verifier = RecordedVerifier(answers, None, unasked_target(100))
    verifier.prefill([answer.prompt for answer in answers])
    chain = DraftTree.chains([[5, 6, 6, 6, 6, 6]] * 2, torch.device("cpu"))
    assert verifier.accept(chain).new_tokens == [[6, -1], [6, 6, 6, 6, -1]]


def test_captured_states_stop_at_the_last_layer_that_is_wanted() -> None:
    target = Target(make_target())
    ids = torch.tensor([[5, 6, 7, 8], [9, 10, 11, 12]])
    calls: list[int] = []
    for number, layer in enumerate(target.layers):
        layer.register_forward_hook(lambda *_, number=number: calls.append(number))
    assert torch.equal(target.captured_states(ids, (0, 3)), target.states(ids, (0, 3)).captured)
    assert calls == [0, 1, 2, *range(7)]


# Whose recorded answers are, and which lines cannot be used.

target_of = cache(lambda seed: Target(make_target(seed=seed)))  # 0: that of `place`


def generation_line(contender: str, conversation_id: str, tokens: list[int]) -> dict[str, Any]:
    whose = {"benchmark": "b", "category": None, "conversation_id": conversation_id, "turn": 1}
    return {"contender": contender} | whose | {"prompt_token_ids": [5], "token_ids": tokens, "other": 1.5}


@cache
def drawn(sampling: Sampling, seed: int = 0) -> list[RecordedAnswer]:
    """Answers of the target of that seed."""
    draws = [SeededDraws(3, i) for i in range(30)]
    prompts = [[11 + i, 12, 13] for i in range(len(draws))]
    return recorded(decode_batch(target_of(seed), None, prompts, {-1}, 40, sampling, draws), sampling)


def agreement_with(target: Target, answers: Sequence[RecordedAnswer]) -> Agreement:
    agreement = Agreement.of(target)
    for answer in answers:  # as in batches: every prefix of the file is judged
        if not agreement.enough:
            read_states(target, [answer], (), agreement)
            agreement.check()
    return agreement


SAMPLINGS = (
    *(GREEDY, Sampling(0.3), Sampling(0.7), Sampling(1.0), Sampling(1.5), Sampling(1.0, top_k=5)),
    *(Sampling(1.0, top_p=0.3), Sampling(1.0, top_p=0.8, top_k=20), Sampling(0.3, top_p=0.9), Sampling(1.5, top_k=3)),
)
each_sampling = pytest.mark.parametrize("sampling", a_few(SAMPLINGS, GREEDY, Sampling(1.0, top_k=5)), ids=str)


@each_sampling
def test_answers_of_another_target_are_refused(sampling: Sampling) -> None:
    for other in (target_of(1), blurred_copy("llama", 0.3)):
        with pytest.raises(UserError, match="recorded from another target"):
            replay(other, PromptLookup(4, other.device), drawn(sampling), 8, Agreement.of(other))


@each_sampling
@pytest.mark.parametrize("seed", a_few(range(3), 0))
def test_a_target_s_own_answers_never_are(sampling: Sampling, seed: int) -> None:
    agreement = agreement_with(target_of(seed), drawn(sampling, seed))
    assert agreement.enough and agreement.other == agreement.impossible == 0
    assert sampling.greedy or abs(agreement.excess) < 4 * agreement.variance**0.5


@pytest.mark.parametrize(
    ("was", "written", "message"),
    [
        (Sampling(1.0, top_k=5), Sampling(1.0), r"other settings than recorded .* -\d\.\d+ nats each beyond its own\."),
        (Sampling(1.0), Sampling(0.2), r"other settings than recorded .* \+\d\.\d+ nats each beyond its own\."),
        (Sampling(1.0), Sampling(1.0, top_k=5), r"beyond its own, \d+ of them cut off here"),
    ],
    ids=str,
)
def test_answers_that_were_drawn_otherwise_are_refused(was: Sampling, written: Sampling, message: str) -> None:
    answers = [replace(answer, sampling=written) for answer in drawn(was)]
    with pytest.raises(UserError, match=message):
        agreement_with(target_of(0), answers)


def test_a_few_differing_tokens_are_rounding() -> None:
    """Of 1,000 to 50 tokens bfloat16 may turn one."""
    few = Agreement(True, greedy_tokens=1000, other=8), Agreement(False, drawn_tokens=1000, impossible=1)
    many = Agreement(False, greedy_tokens=1000, other=8), Agreement(True, greedy_tokens=1000, other=51)
    for agreement in few:
        agreement.check()
    for agreement in (*many, Agreement(False, drawn_tokens=1000, impossible=8)):
        with pytest.raises(UserError, match="in another precision"):
            agreement.check()


def test_conversations_are_read_turn_by_turn(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl.gz", conversation(0), "", conversation(1, temperature=0.7, top_k=5))
    answers = read_answers(path).of("anyone", "plain decoding")
    assert [(a.conversation_id, a.turn) for a in answers] == [("c0", 1), ("c0", 2), ("c1", 1), ("c1", 2)]
    assert answers[1].prompt == [2, 11, 12, 4, 3, 9, 8, 4, 2, 11, 13, 4, 3]
    assert (answers[1].tokens, answers[0].benchmark, answers[0].category) == ([9, 8, 4], "mine", "maths")
    assert [a.sampling for a in answers] == [GREEDY, GREEDY, Sampling(0.7, 1.0, 5), Sampling(0.7, 1.0, 5)]
    assert answers[2].place == f"{path}:3"
    assert len(read_answers(path, limit=1).of("x", "y")) == 2
    assert len(read_answers(path, first_turns_only=True).of("x", "y")) == 2


def test_everyone_has_its_own_generations_or_plain_decoding_s(tmp_path: Path) -> None:
    lines = [generation_line(name, i, [6, len(name)]) for i in ("a", "b") for name in ("plain decoding", "eagle")]
    path = write_lines(tmp_path / "generations.jsonl", *lines)
    recording = read_answers(path, sampling=GREEDY)
    assert [a.tokens for a in recording.of("eagle", "plain decoding")] == [[6, 5], [6, 5]]
    assert [a.tokens for a in recording.of("lookup", "plain decoding")] == [[6, 14], [6, 14]]
    assert {a.sampling for a in recording} == {GREEDY}
    assert len(read_answers(path, limit=1).of("eagle", "plain decoding")) == 1


NO_TOKENS: tuple[Any, ...] = (None, "a", {}, [], [[1]], [-1], [1.0], [float("nan")], [True])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "malformed JSON"),
        ({"id": "x", "messages": []}, "neither a line of generations"),
        ({"contender": "e"}, "benchmark is missing"),
        (generation_line("e", "x", [6]) | {"contender": ["e"]}, r"contender is \['e'\]: "),
        (conversation(0) | {"id": 1}, "conversation_id is 1: "),
        (conversation(0, temperature=-1.0), "temperature"),
        (conversation(0, lossless=False), "written by an acceptance rule"),
        *((generation_line("e", "x", tokens), r"token_ids\b.* is ") for tokens in NO_TOKENS),
    ],
)
def test_lines_that_cannot_be_replayed_are_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write_lines(tmp_path / "c.jsonl", conversation(1), line)
    with pytest.raises(UserError, match=rf"c\.jsonl:2: {message}"):
        read_answers(path)
    with pytest.raises(UserError, match="holds no answer"):
        read_answers(write_lines(tmp_path / "empty.jsonl"))
    with pytest.raises(UserError, match=r"c\.jsonl\.gz is damaged: Not a gzipped file"):
        read_answers(path.rename(tmp_path / "c.jsonl.gz"))


def test_what_lies_beside_answers_is_checked(tmp_path: Path) -> None:
    """A row without `lossless` is an exact rule's, and takes nothing from what the file says of the target."""
    path, beside = write_lines(tmp_path / "g.jsonl", generation_line("e", "x", [6])), tmp_path / "acceptance.json"
    said = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "target_identity": {"adapter": "a"}, "contenders": {"e": {}}}
    beside.write_text(json.dumps(said))
    recording = read_answers(path, sampling=GREEDY)
    assert [answer.sampling for answer in recording] == [Sampling(0.5, 0.9, 3)]
    assert [identity["adapter"] for _, identity in recording.identities] == ["a"]
    beside.write_text("{")
    with pytest.raises(UserError, match=r"acceptance\.json: damaged"):
        read_answers(path)


def test_kept_for_validation_is_what_training_keeps(tmp_path: Path, target_dir: Path) -> None:
    """The same conversations as `train.run.training_inputs.read_rows`, whatever their order."""
    lines = [conversation(i) for i in range(40)]
    for number in (3, 4):  # one token alone trains nothing
        for turn in lines[number]["turns"]:
            turn["output_token_ids"] = [9]
    path = write_lines(tmp_path / "run/conversations.jsonl", *lines)
    section = {"output_dir": str(tmp_path / "run"), "target": {"model": str(target_dir)}}
    recipes = {most: Recipe.model_validate(section | {"train": {"validation_conversations": most}}) for most in (5, 64)}
    for most, recipe in recipes.items():
        training, validation = read_rows(recipe, TargetFiles(recipe.target), Rejects())
        kept = kept_for_validation(path, most)
        assert kept == {row.id for row in validation} and len(kept) == (5 if most == 5 else 7)
        assert not kept & {row.id for row in training}
    unusable = [{"id": "x", "turns": []}, *(conversation(41) | {"id": each} for each in (1, "\ud800"))]
    write_lines(path, *reversed(lines), *unusable)
    assert kept_for_validation(path, 64) == kept > kept_for_validation(path, 5)
    assert kept_for_validation(path, 0) == set()


def test_answers_that_this_target_cannot_have_written(tmp_path: Path) -> None:
    """Its vocabulary, its positions, and its identity as far as it is known: before the weights are loaded."""
    lines = [conversation(i, tokenizer_fingerprint="f", embedding_digest=digest) for i, digest in ((0, "e"), (50, "x"))]
    recording = read_answers(write_lines(tmp_path / "c.jsonl", *lines))

    def check(vocab_size: int = 320, positions: int = 512, fingerprint: str = "f", **identity: str) -> None:
        text, known = SimpleNamespace(vocab_size=vocab_size), {"tokenizer_fingerprint": fingerprint} | identity
        files: Any = SimpleNamespace(text_config=text, positions=positions, identity=known)
        recorded_answers.check_answers_before_loading(recording, files)

    check()
    for wrong, message in (
        ({"vocab_size": 60}, "2: token 61 is outside the target's vocabulary of 60"),
        ({"positions": 15}, "1: prompt and answer are 16 tokens, the target has 15 positions"),
        ({"fingerprint": "g"}, "1: .* tokenizer_fingerprint f there, g here"),
        ({"embedding_digest": "e"}, "2: .* x there, e here"),
    ):
        with pytest.raises(UserError, match=rf"c\.jsonl:{message}"):
            check(**wrong)  # type: ignore[arg-type]


# By the command.


def test_the_script_replays_regenerated_conversations(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of what was trained on, the conversations that training keeps for validation."""
    path = write_lines(place / "trained/conversations.jsonl", *(conversation(i, target_of(0)) for i in range(11)))
    out = place / "run/trained"
    settings = (f"data.conversations={path}", "eval.mode=replay", f"eval.answers={path}", f"eval.out={out}")
    measure(place, *settings)
    ids = {line["conversation_id"] for line in read_lines(out / "replay/generations.jsonl")}
    assert ids == kept_for_validation(path, 64) and len(ids) == 2
    numbers = json.loads((out / "replay/acceptance.json").read_text())
    assert numbers["answers"] == 4 and numbers["prompts"] == 2 and list(numbers["benchmarks"]) == ["mine"]
    plain = numbers["contenders"]["plain decoding"]
    assert (plain["tau"], plain["rounds"]) == (1, 4 * 11)
    timed = ("tokens_per_second", "speedup", "mean_prompt_speedup", "speed_ratio", "fastest_ratio", "overhead_share")
    never = ("matches_target", "predicted_speedup", "draft_milliseconds_per_call", "verify_milliseconds_per_round")
    assert {plain[name] for name in (*timed, *never)} == {None}
    assert "the 2 conversations that training keeps" in numbers["recorded_answers"]["note"]
    capsys.readouterr()
    for more, noted in (("train.validation_conversations=0", True), (f"data.conversations={place / 'others'}", False)):
        measure(place, *settings, more, "--plan")
        said = capsys.readouterr().out
        assert f"reads          {path}: 22 answers, " in said and ("has learnt these answers" in said) == noted


def test_what_recorded_answers_say_of_themselves(place: Path) -> None:
    """top_p means nothing at temperature 0; of answers without a temperature nobody knows."""
    chain = "eval.tree={policy: chain, nodes: 4, draw: sampled}"
    path = write_lines(place / "greedy.jsonl", conversation(0, top_p=0.9, top_k=5))
    measure(place, "eval.mode=replay", f"eval.answers={path}", chain, "--plan")
    write_lines(path, conversation(0, temperature=None))
    with pytest.raises(UserError, match=r"answers that were drawn \(or may have been\)"):
        measure(place, "eval.mode=replay", f"eval.answers={path}", chain, "--plan")
    main = contenders_of(load_recipe(place / "recipe.yaml"))[0].name
    lines = [generation_line(name, "x", [5, 4]) for name in ("plain decoding", main)]
    write_lines(path, *lines, generation_line("plain decoding", "y", [5, 4]))
    with pytest.raises(UserError, match=f"the answers of '{main}' are not to the same turns"):
        measure(place, "eval.mode=replay", f"eval.answers={path}", "--plan")
    answer = greedy(target_of(0), [5], 8)
    write_lines(path, *(generation_line(name, "x", answer[:n]) for name, n in (("plain decoding", 8), (main, 5))))
    measure(place, "eval.mode=replay", f"eval.answers={path}", f"eval.out={place / 'run/own'}")
    replayed = read_lines(place / "run/own/replay/generations.jsonl")
    assert {line["contender"]: len(line["token_ids"]) for line in replayed} == {"plain decoding": 8, main: 5}
    # Where embeddings are not recorded, another target with the same tokenizer is known by what it says.
    write_lines(path, *(conversation(i, target_of(1)) for i in range(4)))
    with pytest.raises(UserError, match=r"recorded from another target.*: \d\d of 96 greedy tokens"):
        measure(place, "eval.mode=replay", f"eval.answers={path}")
    assert not (place / "run/eval/replay/acceptance.json").exists()
