"""The planner's formula: the cost of a decoding round on this machine, and the predicted speed-up.

    T_sd / T_t = (T_draft + T_v(n) + T_rest) / (T_t * tau)          seconds per token over those of plain decoding

(SpecMQuant, arXiv 2505.22179, with d * T_d for T_draft.) T_draft is the time of a round's d draft calls and of the
policy's work on them, T_v(n) one forward of the target over n nodes, T_rest everything else. T_t is a round of plain
decoding. Deviations: the paper counts forwards alone and takes T_t = T_v(1); here the rest of a round counts on both
sides, because it is a tenth of the time on small models. Rounds differ in n and d (policies that stop early), so costs
are summed over the rounds of recorded answers. The drafter's reading of an answer's prompt is added.

`eval.planner.measuring` times probes: rounds of some trees that never stop early. Costs between the probes' numbers of
nodes and calls lie on straight lines.

Answers side by side share a round, which costs as much as its largest tree and most calls. Each answer is replayed
alone, so policies that stop early are predicted a little too fast.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, NamedTuple

import numpy as np

from draftsmith.eval.decoding.decode import Generation
from draftsmith.recipes.sections.eval import CHAINS, TreeSection

PROBED_NODES = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # nodes to probe, up to the largest tree's
BUSY = 0.2  # interquartile range over median of plain rounds; 0.35 and 0.46 with 18 processes on two cores
PLAIN_PROBE = ""  # plain decoding's name among the probes
BEAMS = ("eagle2", "ddd", "svip_tree")


class Parts(NamedTuple):
    """A probe's rounds: their nodes and calls, and median seconds of their parts."""

    nodes: int
    calls: int
    draft: float
    verify: float
    rest: float
    reading: float = 0.0  # an answer's first round drafts longer by this, because the drafter reads the prompt
    spread: float = 0.0  # interquartile range over median of whole rounds


@dataclass(frozen=True)
class Curve:
    """Points (x, seconds) in order, and straight lines between them."""

    points: tuple[tuple[float, float], ...]

    def __call__(self, x: Sequence[int]) -> np.ndarray:
        xs, seconds = zip(*self.points, strict=True)
        return np.interp(x, xs, seconds)


@dataclass(frozen=True)
class Costs:
    """Measured seconds of the parts of a round."""

    plain: float  # T_t: a round of plain decoding, its rest included
    verify: dict[str, Curve]  # T_v(n), of `chain` and of `tree`, over the nodes, the root included
    rest: dict[str, Curve]  # T_rest, likewise
    draft: dict[str, Curve]  # T_draft over the draft calls of a round, by `family`; reading committed tokens included
    prompt: float  # per prompt token, for the drafter's reading in the first round
    context: int  # committed tokens at the measurement
    rows: int = 1  # answers side by side; seconds are those of a round of all of them
    busy: bool = False  # something else used the machine during the measurement

    def to_dict(self) -> dict[str, Any]:
        """For plan.json: curves as lists of [x, milliseconds], everything in milliseconds."""

        def curves(named: dict[str, Curve]) -> dict[str, list[list[float]]]:
            return {name: [[x, round(1e3 * s, 4)] for x, s in curve.points] for name, curve in named.items()}

        return {
            "unit": "milliseconds",
            "context": self.context,
            "rows": self.rows,
            "plain_round": round(1e3 * self.plain, 4),
            "verify_by_nodes": curves(self.verify),
            "rest_by_nodes": curves(self.rest),
            "draft_by_calls": curves(self.draft),
            "prompt_per_token": round(1e3 * self.prompt, 6),
        }


def shape_of(tree: TreeSection) -> str:
    """Chains cost less than trees of as many nodes: they need no mask and move nothing in the cache."""
    return "chain" if tree.policy in CHAINS else "tree"


