"""Head, teacher and losses in one pass after the unroll, chunk by chunk: the logits of a whole batch never exist.

The K outputs of a column are students of K teachers. The teacher of step k at column c is that of step 0 at column
c + k (`models.alignment`). So each chunk of teacher columns is computed once and compared with all its students. Their
gradients follow at once; then the logits are dropped:

    teacher column j        0  1  2 | 3  4  5 | 6 ...       chunks of three
    student of step 0       0  1  2 | 3  4  5 | 6           column j
            of step 1       -  0  1 | 2  3  4 | 5           column j - 1
            of step 2       -  -  0 | 1  2  3 | 4           column j - 2

The pass keeps the loss, the gradients of the head's inputs [K, N, H], and the head's own if it is trained; the backward
pass only scales them. No product with the head is computed twice.

Shapes: B rows, C counted columns, N = B * C of all rows, M students of a chunk, K steps, V target vocabulary, Vd draft
vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from draftsmith.models.layers import product_dtype
from draftsmith.models.sampling import at_hand, likeliest
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.loss.losses import Lesson, LossWeights

ELEMENTS = 1 << 21  # logits of a chunk's students on a CPU: 8 MiB in float32
ELEMENTS_ELSEWHERE = 1 << 27  # 512 MiB: other devices have more memory and need longer products
LEAST_STUDENTS = 512  # with fewer, reading and writing the head's gradient for every chunk costs too much


def elements_of(device: str) -> int:
    return ELEMENTS if device == "cpu" else ELEMENTS_ELSEWHERE


@dataclass(frozen=True)
class Teacher:
    """What the target predicts for every column at step 0. The teacher of column c at step k is that of column c + k.

    Attributes:
        states: [B, C, H] the target's last state, after its final norm, at the position that teaches the column.
        logits: the target's head, from states [..., H] to float32 logits [..., V].
        label_drafted: [B, C] whether the data's token x[t+2] is in the draft vocabulary.
        drafted_logits: `logits` of the draft vocabulary alone [..., Vd]; None: they are cut from the whole.
        best: [B, C] int64, filled by `of`: the likeliest tokens as draft ids; None: nobody asks for them.
        knows_best: `best` is filled already: then `drafted_logits` are enough.
    """

    states: torch.Tensor
    logits: Callable[[torch.Tensor], torch.Tensor]
    label_drafted: torch.Tensor
    drafted_logits: Callable[[torch.Tensor], torch.Tensor] | None = None
    best: torch.Tensor | None = None
    knows_best: bool = False

    @torch.no_grad()
    def of(self, columns: slice, vocab: DraftVocab) -> tuple[torch.Tensor, torch.Tensor]:
        """For some of the B * C columns: (the target's distribution over the draft vocabulary, renormalised [N, Vd];
        its likeliest token as a draft id [N], -1 if the draft vocabulary lacks it)."""
        states_NH = self.states.flatten(0, 1)[columns]
        # The head stays in the target's own precision: it is the teacher.
        with torch.autocast(states_NH.device.type, enabled=False):
            if self.best is None or self.drafted_logits is None:
                logits_NV = self.logits(states_NH)
                best = vocab.to_draft(likeliest(logits_NV))
                if not vocab.is_full:
                    logits_NV = logits_NV[:, vocab.target_ids.to(logits_NV.device)]
            else:
                best = self.best.flatten()[columns]
                if not self.knows_best:
                    best.copy_(vocab.to_draft(likeliest(self.logits(states_NH))))
                logits_NV = self.drafted_logits(states_NH)
        p_NV = functional.softmax(logits_NV, dim=-1)
        # A teacher of NaN still teaches: the loss must show it.
        return p_NV, best.masked_fill(p_NV[:, 0].isnan(), 0)


@dataclass(frozen=True)
class HeadLoss:
    """The pass over one micro-batch.

    Attributes:
        reached: [K, B, C] whether a chain can reach the column at each step.
        step_weights: of each column's loss at each step: [K, B, C], or a shape that broadcasts to it.
        elements: logits of a chunk; None: what suits the device.
    """

    teacher: Teacher
    vocab: DraftVocab
    reached: torch.Tensor
    weights: LossWeights
    step_weights: torch.Tensor
    elements: int | None = None

    def __call__(
        self,
        read: Sequence[torch.Tensor],
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None = None,
        scaled: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(loss; correct [K]; trained [K, B, C]). The loss has a gradient.

        correct counts the reached columns at which drafter and target agree on the likeliest token. trained marks the
        columns with a loss: the reached ones at which the target's likeliest token can be drafted.

        Args:
            read: the head's inputs, K tensors [B, C, H], one a step.
            scaled: the scaling of logits in the target's family.
        """
        assert bias_V is None or not bias_V.requires_grad
        return _HeadLoss.apply(self, torch.is_grad_enabled(), scaled, weight_VH, bias_V, *read)  # type: ignore[return-value]

    @torch.no_grad()
    def acceptance(
        self,
        read: Sequence[torch.Tensor],
        weight_VH: torch.Tensor,
        bias_V: torch.Tensor | None = None,
        scaled: Callable[[torch.Tensor], torch.Tensor] | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(alpha [K, B, C], the probability that a token drawn from the drafter is accepted; trained [K, B, C])."""
        shape, dtype = self.reached.shape, torch.promote_types(read[0].dtype, torch.float32)
        reached = self.reached.flatten(1)
        alpha, trained = torch.zeros(reached.shape, dtype=dtype, device=reached.device), torch.zeros_like(reached)
        head = weight_VH.to(product_dtype(weight_VH.device, weight_VH.dtype))
        with torch.autocast(head.device.type, enabled=False):
            for chunk in _chunks(self, read, head, bias_V, scaled, dtype, differentiable=False):
                for step, place, teachers, mine in chunk.students():
                    q = functional.softmax(chunk.logits[mine], dim=-1)
                    alpha[step, place] = torch.minimum(q, chunk.p[teachers]).sum(-1)
                    trained[step, place] = reached[step, place] & (chunk.best[teachers] >= 0)
        return alpha.view(shape), trained.view(shape)


@dataclass(frozen=True)
class _Chunk:
    """Some teacher columns and all their students, ordered by step, which share one product with the head.

    Attributes:
        p, best: of the teachers, from `Teacher.of`.
        places: the students' columns at each step. At the start of a batch later steps have fewer students.
        read: [M, H] inputs of the head, in its precision; logits: [M, Vd], may be overwritten.
        unscaled: turns a gradient of `logits` into one of the head's own product.
    """

    p: torch.Tensor
    best: torch.Tensor
    places: list[slice]
    read: torch.Tensor
    logits: torch.Tensor
    unscaled: Callable[[torch.Tensor], torch.Tensor]

    def students(self) -> Iterator[tuple[int, slice, slice, slice]]:
        """(step, the students' columns, their teachers in the chunk, their rows of `logits`)."""
        first = 0
        for step, place in enumerate(self.places):
            count = place.stop - place.start
            yield step, place, slice(len(self.best) - count, len(self.best)), slice(first, first + count)
            first += count


def _chunks(
    job: HeadLoss,
    read: Sequence[torch.Tensor],
    head: torch.Tensor,
    bias: torch.Tensor | None,
    scaled: Callable[[torch.Tensor], torch.Tensor] | None,
    dtype: torch.dtype,
    differentiable: bool,
) -> Iterator[_Chunk]:
    """All teacher columns, some at a time; products in the precision of `head`, results in `dtype`."""
    steps, device = len(read), read[0].device
    bias = None if bias is None else bias.to(head.dtype)
    outputs = [each.flatten(0, 1) for each in read]  # [N, H] each
    columns = outputs[0].shape[0]
    elements = job.elements or elements_of(device.type)
    size = max(1, min(max(elements // len(head), LEAST_STUDENTS) // steps, columns))
    for begin in range(0, columns, size):
        end = min(begin + size, columns)
        p, best = job.teacher.of(slice(begin, end), job.vocab)
        places = [slice(max(0, begin - step), max(0, end - step)) for step in range(steps)]
        students = torch.cat([each[place] for each, place in zip(outputs, places, strict=True)]).to(head.dtype)
        logits, unscaled = _logits(students, head, bias, scaled, dtype, differentiable)
        yield _Chunk(p.to(dtype), best, places, students, logits, unscaled)


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, job: HeadLoss, differentiable: bool, scaled: Any, weight: torch.Tensor, bias: Any, *read: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        steps, device, shape = len(read), read[0].device, read[0].shape
        reached = job.reached.flatten(1)
        step_weights = job.step_weights.expand(job.reached.shape).flatten(1)
        head = weight.to(product_dtype(device, weight.dtype))
        of_weight = torch.zeros_like(weight) if differentiable and weight.requires_grad else None
        of_read = [torch.zeros_like(each.flatten(0, 1)) for each in read] if differentiable else []
        loss = torch.zeros((), dtype=torch.promote_types(read[0].dtype, torch.float32), device=device)
        correct = torch.zeros(steps, dtype=torch.long, device=device)
        trained = torch.zeros_like(reached)
        with torch.autocast(device.type, enabled=False):
            for chunk in _chunks(job, read, head, bias, scaled, loss.dtype, differentiable):
                lesson, logits = Lesson(job.weights, chunk.p), chunk.logits
                its_weight = loss.new_zeros(len(logits))
                for step, place, teachers, mine in chunk.students():
                    best = chunk.best[teachers]
                    trained[step, place] = reached[step, place] & (best >= 0)
                    correct[step] += ((likeliest(logits[mine]) == best) & reached[step, place]).sum()
                    its_weight[mine] = step_weights[step, place] * trained[step, place]
                    value = lesson.learn(logits[mine], teachers.start)
                    loss += torch.where(trained[step, place], value * its_weight[mine], 0.0).sum()
                if not differentiable:
                    continue
                idle = its_weight == 0
                gradient, students = chunk.unscaled(logits).to(head.dtype), chunk.read
                _clear(idle, gradient, students)
                of_students = (gradient @ head) * its_weight[:, None]
                for step, place, _, mine in chunk.students():
                    of_read[step][place] = of_students[mine]
                if of_weight is not None:
                    weighted = (students * its_weight[:, None]).to(head.dtype)
                    if of_weight.dtype == head.dtype:
                        torch.addmm(of_weight, gradient.T, weighted, out=of_weight)
                    else:
                        of_weight += gradient.T @ weighted
        ctx.gradients = of_weight, [each.view(shape) for each in of_read]
        trained = trained.view(job.reached.shape)
        ctx.mark_non_differentiable(correct, trained)
        return loss, correct, trained

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, *_: Any) -> tuple[Any, ...]:  # type: ignore[override]
        if ctx.gradients is None:
            raise RuntimeError("the head's loss was differentiated before; its gradients are no longer kept")
        of_weight, of_read = ctx.gradients
        ctx.gradients = None
        for each in (of_weight, *of_read):
            if each is not None:
                each *= grad
        return None, None, None, of_weight, None, *of_read


def _clear(rows: torch.Tensor, *matrices: torch.Tensor) -> None:
    """Writes zeros into these rows, even over NaN."""
    if at_hand(rows):  # a mask over all elements would take longer than their exponentials
        rows = rows.nonzero().squeeze(-1)
        for matrix in matrices:
            matrix.index_fill_(0, rows, 0)
    else:
        for matrix in matrices:
            matrix.masked_fill_(rows[:, None], 0)


def _logits(
    students: torch.Tensor,
    head: torch.Tensor,
    bias: torch.Tensor | None,
    scaled: Callable[[torch.Tensor], torch.Tensor] | None,
    dtype: torch.dtype,
    differentiable: bool,
) -> tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]:
    """Logits that may be overwritten, and a function from their gradient to that of the head's own product."""
    raw = functional.linear(students, head, bias).to(dtype)
    if scaled is None:
        return raw, lambda gradient: gradient
    with torch.enable_grad():
        leaf = raw.requires_grad_(differentiable)
        logits = scaled(leaf)
    if logits is leaf:
        return raw.requires_grad_(False), lambda gradient: gradient
    return logits.detach().clone(), lambda gradient: torch.autograd.grad(logits, leaf, gradient)[0]
