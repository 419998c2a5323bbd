"""The memory of one micro-batch of training, found by running it on fake tensors: no memory, no arithmetic, seconds.

Formulas for the unroll could grow stale. Instead the real unroll, with the real teacher and loss, runs forward and
backward at the requested size, while a meter counts the bytes that are alive.

Shapes: B rows, T tokens, C counted columns, V target vocabulary, Vd draft vocabulary.
"""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from draftsmith.models.alignment import Columns, Run
from draftsmith.models.costs import Meter
from draftsmith.models.drafters import build_drafter
from draftsmith.models.families import scaled_logits
from draftsmith.models.feature_drafter import DrafterConfig, FeatureDrafter, FrozenHead
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.attention.kernels import FLASH_CPU
from draftsmith.train.loss.head_loss import elements_of
from draftsmith.train.loss.unroll import TrainingTimeTest, add_noise, teacher_of

LOGITS = "logits of a chunk of columns, the teacher's and the unroll steps'"
WEIGHT_SHAPED = "gradients and casts of the drafter's weights"
LAYER = "states, and the drafter's layer in the unroll steps"


def unroll_peak(
    shape: DrafterConfig,
    target_config: Any,
    target_dtype: torch.dtype,
    trainee_of: Callable[[FeatureDrafter], TrainingTimeTest],
    noisy: bool,
    bf16: bool,
    rows: int,
    tokens: int,
    columns: int,
    device: str = "cpu",
) -> dict[str, int]:
    """The peak bytes of a micro-batch of these sizes by kind, with teacher and backward pass, without the weights of
    drafter and target. Takes seconds, more for more chunks of logits.

    Args:
        trainee_of: adds the run's unroll and loss to a drafter.
        noisy: whether there is feature noise.
        bf16: whether products are in bfloat16.
        device: type of the run's device, which decides how many logits are alive.
    """
    columns = max(1, min(columns, tokens))
    vocab = DraftVocab(torch.arange(shape.draft_vocab_size), shape.vocab_size)
    with FakeTensorMode(allow_non_fake_inputs=True):
        embedding = torch.empty(shape.vocab_size, shape.hidden_size, dtype=target_dtype)
        head = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False, dtype=target_dtype)
        frozen = FrozenHead(head.weight, None, partial(scaled_logits, target_config))
        trainee = trainee_of(build_drafter(shape, vocab, frozen))
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
            if noisy:
                captured = add_noise(captured, 1.0, [tokens] * rows, [""] * rows)
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                inputs = target.inputs(ids, dtype=trainee.drafter.dtype)
                return trainee(captured, inputs, counted, teacher).loss

        with Meter(kind) as meter:
            micro_batch().backward()
    return dict(meter.peak_by_kind)
