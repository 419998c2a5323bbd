"""Acceptance from recorded answers: the rounds of decoding, without the target in the loop.

    python eval/acceptance.py recipes/demo.yaml eval.mode=replay                             # of its own last run
    python eval/acceptance.py recipes/demo.yaml eval.mode=replay eval.answers=runs/demo/conversations.jsonl

The tree that is drafted at a root hangs on the target's states of the committed tokens alone: accepted positions reach
a drafter with the target's own states, never with drafted ones. Which of its nodes are accepted hangs on what the
target says next alone. So the target reads each answer once, all positions in one pass, and the loop of decoding
(`decode.run_rounds`) goes along it with a `RecordedVerifier` in the target's place:

    recorded   p p p | r a b c d e       tree below r:  a x, below a: b y, below b: z
    round 1            r a b c           a and b are accepted, the recorded c is the bonus
    round 2                  c d e       the tree drafted below c, with the target's states up to b

Exact, round by round:
- greedy answers: a node is right iff it is the target's likeliest token, and that is the recorded one;
- sampled answers, for trees whose nodes were chosen by rank: the bonus after a rejection never is one of the children
  that were rejected (`eval.accept`), so the recorded token is a child iff that child was accepted;
- the end: decoding that accepts more than is left cuts the rest off, and a tree that holds all that is left would.

Chains that were drawn from the drafter are refused: which ones were drawn is not recorded.

Shapes: B rows, N nodes, n positions, F captured states, V vocabulary; P positions of all answers, one after another.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from draftsmith.eval.accept import deepest
from draftsmith.eval.decode import Generation, Round, run_rounds
from draftsmith.eval.recorded_answers import RecordedAnswer
from draftsmith.models.draft_tree import DraftTree, Proposer
from draftsmith.models.target import Target
from draftsmith.recipes.errors import UserError

HEAD_ROWS = 512  # positions whose logits are alive at once
CHECKED_TOKENS = 1024  # of the answers, the longest ones first, are compared with what the target says
NO_TOKEN = -1


class RecordedVerifier:
    """Recorded answers in the target's place: a `decode.Verifier`.

    Args:
        states_PF: the target's captured states of each answer's prompt and tokens (but the last one, which no round
            reads), row after row; None where the proposer reads none.
        positions: that the target has.
    """

    def __init__(
        self,
        answers: Sequence[RecordedAnswer],
        states_PF: torch.Tensor | None,
        positions: int,
        device: torch.device,
    ):
        self.device, self.positions = device, positions
        self.answers = list(answers)
        self.states = states_PF
        # Padding follows every answer: no token equals it, so no tree goes beyond the end.
        longest = max(len(answer.tokens) for answer in answers) + 1
        padded = [[*a.tokens, *[NO_TOKEN] * (longest - len(a.tokens))] for a in answers]
        self.tokens = torch.tensor(padded, device=device)  # [B, longest]
        self.starts: list[int] = []  # where each row's states begin
        at = 0
        for answer in answers:
            self.starts.append(at)
            at += len(answer.prompt) + len(answer.tokens) - 1
        self.done = [1] * len(answers)  # tokens of each answer so far; the last of them is the root
        self.features: torch.Tensor | None = None
        self.counts: list[int] = []

    def prefill(self, prompts: Sequence[Sequence[int]]) -> list[int]:
        self.counts = [len(prompt) for prompt in prompts]
        self._read([0] * len(prompts))
        return [answer.tokens[0] for answer in self.answers]

    def _read(self, first: Sequence[int]) -> None:
        """The states of self.counts[b] positions of each row, from first[b] on."""
        if self.states is None:
            return
        at = torch.tensor([start + position for start, position in zip(self.starts, first, strict=True)])
        index = (at[:, None] + torch.arange(max(self.counts))).clamp_(max=len(self.states) - 1)
        self.features = self.states[index.to(self.device)]  # [B, n, F]

    def limits(self) -> list[int]:
        # As in decoding: a node of depth d stands at position (committed tokens but the root) + d.
        lengths = [len(answer.prompt) + done - 1 for answer, done in zip(self.answers, self.done, strict=True)]
        return [max(0, self.positions - 1 - length) for length in lengths]

    def verify(self, tree: DraftTree) -> None:
        """Nothing: what the target would say is recorded."""

    def accept(self, tree: DraftTree) -> Round:
        """The longest path that is recorded. Where it is all that is left, no bonus is: `NO_TOKEN` stands for it."""
        last = self.tokens.shape[1] - 1
        following = (tree.depths + torch.tensor(self.done, device=self.device)[:, None]).clamp(max=last)
        said_BN = self.tokens.gather(1, following)  # what the target says after a node, if it says the node
        right = tree.tokens == said_BN.gather(1, tree.parents.clamp(min=0))
        accepted = tree.depths.gather(1, deepest(tree, right)[:, None])[:, 0]
        sizes = accepted if tree.sizes is None else tree.sizes
        rows = torch.stack((accepted, sizes), dim=1).tolist()  # the one wait for the device in a round
        first = [len(answer.prompt) + done - 1 for answer, done in zip(self.answers, self.done, strict=True)]
        self.counts = [count + 1 for count, _ in rows]
        self._read(first)
        new_tokens = []
        for row, (answer, count) in enumerate(zip(self.answers, self.counts, strict=True)):
            said = answer.tokens[self.done[row] : self.done[row] + count]
            new_tokens.append([*said, *[NO_TOKEN] * (count - len(said))])
            self.done[row] += count
        return Round(new_tokens, [tree.nodes if tree.sizes is None else size for _, size in rows])

    def keep(self, rows: Sequence[int]) -> None:
        self.answers, self.starts = [self.answers[row] for row in rows], [self.starts[row] for row in rows]
        self.done, self.counts = [self.done[row] for row in rows], [self.counts[row] for row in rows]
        index = torch.tensor(rows, device=self.device)
        self.tokens = self.tokens[index]
        if self.features is not None:
            self.features = self.features[index][:, : max(self.counts)]


# The target's one pass over the recorded answers.


@dataclass
class Agreement:
    """Are the answers this target's own? Counted while it reads the first of them; that many tell.

    Greedy answers must be its likeliest tokens. In float32 rounding turns no more than a near tie; in lower precision a
    pass over many positions has other last bits than the one over a single token that wrote the answer.
    Drawn answers must be as surprising as the target's own draws: the mean of -log p(token) - H(p) is 0 for them (below
    0 where top-p or top-k cut the unlikely ones off), and the KL divergence for another target's.
    """

    lenient: bool  # the target rounds coarsely
    greedy_tokens: int = 0
    other: int = 0  # of them, not the target's likeliest
    drawn_tokens: int = 0
    excess: float = 0.0  # nats, summed
    variance: float = 0.0  # of that sum, if the tokens are its own draws

    def add(self, answer: RecordedAnswer, logits_NV: torch.Tensor, said_N: torch.Tensor) -> None:
        """Logits after each token but the last, and the tokens themselves."""
        if answer.sampling is None:
            return
        if answer.sampling.greedy:
            self.greedy_tokens += len(said_N)
            self.other += int((logits_NV.argmax(-1) != said_N).sum())
            return
        log_p_NV = (logits_NV / answer.sampling.temperature).log_softmax(-1)
        p_NV = log_p_NV.exp()
        entropy_N = torch.special.entr(p_NV).sum(-1)
        surprise_N = -log_p_NV.gather(1, said_N[:, None])[:, 0]
        self.drawn_tokens += len(said_N)
        self.excess += float((surprise_N - entropy_N).sum())
        self.variance += float(((p_NV * log_p_NV.clamp(min=-1e4).square()).sum(-1) - entropy_N.square()).sum())

    @classmethod
    def of(cls, target: Target) -> "Agreement":
        return cls(lenient=target.dtype != torch.float32)

    @property
    def enough(self) -> bool:
        return self.greedy_tokens + self.drawn_tokens >= CHECKED_TOKENS

    @property
    def most_other(self) -> float:
        """Share of greedy tokens that may differ."""
        return 0.05 if self.lenient else 0.001

    def check(self) -> None:
        """Raises UserError where the answers read so far are another target's."""
        if self.other > max(1, self.most_other * self.greedy_tokens):
            raise UserError(
                f"eval.answers: recorded from another target: {self.other:,} of {self.greedy_tokens:,} greedy tokens "
                f"({self.other / self.greedy_tokens:.1%}) are not what this one says there; at most "
                f"{self.most_other:.1%} can be rounding. Decode or regenerate with this target, in this precision"
            )
        if self.excess > max(0.05 * self.drawn_tokens, 6 * self.variance**0.5):
            raise UserError(
                f"eval.answers: recorded from another target, or drawn at another temperature: {self.drawn_tokens:,} "
                f"tokens are {self.excess / self.drawn_tokens:.2f} nats each more surprising to this one than its own "
                "draws would be. Decode or regenerate with this target"
            )

    def __str__(self) -> str:
        parts = []
        if self.greedy_tokens:
            parts.append(f"{self.other:,} of {self.greedy_tokens:,} greedy tokens are not the target's likeliest")
        if self.drawn_tokens:
            parts.append(
                f"{self.drawn_tokens:,} drawn tokens, {self.excess / self.drawn_tokens:+.3f} nats each beyond its own"
            )
        return "; ".join(parts) or "not checked: how they were drawn is not known"


