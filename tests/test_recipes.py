"""Recipes: what is read, what is refused, and how a script tells its user."""

import errno
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from draftsmith.eval import acceptance
from draftsmith.recipes.command import cli, launch
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import dump_recipe, load_recipe
from draftsmith.recipes.schema import DrafterSection, Recipe, TrainSection, other_than_published
from tests.test_mutations import limited

SMALLEST = "output_dir: runs/x\ntarget:\n  model: org/name\n"


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def problems_of(path: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    return caught.value.problems


def test_smallest_recipe_gets_the_defaults(write):
    recipe = load_recipe(write(SMALLEST))
    assert recipe == Recipe.model_validate({"output_dir": "runs/x", "target": {"model": "org/name"}})
    assert recipe.conversations_path == Path("runs/x/conversations.jsonl")
    assert recipe.eval_drafter_dir == recipe.drafter_dir == Path("runs/x/drafter")
    assert recipe.eval_out == Path("runs/x/eval")


def test_unknown_key_names_line_and_suggests(write):
    (problem,) = problems_of(write(SMALLEST + "train:\n  learning_rat: 0.1\n"))
    assert "recipe.yaml:5:" in problem
    assert "unknown key `train.learning_rat`" in problem
    assert "did you mean `train.learning_rate`?" in problem


def test_key_in_the_wrong_section_is_pointed_to_the_right_one(write):
    (problem,) = problems_of(write(SMALLEST + "max_steps: 3\n"))
    assert "did you mean `train.max_steps`?" in problem


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
        ("recipe.yaml", "`output_dir` is missing", "Everything that a run writes"),
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


@pytest.mark.parametrize("value", ["'1e-4'", "1e-4x", "ten", "0x10p", "1e", "[1e-4]"])
def test_not_a_number(write, value):
    (problem,) = problems_of(write(SMALLEST + f"train:\n  learning_rate: {value}\n"))
    assert "expected a number, given" in problem


def test_quotes_in_an_override_make_it_text(write):
    (problem,) = problems_of(write(SMALLEST + "train:\n  learning_rate: 1e-4\n"), "train.learning_rate='1e-4'")
    assert "override" in problem
    assert "expected a number, given the text '1e-4'" in problem


def test_mended_numbers_are_still_checked(write):
    (problem,) = problems_of(write(SMALLEST + "train:\n  learning_rate: -1e-4\n"))
    assert "expected a number above 0" in problem


@pytest.mark.parametrize("override", [[], ["train.mixed_precision=no"]])
def test_no_is_a_choice_not_a_boolean(write, override):
    text = SMALLEST if override else SMALLEST + "train:\n  mixed_precision: no\n"
    assert load_recipe(write(text), override).train.mixed_precision == "no"
    (problem,) = problems_of(write(SMALLEST + "train:\n  mixed_precision: off\n"))
    assert "given false" in problem


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
    assert load_recipe(path, ["train.seed=2", "data.prompts=stdlib:train"]).train.seed == 2


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
        (SMALLEST + "train: {seed: 2024-13-45}\n", "not valid YAML"),
        (SMALLEST + "train: &a {seed: *a}\n", "not valid YAML: an alias that contains itself"),
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
        ("a: " + "[" * 5000, ":4: not valid YAML: nested too deeply: more than 20 levels"),
        ("a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 30)), ":4: .* nested too deeply"),
        ("- x\n" * 11_000, r":10000: not valid YAML: more than 10,000 values"),
        ("#" * 100_000, ": too long for a recipe, which has at most 60,000 characters"),
        ("train: {seed: 0x" + "f" * 5000 + "}\n", ":4: not valid YAML: a value of 5,002 characters that is not text"),
        ("train: {<<: 3}\n", ":4: not valid YAML: `<<` takes a section or a list of sections"),
        (f"output_dir: {'x' * 5000}\n", "File name too long"),
    ],
)
def test_a_recipe_that_would_fill_memory_or_stack_is_refused(write, text, expected):
    with limited(text[:20], seconds=5):
        problems = problems_of(write(text if text.startswith(("-", "output")) else SMALLEST + text))
    assert any(re.search(expected, problem) for problem in problems)
    assert sum(map(len, problems)) < 3000


