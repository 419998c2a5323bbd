"""Statistics of the study's lines: means over seeds, and intervals over prompts.

A line holds the rounds of each held-out answer (`docs.study.run`). An arm's tau is the mean over its seeds. Its
interval resamples prompts, the same ones for every seed and arm, so ratios of arms are paired by prompt. It does not
cover the spread of seeds: `over_seeds` does, with wide intervals, because there are only three.
"""

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from docs.study.cells import (
    ALL,
    CHAIN,
    LONGER,
    LONGEST_ANSWER,
    SEEDS,
    STEPS,
    TREE,
    Lines,
    drafter_name,
    on_demo,
    unrolled_name,
)
from draftsmith.eval.measured.metrics import Statistic, bootstrap
from draftsmith.recipes.errors import UserError

SAMPLES, SEED = 2000, 0
STUDENT_T = 4.303  # 97.5 %, two degrees of freedom: of three seeds


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    value: float
    interval: tuple[float, float]  # 95 %, over prompts
    by_seed: dict[int, float]

    @property
    def half_width(self) -> float:
        return (self.interval[1] - self.interval[0]) / 2


def over_seeds(gain: Estimate) -> tuple[float, float] | None:
    """95 % interval of a ratio over seeds, by Student's t of its logarithms; None while seeds are missing."""
    if len(gain.by_seed) < len(SEEDS):
        return None
    logs = [math.log(ratio) for ratio in gain.by_seed.values()]
    middle, half = statistics.mean(logs), STUDENT_T * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle - half), math.exp(middle + half)


