"""The command `export` as users call it: what it prints and writes, the model card, and mistakes."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.models import export as script
from draftsmith.models import import_drafter as import_script
from draftsmith.models.chat import tokenizer_fingerprint
from draftsmith.models.checkpoint import read_drafter_config
from draftsmith.models.formats import card as cards
from draftsmith.models.formats.exporting import Source
from draftsmith.recipes.command import cli
from draftsmith.recipes.files.digest import file_digest
from tests.conftest import make_tokenizer
from tests.export_cases import drafter_named, save_target, trained
from tests.report_cases import MADE, MAIN, evaluate, make_recipe


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """run/drafter, run/recipe.yaml and run/eval, measured with made-up answers, in the working directory."""
    monkeypatch.chdir(tmp_path)
    save_target(tmp_path / "target")
    run = tmp_path / "run"
    trained(run / "drafter", "target", drafter_named("eagle3"))
    recipe = {"output_dir": "run", "target": {"model": "target", "dtype": "float32"}, "export": {"license": "mit"}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return run


def measure(run: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
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


def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], main: Any, *words: str
) -> tuple[int, str]:
    monkeypatch.setattr(sys, "argv", ["draftsmith", *words])
    code = 0
    try:
        cli.run(main)
    except SystemExit as end:
        code = int(end.code or 0)
    said = capsys.readouterr()
    return code, said.out + said.err


def test_an_export_of_a_recipe_has_a_card_with_what_was_measured(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measured = measure(run_dir, monkeypatch)
    assert call(monkeypatch, capsys, script.main, "recipe.yaml", "--plan")[0] == 0
    assert not (run_dir / "export").exists()
    code, said = call(monkeypatch, capsys, script.main, "recipe.yaml")
    out = run_dir / "export/vllm"
    assert code == 0 and "SGLang, TensorRT-LLM read the same folder" in said, said
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
        mine = profile["drafts"][MAIN]["benchmarks"][benchmark]
        assert mine["acceptance_by_position"] == rows[MAIN]["acceptance_by_position"]
        ends = rows[MAIN]["tau_interval"]
        interval = "" if ends is None else f"[{ends[0]:.2f}, {ends[1]:.2f}]"
        assert f"| {MAIN} | {benchmark} | {rows[MAIN]['prompts']} | {rows[MAIN]['tau']:.2f} | {interval} |" in card
    row = measured["contenders"][MAIN]  # of a drafter whose tokens are never accepted
    row["acceptance_by_position"] = row["acceptance_by_position_interval"] = []
    assert cards.picture(Source.read(run_dir / "drafter"), measured).startswith(b"\x89PNG")


def test_a_plan_comes_before_the_training(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = "recipe.yaml", "output_dir=new", "--plan"
    code, said = call(monkeypatch, capsys, script.main, *words, "export.to=sglang")
    assert code == 0 and "yet to be trained" in said and "new/export/sglang  [new]" in said, said
    code, said = call(monkeypatch, capsys, script.main, *words, "export.to=sglang", "drafter.kind=poss")
    assert code == 2 and "no engine can" in said
    save_target(run_dir.parent / "target", family="gemma2")  # scales its embeddings, which its config tells
    code, said = call(monkeypatch, capsys, script.main, *words, "drafter.fc_norm=true")
    assert code == 0 and "engine         vLLM; also able: speculators\n" in said


def test_a_drafter_that_no_engine_can_serve_and_a_checkpoint_with_keys_are_refused(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    trained(run_dir / "poss", "target", drafter_named("poss"))
    for words, named in (
        (["run/poss", "--to", "vllm"], "no engine can"),
        (["run/drafter", "--to", "eagle"], "always captures states"),
        (["run/drafter", "export.license=mit"], "a checkpoint, which has no keys"),
        (["run"], "no drafter here"),
        (["run/drafte"], "run/drafte: no such folder; name a drafter's folder, or a recipe"),
        (["run/drafter", "--out", "run/poss"], "holds a trained drafter"),
    ):
        code, said = call(monkeypatch, capsys, script.main, *words)
        assert code == 2 and named in said and "Traceback" not in said, (words, said)


def test_numbers_of_other_weights_are_not_told(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure(run_dir, monkeypatch)
    trained(run_dir / "drafter", "target", drafter_named("eagle3.1"))
    code, said = call(monkeypatch, capsys, script.main, "recipe.yaml", "export.license=null")
    assert code == 0 and "was measured with other weights" in said
    card = (run_dir / "export/vllm/README.md").read_text()
    assert "Not measured yet" in card and "license" not in card.split("---\n")[1]
    assert not (run_dir / "export/vllm/speculation_profile.json").exists()


def test_a_checkpoint_is_exported_and_imported_without_a_recipe(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, said = call(monkeypatch, capsys, script.main, "run/drafter", "--to", "speculators", "--out", "served")
    assert code == 0 and "acceptance     none" in said
    words = ["served", "--target", "target", "--out", "back"]
    code, said = call(monkeypatch, capsys, import_script.main, *words, "--plan")
    assert code == 0 and not Path("back").exists()
    code, said = call(monkeypatch, capsys, import_script.main, *words)
    assert code == 0, said
    shape, target = read_drafter_config(Path("back"))
    assert shape == read_drafter_config(run_dir / "drafter")[0]
    assert target["tokenizer_fingerprint"] == tokenizer_fingerprint(make_tokenizer())


def test_what_an_engine_must_be_told_is_said(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = run_dir / "drafter/config.json"
    content = json.loads(config.read_text())
    content["target"] |= {"adapter": "ad" * 32, "guidance": "scale 2, <null>"}
    config.write_text(json.dumps(content))
    code, said = call(monkeypatch, capsys, script.main, "recipe.yaml")
    card = (run_dir / "export/vllm/README.md").read_text()
    for text in (said, card):
        assert "with a LoRA adapter merged into it" in text and "vllm serve MERGED_TARGET" in text
        assert "under classifier-free guidance (scale 2, <null>)" in text
    assert code == 0 and "vllm serve target" not in said + card and "ad" * 32 in card
    code, said = call(monkeypatch, capsys, script.main, "recipe.yaml", "--to", "llama.cpp", "--with-target", "x.py")
    assert code == 2 and "would convert the target without its adapter" in said


def test_a_binding_licence_is_told_by_the_targets_name() -> None:
    bound = ("meta-llama/Llama-3.1-8B-Instruct", "codellama/CodeLlama-7b-hf", "models/gemma-2-2b-it")
    for name in (*bound, "TinyLlama/TinyLlama-1.1B", "llava-hf/llava-1.5-7b-hf"):
        assert any(re.search(family, name.lower()) for family in cards.BINDING) == (name in bound)
