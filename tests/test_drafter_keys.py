"""What a recipe may say of a drafter and its training, and what was published otherwise."""

import re
from pathlib import Path

import pytest
import yaml

from draftsmith.recipes.loader import dump_recipe, load_recipe
from draftsmith.recipes.schema import DrafterSection, TrainSection, other_than_published
from tests.recipe_cases import SMALLEST, problems_of
from tests.recipe_cases import write as write


@pytest.mark.parametrize(
    ("tree", "said"),
    [
        ("{policy: chain, top_k: 5}", "top_k would do nothing"),
        ("{policy: svip, top_k: 5}", "top_k would do nothing"),
        ("{policy: static, top_k: 3}", "defined by its paths: leave top_k out"),
        ("{policy: static, nodes: 3, top_k: 3}", "leave nodes, top_k out"),
        ("{policy: ddd, ddd: {at: []}}", r"ddd.at: \[\] tests none of 11 draft calls: name one below 11, or every"),
        ("{policy: ddd, draft_calls: 5}", r"\[5, 7, 9\] tests none of 5 draft calls"),
        ("{policy: dd}", "expected one of 'chain', 'static', .* 'c2t' or 'auto', given the text 'dd'"),
    ],
)
def test_a_setting_that_would_do_nothing_is_refused(write, tree: str, said: str):
    (problem,) = problems_of(write(SMALLEST), f"eval.tree={tree}")
    assert re.search(said, problem), problem


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


@pytest.mark.parametrize(
    ("drafter", "train", "expected"),
    [
        ("kind: eagle3", "feature_loss: 0.5", ":6: `train.feature_loss`: 0.5, but the output of EAGLE-3's layer is"),
        ("kind: poss, base: eagle3", "feature_loss: 1", "`train.feature_loss`: 1, but the output of EAGLE-3's"),
        ("kind: eagle3", "token_loss: 0", ":6: `train.token_loss`: 0, as are feature_loss, top_k_loss and"),
        ("kind: eagle3", "{max_steps: 5, warmup_steps: 5}", "`train.warmup_steps`: 5 is not shorter than the run of 5"),
        ("kind: eagle", "{token_loss: 0, feature_loss: 0}", "`train.token_loss`: 0, as are feature_loss"),
        ("kind: poss", "ttt_steps: 6", ":6: `train.ttt_steps`: 6 steps train no further than position 6, and the"),
        ("kind: poss, positions_per_specialist: 1, specialists: 3", "ttt_steps: 2", "set it to 3 or more"),
    ],
)
def test_training_that_would_teach_nothing_is_refused(write, drafter, train, expected):
    train = train if train.startswith("{") else f"\n  {train}"
    (problem,) = problems_of(write(SMALLEST + f"drafter: {{{drafter}}}\ntrain: {train}\n"))
    assert expected in problem


def test_training_that_reaches_every_specialist_is_taken(write):
    for steps in (7, 8, 20):
        load_recipe(write(SMALLEST + f"drafter: {{kind: poss}}\ntrain: {{ttt_steps: {steps}}}\n"))
    load_recipe(write(SMALLEST + "drafter: {kind: eagle}\ntrain: {token_loss: 0}\n"))
    (problem,) = problems_of(write(SMALLEST), "drafter={kind: poss}", "train.ttt_steps=1")
    assert problem.startswith("override 'train.ttt_steps=1': `train.ttt_steps`: 1 steps train")


def test_features_are_detached_between_specialists_where_there_are_some(write):
    load_recipe(write(SMALLEST + "drafter: {kind: poss}\ntrain: {detach_features: specialists}\n"))
    (problem,) = problems_of(write(SMALLEST + "train: {detach_features: specialists}\n"))
    assert "`train.detach_features`: specialists, but kind eagle3 has none: set it to true (HASS) or false" in problem
    (problem,) = problems_of(write(SMALLEST + "drafter: {kind: poss}\ntrain: {unroll: passes}\n"))
    assert "`train.unroll`: passes know no position specialists" in problem
    (problem,) = problems_of(write(SMALLEST + "train: {detach_features: sometimes}\n"))
    assert "train.detach_features" in problem and "specialists" in problem