def test_a_thousand_problems_are_not_all_told(write):
    problems = problems_of(write(SMALLEST + "".join(f"k{i}: 1\n" for i in range(1000))))
    assert len(problems) == 51 and problems[-1].endswith("recipe.yaml: and more problems; mend these first")


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
        (
            "labels.top_k=1000",
            "10,001,000 nodes below each root with top_k 1,000 and 11 draft_calls, at most 1,000,000",
        ),
        ("train.seed=" + "[" * 5000, "nested too deeply"),
        (".".join(["a"] * 1000) + "=1", "nested too deeply"),
        ("eval.also." + "9" * 5000 + ".name=x", "`eval.also` is a list of 0"),
    ],
)
def test_numbers_beyond_any_use_are_refused(write, override, expected):
    with limited(override[:20], seconds=5):
        (problem,) = problems_of(write(SMALLEST + "eval: {also: []}\n"), override)
    assert re.search(expected, problem) and len(problem) < 1000
    assert problem.startswith(f"override '{override[:200]}")


def test_recipe_file_that_cannot_be_read(tmp_path: Path):
    assert "no such recipe file" in problems_of(str(tmp_path / "none.yaml"))[0]
    assert "cannot be read" in problems_of(str(tmp_path))[0]
    (tmp_path / "latin.yaml").write_bytes(b"output_dir: \xe9\n")
    assert "cannot be read as UTF-8" in problems_of(str(tmp_path / "latin.yaml"))[0]


def test_output_dir_that_is_a_file(write, tmp_path: Path):
    (tmp_path / "taken").touch()
    (problem,) = problems_of(write(SMALLEST), f"output_dir={tmp_path / 'taken'}")
    assert "is a file; name a folder" in problem


