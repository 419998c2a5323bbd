"""Replay takes the rounds that decoding took, answer by answer; and answers of other targets are refused.

Drafters are taught the target's greedy answers almost by heart (`tests.pairs`): much is accepted, and much is not.
"""

import itertools
import json
import random
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.eval import acceptance
from draftsmith.eval.decoding.contenders import contenders_of
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.decoding.policies import PolicyProposer
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.eval.replay.recorded_answers import (
    RecordedAnswer,
    check_answers_before_loading,
    kept_for_validation,
    read_answers,
)
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
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.train.run.training_inputs import read_rows
from tests import pairs, reference
from tests.compare_cases import place as place
from tests.conftest import make_target
from tests.decoding import decode, decode_batch
from tests.eval.test_lossless import FAMILIES, POLICIES, policy_called, proposer_of
from tests.pairs import greedy, pair_of, taught
from tests.replay_cases import SAME, assert_same_rounds, conversation, recorded, write_lines
from tests.scripted_drafting import unasked_target
from tests.thinning import a_few
from tests.training_runs import run_main

# Of the last three a drafter knows nothing.
PROMPTS = (*pairs.PROMPTS, list(range(30, 60)), [9, 9, 9, 9], [200, 13, 77])
BUDGET = 34
EVERYTHING = list(itertools.product(("llama", "qwen3", "gemma2"), [*POLICIES, "c2t", "causal_lm"]))


def accepted_by(generations: Sequence[Generation]) -> int:
    return sum(sum(g.accepted_per_round) for g in generations)


