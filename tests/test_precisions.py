"""Contenders in another precision of the target, and hierarchies, from the recipe to the report."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.decoding.contenders import contenders_of
from draftsmith.eval.measured import evaluation
from draftsmith.eval.page import files, summary
from draftsmith.recipes.loader import load_recipe
from tests.compare_cases import place as place
from tests.report_cases import Page

CHAIN = {"policy": "chain", "nodes": 4}


def test_rows_of_another_precision_have_their_own_plain_decoding(place: Path, tmp_path: Path, target_dir: Path) -> None:
    rivals: list[dict[str, Any]] = [
        {
            "name": "hierarchy",
            "proposer": "hierarchy",
            "draft_model": {"model": str(target_dir), "quantization": "int8", "device": "cpu"},
            "min_draft_length": 3,
            "tree": {"nodes": 6, "draft_calls": 2, "top_k": 3},
        },
        {"name": "eagle3, int8 target", "quantization": "int8", "tree": CHAIN},
        {"name": "eagle3, fake target", "quantization": {"bits": 8, "fake": True}, "tree": CHAIN},
    ]
    settings = [f"eval.out={tmp_path}", "eval.max_prompts=3", "eval.batch_size=2", f"eval.also={json.dumps(rivals)}"]
    settings += ["target.device=cpu"]  # where the kernels are
    recipe = load_recipe(str(place / "recipe.yaml"), settings)
    evaluation.evaluate_by_decoding(recipe, contenders_of(recipe), plan=False)
    acceptance = files.read_acceptance(tmp_path / "acceptance.json")
    rows = acceptance["contenders"]
    int8, fake = "plain decoding, int8 target", "plain decoding, fake int8 target"
    assert list(rows)[:3] == ["plain decoding", int8, fake]
    assert [rows[name]["tau"] for name in (int8, fake)] == [1, 1]
    own = {"eagle3, int8 target": int8, "eagle3, fake target": fake, "hierarchy": "plain decoding"}
    lines = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().splitlines()]
    answers = {name: [line["token_ids"] for line in lines if line["contender"] == name] for name in rows}
    assert answers[fake] != answers["plain decoding"]  # or nothing would tell their baselines apart
    for name, plain in own.items():
        pairs = zip(answers[name], answers[plain], strict=True)
        same = [mine == theirs for mine, theirs in pairs]
        assert rows[name]["matching_share"] == round(sum(same) / len(same), 4)
        assert rows[name]["matches_target"] is all(same)
        assert all(same) or name == "eagle3, int8 target"  # float32 is exact, int8 kernels need not be
    assert [rows[name].get("quantization") for name in own] == ["int8", "fake int8", None]
    # The small model is the target in int8, so the target accepts most of what it wrote.
    hierarchy = rows["hierarchy"]
    assert hierarchy["inner_tau"] >= 1 and hierarchy["tau"] > 2
    assert hierarchy["hierarchy"] == {"draft_model": str(target_dir), "quantization": "int8", "min_draft_length": 3}
    inner = [line["inner_accepted"] for line in lines if line["contender"] == "hierarchy"]
    assert hierarchy["inner_tau"] == pytest.approx(sum(map(sum, inner)) / sum(map(len, inner)) + 1, abs=1e-3)
    assert hierarchy["draft_calls_per_round"] >= 3
    page = Page((tmp_path / "report.html").read_text()).text
    assert f"Tokens per verification by the small model: hierarchy {hierarchy['inner_tau']:.2f}." in page


def test_greedy_answers_of_coarse_precisions_are_reported_as_shares() -> None:
    def told(**shares: float) -> str:
        precision = {"fast": "int8", "exact": None, "fake": "fake int4, groups of 64"}
        rows = {
            name: {"matches_target": shares.get(name, 1.0) == 1, "matching_share": shares.get(name, 1.0)}
            | {"quantization": each, "lossless": True}
            for name, each in precision.items()
        }
        about = {"mode": "decode", "temperature": 0, "dtype": "float32", "contender": "exact", "lossless": True}
        return summary.equality(about | {"contenders": rows})

    assert "not all" not in told() and "defect" not in told(fast=0.75) and "fast (75% are)" in told(fast=0.75)
    assert "In fake int4, groups of 64 that is a defect" in told(fast=0.75, fake=0.5)
