"""The planner's formula: the cost of a decoding round on this machine, and the predicted speed-up.

    T_sd / T_t = (T_draft + T_v(n) + T_rest) / (T_t * tau)          seconds per token over those of plain decoding

(SpecMQuant, arXiv 2505.22179, with d * T_d for T_draft.) T_draft is the time of a round's d draft calls and of the
policy's work on them, T_v(n) one forward of the target over n nodes, T_rest everything else: accept, commit,
bookkeeping. T_t is a round of plain decoding. Deviations: the paper counts forwards alone and takes T_t = T_v(1); here
the rest of a round counts on both sides, because it is a tenth of the time on small models. Rounds differ in n and d
(policies that stop early), so costs are summed over the rounds of recorded answers; the formula is their mean. The
drafter's reading of an answer's prompt is added.

All costs come from real rounds of the decoding loop (`eval.decoding.decode`) over recorded text, at one context length.
In each repeat all probes take turns. Other work slows the machine unevenly, so a probe's time is scaled by the plain
rounds before and after it. Curves are straight lines between and beyond the measured numbers of nodes and calls.

Answers side by side share a round, which costs as much as its largest tree and most calls. Each answer is replayed
alone, so policies that stop early are predicted a little too fast.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import cycle, pairwise
from statistics import median
from typing import Any

import numpy as np
import torch

from draftsmith.eval.decoding.accept import acceptance_of
from draftsmith.eval.decoding.decode import Clock, Generation, Mark, TargetVerifier, decode
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.families import usable_positions
from draftsmith.models.prompt import Insert, Prompt
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.models.target import Target
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import CHAINS, TreeSection

CALLS = (1, 2, 4, 8, 16, 32, 64)  # draft calls to probe, up to a family's most
PROBED_NODES = (4, 8, 16, 24, 32, 48, 60, 80, 100, 128, 192, 256)  # nodes to probe, up to the largest tree's
ROUNDS = 12  # of a probe in each repeat
SETTLING = 3  # first rounds to leave out: plain rounds took a sixth longer until caches held this model again
REPEATS = 4
BUSY = 0.2  # interquartile range over median of plain rounds; 0.35 and 0.46 with 18 processes on two cores
FEWEST = 4  # samples that a point inside a curve needs
TURNS = 2  # probes between plain rounds
PLAIN_PROBE = ""  # plain decoding's name among the probes
BEAMS = ("eagle2", "ddd", "svip_tree")


@dataclass(frozen=True)
class Curve:
    """Measured points (x, seconds), straight lines between them and beyond."""

    points: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, samples: dict[int, list[float]]) -> "Curve":
        """Medians. An x with fewer than FEWEST samples is left out, unless it is the first or the last."""
        ends = min(samples), max(samples)
        known = sorted(x for x, times in samples.items() if len(times) >= FEWEST or x in ends)
        return cls(tuple((float(x), median(samples[x])) for x in known))

    def __call__(self, x: Sequence[int] | np.ndarray) -> np.ndarray:
        """Seconds at each x. The outermost lines continue beyond the ends, but never fall."""
        at = np.asarray(x, dtype=float)
        xs, seconds = (np.array(each) for each in zip(*self.points, strict=True))
        inside = np.interp(at, xs, seconds)
        if len(xs) == 1:
            return inside
        first, last = (max(0.0, (seconds[i + 1] - seconds[i]) / (xs[i + 1] - xs[i])) for i in (0, len(xs) - 2))
        below, above = np.minimum(at - xs[0], 0.0), np.maximum(at - xs[-1], 0.0)
        return np.maximum(inside + first * below + last * above, 0.0)


@dataclass(frozen=True)
class Costs:
    """Measured seconds of the parts of a round."""

    plain: float  # T_t: a round of plain decoding, its rest included
    plain_spread: tuple[float, float]  # quartiles of such rounds: far apart if others use the machine
    verify: dict[str, Curve]  # T_v(n), of `chain` and of `tree`, over the nodes, the root included
    rest: dict[str, Curve]  # T_rest, likewise
    draft: dict[str, Curve]  # T_draft over the draft calls of a round, by `family`; reading committed tokens included
    prompt: float  # per prompt token, for the drafter's reading in the first round
    context: int  # committed tokens at the measurement
    rows: int = 1  # answers side by side; seconds are those of a round of all of them
    probes: dict[str, tuple[float, ...]] = field(default_factory=dict)  # each probe's round, by repeat, in plain rounds
    repeats: tuple["Costs", ...] = ()  # the costs from each repeat alone

    @property
    def busy(self) -> bool:
        """Whether something else used the machine during the measurement."""
        low, high = self.plain_spread
        return high - low > BUSY * self.plain

    def to_dict(self) -> dict[str, Any]:
        """For plan.json: curves as lists of [x, milliseconds], everything in milliseconds."""

        def curves(named: dict[str, Curve]) -> dict[str, list[list[float]]]:
            return {name: [[x, round(1e3 * s, 4)] for x, s in curve.points] for name, curve in named.items()}

        return {
            "unit": "milliseconds",
            "context": self.context,
            "rows": self.rows,
            "plain_round": round(1e3 * self.plain, 4),
            "plain_round_quartiles": [round(1e3 * seconds, 4) for seconds in self.plain_spread],
            "verify_by_nodes": curves(self.verify),
            "rest_by_nodes": curves(self.rest),
            "draft_by_calls": curves(self.draft),
            "prompt_per_token": round(1e3 * self.prompt, 6),
            "probes_in_plain_rounds_by_repeat": {n: [round(x, 4) for x in took] for n, took in self.probes.items()},
        }


def shape_of(tree: TreeSection) -> str:
    """Chains cost less than trees of as many nodes: they need no mask and move nothing in the cache."""
    return "chain" if tree.policy in CHAINS else "tree"


def family(tree: TreeSection) -> str:
    """Name of a group of trees with equal costs per draft call. They differ in size and thresholds."""
    parts: list[str] = [tree.policy]
    if tree.policy in BEAMS:
        parts.append(f"top_k {tree.width}")
    if tree.policy == "ddd":
        at = tree.ddd.at if isinstance(tree.ddd.at, str) else " ".join(map(str, tree.ddd.at))
        parts.append(f"tested at {at}")
    if tree.policy == "static":
        parts.append(f"paths {tree.static_paths}")
    if tree.policy == "c2t":
        beam = "all" if tree.c2t.beam is None else tree.c2t.beam
        parts.append(f"top_k {tree.width}, beam {beam}, {tree.c2t.classifier}, entropy over {tree.c2t.entropy_over}")
    if tree.draw == "sampled":
        parts.append("drawn")
    if tree.vocab_size is not None:
        parts.append(f"{tree.vocab_size} tokens")
    return ", ".join(parts)


# The formula.


def predicted(costs: Costs, tree: TreeSection | None, recorded: Sequence[Generation]) -> list[Generation]:
    """`recorded` with predicted seconds.

    Args:
        tree: the drafted tree; None: plain decoding.
        recorded: rounds from `eval.recorded.replay` or from decoding.
    """
    return [_timed(costs, tree, generation) for generation in recorded]


def _timed(costs: Costs, tree: TreeSection | None, generation: Generation) -> Generation:
    draft = verify = total = 0.0
    if tree is None:
        verify = generation.rounds * float(costs.verify["chain"]([1]).item())
        total = generation.rounds * costs.plain
    elif generation.rounds:
        nodes, shape = generation.tree_nodes, shape_of(tree)
        draft = float(costs.draft[family(tree)](generation.draft_calls).sum())
        draft += costs.prompt * len(generation.prompt_token_ids)
        verify = float(costs.verify[shape](nodes).sum())
        total = draft + verify + float(costs.rest[shape](nodes).sum())
    return replace(generation, draft_seconds=draft, verify_seconds=verify, decode_seconds=total)


# Measuring.


@dataclass(frozen=True)
class TimedRound:
    """Seconds of the parts of one real round."""

    number: int  # in its answer, from 0; the drafter reads the prompt in round 0
    nodes: int
    calls: int
    draft: float
    verify: float
    rest: float

    @property
    def seconds(self) -> float:
        return self.draft + self.verify + self.rest


def measure_costs(
    target: Target,
    proposer_of: Callable[[TreeSection], Proposer],
    trees: Sequence[TreeSection],
    texts: Sequence[Sequence[int]],
    context: int,
    sampling: Sampling = GREEDY,
    rows: int = 1,
    repeats: int = REPEATS,
) -> Costs:
    """Measures the costs of all rounds that these trees may need.

    Args:
        proposer_of: builds a proposer for a tree.
        texts: prompts or token ids to continue, cut or joined to `context` tokens.
        rows: answers decoded side by side.

    Raises:
        UserError: no room for such trees after that context.
    """
    probes: dict[str, tuple[TreeSection, Proposer]] = {}
    for tree in probe_trees(trees):
        probes[f"{family(tree)}, {tree.nodes} nodes, {tree.draft_calls} calls"] = (tree, proposer_of(tree))
    context = min(context, room_for(usable_positions(target.config), trees))
    prompts = [joined([*texts[i:], *texts[:i]], context) for i in range(len(texts))]
    names = list(probes)
    raw: list[list[tuple[str, list[TimedRound]]]] = []  # of each repeat: probes and plain rounds as they took turns
    total = (repeats + 1) * (len(names) + -(-len(names) // TURNS) + 1)
    with Bar(total=total, desc="costs", unit="probe", leave=False) as progress:
        for repeat in range(repeats + 1):
            first = repeat * len(names) // (repeats + 1)
            order = names[first:] + names[:first]
            asked = [prompts[(repeat * rows + row) % len(prompts)] for row in range(rows)]
            taken: list[tuple[str, list[TimedRound]]] = []
            for name in [n for i in range(0, len(order), TURNS) for n in (PLAIN_PROBE, *order[i : i + TURNS])] + [
                PLAIN_PROBE
            ]:
                proposer = probes[name][1] if name in probes else None
                taken.append((name, timed_rounds(target, proposer, asked, sampling)))
                progress.update()
            if repeat:  # the first one is a warm-up
                raw.append(taken)
    plain = [r.seconds for taken in raw for name, timed in taken if name == PLAIN_PROBE for r in _settled(timed)]
    low, high = np.percentile(plain, (25, 75))
    measured = [_evened(taken, median(plain)) for taken in raw]
    whole = {name: [r for one in measured for r in one[name]] for name in (PLAIN_PROBE, *names)}
    kept = {name: tree for name, (tree, _) in probes.items()}
    costs, *each = (_costs(kept, one, (float(low), float(high)), len(prompts[0]), rows) for one in (whole, *measured))
    took = {
        name: tuple(
            median(r.seconds for r in _settled(one[name])) / costs.plain
            for one, costs in zip(measured, each, strict=True)
        )
        for name in names
    }
    return replace(costs, probes=took, repeats=tuple(each))


def joined(texts: Sequence[Sequence[int]], length: int) -> Prompt:
    """The first `length` tokens of the texts, one after another and then from the first one again.

    A picture that would reach beyond the end is left out, and the text behind it follows.
    """
    tokens, inserts = list[int](), list[Insert]()
    for text in map(Prompt.of, cycle(texts)):
        start = 0
        for insert in (*text.inserts, None):
            end = len(text) if insert is None else insert.first
            tokens += text[start:end]
            if len(tokens) >= length:
                return Prompt(tokens[:length], tuple(inserts))
            if insert is not None:
                start = end + insert.length
                if len(tokens) + insert.length <= length:
                    inserts.append(insert.at(len(tokens)))
                    tokens += text[end:start]
    raise ValueError("no texts")


def room_for(positions: int, trees: Sequence[TreeSection]) -> int:
    """The longest context at which the costs of such trees can be measured. Raises UserError if there is none."""
    deepest = max((tree.calls for tree in trees), default=0)
    room = positions - 1 - ROUNDS * (deepest + 1)
    if room < 1:
        raise UserError(
            f"eval.planner: {ROUNDS} rounds with drafts of up to {deepest} tokens, which the measurement of costs "
            f"decodes, leave no context in the target's {positions:,} positions; give candidates with fewer draft_calls"
        )
    return room


def _settled(timed: Sequence[TimedRound]) -> list[TimedRound]:
    return [r for r in timed if r.number >= SETTLING]


def _evened(taken: Sequence[tuple[str, list[TimedRound]]], usual: float) -> dict[str, list[TimedRound]]:
    """The rounds by probe, scaled as if every plain round had taken `usual` seconds."""
    plain = {
        i: median(r.seconds for r in _settled(timed)) for i, (name, timed) in enumerate(taken) if name == PLAIN_PROBE
    }
    paces = np.interp(range(len(taken)), list(plain), list(plain.values()))
    result: dict[str, list[TimedRound]] = defaultdict(list)
    for (name, timed), pace in zip(taken, paces, strict=True):
        by = usual / float(pace)
        result[name] += [replace(r, draft=r.draft * by, verify=r.verify * by, rest=r.rest * by) for r in timed]
    return result


def _costs(
    probes: dict[str, TreeSection],
    rounds: dict[str, list[TimedRound]],
    plain_spread: tuple[float, float],
    context: int,
    rows: int,
) -> Costs:
    verify, rest, draft = (defaultdict[str, dict[int, list[float]]](lambda: defaultdict(list)) for _ in range(3))
    reading: list[float] = []
    settled = {name: _settled(timed) for name, timed in rounds.items()}
    for r in settled[PLAIN_PROBE]:  # a root alone is a chain and a tree of one node
        for shape in ("chain", "tree"):
            verify[shape][1].append(r.verify)
            rest[shape][1].append(r.rest)
    # Draft costs come from a family's largest probe per number of calls: C2T's smaller ones have smaller frontiers.
    largest: dict[tuple[str, int], int] = {}
    for tree in probes.values():
        key = family(tree), tree.calls
        largest[key] = max(largest.get(key, 0), tree.most)
    for name, tree in probes.items():
        later, shape = settled[name], shape_of(tree)
        for r in later:
            verify[shape][r.nodes].append(r.verify)
            rest[shape][r.nodes].append(r.rest)
            if tree.policy != "c2t" or tree.most == largest[family(tree), tree.calls]:
                draft[family(tree)][r.calls].append(r.draft)
        usual = median(r.draft for r in later)
        reading += [r.draft - usual for r in rounds[name] if r.number == 0]
    return Costs(
        plain=median(r.seconds for r in settled[PLAIN_PROBE]),
        plain_spread=plain_spread,
        verify={shape: Curve.of(samples) for shape, samples in verify.items()},
        rest={shape: Curve.of(samples) for shape, samples in rest.items()},
        draft={name: Curve.of(samples) for name, samples in draft.items()},
        prompt=max(0.0, median(reading)) / context if reading else 0.0,
        context=context,
        rows=rows,
    )


def probe_trees(trees: Sequence[TreeSection]) -> list[TreeSection]:
    """Trees to measure for the costs of all rounds of `trees`: for every family few, some and the most calls.

    They never stop early. Chains have one node more than calls; trees cycle through the numbers of nodes. C2T's trees
    are as large as possible, because a call costs as much as its frontier. With a strict classifier, drafting is then
    predicted somewhat too slow.
    """
    families: dict[str, TreeSection] = {}
    for tree in trees:
        known = families.get(family(tree))
        if known is None or (tree.calls, _limit(tree)) > (known.calls, _limit(known)):
            families[family(tree)] = tree
    most = max((_limit(tree) for tree in trees if shape_of(tree) == "tree"), default=0)
    wanted = sorted({n for n in PROBED_NODES if n < most} | ({most} if most else set()))
    found: list[TreeSection] = []
    uncovered = list(wanted)
    for tree in sorted(families.values(), key=_capacity):
        if tree.policy == "static":
            found.append(tree)
            continue
        for calls in (*(calls for calls in CALLS if calls < tree.calls), tree.calls):
            if shape_of(tree) == "chain":
                found.append(_endless(tree, calls, calls + 1))
                continue
            capacity = _capacity(tree, calls)
            if tree.policy == "c2t":
                nodes = capacity
            else:
                fitting = [n for n in uncovered if n <= capacity] or [n for n in wanted if n <= capacity]
                nodes = fitting[-1] if fitting else min(2, most)
            uncovered = [n for n in uncovered if n != nodes]
            found.append(_endless(tree, calls, nodes))
    growing = [tree for tree in families.values() if tree.policy in (*BEAMS, "c2t")]
    largest = max(growing, key=lambda tree: (tree.policy in BEAMS, _capacity(tree)), default=None)
    if largest is not None:
        found += [_endless(largest, largest.calls, n) for n in uncovered if n <= _capacity(largest)]
    return found


def _limit(tree: TreeSection) -> int:
    """Most nodes of a probe. It bounds C2T without a limit, to keep the measurement short."""
    return min(tree.most, PROBED_NODES[-1]) if tree.policy == "c2t" and tree.nodes is None else tree.most


def _capacity(tree: TreeSection, calls: int | None = None) -> int:
    """Nodes that so many calls can propose, the root included."""
    calls = calls or tree.calls
    if tree.policy in BEAMS:
        return 1 + tree.width + (calls - 1) * tree.width**2
    limit = _limit(tree)
    if tree.policy != "c2t":
        return limit
    level, nodes = 1, 1
    for _ in range(calls):
        level = min(level * tree.width, tree.c2t.beam or limit, limit)
        nodes = min(nodes + level, limit)
    return nodes


def _endless(tree: TreeSection, calls: int, nodes: int) -> TreeSection:
    """The tree with so many calls and nodes, and with a threshold that never stops it."""
    update: dict[str, Any] = {"draft_calls": calls, "nodes": nodes}
    if tree.policy == "ddd":
        update["ddd"] = tree.ddd.model_copy(update={"threshold": -1e9})
    if tree.policy in ("svip", "svip_tree"):
        update["svip"] = tree.svip.model_copy(update={"h": 1e9})
    if tree.policy == "c2t":
        update["c2t"] = tree.c2t.model_copy(update={"beta": 0.0})
    return tree.model_copy(update=update)


def timed_rounds(
    target: Target, proposer: Proposer | None, prompts: Sequence[Sequence[int]], sampling: Sampling = GREEDY
) -> list[TimedRound]:
    """The first ROUNDS rounds after each prompt."""
    draws = None if sampling.greedy else [SeededDraws(0, row) for row in range(len(prompts))]
    verifier = TargetVerifier(target, proposer, acceptance_of(sampling))
    budgets = [verifier.positions - len(prompt) for prompt in prompts]
    seen: list[tuple[int, int, Sequence[Mark]]] = []

    def watch(nodes: int, calls: int, marks: Sequence[Mark]) -> None:
        seen.append((nodes, calls, marks))
        if len(seen) == ROUNDS:
            raise _Enough

    with suppress(_Enough), torch.inference_mode():  # as in an evaluation; with gradients rounds take a tenth longer
        decode(verifier, proposer, prompts, (), budgets, draws, watch)
    timed = []
    for number, (nodes, calls, marks) in enumerate(seen):
        before, draft, verify, after = (Clock.seconds(a, b) for a, b in pairwise(marks))
        timed.append(TimedRound(number, nodes, calls, draft, verify, before + after))
    return timed


class _Enough(Exception):
    """Ends decoding after ROUNDS rounds."""