@pytest.mark.parametrize(("family", "name"), a_few(EVERYTHING, ("llama", "eagle2"), ("llama", "causal_lm")))
def test_replaying_what_was_decoded_takes_the_same_rounds(
    family: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With stops in the middle, budgets, however many answers stand side by side, and where passes and rows are cut."""
    target, _ = pair_of(family, None, **FAMILIES[family])
    proposer = proposer_of(family, name, "eagle2") if name == "causal_lm" else proposer_of(family, "eagle3", name)
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


def generation_line(contender: str, conversation_id: str, tokens: list[int]) -> dict[str, Any]:
    whose = {"benchmark": "b", "category": None, "conversation_id": conversation_id, "turn": 1}
    return {"contender": contender} | whose | {"prompt_token_ids": [5], "token_ids": tokens, "other": 1.5}


@cache
def target_of(seed: int) -> Target:
    return Target(make_target(seed=seed))


@cache
def drawn(sampling: Sampling, seed: int = 0) -> list[RecordedAnswer]:
    """Answers of the target of that seed."""
    draws = [SeededDraws(3, i) for i in range(30)]
    prompts = [[11 + i, 12, 13] for i in range(len(draws))]
    return recorded(decode_batch(target_of(seed), None, prompts, {-1}, 40, sampling, draws), sampling)


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
    *(GREEDY, Sampling(0.3), Sampling(0.7), Sampling(1.0), Sampling(1.5), Sampling(1.0, top_k=5)),
    *(Sampling(1.0, top_p=0.3), Sampling(1.0, top_p=0.8, top_k=20), Sampling(0.3, top_p=0.9), Sampling(1.5, top_k=3)),
)
each_sampling = pytest.mark.parametrize("sampling", a_few(SAMPLINGS, GREEDY, Sampling(1.0, top_k=5)), ids=str)


@each_sampling
def test_answers_of_another_target_are_refused(sampling: Sampling) -> None:
    for other in (target_of(1), nearly(target_of(0))):
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


@pytest.mark.parametrize(
    ("agreement", "fits"),
    [
        (Agreement(False, greedy_tokens=1000, other=8), False),
        (Agreement(True, greedy_tokens=1000, other=8), True),
        (Agreement(True, greedy_tokens=1000, other=51), False),
        (Agreement(False, drawn_tokens=1000, impossible=8), False),
        (Agreement(False, drawn_tokens=1000, impossible=1), True),
    ],
)
def test_a_few_differing_tokens_are_rounding(agreement: Agreement, fits: bool) -> None:
    """Of 1,000 to 50 tokens bfloat16 may turn one."""
    with nullcontext() if fits else pytest.raises(UserError, match="in another precision"):
        agreement.check()


def test_conversations_are_read_turn_by_turn(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "c.jsonl", conversation(0), "", conversation(1, temperature=0.7, top_k=5))
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
    (tmp_path / "acceptance.json").write_text('{"temperature": 0.5, "top_p": 0.9, "top_k": 3, "contenders": {}}')
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


NO_TOKENS: tuple[Any, ...] = (None, "a", {}, [], [[1]], [-1], [1.0], [float("nan")], [True])


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "malformed JSON"),
        ({"id": "x", "messages": []}, "neither a line of generations"),
        ({"id": "x", "turns": ["How?", "Why?"]}, "neither a line of generations"),
        ({"id": "x", "turns": []}, "neither a line of generations"),
        ({"contender": "e"}, "benchmark is missing"),
        (generation_line("e", "x", [6]) | {"contender": ["e"]}, r"contender is \['e'\]: "),
        (conversation(0) | {"id": 1}, "conversation_id is 1: "),
        (conversation(0) | {"messages": [{"content": [{"type": "image", "path": 1}]}]}, "pictures.0.path is 1: "),
        (conversation(0, temperature=-1.0), "temperature"),
        (conversation(0, temperature=10**400), "neither a line of generations"),
        (conversation(0, lossless=False), "written by an acceptance rule"),
        *((generation_line("e", "x", tokens), r"token_ids\b.* is ") for tokens in NO_TOKENS),
        *((generation_line("e", "x", [6]) | {"prompt_token_ids": each}, "prompt_token_ids") for each in NO_TOKENS),
    ],
)
def test_lines_that_cannot_be_replayed_are_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write_lines(tmp_path / "c.jsonl", conversation(1), line)
    with pytest.raises(UserError, match=rf"c\.jsonl:2: {message}"):
        read_answers(path)
    with pytest.raises(UserError, match="holds no answer"):
        read_answers(write_lines(tmp_path / "empty.jsonl"))


def test_labels_of_users_may_be_anything(tmp_path: Path) -> None:
    lines = [conversation(i) | {"meta": {"benchmark": label, "category": label}} for i, label in enumerate((["x"], 1))]
    answers = read_answers(write_lines(tmp_path / "c.jsonl", *lines)).of("x", "y")
    assert [(answer.benchmark, answer.category) for answer in answers] == [("", None)] * 4


def test_what_lies_beside_answers_is_checked(tmp_path: Path) -> None:
    """A row without `lossless` is an exact rule's, and takes nothing from what the file says of the target."""
    path, beside = write_lines(tmp_path / "g.jsonl", generation_line("e", "x", [6])), tmp_path / "acceptance.json"
    said = {"temperature": 0.5, "top_p": 0.9, "top_k": 3, "target_identity": {"adapter": "a"}, "contenders": {"e": {}}}
    beside.write_text(json.dumps(said))
    recording = read_answers(path)
    assert [answer.sampling for answer in recording] == [Sampling(0.5, 0.9, 3)]
    assert [identity["adapter"] for _, identity in recording.identities] == ["a"]
    wrong = ({"contenders": []}, {"contenders": {"e": 1}}, {"target_identity": []}, {"temperature": "x"})
    for text in ("{", *(json.dumps(said | each) for each in wrong)):
        beside.write_text(text)
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
        check_answers_before_loading(recording, files)

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


@pytest.fixture
def measure(place: Path) -> Callable[..., None]:
    return partial(run_main, acceptance, place / "recipe.yaml")


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
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

    def rounds(path: Path) -> dict[Any, Any]:
        same, whose = (*SAME, "benchmark", "category", "text"), ("contender", "conversation_id", "turn")
        lines = lines_of(path / "generations.jsonl")
        return {tuple(line[key] for key in whose): {key: line[key] for key in same} for line in lines}

    assert rounds(out / "replay") == rounds(out)
    mine, its = (json.loads((path / "acceptance.json").read_text()) for path in (out / "replay", out))
    assert mine["mode"] == "replay" and mine["temperature"] == temperature
    for name, row in its["contenders"].items():
        for key in ("tau", "tau_interval", "accepted_histogram", "acceptance_by_position", "draft_calls_per_round"):
            assert mine["contenders"][name][key] == row[key]
        for key in ("tokens_per_second", "speedup", "speedup_interval", "matches_target"):
            assert mine["contenders"][name][key] is None
    if temperature == 0:
        assert re.search(r"0 of \d+ greedy tokens are not the target's likeliest", said)
    else:
        assert re.search(r"\d+ drawn tokens, [+-]0\.\d{3} nats each beyond its own", said)


def test_the_script_replays_regenerated_conversations(
    place: Path, target_dir: Path, measure: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what was trained on, the conversations that training keeps for validation."""
    target = Target(TargetFiles(TargetSection(model=str(target_dir), dtype="float32")).load_model())
    path = write_lines(place / "trained/conversations.jsonl", *(conversation(i, target) for i in range(11)))
    out = place / "run/trained"
    settings = (f"data.conversations={path}", "eval.mode=replay", f"eval.answers={path}", f"eval.out={out}")
    measure(*settings)
    ids = {line["conversation_id"] for line in lines_of(out / "replay/generations.jsonl")}
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
        measure(*settings, more, "--plan")
        said = capsys.readouterr().out
        assert f"reads          {path}: 22 answers, " in said and ("has learnt these answers" in said) == noted


def test_what_recorded_answers_say_of_themselves(place: Path, target_dir: Path, measure: Callable[..., None]) -> None:
    """top_p means nothing at temperature 0; of answers without a temperature nobody knows."""
    chain = "eval.tree={policy: chain, nodes: 4, draw: sampled}"
    path = write_lines(place / "greedy.jsonl", conversation(0, top_p=0.9, top_k=5))
    measure("eval.mode=replay", f"eval.answers={path}", chain, "--plan")
    write_lines(path, conversation(0, temperature=None))
    with pytest.raises(UserError, match=r"answers that were drawn \(or may have been\)"):
        measure("eval.mode=replay", f"eval.answers={path}", chain, "--plan")
    main = contenders_of(load_recipe(place / "recipe.yaml"))[0].name
    lines = [generation_line(name, "x", [5, 4]) for name in ("plain decoding", main)]
    write_lines(path, *lines, generation_line("plain decoding", "y", [5, 4]))
    with pytest.raises(UserError, match=f"the answers of '{main}' are not to the same turns"):
        measure("eval.mode=replay", f"eval.answers={path}", "--plan")
    answer = greedy(Target(TargetFiles(TargetSection(model=str(target_dir), dtype="float32")).load_model()), [5], 8)
    write_lines(path, *(generation_line(name, "x", answer[:n]) for name, n in (("plain decoding", 8), (main, 5))))
    measure("eval.mode=replay", f"eval.answers={path}", f"eval.out={place / 'run/own'}")
    replayed = lines_of(place / "run/own/replay/generations.jsonl")
    assert {line["contender"]: len(line["token_ids"]) for line in replayed} == {"plain decoding": 8, main: 5}


def test_answers_of_another_target_with_the_same_tokenizer_are_refused(
    place: Path, measure: Callable[..., None]
) -> None:
    """By what it says, where its embeddings are not recorded."""
    other = Target(make_target(seed=1))
    unknown = write_lines(place / "unknown.jsonl", *(conversation(i, other) for i in range(4)))
    with pytest.raises(UserError, match=r"recorded from another target.*: \d\d of 96 greedy tokens"):
        measure("eval.mode=replay", f"eval.answers={unknown}")
    assert not (place / "run/eval/replay/acceptance.json").exists()
