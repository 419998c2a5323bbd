"""The drafter in training and its optimiser, as one process or many hold them: alone, copied to every rank by
DistributedDataParallel, or shared out by DeepSpeed's ZeRO.

An optimiser step is the same whoever takes it. The gradient is the sum over all micro-batches of all ranks, for what is
summed is divided by the global batch's columns beforehand; the frameworks' averaging is undone. Parameters are float32,
bfloat16 is for the products alone (autocast), and AdamW is PyTorch's.

    stage   every rank holds                     shared out among the ranks
    0       weights, gradients, moments          -
    1, 2    weights (1: gradients, too)          AdamW's moments, weights to be updated; gradients
    3       what is being computed with          all of it

What is saved is the same, too: whole tensors by their names. A run saved under one stage, by so many ranks, goes on
under any other.
"""

import copy
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import DeepSpeedPlugin, DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from accelerate.utils.versions import compare_versions
from safetensors.torch import load_file, save_file
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from draftsmith.recipes.command.launch import check_joined, world_size
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TrainSection
from draftsmith.train.loss.unroll import TrainingTimeTest
from draftsmith.train.run.processes import keep_group

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's
OLDEST_DEEPSPEED = "0.19"  # tested with 0.19.8; `Engine` looks into its optimisers
ALONE_OR_COPIED = ("NO", "MULTI_CPU", "MULTI_GPU", "MULTI_XPU", "MULTI_NPU", "MULTI_HPU", "MULTI_MLU", "MULTI_MUSA")
# What the recipe decides of a DeepSpeed config.
DECIDED_BY_RECIPE = (
    "train_batch_size",
    "train_micro_batch_size_per_gpu",
    "gradient_accumulation_steps",
    "gradient_clipping",
)
WEIGHTS_FILE, MOMENTS_FILE = "model.safetensors", "optimizer.safetensors"


def accelerator_of(settings: TrainSection) -> Accelerator:
    """The processes of this run: those that a launcher started, or this one.

    ZeRO's stage is the recipe's (`train.zero_stage`), or the one that `accelerate launch` was given.

    Raises:
        UserError: ZeRO without DeepSpeed, a config of one's own that trains otherwise than the recipe says, another
            way of sharing than DDP and ZeRO, or processes that would each train by themselves.
    """
    handlers: list[Any] = [
        # Buffers are constants (the vocabulary, the target's embeddings): equal on all ranks from the start.
        DistributedDataParallelKwargs(broadcast_buffers=False)
    ]
    started = world_size()  # as the launcher says: below, the environment is changed
    by_launcher = os.environ.get("ACCELERATE_USE_DEEPSPEED", "false").lower() == "true"
    plugin = None
    if settings.offload_optimizer and not (settings.zero_stage or by_launcher):
        raise UserError(
            "train.offload_optimizer: it is ZeRO that keeps the optimiser's state elsewhere; set train.zero_stage to "
            "1, 2 or 3, or leave it out"
        )
    if settings.zero_stage or by_launcher:
        check_deepspeed(
            "accelerate's config asks for DeepSpeed" if by_launcher else "train.zero_stage: ZeRO is DeepSpeed's"
        )
        if deepspeed_on_cpus():
            os.environ.pop("ACCELERATE_USE_CPU", None)  # with it accelerate would not take DeepSpeed
            handlers.append(InitProcessGroupKwargs(backend="gloo"))
        _be_one_of_one()
        if by_launcher:
            plugin = _agreed(_plugin_of_launcher(settings), settings)
        else:
            plugin = DeepSpeedPlugin(hf_ds_config=zero_config(settings))
    accelerator = Accelerator(
        # Without an accelerator accelerate joins processes only if it is told to use the CPU.
        cpu=plugin is None and started > 1 and not torch.accelerator.is_available(),
        kwargs_handlers=handlers,
        mixed_precision="no",  # autocast is `Engine.autocast`
        deepspeed_plugin=plugin,
    )
    check_joined(started, accelerator.num_processes)
    kind = accelerator.distributed_type
    if plugin is None and kind.name not in ALONE_OR_COPIED:
        raise UserError(f"accelerate's config asks for {kind.value}; drafters are trained by DDP or DeepSpeed's ZeRO")
    if plugin is not None and kind != DistributedType.DEEPSPEED:
        raise UserError(
            "train.zero_stage: accelerate does not take DeepSpeed where it is told to use the CPU beside an "
            "accelerator: hide that (CUDA_VISIBLE_DEVICES=) instead"
        )
    if plugin is not None:
        unset_hf_deepspeed_config()  # else transformers shards what it loads from now on, which is the target
    keep_group()
    return accelerator


