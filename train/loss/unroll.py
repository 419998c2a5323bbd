"""Training-time test: the drafter reads its own outputs for K steps, as it will when it drafts a chain.

`models.alignment` defines what each column reads and predicts. This file has the attention and the loop over steps, the
same for every drafter of `models.feature_drafter`. K = 1 is EAGLE-1. The papers of HASS and PosS keep targets in place
and shift features to the right; seen from the chain's root, theirs is the same unroll.

The query of column t at step k sees, as a chain drafted below root x[t+1] would (EAGLE-3, section 3.2):

    step-0 keys of columns 0..t         made from the target's states         one causal part, the same at every step
    its own column's keys of steps 1..k made from its own earlier outputs     k single scores

so one softmax runs over t + 1 + k scores. No [T, k*T] mask exists. Masked scores are left out of the softmax; the
published HASS and PosS code multiplies scores by 0 instead, which leaves exp(0) in its denominator for every masked
column. Columns that do not count need only a step-0 key and value, because they are never queried. With several draft
layers, the lower ones run step 0 on all columns.

Documents that share a row (`models.alignment.Documents`) never see each other. Attention runs on one document's prefix
after another; everything else runs on the whole row, without padding of tokens or counted columns.

Each stack of layers has keys and values of its own. Where the stack changes (`models.poss`), the new one computes them
from the same step-0 features and from the drafted features of steps 1..k-1, which it gets without their history:

    step               0     1     2     3          two positions a stack: gradients of step 3 end at this line |
    stack              0     0     1     1
    feature            f[t]  a_0 | a_1   a_2        a_1 | is cut off, and a_0 is when stack 1 reads it again

A drafter reads tokens as the target's first layer does (`models.prompt.DecoderInputs`), not as ids. They are the data's
tokens at every step, never the drafter's guesses (those lowered acceptance from 5.0 to 4.44 in one reproduction).

Shapes: B rows, T tokens, F captured states, C counted columns, A query heads, G key/value heads, R = A/G, D head
dimension, H hidden size, W entry width, K steps, Vd draft vocabulary.
"""

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from draftsmith.models.alignment import Columns, Documents, Run
from draftsmith.models.feature_drafter import DrafterConfig, DraftLayer, FeatureDrafter
from draftsmith.models.layers import for_products, product_dtype
from draftsmith.models.prompt import DecoderInputs
from draftsmith.models.target import Target
from draftsmith.models.target_columns import TextColumns
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.schema import Detach, StepWeight
from draftsmith.train.attention.kernels import Kernel, kernel_for
from draftsmith.train.attention.merged import merged_attention, runs_of_documents
from draftsmith.train.loss.head_loss import HeadLoss, Teacher
from draftsmith.train.loss.losses import LossWeights, feature_regression
from draftsmith.train.loss.step_weights import acceptance_weights, fixed_weights

# For each layer: keys and values of steps 1, 2, ... of the counted columns, [B, G, C, D] each.
OwnColumns = list[tuple[list[torch.Tensor], list[torch.Tensor]]]
NOISE_TOKENS = 512  # feature noise has the requested width in rows of this many tokens


