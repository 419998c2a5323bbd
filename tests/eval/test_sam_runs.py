"""SAM-Decoding by the scripts: a corpus is sorted, contenders look in it, and the files say who drafted."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data_gen import build_sam
from draftsmith.eval import acceptance
from draftsmith.models.suffix_automaton import StaticAutomaton
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.stages import stages_of
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.target import TargetSection
from tests.compare_cases import also
from tests.compare_cases import place as place
from tests.replay_cases import write_lines
from tests.report_cases import Page
from tests.thinning import a_few
from tests.training_runs import run_main


@pytest.fixture(scope="module")
def answers(place: Path, target_dir: Path) -> Path:
    """The target's own answers, from an evaluation: the run's conversations."""
    run_main(acceptance, place / "recipe.yaml", f"eval.out={place / 'first'}", "eval.max_new_tokens=40")
    fingerprint = TargetFiles(TargetSection(model=str(target_dir))).fingerprint
    lines = map(json.loads, (place / "first/generations.jsonl").read_text().splitlines())
    plain = [line for line in lines if line["contender"] == "plain decoding"]
    records = [
        {
            "id": f"c{i}",
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "not read"}],
            "turns": [{"prompt_token_ids": line["prompt_token_ids"], "output_token_ids": line["token_ids"]}] * 2,
            "generator": {"tokenizer_fingerprint": fingerprint, "temperature": 0.0},
        }
        for i, line in enumerate(plain)
    ]
    return write_lines(place / "run/conversations.jsonl", *records)


@pytest.fixture(scope="module")
def corpus(place: Path, answers: Path) -> Path:
    run_main(build_sam, place / "recipe.yaml")
    return place / "run/sam.safetensors"


def test_answers_are_taken_as_their_tokens_and_end_behind_stops(
    place: Path, answers: Path, corpus: Path, target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fingerprint = TargetFiles(TargetSection(model=str(target_dir))).fingerprint
    automaton = StaticAutomaton.load(corpus, fingerprint)
    told = [json.loads(line)["turns"][0]["output_token_ids"] for line in answers.read_text().splitlines()]
    distinct = {tuple(tokens) for tokens in told}
    assert len(automaton.order) == sum(map(len, distinct))
    for tokens in told:
        assert automaton.longest([7, 7, *tokens]).length >= len(tokens)
    (place / "texts.txt").write_text("the cat ran\n")
    stop = TargetFiles(TargetSection(model=str(target_dir))).tokenizer.eos_token
    (place / "more.jsonl").write_text(json.dumps({"text": f"a mat{stop}the dog"}) + "\n" + "{}\n")
    sources = json.dumps([str(place / "texts.txt"), str(place / "more.jsonl"), str(place / "*.txt")])
    overrides = f"data.sam.sources={sources}", f"data.sam.out={place / 'other.safetensors'}"
    run_main(build_sam, place / "recipe.yaml", *overrides, "--plan")
    assert "6 bytes a token" in capsys.readouterr().out and not (place / "other.safetensors").exists()
    run_main(build_sam, place / "recipe.yaml", *overrides)
    said = capsys.readouterr().out
    assert "in 3 documents, 1 repeated ones left out; 1 record rejected" in said


@pytest.mark.parametrize("mode", a_few(["routed", "fused"], "fused"))
def test_an_evaluation_tells_who_drafted_and_a_replay_agrees(place: Path, corpus: Path, mode: str) -> None:
    out, recipe = place / mode, place / "recipe.yaml"
    router: dict[str, Any] = {"static": str(corpus), "l_threshold": 2, "l_bias": 1, "fuse": mode == "fused"}
    settings = [
        *(f"eval.out={out}", f"eval.router={json.dumps(router)}"),
        also(name="alone", proposer="sam", sam={"static": str(corpus)}),
    ]
    assert "build-sam" in stages_of(load_recipe(recipe, settings))
    run_main(acceptance, recipe, *settings)
    run_main(acceptance, recipe, *settings, "eval.mode=replay")
    decoded, replayed = (json.loads((path / "acceptance.json").read_text()) for path in (out, out / "replay"))
    for name, row in decoded["contenders"].items():
        assert row["matches_target"] is True
        for key in ("drafted_by", "accepted_histogram"):
            assert replayed["contenders"][name][key] == row[key]
    row, alone = decoded["contenders"][decoded["contender"]], decoded["contenders"]["alone"]
    assert row["router"] == router | {"dynamic": True, "nodes": 40} and alone["sam"]["static"] == str(corpus)
    assert {"drafter", "sam static"} <= set(row["drafted_by"]) and "drafter" not in alone["drafted_by"]
    assert sum(share["accepted"] for share in row["drafted_by"].values()) == pytest.approx(1, abs=1e-3)
    assert row["drafted_by"]["sam static"]["accepted"] > 0.5  # the target says again what it said
    assert (row["drafted_by"]["drafter"]["rounds"] == 1) == (mode == "fused")
    html = (out / "report.html").read_text()
    by = "drafted by drafter and sam static" if mode == "fused" else "drafted by sam static"
    assert "Who drafted it" in Page(html).text and by in html
