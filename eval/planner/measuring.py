"""Measures the planner's costs: real rounds of the decoding loop over recorded text, at one context length.

In each repeat all probes take turns. Other work slows the machine unevenly, so a probe's time is scaled by the plain
rounds before and after it. Measured costs are kept in a file; a later plan for the same machine and models reads them.
"""

import json
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field, replace
from itertools import cycle, pairwise
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from draftsmith.eval.decoding.accept import acceptance_of
from draftsmith.eval.decoding.decode import Clock, Mark, TargetVerifier, decode
from draftsmith.eval.planner.cost_model import (
    PLAIN_PROBE,
    SETTLING,
    Costs,
    TimedRound,
    costs_of,
    family,
    probe_trees,
    settled,
    shape_of,
)
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.prompt import Insert, Prompt
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.models.target import Target
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.schema import TreeSection

ROUNDS = 9  # of a probe in each repeat
REPEATS = 4
TURNS = 2  # probes between plain rounds


@dataclass
class Samples:
    """Measured rounds, scaled as if every plain round had taken the same time."""

    plain: float = 0.0  # that time, in seconds
    spread: tuple[float, float] = (0.0, 0.0)  # quartiles of plain rounds, likewise scaled
    rounds: dict[str, list[list[TimedRound]]] = field(default_factory=lambda: defaultdict(list))
    """By probe and repeat, PLAIN_PROBE included."""

    @classmethod
    def read(cls, path: Path, machine: dict[str, Any], of: dict[str, Any]) -> "Samples":
        """Those that were kept for this machine and these models; none if there are none."""
        for found in _kept(path, machine):
            with suppress(KeyError, TypeError, ValueError):
                if found["of"] == of:
                    rounds = {
                        name: [[TimedRound(*r) for r in one] for one in each] for name, each in found["probes"].items()
                    }
                    low, high = found["plain_quartiles"]
                    return cls(found["plain"], (low, high), defaultdict(list, rounds))
        return cls()

    def keep(self, path: Path, machine: dict[str, Any], of: dict[str, Any]) -> None:
        """Writes them for later plans, beside those for other models. Those of another machine are left out."""
        probes = {name: [[astuple(r) for r in one] for one in each] for name, each in self.rounds.items()}
        here = {"of": of, "plain": self.plain, "plain_quartiles": self.spread, "probes": probes}
        others = [found for found in _kept(path, machine) if found.get("of") != of]
        content = {"unit": "seconds", "machine": machine, "measured": [*others, here]}
        atomic_write(path, json.dumps(content, separators=(",", ":")) + "\n")


def _kept(path: Path, machine: dict[str, Any]) -> list[dict[str, Any]]:
    try:
        content = parse_json(path.read_bytes())
        return [found for found in content["measured"] if content["machine"] == machine and isinstance(found, dict)]
    except (OSError, ValueError, KeyError, TypeError):
        return []


