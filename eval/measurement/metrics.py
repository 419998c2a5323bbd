"""Computes the numbers of decoded answers. This is the one place that defines them, with both conventions of tau.

    tau                     (new_tokens - 1) / rounds: tokens per verification, the bonus token included. The first
                            token of an answer comes from the prefill. Plain decoding has exactly 1. (EAGLE, FR-Spec,
                            Spec-Bench)
    accepted_per_round      drafted tokens per verification, the bonus token not included (C2T, ViSpec)
    accepted_histogram      rounds in which 0, 1, 2, ... drafted tokens were accepted
    acceptance_by_position  acceptance at position i, given that positions 1 to i-1 were accepted and another token was
                            drafted: conditional, as EAGLE's n-alpha
    wasted_nodes_per_round  verified drafted tokens that are not in the answer
    draft_milliseconds_per_call, verify_milliseconds_per_round
                            means; answers decoded side by side share the time of a round
    time_share              shares of decoding time. Plain decoding drafts nothing, so its `draft` is 0
    overhead_share          time_share's `other`: neither drafting (with tree growth) nor the target's forward pass. The
                            `own share` of tools/bench/decode.py is larger, because it includes tree growth
    speedup                 tokens per second over plain decoding's, each summed over all prompts before the division:
                            long answers weigh more
    mean_prompt_speedup     the mean of that ratio over prompts: every prompt weighs the same
    tau_ratio, speed_ratio  tau, and tokens per second, over those of the main contender
    fastest_ratio           tokens per second of the fastest contender that drafts, over this one's. That one was
                            chosen on the same prompts, so the ratio is a little too good
    matches_target          measured: every greedy answer equals plain decoding's of the same run and precision, token
                            for token; null if answers were drawn. False is a defect in float32. In lower
                            precisions it is rounding: a forward over several tokens rounds differently from one over a
                            single token
    matching_share          the share of these answers; null if answers were drawn
    inner_tau               of a hierarchy: tokens per verification by its small model, the bonus token included; null
                            for all others. tau is the target's
    drafted_by              of proposers with several sources (SAM, a router): each source's share of the rounds and of
                            the accepted tokens; {} for all others. In a fused round two sources draft; a token that
                            both drafted counts as the drafter's
    total_variation         of a relaxed rule (LANTERN): the mean over the answers' tokens, without their first, of the
                            total variation between the law that a token was drawn from and the target's (trees of
                            drawn tokens: of a number whose mean is at least that); greedy: of the probability, at
                            temperature 1, that was moved onto it. null for lossless rules
    lossless                known, not measured: the contender's acceptance rule keeps the target's distribution, in
                            exact arithmetic. It can be true while matches_target is false

Only tokens in the answer count: none after a stop token, none beyond the budget. Times exclude the prefill. Intervals
are 95 % bootstrap intervals over conversations. All contenders are resampled together, so the intervals of ratios are
paired: the difficulty of a prompt cancels, and two contenders can differ clearly even if their own intervals overlap.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import numpy as np

from draftsmith.eval.decoding.decode import Generation

BOOTSTRAP_SAMPLES = 2000  # resamplings of the prompts for each interval
INTERVAL = (2.5, 97.5)  # percentiles of the bootstrap: 95 %
# Columns of the sums. The last two are per conversation, the others per turn.
SUMMED = (
    *("tokens", "rounds", "accepted", "nodes", "calls", "draft", "verify", "seconds"),
    *("plain_tokens", "plain_rounds", "plain_seconds", "main_tokens", "main_rounds", "main_seconds"),
    *("fastest_tokens", "fastest_rounds", "fastest_seconds"),
    *("inner_tokens", "inner_rounds", "moved"),
    *("prompt_speedup", "has_speedup"),
)
COLUMN = {name: i for i, name in enumerate(SUMMED)}

Statistic = Callable[[np.ndarray], np.ndarray]  # sums [samples, columns] -> values [samples]


def tau(generations: Sequence[Generation]) -> float | None:
    """Tokens per verification; None if there was no round."""
    rounds = sum(g.rounds for g in generations)
    return sum(len(g.token_ids) - 1 for g in generations) / rounds if rounds else None


class Turns:
    """One contender's turns as numbers, to sum over any subset.

    Args:
        generations, baseline, main, fastest: one each per turn, in the same order; plain decoding's, the main
            contender's, and the fastest one's.
        own_plain: plain decoding's in the contender's precision.

    Attributes:
        sums: [turns, len(SUMMED)].
        histogram: [turns, D] rounds of each turn that accepted 0, 1, ... drafted tokens.
        reached: [turns, D] rounds that tried a drafted token at that position (`Generation.tried`). A tree without a
            node so deep counts as a rejection. A round does not count at the position where the answer's end cut it.
        accepted: [turns, D] rounds that accepted the drafted token at that position.
        conversations: [turns] numbers; turns with equal numbers are resampled together.
    """

    def __init__(
        self,
        generations: Sequence[Generation],
        baseline: Sequence[Generation],
        main: Sequence[Generation],
        fastest: Sequence[Generation],
        own_plain: Sequence[Generation],
    ):
        self.sums = np.array([_sums(*turn) for turn in zip(generations, baseline, main, fastest, strict=True)], float)
        depth = 1 + max((max(g.accepted_per_round, default=0) for g in generations), default=0)
        self.histogram, self.reached, self.accepted = np.zeros((3, len(generations), depth), int)
        for row, g in enumerate(generations):
            for i, (accepted, most) in enumerate(zip(g.accepted_per_round, g.tried, strict=True), start=1):
                rejected = accepted < most and not (g.last_round_cut and i == g.rounds)
                self.histogram[row, accepted] += 1
                self.accepted[row, :accepted] += 1
                self.reached[row, : accepted + rejected] += 1
        self.conversations = np.array(conversation_numbers(generations))
        self.drafted_by = [g.drafted_by for g in generations]
        self.relaxed = any(g.moved for g in generations)
        self.equal = np.array([g.token_ids == p.token_ids for g, p in zip(generations, own_plain, strict=True)])


def conversation_numbers(generations: Sequence[Generation]) -> list[int]:
    """Each turn's conversation, numbered from 0 in order of appearance. A turn without an id is one by itself."""
    numbers: dict[tuple[str, str], int] = {}
    names = [(g.benchmark, g.conversation_id or f"#{i}") for i, g in enumerate(generations)]
    return [numbers.setdefault(name, len(numbers)) for name in names]


