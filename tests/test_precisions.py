"""Contenders in another precision of the target, and hierarchies, from the recipe to the report."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.eval.decoding.contenders import check_contenders, contenders_of
from draftsmith.eval.measured import evaluation
from draftsmith.eval.page import files, summary
from draftsmith.eval.recorded.replay_contenders import recording_of
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from tests.compare_cases import also
from tests.compare_cases import place as place
from tests.conftest import make_target, make_tokenizer
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

    assert told() == "Answers, token for token: all those of plain decoding."
    coarse = "int8 rounds: longer forwards, other last bits."
    assert told(fast=0.75) == f"Answers, token for token: not all those of plain decoding: fast (75% are). {coarse}"
    both = told(fast=0.75, fake=0.5)
    assert both.endswith(f"{coarse} In fake int4, groups of 64 that is a defect: please report it.")
    assert "fast (75% are), fake (50% are)" in both


def test_hierarchies_and_precisions_that_cannot_be_are_refused_before_weights_are_read(
    place: Path, tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetFiles, "load", lambda *_: pytest.fail("weights were read"))
    make_target(vocab_size=300).save_pretrained(tmp_path / "narrow")
    make_tokenizer().save_pretrained(tmp_path / "narrow")

    def refused(**section: Any) -> str:
        with pytest.raises(UserError) as raised:
            recipe = load_recipe(str(place / "recipe.yaml"), [also(**section)])
            check_contenders(recipe, contenders_of(recipe))
        return str(raised.value)

    def hierarchy(model: Path, **settings: Any) -> dict[str, Any]:
        return {"proposer": "hierarchy", "draft_model": {"model": str(model)} | settings}

    assert "has a vocabulary of 300 tokens, the target" in refused(**hierarchy(tmp_path / "narrow"))
    assert "a drafter for another target" in refused(**hierarchy(place / "small"))  # of two layers
    groups = {"quantization": {"group_size": 32}}
    problem = refused(**hierarchy(target_dir, **groups))
    assert "eval.also.0.draft_model.quantization: group_size 32 does not divide the 48 inputs" in problem
    assert "eval.also.0.quantization: group_size 32 does not divide the 48 inputs" in refused(**groups)
    assert "draft_model goes with proposer causal_lm or hierarchy" in refused(proposer="hierarchy")
    assert "min_draft_length is for proposer hierarchy" in refused(min_draft_length=4)
    drawn = {"policy": "chain", "draw": "sampled"}
    assert "drafts ranked trees for its small model" in refused(**hierarchy(target_dir), tree=drawn)
    assert "policy auto plans for the recipe's own target" in refused(quantization="int8", tree={"policy": "auto"})


def test_replay_reads_one_target(place: Path, tmp_path: Path) -> None:
    recipe = load_recipe(
        str(place / "recipe.yaml"), [f"eval.out={tmp_path}", "eval.max_prompts=2", "eval.max_new_tokens=4"]
    )
    evaluation.evaluate_by_decoding(recipe, contenders_of(recipe), plan=False)
    recipe = load_recipe(str(place / "recipe.yaml"), [f"eval.out={tmp_path}", also(quantization="int8")])
    with pytest.raises(UserError, match=r"eval\.also\.0: quantization: replay reads one target"):
        recording_of(recipe, contenders_of(recipe))
