"""Acceptance from recorded answers: the rounds of decoding, without the target in the loop.

A drafted tree depends only on the target's states of the committed tokens: accepted positions reach a drafter with the
target's own states, never with drafted ones. Acceptance depends only on the target's next tokens. So the target reads
each answer once, all positions in one pass, and the decoding loop (`decode.decode`) follows it with a
`RecordedVerifier` in the target's place:

    recorded   p p p | r a b c d e       tree below r:  a x, below a: b y, below b: z
    round 1            r a b c           a and b are accepted, the recorded c is the bonus
    round 2                  c d e       the tree drafted below c, with the target's states up to b

Replay is exact, round by round:
- greedy answers: a node is right iff it is the target's likeliest token, which is the recorded one;
- sampled answers, for trees with nodes chosen by rank: the bonus after a rejection is never a rejected child
  (`eval.decoding.accept`), so the recorded token is a child iff that child was accepted;
- the end: decoding cuts off accepted tokens beyond it, so a tree that holds all remaining tokens is accepted.

Chains drawn from the drafter are refused, because the drawn tokens are not recorded.

Shapes: B rows, N nodes, n positions, F captured states, V vocabulary; P positions of all answers, one after another.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from draftsmith.eval.decoding.accept import deepest
from draftsmith.eval.decoding.decode import Generation, Verified, decode
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.models.draft_tree import Committed, DraftTree, Proposer
from draftsmith.models.families import usable_positions
from draftsmith.models.prompt import PlacedInsert, Prompt
from draftsmith.models.sampling import Draws
from draftsmith.models.target import Target
from draftsmith.models.target_session import batches_by_length
from draftsmith.recipes.errors import UserError

HEAD_ROWS = 512  # most positions with logits in memory at once
HEAD_BYTES = 1 << 28  # most bytes of these logits and the tensors computed from them
LOGITS_COPIES = 12  # float32 tensors of the logits' size that coexist while a draw is checked; top-p sorts
CHECKED_TOKENS = 1024  # tokens of the answers, the longest first, that are compared with the target's
NO_TOKEN = -1


class RecordedVerifier:
    """Recorded answers in the target's place: a `decode.Verifier`.

    Args:
        states_PF: the target's captured states of each answer's prompt and tokens without the last, which no round
            reads; row after row. None if the proposer reads none.
        target: used only for the embeddings of tokens.
    """

    def __init__(self, answers: Sequence[RecordedAnswer], states_PF: torch.Tensor | None, target: Target):
        self.target, self.device = target, target.device
        self.positions: int = usable_positions(target.config)
        self.answers = list(answers)
        self.states = states_PF
        # Padding follows every answer. It equals no token, so no tree is accepted beyond the end.
        longest = max(len(answer.tokens) for answer in answers) + 1
        padded = [[*a.tokens, *[NO_TOKEN] * (longest - len(a.tokens))] for a in answers]
        self.tokens = torch.tensor(padded, device=self.device)  # [B, longest]
        lengths = [len(answer.prompt) + len(answer.tokens) - 1 for answer in answers]
        self.starts = [0, *accumulate(lengths[:-1])]  # first state of each row
        self.done = [1] * len(answers)  # tokens of each answer so far; the last one is the root
        self.features: torch.Tensor | None = None
        self.counts: list[int] = []
        self.prompts: list[Prompt] = []

    def prefill(self, prompts: Sequence[Sequence[int]], draws: Sequence[Draws] | None = None) -> list[int]:
        """Starts all recorded answers at once."""
        self.counts = [len(prompt) for prompt in prompts]
        self.prompts = [Prompt.of(prompt) for prompt in prompts]
        self._read([0] * len(prompts))
        return [answer.tokens[0] for answer in self.answers]

    def _read(self, first: Sequence[int]) -> None:
        """Reads self.counts[b] states of each row b, from position first[b] on."""
        if self.states is None:
            return
        at = torch.tensor([start + position for start, position in zip(self.starts, first, strict=True)])
        index = (at[:, None] + torch.arange(max(self.counts))).clamp_(max=len(self.states) - 1)
        self.features = self.states[index.to(self.device)]  # [B, n, F]

    def committed(self, tokens: Sequence[Sequence[int]]) -> Committed:
        return Committed(self.target, tokens, self.features, self.counts, self.prompts)

    def verify(self, tree: DraftTree) -> None:
        """Does nothing: the target's tokens are recorded."""

    def accept(self, tree: DraftTree) -> Verified:
        """Accepts the longest recorded path. `NO_TOKEN` replaces the bonus if the path ends the answer."""
        last = self.tokens.shape[1] - 1
        following = (tree.depths + torch.tensor(self.done, device=self.device)[:, None]).clamp(max=last)
        said_BN = self.tokens.gather(1, following)  # the target's token after an accepted node
        right = tree.tokens == said_BN.gather(1, tree.parents.clamp(min=0))
        accepted = tree.depths.gather(1, deepest(tree, right)[:, None])[:, 0]
        sizes = accepted if tree.sizes is None else tree.sizes
        rows = torch.stack((accepted, sizes), dim=1).tolist()  # the one wait for the device in a round
        self.counts = [count + 1 for count, _ in rows]
        # The root's position: behind the committed tokens.
        self._read([len(answer.prompt) + done - 1 for answer, done in zip(self.answers, self.done, strict=True)])
        new_tokens = []
        for row, (answer, count) in enumerate(zip(self.answers, self.counts, strict=True)):
            said = answer.tokens[self.done[row] : self.done[row] + count]
            new_tokens.append([*said, *[NO_TOKEN] * (count - len(said))])
            self.done[row] += count
        return Verified(new_tokens, [tree.nodes if tree.sizes is None else size for _, size in rows])

    def keep(self, rows: Sequence[int]) -> None:
        self.answers, self.starts = [self.answers[row] for row in rows], [self.starts[row] for row in rows]
        self.done, self.counts = [self.done[row] for row in rows], [self.counts[row] for row in rows]
        self.prompts = [self.prompts[row] for row in rows]
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        self.tokens = self.tokens[index]
        if self.features is not None:
            self.features = self.features[index][:, : max(self.counts, default=0)]


