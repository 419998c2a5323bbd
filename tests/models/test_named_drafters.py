"""Recipes that name drafters on the Hub and in foreign formats, which are measured and trained on like our own."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from draftsmith.data_gen import rank_vocab
from draftsmith.eval import acceptance
from draftsmith.models.checkpoint import read_drafter_config, read_weights
from draftsmith.models.formats import named_drafters
from draftsmith.models.formats.folder import read_folder
from draftsmith.models.formats.foreign import import_drafter
from draftsmith.models.formats.named_drafters import with_measured_drafters, with_start, with_writing_drafter
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from tests.compare_cases import save_untrained
from tests.export_cases import CUT, published_eagle3
from tests.models.hub_cases import FakeHub, files_of
from tests.models.hub_cases import checkpoint as checkpoint
from tests.models.hub_cases import hub as hub
from tests.training_runs import recipe_path as recipe_path
from tests.training_runs import run_main, train


@pytest.fixture
def place(tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working directory, with a foreign drafter and a recipe that measures."""
    monkeypatch.chdir(tmp_path)
    published_eagle3(tmp_path / "foreign")
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "the cat"}\n{"prompt": "a mat"}\n')
    tree = {"nodes": 12, "draft_calls": 3, "top_k": 4}
    recipe = {
        "output_dir": "run",
        "target": {"model": str(target_dir), "dtype": "float32", "device": "cpu"},
        "eval": {"prompts": "prompts.jsonl", "max_new_tokens": 12, "tree": tree},
    }
    (tmp_path / "measure.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


def measured(place: Path, drafter: str, plan: bool = False) -> str | None:
    return with_measured_drafters(load_recipe("measure.yaml", [f"eval.drafter={drafter}"]), plan).eval.drafter


@pytest.mark.slow
def test_a_foreign_folder_is_measured_as_its_import(place: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import_drafter(read_folder(place / "foreign"), TargetFiles(load_recipe("measure.yaml").target), place / "by-hand")
    run_main(acceptance, "measure.yaml", "eval.drafter=foreign", "--plan")
    assert not (place / "run/imported").exists() and "[yet to be imported]" in capsys.readouterr().out
    numbers = []
    for name in ("by-hand", "foreign"):
        run_main(acceptance, "measure.yaml", f"eval.drafter={name}")
        report = json.loads((place / "run/eval/acceptance.json").read_text())
        numbers.append([report[key] for key in ("tau", "rounds", "new_tokens", "matches_target")])
    assert numbers[0] == numbers[1] and numbers[0][-1] is True
    [imported] = (place / "run/imported").glob("foreign-*")
    assert report["drafter"] == str(imported.relative_to(place)) and "drafter" in report["made"]["data"]


def test_an_import_is_made_once_for_each_content_and_target(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = measured(place, "foreign")
    changed = json.loads((place / "foreign/config.json").read_text()) | {"rms_norm_eps": 1e-4}
    with monkeypatch.context() as patch:
        patch.setattr(named_drafters, "import_drafter", lambda *_: pytest.fail("it was imported again"))
        assert measured(place, "foreign") == measured(place, str(place / "foreign")) == first
    (place / "foreign/config.json").write_text(json.dumps(changed))
    second = measured(place, "foreign")
    assert second != first and read_drafter_config(Path(str(second)))[0].rms_norm_eps == 1e-4
    for other in ("target.dtype=bfloat16", "target.revision=v2"):
        recipe = load_recipe("measure.yaml", ["eval.drafter=foreign", other])
        assert with_measured_drafters(recipe, plan=True).eval.drafter not in (first, second)


def test_names_on_the_hub(hub: FakeHub, place: Path, checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add_repo("me/ours", files_of(checkpoint))
    foreign = hub.add_repo("me/foreign", files_of(place / "foreign"))
    commit = foreign.oid()
    foreign.commit("another", {"config.json": b"{}"})
    name = f"me/foreign@{commit}"
    for each in ("me/ours", name):
        run_main(acceptance, "measure.yaml", f"eval.drafter={each}", "--plan")
        assert f"run/imported/{re.sub('[/@]', '--', each)}  [yet to be imported]" in capsys.readouterr().out
    assert hub.asked == 0 and not (place / "run").exists()
    # In the Hub's cache: nothing to import
    assert files_of(Path(str(measured(place, "me/ours")))) == files_of(checkpoint)
    imported = Path(str(measured(place, name)))
    assert imported.parent == Path("run/imported") and imported.name.startswith(f"me--foreign--{commit}-")
    tensors, theirs = read_weights(imported), load_file(place / "foreign/model.safetensors")
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in tensors.items())
    before = hub.asked
    assert measured(place, name, plan=True) == str(imported) and hub.asked == before  # from the cache
    rivals = json.dumps([{"name": "theirs", "drafter": name}])
    [rival] = with_measured_drafters(load_recipe("measure.yaml", [f"eval.also={rivals}"]), plan=False).eval.also
    writing = with_writing_drafter(load_recipe("measure.yaml", [f"data.generator.drafter={name}"]), plan=False)
    assert rival.drafter == writing.data.generator.drafter == str(imported)
    before = hub.asked
    save_untrained(place / "me/ours", Path(load_recipe("measure.yaml").target.model))
    assert measured(place, "me/ours") == "me/ours" and hub.asked == before  # a local folder wins


def test_what_cannot_be_had_is_told_at_its_key(hub: FakeHub, place: Path) -> None:
    hub.add_repo("me/pickle", {"config.json": b"{}", "pytorch_model.bin": b"0"})
    rivals = "eval.also=[{name: x, drafter: me/pickle}, {name: y, drafter: nowhere}]"
    with pytest.raises(UserError) as told:
        run_main(acceptance, "measure.yaml", "eval.drafter=me/gone", rivals)
    gone, pickle = told.value.problems
    assert gone.startswith(f"eval.drafter: 'me/gone' is no folder in {place}, and the Hub has no model of this name")
    assert pickle.startswith("eval.also.0.drafter: me/pickle: this repository of the Hub has no config.json with safe")
    with pytest.raises(UserError, match=r"^drafter.init_from: 'me/gone' is no folder"):
        with_start(load_recipe("measure.yaml", ["drafter.init_from=me/gone"]), plan=False)
    damaged = json.loads((place / "foreign/config.json").read_text()) | {"vocab_size": 328}
    (place / "foreign/config.json").write_text(json.dumps(damaged))
    for plan in (True, False):
        with pytest.raises(UserError, match=r"^eval.drafter: foreign: vocab_size is 328, the target's 320"):
            measured(place, "foreign", plan)
    assert not list(place.glob("run/imported/foreign*"))


def test_a_foreign_drafter_is_trained_further_with_its_vocabulary(
    recipe_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tensors = published_eagle3(tmp_path / "foreign")
    recipe: dict[str, Any] = yaml.safe_load(recipe_path.read_text())
    run = Path(recipe["output_dir"])
    start = ["drafter.init_from=" + str(tmp_path / "foreign"), "drafter.intermediate_size=40", "train.max_steps=1"]
    with pytest.raises(UserError, match=r"^drafter.vocab_size: 160, but drafter.init_from .* 200 tokens with it"):
        train(recipe_path, *start)
    (run / "draft_vocab.safetensors").unlink()
    start += ["drafter.vocab_size=null"]
    run_main(rank_vocab, recipe_path, *start)
    assert torch.equal(load_file(run / "draft_vocab.safetensors")["d2t"], tensors["d2t"])
    assert "the draft vocabulary is that of drafter.init_from" in capsys.readouterr().out
    train(recipe_path, *start, "--plan")
    train(recipe_path, *start, "train.learning_rate=1e-9")
    trained = load_file(run / "drafter/model.safetensors")
    assert torch.equal(trained["d2t"], tensors["d2t"])
    torch.testing.assert_close(trained["fc.weight"], tensors["fc.weight"])
    shape = read_drafter_config(run / "drafter")[0]
    assert shape.rms_norm_eps == 1e-5 and shape.draft_vocab_size == CUT  # its own; the target's is another