@torch.no_grad()
def read_states(
    target: Target, answers: Sequence[RecordedAnswer], capture: Sequence[int], agreement: Agreement | None = None
) -> torch.Tensor | None:
    """The target's states of these layers [P, F], as `RecordedVerifier` takes them; None without layers.

    Args:
        agreement: counts which tokens are the target's own; without it the head is not computed.
    """
    agreement = None if agreement is None or agreement.enough else agreement
    if not capture and agreement is None:
        return None
    read = [[*answer.prompt, *answer.tokens[:-1]] for answer in answers]
    found: list[torch.Tensor | None] = [None] * len(answers)
    for rows in _passes([len(tokens) for tokens in read], target.device):
        longest = max(len(read[row]) for row in rows)
        padded = [[*read[row], *[0] * (longest - len(read[row]))] for row in rows]
        ids_BT = torch.tensor(padded, device=target.device)
        if agreement is None:
            captured = target.captured_states(ids_BT, capture)
        else:
            states = target.states(ids_BT, capture)
            captured = states.captured
            for i, row in enumerate(rows):
                last = states.last[i, len(answers[row].prompt) - 1 : len(read[row])]
                said = torch.tensor(answers[row].tokens, device=target.device)
                for part, tokens in zip(last.split(HEAD_ROWS), said.split(HEAD_ROWS), strict=True):
                    agreement.add(answers[row], target.logits(part), tokens)
        for i, row in enumerate(rows):
            found[row] = captured[i, : len(read[row])]
    return torch.cat([states for states in found if states is not None]) if capture else None


