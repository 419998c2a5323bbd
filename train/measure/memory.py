"""Peak memory of a training process, by part.

The unroll is run dry (`train.measure.dry_run`). Arithmetic (`models.costs`) covers the rest: the target's pass, the
optimiser, replay, and the process itself.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import psutil

from draftsmith.eval.recorded.replay import pass_tokens, replay_bytes
from draftsmith.models.costs import TargetSize, TrainingStates, target_forward_bytes
from draftsmith.models.feature_drafter import DrafterConfig
from draftsmith.models.poss import SpecialistsConfig
from draftsmith.recipes.schema import CHAINS
from draftsmith.train.measure.dry_run import LAYER, LOGITS, WEIGHT_SHAPED, unroll_peak
from draftsmith.train.measure.planned_run import PlannedRun
from draftsmith.train.run.settings import trainee_of

CUDA_CONTEXT_BYTES = 500_000_000  # on a device, by CUDA itself
# Freed memory that an allocator keeps, as a share of a micro-batch's tensors. Micro-batches differ in length, and
# glibc's malloc keeps the pieces: 0.4 on the demo (docs/training.md).
CPU_RESERVE = 1.5
GPU_RESERVE = 0.15

TARGET_WEIGHTS = "the target's weights"
TARGET_PASS = "the target's pass"
UPDATE = "the optimiser's update"
KEPT = "the drafter's weights and AdamW's moments"
RESERVE = "freed memory that the allocator keeps"
REPLAY = "replaying validation answers"
PROCESS = "Python and libraries, or CUDA"

HOW_TO_LOWER = {
    LOGITS: "drafter.vocab_size",
    WEIGHT_SHAPED: "drafter.intermediate_size, drafter.vocab_size",
    LAYER: "train.gradient_checkpointing=true, train.batch_size (and accumulate), data.max_length, train.ttt_steps",
    TARGET_WEIGHTS: "target.dtype=bfloat16, train.shard_target (more processes), a quantised checkpoint, data.states",
    TARGET_PASS: "train.batch_size (and accumulate), data.max_length",
    UPDATE: "drafter.intermediate_size, drafter.vocab_size",
    KEPT: "train.zero_stage, drafter.intermediate_size, drafter.vocab_size",
    REPLAY: "eval.replay_batch_size, train.eval_replay, eval.tree",
}


@dataclass(frozen=True)
class Memory:
    """Peak memory of one process on its device, in bytes, by part. Parts are alive at the same moment."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        """The largest part that a recipe can lower."""
        return max((name for name in self.parts if name in HOW_TO_LOWER), key=self.parts.__getitem__)


def how_to_lower(part: str, shape: DrafterConfig) -> str:
    """The recipe keys that make this part smaller for a drafter of this shape."""
    keys = HOW_TO_LOWER[part].split(", ")
    if not shape.own_head:
        keys = [key for key in keys if key != "drafter.vocab_size"]
    if isinstance(shape, SpecialistsConfig) and "drafter.intermediate_size" in keys:
        keys.append("drafter.specialists")
    return ", ".join(keys)


def planned_memory(run: PlannedRun) -> Memory:
    """The peak memory of a process."""
    section, data, shape = run.recipe.train, run.data, run.shape
    rows = min(section.batch_size, data.rows or section.batch_size)
    unroll = unroll_peak(
        shape,
        run.target_config,
        run.size.dtype,
        partial(trainee_of, section),
        section.feature_noise > 0,
        run.bf16,
        rows,
        data.longest_tokens,
        data.longest_columns,
        device=run.device_type,
    )
    layers = len(shape.capture_layers)
    target_pass = target_forward_bytes(run.target_config, run.size, rows, data.longest_tokens, layers)
    states = TrainingStates.of(
        run.parameters, run.processes, section.zero_stage, section.offload_optimizer and not run.device.is_cpu
    )
    return memory_of(
        run.size,
        unroll,
        0.0 if run.reads_states else target_pass,
        section.gradient_accumulation_steps > 1,
        states,
        run.device.is_cpu,
        planned_replay_bytes(run),
    )


def memory_of(
    size: TargetSize,
    unroll: Mapping[str, float],
    target_pass_bytes: float,
    accumulates: bool,
    states: TrainingStates,
    on_cpu: bool,
    replay_bytes: float = 0,
) -> Memory:
    """Peak memory: the permanent parts, and the widest of four moments.

    Gradients of earlier micro-batches and the buckets that processes exchange are alive beside each moment. On a GPU
    AdamW updates all parameters at once and needs one more copy.
    """
    always: dict[str, float] = {TARGET_WEIGHTS: size.weight_bytes, KEPT: states.weights + states.adamw_moments}
    kept = states.gradients * accumulates + states.buckets
    update = states.gradients + (0 if on_cpu else states.adamw_moments // 2)
    used = unroll.get(WEIGHT_SHAPED, 0) + kept + states.gathered
    moments: list[Mapping[str, float]] = [
        {TARGET_PASS: target_pass_bytes, WEIGHT_SHAPED: kept},
        {**unroll, WEIGHT_SHAPED: used},
        {UPDATE: update, WEIGHT_SHAPED: states.buckets},
        {REPLAY: replay_bytes, WEIGHT_SHAPED: states.buckets + states.gathered},
    ]
    widest = max(moments, key=lambda moment: sum(moment.values()))
    process, reserve = (resident_bytes(), CPU_RESERVE) if on_cpu else (CUDA_CONTEXT_BYTES, GPU_RESERVE)
    own = {PROCESS: process, RESERVE: reserve * sum(widest.values())}
    return Memory(always | {name: count for name, count in widest.items() if count} | own)


def planned_replay_bytes(run: PlannedRun) -> float:
    """Memory of the widest batch of train.eval_replay, if all its answers were as long as the longest row."""
    if not run.recipe.train.eval_replay:
        return 0
    # The turns of a conversation are not known before they are counted; a batch holds no more than its size.
    rows, longest, tree = run.recipe.eval.replay_batch_size, run.data.longest_tokens, run.recipe.eval.tree
    if run.data.counted:
        rows = min(rows, run.data.validation_answers)
    shape, size = run.shape, run.size
    layers = len(shape.capture_layers)
    keys_values = 2 * shape.num_key_value_heads * shape.head_dim * 4 * shape.cached_layers
    states = layers * shape.hidden_size * size.dtype.itemsize
    kept = replay_bytes(rows * longest, rows, longest, states, keys_values)
    tokens = max(longest, pass_tokens(run.device_type))
    target_pass = 0 if run.reads_states else target_forward_bytes(run.target_config, size, 1, tokens, layers)
    # Logits and probabilities of a draft call's nodes, in float32; the first call's prompt columns need no more.
    expanded = 1 if tree.policy in CHAINS else tree.width
    return kept + max(target_pass, 3 * 4 * rows * expanded * shape.draft_vocab_size)


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return psutil.Process().memory_info().rss
