"""Statistics of the study's lines (`docs.study.run`): means over seeds, and intervals over prompts.

A line holds the rounds of each held-out answer. An arm's tau is the mean over its seeds. Its interval (95 %) resamples
prompts, the same ones for every seed and arm, so ratios of arms are paired by prompt. It does not cover the spread of
seeds. `over_seeds` does, with wide intervals, because there are only three.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, stdev
from typing import Any

import numpy as np

from docs.study.run import TREE, Table
from draftsmith.eval.measurement.metrics import bootstrap

CHAIN = "chain of 6"
SEEDS = (0, 1, 2)
STUDENT_T = 4.303  # 97.5 %, two degrees of freedom: of three seeds


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds."""

    value: float
    interval: Sequence[float]  # 95 %, over prompts
    by_seed: Mapping[int, float]

    @property
    def half_width(self) -> float:
        return (self.interval[1] - self.interval[0]) / 2

    @property
    def digits(self) -> int:
        """Decimals that the interval allows, 1 to 3."""
        return 3 if self.half_width < 0.005 else 2 if self.half_width < 0.5 else 1


def over_seeds(gain: Estimate) -> tuple[float, float]:
    """95 % interval of a ratio over all seeds, by Student's t of its logarithms."""
    logs = [math.log(ratio) for ratio in gain.by_seed.values()]
    middle, half = mean(logs), STUDENT_T * stdev(logs) / math.sqrt(len(logs))
    return math.exp(middle - half), math.exp(middle + half)


def cells_of(arm: str, size: str = "x8", steps: int = 600, demo: bool = False) -> list[str]:
    """The cells of an arm's drafters, by seed."""
    end = "" if steps == 600 else f"/steps{steps}"
    return [f"{'demo/' * demo}drafter/{arm}/{size}/seed{seed}{end}" for seed in SEEDS]


class Found:
    """The lines of a study, and the statistics of its replays.

    Keyword arguments `which` are those of `cells_of`: which of an arm's drafters are meant. Where lines are missing,
    statistics of replays are of the seeds that there are, or None; everything else raises KeyError.
    """

    def __init__(self, table: Table, lines: Mapping[str, Mapping[str, Any]]):
        self.table, self.lines = table, lines
        self.names = {arm: words["name"] for arm, words in table.arms.items()}

    def estimate(
        self, formula: Callable[..., Any], *replays: tuple[Sequence[str], str], keep: np.ndarray | slice = np.s_[:]
    ) -> Estimate | None:
        """`formula` of one tau for each of `replays`, for their common seeds; None if there is none.

        Args:
            replays: cells by seed, and a contender in them.
            keep: which answers count.
        """
        lines = [{i: self.lines[cell] for i, cell in enumerate(cells) if cell in self.lines} for cells, _ in replays]
        seeds = sorted(set.intersection(*map(set, lines)))
        if not seeds:
            return None
        names = [name for _, name in replays]
        rounds = [
            line[i]["replay"][name]["rounds_by_answer"] for line, name in zip(lines, names, strict=True) for i in seeds
        ]
        answers = "demo/answers" if replays[0][0][0].startswith("demo/") else "answers"
        tokens = np.array(self.lines[answers]["tokens_by_answer"]) - 1  # without the prefill's
        sums = np.column_stack([tokens, *rounds]).astype(float)[keep]

        def taus(sums: np.ndarray) -> list[np.ndarray]:
            """[samples, seeds] of each of `replays`."""
            return np.split(sums[:, :1] / sums[:, 1:], len(replays), axis=1)

        def of_means(sums: np.ndarray) -> np.ndarray:
            return formula(*(tau.mean(1) for tau in taus(sums)))

        total = sums.sum(0)[None]
        value, by_seed = float(of_means(total)[0]), formula(*taus(total))[0].tolist()
        interval = bootstrap(sums, 0)(of_means) or (value, value)
        return Estimate(value, interval, dict(zip(seeds, by_seed, strict=True)))

    def tau(self, arm: str, tree: str = TREE, keep: np.ndarray | slice = np.s_[:], **which: Any) -> Estimate | None:
        return self.estimate(lambda tau: tau, (cells_of(arm, **which), tree), keep=keep)

    def first(self, arm: str, size: str, tree: str) -> Estimate | None:
        """tau of seed 0, which all sizes have."""
        return self.estimate(lambda tau: tau, (cells_of(arm, size)[:1], tree))

    def ratio(self, arm: str, base: str, tree: str = TREE, base_steps: int = 0, **which: Any) -> Estimate | None:
        """tau of an arm over that of another, after `base_steps` if not as many."""
        of_base = dict(which, steps=base_steps or which.get("steps", 600))
        own, other = (cells_of(arm, **which), tree), (cells_of(base, **of_base), tree)
        return self.estimate(lambda taus, base_taus: taus / base_taus, own, other)

    def cut(self, corpus: str, contender: str) -> tuple[Estimate | None, Estimate | None]:
        """tau of a contender of FR-Spec, and the share of the whole vocabulary's tau."""
        own, whole = (([f"fr-spec/{corpus}"], name) for name in (contender, TREE))
        return self.estimate(lambda tau: tau, own), self.estimate(lambda cut, all_: cut / all_, own, whole)

    def positions(self, arm: str, tree: str) -> list[Estimate]:
        """Conditional acceptance by draft position: means over seeds, of rates and of the ends of their intervals."""
        replays = [self.lines[cell]["replay"][tree] for cell in cells_of(arm)]
        rates = zip(*(replay["acceptance_by_position"] for replay in replays), strict=False)
        intervals = zip(*(replay["acceptance_by_position_interval"] for replay in replays), strict=False)
        both = zip(rates, intervals, strict=True)
        return [Estimate(mean(own), np.mean(ends, 0).tolist(), {}) for own, ends in both if None not in own]

    def by_step(self, arm: str) -> list[float]:
        """How often each unroll step agrees with the target on the validation answers: means over seeds. EAGLE-2 was
        trained with one step, and validated with six in other cells."""
        cells = [f"unrolled/{arm}/seed{seed}" for seed in SEEDS] if arm == "eagle2" else cells_of(arm)
        every = (self.lines[cell]["validation"]["validation_accuracy"] for cell in cells)
        return [mean(own) for own in zip(*every, strict=True)]

    def minutes(self, arm: str, steps: int, demo: bool = False) -> str:
        """The mean of trainings from stored states that ran without a break; half of that of 1,200 steps for 600."""
        timed = max(steps, 1200)
        lines = [self.lines[cell] for cell in cells_of(arm, steps=timed, demo=demo) if cell in self.lines]
        return f"{mean(each['train_seconds'] for each in lines if 'resumed' not in each) / 60 * steps / timed:.1f}"