class Found:
    """The lines of a study, of the study's target.

    Attributes:
        lines: by cell.
        all_lines: with those of the demo's target.

    Raises:
        UserError: lines of different held-out answers.
    """

    def __init__(self, lines: Lines):
        self.all_lines = lines
        self.lines = {name: line for name, line in lines.items() if not name.startswith(on_demo(""))}
        first: dict[str, str] = {}
        for name, line in self.lines.items():
            for numbers in line.get("replay", {}).values():
                first.setdefault(numbers["answers_sha256"], name)
        if len(first) > 1:
            raise UserError(
                f"results: {' and '.join(list(first.values())[:2])} were not measured along the same answers; delete "
                "the lines of one of the two studies"
            )

    @cached_property
    def demo(self) -> "Found":
        """The lines of the demo's target, named alike."""
        prefix = on_demo("")
        return Found(
            {name.removeprefix(prefix): line for name, line in self.all_lines.items() if name.startswith(prefix)}
        )

    def of(self, arm: str, size: int = ALL, steps: int = STEPS) -> dict[int, Mapping[str, Any]]:
        """Lines of an arm's drafters by seed."""
        names = {seed: drafter_name(arm, size, seed, steps) for seed in SEEDS}
        return {seed: self.lines[name] for seed, name in names.items() if name in self.lines}

    def tau(
        self,
        arm: str,
        tree: str = TREE,
        size: int = ALL,
        steps: int = STEPS,
        seeds: Sequence[int] = SEEDS,
        cut_off: bool | None = None,
    ) -> Estimate | None:
        """None: no line yet.

        Args:
            cut_off: along the answers that were cut off at their longest, or those that ended by themselves; None: all.
        """
        lines = self.of(arm, size, steps)
        return self._of_rounds({seed: lines[seed]["replay"][tree] for seed in seeds if seed in lines}, cut_off)

    def tau_of(self, cell: str, contender: str) -> Estimate | None:
        """Of one contender of one line, as those of FR-Spec."""
        line = self.lines.get(cell)
        return None if line is None else self._of_rounds({line["seed"]: line["replay"][contender]})

    def minutes(self, arm: str, steps: int) -> float | None:
        """Mean minutes that trainings from stored states took, by those of LONGER[0] steps where there are none of
        `steps`; None: no training ran without a break."""
        timed = steps if steps in LONGER else LONGER[0]
        took = [line["train_seconds"] for line in self.of(arm, steps=timed).values() if not line.get("resumed")]
        return statistics.mean(took) / 60 * steps / timed if took else None

    def _of_rounds(self, by_seed: Mapping[int, Mapping[str, Any]], cut_off: bool | None = None) -> Estimate | None:
        if not by_seed:
            return None
        sums = self._sums(list(by_seed.values()))
        if cut_off is not None:
            sums = sums[self.cut_off() == cut_off]
            if not len(sums):
                return None
        tokens, *rounds = sums.sum(0)
        taus = {seed: float(tokens / own) for seed, own in zip(by_seed, rounds, strict=True)}
        return _estimate(sums, lambda s: (s[:, :1] / s[:, 1:]).mean(1), taus)

    def ratio(
        self,
        arm: str,
        base: str,
        tree: str = TREE,
        sizes: tuple[int, int] = (ALL, ALL),
        steps: int = STEPS,
        seeds: Sequence[int] = SEEDS,
        base_steps: int | None = None,
    ) -> Estimate | None:
        """tau of `arm` over tau of `base`, for their common seeds, paired by prompt; None: no common seed.

        Args:
            sizes: data size of each.
            base_steps: None: `steps`.
        """
        own, other = self.of(arm, sizes[0], steps), self.of(base, sizes[1], base_steps or steps)
        seeds = [seed for seed in seeds if seed in own and seed in other]
        if not seeds:
            return None
        rounds = [line["replay"][tree] for lines in (own, other) for line in (lines[seed] for seed in seeds)]
        sums = self._sums(rounds)
        half = 1 + len(seeds)

        def statistic(resampled: np.ndarray) -> np.ndarray:
            tokens = resampled[:, :1]
            return (tokens / resampled[:, 1:half]).mean(1) / (tokens / resampled[:, half:]).mean(1)

        total = sums.sum(0)
        by_seed = {seed: float(total[half + i] / total[1 + i]) for i, seed in enumerate(seeds)}
        return _estimate(sums, statistic, by_seed)

    def share_of(self, cell: str, contender: str, base: str) -> Estimate | None:
        """tau of a line's `contender` over tau of its `base`, paired by prompt."""
        line = self.lines.get(cell)
        if line is None:
            return None
        sums = self._sums([line["replay"][name] for name in (base, contender)])
        found = _estimate(sums, lambda s: s[:, 1] / s[:, 2], {})
        return replace(found, by_seed={line["seed"]: found.value})

    def growth(self, arm: str, base: str, sizes: tuple[int, int], steps: int = STEPS) -> Estimate | None:
        """tau's growth from the first data size to the second, of `arm` over that of `base`, for their common seeds."""
        of_all = [self.of(name, size, steps) for name in (arm, base) for size in sizes]
        seeds = [seed for seed in SEEDS if all(seed in lines for lines in of_all)]
        if not seeds:
            return None
        sums = self._sums([lines[seed]["replay"][TREE] for lines in of_all for seed in seeds])

        def growths(resampled: np.ndarray) -> np.ndarray:  # [samples, seeds]
            before, after, base_before, base_after = np.split(resampled[:, :1] / resampled[:, 1:], 4, axis=1)
            return (after / before) / (base_after / base_before)

        by_seed = dict(zip(seeds, growths(sums.sum(0)[None])[0].tolist(), strict=True))
        return _estimate(sums, lambda s: growths(s).mean(1), by_seed)

    def cut_off(self) -> np.ndarray:
        """[answers] bool: True for answers cut off at the length limit."""
        return np.array(self.lines["answers"]["tokens_by_answer"]) >= LONGEST_ANSWER

    def _sums(self, replays: Sequence[Mapping[str, Any]]) -> np.ndarray:
        """[answers, 1 + replays] tokens after the first (from the line of the answers), then each replay's rounds."""
        line = self.lines.get("answers")
        if line is None:
            raise UserError("results: there are drafters, but no line of the cell `answers` with their lengths")
        tokens = np.array(line["tokens_by_answer"]) - 1
        rounds = [replay["rounds_by_answer"] for replay in replays]
        if any(len(own) != len(tokens) for own in rounds):
            raise UserError(f"results: {len(tokens)} held-out answers, but lines of {sorted(set(map(len, rounds)))}")
        return np.column_stack([tokens, *rounds]).astype(float)

    def positions(self, arm: str, tree: str = CHAIN) -> list[Estimate]:
        """Conditional acceptance by draft position: means over seeds, of rates and of the ends of their intervals."""
        replays = {seed: line["replay"][tree] for seed, line in self.of(arm).items()}
        if not replays:
            return []
        depth = min(len(replay["acceptance_by_position"]) for replay in replays.values())
        found = []
        for i in range(depth):
            rates = {seed: replay["acceptance_by_position"][i] for seed, replay in replays.items()}
            if any(rate is None for rate in rates.values()):
                break
            ends = [replay["acceptance_by_position_interval"][i] for replay in replays.values()]
            low, high = (sum(end[side] for end in ends) / len(ends) for side in (0, 1))
            found.append(Estimate(sum(rates.values()) / len(rates), (low, high), rates))
        return found

    def by_step(self, arm: str) -> dict[int, list[float]]:
        """{seed: agreement of each unroll step with the target on the validation answers}. Where drafters of a shorter
        unroll were validated by a longer one, only these."""
        longer = {seed: self.lines[name] for seed in SEEDS if (name := unrolled_name(arm, seed)) in self.lines}
        lines = longer or self.of(arm)
        return {seed: line["validation"]["validation_accuracy"] for seed, line in lines.items() if "validation" in line}

    def level(self, arm: str, base: str, step: int) -> Estimate | None:
        """accuracy at `step` / accuracy at step 1, of `arm` over that of `base`; its interval is empty. None: the
        unrolls are shorter."""
        own, other = self.by_step(arm), self.by_step(base)
        kept = {
            seed: (own[seed][step - 1] / own[seed][0]) / (other[seed][step - 1] / other[seed][0])
            for seed in sorted(own)
            if seed in other and min(len(own[seed]), len(other[seed])) >= step
        }
        if not kept:
            return None
        value = sum(kept.values()) / len(kept)
        return Estimate(value, (value, value), kept)

    def milliseconds(self, arm: str, calls: str) -> tuple[float, float, float] | None:
        """(median, least, most) over the passes of the cell `timing`; None: not measured yet."""
        line = self.lines.get("timing")
        passes = sorted(line["milliseconds"].get(arm, {}).get(calls, [])) if line else []
        return (float(np.median(passes)), passes[0], passes[-1]) if passes else None


def _estimate(sums: np.ndarray, statistic: Statistic, by_seed: dict[int, float]) -> Estimate:
    """A statistic of sums over the answers, as `_sums` gives them, and its interval over prompts."""
    value = float(statistic(sums.sum(0)[None])[0])
    low, high = bootstrap(sums, SAMPLES, SEED)(statistic) or (value, value)
    return Estimate(value, (low, high), by_seed)
