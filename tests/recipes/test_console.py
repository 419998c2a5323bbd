"""The `draftsmith` command: its list, its speed's cause (what it imports), `run`, `init`, completion."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file

from draftsmith.eval import report
from draftsmith.models import init_recipe
from draftsmith.models.drafters import drafter_shape
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command import pipeline
from draftsmith.recipes.command.stages import STAGES
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from tests.evaluation_cases import write_lines
from tests.training_runs import run_main, write_recipe

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "transformers", "datasets", "accelerate", "matplotlib")


def test_help_and_mistakes_come_before_heavy_imports(tmp_path: Path) -> None:
    """--help of every command, a missing recipe, and a recipe whose inputs are not there yet."""
    (tmp_path / "r.yaml").write_text(f"output_dir: {tmp_path}/run\ntarget: {{model: {ROOT}/recipes/demo_target}}\n")
    program = f"""
import contextlib, importlib, io, sys
from draftsmith.recipes.command import console
console.help_text()
assert "pydantic" not in sys.modules  # draftsmith --help
from draftsmith.recipes.command.cli import run
needs = {{"train": "run `draftsmith regenerate` first", "rank-vocab": "draftsmith regenerate",
         "evaluate": "run `draftsmith train` first", "regenerate": "data.prompts", "capture": "draftsmith regenerate",
         "conversations": "draftsmith regenerate", "contamination": "eval.prompts", "report": "draftsmith evaluate"}}
for name, script in console.SCRIPTS.items():
    main = importlib.import_module(script.module).main
    reads = name not in ("init", "import-drafter", "completion")
    wrong = [["--help"], ["nothere.yaml"] * reads, ["r.yaml"] * (name in needs)]
    for arguments in filter(None, wrong):
        sys.argv = [f"draftsmith {{name}}", *arguments]
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.suppress(SystemExit):
            run(main)
        said = out.getvalue() + err.getvalue()
        expected = {{"--help": f"usage: draftsmith {{name}}", "nothere.yaml": "no such recipe file"}}
        assert expected.get(arguments[0], needs.get(name)) in said, (name, arguments, said)
        assert arguments[0] != "--help" or importlib.import_module(script.module).__doc__ in said, name  # as written
        heavy = [each for each in {HEAVY!r} if each in sys.modules]
        assert not heavy, (name, arguments, heavy)  # so `run` can still set up their threads
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0, done.stderr


def test_a_shell_gets_completions(tmp_path: Path) -> None:
    line = "draftsmith train r.yaml train.max_st"
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_STDOUT_FILENAME": str(tmp_path / "answer")}
    asked |= {"COMP_LINE": line, "COMP_POINT": str(len(line)), "IFS": "\n"}
    arguments = [sys.executable, "-c", "from draftsmith.recipes.command.console import main; main()"]
    subprocess.run(arguments, env=os.environ | asked, check=False, timeout=60)
    assert (tmp_path / "answer").read_text().strip() == "train.max_steps="


# draftsmith run


class Stages:
    """Stands in for the processes that `run` starts: each writes its files."""

    def __init__(self, recipe_path: Path, monkeypatch: pytest.MonkeyPatch):
        self.recipe_path, self.called, self.fails = recipe_path, list[str](), dict[str, int]()
        self.content: Callable[[], object] = time.time_ns  # of what a stage writes
        self._monkeypatch = monkeypatch
        monkeypatch.setattr(pipeline, "_call", self._call)

    def _call(self, words: list[str]) -> int:
        stage, overrides = words[0], [word for word in words[2:] if word != "--plan"]
        self.called.append(" ".join([stage, *words[len(overrides) + 2 :]]))
        if stage in self.fails:
            return self.fails[stage]
        if "--plan" in words:
            return 0
        for file in STAGES[stage].writes(load_recipe(self.recipe_path, overrides)):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{stage} {self.content()}")
        return 0

    def run(self, *arguments: str) -> list[str]:
        """The stages that ran."""
        self.called.clear()
        self._monkeypatch.setattr(sys, "argv", ["draftsmith run", str(self.recipe_path), *arguments])
        pipeline.main()
        return list(self.called)


@pytest.fixture
def stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stages:
    prompts, asked = write_lines(tmp_path / "prompts.jsonl", {"prompt": "a"}), "demo_prompts/stdlib-heldout.jsonl.gz"
    sections = {"data": {"prompts": str(prompts)}, "eval": {"prompts": str(ROOT / "recipes" / asked)}}
    return Stages(write_recipe(tmp_path, ROOT / "recipes/demo_target", **sections), monkeypatch)