def zero_config(settings: TrainSection) -> dict[str, Any]:
    """DeepSpeed's configuration for a recipe."""
    zero: dict[str, Any] = {"stage": settings.zero_stage, "overlap_comm": torch.accelerator.is_available()}
    if settings.offload_optimizer:
        zero["offload_optimizer"] = {"device": "cpu"}
    return {
        "train_micro_batch_size_per_gpu": settings.batch_size,
        "gradient_accumulation_steps": settings.gradient_accumulation_steps,
        "gradient_clipping": settings.max_grad_norm if settings.clip == "norm" else 0.0,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # PyTorch's AdamW on the CPU as well: the same steps, nothing to compile
    }


def deepspeed_on_cpus() -> bool:
    """Whether there is nothing but CPUs; DeepSpeed, which is yet to be imported, is then told to take them.

    And not to compile what only inference calls: a process that is killed meanwhile leaves the compiler's lock behind,
    and all that start later wait for it for ever.
    """
    if torch.accelerator.is_available():
        return False
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    from deepspeed import ops

    ops.__compatible_ops__["deepspeed_shm_comm"] = False
    return True


def check_deepspeed(who: str) -> None:
    """Raises UserError where DeepSpeed is missing or too old for `who` asks for it."""
    if find_spec("deepspeed") is None:
        raise UserError(f"{who}, which is not installed: pip install 'deepspeed>={OLDEST_DEEPSPEED}'")
    if compare_versions("deepspeed", "<", OLDEST_DEEPSPEED):
        raise UserError(
            f"{who}, of which {metadata.version('deepspeed')} is installed, and {OLDEST_DEEPSPEED} or newer is needed: "
            f"pip install 'deepspeed>={OLDEST_DEEPSPEED}'"
        )


def _be_one_of_one() -> None:
    """DeepSpeed wants a process group, also of a single process that no launcher started."""
    if "RANK" in os.environ:
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    os.environ.update(alone)


def _plugin_of_launcher(settings: TrainSection) -> DeepSpeedPlugin:
    """What `accelerate launch` was told about DeepSpeed, by options or by its config. The recipe says the rest.

    Raises:
        UserError: it names a DeepSpeed config that cannot be read, or is none.
    """
    path = os.environ.get("ACCELERATE_DEEPSPEED_CONFIG_FILE", "none")
    # accelerate sets a variable only for what it was given. Without one its plugin takes its own default, stage 2.
    ours: dict[str, Any] = {}
    if settings.zero_stage and "ACCELERATE_DEEPSPEED_ZERO_STAGE" not in os.environ:
        ours["zero_stage"] = settings.zero_stage
    if settings.offload_optimizer and "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE" not in os.environ:
        ours["offload_optimizer_device"] = "cpu"
    try:
        if path != "none":  # what such a file says itself stays
            ours["hf_ds_config"] = HfDeepSpeedConfig(path).config
            # Where it is left out, accelerate would take 1.
            ours["hf_ds_config"].setdefault("gradient_accumulation_steps", "auto")
        return DeepSpeedPlugin(**ours)
    except (ValueError, OSError) as error:
        raise UserError(f"accelerate's config, deepspeed_config_file {path}: {error}") from error


