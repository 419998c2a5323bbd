"""Memory and operations of one micro-batch of training, found by running it on fake tensors: no memory, no arithmetic.

The real unroll, with the real teacher and loss, runs forward and backward at the requested size, which takes seconds.
A meter counts the bytes that are alive, torch's counter the operations of matrix products.

Shapes: B rows, T tokens, C counted columns, V target vocabulary, Vd draft vocabulary.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.models.alignment import Columns, Run
from draftsmith.models.costs import Meter, TargetSize, attention_shapes
from draftsmith.models.drafter_base import DrafterConfig, FrozenHead
from draftsmith.models.drafters import build_drafter
from draftsmith.models.families import scaled_logits
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.sections.train import TrainSection
from draftsmith.train.attention.kernels import FLASH_CPU
from draftsmith.train.loss.head_loss import elements_of
from draftsmith.train.loss.unroll import add_noise, teacher_of
from draftsmith.train.run.settings import trainee_of, uses_bf16

LOGITS = "logits of a chunk of columns, the teacher's and the unroll steps'"
WEIGHT_SHAPED = "gradients and casts of the drafter's weights"
LAYER = "states, and the drafter's layer in the unroll steps"


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
