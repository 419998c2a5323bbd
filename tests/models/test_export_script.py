"""The command `export` as users call it: what it prints and writes, the model card, and mistakes."""

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.models import export, import_drafter
from draftsmith.models.chat import tokenizer_fingerprint
from draftsmith.models.checkpoint import read_drafter_config
from draftsmith.models.formats import card as cards
from draftsmith.recipes.command import cli
from draftsmith.recipes.files.digest import file_digest
from tests.conftest import make_tokenizer
from tests.export_cases import drafter_named, save_target, trained
from tests.report_cases import MADE, MAIN, evaluate, make_recipe

Call = Callable[..., str]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a script with the words behind it; returns what it prints."""

    def run(*words: str, main: Any = export.main, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["draftsmith", *words])
        found = 0
        try:
            cli.run(main)
        except SystemExit as end:
            found = int(end.code or 0)
        out, err = capsys.readouterr()
        assert found == code and "Traceback" not in err, (words, out, err)
        return out + err

    return run


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """run/drafter, and recipe.yaml, in the working directory."""
    monkeypatch.chdir(tmp_path)
    save_target(tmp_path / "target")
    trained(tmp_path / "run/drafter", "target", drafter_named("eagle3"))
    recipe = {"output_dir": "run", "target": {"model": "target", "dtype": "float32"}, "export": {"license": "mit"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path / "run"


def measure(run: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """run/eval, measured with made-up answers."""
    digest = file_digest(run / "drafter/model.safetensors")
    made = MADE["made"] | {"data": {"drafter": {"file": "model.safetensors", "sha256": digest}}}  # type: ignore[operator]
    monkeypatch.setitem(MADE, "made", made)
    (run.parent / "measured").mkdir()
    recipe = make_recipe(run.parent / "measured", drafter="run/drafter")
    asked = [("ours", None, "a", 1), ("ours", None, "b", 1), ("theirs", None, "c", 1)]
    evaluate(recipe, asked, contenders=(MAIN, "rival"))
    content = json.loads((recipe.eval_out / "acceptance.json").read_text())
    content["contenders"]["rival"]["drafter"] = "run/another"
    (recipe.eval_out / "acceptance.json").write_text(json.dumps(content))
    recipe.eval_out.rename(run / "eval")
    return content


def test_a_card_has_what_was_measured_with_these_weights(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, call: Call
) -> None:
    measured = measure(run_dir, monkeypatch)
    call("recipe.yaml", "--plan")
    assert not (run_dir / "export").exists()
    said, out = call("recipe.yaml"), run_dir / "export/vllm"
    assert "SGLang, TensorRT-LLM read the same folder" in said
    assert {path.name for path in out.iterdir()} == {
        *("config.json", "model.safetensors", "README.md", "speculation_profile.json", "acceptance.png"),
    }
    card = (out / "README.md").read_text()
    head = yaml.safe_load(card.split("---\n")[1])
    assert head["license"] == "mit" and "base_model" not in head  # the target is a folder, which the Hub would refuse
    command = next(line.strip() for line in said.splitlines() if line.strip().startswith("vllm serve"))
    assert command in card and "draftsmith evaluate recipe.yaml" in card
    profile = json.loads((out / "speculation_profile.json").read_text())
    assert list(profile["drafts"]) == [MAIN]
    for benchmark, rows in measured["benchmarks"].items():
        row, mine = rows[MAIN], profile["drafts"][MAIN]["benchmarks"][benchmark]
        assert mine["acceptance_by_position"] == row["acceptance_by_position"]
        interval = "" if (ends := row["tau_interval"]) is None else f"[{ends[0]:.2f}, {ends[1]:.2f}]"
        assert f"| {MAIN} | {benchmark} | {row['prompts']} | {row['tau']:.2f} | {interval} |" in card
    row = measured["contenders"][MAIN]  # of a drafter whose tokens are never accepted
    row["acceptance_by_position"] = row["acceptance_by_position_interval"] = []
    assert cards.picture(measured).startswith(b"\x89PNG")

    trained(run_dir / "drafter", "target", drafter_named("eagle3.1"))
    assert "was measured with other weights" in call("recipe.yaml", "export.license=null")
    card = (out / "README.md").read_text()
    assert "Not measured yet" in card and "license" not in card.split("---\n")[1]
    assert not (out / "speculation_profile.json").exists()


def test_a_plan_comes_before_the_training(run_dir: Path, call: Call) -> None:
    words = "recipe.yaml", "output_dir=new", "--plan"
    said = call(*words, "export.to=sglang")
    assert "yet to be trained" in said and "new/export/sglang  [new]" in said
    assert "no engine can" in call(*words, "export.to=sglang", "drafter.kind=poss", code=2)
    save_target(run_dir.parent / "target", family="gemma2")  # scales its embeddings, which its config tells
    assert "engine         vLLM; also able: speculators\n" in call(*words, "drafter.fc_norm=true")


def test_a_checkpoint_is_exported_and_imported_without_a_recipe(run_dir: Path, call: Call) -> None:
    for words, named in (
        (["run/drafter", "export.license=mit"], "a checkpoint, which has no keys"),
        (["run"], "no drafter here"),
        (["run/drafte"], "run/drafte: no such folder; name a drafter's folder, or a recipe"),
    ):
        assert named in call(*words, code=2)
    assert "acceptance     none" in call("run/drafter", "--to", "speculators", "--out", "served")
    words = ["served", "--target", "target", "--out", "back"]
    call(*words, "--plan", main=import_drafter.main)
    assert not Path("back").exists()
    call(*words, main=import_drafter.main)
    shape, target = read_drafter_config(Path("back"))
    assert shape == read_drafter_config(run_dir / "drafter")[0]
    assert target["tokenizer_fingerprint"] == tokenizer_fingerprint(make_tokenizer())


def test_what_an_engine_must_be_told_is_said(run_dir: Path, call: Call) -> None:
    config = run_dir / "drafter/config.json"
    content = json.loads(config.read_text())
    content["target"] |= {"adapter": "ad" * 32, "guidance": "scale 2, <null>"}
    config.write_text(json.dumps(content))
    said = call("recipe.yaml")
    card = (run_dir / "export/vllm/README.md").read_text()
    for text in (said, card):
        assert "with a LoRA adapter merged into it" in text and "vllm serve MERGED_TARGET" in text
        assert "under classifier-free guidance (scale 2, <null>)" in text
    assert "vllm serve target" not in said + card and "ad" * 32 in card
    said = call("recipe.yaml", "--to", "llama.cpp", "--with-target", "x.py", code=2)
    assert "would convert the target without its adapter" in said


def test_a_binding_licence_is_told_by_the_targets_name() -> None:
    bound = ("meta-llama/Llama-3.1-8B-Instruct", "codellama/CodeLlama-7b-hf", "models/gemma-2-2b-it")
    for name in (*bound, "TinyLlama/TinyLlama-1.1B", "llava-hf/llava-1.5-7b-hf"):
        assert any(re.search(family, name.lower()) for family in cards.BINDING) == (name in bound)
