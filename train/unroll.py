"""Training-time test: the drafter reads its own outputs for K steps, as it will when it drafts a chain.

Which column reads and predicts what is `models.alignment`; this file is the attention and the loop over steps.

The query of column t at step k sees, as a chain drafted below root x[t+1] would (EAGLE-3, section 3.2):

    step-0 keys of columns 0..t         made from the target's states         one causal part, the same at every step
    its own column's keys of steps 1..k made from its own earlier outputs     k single scores

so one softmax runs over t + 1 + k scores. No [T, k*T] mask exists. Columns that do not count leave a step-0 key and
value and are never queried: with one draft layer nothing else of them is read.

Tokens are the data's at every step, never the drafter's own guesses (feeding guesses lowers acceptance: 5.0 to 4.44 in
one published reproduction).

Shapes: B rows, T tokens, C counted columns, A query heads, G key/value heads, R = A/G, D head dimension, H hidden size,
K steps, Vd draft vocabulary.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from draftsmith.models.alignment import Columns
from draftsmith.models.eagle3 import Eagle3Drafter
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.losses import soft_cross_entropy


def merged_attention(
    query_BACD: torch.Tensor,
    prefix_keys_BGTD: torch.Tensor,
    prefix_values_BGTD: torch.Tensor,
    own_keys: list[torch.Tensor],
    own_values: list[torch.Tensor],
    visible_BCT: torch.Tensor,
) -> torch.Tensor:
    """One softmax over the visible step-0 keys and the column's own later keys: [B, A, C, D].

    Args:
        own_keys, own_values: one [B, G, C, D] for each of the steps 1..k.
        visible_BCT: True where column c sees step-0 key t.
    """
    groups = prefix_keys_BGTD.shape[1]
    query = query_BACD.unflatten(1, (groups, -1)) * query_BACD.shape[-1] ** -0.5  # [B, G, R, C, D]
    prefix = query @ prefix_keys_BGTD[:, :, None].transpose(-1, -2)  # [B, G, R, C, T]
    scores = [prefix.float().masked_fill(~visible_BCT[:, None, None], float("-inf"))]
    scores += [(query * key[:, :, None]).sum(-1, keepdim=True).float() for key in own_keys]  # each [B, G, R, C, 1]
    weights = torch.cat(scores, dim=-1).softmax(dim=-1)
    length = prefix_keys_BGTD.shape[2]
    attended = (weights[..., :length].to(prefix_values_BGTD.dtype) @ prefix_values_BGTD[:, :, None]).float()
    for step, value in enumerate(own_values):
        attended = attended + weights[..., length + step, None] * value[:, :, None]
    return attended.to(query_BACD.dtype).flatten(1, 2)


def unroll(
    drafter: Eagle3Drafter,
    captured_BTF: torch.Tensor,
    ids_BT: torch.Tensor,
    columns: Columns,
    steps: int,
    gradient_checkpointing: bool = False,
) -> Iterator[torch.Tensor]:
    """Yields the layer's outputs [B, C, H] of steps 0 to `steps` - 1 for the counted columns; none is detached.

    At step k only columns with `columns.counted(k)` mean anything; the others compute along and must be masked.
    """
    layer, attention = drafter.midlayer, drafter.midlayer.self_attn
    feature_BTH = drafter.fuse(captured_BTF)
    following = torch.cat((ids_BT[:, 1:], ids_BT[:, -1:]), dim=1)  # [B, T] x[t+1]; the last column never counts
    x = layer.attention_input(feature_BTH, drafter.embed(following))
    position = torch.arange(ids_BT.shape[1], device=ids_BT.device)[None]
    prefix_keys, prefix_values = attention.keys_values(x, *drafter.rotary(x, position.expand_as(ids_BT)))
    visible = position[None] <= columns.index[:, :, None]  # [B, C, T]

    def first_step(x_BCW: torch.Tensor, feature: torch.Tensor) -> torch.Tensor:
        query = attention.queries(x_BCW, *drafter.rotary(x_BCW, columns.index))
        return layer.finish(feature, merged_attention(query, prefix_keys, prefix_values, [], [], visible))

    def later_step(
        feature: torch.Tensor, step: int, own_keys: list[torch.Tensor], own_values: list[torch.Tensor]
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        x = layer.attention_input(feature, drafter.embed(columns.gather(ids_BT, 1 + step)))
        cos, sin = drafter.rotary(x, columns.index + step)
        key, value = attention.keys_values(x, cos, sin)
        attended = merged_attention(
            attention.queries(x, cos, sin),
            prefix_keys,
            prefix_values,
            [*own_keys, key],
            [*own_values, value],
            visible,
        )
        return layer.finish(feature, attended), key, value

    def run(function, *args):
        # The non-reentrant form: the reentrant one gives outputs inside containers no gradient at all.
        return checkpoint(function, *args, use_reentrant=False) if gradient_checkpointing else function(*args)

    output = run(first_step, columns.gather(x), columns.gather(feature_BTH))
    yield output
    own_keys: list[torch.Tensor] = []
    own_values: list[torch.Tensor] = []
    for step in range(1, steps):
        output, key, value = run(later_step, output, step, own_keys, own_values)
        own_keys, own_values = [*own_keys, key], [*own_values, value]
        yield output


@dataclass(frozen=True)
class Teacher:
    """The target's view of every column at step 0; step k of column c is column c + k here (`models.alignment`)."""

    probabilities: torch.Tensor  # [B, C, Vd] the target's distribution restricted to the draft vocabulary, renormalised
    best: torch.Tensor  # [B, C] the target's likeliest token as a draft id, -1 where the draft vocabulary lacks it
    label_drafted: torch.Tensor  # [B, C] whether the data's token x[t+2] is in the draft vocabulary