class _Chains:
    """The keys and values of one stack of layers, for all counted columns at once.

    Args:
        entry_BTW: inputs of step 0, for all columns.
        runs: of the counted columns.
    """

    def __init__(
        self,
        drafter: FeatureDrafter,
        layers: Sequence[DraftLayer],
        entry_BTW: torch.Tensor,
        position_BT: torch.Tensor,
        columns: Columns,
        documents: Documents | None,
        runs: Sequence[Run],
        kernel: Kernel,
    ):
        self.drafter, self.layers = drafter, layers
        self.runs, self.kernel = runs, kernel
        rows, tokens = entry_BTW.shape[:2]
        self.position = columns.gather(position_BT)  # [B, C]
        rotary = drafter.rotary(entry_BTW, position_BT)
        self.prefix: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each layer: [B, G, T, D] keys and values
        h = entry_BTW
        for layer in layers:
            x, residual = _enter(layer, h)
            keys, values = layer.self_attn.keys_values(x, *rotary)
            self.prefix.append((keys, values))
            if layer is not layers[-1]:  # the layer above needs a key of every column
                whole = runs_of_documents(documents, rows, tokens)
                query = layer.self_attn.queries(x, *rotary)
                h = layer.finish(residual, merged_attention(query, keys, values, [], [], whole, kernel))
        # Only the counted columns query the last layer.
        self.first_input = columns.gather(x), columns.gather(residual)
        self.own: OwnColumns = [([], []) for _ in layers]

    def first_step(self) -> torch.Tensor:
        """Outputs [B, C, H] of step 0."""
        layer, (x, residual) = self.layers[-1], self.first_input
        query = layer.self_attn.queries(x, *self.drafter.rotary(residual, self.position))
        return layer.finish(residual, merged_attention(query, *self.prefix[-1], [], [], self.runs, self.kernel))

    def read(self, entry_BCW: torch.Tensor, step: int) -> None:
        """Adds keys and values of a step that another stack drafted."""
        [layer], [(keys, values)] = self.layers, self.own
        x = _enter(layer, entry_BCW)[0]
        key, value = layer.self_attn.keys_values(x, *self.drafter.rotary(entry_BCW, self.position + step))
        self.own = [([*keys, key], [*values, value])]

    def later_step(self, entry_BCW: torch.Tensor, step: int, own: OwnColumns) -> tuple[torch.Tensor, OwnColumns]:
        """Outputs [B, C, H] of a step above 0, and `own` with its keys and values added.

        `own` is passed in and returned: a checkpointed step must read the same when it runs again.
        """
        grown: OwnColumns = []
        h = entry_BCW
        cos, sin = self.drafter.rotary(h, self.position + step)
        for layer, prefix, (own_keys, own_values) in zip(self.layers, self.prefix, own, strict=True):
            x, residual = _enter(layer, h)
            key, value = layer.self_attn.keys_values(x, cos, sin)
            query = layer.self_attn.queries(x, cos, sin)
            keys, values = [*own_keys, key], [*own_values, value]
            h = layer.finish(residual, merged_attention(query, *prefix, keys, values, self.runs, self.kernel))
            grown.append((keys, values))
        return h, grown