def pass_tokens(device_type: str) -> int:
    """Padded tokens that the target reads in one pass, if one answer is not longer. On a CPU more are no faster: what a
    layer computes leaves the caches."""
    return 1024 if device_type == "cpu" else 16384


def _passes(lengths: Sequence[int], device: torch.device) -> Iterator[list[int]]:
    """Rows that are read together: alike in length, and not more than a pass holds."""
    most = pass_tokens(device.type)
    rows: list[int] = []
    for row in sorted(range(len(lengths)), key=lengths.__getitem__, reverse=True):
        if rows and (len(rows) + 1) * lengths[rows[0]] > most:
            yield rows
            rows = []
        rows.append(row)
    yield rows


# Replay.


def replay(
    target: Target,
    proposer: Proposer,
    answers: Sequence[RecordedAnswer],
    batch_size: int,
    agreement: Agreement | None = None,
) -> list[Generation]:
    """`replay_all` by one proposer, whose models may go on training: what they keep is fit for autograd."""
    with torch.no_grad():
        return _replay(target, {"": proposer}, answers, batch_size, agreement, lambda count: None)[""]


def replay_all(
    target: Target,
    proposers: dict[str, Proposer],
    answers: Sequence[RecordedAnswer],
    batch_size: int,
    agreement: Agreement | None = None,
    told: Callable[[int], object] = lambda count: None,
) -> dict[str, list[Generation]]:
    """The rounds that decoding would have taken, by each of several proposers: one `Generation` an answer, in their
    order. The target reads the answers once for all. Times are 0: nothing was decoded.

    Args:
        batch_size: answers side by side.
        agreement: refuses answers that are not the target's own; None: they are taken for what they are.
        told: is called with the number of tokens of each batch that is done, proposer by proposer.

    Raises:
        UserError: the answers are another target's.
    """
    with torch.inference_mode():  # small models on a CPU gain over no_grad
        return _replay(target, proposers, answers, batch_size, agreement, told)


