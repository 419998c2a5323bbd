"""Contenders decoded side by side: the same prompts for all, models loaded once, batches."""

import io
import json
from pathlib import Path
from typing import Any, get_args

import pytest

from draftsmith.eval.decoding.contenders import (
    Contender,
    check_contenders,
    contenders_of,
    loaded_drafting,
    loaded_proposer,
    main_contender,
    named,
)
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.eval.decoding.proposers import PROPOSERS, ProposerEntry
from draftsmith.eval.measurement import benchmarks, evaluation
from draftsmith.eval.measurement.benchmarks import PLAIN, decode_all, load_questions
from draftsmith.eval.measurement.compared import load_all
from draftsmith.eval.report_page import files
from draftsmith.models import loaded_models
from draftsmith.models.chat import decode_answer, render_prompt
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.prompt_reader import Rejects
from draftsmith.recipes.sections.eval import ProposerName, TreeSection
from tests.compare_cases import place as place
from tests.report_cases import Page
from tests.thinning import a_few


def test_models_are_loaded_once_and_each_reads_its_own_layers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chain = {"policy": "chain", "nodes": 4}
    lm = {"proposer": "causal_lm", "draft_model": {"model": str(place / "small")}, "tree": chain}
    others = [
        {"name": "lookup", "proposer": "prompt_lookup", "tree": chain},
        {"name": "lm"} | lm,
        {"name": "lm cut"} | lm | {"tree": chain | {"vocab_size": 50}},
    ]
    recipe, found = load_all(
        str(place / "recipe.yaml"),
        ["eval.also=" + json.dumps(others)],
        ["cut: eval.tree.vocab_size=16", f"b: eval.drafter={place / 'other/drafter'}"],
    )
    check_contenders(recipe, TargetFiles.read(recipe.target), found)
    loads: list[str] = []
    for owner, name in ((TargetFiles, "load"), (loaded_models, "load_drafter"), (loaded_models, "load_draft_model")):
        load = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *g, n=name, f=load, **m: (loads.append(n), f(*g, **m))[1])
    lineup = LoadedModels(TargetFiles(recipe.target))
    layers = {c.name: tuple(loaded_proposer(lineup, c).capture_layers) for c in found}
    assert loads == ["load", "load_drafter", "load_draft_model", "load", "load_drafter"]
    main = found[0].name
    assert layers == {main: (2, 3, 4), "lookup": (), "lm": (), "lm cut": (), "cut": (2, 3, 4), "b": (1, 5)}
    vocabularies = {c.name: loaded_drafting(lineup, c).vocab for c in found if c.proposer != "prompt_lookup"}
    assert [vocabularies[name].size for name in (main, "cut", "lm", "lm cut")] == [60, 16, 320, 50]
    # The 16 most frequent of the drafter's tokens 3 to 62, where lower ids were counted more often.
    assert vocabularies["cut"].target_ids.tolist() == list(range(3, 19))