def _sums(g: Generation, plain: Generation, main: Generation, fastest: Generation) -> tuple[float, ...]:
    counts = (len(g.token_ids) - 1, g.rounds, sum(g.accepted_per_round), sum(g.tree_nodes), sum(g.draft_calls))
    others = [number for b in (plain, main, fastest) for number in (len(b.token_ids) - 1, b.rounds, b.decode_seconds)]
    inner = sum(g.inner_accepted) + len(g.inner_accepted), len(g.inner_accepted)
    return (*counts, g.draft_seconds, g.verify_seconds, g.decode_seconds, *others, *inner, sum(g.moved), 0, 0)


def summarise(
    generations: Sequence[Generation], baseline: Sequence[Generation], seed: int, sampled: bool = False
) -> dict[str, Any]:
    """acceptance.json's numbers for one contender alone against plain decoding of the same turns, in the same order.

    Args:
        sampled: the answers were drawn or replayed, so matches_target is null.
    """
    turns = Turns(generations, baseline, generations, generations, baseline)
    return _summary(turns, np.arange(len(generations)), seed, sampled)


def summarise_all(
    results: dict[str, list[Generation]],
    plain: str,
    seed: int,
    sampled: bool = False,
    main: str | None = None,
    own_plain: Mapping[str, str] = MappingProxyType({}),
) -> dict[str, dict[str, Any]]:
    """The numbers of every contender, in total and by part.

    Args:
        results: one generation per turn for each contender, the same turns in the same order.
        plain: name of plain decoding.
        sampled: as in `summarise`.
        main: name of the main contender. None: the first that is not plain.
        own_plain: for contenders in another precision, the name of plain decoding in theirs. Their answers should be
            that one's; speeds are compared with `plain` for all.

    Returns:
        contenders: {contender: numbers}
        benchmarks: {benchmark: {contender: numbers}}
        categories: {benchmark/category: {contender: numbers}}, if conversations have one
        turns: {"1": {contender: numbers}, "2": ...}: first turns, and all later ones if any
    """
    baseline = results[plain]
    first = results[main or next((name for name in results if name != plain), plain)]
    drafting = [name for name in results if name not in (plain, *own_plain.values())]
    fastest = results[min(drafting, key=lambda name: _seconds_a_token(results[name]), default=plain)]
    tables = {
        name: Turns(generations, baseline, first, fastest, results[own_plain.get(name, plain)])
        for name, generations in results.items()
    }
    parts: dict[str, dict[str, list[int]]] = {"benchmarks": {}, "categories": {}, "turns": {}}
    for row, g in enumerate(baseline):
        parts["benchmarks"].setdefault(g.benchmark, []).append(row)
        if g.category is not None:
            parts["categories"].setdefault(f"{g.benchmark}/{g.category}", []).append(row)
        parts["turns"].setdefault("1" if g.turn == 1 else "2", []).append(row)

    def numbers(rows: list[int]) -> dict[str, Any]:
        return {name: _summary(table, np.array(rows), seed, sampled) for name, table in tables.items()}

    total = numbers(list(range(len(baseline))))
    return {"contenders": total} | {
        part: {name: total if len(rows) == len(baseline) else numbers(rows) for name, rows in groups.items()}
        for part, groups in parts.items()
    }


