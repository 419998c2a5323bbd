"""The cost of precisions: bytes are exact, the limit of a gain is where the curves cross, the command writes both."""

import json
from pathlib import Path

import pytest
import torch

from draftsmith.eval import plan as script
from draftsmith.eval.planner import precisions
from draftsmith.eval.planner.precisions import (
    PrecisionCosts,
    is_quantized,
    no_gain_from,
    precision_lines,
    precisions_of,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetSection
from tests.conftest import make_target, make_tokenizer
from tests.training_runs import run_main


def test_fewer_bits_gain_up_to_where_the_curves_cross() -> None:
    def costs(**curves: list[float]) -> dict[str, PrecisionCosts]:
        return {
            name: PrecisionCosts(dict(zip((1, 2, 6), seconds, strict=True)), 0, 0) for name, seconds in curves.items()
        }

    measured = costs(float32=[5, 5, 5.5], bfloat16=[4, 4, 8], int8=[2, 2, 6], int4=[1, 2, 3])
    assert no_gain_from(measured, "int8") == 6  # int8 4, 5 and float32 5.25, 5.375 at 4 and 5 nodes; then 6 and 5.5
    assert no_gain_from(measured, "int4") is None
    assert no_gain_from(costs(bfloat16=[1, 1, 1], int4=[1, 2, 3]), "int4") == 1


def test_the_command_measures_every_precision_and_the_plan_foretells_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wide = make_target(num_layers=2, hidden_size=64, intermediate_size=64, head_dim=16)
    wide.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(f"output_dir: {tmp_path}\ntarget: {{model: {tmp_path / 'target'}, device: cpu}}\n")
    run_main(script, recipe, "--precisions", "--plan")
    planned = capsys.readouterr().out
    assert "float32: weights" in planned and "int4, groups of 64: weights" in planned and "a step about" in planned
    assert not (tmp_path / "eval").exists()
    monkeypatch.setattr(precisions, "REPEATS", 2)
    run_main(script, recipe, "--precisions", "eval.planner.context=20")
    found = json.loads((tmp_path / "eval/precisions.json").read_text())
    assert list(found["precisions"]) == ["float32", "bfloat16", "int8", "int4, groups of 64"]
    for name, each in found["precisions"].items():
        assert each["weight_bytes"] == each["planned_weight_bytes"], name
        assert list(each["milliseconds_by_nodes"]) == [str(n) for n in precisions.NODES]
        assert all(milliseconds > 0 for milliseconds in each["milliseconds_by_nodes"].values())
        assert is_quantized(name) or each["no_gain_from_nodes"] is None
    assert (tmp_path / "eval/precisions.png").read_bytes().startswith(b"\x89PNG")
    assert found["clock"] == ("processor time" if torch.get_num_threads() == 1 else "wall clock")
    with pytest.raises(UserError, match=r"500 tokens and 60 nodes exceed the target's 512 positions"):
        run_main(script, recipe, "--precisions", "eval.planner.context=500")


def test_precisions_without_a_kernel_here_are_left_out(target_dir: Path) -> None:
    section = TargetSection(model=str(target_dir), device="cpu")  # groups of 64 do not divide its 32 inputs
    assert list(precisions_of(section)) == ["float32", "bfloat16", "int8"]
    assert len(precision_lines(section)) == 4
