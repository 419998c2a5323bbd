"""Contenders from recipes and overrides: names, checks, the folder of a run; decoded side by side, with the same
prompts for all; and with SAM."""

import io
import json
import re
import shutil
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
import yaml

from draftsmith.data_gen import build_sam
from draftsmith.eval.decoding import contenders
from draftsmith.eval.decoding.contenders import check_contenders, contenders_of
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.decoding.proposers import PROPOSERS
from draftsmith.eval.measurement import benchmarks, evaluation
from draftsmith.eval.measurement.benchmarks import PLAIN, decode_all, load_questions
from draftsmith.eval.measurement.compared import load_all, split_overrides
from draftsmith.eval.measurement.generation_log import read_generations
from draftsmith.eval.report_page import result_files
from draftsmith.models import loaded_models
from draftsmith.models.chat import decode_answer, render_prompt
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.onednn_linear import BlockedLinear, able
from draftsmith.models.suffix_automaton import StaticAutomaton
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import save_token_counts
from draftsmith.recipes.command.stages import stages_of
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.prompt_reader import Rejects
from draftsmith.recipes.sections.eval import ProposerName
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import make_target, make_tokenizer
from tests.evaluation_cases import PROMPTS, SAME, Page, measure, read_lines, write_lines
from tests.evaluation_cases import place as place
from tests.thinning import EXHAUSTIVE, a_few
from tests.training_runs import run_main


def problems_of(recipe: Path, *compared: str) -> list[str]:
    with pytest.raises(UserError) as raised:
        load_all(str(recipe), (), compared)
    return raised.value.problems


def test_a_set_of_overrides_is_split_where_a_key_begins() -> None:
    for argument, name, settings in (
        ("  eval.tree.nodes=16   eval.tree.top_k=4 ", "", ["eval.tree.nodes=16", "eval.tree.top_k=4"]),
        ("a, b: c: eval.tree.nodes=9", "a, b: c", ["eval.tree.nodes=9"]),
        ("x: eval.tree={nodes: 5, top_k: 3} eval.out=a b", "x", ["eval.tree={nodes: 5, top_k: 3}", "eval.out=a b"]),
        ("eval.tree.paths=[[0], [0, 0]] eval.out=x", "", ["eval.tree.paths=[[0], [0, 0]]", "eval.out=x"]),
    ):
        assert split_overrides(argument) == (name, settings)


def test_one_contender_for_each_argument(place: Path) -> None:
    recipe, found = load_all(
        str(place / "recipe.yaml"),
        ["eval.max_prompts=2", "eval.also=[{name: lookup, proposer: prompt_lookup, tree: {policy: chain, nodes: 6}}]"],
        [
            *("eval.tree.nodes=8", "deep: eval.tree={policy: ddd, nodes: 9} ", str(place / "other.yaml")),
            *(f"other: eval.drafter={place / 'other/drafter'}", "eval.tree.vocab_size=16", "again: eval.tree.nodes=8"),
        ],
    )
    assert recipe.eval.max_prompts == 2
    assert [(c.name, c.tree.policy, c.tree.most, c.drafter and c.drafter.parent.name) for c in found] == [
        ("eagle3, tree of 12", "eagle2", 12, "run"),
        ("lookup", "chain", 6, None),
        ("eagle3, tree of 8", "eagle2", 8, "run"),
        ("deep", "ddd", 9, "run"),
        ("eagle3, chain of 3", "chain", 4, "other"),
        ("other", "eagle2", 12, "other"),
        ("eagle3, tree of 12, 16 tokens", "eagle2", 12, "run"),
        ("again", "eagle2", 8, "run"),  # how much does this machine waver?
    ]
    # Single keys add to the recipe's, a section replaces it.
    assert found[2].tree.calls == 3 and found[3].tree.calls == 11
    assert found[6].token_counts == place / "run/token_counts.safetensors"


def test_every_problem_of_every_recipe_at_once(place: Path, tmp_path: Path) -> None:
    first, broken = place / "recipe.yaml", tmp_path / "broken.yaml"
    broken.write_text("output_dir: x\ntarget: {model: a/b}\nevil: 1\ntrain: {max_steps: 0}\n")
    problems = problems_of(first, str(broken), "eval.max_new_tokens=9", str(tmp_path / "gone.yaml"))
    told = f"--compare '{broken}': {broken}:3: unknown key `evil`", f"{broken}:4: `train.max_steps`"
    for said in (*told, "eval.max_new_tokens is the same for all contenders", "gone.yaml: no such recipe file"):
        assert any(said in problem for problem in problems), (said, problems)
    assert len(problems) == 4


