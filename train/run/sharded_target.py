"""The frozen target, sharded over the processes of a run, for targets that do not fit one device (train.shard_target).

DeepSpeed's ZeRO-3 does it. Every process holds embeddings, head and final norm whole, because drafter and teacher read
them, and a piece of each weight of a decoder layer. The pieces of a layer are gathered while it runs. So all processes
run a pass of the decoder together. In a training step they have equally many passes. Elsewhere
`ShardedTarget.uneven_passes` lets those with fewer passes run along.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import distributed, nn
from transformers.integrations.deepspeed import HfDeepSpeedConfig, unset_hf_deepspeed_config

from draftsmith.models.prompt import PlacedInsert
from draftsmith.models.sizes import gigabytes, named_dtype
from draftsmith.models.target import Target, decoder_layers
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError, collecting_problems
from draftsmith.recipes.schema import Recipe
from draftsmith.train.run.accelerator import check_deepspeed, deepspeed_on_cpus


def check_sharding(recipe: Recipe, files: TargetFiles) -> None:
    """Raises UserError if the target of train.shard_target cannot be sharded, or DeepSpeed is missing."""
    if not recipe.train.shard_target:
        return
    target, config = recipe.target, files.config
    quantization = getattr(config, "quantization_config", None)
    otherwise = "(docs/training.md), or leave train.shard_target out"
    refusals = {
        "with data.states the target's layers are not loaded; leave one out": recipe.data.states is not None,
        f"merge target.adapter into the target on disk first {otherwise}": target.adapter is not None,
        f"shards cannot be quantised; capture the quantised target's states first {otherwise}": target.quantization,
        f"shards cannot read texts twice; capture the guided target's states first {otherwise}": target.guidance,
        f"ZeRO-3 shards plain weights, and {target.model!r} is quantised; name its plain checkpoint": quantization,
    }
    problems = [f"train.shard_target: {refusal}" for refusal, applies in refusals.items() if applies]
    if recipe.target.dtype == "auto" and named_dtype(config) is None:
        problems.append(
            "target.dtype: auto, but the target's config names none, and train.shard_target allocates the weights "
            "before it reads them; set target.dtype"
        )
    elif quantization is None and (kept := _kept_in_float32(files)):
        problems.append(
            f"train.shard_target: {config.model_type} keeps weights in float32 beside those in lower precision "
            f"({kept[0]}), which ZeRO-3 would round; set target.dtype=float32, or train.shard_target=false"
        )
    with collecting_problems(problems):
        check_deepspeed("train.shard_target: the target is sharded by DeepSpeed")
    if problems:
        raise UserError(problems)


def _kept_in_float32(files: TargetFiles) -> list[str]:
    """Parameters that transformers loads in float32, whatever precision is asked for."""
    dtype = files.dtype
    if dtype == torch.float32 or (model := files.skeleton()) is None:
        return []
    modules = set(model._keep_in_fp32_modules_strict or ())
    if dtype == torch.float16:
        modules |= set(model._keep_in_fp32_modules or ())
    return [name for name, _ in model.named_parameters() if any(f".{m}." in f".{name}." for m in modules)]


def load_sharded(files: TargetFiles) -> Any:
    """Like `TargetFiles.load_model`, with a piece of each weight on the device of every process.

    Rank 0 reads the checkpoint into its host memory. Modules are created, filled and sharded one after another, so no
    device holds more than its pieces and one module.
    """
    deepspeed_on_cpus()
    config = {
        "train_micro_batch_size_per_gpu": 1,  # DeepSpeed requires it; nothing is trained
        "zero_optimization": {"stage": 3, "memory_efficient_linear": False},  # it is for backward passes
        "bf16": {"enabled": files.dtype == torch.bfloat16},
        "fp16": {"enabled": files.dtype == torch.float16},
    }
    asked = HfDeepSpeedConfig(config)  # transformers finds it by a weak reference
    try:
        return files.read_model()
    finally:
        unset_hf_deepspeed_config()
        del asked


class ShardedTarget(Target):
    """A target that the processes of a run hold together. All of them create it, from a model of `load_sharded`, and
    run its decoder together."""

    def __init__(self, model: Any, capture_layers: Sequence[int] | None = None):
        layers = decoder_layers(model)
        _make_whole(model, outside=layers)
        for layer in layers:
            _gather_while_it_runs(layer)
        self.piece_bytes = sum(weight.ds_tensor.nbytes for weight in layers.parameters())  # type: ignore[attr-defined]
        self._uneven = False
        model.get_decoder().register_forward_pre_hook(self._announce_pass)
        super().__init__(model, capture_layers)

    def sharding_text(self) -> str:
        whole = sum(p.nbytes for p in self.model.parameters() if not hasattr(p, "ds_tensor"))
        return (
            f"the target's layers are sharded over {distributed.get_world_size()} processes: each holds "
            f"{gigabytes(self.piece_bytes)} of them, and {gigabytes(whole)} of embeddings, head and norm whole"
        )

    def captured_states(
        self, input_ids_BT: torch.Tensor, capture: Sequence[int], inserts: Sequence[PlacedInsert] = ()
    ) -> torch.Tensor:
        """As `Target`'s, but all layers are computed: one pass gathers what another does."""
        return self.states(input_ids_BT, capture, inserts=inserts).captured

    @contextmanager
    def uneven_passes(self) -> Iterator[None]:
        """Inside this block every process may run the target as often as it likes. All enter it and leave it together.

        A process announces each pass of its own. A process that is done asks whether another has more passes; while
        that is so, it runs along over a single token:

            rank 0    a a a a a .          a, b  own passes
            rank 1    b b - - - .          -     a pass over a single token, to run along
                                           .     no process has more

        The block must contain no other collectives.
        """
        self._uneven = True
        try:
            yield
        finally:
            self._uneven = False
        token = torch.zeros((1, 1), dtype=torch.long, device=self.device)
        with torch.no_grad():
            while self._any_process_has_a_pass(False):
                self.decoder(input_ids=token, use_cache=False)

    def _announce_pass(self, *_: Any) -> None:
        if self._uneven:
            self._any_process_has_a_pass(True)

    def _any_process_has_a_pass(self, mine: bool) -> bool:
        passes = torch.tensor(int(mine), device=self.device)
        distributed.all_reduce(passes)
        return bool(passes)


def _make_whole(model: nn.Module, outside: nn.Module) -> None:
    """Replaces pieces by ordinary parameters, except in `outside`."""
    import deepspeed

    cut_up = set(outside.parameters())
    whole: dict[nn.Parameter, nn.Parameter] = {}
    for module in model.modules():
        for name, piece in module.named_parameters(recurse=False):
            if piece in cut_up:
                continue
            if piece not in whole:  # tied weights stay tied
                with deepspeed.zero.GatheredParameters([piece]):
                    whole[piece] = nn.Parameter(piece.data, requires_grad=False)
            setattr(module, name, whole[piece])


def _gather_while_it_runs(layer: nn.Module) -> None:
    import deepspeed

    pieces, gathered = list(layer.parameters()), []

    def gather(*_: Any) -> None:
        gathered.append(deepspeed.zero.GatheredParameters(pieces))
        gathered[-1].__enter__()

    def release(*_: Any) -> None:
        gathered.pop().__exit__(None, None, None)

    layer.register_forward_pre_hook(gather)
    layer.register_forward_hook(release, always_call=True)  # `Target` tries passes that may fail
