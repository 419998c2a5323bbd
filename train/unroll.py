"""Training-time test: the drafter reads its own outputs for K steps, as it will when it drafts a chain.

Which column reads and predicts what is `models.alignment`; this file is the attention and the loop over steps, the same
for every drafter of `models.feature_drafter`. K = 1 is EAGLE-1; HASS and PosS, whose papers keep targets in place and
shift features to the right, are the same unroll told from the chain's root.

The query of column t at step k sees, as a chain drafted below root x[t+1] would (EAGLE-3, section 3.2):

    step-0 keys of columns 0..t         made from the target's states         one causal part, the same at every step
    its own column's keys of steps 1..k made from its own earlier outputs     k single scores

so one softmax runs over t + 1 + k scores. No [T, k*T] mask exists. Masked scores are left out of the softmax; the
published HASS and PosS code multiplies scores by 0 instead, which leaves exp(0) in its denominator for every masked
column. Columns that do not count leave a step-0 key and value and are never queried: with one draft layer nothing else
of them is read. With several, the lower ones run step 0 on all columns.

Documents that share a row (`models.alignment.Documents`) see each other nowhere: their prefixes are attended to one by
one, and all else runs on the whole row, which needs no padding of tokens or of counted columns.

Each stack of layers has keys and values of its own. Where the stack changes (`models.poss`), the new one makes them
from the same step-0 features, and from the drafted features of steps 1..k-1, handed to it without their history:

    step               0     1     2     3          two positions a stack: gradients of step 3 end at this line |
    stack              0     0     1     1
    feature            f[t]  a_0 | a_1   a_2        a_1 | is cut off, and a_0 is when stack 1 reads it again

Tokens are the data's at every step, never the drafter's own guesses (feeding guesses lowers acceptance: 5.0 to 4.44 in
one published reproduction).

Shapes: B rows, T tokens, C counted columns, A query heads, G key/value heads, R = A/G, D head dimension, H hidden size,
W entry width, K steps, Vd draft vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from draftsmith.models.alignment import Columns, Documents
from draftsmith.models.feature_drafter import DraftLayer, FeatureDrafter
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.schema import TrainSection
from draftsmith.train.losses import feature_regression, soft_cross_entropy, top_k_cross_entropy


def merged_attention(
    query_BACD: torch.Tensor,
    prefix_keys_BGTD: torch.Tensor,
    prefix_values_BGTD: torch.Tensor,
    own_keys: list[torch.Tensor],
    own_values: list[torch.Tensor],
    sight: "Sight",
) -> torch.Tensor:
    """One softmax over the visible step-0 keys and the column's own later keys: [B, A, C, D].

    Args:
        own_keys, own_values: one [B, G, C, D] for each of the steps 1..k.
        sight: which step-0 keys a column sees.
    """
    groups = prefix_keys_BGTD.shape[1]
    query = query_BACD.unflatten(1, (groups, -1)) * query_BACD.shape[-1] ** -0.5  # [B, G, R, C, D]
    own = [(query * key[:, :, None]).sum(-1, keepdim=True).float() for key in own_keys]  # each [B, G, R, C, 1]
    if sight.documents is None:
        attended, weights = _over_prefix(query, prefix_keys_BGTD, prefix_values_BGTD, own, sight.visible[0])
    else:
        attended, weights = sight.by_document(query, prefix_keys_BGTD, prefix_values_BGTD, own)
    for step, value in enumerate(own_values):
        attended = attended + weights[..., step, None] * value[:, :, None]
    return attended.to(query_BACD.dtype).flatten(1, 2)


def _over_prefix(
    query_BGRCD: torch.Tensor,
    keys_BGTD: torch.Tensor,
    values_BGTD: torch.Tensor,
    own: list[torch.Tensor],
    visible_BCT: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the softmax over prefix and own scores (each [B, G, R, C, 1]) takes from the prefix, float32
    [B, G, R, C, D], and its weights of the own ones [B, G, R, C, k]."""
    prefix = query_BGRCD @ keys_BGTD[:, :, None].transpose(-1, -2)  # [B, G, R, C, T]
    scores = [prefix.float().masked_fill(~visible_BCT[:, None, None], float("-inf")), *own]
    weights = torch.cat(scores, dim=-1).softmax(dim=-1)
    length = keys_BGTD.shape[2]
    attended = (weights[..., :length].to(values_BGTD.dtype) @ values_BGTD[:, :, None]).float()
    return attended, weights[..., length:]


