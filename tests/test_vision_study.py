"""The study of drafters for the vision demo: its commands and its table."""

import json
from pathlib import Path
from typing import Any

import pytest

from docs.study import vision
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.reader import read_conversations
from draftsmith.recipes.prompts.rejects import Rejects


@pytest.mark.parametrize("arm", vision.ARMS)
def test_every_arm_is_a_valid_recipe_of_its_own(arm: str, tmp_path: Path) -> None:
    training, *evaluations = vision.commands(tmp_path / "out", tmp_path, arm, 1)
    recipe = load_recipe(vision.ROOT / training[1], training[2:])
    assert (recipe.train.seed, recipe.output_dir) == (1, str(tmp_path / "out" / f"{arm}-1"))
    for temperature, (name, path, *overrides) in zip(vision.TEMPERATURES, evaluations, strict=True):
        measured = load_recipe(vision.ROOT / path, overrides)
        assert name == "evaluate" and measured.eval.temperature == temperature
        assert measured.drafter == recipe.drafter and [each.name for each in measured.eval.also] == [vision.PUBLISHED]
    # What differs is the drafter, never its losses.
    if arm.startswith("eagle-") and arm not in ("eagle-passes", "eagle-total-variation"):
        usual = load_recipe(vision.ROOT / vision.RECIPE, ["train.seed=1"])
        assert recipe.train == usual.train


def test_the_table_shows_the_seeds_that_are_done() -> None:
    measured: list[dict[str, Any]] = [
        {"arm": arm, "seed": seed, "training_seconds": 60 * (seed + 2)}
        | {
            f"temperature {temperature}": {
                "main": {"tau": 4 + seed + temperature / 2},
                vision.PUBLISHED: {"tau": 2 + seed},
            }
            for temperature in vision.TEMPERATURES
        }
        for arm, seeds in {"eagle-q1": 3, "eagle-q4": 1}.items()
        for seed in reversed(range(seeds))
    ]
    timed = {"draft_milliseconds_per_call": 2.0, "draft_calls_per_round": 8}
    measured += [{"arm": "eagle-q1", "decoded": {"main": timed}}]
    [*_, first, last] = lines = vision.table(measured, ["eagle-q1", "eagle-q4", "eagle-q16"]).splitlines()
    assert len(lines) == 4 and first.startswith("| ViSpec: 1 compressed token")
    assert [each.strip() for each in first.split("|")[2:-1]] == [
        *("5.00 (4.00, 5.00, 6.00)", "5.50 (4.50, 5.50, 6.50)", "3.00 (2.00, 3.00, 4.00)", "16.0")
    ]
    assert [each.strip() for each in last.split("|")[2:-1]] == ["4.00", "4.50", "2.00", "\u2013"]


@pytest.mark.slow
def test_short_answers_are_to_questions_about_the_training_pictures(tmp_path: Path) -> None:
    """Two of them, asked of nobody: the command fails without a recipe's target, and says where it tells why."""
    vision.PICTURES, usual = 2, vision.PICTURES
    try:
        with pytest.raises(UserError, match=f"regenerate ended with 2; see {tmp_path}/log.txt"):
            vision.ask_questions(tmp_path, "target.model=nowhere")
    finally:
        vision.PICTURES = usual
    asked = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    described = list(read_conversations("scenes:train", Rejects(), 2))
    for one, other in zip(asked, described, strict=True):
        [picture, question], [same, _] = (m[0]["content"] for m in (one["messages"], other.messages))
        assert picture == same and question["text"].endswith("?")