@dataclass
class Agreement:
    """Checks whether the answers are this target's own, on the first `CHECKED_TOKENS` tokens.

    Greedy answers must be its likeliest tokens. In float32 rounding only flips near ties. In lower precision a pass
    over many positions rounds differently from the single-token passes that wrote the answer.
    Drawn answers must be as surprising as the target's own draws, with p from `Sampling.probabilities`: the mean of
    -log p(token) - H(p) is 0 for them, higher for most other targets, and lower for a lower temperature or a closer cut
    than recorded. A token that top-k or top-p cut off (p = 0) is only possible by rounding at the edge of the cut.
    """

    lenient: bool  # the target rounds coarsely
    greedy_tokens: int = 0
    other: int = 0  # greedy tokens that are not the target's likeliest
    drawn_tokens: int = 0
    impossible: int = 0  # drawn tokens with p = 0
    excess: float = 0.0  # nats, summed over the possible drawn tokens
    variance: float = 0.0  # of that sum, if the tokens are the target's own draws

    @classmethod
    def of(cls, target: Target) -> "Agreement":
        return cls(lenient=target.dtype != torch.float32)

    @property
    def enough(self) -> bool:
        return self.greedy_tokens + self.drawn_tokens >= CHECKED_TOKENS

    def add(self, answer: RecordedAnswer, logits_NV: torch.Tensor, said_N: torch.Tensor) -> None:
        """Logits after each token but the last, and the tokens themselves."""
        if answer.sampling is None:
            return
        if answer.sampling.greedy:
            self.greedy_tokens += len(said_N)
            self.other += int((logits_NV.argmax(-1) != said_N).sum())
            return
        p_NV = answer.sampling.probabilities(logits_NV)
        p_N = p_NV.gather(1, said_N[:, None])[:, 0]
        possible_N = p_N > 0
        entropy_N = torch.special.entr(p_NV).sum(-1)
        # Mean squared surprise; clamped because 0 * log(0)^2 counts as 0.
        squares_N = p_NV.log().clamp_(min=-1e4).square_().mul_(p_NV).sum(-1)
        self.drawn_tokens += len(said_N)
        self.impossible += int((~possible_N).sum())
        self.excess += float((-p_N.log() - entropy_N)[possible_N].double().sum())
        self.variance += float((squares_N - entropy_N.square()).clamp_(min=0)[possible_N].double().sum())

    def check(self) -> None:
        """Raises UserError if the answers read so far are not the target's own."""
        rounded = 0.05 if self.lenient else 0.001  # share of tokens that rounding may have changed
        wrong = self.other > max(1, rounded * self.greedy_tokens)
        wrong |= self.impossible > max(1, rounded * self.drawn_tokens)
        # Six standard deviations, and 20 nats because few tokens are not normally distributed. Rounding changes p a
        # little: 0.05 nats a token.
        most_excess = max(0.05 * self.drawn_tokens, 6 * self.variance**0.5 + 20)
        if wrong or abs(self.excess) > most_excess:
            raise UserError(
                f"eval.answers: recorded from another target, in another precision (target.dtype), or with other "
                f"settings than recorded (temperature, top_p, top_k): {self}. Decode or regenerate with this target"
            )

    def __str__(self) -> str:
        parts = []
        if self.greedy_tokens:
            parts.append(f"{self.other:,} of {self.greedy_tokens:,} greedy tokens are not the target's likeliest")
        if self.drawn_tokens:
            cut = f", {self.impossible:,} of them cut off here" if self.impossible else ""
            mean = self.excess / max(1, self.drawn_tokens - self.impossible)
            parts.append(f"{self.drawn_tokens:,} drawn tokens, {mean:+.3f} nats each beyond its own{cut}")
        return "; ".join(parts) or "not checked: how they were drawn is not known"


