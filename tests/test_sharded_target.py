"""A target that the processes share out trains as a whole one does, under every way of sharing the drafter."""

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.models.costs import gigabytes
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import Recipe, TargetSection
from draftsmith.train.run import accelerator, command
from draftsmith.train.run.sharded_target import check_sharding
from tests.conftest import make_target
from tests.ranks import run_ranks
from tests.test_plan import plan, recipe_file
from tests.test_processes import POISON, STEPS, Place, check_same
from tests.thinning import a_few
from tests.training_runs import metrics, write_conversations

SHARDED = "train.shard_target=true"
# Validation that leaves one of two ranks with less to do, or with nothing.
UNEVEN = ("train.validation_conversations=3", "train.eval_replay=3")
ONE_HAS_NOTHING = ("train.validation_conversations=1", "train.eval_replay=1", "train.packing=true")


@pytest.mark.slow
def test_a_shared_out_target_is_the_whole_one(tmp_path: Path) -> None:
    """On three ranks, among which no weight divides evenly: tied and scaled embeddings, windows, experts, bfloat16."""
    families: list[tuple[str, dict[str, Any], str]] = [
        ("llama", {}, "float32"),
        ("qwen3", {"tie_word_embeddings": True}, "bfloat16"),
        ("gemma3_text", {"sliding_window": 6, "tie_word_embeddings": True}, "float32"),
        ("mixtral", {"num_local_experts": 4}, "float32"),
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
def of_one(place: Place) -> dict[str, Path]:
    """What one process does with the whole target."""
    return {name: place.run(name, "one", 1, *UNEVEN) for name in ("eagle3", "hass")}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "stage"),
    a_few([*(("eagle3", stage) for stage in range(4)), ("hass", 2)], ("eagle3", 3), ("hass", 2)),
)
def test_two_ranks_follow_the_trajectory_of_one(name: str, stage: int, place: Place, of_one: dict[str, Path]) -> None:
    output = place.run(name, f"zero{stage}", 2, SHARDED, f"train.zero_stage={stage}", *UNEVEN)
    assert place.said.count("the target's layers are sharded over 2 processes") == 1
    check_same(output, of_one[name])


@pytest.mark.slow
def test_a_rank_without_validation_rows_is_waited_for(place: Place) -> None:
    one = place.run("eagle3", "one-packed", 1, *ONE_HAS_NOTHING)
    check_same(place.run("eagle3", "packed", 2, SHARDED, *ONE_HAS_NOTHING), one)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    a_few([((2, True), (1, True)), ((1, False), (2, True)), ((2, True), (2, False))], ((2, True), (1, True))),
)
def test_a_run_goes_on_with_a_target_held_otherwise(
    first: tuple[int, bool], then: tuple[int, bool], place: Place, of_one: dict[str, Path]
) -> None:
    """(processes, shared out). One process that is asked to share holds the target whole."""
    label = f"goes-on-{first}-{then}".replace(" ", "")
    output = place.run("eagle3", label, first[0], f"train.shard_target={str(first[1]).lower()}", *UNEVEN)
    shutil.rmtree(output / f"checkpoints/step-{STEPS:08d}")
    shutil.rmtree(output / "drafter")
    place.run("eagle3", label, then[0], f"train.shard_target={str(then[1]).lower()}", *UNEVEN)
    assert "resumed from" in place.said
    assert ("are sharded over" in place.said) == (then == (2, True))
    check_same(output, of_one["eagle3"])