ALL = ["regenerate", "rank-vocab", "train", "evaluate"]


def test_a_run_does_what_is_missing_and_nothing_else(stages: Stages, capsys: pytest.CaptureFixture[str]) -> None:
    run = stages.recipe_path.parent / "run"
    assert stages.run("--plan") == [f"{stage} --plan" for stage in ALL] and not run.exists()
    assert stages.run() == ALL
    assert stages.run() == [] and "nothing is left to do" in capsys.readouterr().out
    assert stages.run("eval.max_prompts=3") == ["evaluate"]
    assert stages.run("eval.max_prompts=3", "train.max_steps=9") == ["train", "evaluate"]
    (run / "draft_vocab.safetensors").unlink()
    words = ["eval.max_prompts=3", "train.max_steps=9", "export.to=vllm"]
    assert stages.run(*words) == ["rank-vocab", "train", "evaluate", "export"] and stages.run(*words) == []
    assert stages.run("eval.max_prompts=2", *words[1:]) == ["evaluate", "export"]
    (run / "stages.json").write_text("{")  # what was done is not known: every stage finds out for itself
    assert stages.run("eval.max_prompts=3", "train.max_steps=9") == ALL


def test_what_decides_a_result_makes_a_stage_run_again_and_nothing_else(stages: Stages, tmp_path: Path) -> None:
    run, remove = tmp_path / "run", "data.contamination=remove"
    assert stages.run() == ALL
    assert stages.run("data.generator.batch_size=2", "train.trackers=[]", "target.device=auto") == []
    os.utime(run / "conversations.jsonl")  # another time, the same content
    assert stages.run() == []
    shutil.copytree(run, tmp_path / "copy")
    assert stages.run(f"output_dir={tmp_path / 'copy'}") == []
    (run / "drafter/config.json").write_text("garbage")
    assert stages.run("--plan") == ["train --plan", "evaluate --plan"]
    (run / "token_counts.safetensors").unlink()
    assert stages.run()[:2] == ["rank-vocab", "train"]
    # Screened against other questions, other answers may be trained on.
    again = [f"output_dir={tmp_path / 'screened'}", remove, "eval.prompts=recipes/demo_prompts/stdlib-train.jsonl.gz"]
    stages.fails["train"] = 2
    for words in (again, again[:2]):
        with pytest.raises(SystemExit):
            stages.run(*words)
    assert stages.called == ALL[:3]


def test_other_prompts_are_refused_where_a_drafter_was_trained(stages: Stages, tmp_path: Path) -> None:
    assert stages.run() == ALL
    prompts = tmp_path / "prompts.jsonl"
    for change in (["data.max_prompts=9"], ["data.max_length=99"], []):
        if not change:
            prompts.write_text('{"prompt": "another"}\n')
        with pytest.raises(UserError, match=r"^data: the prompts or answers changed"):
            stages.run(*change)
        assert stages.called == []
    prompts.write_text('{"prompt": "a"}\n')
    assert stages.run() == []
    pictures = ["data.prompts=null", "data.reprompt.sources=pictures.jsonl", f"output_dir={tmp_path / 'pictures'}"]
    assert stages.run(*pictures) == ["reprompt", *ALL] and stages.run(*pictures) == []
    with pytest.raises(UserError, match=r"^data: the prompts or answers changed"):
        stages.run(*pictures, "data.reprompt.min_words=99")


def test_a_changed_template_adapter_or_model_beside_the_target_is_noticed(stages: Stages, tmp_path: Path) -> None:
    for name in ("adapter", "small", "start"):
        (tmp_path / name).mkdir()
    small = f"{{proposer: causal_lm, draft_model: {{model: {tmp_path / 'small'}}}, tree: {{policy: chain}}}}"
    words = [f"target.chat_template={tmp_path / 't.jinja'}", f"target.adapter={tmp_path / 'adapter'}"]
    words += [f"eval.also=[{small}]", f"drafter.init_from={tmp_path / 'start'}"]
    stages.content = lambda: "the same"
    again = {"small/model.safetensors": ["evaluate"], "start/model.safetensors": ALL[1:3]}
    for file in (*again, "adapter/adapter_model.safetensors", "t.jinja"):
        (tmp_path / "t.jinja").write_text("one")
        (tmp_path / file).write_text("one")
        place = f"output_dir={tmp_path / file.replace('/', '-')}.run"
        assert stages.run(*words, place) == ALL and stages.run(*words, place) == []
        (tmp_path / file).write_text("another")
        assert stages.run(*words, place) == again.get(file, ALL), file


