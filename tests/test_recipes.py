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
from tests.recipe_cases import SMALLEST, limited, problems_of
from tests.recipe_cases import write as write


def test_key_in_the_wrong_section_is_pointed_to_the_right_one(write):
    (problem,) = problems_of(write(SMALLEST + "max_steps: 3\n"))
    assert "recipe.yaml:4: unknown key `max_steps`: did you mean `train.max_steps`?" in problem


def test_key_like_no_other_lists_the_known_ones(write):
    (problem,) = problems_of(write(SMALLEST + "drafter:\n  zzz: 3\n"))
    assert "known here are kind, base, positions_per_specialist" in problem


def test_all_problems_at_once(write):
    problems = problems_of(
        write(
            "target:\n  model: ./missing\n  dtype: int8\n"
            "data:\n  prompts: [missing.jsonl, 3]\n  max_length: '12'\n"
            "train:\n  max_steps: 0\n  seed: true\n  max_grad_norm: .inf\n  trackers: wandb\n"
            "eval:\n  also:\n  - proposer: drafter\n    tree: {nodes: 1}\n"
        ),
        "train.nothing=1",
    )
    expected = [
        ("recipe.yaml", "`output_dir` is missing", "Folder for everything that a run writes"),
        (":3:", "`target.dtype`: expected one of 'auto', 'float32', 'bfloat16' or 'float16', given the text 'int8'"),
        (":5:", "`data.prompts.1`: expected text, given the number 3"),
        (":6:", "`data.max_length`: expected a whole number, given the text '12'"),
        (":8:", "`train.max_steps`: expected at least 1, given the number 0"),
        (":9:", "`train.seed`: expected a whole number, given true"),
        (":10:", "`train.max_grad_norm`: expected a finite number, given the number inf"),
        (":11:", "`train.trackers`: expected a list, given the text 'wandb'"),
        ("override 'train.nothing=1'", "unknown key `train.nothing`"),
        (":14:", "`eval.also.0.name` is missing"),
        (":15:", "`eval.also.0.tree.nodes`: expected at least 2, given the number 1"),
        (":2:", "`target.model`: no such directory: ./missing"),
        (":5:", "`data.prompts.0`: no such file: missing.jsonl"),
    ]
    for parts in expected:
        assert any(all(part in problem for part in parts) for problem in problems), parts
    assert len(problems) == len(expected)


def test_union_names_both_kinds(write):
    (problem,) = problems_of(write(SMALLEST + "data:\n  prompts: 3\n"))
    assert "`data.prompts`: expected text or a list, given the number 3" in problem


def test_settings_that_exclude_each_other(write):
    (problem,) = problems_of(write(SMALLEST + "eval:\n  tree: {policy: chain, nodes: 8, draft_calls: 3}\n"))
    assert "recipe.yaml:5: `eval.tree`: a chain of 8 nodes (root included) takes 7 draft calls, not 3" in problem


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


@pytest.mark.parametrize("value", ["1e-4x", "ten", "0x10p", "1e", "[1e-4]"])
def test_not_a_number(write, value):
    (problem,) = problems_of(write(SMALLEST + f"train:\n  learning_rate: {value}\n"))
    assert "expected a number, given" in problem


def test_mended_numbers_are_still_checked(write):
    (problem,) = problems_of(write(SMALLEST + "train:\n  learning_rate: -1e-4\n"))
    assert "expected a number above 0" in problem


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


def test_empty_section_is_its_defaults(write):
    recipe = load_recipe(write(SMALLEST + "train:\neval:\n  # max_prompts: 3\n"))
    assert recipe.train == Recipe.model_validate(yaml.safe_load(SMALLEST)).train


