"""A target that the processes share out trains as a whole one does, under every way of sharing the drafter."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from draftsmith.models.costs import TargetSize, shared_out
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.train.run import accelerator
from draftsmith.train.run.sharded_target import check_sharding
from tests.conftest import make_target
from tests.ranks import run_ranks
from tests.thinning import a_few
from tests.train.test_plan import recipe_file
from tests.train.test_processes import STEPS, Place, check_same

SHARDED = "train.shard_target=true"
# Validation that leaves one of two ranks with less to do, or with nothing.
UNEVEN = ("train.validation_conversations=3", "train.eval_replay=3")


@pytest.mark.slow
def test_a_shared_out_target_is_the_whole_one(tmp_path: Path) -> None:
    """On three ranks, among which no weight divides evenly: tied and scaled embeddings, windows, experts, bfloat16."""
    families: list[tuple[str, dict[str, Any], str]] = [
        ("mixtral", {"num_local_experts": 4}, "float32"),
        ("gemma3_text", {"sliding_window": 6, "tie_word_embeddings": True}, "bfloat16"),
    ]
    arguments = []
    for family, settings, dtype in families:
        make_target(family, **settings).save_pretrained(tmp_path / family)
        arguments += [str(tmp_path / family), dtype]
    assert run_ranks(3, "tests/sharded_ranks.py", arguments, timeout=900).count("has seen it all") == 3


# Whole runs.


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Place:
    return Place(tmp_path_factory.mktemp("sharded"), target_dir)


@pytest.fixture(scope="module")
def of_one(place: Place) -> Path:
    """What one process does with the whole target."""
    return place.run("eagle3", "one", 1, *UNEVEN)


@pytest.mark.slow
@pytest.mark.parametrize("stage", a_few(range(4), 3))
def test_two_ranks_follow_the_trajectory_of_one(stage: int, place: Place, of_one: Path) -> None:
    output = place.run("eagle3", f"zero{stage}", 2, SHARDED, f"train.zero_stage={stage}", *UNEVEN)
    assert place.said.count("the target's layers are sharded over 2 processes") == 1
    check_same(output, of_one)


@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), a_few([(2, 1), (1, 2)], (2, 1)))
def test_a_run_goes_on_with_a_target_held_otherwise(first: int, then: int, place: Place, of_one: Path) -> None:
    """By so many processes. One that is asked to share holds the target whole."""
    output = place.run("eagle3", f"goes-on-{first}-{then}", first, SHARDED, *UNEVEN)
    shutil.rmtree(output / f"checkpoints/step-{STEPS:08d}")
    shutil.rmtree(output / "drafter")
    place.run("eagle3", f"goes-on-{first}-{then}", then, SHARDED, *UNEVEN)
    assert "resumed from" in place.said and ("are sharded over" in place.said) == (then == 2)
    check_same(output, of_one)


# Before anything is loaded.


def test_a_process_holds_its_share_of_the_layers_and_the_largest_one_gathered() -> None:
    size = TargetSize(100, 0, 90, 20, 200.0, "", torch.bfloat16, False, (10, 30, 20))
    assert shared_out(size, 4).weight_bytes == 2 * (40 + 60 / 4 + 30)
    assert shared_out(size, 1).weight_bytes == 200


def test_weights_that_stay_in_float32_are_not_rounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Routers of Ernie in any case, which ZeRO-3 would round; some families' weights beside float16 alone."""
    path = recipe_file(tmp_path, train={"shard_target": True})
    monkeypatch.setattr(LlamaForCausalLM, "_keep_in_fp32_modules", ["o_proj"])
    check(load_recipe(path, ["target.dtype=bfloat16"]))
    with pytest.raises(UserError, match="keeps weights in float32"):
        check(load_recipe(path, ["target.dtype=float16"]))
    target = make_target("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=16)
    target.save_pretrained(tmp_path / "target")
    whole = TargetFiles(TargetSection(model=str(tmp_path / "target"), dtype="bfloat16", device="cpu")).load_model()
    [name, *_] = [name for name, p in whole.named_parameters() if p.dtype == torch.float32]
    with pytest.raises(UserError, match=rf"ernie4_5_moe keeps weights in float32 .* \({name}\)"):
        check(load_recipe(path, ["target.dtype=bfloat16"]))
    check(load_recipe(path, ["target.dtype=float32"]))


def check(recipe: Recipe) -> None:
    check_sharding(recipe, TargetFiles(recipe.target))


def test_what_cannot_be_shared_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, config_path = recipe_file(tmp_path, train={"shard_target": True}), tmp_path / "target/config.json"
    check(load_recipe(recipe))  # this one can
    config = json.loads(config_path.read_text())
    quantised = config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}
    unnamed = {key: value for key, value in config.items() if key != "dtype"}
    for content, override, why in (
        (config, f"data.states={tmp_path}", r"with data\.states the target's layers are not loaded"),
        (quantised, "target.dtype=float32", r"is quantised"),
        (unnamed, "target.dtype=auto", r"target\.dtype: auto, but the target's config names none"),
    ):
        config_path.write_text(json.dumps(content))
        with pytest.raises(UserError, match=why):
            check(load_recipe(recipe, [override]))
    monkeypatch.setattr(accelerator, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"train\.shard_target: .* DeepSpeed, which is not installed"):
        check(load_recipe(recipe))