@pytest.mark.skipif(sys.platform != "linux", reason="a parent's death is told on Linux alone")
@pytest.mark.slow
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_stage_ends_with_the_command_that_started_it(name: str, tmp_path: Path) -> None:
    """Whoever sends the signal to `draftsmith run` alone."""
    child = f"""
import os, pathlib, signal, sys, time
pathlib.Path({str(tmp_path / "pid")!r}).write_text(str(os.getpid()))
try:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    time.sleep(60)
except KeyboardInterrupt:
    sys.exit(130)
"""
    parent = f"""
import os, signal, sys
from draftsmith.recipes.command import pipeline

def stage():
    os.execv(sys.executable, [sys.executable, "-c", {child!r}])  # as training by several processes does

signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
pipeline.SECONDS_TO_END = 0.2
pipeline.console.main = stage
sys.exit(pipeline._call(["train"]))
"""
    process = subprocess.Popen([sys.executable, "-c", parent], start_new_session=True)
    until = time.monotonic() + 30
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        assert time.monotonic() < until
        time.sleep(0.05)
    stage = psutil.Process(int((tmp_path / "pid").read_text()))
    time.sleep(0.2)
    process.send_signal(getattr(signal, name))
    assert process.wait(30) == {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -9}[name]
    psutil.wait_procs([stage], timeout=30)
    assert not stage.is_running() or stage.status() == psutil.STATUS_ZOMBIE


def test_a_stage_that_did_not_end_well_is_not_done(stages: Stages, capsys: pytest.CaptureFixture[str]) -> None:
    def ends(code: int, *words: str) -> int | str | None:
        """How `run` ends if training exits with this code and writes nothing."""
        stages.fails["train"] = code
        with pytest.raises(SystemExit) as ended:
            stages.run(*words)
        stages.fails.clear()
        return ended.value.code

    assert ends(2) == 2 and stages.called == ALL[:3]
    assert ends(0) == 1 and "train stopped early" in capsys.readouterr().err  # SIGTERM: it saved a checkpoint
    assert stages.run() == ALL[2:]
    assert ends(0, "train.max_steps=9") == 1  # an older drafter is not this run's


def test_a_recipe_decides_which_stages_there_are(stages: Stages) -> None:
    c2t = "eval.tree={policy: c2t, c2t: {classifier: " + str(stages.recipe_path.parent / "run/c2t") + "}}"
    states = f"data.states={stages.recipe_path.parent / 'states'}"
    assert stages.run("data.prompts=null", states, c2t, "--plan") == [
        f"{stage} --plan" for stage in ("rank-vocab", "capture", "train", "label-trees", "train-c2t", "evaluate")
    ]
    pictures = "data.reprompt.sources=pictures.jsonl"
    assert stages.run("data.prompts=null", pictures, "--plan") == ["reprompt --plan"]  # the others need its file
    assert stages.run(pictures, "--plan") == [f"{stage} --plan" for stage in ALL]  # of other prompts
    assert stages.run("eval.prompts=null", "--plan") == [f"{stage} --plan" for stage in ALL[:3]]


LAUNCH = (
    "-m accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no --cpu"
)