def test_merge_keys_and_anchors(write):
    text = SMALLEST + (
        "eval:\n  tree: &tree {nodes: 20, top_k: 4}\n"
        "  also:\n  - name: wider\n    tree: &wide {<<: *tree, top_k: 8}\n  - name: same\n    tree: *tree\n"
        "  - name: again\n    tree: *wide\n"
    )
    wider, same, again = load_recipe(write(text)).eval.also
    assert (wider.tree.nodes, wider.tree.top_k, same.tree.top_k) == (20, 8, 4)
    assert again.tree == wider.tree


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
    ("override", "text"),
    [
        ("train.seed", "write key.path=value"),
        ("=3", "write key.path=value"),
        ("train..seed=3", "write key.path=value"),
        ("train.seed=x", "`train.seed`: expected a whole number, given the text 'x'"),
        ("train.sed=1", "did you mean `train.seed`?"),
        ("trian.seed=1", "did you mean `train`?"),
        ("train=3", "`train`: expected a section of `key: value` lines, given the number 3"),
        ("output_dir.x=3", "`output_dir` is the text 'runs/x', it has no `x`"),
        ("eval.also.1.name=x", "`eval.also` is a list of 0, it has no `1`"),
        ("train.trackers=[a", "not valid YAML"),
    ],
)
def test_bad_override_is_quoted(write, override, text):
    (problem,) = problems_of(write(SMALLEST + "eval: {also: []}"), override)
    assert problem.startswith(f"override '{override}'")
    assert text in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("output_dir: [1\ntarget: {}\n", "recipe.yaml:2: not valid YAML"),
        ("- a\n- b\n", "given"),
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
    problems = problems_of(write(text))
    assert any(expected in problem for problem in problems) or (expected == "given" and "`key: value`" in problems[0])


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
        ("- x\n" * 11_000, r":10000: not valid YAML: more than 10,000 values"),
        ("#" * 100_000, ": too long for a recipe, which has at most 60,000 characters"),
        ("train: {seed: 0x" + "f" * 5000 + "}\n", ":4: not valid YAML: a value of 5,002 characters that is not text"),
        ("train: {<<: 3}\n", ":4: not valid YAML: `<<` takes a section or a list of sections"),
        (f"output_dir: {'x' * 5000}\n", "File name too long"),
    ],
)
def test_a_recipe_that_would_fill_memory_or_stack_is_refused(write, text, expected):
    with limited(text[:20]):
        problems = problems_of(write(text if text.startswith(("-", "output")) else SMALLEST + text))
    assert any(re.search(expected, problem) for problem in problems)
    assert sum(map(len, problems)) < 3000


def test_a_thousand_problems_are_not_all_told(write):
    problems = problems_of(write(SMALLEST + "".join(f"k{i}: 1\n" for i in range(1000))))
    assert len(problems) == 51 and problems[-1].endswith("recipe.yaml: and more problems; fix these first")


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.batch_size=100000000000000000000000", "expected at most 1,000,000, given the number 1000000000000000"),
        ("train.max_steps=1000000000000", "expected at most 1,000,000,000"),
        ("data.max_length=1000000000000", "expected at most 1,000,000,000"),
        ("train.learning_rate=1e300", r"expected at most 1e\+38"),
        ("train.seed=-1", "expected at least 0"),
        ("train.seed=4294967296", "expected at most 4,294,967,295"),
        ("drafter.num_layers=1000000", "expected at most 1,000"),
        ("drafter.vocab_size=1000000000", "expected at most 1,000,000"),
        ("eval.tree.nodes=1000000000", "expected at most 1,000,000"),
        ("eval.tree.draft_calls=1000000", "expected at most 10,000"),
        ("eval.bootstrap_samples=1000000000", "expected at most 100,000"),
        ("labels.top_k=10000", "expected at most 1,000"),
        ("train.seed=" + "[" * 5000, "nested too deeply"),
        ("eval.also." + "9" * 5000 + ".name=x", "`eval.also` is a list of 0"),
    ],
)
def test_numbers_beyond_any_use_are_refused(write, override, expected):
    with limited(override[:20]):
        (problem,) = problems_of(write(SMALLEST + "eval: {also: []}\n"), override)
    assert re.search(expected, problem) and len(problem) < 1000
    assert problem.startswith(f"override '{override[:200]}")


def test_recipe_file_that_cannot_be_read(tmp_path: Path):
    assert "no such recipe file" in problems_of(str(tmp_path / "none.yaml"))[0]
    assert "a folder; name a recipe file" in problems_of(str(tmp_path))[0]
    (tmp_path / "latin.yaml").write_bytes(b"output_dir: \xe9\n")
    assert "cannot be read as UTF-8" in problems_of(str(tmp_path / "latin.yaml"))[0]


def test_outputs_that_cannot_be_written(write, tmp_path: Path):
    (tmp_path / "taken").touch()
    (tmp_path / "folder").mkdir()
    for key, name, expected in [
        ("output_dir", "taken/run", f"{tmp_path / 'taken'} is a file"),
        ("eval.out", "taken/a/b", f"{tmp_path / 'taken'} is a file"),
        *((key, "taken", "is a file; name a folder") for key in ("output_dir", "eval.out")),
        ("data.conversations", "taken/c.jsonl", f"{tmp_path / 'taken'} is a file"),
        ("data.conversations", "folder", "is a folder; name a file"),
        ("output_dir", "x" * 300, "is not a valid path: File name too long"),
        ("output_dir", "/proc/x", "nothing can be written to /proc"),  # where rights forbid nothing
    ]:
        if name.startswith("/proc") and not Path("/proc/self").exists():
            continue
        (problem,) = problems_of(write(SMALLEST), f"{key}={tmp_path / name}")
        assert f"`{key}`: " in problem and str(tmp_path / name)[:100] in problem and expected in problem
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "recipe.yaml", "taken"]  # trying left nothing