@torch.no_grad()
def teacher_of(
    target: Target, last_BTH: torch.Tensor, ids_BT: torch.Tensor, columns: Columns, vocab: DraftVocab
) -> Teacher:
    """Runs the target's head over the counted positions only (teacher position t+1 of each column)."""
    logits_BCV = target.logits(columns.gather(last_BTH, 1))
    return Teacher(
        probabilities=functional.softmax(logits_BCV[..., vocab.target_ids.to(logits_BCV.device)], dim=-1),
        best=vocab.to_draft(logits_BCV.argmax(-1)),
        label_drafted=vocab.to_draft(columns.gather(ids_BT, 2)) >= 0,
    )


@dataclass(frozen=True)
class UnrollSums:
    """Sums over one micro-batch, to be added over micro-batches and ranks before any division."""

    loss: (
        torch.Tensor
    )  # scalar, with gradient: sum_k step_weight^k * sum over trained columns of the soft cross-entropy
    columns: torch.Tensor  # scalar: columns counted at step 0, the loss's denominator
    reached: torch.Tensor  # [K] columns that a chain can reach at step k
    correct: torch.Tensor  # [K] of those, where drafter and target agree on the likeliest token
    trained: torch.Tensor  # [K] columns with a loss at step k


class TrainingTimeTest(nn.Module):
    """The drafter with its unroll and loss as one module, so that wrappers for many processes see a single forward.

    Draft vocabulary. Of the columns that count (`models.alignment`) step k
    - *reaches* a column only if the k tokens drafted before, x[t+2] ... x[t+1+k], are all in the draft vocabulary: no
      chain gets past a token that cannot be drafted;
    - *trains* on it only if the target's likeliest token is in the draft vocabulary as well (as EAGLE-3 does): there
      the restricted teacher would teach a token that greedy verification rejects for certain.
    Accuracy is over reached columns; a likeliest token outside the draft vocabulary is a miss, as in decoding.
    """

    def __init__(self, drafter: Eagle3Drafter, steps: int, step_weight: float, gradient_checkpointing: bool = False):
        super().__init__()
        self.drafter = drafter
        self.steps = steps
        self.step_weight = step_weight
        self.gradient_checkpointing = gradient_checkpointing

    def forward(
        self, captured_BTF: torch.Tensor, ids_BT: torch.Tensor, columns: Columns, teacher: Teacher
    ) -> UnrollSums:
        outputs = unroll(self.drafter, captured_BTF, ids_BT, columns, self.steps, self.gradient_checkpointing)
        width = columns.index.shape[1]
        reachable = torch.ones_like(teacher.label_drafted)
        loss = captured_BTF.new_zeros((), dtype=torch.float32)
        reached, correct, trained = [], [], []
        for step, output_BCH in enumerate(outputs):
            inside = max(0, width - step)  # later columns would need a teacher beyond their row: none of them counts
            best = teacher.best[:, step:]
            reached_BC = (columns.counted(step) & reachable)[:, :inside]
            trained_BC = reached_BC & (best >= 0)
            logits_BCV = self.drafter.logits(output_BCH[:, :inside])
            step_loss = soft_cross_entropy(
                logits_BCV.flatten(0, 1), teacher.probabilities[:, step:].flatten(0, 1), trained_BC.flatten()
            )
            loss = loss + self.step_weight**step * step_loss
            reached.append(reached_BC.sum())
            correct.append(((logits_BCV.argmax(-1) == best) & reached_BC).sum())
            trained.append(trained_BC.sum())
            drafted_next = torch.zeros_like(reachable)
            drafted_next[:, :inside] = teacher.label_drafted[:, step:]
            reachable = reachable & drafted_next
        return UnrollSums(
            loss=loss,
            columns=columns.counted(0).sum(),
            reached=torch.stack(reached),
            correct=torch.stack(correct),
            trained=torch.stack(trained),
        )


def simulated_tau(accuracy: list[float]) -> float:
    """1 + sum_k prod_{i <= k} accuracy_i: the tau that a chain of K tokens would have were its steps independent."""
    tau, survival = 1.0, 1.0
    for value in accuracy:
        survival *= value
        tau += survival
    return tau