def command(words: str, *arguments: str) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, *words.split(), *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "\r" not in done.stdout + done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_one_command_goes_through_all_and_a_launched_script_makes_the_same(target_dir: Path, tmp_path: Path) -> None:
    run, questions = tmp_path / "run", [{"id": f"q{i}", "turns": [f"the cat {i} sat"] * (1 + i % 2)} for i in range(12)]
    prompts = str(write_lines(tmp_path / "prompts.jsonl", *questions))
    answers = {"batch_size": 4, "max_new_tokens": 20, "temperature": 0}
    lookup = {"name": "lookup", "proposer": "prompt_lookup", "tree": {"policy": "chain", "nodes": 6}}
    evaluated = {"prompts": prompts, "max_prompts": 4, "max_new_tokens": 16, "also": [lookup]}
    sections = {
        "data": {"prompts": prompts, "max_length": 200, "generator": answers},
        "drafter": {"vocab_size": 20},
        "train": {"max_steps": 4, "batch_size": 4, "log_every_steps": 2, "mixed_precision": "no"},
        "eval": evaluated | {"tree": {"nodes": 12, "draft_calls": 3, "top_k": 4}},
        "export": {"to": "vllm"},
    }
    path = str(write_recipe(tmp_path, target_dir, **sections))
    first = command("-m draftsmith.recipes.command.console run", path)
    stages = ("regenerate", "rank-vocab", "train", "evaluate", "export")
    assert [f"[{i}/5] draftsmith {stage} {path}" in first for i, stage in enumerate(stages, 1)] == [True] * 5
    assert f"{run}/export/vllm: read back, bit for bit" in first and "next: " not in first
    assert json.loads((run / "eval/acceptance.json").read_text())["matches_target"] is True
    page = (run / "eval/report.html").read_text()
    run_main(report, path)
    assert (run / "eval/report.html").read_text() == page  # built again from the files alone
    again = command("-m draftsmith.recipes.command.console run", path)
    assert again.count("  done ") == 5 and "nothing is left to do" in again
    drafter = load_file(run / "drafter/model.safetensors")  # the file's own header has no fixed order
    for made in ("drafter", "checkpoints"):
        shutil.rmtree(run / made)
    command(f"{LAUNCH} train/eagle3.py", path)
    same = load_file(run / "drafter/model.safetensors")
    assert same.keys() == drafter.keys() and all(torch.equal(same[name], drafter[name]) for name in drafter)


# draftsmith init


def changed(target_dir: Path, folder: Path, **config: Any) -> Path:
    """The target in another folder, with other entries of its config."""
    shutil.copytree(target_dir, folder, dirs_exist_ok=True)
    (folder / "config.json").write_text(json.dumps(json.loads((target_dir / "config.json").read_text()) | config))
    return folder


def test_init_writes_a_recipe_for_the_target(
    target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n')
    run_main(init_recipe, str(target_dir), "--prompts", "p.jsonl", "--out", "new/mine.yaml")
    assert capsys.readouterr().out.endswith("next: draftsmith run new/mine.yaml --plan\n")
    recipe = load_recipe("new/mine.yaml")
    assert recipe.target.model == str(target_dir) and recipe.data.prompts == "p.jsonl"
    assert recipe.drafter.vocab_size is None and recipe.data.max_length == 512  # all that the target has
    assert recipe.train.learning_rate == init_recipe.SMALL[1]  # no more for a target that is smaller still
    assert "reads states 2, 3, 4 of 7" in (tmp_path / "new/mine.yaml").read_text()


@pytest.mark.parametrize("depth", [1, 6, 7])
def test_init_names_states_that_a_target_of_any_depth_has(target_dir: Path, tmp_path: Path, depth: int) -> None:
    shallow, path = changed(target_dir, tmp_path / "x", num_hidden_layers=depth, layer_types=None), tmp_path / "my.yaml"
    path.write_text(init_recipe.starter_recipe(str(shallow), init_recipe.PROMPTS, path))
    recipe = load_recipe(path)
    shape = drafter_shape(recipe.drafter, TargetFiles(recipe.target).config)
    assert isinstance(shape, Eagle3Config) and len(shape.capture_layers) == min(depth, 3)
    assert (recipe.drafter.capture_layers is None) == (depth == 7)


def test_init_s_numbers_follow_the_target_s_size(target_dir: Path, tmp_path: Path) -> None:
    wide = {"hidden_size": 4096, "vocab_size": 151_936, "max_position_embeddings": 40_960, "num_hidden_layers": 36}
    large = changed(target_dir, tmp_path / "Large Model", **wide)
    template = (target_dir / "chat_template.jinja").read_text()
    (large / "chat_template.jinja").write_text("{% if enable_thinking %}x{% endif %}" + template)
    text = init_recipe.starter_recipe(str(large), init_recipe.PROMPTS, Path("of-mine/Large 2.yaml"))
    found = yaml.safe_load(text)
    assert found["output_dir"] == "runs/large-2"
    assert found["drafter"]["vocab_size"] == 32_000 and found["train"]["learning_rate"] == "1e-4"
    assert found["target"] == {"model": str(large), "dtype": "auto", "thinking": False}
    assert "reads states 2, 18, 33 of 36" in text and found["data"]["max_length"] == 2048
