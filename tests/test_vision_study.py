"""The study of drafters for the vision demo: its commands and its table."""

import json
from pathlib import Path

import pytest

from docs.study import vision
from draftsmith.recipes.loader import load_recipe


@pytest.mark.parametrize("arm", vision.ARMS)
def test_every_arm_is_a_valid_recipe_of_its_own(arm: str, tmp_path: Path) -> None:
    training, *evaluations = vision.commands(tmp_path / "out", tmp_path, arm, 1)
    recipe = load_recipe(vision.ROOT / training[1], training[2:])
    assert (recipe.train.seed, recipe.output_dir) == (1, str(tmp_path / "out" / f"{arm}-1"))
    for temperature, (name, path, *overrides) in zip(vision.TEMPERATURES, evaluations, strict=True):
        measured = load_recipe(vision.ROOT / path, overrides)
        assert name == "evaluate" and measured.eval.temperature == temperature
        assert measured.drafter == recipe.drafter and [each.name for each in measured.eval.also] == [vision.PUBLISHED]
    if arm.startswith("eagle-"):  # what differs is the drafter, never its losses
        usual = load_recipe(vision.ROOT / vision.RECIPE, ["train.seed=1"])
        assert recipe.train == usual.train


def test_the_table_shows_arms_with_all_seeds(tmp_path: Path) -> None:
    for arm, seeds in {"eagle-q1": 3, "eagle-q4": 2}.items():
        for seed in range(seeds):
            for temperature in vision.TEMPERATURES:
                folder = tmp_path / f"{arm}-{seed}" / f"eval{temperature}"
                folder.mkdir(parents=True)
                numbers = {"tau": 4 + seed + temperature / 2, "draft_milliseconds_per_call": 1 + seed}
                contenders = {"tree": numbers, vision.PUBLISHED: {"tau": 2 + seed}}
                content = {"contender": "tree", "contenders": contenders}
                (folder / "acceptance.json").write_text(json.dumps(content))
            (tmp_path / f"{arm}-{seed}" / "seconds.json").write_text(str(60 * (seed + 2)))
    [*_, last] = lines = vision.table(tmp_path, ["eagle-q1", "eagle-q4"]).splitlines()
    assert len(lines) == 3 and last.startswith("| ViSpec: 1 compressed token")
    assert [each.strip() for each in last.split("|")[2:-1]] == [
        *("5.00 (4.00, 5.00, 6.00)", "5.50 (4.50, 5.50, 6.50)", "3.00 (2.00, 3.00, 4.00)", "2.00", "3.0")
    ]
