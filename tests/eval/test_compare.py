"""Contenders from recipes and overrides: names, checks, and the folder of a run."""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.eval import acceptance
from draftsmith.eval.decoding import contenders
from draftsmith.eval.decoding.contenders import Contender, named
from draftsmith.eval.measurement import benchmarks, evaluation
from draftsmith.eval.measurement.benchmarks import PLAIN
from draftsmith.eval.measurement.compared import load_all, split_overrides
from draftsmith.models import loaded_models
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import save_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.eval import ContenderSection, TreeSection
from tests.compare_cases import place as place
from tests.compare_cases import save_untrained
from tests.conftest import make_target, make_tokenizer
from tests.training_runs import run_main


def problems_of(recipe: Path, *compared: str, overrides: tuple[str, ...] = ()) -> list[str]:
    with pytest.raises(UserError) as raised:
        load_all(str(recipe), overrides, compared)
    return raised.value.problems


@pytest.mark.parametrize(
    ("argument", "name", "settings"),
    [
        ("  eval.tree.nodes=16   eval.tree.top_k=4 ", "", ["eval.tree.nodes=16", "eval.tree.top_k=4"]),
        ("a, b: c: eval.tree.nodes=9", "a, b: c", ["eval.tree.nodes=9"]),
        ("x: eval.tree={nodes: 5, top_k: 3} eval.out=a b", "x", ["eval.tree={nodes: 5, top_k: 3}", "eval.out=a b"]),
        ("eval.tree.paths=[[0], [0, 0]] eval.out=x", "", ["eval.tree.paths=[[0], [0, 0]]", "eval.out=x"]),
    ],
)  # fmt: skip
def test_a_set_of_overrides_is_split_where_a_key_begins(argument: str, name: str, settings: list[str]) -> None:
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
    twice = "--compare 'eval.tree.nodes=8', --compare 'eval.tree.nodes=8': all are called 'eagle3, tree of 8'; give"
    (problem,) = problems_of(place / "recipe.yaml", "eval.tree.nodes=8", "eval.tree.nodes=8")
    assert problem.startswith(twice)


def test_every_problem_of_every_recipe_at_once(place: Path, tmp_path: Path) -> None:
    first, broken = place / "recipe.yaml", tmp_path / "broken.yaml"
    broken.write_text("output_dir: x\ntarget: {model: a/b}\nevil: 1\ntrain: {max_steps: 0}\n")
    wrong = ("eval.max_new_tokens=9", "eval.tree.nods=8", "name only: ", str(tmp_path / "gone.yaml"))
    problems = problems_of(first, str(broken), *wrong)
    for said in (
        f"--compare '{broken}': {broken}:3: unknown key `evil`",
        f"{broken}:4: `train.max_steps`",
        "eval.max_new_tokens is the same for all contenders",
        "did you mean `eval.tree.nodes`",
        "--compare 'name only: ': name only:: no such recipe file",
        "gone.yaml: no such recipe file",
    ):
        assert any(said in problem for problem in problems), (said, problems)
    assert len(problems) == 6
    # A problem of the first recipe is told once, not with every set of overrides; the other files are still read.
    both = problems_of(first, "eval.tree.nodes=8", str(broken), overrides=("eval.evil=1", "data.evil=2"))
    assert len(both) == 4 and sum("`eval.evil`" in problem for problem in both) == 1


def test_another_target_is_refused_with_both_sides(place: Path, tmp_path: Path) -> None:
    content = yaml.safe_load((place / "recipe.yaml").read_text())
    other, target = tmp_path / "other.yaml", content["target"]
    other.write_text(yaml.safe_dump(content | {"target": target | {"dtype": "bfloat16", "device": "auto"}}))
    told = f"--compare '{other}': another target than {place / 'recipe.yaml'}'s: target."
    assert problems_of(place / "recipe.yaml", str(other)) == [told + "dtype is 'bfloat16' there, 'float32' here"]
    same = f"{target['model']}/../{Path(target['model']).name}"  # the same place, written otherwise
    other.write_text(yaml.safe_dump(content | {"target": target | {"model": same}}))
    assert len(load_all(str(place / "recipe.yaml"), (), [f"same: {other}"])[1]) == 2


def test_contenders_are_called_what_drafts_and_their_tree(place: Path) -> None:
    recipe = load_recipe(place / "recipe.yaml")

    def contender(name: str | None = None, **tree: Any) -> Contender:
        section = ContenderSection(name=name, tree=TreeSection.model_validate(tree))
        return contenders.contender_of(recipe, section, "here")

    trees: dict[str, dict[str, Any]] = {
        "ddd of 60": {"policy": "ddd"},
        "svip of up to 40": {"policy": "svip"},
        "static tree of 26": {"policy": "static"},
        "tree of 60, 1,000 tokens": {"vocab_size": 1000},
        "sampled chain of 5": {"policy": "chain", "draw": "sampled"},
        "auto": {"policy": "auto"},
    }
    found = named([*(contender(**tree) for tree in trees.values()), contender("a static one", policy="static")])
    assert [c.name.removeprefix("eagle3, ") for c in found] == [*trees, "a static one"]
    for two in ([contender(), contender(draft_calls=6)], [contender("x"), contender("x")]):
        with pytest.raises(UserError, match=r"^here, here: all are called '.*'; give each its own name"):
            named(two)
    with pytest.raises(UserError, match=f"^plain decoding, here: all are called '{PLAIN}'"):
        named([contender(PLAIN)])