def _replay(
    target: Target,
    proposers: dict[str, Proposer],
    answers: Sequence[RecordedAnswer],
    batch_size: int,
    agreement: Agreement | None,
    told: Callable[[int], object],
) -> dict[str, list[Generation]]:
    captures = {name: tuple(proposer.capture_layers) for name, proposer in proposers.items()}
    layers = sorted(set().union(*captures.values()))
    results: dict[str, list[Generation | None]] = {name: [None] * len(answers) for name in proposers}
    for rows in batches(answers, batch_size):
        batch = [answers[row] for row in rows]
        states = read_states(target, batch, layers, agreement)
        if agreement is not None:
            agreement.check()
        for name, proposer in proposers.items():
            mine = None if states is None else _of_layers(states, layers, captures[name])
            for row, generation in zip(rows, _replay_batch(target, proposer, batch, mine), strict=True):
                results[name][row] = generation
            told(sum(len(answer.tokens) for answer in batch))
    return {name: [g for g in generations if g is not None] for name, generations in results.items()}


def batches(answers: Sequence[RecordedAnswer], batch_size: int) -> Iterator[list[int]]:
    """Which answers go side by side: of like length, so that they end together; the longest, which need most, first."""
    order = sorted(range(len(answers)), key=lambda row: len(answers[row].tokens), reverse=True)
    for start in range(0, len(order), batch_size):
        yield order[start : start + batch_size]


def replay_bytes(positions: int, rows: int, longest: int, states: int, drafter: int) -> int:
    """Most that a batch of replay keeps alive beside the models: states, what the drafter reads of them, its columns.

    Args:
        positions: of the batch; rows: answers in it; longest: tokens of the longest.
        states, drafter: bytes of the captured states of a position, of the drafter's keys and values of a column.
    """
    # The prompts' states are gathered, padded to the longest, before the drafter's first call; at worst all is prompt.
    return positions * states + rows * longest * (states + drafter)


def positions_of(answers: Sequence[RecordedAnswer], rows: Sequence[int]) -> int:
    """P: whose states are alive while these answers are replayed."""
    return sum(len(answers[row].prompt) + len(answers[row].tokens) - 1 for row in rows)


def _of_layers(states_PF: torch.Tensor, layers: Sequence[int], wanted: Sequence[int]) -> torch.Tensor | None:
    if not wanted or list(wanted) == list(layers):
        return states_PF if wanted else None
    by_layer = states_PF.unflatten(-1, (len(layers), -1))
    return by_layer[:, [layers.index(layer) for layer in wanted]].flatten(1)


def _replay_batch(
    target: Target, proposer: Proposer, batch: Sequence[RecordedAnswer], states_PF: torch.Tensor | None
) -> Iterable[Generation]:
    verifier = RecordedVerifier(batch, states_PF, target.config.max_position_embeddings, target.device)
    prompts, budgets = [answer.prompt for answer in batch], [len(answer.tokens) for answer in batch]
    generations = run_rounds(verifier, proposer, prompts, (), budgets)
    for answer, generation in zip(batch, generations, strict=True):
        assert generation.token_ids == answer.tokens
        generation.prefill_seconds = generation.draft_seconds = 0.0
        generation.verify_seconds = generation.decode_seconds = 0.0
        generation.benchmark, generation.category = answer.benchmark, answer.category
        generation.conversation_id, generation.turn = answer.conversation_id, answer.turn
    return generations


def plain_rounds(answer: RecordedAnswer) -> Generation:
    """Plain decoding of the same answer: a round for every token but the first, which the prefill gives."""
    rounds = len(answer.tokens) - 1
    return Generation(
        answer.prompt,
        answer.tokens,
        [0] * rounds,
        last_round_cut=False,
        tree_nodes=[1] * rounds,
        draft_calls=[0] * rounds,
        benchmark=answer.benchmark,
        category=answer.category,
        conversation_id=answer.conversation_id,
        turn=answer.turn,
    )
