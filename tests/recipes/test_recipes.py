"""Recipes: what is read, what is refused, and in which words."""

import gzip
import os
import re
import sys
from pathlib import Path

import pytest
import yaml

from draftsmith.eval import acceptance
from draftsmith.recipes.command import cli
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import PACKAGE, dump_recipe, load_recipe
from draftsmith.recipes.schema import Recipe
from tests.recipe_cases import SMALLEST, problems_of
from tests.recipe_cases import write as write


def test_every_problem_names_its_line_and_files_that_are_missing_come_with_them(write):
    problems = problems_of(
        write(
            "target:\n  model: ./missing\n  dtype: int8\ndata:\n  prompts: [missing.jsonl, 3]\n"
            "eval:\n  also:\n  - proposer: drafter\n    tree: {nodes: 1}\n"
        ),
        "train.nothing=1",
    )
    expected = [
        ("recipe.yaml: ", "`output_dir` is missing: Folder for everything that a run writes"),  # its meaning
        (":3: ", "`target.dtype`"),
        (":5: ", "`data.prompts.1`"),
        ("override 'train.nothing=1': ", "unknown key `train.nothing`"),
        (":9: ", "`eval.also.0.tree.nodes`"),
        (":2: ", "`target.model`"),
        (":5: ", "`data.prompts.0`"),
    ]
    for place, key in expected:
        assert any(f"{place}{key}" in problem for problem in problems), key
    assert len(problems) == len(expected)


def test_repeated_key_is_an_error_with_both_lines(write):
    (problem,) = problems_of(write(SMALLEST + "train:\n  seed: 1\n  max_steps: 3\n  seed: 2\n"))
    assert ":7: `train.seed` is given twice" in problem
    assert problem.endswith(":5")


def test_numbers_as_people_write_them(write):
    recipe = load_recipe(
        write(SMALLEST + "train:\n  learning_rate: 1e-4\n  epochs: 2\n  step_weight: +.5\n"),
        ["train.weight_decay=1E-2"],
    )
    assert recipe.train.learning_rate == 1e-4
    assert (recipe.train.epochs, recipe.train.step_weight, recipe.train.weight_decay) == (2.0, 0.5, 0.01)
    assert isinstance(recipe.train.epochs, float)


@pytest.mark.parametrize("override", [[], ["train.mixed_precision=no"]])
def test_no_is_a_choice_not_a_boolean(write, override):
    text = SMALLEST if override else SMALLEST + "train:\n  mixed_precision: no\n"
    assert load_recipe(write(text), override).train.mixed_precision == "no"
    (problem,) = problems_of(write(SMALLEST + "train:\n  mixed_precision: on\n"))
    assert "given true" in problem


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


def test_adam_decays_as_drafters_were_published(write):
    train = load_recipe(write(SMALLEST)).train
    assert (train.adam_beta1, train.adam_beta2) == (0.9, 0.95)


def test_empty_section_is_its_defaults(write):
    recipe = load_recipe(write(SMALLEST + "train:\neval:\n  # max_prompts: 3\n"))
    assert recipe.train == Recipe.model_validate(yaml.safe_load(SMALLEST)).train


def test_merge_keys_and_anchors(write):
    text = SMALLEST + (
        "eval:\n  tree: &tree {nodes: 20, top_k: 4}\n"
        "  also:\n  - name: wider\n    tree: &wide {<<: *tree, top_k: 8}\n  - name: same\n    tree: *tree\n"
        "  - name: again\n    tree: *wide\n  - name: both\n    tree: {<<: [*tree, *wide]}\n"
    )
    wider, same, again, both = load_recipe(write(text)).eval.also
    assert (wider.tree.nodes, wider.tree.top_k, same.tree.top_k) == (20, 8, 4)
    assert again.tree == wider.tree and both.tree == same.tree  # the first of several has priority


def test_overrides_win_in_order(write):
    path = write(SMALLEST + "train:\n  seed: 1\neval:\n  also:\n  - name: a\n")
    overrides = ["train.seed=2", "train.seed=3", "eval.tree={nodes: 5}", "eval.also.0.name='b=c'", "eval.max_prompts="]
    recipe = load_recipe(path, overrides)
    assert recipe.train.seed == 3
    assert recipe.eval.tree.nodes == 5
    assert recipe.eval.also[0].name == "b=c"
    assert recipe.eval.max_prompts is None


def test_override_mends_a_problem_of_the_file(write):
    path = write(SMALLEST + "train:\n  seed: x\ndata:\n  prompts: missing.jsonl\n")
    assert load_recipe(path, ["train.seed=2", "data.prompts=hf:org/name"]).train.seed == 2


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("output_dir: [1\ntarget: {}\n", "recipe.yaml:2: not valid YAML"),
        ("- a\n- b\n", "`key: value`"),
        ("", "`output_dir` is missing"),
        (SMALLEST + "train: {seed: 2024-13-45}\n", "not valid YAML: month must be"),
        (SMALLEST + "train: {packing: !!bool maybe}\n", "not valid YAML: 'maybe' is not a bool"),
        (SMALLEST + "train: &a {seed: *a}\n", "not valid YAML: nested too deeply, or an alias"),
        (SMALLEST + "? [a, b]\n: 3\n", "recipe.yaml:4: a key must be a single word"),
        (SMALLEST + "---\na: 1\n", "not valid YAML"),
        (SMALLEST + "train: !!python/object:os.system {}\n", "not valid YAML"),
    ],
)
def test_not_a_recipe(write, text, expected):
    assert any(expected in problem for problem in problems_of(write(text)))


