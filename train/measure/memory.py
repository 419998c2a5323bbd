"""Peak memory of a training process, by part.

The unroll is run dry (`train.measure.dry_run`). Arithmetic (`models.costs`) covers the rest: the target's pass, the
optimiser, replay, and the process itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import psutil

from draftsmith.data_gen.states.store import length_of, taught_tokens
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.eval.replay.replay import pass_tokens, replay_bytes
from draftsmith.models.context_limits import longest_row
from draftsmith.models.costs import Device, TargetSize, target_forward_bytes
from draftsmith.models.drafter_base import DrafterConfig
from draftsmith.models.drafters import trainable_parameters
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import CHAINS
from draftsmith.train.measure.dry_run import LAYER, LOGITS, WEIGHT_SHAPED, dry_run

CUDA_CONTEXT_BYTES = 500_000_000  # on a device, by CUDA itself
BUCKET = 500_000_000  # gradients that DeepSpeed sends at a time, at most; two buckets are under way
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
class PlannedRun:
    """The facts known before a run starts; without rows before regenerate has run."""

    recipe: Recipe
    files: TargetFiles
    shape: DrafterConfig
    size: TargetSize
    rows: Sequence[TrainingRow]
    validation_rows: Sequence[TrainingRow]
    device: Device
    processes: int = 1

    @cached_property
    def parameters(self) -> int:
        """Trained parameters."""
        return trainable_parameters(self.shape)

    @property
    def longest_tokens(self) -> int:
        """Most tokens of a row, up to its last supervised one."""
        return max(map(length_of, self.rows), default=longest_row(self.recipe, self.files))

    @property
    def reads_states(self) -> bool:
        """Whether the target's states come from a store."""
        return self.recipe.data.states is not None


def planned_memory(run: PlannedRun) -> dict[str, float]:
    """Peak bytes of one process on its device by part: what it always holds, and the widest of four moments.

    Gradients of earlier micro-batches, and the buckets in which processes exchange gradients, are alive beside each
    moment. On a GPU AdamW updates all parameters at once and needs one more copy. DeepSpeed's ZeRO updates float32
    pieces of its own beside the weights, which are in host memory, as the moments are, if they are offloaded.
    """
    section, shape, size, on_cpu = run.recipe.train, run.shape, run.size, run.device.is_cpu
    whole, zero = 4 * run.parameters, section.zero_stage
    weights, adamw, gradients, gathered = whole, 2 * whole, whole, 0
    buckets = whole if run.processes > 1 else 0
    if zero:
        piece = -(-whole // run.processes)
        updated = 0 if section.offload_optimizer and not on_cpu else piece
        weights, adamw = (piece if zero == 3 else whole) + updated, 2 * updated
        gradients, gathered = whole if zero == 1 else piece, whole if zero == 3 else 0
        buckets = 2 * min(whole, 4 * BUCKET)

    tokens, rows = run.longest_tokens, min(section.batch_size, len(run.rows) or section.batch_size)
    columns = max((taught_tokens(row.spans) for row in run.rows), default=tokens)
    sizes = rows, tokens, columns, run.device.type
    unroll = dry_run(section, shape, run.files.text_config, size.dtype, *sizes).peak_bytes
    target_pass = target_forward_bytes(run.files.text_config, size, rows, tokens, len(shape.capture_layers))
    kept = gradients * (section.gradient_accumulation_steps > 1) + buckets
    moments: list[dict[str, float]] = [
        {TARGET_PASS: 0 if run.reads_states else target_pass, WEIGHT_SHAPED: kept},
        {**unroll, WEIGHT_SHAPED: unroll.get(WEIGHT_SHAPED, 0) + kept + gathered},
        {UPDATE: gradients + (0 if on_cpu else adamw // 2), WEIGHT_SHAPED: buckets},
        {REPLAY: planned_replay_bytes(run), WEIGHT_SHAPED: buckets + gathered},
    ]
    widest = max(moments, key=lambda moment: sum(moment.values()))
    always = {TARGET_WEIGHTS: size.weight_bytes, KEPT: weights + adamw}
    always[PROCESS] = psutil.Process().memory_info().rss if on_cpu else CUDA_CONTEXT_BYTES
    always[RESERVE] = (CPU_RESERVE if on_cpu else GPU_RESERVE) * sum(widest.values())
    return {part: count for part, count in (always | widest).items() if count}


def planned_replay_bytes(run: PlannedRun) -> float:
    """Memory of the widest batch of train.eval_replay, if all its answers were as long as the longest row."""
    if not run.recipe.train.eval_replay:
        return 0
    rows, longest, tree = run.recipe.eval.replay_batch_size, run.longest_tokens, run.recipe.eval.tree
    if run.rows:
        rows = min(rows, sum(len(row.spans) for row in run.validation_rows))
    shape, size, layers = run.shape, run.size, len(run.shape.capture_layers)
    states = layers * shape.hidden_size * size.dtype.itemsize
    kept = replay_bytes(rows * longest, rows, longest, states, shape.column_bytes)
    tokens = max(longest, pass_tokens(run.device.type))
    target_pass = 0 if run.reads_states else target_forward_bytes(run.files.text_config, size, 1, tokens, layers)
    # Logits and probabilities of a draft call's nodes, in float32; the first call's prompt columns need no more.
    expanded = 1 if tree.policy in CHAINS else tree.width
    return kept + max(target_pass, 3 * 4 * rows * expanded * shape.draft_vocab_size)
