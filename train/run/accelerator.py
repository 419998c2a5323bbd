"""Joins the processes of a run: one alone, by DistributedDataParallel, or by DeepSpeed's ZeRO. The launcher's DeepSpeed
settings are used where they agree with the recipe, and refused where they do not.
"""

import os
import socket
from importlib.util import find_spec
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from accelerate.utils.versions import compare_versions
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith.recipes.command.launch import check_joined, world_size
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.train import TrainSection
from draftsmith.train.run.processes import keep_group

OLDEST_DEEPSPEED = "0.19"  # tested with 0.19.8; `Engine` reads attributes of its optimisers


def deepspeed_config(section: TrainSection) -> dict[str, Any]:
    """The recipe's settings as DeepSpeed's configuration."""
    zero: dict[str, Any] = {"stage": section.zero_stage, "overlap_comm": torch.accelerator.is_available()}
    zero |= {"offload_optimizer": {"device": "cpu"}} if section.offload_optimizer else {}
    return {
        "train_micro_batch_size_per_gpu": section.batch_size,
        "gradient_accumulation_steps": section.gradient_accumulation_steps,
        "gradient_clipping": section.max_grad_norm if section.clip == "norm" else 0.0,  # 0: `Engine` clips
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # PyTorch's AdamW on the CPU too: the same steps, nothing to compile
    }


def accelerator_of(section: TrainSection) -> Accelerator:
    """The processes of this run: those that a launcher started, or this one.

    Raises:
        UserError: ZeRO without DeepSpeed, a DeepSpeed config that contradicts the recipe, a way of distributing that is
            neither DDP nor ZeRO, or processes that would each train by themselves.
    """
    # Buffers are constants (the vocabulary, the target's embeddings): equal on all ranks from the start.
    handlers: list[Any] = [DistributedDataParallelKwargs(broadcast_buffers=False)]
    started = world_size()  # as the launcher set it: the environment is changed below
    by_launcher = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    plugin = None
    if section.offload_optimizer and not (section.zero_stage or by_launcher):
        raise UserError("train.offload_optimizer: only ZeRO can; set train.zero_stage to 1, 2 or 3, or leave it out")
    if section.zero_stage or by_launcher:
        check_deepspeed("accelerate's config asks for DeepSpeed" if by_launcher else "train.zero_stage needs DeepSpeed")
        if deepspeed_on_cpus():
            os.environ.pop("ACCELERATE_USE_CPU", None)  # with it accelerate would not take DeepSpeed
            handlers.append(InitProcessGroupKwargs(backend="gloo"))
        _join_group_of_one()
        of_launcher = with_recipe_settings(launcher_plugin(section), section) if by_launcher else None
        plugin = of_launcher or DeepSpeedPlugin(hf_ds_config=deepspeed_config(section))
    accelerator = Accelerator(
        # Without an accelerator accelerate joins processes only if it is told to use the CPU.
        cpu=plugin is None and started > 1 and not torch.accelerator.is_available(),
        kwargs_handlers=handlers,
        mixed_precision="no",  # autocast is `Engine.autocast`
        deepspeed_plugin=plugin,
    )
    check_joined(started, accelerator.num_processes)
    kind = accelerator.distributed_type
    if plugin is not None:
        if kind != DistributedType.DEEPSPEED:
            raise UserError(
                "train.zero_stage: accelerate does not use DeepSpeed where it is told to use the CPU beside an "
                "accelerator: hide the accelerator (CUDA_VISIBLE_DEVICES=) instead"
            )
        unset_hf_deepspeed_config()  # else transformers shards the target, which is loaded later
    elif not kind.name.startswith(("NO", "MULTI_")):
        raise UserError(f"accelerate's config asks for {kind.value}; drafters are trained by DDP or DeepSpeed's ZeRO")
    keep_group()
    return accelerator


def deepspeed_on_cpus() -> bool:
    """Whether there are only CPUs. DeepSpeed, which must not be imported yet, is then told to use them."""
    if torch.accelerator.is_available():
        return False
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed import ops

    # Only inference calls it. A process that is killed while it compiles this operator leaves the compiler's lock, and
    # every later start waits for it for ever.
    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return True


def check_deepspeed(reason: str) -> None:
    """Raises UserError if DeepSpeed is missing or too old. `reason`: why it is needed; ends with its name."""
    if find_spec("deepspeed") is None or compare_versions("deepspeed", "<", OLDEST_DEEPSPEED):
        raise UserError(
            f"{reason}, which is not installed, or older than {OLDEST_DEEPSPEED}: "
            f"pip install 'deepspeed>={OLDEST_DEEPSPEED}'"
        )


def _join_group_of_one() -> None:
    """DeepSpeed needs a process group even for a single process that no launcher started."""
    if "RANK" in os.environ:
        return
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ.update(alone, MASTER_PORT=str(free.getsockname()[1]))


def launcher_plugin(section: TrainSection) -> DeepSpeedPlugin:
    """The plugin that `accelerate launch` asks for by its options or config; the recipe fills in what these leave out.
    Raises UserError if its config cannot be read."""
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    # accelerate sets a variable only for what it was given. Without one its plugin takes its own default, stage 2.
    ours: dict[str, Any] = {}
    if section.zero_stage and "ACCELERATE_DEEPSPEED_ZERO_STAGE" not in os.environ:
        ours["zero_stage"] = section.zero_stage
    if section.offload_optimizer and "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE" not in os.environ:
        ours["offload_optimizer_device"] = "cpu"
    try:
        if path != "none":  # the file's own values stay
            ours["hf_ds_config"] = HfDeepSpeedConfig(path).config
            # Where it is left out, accelerate would take 1.
            ours["hf_ds_config"].setdefault("gradient_accumulation_steps", "auto")
        return DeepSpeedPlugin(**ours)
    except (ValueError, OSError) as error:
        raise UserError(f"accelerate's config, deepspeed_config_file {path}: {error}") from error


def with_recipe_settings(plugin: DeepSpeedPlugin, section: TrainSection) -> DeepSpeedPlugin:
    """The launcher's plugin with the recipe's values written into it. Raises UserError if its own contradict them."""
    config = plugin.hf_ds_config.config
    offloads = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none") != "none"
    enabled = [name for name in ("bf16", "fp16") if config.get(name, {}).get("enabled") is True]
    decided = [*enabled, *(name for name in ("optimizer", "scheduler") if name in config)]
    problems = [f"DeepSpeed's {name}: the recipe's train section decides it; leave it out" for name in decided]
    refusals = {
        f"train.zero_stage is {section.zero_stage}, accelerate was given {plugin.zero_stage} (--zero_stage, or its "
        "config): leave one out": section.zero_stage not in (0, plugin.zero_stage),
        "accelerate's config asks for DeepSpeed without ZeRO (stage 0): leave DeepSpeed out": plugin.zero_stage == 0,
        "train.offload_optimizer is true, accelerate was given none (--offload_optimizer_device, or its config): leave "
        "one out": section.offload_optimizer and not offloads,
    }
    problems += [refusal for refusal, applies in refusals.items() if applies]
    rows = section.batch_size * section.gradient_accumulation_steps * world_size()
    for key, value in {"train_batch_size": rows, **deepspeed_config(section)}.items():
        if key == "zero_optimization":
            continue
        if config.get(key, "auto") not in ("auto", value):
            problems.append(f"DeepSpeed's {key} is {config[key]}, the recipe's is {value}: leave it out")
        config[key] = value
    if problems:
        raise UserError(problems)
    return plugin
