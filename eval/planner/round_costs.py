"""The costs of decoding rounds on this machine, and the speed-up that they predict.

    T_sd / T_t = (T_draft + T_v(n) + T_rest) / (T_t * tau)          seconds per token over those of plain decoding

(SpecMQuant, arXiv 2505.22179, with d * T_d for T_draft.) T_draft is the time of a round's d draft calls and of the
policy's work on them, T_v(n) one forward of the target over n nodes, T_rest everything else. T_t is a round of plain
decoding. Deviations: the paper counts forwards alone and takes T_t = T_v(1); here the rest of a round counts on both
sides, because it is a tenth of the time on small models. Rounds differ in n and d (policies that stop early), so costs
are summed over the rounds of recorded answers. The drafter's reading of an answer's prompt is added.

Costs are measured by probes: real rounds, at one context length, of some trees that never stop early. Between the
probes' numbers of nodes and calls they lie on straight lines. Probes take turns, PASSES times, and are kept in a file
for later plans with the same machine and models.

Answers side by side share a round, which costs as much as its largest tree and most calls. Each answer is replayed
alone, so policies that stop early are predicted a little too fast.
"""

import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import chain, cycle, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from draftsmith.eval.decoding.accept import acceptance_of
from draftsmith.eval.decoding.decode import Clock, Generation, Mark, TargetVerifier, decode
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.families import usable_positions
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.models.target import Target
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.json_text import json_object
from draftsmith.recipes.sections.eval import CHAINS, TreeSection

# Nodes to probe, up to the largest tree's. A CPU's kernels take some rows at once: six of float32 with AVX-512, where
# seven take a sixth longer (LOG.md, 2026-11-29).
PROBED_NODES = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256)
BUSY = 0.2  # interquartile range over median of plain rounds; 0.35 and 0.46 with 18 processes on two cores
PLAIN_PROBE = ""  # plain decoding's name among the probes
BEAMS = ("eagle2", "ddd", "svip_tree")
PASSES = 6  # with 3, one slow moment of the machine changed the choice between trees 4 % apart
ROUNDS = 9  # of a probe in each pass
KEPT = 8  # machines and models whose costs are kept in a file
SETTLING = 3  # first rounds to leave out: plain rounds took a sixth longer until caches held this model again


class Parts(NamedTuple):
    """A real round, or a probe's rounds: their nodes and calls, and (median) seconds of their parts."""

    nodes: int
    calls: int
    draft: float
    verify: float
    rest: float
    reading: float = 0.0  # an answer's first round drafts longer by this, because the drafter reads the prompt
    spread: float = 0.0  # interquartile range over median of whole rounds


Curve = tuple[tuple[float, float], ...]  # points (x, seconds) in order


def seconds_at(curve: Curve, x: Sequence[int]) -> float:
    """Sum of the seconds at all `x`, on straight lines between the points."""
    xs, seconds = zip(*curve, strict=True)
    return float(np.interp(x, xs, seconds).sum())


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
            return {name: [[x, round(1e3 * s, 4)] for x, s in curve] for name, curve in named.items()}

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


def predicted(costs: Costs, tree: TreeSection | None, recorded: Sequence[Generation]) -> list[Generation]:
    """The recorded rounds with predicted seconds. `tree` is the drafted one; None: plain decoding."""
    result = []
    for generation in recorded:
        draft = verify = total = 0.0
        if tree is None:
            verify = generation.rounds * seconds_at(costs.verify["chain"], [1])
            total = generation.rounds * costs.plain
        elif generation.rounds:
            nodes, shape = generation.tree_nodes, shape_of(tree)
            draft = seconds_at(costs.draft[family(tree)], generation.draft_calls)
            draft += costs.prompt * len(generation.prompt_token_ids)
            verify = seconds_at(costs.verify[shape], nodes)
            total = draft + verify + seconds_at(costs.rest[shape], nodes)
        result.append(replace(generation, draft_seconds=draft, verify_seconds=verify, decode_seconds=total))
    return result