@pytest.mark.slow
def test_a_step_that_is_not_finite_is_skipped(tmp_path: Path, target_dir: Path) -> None:
    """Its rows are looked at one by one, on each rank its own, with one pass of the target or with two."""
    shutil.copytree(target_dir, tmp_path / "target")
    path = tmp_path / "target/model.safetensors"
    tensors = load_file(path)
    tensors["model.embed_tokens.weight"][POISON] = float("inf")
    save_file(tensors, path, metadata={"format": "pt"})
    settings = ["train.max_steps=2", "train.seed=1", "train.eval_replay=0"]  # c5 is read in the second step
    place = Place(tmp_path, tmp_path / "target")
    output = place.run("eagle3", "poisoned", 2, SHARDED, *settings, poisoned=POISON)
    assert [line["skipped_steps"] for line in metrics(output)] == [0, 1]
    said = "step 2 skipped: its gradient is not finite (c5: the target's captured states are not finite)"
    assert place.said.count(said) == 1


# Before anything is loaded.


def test_weights_that_stay_in_float32_are_not_rounded(tmp_path: Path) -> None:
    """Ernie's routers: transformers loads them in float32 in any case, and ZeRO-3 would not."""
    path = recipe_file(tmp_path, train={"shard_target": True})
    target = make_target("ernie4_5_moe", moe_num_experts=4, moe_k=2, moe_intermediate_size=16)
    target.save_pretrained(tmp_path / "target")
    whole = TargetFiles(TargetSection(model=str(tmp_path / "target"), dtype="bfloat16", device="cpu")).load_model()
    [name, *_] = [name for name, p in whole.named_parameters() if p.dtype == torch.float32]
    with pytest.raises(UserError, match=rf"ernie4_5_moe keeps weights in float32 .* \({name}\)"):
        check(load_recipe(path, ["target.dtype=bfloat16"]))
    check(load_recipe(path, ["target.dtype=float32"]))


def check(recipe: Recipe) -> None:
    check_sharding(recipe, TargetFiles(recipe.target))


def recipe_of(folder: Path, **changes: Any) -> Any:
    return load_recipe(recipe_file(folder, **({"train": {"shard_target": True}} | changes)), [])


def test_what_cannot_be_shared_out_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check(recipe_of(tmp_path))  # this one can

    with pytest.raises(UserError, match=r"with data\.states the target's layers are not loaded"):
        check(recipe_of(tmp_path, data={"states": str(tmp_path / "states")}))

    path = tmp_path / "target/config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"quantization_config": {"quant_method": "gptq", "bits": 4}}))
    with pytest.raises(UserError, match=r"ZeRO-3 shards plain weights, .* is quantised \(gptq\)"):
        check(recipe_of(tmp_path))

    path.write_text(json.dumps({key: value for key, value in config.items() if key != "dtype"}))
    with pytest.raises(UserError, match=r"target\.dtype: auto, but the target's config names none"):
        check(recipe_of(tmp_path, target={"dtype": "auto"}))

    monkeypatch.setattr(accelerator, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"train\.shard_target: .* DeepSpeed, which is not installed"):
        check(recipe_of(tmp_path))


def test_plan_says_what_a_process_holds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe_file(tmp_path, train={"shard_target": True, "max_steps": 5})
    write_conversations(tmp_path / "run/conversations.jsonl", 24)
    model = make_target()
    layers = [sum(4 * p.numel() for p in layer.parameters()) for layer in model.model.layers]
    rest = sum(4 * p.numel() for p in model.parameters()) - sum(layers)

    def weights() -> str:
        [line] = [line for line in plan(path, capsys)[""].splitlines() if "the target's weights" in line]
        return line

    assert f"{gigabytes(sum(layers) + rest)}  the target's weights" in weights()
    monkeypatch.setenv("WORLD_SIZE", "4")
    line = weights()
    assert f"{gigabytes(sum(layers) / 4 + layers[0] + rest)}  the target's weights" in line
    assert f"{gigabytes(sum(layers) * 3 / 4)} to each process in every pass" in plan(path, capsys)["network"]
    monkeypatch.delenv("WORLD_SIZE")
    monkeypatch.setattr(sys, "argv", ["draftsmith train", str(path), "--plan", "--processes", "4"])
    command.main()
    said = capsys.readouterr().out
    assert "1/4 of the layers" in said and "on 4 processes" in said