class Sight:
    """Which step-0 keys each query sees: those of its own document, up to its own column.

    Where every row is a document, one product takes all rows. Documents that share rows are taken one by one, so that
    nothing at all is computed between two of them:

        columns   0 1 2 3 4 | 0 1 2 3 | padding        of a row with two documents

    Args:
        index_BC: column of each query.
        tokens: T.
        ranges: (first, end) of each document's queries, along C.
    """

    def __init__(
        self,
        index_BC: torch.Tensor,
        tokens: int,
        documents: Documents | None = None,
        ranges: Sequence[tuple[int, int]] = (),
    ):
        column = torch.arange(tokens, device=index_BC.device)
        self.documents = documents
        if documents is None:
            self.visible = [column <= index_BC[:, :, None]]  # [B, C, T]
            return
        self.visible = []  # of each document: [1, its queries, its keys]
        rows, width = index_BC.shape
        # What the queries and the keys of each row are split into: its documents, then padding.
        self.queries: list[list[int]] = [[] for _ in range(rows)]
        self.keys: list[list[int]] = [[] for _ in range(rows)]
        for (row, start, length), (first, end) in zip(documents.places, ranges, strict=True):
            self.queries[row].append(end - first)
            self.keys[row].append(length)
            self.visible.append((column[start : start + length] <= index_BC[row, first:end, None])[None])
        for queries, keys in zip(self.queries, self.keys, strict=True):
            queries.append(width - sum(queries))
            keys.append(tokens - sum(keys))

    def by_document(
        self,
        query_BGRCD: torch.Tensor,
        keys_BGTD: torch.Tensor,
        values_BGTD: torch.Tensor,
        own: list[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """`_over_prefix` of them all; 0 in padding."""
        # Splits, not slices: the backward pass of many slices would add up as many gradients of the whole.
        query_rows, key_rows, value_rows = query_BGRCD.split(1), keys_BGTD.split(1), values_BGTD.split(1)
        scores = torch.cat(own, dim=-1) if own else query_BGRCD[..., :0].float()  # [B, G, R, C, k]
        visible, attended, weights = iter(self.visible), [], []
        for row, score_row in enumerate(scores.split(1)):
            queries, keys = self.queries[row], self.keys[row]
            *documents, (query_padding, score_padding, *_) = zip(
                query_rows[row].split(queries, 3),
                score_row.split(queries, 3),
                key_rows[row].split(keys, 2),
                value_rows[row].split(keys, 2),
                strict=True,
            )
            found = [_over_prefix(q, k, v, [s], next(visible)) for q, s, k, v in documents]
            attended.append(torch.cat([*(a for a, _ in found), torch.zeros_like(query_padding).float()], 3))
            weights.append(torch.cat([*(w for _, w in found), torch.zeros_like(score_padding)], 3))
        return torch.cat(attended), torch.cat(weights)


# Of each layer: keys and values of the counted columns' steps 1, 2, ..., [B, G, C, D] each.
OwnColumns = list[tuple[list[torch.Tensor], list[torch.Tensor]]]


class _Chains:
    """The keys and values of one stack of layers, for all counted columns at once.

    Args:
        entry_BTW: of step 0, all columns.
    """

    def __init__(
        self,
        drafter: FeatureDrafter,
        layers: Sequence[DraftLayer],
        entry_BTW: torch.Tensor,
        columns: Columns,
        documents: Documents | None,
    ):
        self.drafter, self.layers = drafter, layers
        rows, tokens = entry_BTW.shape[:2]
        every_column = torch.arange(tokens, device=entry_BTW.device).expand(rows, -1)  # [B, T]
        position = every_column if documents is None else documents.position
        self.position = columns.gather(position)  # [B, C]
        self.sight = Sight(columns.index, tokens, documents, columns.of_each(documents) if documents else ())
        rotary = drafter.rotary(entry_BTW, position)
        self.prefix: list[tuple[torch.Tensor, torch.Tensor]] = []  # of each layer: [B, G, T, D] keys and values
        h = entry_BTW
        for layer in layers:
            x, residual = layer.enter(h)
            keys, values = layer.self_attn.keys_values(x, *rotary)
            self.prefix.append((keys, values))
            if layer is not layers[-1]:  # the layer above needs a key of every column
                ranges = [(start, start + length) for _, start, length in documents.places] if documents else ()
                causal = Sight(every_column, tokens, documents, ranges)
                query = layer.self_attn.queries(x, *rotary)
                h = layer.finish(residual, merged_attention(query, keys, values, [], [], causal))
        # What the last layer is asked with: the counted columns alone.
        self.first_input = columns.gather(x), columns.gather(residual)
        self.own: OwnColumns = [([], []) for _ in layers]

    def first_step(self) -> torch.Tensor:
        """Outputs [B, C, H] of step 0."""
        layer, (x, residual) = self.layers[-1], self.first_input
        query = layer.self_attn.queries(x, *self.drafter.rotary(x, self.position))
        return layer.finish(residual, merged_attention(query, *self.prefix[-1], [], [], self.sight))

    def read(self, entry_BCW: torch.Tensor, step: int) -> None:
        """Keys and values of a drafted step that another stack made."""
        [layer], [(keys, values)] = self.layers, self.own
        x = layer.enter(entry_BCW)[0]
        key, value = layer.self_attn.keys_values(x, *self.drafter.rotary(x, self.position + step))
        self.own = [([*keys, key], [*values, value])]

    def later_step(self, entry_BCW: torch.Tensor, step: int, own: OwnColumns) -> tuple[torch.Tensor, OwnColumns]:
        """Outputs [B, C, H] of a step above 0, and `own` with its keys and values.

        `own` is given and returned: a checkpointed step, run again in the backward pass, reads what it read first.
        """
        grown: OwnColumns = []
        h = entry_BCW
        cos, sin = self.drafter.rotary(h, self.position + step)
        for layer, prefix, (own_keys, own_values) in zip(self.layers, self.prefix, own, strict=True):
            x, residual = layer.enter(h)
            key, value = layer.self_attn.keys_values(x, cos, sin)
            query = layer.self_attn.queries(x, cos, sin)
            keys, values = [*own_keys, key], [*own_values, value]
            h = layer.finish(residual, merged_attention(query, *prefix, keys, values, self.sight))
            grown.append((keys, values))
        return h, grown


def unroll(
    drafter: FeatureDrafter,
    captured_BTF: torch.Tensor,
    ids_BT: torch.Tensor,
    columns: Columns,
    steps: int,
    gradient_checkpointing: bool = False,
    detach: bool = False,
    documents: Documents | None = None,
) -> Iterator[torch.Tensor]:
    """Yields the layer's outputs [B, C, H] of steps 0 to `steps` - 1 for the counted columns.

    At step k only columns with `columns.counted(k)` mean anything; the others compute along and must be masked.

    Args:
        detach: gradients never flow from one step to the one before (HASS). Where the stack changes they never do.
        documents: where they stand; None: every row is one.
    """
    following = torch.cat(
        (ids_BT[:, 1:], ids_BT[:, -1:]), dim=1
    )  # [B, T] x[t+1]; a document's last column never counts
    entry_BTW = drafter.entry(drafter.fuse(captured_BTF), drafter.embed(following))

    def run(function, *args):
        # The non-reentrant form: the reentrant one gives outputs inside containers no gradient at all.
        return checkpoint(function, *args, use_reentrant=False) if gradient_checkpointing else function(*args)

    def entry_of(feature: torch.Tensor, step: int) -> torch.Tensor:
        return drafter.entry(feature, drafter.embed(columns.gather(ids_BT, 1 + step)))

    stack = drafter.stack_of(0)
    chains = _Chains(drafter, drafter.stacks[stack], entry_BTW, columns, documents)
    output = run(chains.first_step)
    yield output
    drafted: list[torch.Tensor] = []  # features of steps 1, 2, ... as another stack is handed them
    for step in range(1, steps):
        feature = drafter.feedback(output)
        handed = feature.detach()
        if drafter.stack_of(step) != stack:
            stack, feature = drafter.stack_of(step), handed
            chains = _Chains(drafter, drafter.stacks[stack], entry_BTW, columns, documents)
            for earlier, its_feature in enumerate(drafted, start=1):
                chains.read(entry_of(its_feature, earlier), earlier)
        elif detach:
            feature = handed
        output, chains.own = run(
            lambda f, k, own, c=chains: c.later_step(entry_of(f, k), k, own), feature, step, chains.own
        )
        if len(drafter.stacks) > 1:
            drafted.append(handed)
        yield output


@dataclass(frozen=True)
class Teacher:
    """The target's view of every column at step 0; step k of column c is column c + k here (`models.alignment`)."""

    probabilities: torch.Tensor  # [B, C, Vd] the target's distribution restricted to the draft vocabulary, renormalised
    best: torch.Tensor  # [B, C] the target's likeliest token as a draft id, -1 where the draft vocabulary lacks it
    label_drafted: torch.Tensor  # [B, C] whether the data's token x[t+2] is in the draft vocabulary
    features: torch.Tensor | None = None  # [B, C, H] the target's last state, behind its final norm; None: not wanted


@torch.no_grad()
def teacher_of(
    target: Target,
    last_BTH: torch.Tensor,
    ids_BT: torch.Tensor,
    columns: Columns,
    vocab: DraftVocab,
    features: bool = False,
) -> Teacher:
    """Runs the target's head over the counted positions only (teacher position t+1 of each column).

    Args:
        features: keep the states, too, which drafted features are compared with.
    """
    states_BCH = columns.gather(last_BTH, 1)
    logits_BCV = target.logits(states_BCH)
    return Teacher(
        probabilities=functional.softmax(logits_BCV[..., vocab.target_ids.to(logits_BCV.device)], dim=-1),
        best=vocab.to_draft(logits_BCV.argmax(-1)),
        label_drafted=vocab.to_draft(columns.gather(ids_BT, 2)) >= 0,
        features=states_BCH if features else None,
    )


@dataclass(frozen=True)
class UnrollSums:
    """Sums over one micro-batch, to be added over micro-batches and ranks before any division."""

    loss: torch.Tensor  # scalar, with gradient: sum_k step_weight^k * sum over trained columns of the weighted losses
    columns: torch.Tensor  # scalar: columns counted at step 0, the loss's denominator
    reached: torch.Tensor  # [K] columns that a chain can reach at step k
    correct: torch.Tensor  # [K] of those, where drafter and target agree on the likeliest token
    trained: torch.Tensor  # [K] columns with a loss at step k


@dataclass(frozen=True)
class LossWeights:
    """What is summed for each trained column (`train.losses`). The defaults are EAGLE-3's.

    Attributes:
        token: of the soft cross-entropy; top_k: of that over the teacher's `top_k_tokens` likeliest tokens alone.
        feature: of the distance between output and target feature, for drafters whose outputs are features.
    """

    token: float = 1.0
    feature: float = 0.0
    top_k: float = 0.0
    top_k_tokens: int = 10

    @classmethod
    def of(cls, settings: TrainSection) -> "LossWeights":
        return cls(settings.token_loss, settings.feature_loss, settings.top_k_loss, settings.top_k_tokens)


class TrainingTimeTest(nn.Module):
    """The drafter with its unroll and loss as one module, so that wrappers for many processes see a single forward.

    Draft vocabulary. Of the columns that count (`models.alignment`) step k
    - *reaches* a column only if the k tokens drafted before, x[t+2] ... x[t+1+k], are all in the draft vocabulary: no
      chain gets past a token that cannot be drafted;
    - *trains* on it only if the target's likeliest token is in the draft vocabulary as well (as EAGLE-3 does): there
      the restricted teacher would teach a token that greedy verification rejects for certain.
    Accuracy is over reached columns; a likeliest token outside the draft vocabulary is a miss, as in decoding.
    """

    def __init__(
        self,
        drafter: FeatureDrafter,
        steps: int,
        step_weight: float,
        gradient_checkpointing: bool = False,
        weights: LossWeights | None = None,
        detach: bool = False,
    ):
        super().__init__()
        self.drafter = drafter
        self.steps = steps
        self.step_weight = step_weight
        self.gradient_checkpointing = gradient_checkpointing
        self.weights = weights or LossWeights()
        self.detach = detach
        self.bf16 = False  # products in bfloat16
        self.caches_casts = True  # of weights; not where weights are freed after use

    @classmethod
    def of(cls, drafter: FeatureDrafter, settings: TrainSection) -> "TrainingTimeTest":
        """As a recipe's section has it."""
        return cls(
            drafter,
            settings.ttt_steps,
            settings.step_weight,
            settings.gradient_checkpointing,
            LossWeights.of(settings),
            settings.detach_features,
        )

    @property
    def wants_features(self) -> bool:
        """Whether the teacher has to bring the target's features."""
        return self.weights.feature > 0

    def forward(
        self,
        captured_BTF: torch.Tensor,
        ids_BT: torch.Tensor,
        columns: Columns,
        teacher: Teacher,
        documents: Documents | None = None,
    ) -> UnrollSums:
        # In here, not around it: DeepSpeed switches off what a caller has switched on.
        device = captured_BTF.device.type
        products = (
            torch.autocast(device, torch.bfloat16, cache_enabled=self.caches_casts) if self.bf16 else nullcontext()
        )
        with products:
            return self._sums(captured_BTF, ids_BT, columns, teacher, documents)

    def _sums(
        self,
        captured_BTF: torch.Tensor,
        ids_BT: torch.Tensor,
        columns: Columns,
        teacher: Teacher,
        documents: Documents | None,
    ) -> UnrollSums:
        outputs = unroll(
            self.drafter, captured_BTF, ids_BT, columns, self.steps, self.gradient_checkpointing, self.detach, documents
        )
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
            loss = loss + self.step_weight**step * self._loss(
                output_BCH[:, :inside].flatten(0, 1), logits_BCV.flatten(0, 1), teacher, step, trained_BC.flatten()
            )
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

    def _loss(
        self, outputs_NH: torch.Tensor, logits_NV: torch.Tensor, teacher: Teacher, step: int, trained_N: torch.Tensor
    ) -> torch.Tensor:
        """The weighted losses of one step; N = B * (C - step) columns, whose teachers stand `step` places behind."""
        weights, p_NV = self.weights, teacher.probabilities[:, step:].flatten(0, 1)
        total = logits_NV.new_zeros(())
        if weights.token:
            total = total + weights.token * soft_cross_entropy(logits_NV, p_NV, trained_N)
        if weights.top_k:
            total = total + weights.top_k * top_k_cross_entropy(logits_NV, p_NV, trained_N, weights.top_k_tokens)
        if weights.feature:
            assert teacher.features is not None
            features_NH = teacher.features[:, step:].flatten(0, 1)
            total = total + weights.feature * feature_regression(outputs_NH, features_NH, trained_N)
        return total


def simulated_tau(accuracy: list[float]) -> float:
    """1 + sum_k prod_{i <= k} accuracy_i: the tau that a chain of K tokens would have were its steps independent."""
    tau, survival = 1.0, 1.0
    for value in accuracy:
        survival *= value
        tau += survival
    return tau