def test_another_target_is_refused_with_both_sides(place: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((place / "recipe.yaml").read_text())
    other, target = tmp_path / "other.yaml", content["target"]
    other.write_text(yaml.safe_dump(content | {"target": target | {"dtype": "bfloat16", "device": "auto"}}))
    told = f"--compare '{other}': another target than {place / 'recipe.yaml'}'s: target."
    assert problems_of(place / "recipe.yaml", str(other)) == [told + "dtype is 'bfloat16' there, 'float32' here"]


def test_what_cannot_be_measured_is_told_before_weights_load(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What files lack. All at once, each in its own place and once."""
    for name in ("deep", "short"):
        shutil.copytree(place / "run/drafter", place / name)
    config = json.loads((place / "deep/config.json").read_text())
    config["drafter"]["capture_layers"] = [2, 3, 8]
    (place / "deep/config.json").write_text(json.dumps(config))
    whole = (place / "short/model.safetensors").read_bytes()
    (place / "short/model.safetensors").write_bytes(whole[:-8])  # the last row of the last tensor
    save_token_counts(place / "foreign", torch.ones(320, dtype=torch.int64), "f" * 64, [4])
    strange = make_tokenizer()
    strange.add_tokens(["zebra"])
    make_target(num_layers=1).save_pretrained(place / "strange")
    strange.save_pretrained(place / "strange")
    lm = {"proposer": "causal_lm", "tree": {"policy": "chain", "nodes": 4}}
    rows: dict[str, dict[str, Any]] = {
        "drafter: .*no drafter here": {"drafter": "nowhere"},
        "cannot read this target: .*capture_layers": {"drafter": str(place / "deep")},
        "61 is more than the 60 tokens of the drafter's": {"tree": {"vocab_size": 61}},
        "short/model.safetensors: damaged": {"drafter": str(place / "short")},
        "has another tokenizer than the target": lm | {"draft_model": {"model": str(place / "strange")}},
    }
    sections = [{"name": str(i), **row} for i, row in enumerate(rows.values())]
    monkeypatch.setattr(TargetFiles, "load", lambda *_: pytest.fail("weights were loaded"))
    foreign = f"foreign: eval.tree.vocab_size=16 eval.token_counts={place / 'foreign'}"
    with pytest.raises(UserError) as raised:
        measure(place, f"eval.also={json.dumps(sections)}", "--compare", "n: eval.drafter=nowhere", foreign)
    problems = raised.value.problems
    assert len(problems) == len(rows) + 1
    for said in (*rows, "was counted with a tokenizer"):
        assert sum(bool(re.search(said, problem)) for problem in problems) == 1, (said, problems)
    assert all(problem.startswith(("eval.also.", "--compare '")) for problem in problems)
    assert problems[0].startswith("eval.also.0.drafter: ") and problems[0].endswith("(also affects 1 other contender)")


def test_an_interrupted_run_leaves_the_older_one_whole(place: Path, tmp_path: Path) -> None:
    """New answers never lie beside older numbers, either: replay believes what these say about the answers."""
    arguments = [f"eval.out={tmp_path / 'out'}", "eval.max_prompts=1"]

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    measure(place, *arguments)
    before = files()
    assert set(before) == {".lock", "acceptance.json", "generations.jsonl", "report.html"}
    for owner, name in ((evaluation, "how_made"), (benchmarks, "loaded_proposer"), (result_files, "write_acceptance")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            measure(place, *arguments, "eval.tree.nodes=4")
        left = files()
        left.pop("generations.jsonl.partial", None)
        if name == "write_acceptance":
            assert left["generations.jsonl"] != before["generations.jsonl"] and "acceptance.json" not in left
        else:
            assert left == before
    measure(place, *arguments)
    for mode, out in (("decode", tmp_path / "out"), ("replay", tmp_path / "out/replay")):
        with alone_in(out), pytest.raises(UserError, match="another run is writing there"):
            measure(place, *arguments, f"eval.mode={mode}")


def test_models_are_loaded_once_and_each_reads_its_own_layers(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert set(get_args(ProposerName)) == set(PROPOSERS)
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
    for owner, name in ((TargetFiles, "load"), (loaded_models, "load_drafter")):
        load = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *g, n=name, f=load, **m: (loads.append(n), f(*g, **m))[1])
    lineup = LoadedModels(TargetFiles(recipe.target))
    layers = {c.name: tuple(contenders.loaded_proposer(lineup, c).capture_layers) for c in found}
    assert loads == ["load", "load_drafter", "load", "load_drafter"]
    main = found[0].name
    assert layers == {main: (2, 3, 4), "lookup": (), "lm": (), "lm cut": (), "cut": (2, 3, 4), "b": (1, 5)}
    vocabularies = {c.name: contenders.loaded_drafting(lineup, c).vocab for c in found if c.proposer != "prompt_lookup"}
    assert [vocabularies[name].size for name in (main, "cut", "lm", "lm cut")] == [60, 16, 320, 50]
    assert isinstance(lineup.drafters[place / "other/drafter"].head_product, BlockedLinear) or not able(torch.float32)
    # The 16 most frequent of the drafter's tokens 3 to 62, where lower ids were counted more often.
    assert vocabularies["cut"].target_ids.tolist() == list(range(3, 19))


def decoded_by_all(place: Path, models: LoadedModels, *settings: str) -> tuple[dict[str, list[Generation]], Rejects]:
    recipe, rejects = load_recipe(place / "recipe.yaml", settings), Rejects()
    asked = load_questions(str(place / "prompts.jsonl"), Rejects(), None)
    return decode_all(models, recipe, contenders_of(recipe), asked, io.StringIO(), rejects), rejects


@pytest.mark.parametrize("temperature", a_few([0.0, 1.0], 1.0))
def test_a_batch_gives_the_answers_of_one_at_a_time(
    place: Path, tmp_path: Path, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy: token for token. Drawn: too, for the draws of an answer hang on its turn and contender alone."""
    keys_drawn: list[Any] = []
    made = benchmarks.SeededDraws
    monkeypatch.setattr(benchmarks, "SeededDraws", lambda seed, key: (keys_drawn.append(key), made(seed, key))[1])
    settings = [f"eval.temperature={temperature}", "eval.max_new_tokens=8", f"eval.out={tmp_path}"]
    models = LoadedModels(TargetFiles(load_recipe(place / "recipe.yaml").target))

    def answers(size: int) -> dict[tuple[str, str, int], tuple[list[int], list[int]]]:
        results, rejects = decoded_by_all(place, models, *settings, f"eval.batch_size={size}")
        assert not rejects.total
        keys = {name: [(g.conversation_id, g.turn) for g in generations] for name, generations in results.items()}
        assert len(set(map(tuple, keys.values()))) == 1  # the same turns in the same order for all
        tokenizer = models.files.tokenizer
        said = {(g.conversation_id, g.turn): decode_answer(tokenizer, g.token_ids) for g in results[PLAIN]}
        for g in results["eagle3, tree of 12"]:  # later prompts hold plain decoding's answers
            assert g.turn == 1 or said[g.conversation_id, 1] in str(tokenizer.decode(g.prompt_token_ids))
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
    models = LoadedModels(TargetFiles(load_recipe(place / "recipe.yaml").target))
    lengths = [len(render_prompt(models.files.tokenizer, [{"role": "user", "content": text}])) for text in PROMPTS]
    assert max(lengths) == lengths[1]
    monkeypatch.setattr(benchmarks, "usable_positions", lambda config: lengths[1] + 15)
    results, rejects = decoded_by_all(place, models, "eval.max_new_tokens=16", "eval.batch_size=4")
    done = [(g.conversation_id, g.turn) for g in results[PLAIN]]
    assert ("q1", 1) not in done and ("q0", 1) in done and ("q2", 1) in done and ("q3", 1) in done
    assert ("q4", 1) in done and ("q1", 2) not in done  # the next batch, and no second turn without a first
    assert rejects.total == 1 + (("q3", 2) not in done)


# SAM-Decoding.


@pytest.fixture(scope="module")
def corpus(place: Path, target_dir: Path) -> Path:
    """Of the target's own answers, from an evaluation: the run's conversations."""
    measure(place, f"eval.out={place / 'first'}", "eval.max_new_tokens=40")
    fingerprint = TargetFiles(TargetSection(model=str(target_dir))).fingerprint
    records = [
        {
            "id": f"c{i}",
            "messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "not read"}],
            "turns": [{"prompt_token_ids": line["prompt_token_ids"], "output_token_ids": line["token_ids"]}] * 2,
            "generator": {"tokenizer_fingerprint": fingerprint, "temperature": 0.0},
        }
        for i, line in enumerate(read_generations(place / "first/generations.jsonl", PLAIN))
    ]
    write_lines(place / "run/conversations.jsonl", *records)
    run_main(build_sam, place / "recipe.yaml")
    return place / "run/sam.safetensors"


def test_answers_are_taken_as_their_tokens_and_end_behind_stops(
    place: Path, corpus: Path, target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = TargetFiles(TargetSection(model=str(target_dir)))
    automaton = StaticAutomaton.load(corpus, files.fingerprint)
    told = {tuple(line["token_ids"]) for line in read_generations(place / "first/generations.jsonl", PLAIN)}
    assert len(automaton.order) == sum(map(len, told))
    for tokens in told:
        assert automaton.longest([7, 7, *tokens]).length >= len(tokens)
    (place / "texts.txt").write_text("the cat ran\n")
    write_lines(place / "more.jsonl", {"text": f"a mat{files.tokenizer.eos_token}the dog"}, {})
    sources = json.dumps([str(place / "texts.txt"), str(place / "more.jsonl"), str(place / "*.txt")])
    overrides = f"data.sam.sources={sources}", f"data.sam.out={place / 'other.safetensors'}"
    run_main(build_sam, place / "recipe.yaml", *overrides)
    assert "in 3 documents, 1 repeated ones left out; 1 record rejected" in capsys.readouterr().out


DRAWN = pytest.param("routed", 0.4, marks=pytest.mark.slow)


@pytest.mark.parametrize(
    ("mode", "temperature"), [("fused", 0.0), DRAWN, pytest.param("routed", 0.0, marks=EXHAUSTIVE)]
)
def test_an_evaluation_tells_who_drafted_and_a_replay_agrees(
    place: Path, corpus: Path, mode: str, temperature: float, capsys: pytest.CaptureFixture[str]
) -> None:
    out = place / f"{mode} at {temperature}"
    router: dict[str, Any] = {"static": str(corpus), "l_threshold": 2, "l_bias": 1, "fuse": mode == "fused"}
    also = [
        {"name": "alone", "proposer": "sam", "sam": {"static": str(corpus)}},
        {"name": "lookup", "proposer": "prompt_lookup", "tree": {"policy": "chain", "nodes": 4}},
    ]
    settings = [f"eval.out={out}", f"eval.router={json.dumps(router)}", f"eval.also={json.dumps(also)}"]
    assert "build-sam" in stages_of(load_recipe(place / "recipe.yaml", settings))
    measure(place, *settings, f"eval.temperature={temperature}")
    before = (out / "acceptance.json").read_bytes()
    capsys.readouterr()
    # What was recorded says how answers were drawn, not the recipe.
    measure(place, *settings, "eval.mode=replay", "eval.replay_batch_size=3")
    said = capsys.readouterr().out
    assert (out / "acceptance.json").read_bytes() == before

    def rounds(path: Path) -> dict[Any, Any]:
        same, whose = (*SAME, "benchmark", "category", "text"), ("contender", "conversation_id", "turn")
        lines = read_lines(path / "generations.jsonl")
        return {tuple(line[key] for key in whose): {key: line[key] for key in same} for line in lines}

    assert rounds(out / "replay") == rounds(out)
    decoded, replayed = (json.loads((path / "acceptance.json").read_text()) for path in (out, out / "replay"))
    assert replayed["mode"] == "replay" and replayed["temperature"] == temperature
    rows = decoded["contenders"]
    same = ("tau_interval", "accepted_histogram", "acceptance_by_position", "draft_calls_per_round", "drafted_by")
    for name, row in rows.items():
        assert row["matches_target"] is (None if temperature else True)
        again = replayed["contenders"][name]
        assert [again[key] for key in ("tau", *same)] == [row[key] for key in ("tau", *same)]
        assert {again[key] for key in ("tokens_per_second", "speedup", "speedup_interval", "matches_target")} == {None}
    if temperature:
        assert re.search(r"\d+ drawn tokens, [+-]0\.\d{3} nats each beyond its own", said)
        return
    assert re.search(r"0 of \d+ greedy tokens are not the target's likeliest", said)
    row, alone, lookup = rows[decoded["contender"]], rows["alone"], rows["lookup"]
    assert (lookup["proposer"], lookup["drafter"]) == ("prompt_lookup", None) and lookup["tree_nodes_per_round"] > 1
    assert row["router"] == router | {"dynamic": True, "nodes": 40} and alone["sam"]["static"] == str(corpus)
    assert {"drafter", "sam static"} <= set(row["drafted_by"]) and "drafter" not in alone["drafted_by"]
    assert sum(share["accepted"] for share in row["drafted_by"].values()) == pytest.approx(1, abs=1e-3)
    assert row["drafted_by"]["sam static"]["accepted"] > 0.5  # the target says again what it said
    assert (row["drafted_by"]["drafter"]["rounds"] == 1) == (mode == "fused")
    html = (out / "report.html").read_text()
    by = "drafted by drafter and sam static" if mode == "fused" else "drafted by sam static"
    assert "Who drafted it" in Page(html).text and by in html