@torch.no_grad()
def read_states(
    target: Target, answers: Sequence[RecordedAnswer], capture: Sequence[int], agreement: Agreement | None = None
) -> torch.Tensor | None:
    """The target's states of these layers [P, F], as `RecordedVerifier` takes them; None without layers.

    Args:
        agreement: counts the target's own tokens. Without it the head is not computed.
    """
    read = [Prompt.of(answer.prompt).then(answer.tokens[:-1]) for answer in answers]
    found: list[torch.Tensor | None] = [None] * len(answers)
    for rows in batches_by_length([*map(len, read)], pass_tokens(target.device.type)):
        longest = max(len(read[row]) for row in rows)
        padded = [[*read[row], *[0] * (longest - len(read[row]))] for row in rows]
        ids_BT = torch.tensor(padded, device=target.device)
        inserts = [PlacedInsert(i, insert) for i, row in enumerate(rows) for insert in read[row].inserts]
        if agreement is not None and not agreement.enough:
            states = target.states(ids_BT, capture, inserts=inserts)
            captured = states.captured
            for i, row in enumerate(rows):
                last = states.last[i, len(answers[row].prompt) - 1 : len(read[row])]
                said = torch.tensor(answers[row].tokens, device=target.device)
                rows_at_once = head_rows(target.vocab_size)
                for part, tokens in zip(last.split(rows_at_once), said.split(rows_at_once), strict=True):
                    agreement.add(answers[row], target.logits(part), tokens)
        elif capture:
            captured = target.captured_states(ids_BT, capture, inserts)
        else:
            break
        for i, row in enumerate(rows):
            found[row] = captured[i, : len(read[row])]
    return torch.cat([states for states in found if states is not None]) if capture else None


