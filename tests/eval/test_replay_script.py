"""eval.mode=replay from the command line."""

import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval import acceptance
from draftsmith.eval.decoding.contenders import contenders_of
from draftsmith.eval.replay.recorded_answers import kept_for_validation
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.target import TargetSection
from tests.compare_cases import place as place
from tests.conftest import make_target
from tests.pairs import greedy
from tests.replay_cases import SAME, conversation, generation_line, write_lines
from tests.training_runs import run_main


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
    """By the embeddings where they are recorded, by what it says where they are not."""
    other = Target(make_target(seed=1))
    unknown = write_lines(place / "unknown.jsonl", *(conversation(i, other) for i in range(4)))
    with pytest.raises(UserError, match=r"recorded from another target.*: \d\d of 96 greedy tokens"):
        measure("eval.mode=replay", f"eval.answers={unknown}")
    known = write_lines(place / "known.jsonl", conversation(0, other, embedding_digest="0" * 64))
    with pytest.raises(UserError, match=r"known\.jsonl:1: recorded from another target: embedding_digest 0000"):
        measure("eval.mode=replay", f"eval.answers={known}")
    assert not (place / "run/eval/replay/acceptance.json").exists()