def costs_of(probes: Mapping[str, TreeSection], parts: Mapping[str, Parts], context: int, rows: int) -> Costs:
    """Costs from the measured `parts` of each probe, and of PLAIN_PROBE."""

    def curves(points: Iterable[tuple[str, int, float]]) -> dict[str, Curve]:
        """From (name, x, seconds): the medians at each x."""
        found: dict[str, dict[int, list[float]]] = {}
        for name, x, seconds in points:
            found.setdefault(name, {}).setdefault(x, []).append(seconds)
        return {
            name: tuple((float(x), median(seconds)) for x, seconds in sorted(by_x.items()))
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
    calls cost alike), and of chains five, which give six nodes; in the family with the largest trees all of
    PROBED_NODES. With a strict C2T classifier, whose frontier is smaller, drafting is predicted somewhat too slow.
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
        probed = {1, min(2, calls), min(5, calls) if one.policy in CHAINS else calls, calls}
        found += [_endless(one, few, min(nodes, _capacity(one, few))) for few in sorted(probed)]
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


def measure_costs(
    target: Target,
    proposer_of: Callable[[TreeSection], Proposer],
    trees: Sequence[TreeSection],
    texts: Sequence[Sequence[int]],
    context: int,
    sampling: Sampling = GREEDY,
    rows: int = 1,
    known: dict[str, Parts] | None = None,
    deadline: float = math.inf,
) -> Costs:
    """The costs of all rounds that these trees may need.

    Args:
        proposer_of: builds a proposer for a tree.
        texts: token ids to continue, cut or joined to `context` tokens.
        rows: answers decoded side by side.
        known: probes that were measured before. Gets those that are measured now.
        deadline: as `time.monotonic`. The first pass is taken even after it.

    Raises:
        UserError: no room for such trees after any context.
    """
    known = {} if known is None else known
    probes = probe_trees(trees)
    context = min(context, room_for(usable_positions(target.config), trees))
    tokens = [chain.from_iterable(cycle([*texts[i:], *texts[:i]])) for i in range(len(texts))]
    prompts = [list(islice(each, context)) for each in tokens]
    taken: dict[str, list[list[Parts]]] = {name: [] for name in (PLAIN_PROBE, *probes) if name not in known}
    proposers = {name: proposer_of(probes[name]) if name else None for name in taken}
    with Bar(total=PASSES * len(taken), desc="costs", unit="probe", leave=False) as progress:
        for number in range(PASSES):
            if number and time.monotonic() > deadline:
                break
            texts_now = [prompts[(number * rows + row) % len(prompts)] for row in range(rows)]
            for name, proposer in proposers.items():
                taken[name].append(timed_rounds(target, proposer, texts_now, sampling))
                progress.update()
    known.update((name, _parts(passes)) for name, passes in taken.items())
    return costs_of(probes, known, context, rows)


def _parts(passes: Sequence[Sequence[Parts]]) -> Parts:
    settled = [r for rounds in passes for r in rounds[SETTLING:]]
    draft, verify, rest = (median(getattr(r, key) for r in settled) for key in ("draft", "verify", "rest"))
    reading = median(rounds[0].draft for rounds in passes) - draft  # the drafter reads the prompt in the first round
    low, middle, high = np.percentile([r.draft + r.verify + r.rest for r in settled], (25, 50, 75)).tolist()
    size = max(r.nodes for r in settled), max(r.calls for r in settled)
    return Parts(*size, draft, verify, rest, reading, (high - low) / middle if middle else 0.0)


def read_known(path: Path, key: str) -> dict[str, Parts]:
    """The probes that were measured before under `key`. A damaged file counts as none: all are measured again."""
    return {name: Parts(*parts) for name, parts in _kept(path).get(key, {}).items()}


def keep_known(path: Path, key: str, known: dict[str, Parts]) -> None:
    """Writes them for later plans, beside the last ones under other keys."""
    others = [(other, parts) for other, parts in _kept(path).items() if other != key]
    atomic_write(path, json.dumps({**dict(others[1 - KEPT :]), key: known}) + "\n")


def _kept(path: Path) -> dict[str, Any]:
    try:
        return json_object(path.read_bytes())
    except (OSError, ValueError):
        return {}


def timed_rounds(
    target: Target, proposer: Proposer | None, prompts: Sequence[Sequence[int]], sampling: Sampling = GREEDY
) -> list[Parts]:
    """The first ROUNDS rounds after these prompts, side by side."""
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
    for nodes, calls, marks in seen:
        before, draft, verify, after = (Clock.seconds(a, b) for a, b in pairwise(marks))
        timed.append(Parts(nodes, calls, draft, verify, before + after))
    return timed


class _Enough(Exception):
    """Ends decoding after enough rounds."""


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
