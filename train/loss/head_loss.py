"""Head, teacher and losses in one pass behind the unroll, chunk by chunk: no logits of a whole batch are ever alive.

The K outputs of a column are students of K teachers, and the teacher of step k at column c is that of step 0 at column
c + k (`models.alignment`). So a chunk of teacher columns is made once, all its students are compared with it, their
gradients are taken on the spot, and the logits are dropped:

    teacher column j        0  1  2 | 3  4  5 | 6 ...       chunks of three
    student of step 0       0  1  2 | 3  4  5 | 6           column j
            of step 1       -  0  1 | 2  3  4 | 5           column j - 1
            of step 2       -  -  0 | 1  2  3 | 4           column j - 2

What remains is the loss, gradients of what the head read [K, N, H], and of the head, if it is trained; the backward
pass only multiplies them. So the head runs three products a column and step where it is trained, two where it is
frozen, and none twice.

Shapes: B rows, C counted columns, N = B * C one after another, n of a chunk, K steps, V target vocabulary, Vd draft
vocabulary, H hidden size.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from draftsmith.models.sampling import at_hand, likeliest
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.loss.losses import Lesson, LossWeights

# Students of a chunk: as many as make this many logits, 8 MiB in float32, but at least so many columns and steps, or
# the head's gradient is carried through memory for too few of them.
ELEMENTS = 1 << 21
ELEMENTS_ELSEWHERE = 1 << 27  # 512 MiB: other devices have more memory, and want longer products
LEAST_STUDENTS = 512


def elements_of(device: str) -> int:
    """Logits of a chunk on devices of this type."""
    return ELEMENTS if device == "cpu" else ELEMENTS_ELSEWHERE


@dataclass(frozen=True)
class Teacher:
    """The target's view of every column at step 0; step k of column c is column c + k here (`models.alignment`).

    Attributes:
        states: [B, C, H] the target's last state of the position that column's teacher is, behind its final norm.
        logits: the target's head, states [..., H] to float32 logits [..., V].
        label_drafted: [B, C] whether the data's token x[t+2] is in the draft vocabulary.
    """

    states: torch.Tensor
    logits: Callable[[torch.Tensor], torch.Tensor]
    label_drafted: torch.Tensor

    @torch.no_grad()
    def of(self, states_NH: torch.Tensor, vocab: DraftVocab) -> tuple[torch.Tensor, torch.Tensor]:
        """Of some of the states: (the target's distribution restricted to the draft vocabulary and renormalised
        [N, Vd], its likeliest token as a draft id, -1 where the draft vocabulary lacks it [N])."""
        # The head stays in the target's own precision: it is the teacher.
        with torch.autocast(states_NH.device.type, enabled=False):
            logits_NV = self.logits(states_NH)
        best = vocab.to_draft(likeliest(logits_NV))
        if not vocab.is_full:
            logits_NV = logits_NV[:, vocab.target_ids.to(logits_NV.device)]
        p_NV = functional.softmax(logits_NV, dim=-1)
        # A teacher that is not a number teaches, so that its loss says so.
        return p_NV, best.masked_fill(p_NV[:, 0].isnan(), 0)


@dataclass(frozen=True)
class HeadLoss:
    """The pass over one micro-batch.

    Attributes:
        reached: [K, B, C] the columns that a chain can reach at each step.
        step_weights: [K, B, C], or what broadcasts to it: of each column's loss at each step.
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
        """(loss, with a gradient; correct [K]: of the reached columns, where drafter and target agree on the likeliest
        token; trained [K, B, C]: the columns with a loss, whose likeliest token can be drafted).

        Args:
            read: K tensors [B, C, H] that the head reads, one a step.
            scaled: what the head's family does to logits.
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
        """(alpha [K, B, C], the chance that a token drawn from the drafter is accepted; trained [K, B, C], as above).

        A pass of its own, without gradients, for weights that hang on all steps.
        """
        shape, dtype = self.reached.shape, torch.promote_types(read[0].dtype, torch.float32)
        reached = self.reached.flatten(1)
        alpha, trained = torch.zeros(reached.shape, dtype=dtype, device=reached.device), torch.zeros_like(reached)
        head = weight_VH.to(_products_of(weight_VH))
        with torch.autocast(head.device.type, enabled=False):
            for chunk in _chunks(self, read, head, bias_V, scaled, dtype, differentiable=False):
                for step, place, teachers, mine in chunk.students():
                    q = functional.softmax(chunk.logits[mine], dim=-1)
                    alpha[step, place] = torch.minimum(q, chunk.p[teachers]).sum(-1)
                    trained[step, place] = reached[step, place] & (chunk.best[teachers] >= 0)
        return alpha.view(shape), trained.view(shape)


@dataclass(frozen=True)
class _Chunk:
    """Some teacher columns and all their students, step by step, side by side for one product with the head.

    Attributes:
        p, best: of the teachers, as `Teacher.of` gives them.
        places: of each step, the students' columns; where they would begin before the first one, there are fewer.
        read: [M, H] of the students, in the head's precision; logits: [M, Vd], which may be overwritten.
        unscaled: makes a gradient in `logits` one in the head's own product.
    """

    p: torch.Tensor
    best: torch.Tensor
    places: list[slice]
    read: torch.Tensor
    logits: torch.Tensor
    unscaled: Callable[[torch.Tensor], torch.Tensor]

    def students(self) -> Iterator[tuple[int, slice, slice, slice]]:
        """Of each step: its number, the students' columns, their teachers in the chunk, their rows of `logits`."""
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
    """All teacher columns, some at a time; products in the precision of `head`, what comes of them in `dtype`. Without
    autocast, which would choose others."""
    steps, device = len(read), read[0].device
    bias = None if bias is None else bias.to(head.dtype)
    outputs = [each.flatten(0, 1) for each in read]  # [N, H] each
    states = job.teacher.states.flatten(0, 1)
    columns = len(states)
    elements = job.elements or elements_of(device.type)
    size = max(1, min(max(elements // len(head), LEAST_STUDENTS) // steps, columns))
    for begin in range(0, columns, size):
        end = min(begin + size, columns)
        p, best = job.teacher.of(states[begin:end], job.vocab)
        places = [slice(max(0, begin - step), max(0, end - step)) for step in range(steps)]
        students = torch.cat([each[place] for each, place in zip(outputs, places, strict=True)]).to(head.dtype)
        logits, unscaled = _logits(students, head, bias, scaled, dtype, differentiable)
        yield _Chunk(p.to(dtype), best, places, students, logits, unscaled)


def _products_of(weight: torch.Tensor) -> torch.dtype:
    """The precision of products with it."""
    device = weight.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(  # type: ignore[override]
        ctx: Any, job: HeadLoss, differentiable: bool, scaled: Any, weight: torch.Tensor, bias: Any, *read: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        steps, device, shape = len(read), read[0].device, read[0].shape
        reached = job.reached.flatten(1)
        step_weights = job.step_weights.expand(job.reached.shape).flatten(1)
        head = weight.to(_products_of(weight))
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
            raise RuntimeError("the head's loss was differentiated before, and its gradients are used up")
        of_weight, of_read = ctx.gradients
        ctx.gradients = None
        for each in (of_weight, *of_read):
            if each is not None:
                each *= grad
        return None, None, None, of_weight, None, *of_read


def _clear(rows: torch.Tensor, *matrices: torch.Tensor) -> None:
    """Zeros in these rows, whatever is there."""
    if at_hand(rows):  # a mask over all elements takes longer than their exponentials
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
    """Logits that may be overwritten, and what makes their gradient that of the head's own product."""
    raw = functional.linear(students, head, bias).to(dtype)
    if scaled is None:
        return raw, lambda gradient: gradient
    with torch.enable_grad():
        leaf = raw.requires_grad_(differentiable)
        logits = scaled(leaf)
    if logits is leaf:
        return raw.requires_grad_(False), lambda gradient: gradient
    return logits.detach().clone(), lambda gradient: torch.autograd.grad(logits, leaf, gradient)[0]