def family(tree: TreeSection) -> str:
    """Name of a group of trees with equal costs per draft call. They differ in size and thresholds."""
    parts: list[str] = [tree.policy]
    if tree.policy in (*BEAMS, "c2t"):
        parts.append(f"top_k {tree.width}")
    if tree.policy == "ddd":
        parts.append(f"tested at {tree.ddd.at}")
    if tree.policy == "static":
        parts.append(f"paths {tree.static_paths}")
    if tree.policy == "c2t":
        parts.append(tree.c2t.model_dump_json(exclude={"beta"}))
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
        recorded: rounds from `eval.replay.replay` or from decoding.
    """
    result = []
    for generation in recorded:
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
        result.append(replace(generation, draft_seconds=draft, verify_seconds=verify, decode_seconds=total))
    return result


# Probes.


def costs_of(probes: Mapping[str, TreeSection], parts: Mapping[str, Parts], context: int, rows: int) -> Costs:
    """Costs from the measured `parts` of each probe, and of PLAIN_PROBE."""

    def curves(points: Iterable[tuple[str, int, float]]) -> dict[str, Curve]:
        """From (name, x, seconds): the medians at each x."""
        found: dict[str, dict[int, list[float]]] = {}
        for name, x, seconds in points:
            found.setdefault(name, {}).setdefault(x, []).append(seconds)
        return {
            name: Curve(tuple((float(x), median(seconds)) for x, seconds in sorted(by_x.items())))
            for name, by_x in found.items()
        }

    plain, trees = parts[PLAIN_PROBE], [(tree, parts[name]) for name, tree in probes.items()]
    # A root alone is a chain and a tree of one node.
    shapes = [("chain", plain), ("tree", plain), *((shape_of(tree), probe) for tree, probe in trees)]
    return Costs(
        plain=plain.draft + plain.verify + plain.rest,
        verify=curves((shape, probe.nodes, probe.verify) for shape, probe in shapes),
        rest=curves((shape, probe.nodes, probe.rest) for shape, probe in shapes),
        draft=curves((family(tree), probe.calls, probe.draft) for tree, probe in trees),
        prompt=max(0.0, median(probe.reading for _, probe in trees)) / context,
        context=context,
        rows=rows,
        busy=plain.spread > BUSY,
    )


def probe_trees(trees: Sequence[TreeSection]) -> dict[str, TreeSection]:
    """Named trees that never stop early, from which the costs of all rounds of `trees` follow.

    Of every family one, two and the most calls, with as many nodes as the calls may propose (from the second on, all
    calls cost alike); and in the family with the largest trees all of PROBED_NODES. With a strict C2T classifier, whose
    frontier is smaller, drafting is predicted somewhat too slow.
    """
    families: dict[str, list[TreeSection]] = {}
    for tree in trees:
        families.setdefault(family(tree), []).append(tree)
    found: list[TreeSection] = []
    widest: list[TreeSection] = []
    for members in families.values():
        one = members[0]
        calls, nodes = (max(getattr(tree, key) for tree in members) for key in ("calls", "most"))
        if one.policy == "static":
            found.append(one)
            continue
        found += [_endless(one, few, min(nodes, _capacity(one, few))) for few in sorted({1, min(2, calls), calls})]
        if one.policy in BEAMS:
            widest.append(_endless(one, calls, nodes))
    if widest:
        tree = max(widest, key=lambda tree: tree.most)
        found += [_endless(tree, tree.calls, nodes) for nodes in PROBED_NODES if nodes < tree.most]
    return {f"{family(tree)}, {tree.nodes} nodes, {tree.draft_calls} calls": tree for tree in found}


def _capacity(tree: TreeSection, calls: int) -> int:
    """Nodes that so many calls can propose, the root included."""
    if tree.policy in CHAINS:
        return calls + 1
    if tree.policy in BEAMS:
        return 1 + tree.width + (calls - 1) * tree.width**2
    level, nodes = 1, 1
    for _ in range(calls):
        level = min(level * tree.width, tree.c2t.beam or PROBED_NODES[-1])
        nodes += level
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