@pytest.mark.parametrize("temperature", a_few([0.0, 1.0], 1.0))
def test_a_batch_gives_the_answers_of_one_at_a_time(
    place: Path, tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy: token for token. Drawn: too, for the draws of an answer hang on its turn and contender alone."""
    keys_drawn: list[Any] = []
    made = benchmarks.SeededDraws
    monkeypatch.setattr(benchmarks, "SeededDraws", lambda seed, key: (keys_drawn.append(key), made(seed, key))[1])
    asked = load_questions(str(place / "prompts.jsonl"), Rejects(), None)
    settings = [f"eval.temperature={temperature}", "eval.max_new_tokens=8", f"eval.out={tmp_path}"]
    lineup = LoadedModels(TargetFiles(load_recipe(place / "recipe.yaml").target))

    def answers(size: int) -> dict[tuple[str, str, int], tuple[list[int], list[int]]]:
        recipe = load_recipe(place / "recipe.yaml", [*settings, f"eval.batch_size={size}"])
        found, rejects = contenders_of(recipe), Rejects()
        results = decode_all(lineup, recipe, found, asked, io.StringIO(), rejects)
        assert not rejects.total
        keys = {name: [(g.conversation_id, g.turn) for g in generations] for name, generations in results.items()}
        assert len(set(map(tuple, keys.values()))) == 1  # the same turns in the same order for all
        said = {(g.conversation_id, g.turn): decode_answer(lineup.files.tokenizer, g.token_ids) for g in results[PLAIN]}
        for g in results[found[0].name]:  # later prompts hold plain decoding's answers
            assert g.turn == 1 or said[g.conversation_id, 1] in str(lineup.files.tokenizer.decode(g.prompt_token_ids))
        return {
            (name, g.conversation_id, g.turn): (g.token_ids, g.accepted_per_round)
            for name, generations in results.items()
            for g in generations
        }

    one = answers(1)
    assert len(one) == 2 * 7
    own = [key for key in keys_drawn if key != "warm-up"]
    assert len(set(own)) == len(own) == 2 * 7 and len(keys_drawn) == 2 * 7 + 2  # no two answers share their draws
    assert answers(2) == one
    assert answers(99) == one


def test_a_turn_that_cannot_be_asked_ends_its_own_conversation_alone(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = load_recipe(place / "recipe.yaml", ["eval.max_new_tokens=16", "eval.batch_size=4"])
    models = LoadedModels(TargetFiles(recipe.target))
    asked, rejects, bars = load_questions(str(place / "prompts.jsonl"), Rejects(), None), Rejects(), list[Bar]()
    lengths = {q.id: len(render_prompt(models.files.tokenizer, q.turns[0])) for q in asked}
    assert max(lengths, key=lengths.__getitem__) == "q1"
    monkeypatch.setattr(benchmarks, "usable_positions", lambda config: lengths["q1"] + 15)
    monkeypatch.setattr(benchmarks, "Bar", lambda **said: bars.append(Bar(**said)) or bars[-1])
    results = decode_all(models, recipe, contenders_of(recipe), asked, io.StringIO(), rejects)
    assert [(bar.n, bar.total) for bar in bars] == [(2 * 7,) * 2]  # answers by both; rejected ones are done with
    done = [(g.conversation_id, g.turn) for g in results[PLAIN]]
    assert ("q1", 1) not in done and ("q0", 1) in done and ("q2", 1) in done and ("q3", 1) in done
    assert ("q4", 1) in done and ("q1", 2) not in done  # the next batch, and no second turn without a first
    assert rejects.total == 1 + (("q3", 2) not in done)


def test_the_schema_names_the_proposers_of_the_table() -> None:
    assert set(get_args(ProposerName)) == set(PROPOSERS)


def test_a_new_proposer_is_decoded_described_and_reported(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise UserError("no such echo")

    echo = ProposerEntry(
        name=lambda contender: f"echo of {contender.tree.most - 1}",
        make=lambda lineup, contender: PromptLookup(contender.tree.most - 1, lineup.target.device, max_ngram=1),
    )
    monkeypatch.setitem(PROPOSERS, "echo", echo)
    recipe = load_recipe(str(place / "recipe.yaml"), [f"eval.out={tmp_path}", "eval.max_prompts=2"])
    tree = TreeSection(policy="chain", nodes=4)
    contenders = named([main_contender(recipe), Contender("", "echo", tree, "here")])
    evaluation.evaluate_by_decoding(recipe, contenders, plan=False)
    row = files.read_acceptance(tmp_path / "acceptance.json")["contenders"]["echo of 3"]
    assert (row["proposer"], row["drafter"], row["matches_target"]) == ("echo", None, True)
    assert row["tree_nodes_per_round"] > 1
    assert "echo of 3" in Page((tmp_path / "report.html").read_text()).text
    monkeypatch.setitem(PROPOSERS, "echo", ProposerEntry(name=echo.name, make=echo.make, key="here", check=refuse))
    with pytest.raises(UserError, match="here: no such echo"):
        evaluation.evaluate_by_decoding(recipe, contenders, plan=True)