def _enter(layer: DraftLayer, entry: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(the attention's input in the precision of products, the residual stream in its own)."""
    x, residual = layer.enter(entry)
    return for_products(x), residual


def kernel_of(config: DrafterConfig, device: torch.device, dtype: torch.dtype) -> Kernel:
    """The kernel of a drafter's attention, with products in this precision."""
    kind = torch.device(device.type)  # one trial for `cuda` and `cuda:0`
    return kernel_for(kind, dtype, config.num_attention_heads, config.num_key_value_heads, config.head_dim)


def unroll(
    drafter: FeatureDrafter,
    captured_BTF: torch.Tensor,
    inputs_BT: DecoderInputs,
    columns: Columns,
    steps: int,
    gradient_checkpointing: bool = False,
    detach: Detach = False,
    documents: Documents | None = None,
    kernel: Kernel | None = None,
) -> Iterator[torch.Tensor]:
    """Yields the layer's outputs [B, C, H] of steps 0 to `steps` - 1 for the counted columns.

    At step k only columns with `columns.counted(k)` are meaningful; the others must be masked.

    Args:
        inputs_BT: the tokens as the target's first layer reads them.
        detach: whether gradients never flow from one step to the one before (HASS), or not where the stack changes.
        documents: packed documents; None: every row is one.
        kernel: of attention; None: the best for the device.
    """
    rows, tokens = captured_BTF.shape[:2]
    places = documents.places if documents is not None else [(row, 0, tokens) for row in range(rows)]
    # A document's last column never counts, so what stands behind it does not matter.
    read = drafter.target_columns(captured_BTF, inputs_BT.following(), [TextColumns(*place) for place in places])
    columns, documents = read.renumbered(columns, documents)
    entry_BTW = drafter.entry_in_context(drafter.fuse(read.captured), read.embeddings, *read.context)
    if kernel is None:
        kernel = kernel_of(drafter.config, entry_BTW.device, product_dtype(entry_BTW.device, drafter.dtype))

    def run(function, *args):
        # Not the reentrant form: it gives outputs inside containers no gradient.
        return checkpoint(function, *args, use_reentrant=False) if gradient_checkpointing else function(*args)

    def entry_of(feature: torch.Tensor, step: int) -> torch.Tensor:
        context = (columns.gather(each) for each in read.context)
        return drafter.entry_in_context(feature, columns.gather(read.embeddings, step), *context)

    stack = drafter.stack_of(0)
    common = entry_BTW, read.positions, columns, documents, columns.runs(documents), kernel
    chains = _Chains(drafter, drafter.stacks[stack], *common)
    output = run(chains.first_step)
    yield output
    drafted: list[torch.Tensor] = []  # features of steps 1, 2, ... for the next stack
    for step in range(1, steps):
        feature = drafter.feedback(output)
        handed = feature.detach() if detach else feature
        if drafter.stack_of(step) != stack:
            stack, feature = drafter.stack_of(step), handed
            chains = _Chains(drafter, drafter.stacks[stack], *common)
            for earlier, its_feature in enumerate(drafted, start=1):
                chains.read(entry_of(its_feature, earlier), earlier)
        elif detach is True:
            feature = handed
        output, chains.own = run(
            lambda f, k, own, c=chains: c.later_step(entry_of(f, k), k, own), feature, step, chains.own
        )
        if len(drafter.stacks) > 1:
            drafted.append(handed)
        yield output


def add_noise(
    captured_BTF: torch.Tensor,
    width: float,
    lengths: Sequence[int],
    draws: Sequence[str],
    documents: Documents | None = None,
) -> torch.Tensor:
    """captured + (u - 1/2) * width * 512 / length of the training row, u uniform on [0, 1).

    Feature noise (EAGLE-1, arXiv 2401.15077, section 3.2): the drafter will read features that it drafted itself, so it
    learns from features that differ a little from the target's. Every training row has random numbers of its own.
    Padding and other rows of the batch do not change them, and a resumed run draws the same ones.

    Args:
        lengths: tokens of each training row without padding. Padding stays as it is.
        draws: names the random numbers of each row, for example by seed, epoch and row.
        documents: places of the rows; None: row i begins row i of the batch.
    """
    places = documents.places if documents is not None else [(i, 0, length) for i, length in enumerate(lengths)]
    noisy = captured_BTF.float() if captured_BTF.dtype != torch.float64 else captured_BTF
    noisy = noisy.clone()
    for (row, start, length), draw in zip(places, draws, strict=True):
        seed = int.from_bytes(hashlib.sha256(draw.encode()).digest()[:7], "big")
        generator = torch.Generator(device=captured_BTF.device).manual_seed(seed)
        u = torch.rand(length, captured_BTF.shape[2], generator=generator, device=captured_BTF.device)
        noisy[row, start : start + length] += (u - 0.5) * (width * NOISE_TOKENS / length)
    return noisy.to(captured_BTF.dtype)


@torch.no_grad()
def teacher_of(
    target: Target, last_BTH: torch.Tensor, ids_BT: torch.Tensor, columns: Columns, vocab: DraftVocab
) -> Teacher:
    """The teacher of the counted columns: the target at position t+1 of each."""
    label_drafted = vocab.to_draft(columns.gather(ids_BT, 2)) >= 0
    return Teacher(columns.gather(last_BTH, 1), target.logits, label_drafted)


class UnrollSums(NamedTuple):
    """Sums over one micro-batch. They are added over micro-batches and ranks before any division.

    A tuple, because ZeRO-3 finds no tensors in other results of a forward pass, and warns.
    """

    loss: torch.Tensor  # scalar, with gradient: sum over trained columns and steps of losses times `step_weights`
    columns: torch.Tensor  # scalar: columns that count at step 0, the loss's denominator
    reached: torch.Tensor  # [K] columns that a chain can reach at step k
    correct: torch.Tensor  # [K] of those, columns where drafter and target agree on the likeliest token
    trained: torch.Tensor  # [K] columns with a loss at step k


class TrainingTimeTest(nn.Module):
    """The drafter with its unroll and loss as one module: wrappers for many processes need a single forward.

    Draft vocabulary. Among the columns that count (`models.alignment`), step k
    - *reaches* a column if the k tokens drafted before, x[t+2] ... x[t+1+k], are all in the draft vocabulary: no chain
      gets past a token that cannot be drafted;
    - *trains* on a reached column if the target's likeliest token is in the draft vocabulary too (as EAGLE-3 does).
      Elsewhere the restricted teacher would teach a token that greedy verification always rejects.
    Accuracy is over reached columns; a likeliest token outside the draft vocabulary is a miss, as in decoding.

    Args:
        kernel: of attention; None: the best of the device.
    """

    def __init__(
        self,
        drafter: FeatureDrafter,
        steps: int,
        step_weight: StepWeight,
        gradient_checkpointing: bool = False,
        weights: LossWeights | None = None,
        detach: Detach = False,
        kernel: Kernel | None = None,
    ):
        super().__init__()
        self.drafter = drafter
        self.steps = steps
        self.step_weight: StepWeight = step_weight
        self.gradient_checkpointing = gradient_checkpointing
        self.weights = weights or LossWeights()
        self.detach: Detach = detach
        self.kernel = kernel
        self.logits_at_once: int | None = None  # of a chunk in the head's pass; None: by device
        self.bf16 = False  # products in bfloat16
        self.caches_casts = True  # bfloat16 weights; off where weights are freed after use

    def forward(
        self,
        captured_BTF: torch.Tensor,
        inputs_BT: DecoderInputs,
        columns: Columns,
        teacher: Teacher,
        documents: Documents | None = None,
    ) -> UnrollSums:
        # Inside forward, because DeepSpeed switches off the caller's autocast.
        device = captured_BTF.device.type
        products = (
            torch.autocast(device, torch.bfloat16, cache_enabled=self.caches_casts) if self.bf16 else nullcontext()
        )
        # Sums of frozen weights and LoRA are computed once. Checkpointing must find the same work in both passes.
        sums = nullcontext() if self.gradient_checkpointing else parametrize.cached()
        with products, sums:
            return self._sums(captured_BTF, inputs_BT, columns, teacher, documents)

    def _sums(
        self,
        captured_BTF: torch.Tensor,
        inputs_BT: DecoderInputs,
        columns: Columns,
        teacher: Teacher,
        documents: Documents | None,
    ) -> UnrollSums:
        how = self.gradient_checkpointing, self.detach, documents, self.kernel
        fixed = fixed_weights(self.step_weight, self.steps)
        # Before the unroll: a copy to the device waits for work that was queued before it.
        weights_KBC = torch.tensor(fixed or [1.0] * self.steps, device=captured_BTF.device)[:, None, None]
        outputs = list(unroll(self.drafter, captured_BTF, inputs_BT, columns, self.steps, *how))
        reached_KBC = self._reached(columns, teacher)
        head_loss = HeadLoss(teacher, self.drafter.vocab, reached_KBC, self.weights, weights_KBC, self.logits_at_once)
        if fixed is None:
            weights_KBC = acceptance_weights(*self.drafter.head_loss(outputs, head_loss.acceptance))
            head_loss = replace(head_loss, step_weights=weights_KBC)
        loss, correct, trained_KBC = self.drafter.head_loss(outputs, head_loss)
        if self.weights.feature:
            weights_KBC = weights_KBC * trained_KBC
            for step, output_BCH in enumerate(outputs):
                # The last columns would need a teacher beyond their row. They do not count.
                inside = max(0, output_BCH.shape[1] - step)
                pairs = output_BCH[:, :inside], teacher.states[:, step:], weights_KBC[step, :, :inside]
                distance = feature_regression(*(each.flatten(0, 1) for each in pairs))
                loss = loss + self.weights.feature * distance
        return UnrollSums(
            loss=loss,
            columns=columns.counted(0).sum(),
            reached=reached_KBC.sum((1, 2)),
            correct=correct,
            trained=trained_KBC.sum((1, 2)),
        )

    def _reached(self, columns: Columns, teacher: Teacher) -> torch.Tensor:
        """[K, B, C] whether a chain can reach the column at each step."""
        width = columns.index.shape[1]
        reachable, reached = torch.ones_like(teacher.label_drafted), []
        for step in range(self.steps):
            reached.append(columns.counted(step) & reachable)
            drafted_next = torch.zeros_like(reachable)
            drafted_next[:, : max(0, width - step)] = teacher.label_drafted[:, step:]
            reachable = reachable & drafted_next
        return torch.stack(reached)


def simulated_tau(accuracy: list[float]) -> float:
    """1 + sum_k prod_{i <= k} accuracy_i: the tau of a chain of K tokens if its steps were independent."""
    tau, survival = 1.0, 1.0
    for value in accuracy:
        survival *= value
        tau += survival
    return tau