def _agreed(plugin: DeepSpeedPlugin, settings: TrainSection) -> DeepSpeedPlugin:
    """The plugin of accelerate's own config, with what the recipe decides written into it.

    Raises:
        UserError: it would not train as the recipe says.
    """
    config, problems = plugin.hf_ds_config.config, []
    for name in ("bf16", "fp16"):
        if config.get(name, {}).get("enabled") is True:
            problems.append(
                f"DeepSpeed's {name}.enabled: drafters train in float32 and multiply in train.mixed_precision; set it "
                "to auto or leave it out"
            )
    if settings.zero_stage and plugin.zero_stage != settings.zero_stage:
        problems.append(
            f"train.zero_stage is {settings.zero_stage}, accelerate was given {plugin.zero_stage} (--zero_stage, or "
            "its config): leave one out"
        )
    if plugin.zero_stage == 0:
        problems.append("accelerate's config asks for DeepSpeed without ZeRO (stage 0): leave DeepSpeed out of it")
    for section in ("optimizer", "scheduler"):
        if section in config:
            problems.append(f"DeepSpeed's {section}: the recipe's train section says it; leave it out")
    offloads = config.get("zero_optimization", {}).get("offload_optimizer", {}).get("device", "none") != "none"
    if settings.offload_optimizer and not offloads:
        problems.append(
            "train.offload_optimizer is true, accelerate was given none (--offload_optimizer_device, or its config): "
            "leave one out"
        )
    rows = settings.batch_size * settings.gradient_accumulation_steps * world_size()
    for key, value in {"train_batch_size": rows, **zero_config(settings)}.items():
        if key in DECIDED_BY_RECIPE:
            if config.get(key, "auto") not in ("auto", value):
                problems.append(f"DeepSpeed's {key} is {config[key]}, the recipe's is {value}: set it to auto")
            config[key] = value
        elif key != "zero_optimization":
            config[key] = value
    if problems:
        raise UserError(problems)
    return plugin


@dataclass(frozen=True)
class Step:
    """What an optimiser step came to."""

    grad_norm: float  # before clipping
    taken: bool  # False: the gradient was not finite, and nothing has changed