def _seconds_a_token(generations: Sequence[Generation]) -> float:
    tokens = sum(len(g.token_ids) - 1 for g in generations)
    return sum(g.decode_seconds for g in generations) / tokens if tokens else math.inf


def _summary(turns: Turns, rows: np.ndarray, seed: int, sampled: bool) -> dict[str, Any]:
    _, conversation = np.unique(turns.conversations[rows], return_inverse=True)
    depth = turns.histogram.shape[1]
    per_turn = np.concatenate((turns.sums[rows], turns.reached[rows], turns.accepted[rows]), axis=1)
    per_prompt = np.zeros((conversation.max() + 1, per_turn.shape[1]))  # [conversations, columns]
    np.add.at(per_prompt, conversation, per_turn)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = _speedup(per_prompt)
    per_prompt[:, COLUMN["has_speedup"]] = np.isfinite(ratio)
    per_prompt[:, COLUMN["prompt_speedup"]] = np.where(np.isfinite(ratio), ratio, 0)

    total = np.array([[column.sum() for column in per_prompt.T]])  # [1, columns]
    histogram = turns.histogram[rows].sum(0)
    shares = _shares(turns.reached[rows].sum(0), turns.accepted[rows].sum(0))
    first = len(SUMMED)
    interval = bootstrap(per_prompt, seed)

    def value(statistic: Statistic, digits: int = 4) -> float | None:
        with np.errstate(divide="ignore", invalid="ignore"):
            found = float(statistic(total).item())
        return round(found, digits) if np.isfinite(found) else None

    def both(name: str, statistic: Statistic, digits: int = 4) -> dict[str, Any]:
        return {name: value(statistic, digits), f"{name}_interval": interval(statistic)}

    timed = bool(total[0, COLUMN["seconds"]])
    return {
        "prompts": len(per_prompt),
        "answers": len(rows),
        "rounds": int(total[0, COLUMN["rounds"]]),
        "new_tokens": int(total[0, COLUMN["tokens"]]) + len(rows),
        **both("tau", TAU),
        **both("accepted_per_round", _per("accepted", "rounds")),
        "accepted_histogram": [int(count) for count in np.trim_zeros(histogram, "b")],
        "acceptance_by_position": shares,
        "acceptance_by_position_interval": [
            interval(lambda s, i=i: s[:, first + depth + i] / s[:, first + i]) for i in range(len(shares))
        ],
        **both("tree_nodes_per_round", _per("nodes", "rounds")),
        **both("wasted_nodes_per_round", _wasted),
        **both("draft_calls_per_round", _per("calls", "rounds")),
        "draft_milliseconds_per_call": value(_per("draft", "calls", 1000)) if timed else None,
        "verify_milliseconds_per_round": value(_per("verify", "rounds", 1000)) if timed else None,
        **both("tokens_per_second", RATE, 2),
        "baseline_tokens_per_second": value(PLAIN_RATE, 2),
        **both("speedup", _speedup),
        **both("mean_prompt_speedup", _per("prompt_speedup", "has_speedup")),
        **both("tau_ratio", lambda s: TAU(s) / _per("main_tokens", "main_rounds")(s)),
        **both("speed_ratio", lambda s: RATE(s) / _per("main_tokens", "main_seconds")(s)),
        **both("fastest_ratio", lambda s: _per("fastest_tokens", "fastest_seconds")(s) / RATE(s)),
        "time_share": {
            "draft": value(_per("draft", "seconds")),
            "verify": value(_per("verify", "seconds")),
            "other": value(_overhead),
        },
        **both("overhead_share", _overhead),
        "predicted_speedup": value(_predicted),
        "drafted_by": _sources(each for row in rows for each in turns.drafted_by[row]),
        "matches_target": None if sampled else bool(turns.equal[rows].all()),
        "matching_share": None if sampled else round(float(turns.equal[rows].mean()), 4),
        **both("inner_tau", _per("inner_tokens", "inner_rounds")),
        **(both("total_variation", _per("moved", "tokens")) if turns.relaxed else {"total_variation": None}),
    }