@dataclass
class CostMeter:
    """Measures the costs of the rounds that some trees may need.

    Attributes:
        proposer_of: builds a proposer for a tree.
        trees: all that may ever be asked about.
        texts: prompts or token ids to continue, cut or joined to `context` tokens.
        rows: answers decoded side by side.
        samples: what is known already.

    Raises:
        UserError: no room for such trees after that context.
    """

    target: Target
    proposer_of: Callable[[TreeSection], Proposer]
    trees: Sequence[TreeSection]
    texts: Sequence[Sequence[int]]
    context: int
    sampling: Sampling = GREEDY
    rows: int = 1
    samples: Samples = field(default_factory=Samples)

    def __post_init__(self) -> None:
        self.probes = {
            f"{family(tree)}, {tree.nodes} nodes, {tree.draft_calls} calls": tree for tree in probe_trees(self.trees)
        }
        self.known = sum(name in self.samples.rounds for name in self.probes)  # probes that need no first look
        self.measured = 0  # repeats of probes
        self._proposers: dict[str, Proposer | None] = {PLAIN_PROBE: None}
        context = min(self.context, room_for(self.target.config.max_position_embeddings, self.trees))
        self.prompts = [joined([*self.texts[i:], *self.texts[:i]], context) for i in range(len(self.texts))]
        self._plain: list[float] = []  # seconds of plain rounds, not scaled

    def measure(self, trees: Sequence[TreeSection], repeats: int, deadline: float = math.inf) -> None:
        """Measures until every probe of these trees was measured so often, or the time is over.

        Args:
            deadline: as `time.monotonic`. What was never measured is measured even after it.
        """
        names = self._probes_of(trees)
        missing = [[n for n in names if len(self.samples.rounds[n]) <= repeat] for repeat in range(repeats)]
        if PLAIN_PROBE not in self.samples.rounds:
            missing[0] = missing[0] or [PLAIN_PROBE]
        # The first rounds of a process and of a proposer are slow.
        new = [n for n in dict.fromkeys(n for each in missing for n in each) if n not in self._proposers]
        total = len(new) + sum(len(_in_turns(each)) for each in missing if each)
        with Bar(total=total, desc="costs", unit="probe", leave=False) as progress:
            for name in new:
                self._proposers[name] = self.proposer_of(self.probes[name])
                self._time(name, 0, SETTLING)
                progress.update()
            for repeat, each in enumerate(missing):
                if each and (repeat == 0 or time.monotonic() < deadline):
                    self._repeat(each, repeat, progress)

    def _probes_of(self, trees: Sequence[TreeSection]) -> list[str]:
        """Those of the trees' families, and all trees up to a probe as large as theirs."""
        families = {family(tree) for tree in trees}
        most = max((tree.most for tree in trees if shape_of(tree) == "tree"), default=0)
        sizes = {name: tree.most for name, tree in self.probes.items() if shape_of(tree) == "tree"}
        limit = min((size for size in sizes.values() if size >= most), default=math.inf) if most else 0
        return [n for n, tree in self.probes.items() if family(tree) in families or sizes.get(n, math.inf) <= limit]

    def _repeat(self, names: Sequence[str], repeat: int, progress: Bar) -> None:
        first = repeat * len(names) // REPEATS
        taken: list[tuple[str, list[TimedRound]]] = []
        for name in _in_turns([*names[first:], *names[:first]]):
            taken.append((name, self._time(name, repeat, ROUNDS)))
            progress.update()
        plain = [r.seconds for name, timed in taken if name == PLAIN_PROBE for r in settled(timed)]
        self._plain += plain
        samples = self.samples
        samples.plain = samples.plain or round(median(plain), 7)
        low, high = np.percentile(self._plain, (25, 75)) * (samples.plain / median(self._plain))
        samples.spread = round(float(low), 7), round(float(high), 7)
        for name, timed in _evened(taken, samples.plain).items():
            samples.rounds[name].append(timed)
        self.measured += len(names)

    def _time(self, name: str, repeat: int, rounds: int) -> list[TimedRound]:
        prompts = [self.prompts[(repeat * self.rows + row) % len(self.prompts)] for row in range(self.rows)]
        return timed_rounds(self.target, self._proposers[name], prompts, self.sampling, rounds)

    def costs(self, first: int | None = None) -> Costs:
        """From all repeats, or the first ones; and from each alone, for the probes that it measured."""
        known = {
            name: self.samples.rounds[name][:first]
            for name in (PLAIN_PROBE, *self.probes)
            if name in self.samples.rounds
        }
        whole = {name: [r for one in each for r in one] for name, each in known.items()}
        most = max((len(each) for name, each in known.items() if name != PLAIN_PROBE), default=0)
        repeats = [{name: each[i] for name, each in known.items() if i < len(each)} for i in range(most)]
        took: dict[str, tuple[float, ...]] = {}
        costs, *each = (
            costs_of(
                {n: tree for n, tree in self.probes.items() if n in one},
                one,
                self.samples.spread,
                len(self.prompts[0]),
                self.rows,
            )
            for one in (whole, *repeats)
        )
        for one, its in zip(repeats, each, strict=True):
            for name in one.keys() & self.probes.keys():
                took[name] = (*took.get(name, ()), median(r.seconds for r in settled(one[name])) / its.plain)
        return replace(costs, probes=took, repeats=tuple(each))


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
    """The costs of all rounds that these trees may need, with `CostMeter`'s arguments."""
    meter = CostMeter(target, proposer_of, trees, texts, context, sampling, rows)
    meter.measure(trees, repeats)
    return meter.costs()


def _in_turns(names: Sequence[str]) -> list[str]:
    """The probes, and plain decoding before and behind every few."""
    probes = [name for name in names if name != PLAIN_PROBE]
    turns = [n for i in range(0, len(probes), TURNS) for n in (PLAIN_PROBE, *probes[i : i + TURNS])]
    return [*turns, PLAIN_PROBE]


def _evened(taken: Sequence[tuple[str, list[TimedRound]]], usual: float) -> dict[str, list[TimedRound]]:
    """The rounds by probe, scaled as if every plain round had taken `usual` seconds."""
    plain = {
        i: median(r.seconds for r in settled(timed)) for i, (name, timed) in enumerate(taken) if name == PLAIN_PROBE
    }
    paces = np.interp(range(len(taken)), list(plain), list(plain.values()))
    result: dict[str, list[TimedRound]] = defaultdict(list)
    for (name, timed), pace in zip(taken, paces, strict=True):
        by = usual / float(pace)
        result[name] += [
            TimedRound(r.number, r.nodes, r.calls, *(round(seconds * by, 7) for seconds in (r.draft, r.verify, r.rest)))
            for r in timed  # rounded as in the file, so that a plan from it is the same
        ]
    return result


def timed_rounds(
    target: Target,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    sampling: Sampling = GREEDY,
    rounds: int = ROUNDS,
) -> list[TimedRound]:
    """The first rounds after each prompt."""
    draws = None if sampling.greedy else [SeededDraws(0, row) for row in range(len(prompts))]
    verifier = TargetVerifier(target, proposer, acceptance_of(sampling))
    budgets = [verifier.positions - len(prompt) for prompt in prompts]
    seen: list[tuple[int, int, Sequence[Mark]]] = []

    def watch(nodes: int, calls: int, marks: Sequence[Mark]) -> None:
        seen.append((nodes, calls, marks))
        if len(seen) == rounds:
            raise _Enough

    with suppress(_Enough), torch.inference_mode():  # as in an evaluation; with gradients rounds take a tenth longer
        decode(verifier, proposer, prompts, (), budgets, draws, watch)
    timed = []
    for number, (nodes, calls, marks) in enumerate(seen):
        before, draft, verify, after = (Clock.seconds(a, b) for a, b in pairwise(marks))
        timed.append(TimedRound(number, nodes, calls, draft, verify, before + after))
    return timed


class _Enough(Exception):
    """Ends decoding after enough rounds."""


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