def test_what_cannot_be_measured_is_told_before_weights_are_loaded(
    place: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What files lack. All at once, each in its own place and once."""
    save_untrained(place / "deep", target_dir)
    config = json.loads((place / "deep/config.json").read_text())
    config["drafter"]["capture_layers"] = [2, 3, 8]
    (place / "deep/config.json").write_text(json.dumps(config))
    shutil.copytree(place / "run/drafter", place / "short")
    whole = (place / "short/model.safetensors").read_bytes()
    (place / "short/model.safetensors").write_bytes(whole[:-8])  # the last row of the last tensor
    save_token_counts(place / "foreign", torch.ones(320, dtype=torch.int64), "f" * 64, [4])
    strange = make_tokenizer()
    strange.add_tokens(["zebra"])
    for name, size, tokenizer in (("wide", 330, make_tokenizer()), ("strange", 320, strange)):
        make_target(num_layers=1, vocab_size=size).save_pretrained(place / name)
        tokenizer.save_pretrained(place / name)
    lm = {"proposer": "causal_lm", "tree": {"policy": "chain", "nodes": 4}}
    rows: dict[str, dict[str, Any]] = {
        "drafter: .*no drafter here": {"drafter": "nowhere"},
        "cannot read this target: .*capture_layers": {"drafter": str(place / "deep")},
        "512 draft calls deep, in a target of 512": {"tree": {"policy": "chain", "nodes": 513}},
        "600 nodes, 8 draft calls deep": {"tree": {"nodes": 600}},
        "61 is more than the 60 tokens of the drafter's": {"tree": {"vocab_size": 61}},
        "short/model.safetensors: damaged": {"drafter": str(place / "short")},
        "rank 60 exceeds a draft vocabulary of 60": {"tree": {"policy": "static", "paths": [[0], [60]]}},
        "/nope: no C2T classifier here": {"tree": {"policy": "c2t", "c2t": {"classifier": "/nope"}}},
        "has a vocabulary of 330 tokens": lm | {"draft_model": {"model": str(place / "wide")}},
        "has another tokenizer than the target": lm | {"draft_model": {"model": str(place / "strange")}},
        r"draft_model\.model: no model at": lm | {"draft_model": {"model": str(place / "absent")}},
    }
    counts = {"was counted with a tokenizer": place / "foreign", "no such token counts": place / "none"}
    sections = [{"name": str(i), **row} for i, row in enumerate(rows.values())]
    monkeypatch.setattr(TargetFiles, "load", lambda *_: pytest.fail("weights were loaded"))
    monkeypatch.setattr(loaded_models, "load_draft_model", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(UserError) as raised:
        run_main(
            *(acceptance, place / "recipe.yaml", f"eval.also={json.dumps(sections)}"),
            *("--compare", "n: eval.drafter=nowhere"),
            *(f"{path.name}: eval.tree.vocab_size=16 eval.token_counts={path}" for path in counts.values()),
        )
    problems = raised.value.problems
    assert len(problems) == len(rows) + len(counts)
    for said in (*rows, *counts):
        assert sum(bool(re.search(said, problem)) for problem in problems) == 1, (said, problems)
    assert all(problem.startswith(("eval.also.", "--compare '")) for problem in problems)
    assert problems[0].startswith("eval.also.0.drafter: ") and problems[0].endswith("(also affects 1 other contender)")


def test_an_interrupted_run_leaves_the_older_one_whole(place: Path, tmp_path: Path) -> None:
    """New answers never lie beside older numbers, either: replay believes what these say about the answers."""
    arguments = [str(place / "recipe.yaml"), f"eval.out={tmp_path / 'out'}", "eval.max_prompts=1"]

    def files() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}

    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    run_main(acceptance, *arguments)
    before = files()
    assert set(before) == {".lock", "acceptance.json", "generations.jsonl", "report.html"}
    for owner, name in ((evaluation, "how_made"), (benchmarks, "loaded_proposer"), (evaluation, "write_acceptance")):
        with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(owner, name, interrupted)
            run_main(acceptance, *arguments, "eval.tree.nodes=4")
        left = files()
        left.pop("generations.jsonl.partial", None)
        if name == "write_acceptance":
            assert left["generations.jsonl"] != before["generations.jsonl"] and "acceptance.json" not in left
        else:
            assert left == before


@pytest.mark.parametrize("mode", ["decode", pytest.param("replay", marks=pytest.mark.slow)])
def test_two_evaluations_do_not_write_to_one_folder(place: Path, tmp_path: Path, mode: str) -> None:
    arguments = [str(place / "recipe.yaml"), f"eval.out={tmp_path}", "eval.max_prompts=1"]
    if mode == "replay":
        run_main(acceptance, *arguments)
    out = tmp_path if mode == "decode" else tmp_path / "replay"
    with alone_in(out), pytest.raises(UserError, match="another run is writing there"):
        run_main(acceptance, *arguments, f"eval.mode={mode}")