def _sources(rounds: Iterable[Mapping[str, int]]) -> dict[str, dict[str, float]]:
    drafted, accepted, total = Counter[str](), Counter[str](), 0
    for of_round in rounds:
        total += 1
        drafted.update(of_round.keys())
        accepted.update(of_round)
    tokens = max(1, sum(accepted.values()))
    return {
        name: {"rounds": round(drafted[name] / total, 4), "accepted": round(accepted[name] / tokens, 4)}
        for name in sorted(drafted)
    }


def _per(numerator: str, denominator: str, times: float = 1) -> Statistic:
    return lambda s: times * s[:, COLUMN[numerator]] / s[:, COLUMN[denominator]]


TAU, RATE, PLAIN_RATE = _per("tokens", "rounds"), _per("tokens", "seconds"), _per("plain_tokens", "plain_seconds")


def _speedup(s: np.ndarray) -> np.ndarray:
    return RATE(s) / PLAIN_RATE(s)


def _wasted(s: np.ndarray) -> np.ndarray:
    """Nodes per round without the root and the accepted ones."""
    return (s[:, COLUMN["nodes"]] - s[:, COLUMN["accepted"]]) / s[:, COLUMN["rounds"]] - 1


def _overhead(s: np.ndarray) -> np.ndarray:
    """The share of time outside drafting and verifying; rounding never makes it negative."""
    spent, draft, verify = (s[:, COLUMN[name]] for name in ("seconds", "draft", "verify"))
    return np.maximum(0, spent - draft - verify) / spent


def _predicted(s: np.ndarray) -> np.ndarray:
    """Speed-up from the cost model tau * T_t / (T_draft + T_v(n)), in which only the forwards cost time.

    T_t is one round of plain decoding; tau, T_draft and T_v are means over this run's rounds, whose number cancels.
    """
    forwards = s[:, COLUMN["draft"]] + s[:, COLUMN["verify"]]
    return s[:, COLUMN["tokens"]] / forwards * s[:, COLUMN["plain_seconds"]] / s[:, COLUMN["plain_rounds"]]


def _shares(reached: np.ndarray, accepted: np.ndarray) -> list[float]:
    shares = [round(float(a / r), 4) for a, r in zip(accepted, reached, strict=True) if r]
    while shares and shares[-1] == 0:  # beyond the deepest acceptance, trees end
        shares.pop()
    return shares


def bootstrap(per_prompt: np.ndarray, seed: int) -> Callable[[Statistic], list[float] | None]:
    """95 % intervals of statistics of column sums, resampling prompts (answers of one prompt are not independent).

    Returns:
        A function from a statistic of resampled sums [samples, columns] to its interval. Resamples of which it is NaN
        are left out. The interval is None if it is NaN of all, if an end is infinite, or if there is only one prompt.
    """
    if len(per_prompt) < 2:
        return lambda statistic: None
    sums = _draws(len(per_prompt), BOOTSTRAP_SAMPLES, seed) @ per_prompt

    def interval(statistic: Statistic) -> list[float] | None:
        with np.errstate(divide="ignore", invalid="ignore"):
            values = statistic(sums)
            values = values[~np.isnan(values)]
            ends = np.percentile(values, INTERVAL) if len(values) else np.full(2, np.nan)
        return [round(float(end), 4) for end in ends] if np.isfinite(ends).all() else None

    return interval


@lru_cache(maxsize=1)  # contenders are summarised in turn on the same prompts
def _draws(prompts: int, samples: int, seed: int) -> np.ndarray:
    """[samples, prompts] number of draws of each prompt."""
    return np.random.default_rng(seed).multinomial(prompts, np.full(prompts, 1 / prompts), samples).astype(float)