def test_outputs_that_cannot_be_written(write, tmp_path: Path):
    (tmp_path / "taken").touch()
    (tmp_path / "folder").mkdir()
    for key, name, expected in [
        ("output_dir", "taken/run", f"{tmp_path / 'taken'} is a file"),
        ("eval.out", "taken/a/b", f"{tmp_path / 'taken'} is a file"),
        ("eval.out", "taken", "is a file; name a folder"),
        ("data.conversations", "taken/c.jsonl", f"{tmp_path / 'taken'} is a file"),
        ("data.conversations", "folder", "is a folder; name a file"),
        ("output_dir", "x" * 300, "no possible path: File name too long"),
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
    (problem,) = problems_of(write(SMALLEST), f"eval.prompts=[{path}, stdlib:heldout, {tmp_path}/b/../a.jsonl]")
    assert "`eval.prompts.2`" in problem and f"is given twice, first as {path}" in problem
    (problem,) = problems_of(write(SMALLEST), "data.prompts=[hf:a/b, hf:a/b]")
    assert "`data.prompts.1`: hf:a/b is given twice" in problem
    for key in ("data.prompts", "eval.prompts"):
        (problem,) = problems_of(write(SMALLEST), f"{key}={path}", f"data.conversations={again}")
        assert f"`{key}`: {path} is data.conversations, too" in problem


def test_prompt_lookup_draws_nothing(write):
    tree = "{policy: chain, nodes: 8, draw: sampled}"
    (problem,) = problems_of(write(SMALLEST), f"eval.also=[{{name: copy, proposer: prompt_lookup, tree: {tree}}}]")
    assert "prompt lookup copies tokens and draws none" in problem


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


def test_local_model_directory_is_found(write, tmp_path: Path):
    assert load_recipe(write(SMALLEST), [f"target.model={tmp_path}"]).target.model == str(tmp_path)


def test_prompts_that_are_not_files(write):
    recipe = load_recipe(write(SMALLEST), ["data.prompts=[stdlib:train, hf:org/name, hf:org/name:test]"])
    assert recipe.data.prompts == ["stdlib:train", "hf:org/name", "hf:org/name:test"]
    (problem,) = problems_of(write(SMALLEST), "eval.prompts=stdlib:test")
    assert problem.endswith("`eval.prompts`: stdlib:test: write stdlib:train or stdlib:heldout")


def test_dumped_recipe_reads_back(write):
    overrides = [
        "train.learning_rate=1e-7",
        "train.mixed_precision=no",
        "output_dir='runs/é: #1'",
        "target.revision='1e5'",
    ]
    recipe = load_recipe(write(SMALLEST), overrides)
    assert load_recipe(write(dump_recipe(recipe))) == recipe


def test_shipped_recipes_are_valid(monkeypatch):
    root = Path(__file__).parents[1]
    monkeypatch.chdir(root)
    for path in (root / "recipes").glob("*.yaml"):
        load_recipe(path)


# The command line.


def test_command_takes_overrides_anywhere(write):
    path = write(SMALLEST)
    command = cli.parse_command(
        "Doc.",
        [path, "train.seed=4", "--plan", "--show", "3", "train.max_steps=2"],
        extra=lambda parser: parser.add_argument("--show", type=int),
    )
    assert (command.recipe.train.seed, command.recipe.train.max_steps) == (4, 2)
    assert (command.plan, command.show, command.recipe_path) == (True, 3, path)
    assert command.overrides == ["train.seed=4", "train.max_steps=2"]


def test_help_shows_the_docstring_as_written(capsys):
    doc = "Train a drafter, 100 % of it.\n\n    train/eagle3.py   recipes/demo.yaml\n"
    with pytest.raises(SystemExit) as caught:
        cli.parse_command(doc, ["--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert doc in shown
    assert "--plan" in shown
    assert "train.max_steps=100" in shown


def test_script_prints_every_problem_and_exits_with_2(write, tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(
        "from draftsmith.recipes.command.cli import parse_command, run\n"
        "run(lambda: print(parse_command('Doc.').recipe))\n"
    )
    command = [sys.executable, str(script), write(SMALLEST + "sed: 1\n"), "train.seed=x"]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("error: 2 problems\n  - ")
    assert "unknown key `sed`" in result.stderr
    assert "override 'train.seed=x'" in result.stderr
    assert "Traceback" not in result.stderr


def test_run_returns_exit_codes(capsys, monkeypatch):
    def fail(error: BaseException):
        def main() -> None:
            raise error

        return main

    with pytest.raises(SystemExit) as caught:
        cli.run(fail(UserError("wrong.")))
    assert caught.value.code == 2
    assert capsys.readouterr().err == "error: wrong.\n"
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # Ctrl-C stays pytest's
    for terminal, words, said in (
        (False, (), "interrupted\n"),
        (True, (), "\ninterrupted\n"),  # not glued to a bar
        (True, ("interrupted after step 3",), "interrupted after step 3\n"),
    ):
        monkeypatch.setattr(sys.stderr, "isatty", lambda terminal=terminal: terminal)
        with pytest.raises(SystemExit) as caught:
            cli.run(fail(KeyboardInterrupt(*words)))
        assert (caught.value.code, capsys.readouterr().err) == (130, said)
    with pytest.raises(SystemExit) as caught:
        cli.run(fail(PermissionError(errno.EACCES, "Permission denied", "runs/x")))
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("error: runs/x: Permission denied; name another place")
    with pytest.raises(FileNotFoundError):
        cli.run(fail(FileNotFoundError(errno.ENOENT, "No such file", "ours")))
    with pytest.raises(ZeroDivisionError):  # a defect of ours keeps its traceback
        cli.run(fail(ZeroDivisionError()))
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    with pytest.raises(SystemExit):
        cli.run(fail(UserError(["wrong.", "worse."])), many_processes=True)
    assert capsys.readouterr().err == "[rank 1] error: 2 problems\n  - wrong.\n  - worse.\n"
    with pytest.raises(SystemExit) as caught:
        cli.run(fail(KeyboardInterrupt()), many_processes=True)
    assert (caught.value.code, capsys.readouterr().err) == (130, "")  # rank 0 says it
    cli.run(lambda: None, many_processes=True)


@pytest.mark.parametrize("launcher", [("WORLD_SIZE", "LOCAL_RANK"), ("PMI_SIZE", "MPI_LOCALRANKID")])
def test_several_processes_of_a_script_that_needs_one_are_refused_once(
    launcher: tuple[str, str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[float] = []
    monkeypatch.setattr(launch.time, "sleep", waited.append)
    for local_rank, said in (("0", True), ("1", False)):
        for name, value in zip(launcher, ("2", local_rank), strict=True):
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as caught:
            cli.run(lambda: pytest.fail("it has begun"))
        assert caught.value.code == 2
        assert ("runs as one process, and 2 were started" in capsys.readouterr().err) is said
    assert waited == [launch.ENDED_BY_LAUNCHER_SECONDS]  # the second one, until the launcher ends it


@pytest.mark.parametrize("lines", [1, 100_000], ids=["at the end", "meanwhile"])
def test_a_reader_who_goes_away_is_no_defect(lines: int) -> None:
    script = "from draftsmith.recipes.command.cli import run\n"
    script += f"run(lambda: [print('a line') for _ in range({lines})] and None)"
    read, write_end = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "-c", script], stdout=write_end, stderr=subprocess.PIPE, check=False)
    os.close(write_end)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ("{policy: chain, top_k: 5}", "top_k would do nothing"),
        ("{policy: svip, top_k: 5}", "top_k would do nothing"),
        ("{policy: static, top_k: 3}", "what its paths say: leave top_k out"),
        ("{policy: static, nodes: 3, top_k: 3}", "leave nodes, top_k out"),
        ("{policy: ddd, ddd: {at: []}}", r"ddd.at: \[\] tests none of 11 draft calls: name one below 11, or every"),
        ("{policy: ddd, draft_calls: 5}", r"\[5, 7, 9\] tests none of 5 draft calls"),
        ("{policy: dd}", "expected one of 'chain', 'static', .* 'c2t' or 'auto', given the text 'dd'"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(write, tree: str, said: str):
    (problem,) = problems_of(write(SMALLEST), f"eval.tree={tree}")
    assert re.search(said, problem), problem


@pytest.mark.parametrize(
    "tree",
    [
        *("{policy: chain}", "{policy: svip}", "{policy: static}", "{policy: ddd}", "{policy: auto}"),
        *("{policy: ddd, ddd: {at: [2, 20]}}", "{policy: svip_tree, top_k: 4}"),
        "{policy: c2t, top_k: 4, c2t: {classifier: x}}",
    ],
)
def test_a_dumped_tree_reads_back(write, tmp_path: Path, tree: str):
    recipe = load_recipe(write(SMALLEST), [f"eval.tree={tree}"])
    (tmp_path / "dumped.yaml").write_text(dump_recipe(recipe))
    assert load_recipe(tmp_path / "dumped.yaml") == recipe


# Drafters and how they were published.

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
    ],
)
def test_what_a_recipe_leaves_out_is_as_its_drafter_was_published(write, tmp_path: Path, drafter, published):
    """And the recipe that is written back says so, and reads back equal."""
    for train, given in (("", {}), ("train: {token_loss: 0.5, ttt_steps: 9}\n", {"token_loss": 0.5, "ttt_steps": 9})):
        recipe = load_recipe(write(SMALLEST + train), [f"drafter={drafter}"])
        says = yaml.safe_load(dump_recipe(recipe))["train"]
        assert {key: says[key] for key in published} == published | given
        (tmp_path / "back.yaml").write_text(dump_recipe(recipe))
        assert load_recipe(tmp_path / "back.yaml") == recipe


@pytest.mark.parametrize(
    ("drafter", "train", "expected"),
    [
        ("kind: eagle3", "feature_loss: 0.5", ":6: `train.feature_loss`: 0.5, but what EAGLE-3's layer puts out is no"),
        ("kind: poss, base: eagle3", "feature_loss: 1", "`train.feature_loss`: 1, but what EAGLE-3's"),
        ("kind: eagle3", "token_loss: 0", ":6: `train.token_loss`: 0, as are feature_loss, top_k_loss and"),
        ("kind: eagle", "{token_loss: 0, feature_loss: 0}", "`train.token_loss`: 0, as are feature_loss"),
        (
            "kind: poss",
            "ttt_steps: 6",
            ":6: `train.ttt_steps`: 6 steps train no further than position 6, and the last of 4 specialists of 2 each "
            "would begin at position 7 and learn nothing: set it to 7 or more, or drafter.specialists to less",
        ),
        ("kind: poss, positions_per_specialist: 1, specialists: 3", "ttt_steps: 2", "set it to 3 or more"),
    ],
)
def test_training_that_would_teach_nothing_is_refused(write, drafter, train, expected):
    train = train if train.startswith("{") else f"\n  {train}"
    (problem,) = problems_of(write(SMALLEST + f"drafter: {{{drafter}}}\ntrain: {train}\n"))
    assert expected in problem


def test_training_that_reaches_every_specialist_is_taken(write):
    for steps in (7, 8, 20):
        load_recipe(write(SMALLEST + f"drafter: {{kind: poss}}\ntrain: {{ttt_steps: {steps}}}\n"))
    load_recipe(write(SMALLEST + "drafter: {kind: eagle}\ntrain: {token_loss: 0}\n"))
    (problem,) = problems_of(write(SMALLEST), "drafter={kind: poss}", "train.ttt_steps=1")
    assert problem.startswith("override 'train.ttt_steps=1': `train.ttt_steps`: 1 steps train")


def test_features_are_detached_between_specialists_where_there_are_some(write):
    load_recipe(write(SMALLEST + "drafter: {kind: poss}\ntrain: {detach_features: specialists}\n"))
    (problem,) = problems_of(write(SMALLEST + "train: {detach_features: specialists}\n"))
    assert "`train.detach_features`: specialists, but kind eagle3 has none: set it to true (HASS) or false" in problem
    (problem,) = problems_of(write(SMALLEST + "train: {detach_features: sometimes}\n"))
    assert "train.detach_features" in problem and "specialists" in problem


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        (
            "kind: eagle3, specialists: 2",
            "specialists`: it only works in drafters of kind poss, and kind is eagle3: leave",
        ),
        (
            "kind: poss, num_layers: 2",
            "num_layers`: it only works in drafters of kind eagle and eagle3, and kind is poss",
        ),
        ("kind: poss, match_specialists: 2", "match_specialists`: it only works in drafters of kind eagle and eagle3"),
        (
            "kind: eagle, fc_norm: true",
            "fc_norm`: it only works in EAGLE-3's drafters, and kind is eagle: leave it out",
        ),
        ("kind: eagle, init_head: target, init_from: x", "init_head`: it only works in EAGLE-3's drafters"),
        (
            "kind: poss, base: eagle3, fc_bias: false",
            "fc_bias`: it only works in EAGLE-1's drafters, and kind is poss over",
        ),
        ("kind: eagle, capture_layers: [1, 2]", "capture_layers`: it only works in EAGLE-3's drafters"),
        ("kind: eagle, vocab_size: 100", "and cut while decoding, with eval.tree.vocab_size"),
        ("kind: poss, vocab_size: 100", "drafts with the target's own head, from the whole vocabulary"),
        ("init_head: target, init_from: runs/x", "init_head`: target, but init_from brings a head with it"),
        ("kind: medusa", "expected one of 'eagle3', 'eagle' or 'poss'"),
        ("kind: poss, specialists: -2", "specialists`: expected at least 1, given the number -2"),
        ("kind: poss, specialists: 0", "specialists`: expected at least 1, given the number 0"),
        ("kind: poss, specialists: true", "specialists`: expected a whole number, given true"),
        (
            "kind: poss, positions_per_specialist: 65",
            "positions_per_specialist`: expected at most 64, given the number 65",
        ),
        ("kind: poss, specialists: 100000000000000000000", "specialists`: expected at most 64"),
        ("match_specialists: 65", "match_specialists`: expected at most 64"),
    ],
)
def test_what_a_drafter_of_its_kind_does_not_have(write, drafter, expected):
    (problem,) = problems_of(write(SMALLEST + f"drafter: {{{drafter}}}\ntrain: {{seed: 3}}\n"))
    assert "recipe.yaml:4: `drafter" in problem
    assert expected in problem


def test_all_that_a_drafter_does_not_have_is_told_at_its_own_place(write):
    text = "drafter:\n  kind: eagle\n  base: eagle3\n  vocab_size: 9\n  init_head: target\n  init_from: runs/x\n"
    problems = problems_of(write(SMALLEST + text), "drafter.fc_norm=true")
    places = {problem.split("` ")[0].split("`: ")[0].split(" `")[-1]: problem for problem in problems}
    assert set(places) == {"drafter.base", "drafter.vocab_size", "drafter.init_head", "drafter.fc_norm"}
    assert len(problems) == 4
    for key, place in (("base", "recipe.yaml:6: "), ("vocab_size", ":7: "), ("init_head", ":8: ")):
        assert place in places[f"drafter.{key}"]
    assert places["drafter.fc_norm"].startswith("override 'drafter.fc_norm=true': ")


def test_all_that_cannot_be_trained_is_told_at_its_own_place(write):
    text = "drafter: {kind: poss, base: eagle3}\ntrain:\n  feature_loss: 1\n  ttt_steps: 3\n"
    feature, steps = problems_of(write(SMALLEST + text))
    assert ":6: `train.feature_loss`: 1, but what" in feature
    assert ":7: `train.ttt_steps`: 3 steps train no further" in steps


@pytest.mark.parametrize("kind", ["eagle", "poss", "poss, base: eagle3", "eagle3"])
def test_defaults_are_not_otherwise_than_published(write, kind):
    recipe = load_recipe(write(SMALLEST), [f"drafter={{kind: {kind}}}"])
    assert other_than_published(recipe.drafter, recipe.train) is None


@pytest.mark.parametrize(
    ("drafter", "train", "said"),
    [
        (
            # A written-back PosS recipe, the feature's loss switched off as the loader asks.
            {"kind": "poss", "base": "eagle3"},
            {**HASS, "feature_loss": 0.0, "ttt_steps": 8},
            "otherwise than published for poss over eagle3: train.step_weight 1 (published 0.9), train.token_loss 0.1 "
            "(published 1), train.feature_noise 0.2 (published 0), train.detach_features true (published false)",
        ),
        ({"kind": "poss", "base": "eagle3"}, {**EAGLE3, "step_weight": 0.9}, None),
        (
            {"kind": "poss"},
            {**EAGLE3, "top_k_loss": 1.0, "ttt_steps": 20},
            "otherwise than published for poss: train.step_weight 0.8 (published 1), train.token_loss 1 (published "
            "0.1), train.feature_loss 0 (published 1), train.feature_noise 0 (published 0.2), train.detach_features "
            "false (published true), train.top_k_loss 1 (published 0)",
        ),
        (
            # Of EAGLE-1's single step: no weight and no gradient between steps.
            {"kind": "eagle"},
            {**EAGLE3, "ttt_steps": 1},
            "otherwise than published for eagle: train.token_loss 1 (published 0.1), train.feature_loss 0 (published "
            "1), train.feature_noise 0 (published 0.2)",
        ),
        ({"kind": "eagle"}, {**HASS, "ttt_steps": 3, "top_k_loss": 1.0}, None),
        (
            {"kind": "eagle"},
            {**HASS, "ttt_steps": 5},
            "otherwise than published for HASS (eagle with train.ttt_steps 5): train.top_k_loss 0 (published 1)",
        ),
        ({}, {**EAGLE3, "ttt_steps": 5}, None),
        ({}, {"top_k_loss": 0.5}, "otherwise than published for eagle3: train.top_k_loss 0.5 (published 0)"),
        ({}, {"learning_rate": 1e-3, "clip": "value"}, None),
    ],
)
def test_losses_of_another_method_are_named(drafter, train, said):
    assert other_than_published(DrafterSection(**drafter), TrainSection(**train)) == said


def test_a_recipe_that_was_written_back_names_the_losses_that_it_keeps(write):
    back = write(dump_recipe(load_recipe(write(SMALLEST), ["drafter={kind: poss}"])))
    recipe = load_recipe(back, ["drafter={kind: eagle}"])
    assert (recipe.train.ttt_steps, recipe.train.top_k_loss) == (8, 0)
    assert "published for HASS" in (other_than_published(recipe.drafter, recipe.train) or "")
    (problem,) = problems_of(back, "drafter={kind: poss, base: eagle3}")
    assert "`train.feature_loss`: 1, but what EAGLE-3's" in problem
