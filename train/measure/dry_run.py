"""Memory and operations of training, by part.

One micro-batch is run on fake tensors, without memory or arithmetic: the real unroll, with the real teacher and loss,
forward and backward at the requested size. A meter counts the bytes that are alive, torch's counter the operations of
matrix products. Formulas (`models.sizes`) cover the target's pass, the optimiser, replay, and the process itself.

Shapes: B rows, T tokens, C counted columns, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import psutil
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.data_gen.states.store import length_of, taught_tokens
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.eval.replay.replay import pass_tokens, replay_bytes
from draftsmith.models.alignment import Columns, Run
from draftsmith.models.drafter_base import DrafterConfig, FrozenHead
from draftsmith.models.drafters import build_drafter, trainable_parameters
from draftsmith.models.families import scaled_logits
from draftsmith.models.sizes import Device, Meter, TargetSize, attention_shapes, target_forward_bytes
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles, longest_row
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import CHAINS
from draftsmith.recipes.sections.train import TrainSection
from draftsmith.train.attention.kernels import FLASH_CPU
from draftsmith.train.loss.head_loss import elements_of
from draftsmith.train.loss.unroll import add_noise, teacher_of
from draftsmith.train.run.engine import trainee_of, uses_bf16

CUDA_CONTEXT_BYTES = 500_000_000  # on a device, by CUDA itself
BUCKET = 500_000_000  # gradients that DeepSpeed sends at a time, at most; two buckets are under way
# Freed memory that an allocator keeps, as a share of a micro-batch's tensors. Micro-batches differ in length, and
# glibc's malloc keeps the pieces: 0.4 on the demo (docs/training.md).
CPU_RESERVE = 1.5
GPU_RESERVE = 0.15

# Parts of the memory.
LOGITS = "logits of a chunk of columns, the teacher's and the unroll steps'"
WEIGHT_SHAPED = "gradients and casts of the drafter's weights"
LAYER = "states, and the drafter's layer in the unroll steps"
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


def products_flops(products: int, query: torch.Size, keys: int, causal: bool) -> int:
    """Operations of products of queries [1, heads, n, D] with keys; a causal query sees half of them."""
    return 2 * products * query.numel() * keys // (2 if causal else 1)


def forward_flops(query: Any, keys: Any, _: Any, dropout: float = 0.0, causal: bool = False, **__: Any) -> int:
    return products_flops(2, query, keys[2], causal)


def backward_flops(_: Any, query: Any, keys: Any, *rest: Any, **__: Any) -> int:
    """`rest`: values, output, log-sum-exp, dropout, causal. That the scores are computed again does not count."""
    return products_flops(4, query, keys[2], rest[4])


# Torch's counter knows no formulas for the CPU's kernel.
CPU_FLASH_FLOPS = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: forward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: backward_flops,
}


class DryRun(NamedTuple):
    peak_bytes: dict[str, int]  # by kind
    flops: int  # a multiplication with its addition counts as two


def dry_run(
    section: TrainSection,
    shape: DrafterConfig,
    target_config: Any,
    target_dtype: torch.dtype,
    rows: int,
    tokens: int,
    columns: int,
    device: str = "cpu",
) -> DryRun:
    """A micro-batch of these sizes, with teacher and backward pass, without the target's layers. Weights of drafter and
    target are not among the bytes. The type of the run's `device` decides how many logits are alive.
    """
    columns = max(1, min(columns, tokens))
    vocab = DraftVocab(torch.arange(shape.draft_vocab_size), shape.vocab_size)
    with FakeTensorMode(allow_non_fake_inputs=True):
        embedding = torch.empty(shape.vocab_size, shape.hidden_size, dtype=target_dtype)
        head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, dtype=target_dtype)
        frozen = FrozenHead(head.weight, None, partial(scaled_logits, target_config))
        trainee = trainee_of(section, build_drafter(shape, vocab, frozen))
        trainee.logits_at_once = elements_of(device)
        target: Any = object.__new__(Target)  # its head and embeddings
        target.head, target.config = head, target_config
        target.embedding, target.embedding_scale = SimpleNamespace(weight=embedding), shape.embedding_scale
        trainee.kernel = trainee.kernel or FLASH_CPU  # a kernel cannot be tried on fake tensors
        ids = torch.zeros(rows, tokens, dtype=torch.long)
        first = max(0, tokens - columns - 2)  # one span, at the end of each row
        index = torch.arange(first, first + columns).expand(rows, columns).contiguous()
        runs = tuple(Run(row, 0, columns, 0, first) for row in range(rows))
        counted = Columns(index, torch.full((rows, columns), trainee.steps), runs)
        weights = {tuple(p.shape) for p in trainee.parameters()} | {tuple(p.shape[::-1]) for p in trainee.parameters()}

        def kind(tensor: torch.Tensor) -> str:
            sizes = tuple(tensor.shape)
            if sizes in weights:
                return WEIGHT_SHAPED
            return LOGITS if sizes[-1:] in ((shape.draft_vocab_size,), (shape.vocab_size,)) else LAYER

        def micro_batch() -> torch.Tensor:
            """As `Loop._forward`: the target's states are freed once the unroll no longer needs them."""
            captured = torch.empty(rows, tokens, shape.hidden_size * len(shape.capture_layers), dtype=target_dtype)
            last = torch.empty(rows, tokens, shape.hidden_size, dtype=target_dtype)
            teacher = teacher_of(target, last, ids, counted, vocab)
            if section.feature_noise > 0:
                captured = add_noise(captured, 1.0, [tokens] * rows, [""] * rows)
            with torch.autocast("cpu", torch.bfloat16, enabled=uses_bf16(section)):
                inputs = target.inputs(ids, dtype=trainee.drafter.dtype)
                return trainee(captured, inputs, counted, teacher).loss

        # The meter is asked first: the counter takes operations that it does not know apart.
        with FlopCounterMode(display=False, custom_mapping=CPU_FLASH_FLOPS) as counter, Meter(kind) as meter:
            micro_batch().backward()
    return DryRun(dict(meter.peak_by_kind), counter.get_total_flops())


def row_flops(
    section: TrainSection,
    shape: DrafterConfig,
    target_config: Any,
    size: TargetSize,
    reads_states: bool,
    tokens: int,
    columns: int,
) -> int:
    """The operations of a training step for one row without pictures. What the backward pass repeats counts once.

    The target's layers take two for each active parameter and token, and the scores and weighted values of the keys up
    to each token. The rest is counted in a dry run: matrix products and attention, with every column at every step.

    Args:
        reads_states: from a store; the target's layers do not run.
    """
    plain = section.model_copy(update={"gradient_checkpointing": False})
    flops = dry_run(plain, shape, target_config, size.dtype, 1, tokens, columns, "cuda").flops  # the fewest chunks
    if reads_states:
        return flops
    scores = sum(4 * heads * head_dim for heads, _, head_dim in attention_shapes(target_config))
    return flops + 2 * size.active_parameters * tokens + scores * tokens * (tokens + 1) // 2


# The peak of a process.


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
    section, shape, size, on_cpu = run.recipe.train, run.shape, run.size, run.device.type == "cpu"
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
