"""Recorded answers: whose they are, and which lines cannot be used."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.eval.replay.recorded_answers import (
    RecordedAnswer,
    check_answers_before_loading,
    kept_for_validation,
    read_answers,
)
from draftsmith.eval.replay.replay import Agreement, read_states, replay
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.train.run.training_inputs import read_rows
from tests.conftest import make_target
from tests.decoding import decode_batch
from tests.replay_cases import conversation, generation_line, recorded, write_lines
from tests.thinning import a_few


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


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "malformed JSON"),
        ({"id": "x", "messages": []}, "neither a line of generations"),
        ({"id": "x", "turns": ["How?", "Why?"]}, "neither a line of generations"),
        ({"contender": "e"}, "neither a line of generations"),
        (conversation(0, temperature=-1.0), "temperature"),
    ],
)
def test_lines_that_cannot_be_replayed_are_named(tmp_path: Path, line: Any, message: str) -> None:
    path = write_lines(tmp_path / "c.jsonl", conversation(1), line)
    with pytest.raises(UserError, match=rf"c\.jsonl:2: {message}"):
        read_answers(path)
    with pytest.raises(UserError, match="holds no answer"):
        read_answers(write_lines(tmp_path / "empty.jsonl"))


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
    write_lines(path, *reversed(lines))
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
