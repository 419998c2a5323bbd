"""DeepSpeed asked for by the launcher's own config, as `accelerate config` writes it: followed where it trains what the
recipe says, refused where it would not."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from accelerate.utils import DeepSpeedPlugin

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TrainSection
from draftsmith.train.engine import _agreed as agreed
from tests.test_processes import Place, check_same

# What accelerate's questions lead to; what answers they take is `deepspeed_config`.
CONFIG = {
    "compute_environment": "LOCAL_MACHINE",
    "debug": False,
    "distributed_type": "DEEPSPEED",
    "downcast_bf16": "no",
    "machine_rank": 0,
    "main_training_function": "main",
    "num_machines": 1,
    "num_processes": 2,
    "rdzv_backend": "static",
    "same_network": True,
    "use_cpu": False,
}
ANSWERS = {
    "gradient_clipping": 0.5,
    "offload_optimizer_device": "none",
    "offload_param_device": "none",
    "zero3_init_flag": False,
}


def launched_by(folder: Path, deepspeed: dict[str, Any]) -> list[str]:
    """accelerate, told by a config file of these words on DeepSpeed."""
    path = folder / "accelerate.yaml"
    precision = {} if "deepspeed_config_file" in deepspeed else {"mixed_precision": "no"}  # such a file says it
    path.write_text(yaml.safe_dump(CONFIG | precision | {"deepspeed_config": deepspeed}))
    return ["-m", "accelerate.commands.launch", "--config_file", str(path)]


def in_a_file(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """The words by which accelerate's config names a DeepSpeed config of one's own."""
    path = folder / "deepspeed.json"
    path.write_text(json.dumps(config))
    return {"deepspeed_config_file": str(path), "zero3_init_flag": False}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Place:
    return Place(tmp_path_factory.mktemp("launchers"), target_dir)


@pytest.fixture(scope="module")
def of_one(place: Place) -> Path:
    return place.run("eagle3", "one", 1)


@pytest.mark.slow
def test_the_launchers_stage_is_followed(place: Place, of_one: Path, tmp_path: Path) -> None:
    """Stage 2 by accelerate's own questions, no train.zero_stage in the recipe."""
    launcher = launched_by(tmp_path, ANSWERS | {"zero_stage": 2, "gradient_accumulation_steps": 2})
    check_same(place.run("eagle3", "stage2", 2, launcher=launcher), of_one)


@pytest.mark.slow
def test_a_deepspeed_config_of_ones_own_is_followed(place: Place, of_one: Path, tmp_path: Path) -> None:
    """Stage 3 with the target shared out beside it; what the recipe decides is auto, or left out."""
    config = {
        "zero_optimization": {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    launcher = launched_by(tmp_path, in_a_file(tmp_path, config))
    check_same(place.run("eagle3", "stage3", 2, "train.shard_target=true", launcher=launcher), of_one)


@pytest.mark.slow
def test_a_config_that_trains_otherwise_is_refused_at_once(place: Place, tmp_path: Path) -> None:
    config = {
        "zero_optimization": {"stage": 2},
        "gradient_accumulation_steps": 8,
        "fp16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
    }
    with pytest.raises(AssertionError) as failure:
        place.run("eagle3", "refused", 2, launcher=launched_by(tmp_path, in_a_file(tmp_path, config)))
    said = str(failure.value)
    assert "DeepSpeed's fp16.enabled: drafters train in float32" in said
    assert "DeepSpeed's gradient_accumulation_steps is 8, the recipe's is 2: set it to auto" in said
    assert "DeepSpeed's optimizer: the recipe's train section says it; leave it out" in said
    assert not (place.folder / "eagle3-refused/metrics.jsonl").exists()


# Without a launch: what is said of one config.


def problems_of(config: dict[str, Any], **recipe: Any) -> list[str]:
    settings = TrainSection(**{"gradient_accumulation_steps": 2, "batch_size": 4, "max_grad_norm": 0.5} | recipe)
    given = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto"} | config
    try:
        agreed(DeepSpeedPlugin(hf_ds_config=given), settings)
    except UserError as error:
        return error.problems
    return []


def test_configs_that_train_as_the_recipe_says_are_taken() -> None:
    assert problems_of({}) == []
    assert (
        problems_of({"gradient_accumulation_steps": "auto", "train_batch_size": "auto", "fp16": {"enabled": "auto"}})
        == []
    )
    same = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    assert problems_of(same, zero_stage=2) == []
    assert problems_of({"bf16": {"enabled": False}, "zero_optimization": {"stage": 3}}) == []


@pytest.mark.parametrize(
    ("config", "recipe", "said"),
    [
        ({"bf16": {"enabled": True}}, {}, "DeepSpeed's bf16.enabled: "),
        ({"gradient_accumulation_steps": 1}, {}, "DeepSpeed's gradient_accumulation_steps is 1, the recipe's is 2"),
        ({"gradient_clipping": 1.0}, {}, "DeepSpeed's gradient_clipping is 1.0, the recipe's is 0.5"),
        ({"gradient_clipping": 0.5}, {"clip": "value"}, "DeepSpeed's gradient_clipping is 0.5, the recipe's is 0.0"),
        (
            {"train_micro_batch_size_per_gpu": 1},
            {},
            "DeepSpeed's train_micro_batch_size_per_gpu is 1, the recipe's is 4",
        ),
        ({"train_batch_size": 64}, {}, "DeepSpeed's train_batch_size is 64, the recipe's is 8"),
        ({"scheduler": {"type": "WarmupLR"}}, {}, "DeepSpeed's scheduler: the recipe's train section says it"),
        ({}, {"zero_stage": 3}, "train.zero_stage is 3, accelerate's config has 2: leave one out"),
        ({"zero_optimization": {"stage": 0}}, {}, "accelerate's config asks for DeepSpeed without ZeRO (stage 0)"),
        ({}, {"offload_optimizer": True}, "train.offload_optimizer: accelerate's config decides"),
    ],
)
def test_a_config_that_trains_otherwise_is_refused(config: dict[str, Any], recipe: dict[str, Any], said: str) -> None:
    [problem] = problems_of(config, **recipe)
    assert problem.startswith(said)
