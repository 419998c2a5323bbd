"""The drafter in training and its optimiser, in one process or many: alone, copied to every rank by
DistributedDataParallel, or sharded by DeepSpeed's ZeRO.

An optimiser step is the same in every case. The gradient is the sum over all micro-batches of all ranks: the loop
divides by the columns of the global batch beforehand, and the frameworks' averaging is undone. Parameters are float32,
products may be bfloat16 (autocast), and AdamW is PyTorch's.

    stage   every rank holds                     sharded among the ranks
    0       weights, gradients, moments          -
    1       weights, gradients                   AdamW's moments, weights to be updated
    2       weights                              also gradients
    3       the layer that runs                  everything

What is saved is the same too: whole tensors by name. A run saved under one stage, with any number of ranks, can be
resumed under another.
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType
from safetensors.torch import load_file, save_file

from draftsmith.models.drafter_base import Drafter
from draftsmith.recipes.sections.train import TrainSection
from draftsmith.train.loss.losses import LossWeights
from draftsmith.train.loss.unroll import TrainingTimeTest

MOMENTS = ("exp_avg", "exp_avg_sq")  # AdamW's
WEIGHTS_FILE, MOMENTS_FILE = "model.safetensors", "optimizer.safetensors"


def trainee_of(section: TrainSection, drafter: Drafter) -> TrainingTimeTest:
    """The drafter with its unroll and loss."""
    weights = LossWeights(
        token=section.token_loss,
        feature=section.feature_loss,
        top_k=section.top_k_loss,
        objective=section.token_objective,
        rank=section.rank_loss,
    )
    unroll = section.ttt_steps, section.step_weight, section.gradient_checkpointing
    return TrainingTimeTest(drafter, *unroll, weights, section.detach_features)


def uses_bf16(section: TrainSection) -> bool:
    """Whether products are in bfloat16. `auto`: on accelerators that compute it natively; on CPUs it gains little at
    best (LOG.md)."""
    if section.mixed_precision != "auto":
        return section.mixed_precision == "bf16"
    return torch.cuda.is_available() and torch.cuda.is_bf16_supported(including_emulation=False)


class Step(NamedTuple):
    grad_norm: float  # before clipping
    taken: bool  # False: the gradient was not finite, and nothing was changed


class Engine:
    """The trainee and its optimiser. Call `start` once before training.

    Attributes:
        alone: the trainee without the wrapper for many processes, which `trainee` is.
        zero: ZeRO's stage.
        bf16: whether products are in bfloat16.
    """

    def __init__(self, accelerator: Accelerator, trainee: TrainingTimeTest, section: TrainSection):
        self.accelerator, self.section, self.bf16 = accelerator, section, uses_bf16(section)
        self.alone, self.zero = trainee, 0
        if accelerator.distributed_type == DistributedType.DEEPSPEED:
            plugin: Any = accelerator.state.deepspeed_plugin
            self.zero = plugin.zero_stage
        trainee.bf16, trainee.caches_casts = self.bf16, self.zero < 3
        self.blueprint = _without_weights(trainee) if self.zero == 3 else None

    def start(self, checkpoint: Path | None = None) -> None:
        """Makes the optimiser, and copies or shards the weights: those of a checkpoint, or as they are now."""
        section = self.section
        if checkpoint is not None:
            self.load_weights(checkpoint, self.alone)
        parameters = list(self._parameters.values())
        if self.zero:
            self._size_buckets(sum(p.numel() for p in parameters))
        optimizer = torch.optim.AdamW(
            parameters,
            lr=section.learning_rate,  # `step` is given that of each step
            betas=(section.adam_beta1, section.adam_beta2),
            weight_decay=section.weight_decay,
            # One pass over weights and moments in place of a dozen. DeepSpeed updates its own flat tensors.
            fused=not self.zero and self.accelerator.device.type in ("cpu", "cuda"),
        )
        self.trainee, self.optimizer = self.accelerator.prepare(self.alone, optimizer)
        if checkpoint is not None:
            self._load_moments(checkpoint)

    def _size_buckets(self, count: int) -> None:
        """Shrinks DeepSpeed's buckets, which are made for models of billions, to the number of parameters."""
        plugin: Any = self.accelerator.state.deepspeed_plugin
        zero = plugin.deepspeed_config["zero_optimization"]
        usual = {"reduce_bucket_size": 500_000_000, "allgather_bucket_size": 500_000_000}
        usual |= {"stage3_prefetch_bucket_size": 50_000_000, "stage3_param_persistence_threshold": 100_000}
        for key, size in usual.items():
            if zero.get(key, "auto") == "auto":
                zero[key] = min(size, count)

    @property
    def _parameters(self) -> dict[str, torch.nn.Parameter]:
        """Trained parameters by name. Under stage 3 they are empty: DeepSpeed holds the shards."""
        return {name: p for name, p in self.alone.named_parameters() if p.requires_grad}

    # A step.

    def autocast(self) -> Any:
        """For the target's products in bfloat16, if bf16 is on. The trainee has an autocast of its own."""
        return torch.autocast(self.accelerator.device.type, torch.bfloat16, enabled=self.bf16)

    def accumulating(self, last: bool) -> Any:
        """For the forward and backward pass of one micro-batch. After the `last` one of an optimiser step ranks add
        their gradients up."""
        if self.zero:
            self.trainee.set_gradient_accumulation_boundary(last)
            return nullcontext()
        return nullcontext() if last else self.accelerator.no_sync(self.trainee)

    def backward(self, loss: torch.Tensor) -> None:
        """Adds the loss's gradient, summed over the ranks."""
        loss = loss * self.accelerator.num_processes  # because wrappers average
        if self.zero:
            self.trainee.backward(loss, scale_wrt_gas=False)
        else:
            loss.backward()

    def step(self, lr: float) -> Step:
        """Clips and updates. If the gradient is not finite, nothing changes. The result is the same on all ranks."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if self.zero:
            return self._zero_step()
        parameters, limit = list(self._parameters.values()), self.section.max_grad_norm
        norm = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
        taken = bool(torch.isfinite(norm))
        if taken:
            if self.section.clip == "norm":
                torch.nn.utils.clip_grads_with_norm_(parameters, limit, norm)
            else:
                torch.nn.utils.clip_grad_value_(parameters, limit)
            self.optimizer.step()
        self.optimizer.zero_grad()
        return Step(norm.item(), taken)

    def _zero_step(self) -> Step:
        """DeepSpeed clips by the norm and skips gradients that are not finite. Clipping by value happens here, on the
        gradients that it holds."""
        norm = None
        if self.section.clip == "value":
            held = self._held_gradients()
            squares = sum((g.float().square().sum() for g in held), torch.zeros((), device=self.accelerator.device))
            total: Any = self.accelerator.reduce(squares, "sum")
            norm = total.sqrt().item()
            if torch.isfinite(total):
                for gradient in held:
                    gradient.clamp_(-self.section.max_grad_norm, self.section.max_grad_norm)
        self.trainee.step()
        taken = not self.trainee.optimizer.overflow
        return Step(float(self.trainee.get_global_grad_norm()) if norm is None else norm, taken)

    def _held_gradients(self) -> list[torch.Tensor]:
        """This rank's shards of the summed gradient."""
        sharded: Any = self.trainee.optimizer
        if sharded.offload_optimizer if self.zero == 3 else sharded.cpu_offload:
            return [each.grad for each in self._held_weights() if each.grad is not None]
        return [gradient for group in sharded.averaged_gradients.values() for gradient in group or ()]

    def _held_weights(self) -> list[torch.Tensor]:
        """This rank's shards of the weights, flattened, as AdamW is given them."""
        sharded: Any = self.trainee.optimizer
        return list(sharded.fp32_partitioned_groups_flat if self.zero == 3 else sharded.single_partition_of_fp32_groups)

    # Whole weights.

    @contextmanager
    def whole(self) -> Iterator[TrainingTimeTest]:
        """The trainee with all its weights on every rank, for ranks to evaluate independently."""
        trainee = self.alone
        if self.blueprint is not None:
            import deepspeed

            trainee = _without_weights(self.blueprint)
            weights = {}
            for name, parameter in self.alone.named_parameters():  # one at a time: the others stay sharded
                with deepspeed.zero.GatheredParameters([parameter]):
                    weights[name] = parameter.detach().clone()
            trainee.load_state_dict(weights, strict=False, assign=True)
        trainee.eval()
        try:
            yield trainee
        finally:
            self.alone.train()

    # Saving and resuming.

    def save(self, directory: Path) -> None:
        """Writes whole weights and moments from rank 0; all ranks call it."""
        weights: dict[str, torch.Tensor] = {}
        moments: dict[str, torch.Tensor] = {"step": torch.zeros(())}
        for name, parameter in self._parameters.items():
            whole = self._tensors_of(parameter)
            if self.accelerator.is_main_process:
                weights[name], *its_moments = (tensor.detach().cpu().contiguous() for tensor in whole)
                moments |= {f"{key}.{name}": tensor for key, tensor in zip(MOMENTS, its_moments, strict=True)}
        for state in self._adam_states():
            step = state.get("step", moments["step"])
            moments["step"] = torch.as_tensor(step, dtype=torch.float32).detach().cpu().reshape(())
        if self.accelerator.is_main_process:
            directory.mkdir(parents=True, exist_ok=True)
            save_file(weights, directory / WEIGHTS_FILE)
            save_file(moments, directory / MOMENTS_FILE)

    def _tensors_of(self, parameter: torch.nn.Parameter) -> list[torch.Tensor]:
        """The whole parameter and its whole moments. Under ZeRO all ranks ask for the same parameter together."""
        if not self.zero:
            state = self.optimizer.state.get(parameter, {})
            return [parameter, *(state.get(key, torch.zeros_like(parameter)) for key in MOMENTS)]
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        whole: Any = safe_get_full_fp32_param(parameter)
        moments: Any = [torch.zeros_like(whole) for _ in MOMENTS]
        if any(self._adam_states()):  # a step was taken
            moments = [safe_get_full_optimizer_state(parameter, key) for key in MOMENTS]
        return [whole, *moments]

    def _adam_states(self) -> list[dict[str, torch.Tensor]]:
        optimizer: Any = self.trainee.optimizer.optimizer if self.zero else self.optimizer
        return list(optimizer.state.values())

    def load_weights(self, checkpoint: Path, trainee: TrainingTimeTest) -> None:
        """Loads whole weights into a trainee that has them whole."""
        trainee.load_state_dict(load_file(checkpoint / WEIGHTS_FILE), strict=False)

    def _load_moments(self, checkpoint: Path) -> None:
        tensors = load_file(checkpoint / MOMENTS_FILE)
        step = tensors["step"]
        if not step:
            return  # no step was taken: AdamW makes its moments in the first one
        if not self.zero:
            for name, parameter in self._parameters.items():
                self.optimizer.state[parameter] = {
                    "step": step.to(parameter.device, copy=True),  # a fused update asks for it there
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
        # DeepSpeed 0.19's setter of whole values fails if they do not divide evenly among the ranks.
        ranks, rank = self.accelerator.num_processes, self.accelerator.process_index
        share = -(-value.numel() // ranks)
        padded = torch.nn.functional.pad(value.flatten(), (0, share * ranks - value.numel()))
        safe_set_local_optimizer_state(parameter, padded[rank * share : (rank + 1) * share], key)


def _without_weights(trainee: TrainingTimeTest) -> TrainingTimeTest:
    """A copy with parameters that take no memory; it shares the buffers."""
    shared: dict[int, Any] = {id(buffer): buffer for buffer in trainee.buffers()}
    for parameter in trainee.parameters():
        shared[id(parameter)] = torch.nn.Parameter(torch.empty_like(parameter, device="meta"))
    return copy.deepcopy(trainee, shared)
