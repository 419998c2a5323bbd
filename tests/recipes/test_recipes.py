"""Recipes: what is read, what is refused, and in which words."""

import gzip
import os
import sys
from pathlib import Path

import pytest
import yaml

from draftsmith.eval import acceptance
from draftsmith.recipes.command import cli
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import PACKAGE, dump_recipe, load_recipe
from tests.recipe_cases import SMALLEST, problems_of
from tests.recipe_cases import write as write


def test_every_problem_names_its_line_and_files_that_are_missing_come_with_them(write):
    problems = problems_of(
        write(
            "target:\n  model: ./missing\n  dtype: int8\ndata:\n  prompts: [missing.jsonl, 3]\n"
            "eval:\n  also:\n  - proposer: drafter\n    tree: {nodes: 1}\ntrain:\n  seed: 1\n  clip: norm\n  seed: 2\n"
        ),
        "train.nothing=1",
    )
    expected = [
        ("recipe.yaml: ", "`output_dir` is missing: Folder for everything that a run writes"),  # its meaning
        (":3: ", "`target.dtype`"),
        (":5: ", "`data.prompts.1`"),
        ("override 'train.nothing=1': ", "unknown key `train.nothing`"),
        (":9: ", "`eval.also.0.tree.nodes`"),
        (":13: ", "`train.seed` is given twice, first at "),
        (":2: ", "`target.model`"),
        (":5: ", "`data.prompts.0`"),
    ]
    for place, key in expected:
        assert any(f"{place}{key}" in problem for problem in problems), key
    assert len(problems) == len(expected)


@pytest.mark.parametrize("override", [[], ["train.mixed_precision=no"]])
def test_values_as_people_write_them(write, override):
    no = "" if override else "  mixed_precision: no\n"
    text = f"train:\n  learning_rate: 1e-4\n  epochs: 2\n  step_weight: +.5\n{no}eval:\n  # max_prompts: 3\n"
    train = load_recipe(write(SMALLEST + text), ["train.weight_decay=1E-2", *override]).train
    assert train.learning_rate == 1e-4 and isinstance(train.epochs, float)
    assert (train.epochs, train.step_weight, train.weight_decay) == (2.0, 0.5, 0.01)
    assert train.mixed_precision == "no"  # which YAML reads as false
    assert (train.adam_beta1, train.adam_beta2) == (0.9, 0.95)  # as drafters were published


def test_a_path_may_begin_at_the_home_folder(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("a.jsonl", "b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "a"}\n')
    text = (
        "output_dir: ~/run\ntarget: {model: ~/m}\ndata: {prompts: [~/a.jsonl, 'hf:~/a b:train', mt_bench:~/b.jsonl]}\n"
    )
    (tmp_path / "m").mkdir()
    recipe = load_recipe(write(text), ["eval.also=[{name: ~x, drafter: ~/d}]", "data.states=~nobody-here/s"])
    assert (recipe.output_dir, recipe.target.model) == (f"{tmp_path}/run", f"{tmp_path}/m")
    assert recipe.data.prompts == [f"{tmp_path}/a.jsonl", f"hf:{tmp_path}/a b:train", f"mt_bench:{tmp_path}/b.jsonl"]
    assert (recipe.eval.also[0].name, recipe.eval.also[0].drafter) == ("~x", f"{tmp_path}/d")
    assert recipe.data.states == "~nobody-here/s"  # no such user: an ordinary name
    monkeypatch.setattr(sys, "argv", ["x", "~/my.yaml", "--out=~/b", "a=~b", "a~/b"])
    cli.run(lambda: None)
    assert sys.argv[1:] == [f"{tmp_path}/my.yaml", f"--out={tmp_path}/b", "a=~b", "a~/b"]


def test_shipped_files_are_found_from_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless the working directory has such a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["x", "recipes/demo.yaml", "recipes/mine.yaml"])
    cli.run(lambda: None)
    assert sys.argv[1:] == [str(PACKAGE / "recipes/demo.yaml"), "recipes/mine.yaml"]
    recipe = load_recipe(sys.argv[1])
    assert recipe.target.model == str(PACKAGE / "recipes/demo_target")
    name = "recipes/demo_prompts/stdlib-train.jsonl.gz"
    assert recipe.data.prompts == str(PACKAGE / name) and (PACKAGE / name).is_file()
    (tmp_path / name).parent.mkdir(parents=True)
    with gzip.open(tmp_path / name, "wt") as file:
        file.write('{"prompt": "x"}')
    assert load_recipe(sys.argv[1]).data.prompts == name


def test_merge_keys_and_anchors(write):
    text = SMALLEST + (
        "eval:\n  tree: &tree {nodes: 20, top_k: 4}\n"
        "  also:\n  - name: wider\n    tree: &wide {<<: *tree, top_k: 8}\n  - name: same\n    tree: *tree\n"
        "  - name: again\n    tree: *wide\n"
    )
    wider, same, again = load_recipe(write(text), ["eval.also.2.tree.nodes=21"]).eval.also
    assert (wider.tree.nodes, wider.tree.top_k, same.tree.top_k) == (20, 8, 4)
    assert (again.tree.nodes, again.tree.top_k) == (21, 8)  # an override changes one place


def test_overrides_win_in_order_and_mend_problems_of_the_file(write):
    path = write(SMALLEST + "train:\n  seed: x\ndata:\n  prompts: missing.jsonl\neval:\n  also:\n  - name: a\n")
    overrides = ["train.seed=2", "train.seed=3", "eval.tree={nodes: 5}", "eval.also.0.name='b=c'", "eval.max_prompts="]
    recipe = load_recipe(path, [*overrides, "data.prompts=[hf:org/name, hf:org/name:test]"])
    assert (recipe.train.seed, recipe.eval.tree.nodes, recipe.eval.also[0].name) == (3, 5, "b=c")
    assert recipe.eval.max_prompts is None and recipe.data.prompts == ["hf:org/name", "hf:org/name:test"]


LISTS = zip("abcdefgh", "bcdefghi", strict=True)
LAUGHS = "a: &a [1]\n" + "".join(f"{b}: &{b} [{', '.join([f'*{a}'] * 9)}]\n" for a, b in LISTS)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("output_dir: [1\ntarget: {}\n", "recipe.yaml:2: not valid YAML"),
        ("- a\n- b\n", "`key: value`"),
        ("", "`output_dir` is missing"),
        (SMALLEST + "train: {seed: 2024-13-45}\n", "month must be"),
        (SMALLEST + "train: {packing: !!bool maybe}\n", "maybe"),
        (SMALLEST + "train: &a {seed: *a}\n", "not valid YAML: nested too deeply, or an alias"),
        (SMALLEST + "? [a, b]\n: 3\n", "recipe.yaml:4: not valid YAML"),
        (SMALLEST + "---\na: 1\n", "not valid YAML"),
        (SMALLEST + "train: !!python/object:os.system {}\n", "recipe.yaml:4: not valid YAML"),
        (SMALLEST + LAUGHS, "not valid YAML: more than 10,000 values"),
        (SMALLEST + "a: " + "[" * 5000, "not valid YAML: nested too deeply"),
        (SMALLEST + "#" * 100_000, "recipe.yaml: too long for a recipe, which has at most 60,000 characters"),
        (f"output_dir: {'x' * 5000}\ntarget: {{model: org/name}}\n", "File name too long"),
    ],
    ids=range(13),
)
def test_not_a_recipe(write, text, expected):
    problems = problems_of(write(text))
    assert any(expected in problem for problem in problems), problems
    assert sum(map(len, problems)) < 3000