class Engine:
    """The trainee and its optimiser.

    Args:
        bf16: whether products are in bfloat16.
    """

    def __init__(self, accelerator: Accelerator, trainee: TrainingTimeTest, settings: TrainSection, bf16: bool):
        self.accelerator, self.settings, self.bf16 = accelerator, settings, bf16
        self.alone = trainee  # until `start`
        self.zero = 0
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            plugin: Any = accelerator.state.deepspeed_plugin
            self.zero = plugin.zero_stage
        self.names = [name for name, p in trainee.named_parameters() if p.requires_grad]
        trainee.bf16, trainee.caches_casts = bf16, self.zero < 3
        self.shapes = {name: tuple(p.shape) for name, p in trainee.named_parameters()}
        self.blueprint = _without_weights(trainee) if self.zero == 3 else None

    def start(self) -> None:
        """Shares the weights out, as they are now; to be called once, before anything else."""
        settings = self.settings
        parameters = [p for p in self.alone.parameters() if p.requires_grad]
        if self.zero:
            self._size_buckets(sum(p.numel() for p in parameters))
        optimizer = torch.optim.AdamW(
            parameters,
            lr=settings.learning_rate,
            betas=(settings.adam_beta1, settings.adam_beta2),
            weight_decay=settings.weight_decay,
            # One pass over weights and moments in place of a dozen. DeepSpeed steps on pieces of its own.
            fused=not self.zero and self.accelerator.device.type in ("cpu", "cuda"),
        )
        self.trainee, self.optimizer = self.accelerator.prepare(self.alone, optimizer)

    def _size_buckets(self, count: int) -> None:
        """DeepSpeed's buckets are made for models of billions: none needs to hold more than there is."""
        plugin: Any = self.accelerator.state.deepspeed_plugin
        zero = plugin.deepspeed_config["zero_optimization"]
        sizes = {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
        if self.zero == 3:
            sizes = {"reduce_bucket_size": 500_000_000, "stage3_prefetch_bucket_size": 50_000_000}
            if zero.get("stage3_param_persistence_threshold") == "auto":
                zero["stage3_param_persistence_threshold"] = 100_000
        for key, usual in sizes.items():
            if zero.get(key, "auto") == "auto":
                zero[key] = min(usual, count)

    @property
    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """By name; of stage 3 empty but for its share."""
        return {name: p for name, p in self.alone.named_parameters() if p.requires_grad}

    # A step.

    def autocast(self) -> Any:
        """For the target: products in bfloat16, if that is wanted. The trainee sees to its own."""
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.bf16)

    def accumulating(self, last: bool) -> Any:
        """For the forward and backward pass of one micro-batch.

        Args:
            last: of this optimiser step, when ranks add up what they have.
        """
        if self.zero:
            self.trainee.set_gradient_accumulation_boundary(last)
            return nullcontext()
        return nullcontext() if last else self.accelerator.no_sync(self.trainee)

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the loss's gradient, summed over the ranks."""
        loss = loss * self.accelerator.num_processes  # wrappers average
        if self.zero:
            self.trainee.backward(loss, scale_wrt_gas=False)
        else:
            loss.backward()

    def step(self, lr: float) -> Step:
        """Clips and updates, or leaves all as it was where the gradient is not finite. All ranks find the same."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        return self._zero_step() if self.zero else self._plain_step()

    def _plain_step(self) -> Step:
        parameters, limit = list(self._parameters.values()), self.settings.max_grad_norm
        gradients = [p.grad for p in parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        found = norm.item()
        taken = bool(torch.isfinite(norm))
        if taken:
            if self.settings.clip == "norm":
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
            else:
                torch.nn.utils.clip_grad_value_(parameters, limit)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return Step(found, taken)

    def _zero_step(self) -> Step:
        """DeepSpeed clips by the norm, and skips what is not finite; clipping by value is done to what it holds."""
        norm = None
        if self.settings.clip == "value":
            held = self._held_gradients()
            squares = sum((g.float().square().sum() for g in held), torch.zeros((), device=self.accelerator.device))
            total: Any = self.accelerator.reduce(squares, "sum")
            norm = total.sqrt().item()
            if torch.isfinite(total):
                for gradient in held:
                    gradient.clamp_(-self.settings.max_grad_norm, self.settings.max_grad_norm)
        self.trainee.step()
        taken = not self.trainee.optimizer.overflow
        return Step(float(self.trainee.get_global_grad_norm()) if norm is None else norm, taken)

    def _held_gradients(self) -> list[torch.Tensor]:
        """This rank's share of the summed gradient."""
        sharded: Any = self.trainee.optimizer
        if sharded.offload_optimizer if self.zero == 3 else sharded.cpu_offload:
            return [each.grad for each in self._held_weights() if each.grad is not None]
        return [gradient for group in sharded.averaged_gradients.values() for gradient in group or ()]

    def _held_weights(self) -> list[torch.Tensor]:
        """This rank's share of the weights, flat, as AdamW is given them."""
        sharded: Any = self.trainee.optimizer
        return list(sharded.fp32_partitioned_groups_flat if self.zero == 3 else sharded.single_partition_of_fp32_groups)

    # Whole weights.

    @contextmanager
    def whole(self) -> Iterator[TrainingTimeTest]:
        """The trainee with all its weights on every rank, to be evaluated without any rank's help."""
        trainee = self.alone
        if self.blueprint is not None:
            import deepspeed

            trainee = _without_weights(self.blueprint)
            weights = {}
            for name, parameter in self.alone.named_parameters():  # one at a time: the others stay shared out meanwhile
                with deepspeed.zero.GatheredParameters([parameter]):
                    weights[name] = parameter.detach().clone()
            trainee.load_state_dict(weights, strict=False, assign=True)
        trainee.eval()
        try:
            yield trainee
        finally:
            self.alone.train()

    # Saving and going on.

    def save(self, directory: Path) -> None:
        """Writes weights and moments, whole, from rank 0; all ranks call it."""
        weights, moments = self._state()
        if self.accelerator.is_main_process:
            directory.mkdir(parents=True, exist_ok=True)
            save_file(weights, directory / WEIGHTS_FILE)
            save_file(moments, directory / MOMENTS_FILE)

    def _state(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Weights and moments by name, on the CPU; rank 0 has them."""
        weights: dict[str, torch.Tensor] = {}
        moments: dict[str, torch.Tensor] = {}
        main = self.accelerator.is_main_process
        step = torch.zeros(())
        for name, parameter in self._parameters.items():
            found = dict(zip((None, *MOMENTS), self._tensors_of(parameter), strict=True))
            if main:
                whole = {key: tensor.detach().cpu().contiguous() for key, tensor in found.items()}
                weights[name] = whole.pop(None)
                moments |= {f"{key}.{name}": tensor for key, tensor in whole.items()}
        for state in self._adam_states():
            step = state.get("step", step)
        moments["step"] = torch.as_tensor(step, dtype=torch.float32).detach().cpu().reshape(())
        return weights, moments

    def _tensors_of(self, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
        """The parameter and its moments, whole; with ZeRO all ranks ask for the same one."""
        whole: Any
        if not self.zero:
            state = self.optimizer.state.get(parameter, {})
            return [parameter, *(state.get(key, torch.zeros_like(parameter)) for key in MOMENTS)]
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        whole = safe_get_full_fp32_param(parameter)
        moments: Any = [torch.zeros_like(whole) for _ in MOMENTS]
        if any(self._adam_states()):  # a step was taken
            moments = [safe_get_full_optimizer_state(parameter, key) for key in MOMENTS]
        return [whole, *moments]

    def _adam_states(self) -> list[dict[str, torch.Tensor]]:
        optimizer: Any = self.trainee.optimizer.optimizer if self.zero else self.optimizer
        return list(optimizer.state.values())

    def load_weights(self, directory: Path, trainee: TrainingTimeTest | None = None) -> None:
        """Into what `whole` gives; None: into this engine's own, before `start`."""
        tensors = load_file(directory / WEIGHTS_FILE)
        self._check(directory / WEIGHTS_FILE, tensors, {name: self.shapes[name] for name in self.names})
        (self.alone if trainee is None else trainee).load_state_dict(tensors, strict=False)

    def load_moments(self, directory: Path) -> None:
        """After `start`."""
        tensors = load_file(directory / MOMENTS_FILE)
        wanted = {f"{key}.{name}": self.shapes[name] for name in self.names for key in MOMENTS}
        self._check(directory / MOMENTS_FILE, tensors, wanted | {"step": ()})
        step = tensors["step"]
        if not step:
            return  # AdamW begins with its first step
        if not self.zero:
            for name, parameter in self._parameters.items():
                self.optimizer.state[parameter] = {
                    "step": step.clone(),
                    **{key: tensors[f"{key}.{name}"].to(parameter.device) for key in MOMENTS},
                }
            return
        sharded: Any = self.trainee.optimizer
        for flat in self._held_weights():
            sharded.optimizer.state[flat] = {
                "step": step.clone(),
                **{key: torch.zeros_like(flat, requires_grad=False) for key in MOMENTS},
            }
        if self.zero < 3:
            sharded._lazy_init_hp_params_optimizer_state()
        for name, parameter in self._parameters.items():
            for key in MOMENTS:
                self._set_moment(parameter, key, tensors[f"{key}.{name}"].to(self.accelerator.device))

    def _set_moment(self, parameter: torch.nn.Parameter, key: str, value: torch.Tensor) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        if self.zero < 3:
            safe_set_full_optimizer_state(parameter, value, key)
            return
        # DeepSpeed 0.19's setter of whole values fails where they do not divide evenly among the ranks.
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        share = -(-value.numel() // ranks)
        padded = torch.nn.functional.pad(value.flatten(), (0, share * ranks - value.numel()))
        safe_set_local_optimizer_state(parameter, padded[rank * share : (rank + 1) * share], key)

    @staticmethod
    def _check(path: Path, tensors: Mapping[str, torch.Tensor], wanted: Mapping[str, tuple[int, ...]]) -> None:
        """Raises UserError where the file holds other tensors."""
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if different := sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name)):
            name = different[0]
            raise UserError(
                f"{path}: is not this run's: {len(different)} tensors differ, the first is {name}, which has shape "
                f"{found.get(name)} there and {wanted.get(name)} here"
            )


def _without_weights(trainee: TrainingTimeTest) -> TrainingTimeTest:
    """A copy whose parameters take no memory; it shares the buffers."""
    shared: dict[int, Any] = {id(buffer): buffer for buffer in trainee.buffers()}
    for parameter in trainee.parameters():
        shared[id(parameter)] = torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
    return copy.deepcopy(trainee, shared)