@pytest.mark.parametrize(
    ("drafter", "expected"),
    [
        (
            "kind: eagle3, specialists: 2",
            "specialists`: it only works in drafters of kind poss and vispec, and kind is",
        ),
        ("kind: eagle, base: eagle3", "base`: it only works in drafters of kind poss and vispec, and kind is eagle"),
        ("kind: poss, global_vector: false", "global_vector`: it only works in drafters of kind vispec, and kind is"),
        ("kind: poss, num_layers: 2", "num_layers`: it only works in drafters of kind eagle and eagle3, and kind is"),
        ("kind: poss, match_specialists: 2", "match_specialists`: it only works in drafters of kind eagle and eagle3"),
        ("kind: eagle, fc_norm: true", "fc_norm`: it only works in EAGLE-3's drafters, and kind is eagle: leave it"),
        ("kind: eagle, init_head: target, init_from: x", "init_head`: it only works in EAGLE-3's drafters"),
        ("kind: poss, base: eagle3, fc_bias: false", "fc_bias`: it only works in EAGLE-1's drafters, and kind is"),
        ("kind: eagle, capture_layers: [1, 2]", "capture_layers`: it only works in EAGLE-3's drafters"),
        ("kind: eagle, vocab_size: 100", "and cut while decoding, with eval.tree.vocab_size"),
        ("kind: poss, vocab_size: 100", "drafts with the target's own head, from the whole vocabulary"),
        ("init_head: target, init_from: runs/x", "init_head`: target, but init_from brings a head with it"),
        ("kind: medusa", "expected one of 'eagle3', 'eagle', 'poss' or 'vispec'"),
        ("kind: poss, specialists: 0", "specialists`: expected at least 1, given the number 0"),
        ("kind: poss, specialists: true", "specialists`: expected a whole number, given true"),
        ("kind: poss, positions_per_specialist: 65", "positions_per_specialist`: expected at most 64, given the"),
    ],
)
def test_what_a_drafter_of_its_kind_does_not_have(write, drafter, expected):
    (problem,) = problems_of(write(SMALLEST + f"drafter: {{{drafter}}}\ntrain: {{seed: 3}}\n"))
    assert "recipe.yaml:4: `drafter" in problem
    assert expected in problem


def test_all_that_a_drafter_does_not_have_is_told_at_its_own_place(write):
    text = "drafter:\n  kind: eagle\n  base: eagle3\n  vocab_size: 9\n  init_head: target\n  init_from: runs/x\n"
    problems = problems_of(write(SMALLEST + text), "drafter.fc_norm=true")
    places = {problem.split("` ")[0].split("`: ")[0].split(" `")[-1]: problem for problem in problems}
    assert set(places) == {"drafter.base", "drafter.vocab_size", "drafter.init_head", "drafter.fc_norm"}
    assert len(problems) == 4
    for key, place in (("base", "recipe.yaml:6: "), ("vocab_size", ":7: "), ("init_head", ":8: ")):
        assert place in places[f"drafter.{key}"]
    assert places["drafter.fc_norm"].startswith("override 'drafter.fc_norm=true': ")


@pytest.mark.parametrize(
    ("drafter", "train", "said"),
    [
        (
            # A written-back PosS recipe, the feature's loss switched off as the loader asks.
            {"kind": "poss", "base": "eagle3"},
            {**HASS, "feature_loss": 0.0, "ttt_steps": 8},
            "not as published for poss over eagle3: train.step_weight 1 (published 0.9), train.token_loss 0.1 "
            "(published 1), train.feature_noise 0.2 (published 0), train.detach_features true (published false)",
        ),
        ({"kind": "poss", "base": "eagle3"}, {**EAGLE3, "step_weight": 0.9}, None),
        (
            {"kind": "poss"},
            {**EAGLE3, "top_k_loss": 1.0, "ttt_steps": 20},
            "not as published for poss: train.step_weight 0.8 (published 1), train.token_loss 1 (published "
            "0.1), train.feature_loss 0 (published 1), train.feature_noise 0 (published 0.2), train.detach_features "
            "false (published true), train.top_k_loss 1 (published 0)",
        ),
        (
            # Of EAGLE-1's single step: no weight and no gradient between steps.
            {"kind": "eagle"},
            {**EAGLE3, "ttt_steps": 1},
            "not as published for eagle: train.token_loss 1 (published 0.1), train.feature_loss 0 (published "
            "1), train.feature_noise 0 (published 0.2)",
        ),
        ({"kind": "eagle"}, {**HASS, "ttt_steps": 3, "top_k_loss": 1.0}, None),
        (
            {"kind": "eagle"},
            {**HASS, "ttt_steps": 5},
            "not as published for HASS (eagle with train.ttt_steps 5): train.top_k_loss 0 (published 1)",
        ),
        ({"kind": "vispec", "base": "eagle3"}, EAGLE3, None),
        (
            {"kind": "vispec"},
            {"ttt_steps": 2, "step_weight": 1.0, "token_objective": "soft_ce", "token_loss": 10.0, "rank_loss": 0.05},
            "not as published for vispec: train.feature_noise 0 (published 0.2), train.token_objective soft_ce "
            "(published total_variation)",
        ),
        ({}, {**EAGLE3, "ttt_steps": 5}, None),
        ({}, {"top_k_loss": 0.5}, "not as published for eagle3: train.top_k_loss 0.5 (published 0)"),
        ({}, {"learning_rate": 1e-3, "clip": "value"}, None),
    ],
)
def test_losses_of_another_method_are_named(drafter, train, said):
    assert other_than_published(DrafterSection(**drafter), TrainSection(**train)) == said


def test_a_recipe_that_was_written_back_names_the_losses_that_it_keeps(write):
    back = write(dump_recipe(load_recipe(write(SMALLEST), ["drafter={kind: poss}"])))
    recipe = load_recipe(back, ["drafter={kind: eagle}"])
    assert (recipe.train.ttt_steps, recipe.train.top_k_loss) == (8, 0)
    assert "published for HASS" in (other_than_published(recipe.drafter, recipe.train) or "")
    (problem,) = problems_of(back, "drafter={kind: poss, base: eagle3}")
    assert "`train.feature_loss`: 1, but the output of EAGLE-3's" in problem
