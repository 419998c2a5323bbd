"""Measures the planner's costs: real rounds of the decoding loop over recorded text, at one context length.

All probes take turns, PASSES times. Measured costs are kept in a file; a later plan for the same machine and models
reads them.
"""

import json
import math
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain, cycle, islice, pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import torch

from draftsmith.eval.decoding.accept import acceptance_of
from draftsmith.eval.decoding.decode import Clock, Mark, TargetVerifier, decode
from draftsmith.eval.planner.cost_model import PLAIN_PROBE, Costs, Parts, costs_of, probe_trees
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.families import usable_positions
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.models.target import Target
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.json_text import json_object
from draftsmith.recipes.sections.eval import TreeSection

PASSES = 6  # with 3, one slow moment of the machine changed the choice between trees 4 % apart
ROUNDS = 9  # of a probe in each pass
KEPT = 8  # machines and models whose costs are kept in a file
SETTLING = 3  # first rounds to leave out: plain rounds took a sixth longer until caches held this model again


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
    taken: dict[str, list[list[TimedRound]]] = {name: [] for name in (PLAIN_PROBE, *probes) if name not in known}
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


class TimedRound(NamedTuple):
    """Seconds of the parts of one real round."""

    nodes: int
    calls: int
    draft: float
    verify: float
    rest: float


def _parts(passes: Sequence[Sequence[TimedRound]]) -> Parts:
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
) -> list[TimedRound]:
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
        timed.append(TimedRound(nodes, calls, draft, verify, before + after))
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
