"""What a recipe may say of a drafter and its training, and what was published otherwise."""

import re
from pathlib import Path

import pytest
import yaml

from draftsmith.recipes.loader import dump_recipe, load_recipe
from draftsmith.recipes.published import other_than_published
from draftsmith.recipes.sections.drafter import DrafterSection
from draftsmith.recipes.sections.train import TrainSection
from tests.recipe_cases import SMALLEST, problems_of
from tests.recipe_cases import write as write

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
        ("{kind: vispec}", {"ttt_steps": 2, "token_loss": 10.0}),
        ("{kind: vispec, specialists: 3}", {"ttt_steps": 6, "token_loss": 10.0}),
        (
            "{kind: vispec, base: eagle3, positions_per_specialist: 1}",
            {"ttt_steps": 4, **EAGLE3, "detach_features": "specialists"},
        ),
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


def test_training_that_reaches_every_specialist_is_taken(write):
    for steps in (7, 8, 20):
        load_recipe(write(SMALLEST + f"drafter: {{kind: poss}}\ntrain: {{ttt_steps: {steps}}}\n"))
    load_recipe(write(SMALLEST + "drafter: {kind: eagle}\ntrain: {token_loss: 0}\n"))
    (problem,) = problems_of(write(SMALLEST), "drafter={kind: poss}", "train.ttt_steps=6")
    assert problem.startswith("override 'train.ttt_steps=6': `train.ttt_steps`: 6 steps train")


@pytest.mark.parametrize(
    ("drafter", "train", "keys"),
    [
        # A written-back PosS recipe, the feature's loss switched off as the loader asks.
        (
            {"kind": "poss", "base": "eagle3"},
            {**HASS, "feature_loss": 0.0, "ttt_steps": 8},
            ["step_weight", "token_loss", "feature_noise", "detach_features"],
        ),
        ({"kind": "poss", "base": "eagle3"}, {**EAGLE3, "step_weight": 0.9}, []),
        # Of EAGLE-1's single step: no weight and no gradient between steps.
        ({"kind": "eagle"}, {**EAGLE3, "ttt_steps": 1}, ["token_loss", "feature_loss", "feature_noise"]),
        ({"kind": "eagle"}, {**HASS, "ttt_steps": 3, "top_k_loss": 1.0}, []),
        ({"kind": "eagle"}, {**HASS, "ttt_steps": 5}, ["top_k_loss"]),
        ({"kind": "vispec", "base": "eagle3"}, EAGLE3, []),
        ({}, {**EAGLE3, "ttt_steps": 5}, []),
        ({}, {"top_k_loss": 0.5}, ["top_k_loss"]),
        ({}, {"learning_rate": 1e-3, "clip": "value"}, []),
    ],
)
def test_losses_of_another_method_are_named(drafter, train, keys):
    said = other_than_published(DrafterSection(**drafter), TrainSection(**train)) or ""
    assert re.findall(r"train\.(\w+) [^,]* \(published", said.partition(": ")[2]) == keys
