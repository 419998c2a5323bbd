"""What launchers are told and what they start: DeepSpeed asked for by accelerate's options or config, followed where it
trains what the recipe says and refused where it would not; and processes that would each train by themselves."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.utils import DeepSpeedPlugin

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.train import TrainSection
from draftsmith.train.run.accelerator import accelerator_of, launcher_plugin, with_recipe_settings
from tests.train.test_processes import Place, check_same
from tests.training_runs import fresh_accelerator

# What accelerate's questions lead to.
CONFIG = """
{compute_environment: LOCAL_MACHINE, debug: false, distributed_type: DEEPSPEED, downcast_bf16: "no", machine_rank: 0,
 main_training_function: main, num_machines: 1, num_processes: 2, rdzv_backend: static, same_network: true,
 use_cpu: false}
"""


# A module's objects are destroyed in the interpreter's finalization.
LEAVING = """
import atexit
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.errors import UserError

class Late:
    def __del__(self):
        print("finalized")

late = Late()

def main():
    atexit.register(print, "a handler of a library")
    print("the last word", end="")
    {end}

run(main, many_processes=True)
"""


@pytest.mark.parametrize(
    ("end", "status"),
    [("", 0), ("raise UserError('no')", 2), ("1 / 0", 1), ("raise SystemExit('no')", 1)],
)
def test_one_of_several_processes_ends_before_finalization(end: str, status: int) -> None:
    """Worker threads of process groups abort a process that is being finalized, now and then."""
    script = LEAVING.format(end=end)
    env = os.environ | {"WORLD_SIZE": "2", "RANK": "0"}
    done = subprocess.run([sys.executable, "-c", script], env=env, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (status, "the last worda handler of a library\n")
    assert ("ZeroDivisionError" in done.stderr) == (end == "1 / 0")


@pytest.mark.slow
def test_a_deepspeed_config_of_ones_own_is_followed(target_dir: Path, tmp_path: Path) -> None:
    """Stage 3 with the target shared out beside it; what the recipe decides is auto, or left out."""
    deepspeed = {
        "zero_optimization": {"stage": 3, "overlap_comm": False, "stage3_param_persistence_threshold": 0},
        "train_micro_batch_size_per_gpu": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
        "bf16": {"enabled": "auto"},
    }
    (tmp_path / "deepspeed.json").write_text(json.dumps(deepspeed))
    named = {"deepspeed_config_file": str(tmp_path / "deepspeed.json"), "zero3_init_flag": False}
    (tmp_path / "accelerate.yaml").write_text(yaml.safe_dump(yaml.safe_load(CONFIG) | {"deepspeed_config": named}))
    launcher = ["-m", "accelerate.commands.launch", "--config_file", str(tmp_path / "accelerate.yaml")]
    place = Place(tmp_path, target_dir)
    of_one = place.run("eagle3", "one", 1)
    check_same(place.run("eagle3", "stage3", 2, "train.shard_target=true", launcher=launcher), of_one)


STARTS = """
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.command.launch import check_all_started
run(lambda: [check_all_started(), print("it starts")] and None, many_processes=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "environment", "starts"),
    [
        (["--num_processes", "2"], {}, 0),
        (["--num_processes", "1"], {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}, 1),  # a cluster's, not its own
        (["--multi_gpu", "--num_processes", "2"], {}, 2),
    ],
)
def test_a_launcher_that_starts_fewer_than_asked_is_noticed(
    options: list[str], environment: dict[str, str], starts: int, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(STARTS)
    launch = [sys.executable, "-m", "accelerate.commands.launch", *options, str(tmp_path / "script.py")]
    env = os.environ | environment | {"CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(launch, env=env, capture_output=True, text=True, check=False)
    assert done.stdout.count("it starts") == starts
    assert ("error: accelerate launch was asked for several processes" in done.stderr) == (starts == 0), done.stderr


# Without a launch.


def test_processes_that_would_each_train_by_themselves_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks on a device for which accelerate makes no process group: a Mac's GPU."""
    fresh_accelerator()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=r"^2 processes were started \(WORLD_SIZE\), and this run would have 1: "):
        accelerator_of(TrainSection())


def test_a_stage_or_offload_that_the_launcher_was_given_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_ZERO_STAGE", "2")
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none")
    section = TrainSection(zero_stage=3, offload_optimizer=True)
    with pytest.raises(UserError) as refused:
        with_recipe_settings(launcher_plugin(section), section)
    assert [problem.partition(", ")[0] for problem in refused.value.problems] == [
        "train.zero_stage is 3",
        "train.offload_optimizer is true",
    ]


def problems_of(config: dict[str, Any], **recipe: Any) -> list[str]:
    section = TrainSection(**{"gradient_accumulation_steps": 2, "batch_size": 4, "max_grad_norm": 0.5} | recipe)
    given = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": "auto"} | config
    try:
        with_recipe_settings(DeepSpeedPlugin(hf_ds_config=given), section)
    except UserError as error:
        return error.problems
    return []


def test_configs_that_train_as_the_recipe_says_are_taken() -> None:
    assert problems_of({"train_batch_size": "auto", "fp16": {"enabled": "auto"}}) == []
    same = {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5}
    assert problems_of(same, zero_stage=2) == []
    assert problems_of({"bf16": {"enabled": False}, "zero_optimization": {"stage": 3}}) == []


@pytest.mark.parametrize(
    ("config", "recipe", "named"),
    [
        ({"bf16": {"enabled": True}}, {}, "DeepSpeed's bf16"),
        ({"fp16": {"enabled": True}}, {}, "DeepSpeed's fp16"),
        ({"gradient_accumulation_steps": 1}, {}, "DeepSpeed's gradient_accumulation_steps is 1"),
        ({"gradient_clipping": 1.0}, {}, "DeepSpeed's gradient_clipping is 1.0"),
        ({"gradient_clipping": 0.5}, {"clip": "value"}, "DeepSpeed's gradient_clipping is 0.5"),
        ({"train_batch_size": 64}, {}, "DeepSpeed's train_batch_size is 64"),
        ({"optimizer": {"type": "AdamW", "params": {"lr": 1e-5}}}, {}, "DeepSpeed's optimizer"),
        ({}, {"zero_stage": 3}, "train.zero_stage is 3"),
        ({"zero_optimization": {"stage": 0}}, {}, "accelerate's config asks for DeepSpeed without ZeRO"),
        ({}, {"offload_optimizer": True}, "train.offload_optimizer is true"),
    ],
)
def test_a_config_that_trains_otherwise_is_refused(config: dict[str, Any], recipe: dict[str, Any], named: str) -> None:
    [problem] = problems_of(config, **recipe)
    assert problem.startswith(named)