def test_recipe_file_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "latin.yaml").write_bytes(b"output_dir: \xe9\n")
    for path, said in (("none.yaml", "no such recipe file"), ("", "Is a directory"), ("latin.yaml", "UTF-8")):
        assert said in problems_of(str(tmp_path / path))[0]


def test_an_output_dir_that_is_read_only(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    arguments = [str(write(SMALLEST)), f"output_dir={tmp_path}", "--plan"]
    with pytest.raises(UserError, match="output_dir: nothing can be written to"):
        cli.parse_command(None, arguments)
    cli.parse_command(None, arguments, writes=False)
    (problem,) = problems_of(arguments[0], f"output_dir={tmp_path}/new")
    assert "`output_dir`: " in problem and f"nothing can be written to {tmp_path}" in problem
    monkeypatch.setattr(sys, "argv", ["acceptance.py", *arguments])
    with pytest.raises(UserError, match="output_dir: nothing can be written to"):
        acceptance.main()


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.learning_rate=1e-7", "train.mixed_precision=no", "output_dir='runs/é: #1'", "target.revision='1e5'"],
        *([f"eval.tree={{policy: {policy}}}"] for policy in ("chain", "svip", "static", "ddd", "auto")),
        ["eval.tree={policy: ddd, ddd: {at: [2, 20]}}", "eval.also=[{name: b, tree: {policy: svip_tree, top_k: 4}}]"],
        ["eval.tree={policy: c2t, top_k: 4, c2t: {classifier: x}}", "target.quantization=int8"],
    ],
    ids=str,
)
def test_dumped_recipe_reads_back(write, overrides):
    recipe = load_recipe(write(SMALLEST), overrides)
    assert load_recipe(write(dump_recipe(recipe))) == recipe


HASS = {"token_loss": 0.1, "feature_loss": 1.0, "feature_noise": 0.2, "detach_features": True, "step_weight": 1.0}
EAGLE3 = {"token_loss": 1.0, "feature_loss": 0.0, "feature_noise": 0.0, "detach_features": False, "step_weight": 0.8}


@pytest.mark.parametrize(
    ("drafter", "published"),
    [
        ("{}", {"ttt_steps": 7, **EAGLE3}),
        ("{kind: eagle}", {"ttt_steps": 1, **HASS}),
        ("{kind: poss}", {"ttt_steps": 8, **HASS}),
        ("{kind: poss, positions_per_specialist: 3, specialists: 2}", {"ttt_steps": 6, **HASS}),
        ("{kind: poss, base: eagle3, specialists: 3}", {"ttt_steps": 6, **EAGLE3, "detach_features": "specialists"}),
        ("{kind: vispec}", {"ttt_steps": 2, "token_loss": 10.0}),
        ("{kind: vispec, specialists: 3}", {"ttt_steps": 6, "token_loss": 10.0}),
        (
            "{kind: vispec, base: eagle3, positions_per_specialist: 1}",
            {"ttt_steps": 4, **EAGLE3, "detach_features": "specialists"},
        ),
    ],
)
def test_what_a_recipe_leaves_out_is_as_its_drafter_was_published(write, tmp_path: Path, drafter, published):
    """And the recipe that is written back says so, and reads back equal. 7 steps just reach every specialist."""
    for train, given in (("", {}), ("train: {token_loss: 0.5, ttt_steps: 7}\n", {"token_loss": 0.5, "ttt_steps": 7})):
        recipe = load_recipe(write(SMALLEST + train), [f"drafter={drafter}"])
        says = yaml.safe_load(dump_recipe(recipe))["train"]
        assert {key: says[key] for key in published} == published | given
        (tmp_path / "back.yaml").write_text(dump_recipe(recipe))
        assert load_recipe(tmp_path / "back.yaml") == recipe
