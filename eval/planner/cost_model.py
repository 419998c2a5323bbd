"""The planner's formula: the cost of a decoding round on this machine, and the predicted speed-up.

    T_sd / T_t = (T_draft + T_v(n) + T_rest) / (T_t * tau)          seconds per token over those of plain decoding

(SpecMQuant, arXiv 2505.22179, with d * T_d for T_draft.) T_draft is the time of a round's d draft calls and of the
policy's work on them, T_v(n) one forward of the target over n nodes, T_rest everything else: accept, commit,
bookkeeping. T_t is a round of plain decoding. Deviations: the paper counts forwards alone and takes T_t = T_v(1); here
the rest of a round counts on both sides, because it is a tenth of the time on small models. Rounds differ in n and d
(policies that stop early), so costs are summed over the rounds of recorded answers; the formula is their mean. The
drafter's reading of an answer's prompt is added.

`eval.planner.measuring` times such rounds. Curves are straight lines between and beyond the measured numbers of nodes
and calls.

Answers side by side share a round, which costs as much as its largest tree and most calls. Each answer is replayed
alone, so policies that stop early are predicted a little too fast.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import numpy as np

from draftsmith.eval.decoding.decode import Generation
from draftsmith.recipes.schema import CHAINS, TreeSection

CALLS = (1, 2, 8, 32)  # draft calls to probe, up to half of a family's most, and the most: from 2 on, all cost alike
PROBED_NODES = (4, 8, 16, 24, 32, 48, 60, 80, 100, 128, 192, 256)  # nodes to probe, up to the largest tree's
SETTLING = 3  # first rounds to leave out: plain rounds took a sixth longer until caches held this model again
BUSY = 0.2  # interquartile range over median of plain rounds; 0.35 and 0.46 with 18 processes on two cores
FEWEST = 4  # samples that a point inside a curve needs
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
        parts.append(f"top_k {tree.width}, beam {beam}, {tree.c2t.classifier}")
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


# Measured rounds.


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


def settled(timed: Sequence[TimedRound]) -> list[TimedRound]:
    return [r for r in timed if r.number >= SETTLING]


def costs_of(
    probes: dict[str, TreeSection],
    rounds: dict[str, list[TimedRound]],
    plain_spread: tuple[float, float],
    context: int,
    rows: int,
) -> Costs:
    """Costs from the timed rounds of each probe, and of PLAIN_PROBE."""
    verify, rest, draft = (defaultdict[str, dict[int, list[float]]](lambda: defaultdict(list)) for _ in range(3))
    reading: list[float] = []
    later_rounds = {name: settled(timed) for name, timed in rounds.items()}
    for r in later_rounds[PLAIN_PROBE]:  # a root alone is a chain and a tree of one node
        for shape in ("chain", "tree"):
            verify[shape][1].append(r.verify)
            rest[shape][1].append(r.rest)
    # Draft costs come from a family's largest probe per number of calls: C2T's smaller ones have smaller frontiers.
    largest: dict[tuple[str, int], int] = {}
    for tree in probes.values():
        key = family(tree), tree.calls
        largest[key] = max(largest.get(key, 0), tree.most)
    for name, tree in probes.items():
        later, shape = later_rounds[name], shape_of(tree)
        for r in later:
            verify[shape][r.nodes].append(r.verify)
            rest[shape][r.nodes].append(r.rest)
            if tree.policy != "c2t" or tree.most == largest[family(tree), tree.calls]:
                draft[family(tree)][r.calls].append(r.draft)
        usual = median(r.draft for r in later)
        reading += [r.draft - usual for r in rounds[name] if r.number == 0]
    return Costs(
        plain=median(r.seconds for r in later_rounds[PLAIN_PROBE]),
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
        for calls in (*(calls for calls in CALLS if 2 * calls <= tree.calls), tree.calls):
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