def test_an_output_dir_that_is_read_only(write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(os, "access", lambda path, mode: str(path) != str(tmp_path))
    arguments = [str(write(SMALLEST)), f"output_dir={tmp_path}", "--plan"]
    with pytest.raises(UserError, match="output_dir: nothing can be written to"):
        cli.parse_command(None, arguments)
    cli.parse_command(None, arguments, writes=False)
    monkeypatch.setattr(sys, "argv", ["acceptance.py", *arguments])
    with pytest.raises(UserError, match="output_dir: nothing can be written to"):
        acceptance.main()


def test_no_prompt_file_twice_and_none_is_overwritten(write, tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "x"}\n')
    again = tmp_path / "." / "b" / ".." / "a.jsonl"
    (tmp_path / "b").mkdir()
    (problem,) = problems_of(write(SMALLEST), f"eval.prompts=[{path}, hf:org/name, {tmp_path}/b/../a.jsonl]")
    assert "`eval.prompts.2`" in problem and f"is given twice, first as {path}" in problem
    (problem,) = problems_of(write(SMALLEST), "data.prompts=[hf:a/b, hf:a/b]")
    assert "`data.prompts.1`: hf:a/b is given twice" in problem
    for key in ("data.prompts", "eval.prompts"):
        (problem,) = problems_of(write(SMALLEST), f"{key}={path}", f"data.conversations={again}")
        assert f"`{key}`: {path} is data.conversations, too" in problem
    (problem,) = problems_of(write(SMALLEST), f"data.prompts=[{path}, {tmp_path}/*.jsonl]")
    assert f"`data.prompts.1`: {path} is given twice" in problem
    (tmp_path / "conversations.jsonl").write_text('{"prompt": "y"}\n')  # as regenerate writes it
    for source in (str(tmp_path), f"{tmp_path}/*.jsonl"):
        (problem,) = problems_of(write(SMALLEST), f"data.prompts={source}", f"output_dir={tmp_path}")
        assert f"`data.prompts`: {tmp_path}/conversations.jsonl is data.conversations, too" in problem


def test_prompt_lookup_draws_nothing(write):
    tree = "{policy: chain, nodes: 8, draw: sampled}"
    (problem,) = problems_of(write(SMALLEST), f"eval.also=[{{name: copy, proposer: prompt_lookup, tree: {tree}}}]")
    assert "prompt lookup copies tokens and draws none" in problem


def test_siblings_are_drawn_in_turn(write):
    (problem,) = problems_of(write(SMALLEST), "eval.tree={policy: static, draw: sampled, paths: [[0], [0, 1]]}")
    assert "so [0, 0] cannot be left out" in problem
    (problem,) = problems_of(write(SMALLEST), "eval.tree={policy: static, paths: []}")
    assert "eval.tree.paths" in problem and "at least 1" in problem
    (problem,) = problems_of(write(SMALLEST), "eval.tree.draw=sampled")
    assert "draw: sampled is for chains and static trees" in problem


@pytest.mark.parametrize(
    ("model", "is_path"),
    [
        ("org/name-1.5_b", False),
        ("gpt2", False),
        ("./here", True),
        ("a/b/c", True),
        ("/no/where", True),
        ("../x", True),
    ],
)
def test_only_what_cannot_be_a_hub_id_is_looked_for_on_disk(write, model, is_path, tmp_path: Path, monkeypatch):
    path = write(SMALLEST)
    (tmp_path / "empty" / "folder").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "empty" / "folder")  # whatever lies beside the checkout, `../x` is not here
    if is_path:
        assert "no such directory" in problems_of(path, f"target.model={model}")[0]
    else:
        assert load_recipe(path, [f"target.model={model}"]).target.model == model


def test_prompts_that_are_not_files(write):
    recipe = load_recipe(write(SMALLEST), ["data.prompts=[hf:org/name, hf:org/name:test]"])
    assert recipe.data.prompts == ["hf:org/name", "hf:org/name:test"]


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