NINE = "[" + ", ".join(["*{0}"] * 9) + "]"


LAUGHS = "a: &a [1]\n" + "".join(f"{b}: &{b} {NINE.format(a)}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True))


MERGES = "a: &a {k: 1}\n" + "".join(
    f"{b}: &{b} {{<<: {NINE.format(a)}}}\n" for a, b in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LAUGHS, r":\d+: not valid YAML: more than 10,000 values, those that aliases repeat included"),
        (MERGES, r":\d+: not valid YAML: more than 10,000 values"),
        ("a: " + "[" * 5000, ": not valid YAML: nested too deeply"),
        ("#" * 100_000, ": too long for a recipe, which has at most 60,000 characters"),
        ("train: {seed: 0x" + "f" * 5000 + "}\n", ":4: not valid YAML: a value of 5,002 characters that is not text"),
        ("train: {<<: 3}\n", ":4: not valid YAML: `<<` takes a section or a list of sections"),
        (f"output_dir: {'x' * 5000}\n", "File name too long"),
    ],
)
def test_a_recipe_that_would_fill_memory_or_stack_is_refused(write, text, expected):
    problems = problems_of(write(text if text.startswith("output") else SMALLEST + text))
    assert any(re.search(expected, problem) for problem in problems)
    assert sum(map(len, problems)) < 3000


def test_an_endless_override_is_cut_in_its_message(write):
    override = "eval.also." + "9" * 5000 + ".name=x"
    (problem,) = problems_of(write(SMALLEST + "eval: {also: []}\n"), override)
    assert problem.startswith(f"override '{override[:200]}") and len(problem) < 1000


def test_a_thousand_problems_are_not_all_told(write):
    problems = problems_of(write(SMALLEST + "".join(f"k{i}: 1\n" for i in range(1000))))
    assert len(problems) == 51 and problems[-1].endswith("recipe.yaml: and more problems; fix these first")


def test_recipe_file_that_cannot_be_read(tmp_path: Path):
    (tmp_path / "latin.yaml").write_bytes(b"output_dir: \xe9\n")
    for path, said in (("none.yaml", "no such recipe file"), ("", "a folder; name"), ("latin.yaml", "UTF-8")):
        assert said in problems_of(str(tmp_path / path))[0]


def test_outputs_that_no_permission_allows(write):
    for name, said in (("x" * 300, "File name too long"), ("/proc/x", "nothing can be written to /proc")):
        if not name.startswith("/proc") or Path("/proc/self").exists():
            (problem,) = problems_of(write(SMALLEST), f"output_dir={name}")
            assert "`output_dir`: " in problem and said in problem


def test_an_output_dir_that_is_read_only(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    arguments = [str(write(SMALLEST)), f"output_dir={tmp_path}", "--plan"]
    with pytest.raises(UserError, match="output_dir: nothing can be written to"):
        cli.parse_command(None, arguments)
    cli.parse_command(None, arguments, writes=False)
    monkeypatch.setattr(sys, "argv", ["acceptance.py", *arguments])
    with pytest.raises(UserError, match="output_dir: nothing can be written to"):
        acceptance.main()


@pytest.mark.parametrize(
    "overrides",
    [
        ["train.learning_rate=1e-7", "train.mixed_precision=no", "output_dir='runs/é: #1'", "target.revision='1e5'"],
        *([f"eval.tree={{policy: {policy}}}"] for policy in ("chain", "svip", "static", "ddd", "auto")),
        ["eval.tree={policy: ddd, ddd: {at: [2, 20]}}", "eval.also=[{name: b, tree: {policy: svip_tree, top_k: 4}}]"],
        ["eval.tree={policy: c2t, top_k: 4, c2t: {classifier: x}}"],
    ],
    ids=str,
)
def test_dumped_recipe_reads_back(write, overrides):
    recipe = load_recipe(write(SMALLEST), overrides)
    assert load_recipe(write(dump_recipe(recipe))) == recipe


def test_names_that_the_hub_could_have_are_not_looked_for_on_disk(write):
    for model in ("org/name-1.5_b", "gpt2"):
        assert load_recipe(write(SMALLEST), [f"target.model={model}"]).target.model == model
    recipe = load_recipe(write(SMALLEST), ["data.prompts=[hf:org/name, hf:org/name:test]"])
    assert recipe.data.prompts == ["hf:org/name", "hf:org/name:test"]