def head_rows(vocab_size: int) -> int:
    """Number of positions checked at once."""
    return max(1, min(HEAD_ROWS, HEAD_BYTES // (4 * LOGITS_COPIES * vocab_size)))


def head_bytes(vocab_size: int) -> int:
    """Of their logits, and of what is computed from them."""
    return 4 * LOGITS_COPIES * head_rows(vocab_size) * vocab_size


def pass_tokens(device_type: str) -> int:
    """Most padded tokens in one pass of the target; a longer answer is read alone. On a CPU more overflow caches."""
    return 1024 if device_type == "cpu" else 16384


# Takes the indices of a batch's answers and returns their states, in place of `read_states`.
StatesOf = Callable[[Sequence[int]], torch.Tensor]


def replay(
    target: Target,
    proposer: Proposer,
    answers: Sequence[RecordedAnswer],
    batch_size: int,
    agreement: Agreement | None = None,
    states_of: StatesOf | None = None,
) -> list[Generation]:
    """`replay_all` for one proposer. Its models may be trained further: their cached tensors stay fit for autograd."""
    one = {"": proposer}
    return replay_all(target, one, answers, batch_size, agreement, states_of=states_of, trainable=True)[""]


def replay_all(
    target: Target,
    proposers: dict[str, Proposer],
    answers: Sequence[RecordedAnswer],
    batch_size: int,
    agreement: Agreement | None = None,
    told: Callable[[int], object] = lambda count: None,
    states_of: StatesOf | None = None,
    trainable: bool = False,
) -> dict[str, list[Generation]]:
    """The rounds that decoding would take with each proposer: one `Generation` per answer, in order, with times 0. The
    target reads the answers once for all proposers.

    Args:
        batch_size: answers side by side.
        agreement: refuses answers that are not the target's own; None: no check.
        told: called with each batch's number of tokens when a proposer is done with it.
        states_of: returns the states of the layers that the proposers read; None: the target reads the answers.
        trainable: as in `replay`.

    Raises:
        UserError: the answers are another target's.
    """
    captures = {name: tuple(proposer.capture_layers) for name, proposer in proposers.items()}
    layers = sorted(set().union(*captures.values()))
    results: dict[str, list[Generation | None]] = {name: [None] * len(answers) for name in proposers}
    with torch.no_grad() if trainable else torch.inference_mode():  # small models on a CPU gain from the latter
        for rows in batches(answers, batch_size):
            batch = [answers[row] for row in rows]
            states = read_states(target, batch, layers, agreement) if states_of is None else states_of(rows)
            if agreement is not None:
                agreement.check()
            for name, proposer in proposers.items():
                mine = None if states is None else _of_layers(states, layers, captures[name])
                for row, generation in zip(rows, _replay_batch(target, proposer, batch, mine), strict=True):
                    results[name][row] = generation
                told(sum(len(answer.tokens) for answer in batch))
    return {name: [g for g in generations if g is not None] for name, generations in results.items()}


def batches(answers: Sequence[RecordedAnswer], batch_size: int) -> Iterator[list[int]]:
    """Indices of answers replayed side by side: similar lengths, the longest first."""
    order = sorted(range(len(answers)), key=lambda row: len(answers[row].tokens), reverse=True)
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def replay_bytes(positions: int, rows: int, longest: int, states: int, drafter: int) -> int:
    """Peak memory of a batch beside the models: states, the drafter's copy of them, its columns.

    Args:
        positions: of the batch.
        rows: answers in the batch.
        longest: tokens of the longest answer with its prompt.
        states: bytes of a position's captured states.
        drafter: bytes of a column's keys and values.
    """
    # The prompts' states are gathered, padded to the longest, before the drafter's first call. At worst all is prompt.
    return positions * states + rows * longest * (states + drafter)


def _of_layers(states_PF: torch.Tensor, layers: Sequence[int], wanted: Sequence[int]) -> torch.Tensor | None:
    if not wanted or list(wanted) == list(layers):
        return states_PF if wanted else None
    by_layer = states_PF.unflatten(-1, (len(layers), -1))
    return by_layer[:, [layers.index(layer) for layer in wanted]].flatten(1)


def _replay_batch(
    target: Target, proposer: Proposer, batch: Sequence[RecordedAnswer], states_PF: torch.Tensor | None
) -> Iterable[Generation]:
    verifier = RecordedVerifier(batch, states_PF, target)
    prompts, budgets = [answer.prompt for answer in batch], [len(answer.tokens) for answer in batch]
    generations = decode(verifier, proposer, prompts, (), budgets)
    for answer, generation in zip(batch, generations, strict=True):
        assert generation.token_ids == answer.tokens
        not_timed = dict.fromkeys(("prefill_seconds", "draft_seconds", "verify_seconds", "decode_seconds"), 0.0)
        vars(generation).update(not_timed | _turn(answer))
    return generations


def _turn(answer: RecordedAnswer) -> dict[str, Any]:
    """The fields of a `Generation` that name its turn."""
    return {key: getattr(answer, key) for key in ("benchmark", "category", "conversation_id", "turn", "pictures")}


def plain_rounds(answer: RecordedAnswer) -> Generation:
    """Plain decoding of the same answer: a round for every token after the first, which the prefill gives."""
    rounds = len(answer.tokens) - 1
    none = [0] * rounds
    return Generation(list(answer.prompt), answer.tokens, none, False, [1] * rounds, none, none, **_turn(answer))
