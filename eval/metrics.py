"""From decoded answers to numbers. Definitions stand here once; both conventions of tau are named.

    tau                     (new_tokens - 1) / rounds: tokens per verification, the bonus token included. The first
    token
                            comes from the prefill. Plain decoding has exactly 1. (EAGLE, FR-Spec, Spec-Bench)
    accepted_per_round      drafted tokens per verification, the bonus token not included (C2T, ViSpec)
    acceptance_by_position  of the rounds in which the first i drafted tokens of a path were accepted, the share in
    which
                            the next one was, too: conditional, as EAGLE's n-alpha

Only tokens that stand in the answer count: nothing after a stop token, nothing beyond the budget.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from draftsmith.eval.decode import Generation

INTERVAL = (2.5, 97.5)  # percentiles of the bootstrap: 95 %


def tau(generations: Sequence[Generation]) -> float | None:
    """Tokens per verification; None where no round was needed."""
    rounds = sum(g.rounds for g in generations)
    return sum(len(g.token_ids) - 1 for g in generations) / rounds if rounds else None


def acceptance_by_position(generations: Sequence[Generation]) -> list[float]:
    """Conditional acceptance of the 1st, 2nd, ... drafted token.

    A round that the end of the answer cut short tells nothing about the position at which it was cut.
    """
    reached: list[int] = []
    accepted: list[int] = []
    for generation in generations:
        for i, count in enumerate(generation.accepted_per_round):
            is_cut = generation.last_round_cut and i == generation.rounds - 1
            tried = count if is_cut else count + 1
            while len(reached) < tried:
                reached.append(0)
                accepted.append(0)
            for position in range(tried):
                reached[position] += 1
                accepted[position] += position < count
    shares = [a / r for a, r in zip(accepted, reached, strict=True)]
    while shares and shares[-1] == 0:  # beyond the deepest acceptance, trees end
        shares.pop()
    return [round(share, 4) for share in shares]


def summarise(
    generations: Sequence[Generation], baseline: Sequence[Generation], bootstrap_samples: int, seed: int
) -> dict[str, Any]:
    """acceptance.json's numbers for one contender against plain decoding of the same prompts in the same run.

    Args:
        generations, baseline: one each per turn, in the same order.
    """
    rounds = sum(g.rounds for g in generations)
    new_tokens = sum(len(g.token_ids) for g in generations)
    draft = sum(g.draft_seconds for g in generations)
    verify = sum(g.verify_seconds for g in generations)
    total = sum(g.decode_seconds for g in generations)
    plain_total = sum(g.decode_seconds for g in baseline)
    plain_rounds = sum(g.rounds for g in baseline)

    sums: dict[str, np.ndarray] = {}  # per conversation: its turns rise and fall together
    for i, (g, b) in enumerate(zip(generations, baseline, strict=True)):
        row = (len(g.token_ids) - 1, g.rounds, g.decode_seconds, len(b.token_ids) - 1, b.decode_seconds)
        name = g.conversation_id or f"#{i}"
        sums[name] = sums.get(name, np.zeros(5)) + np.array(row, dtype=float)
    per_prompt = np.stack(list(sums.values()))  # [conversations, 5]
    interval = bootstrap(per_prompt, bootstrap_samples, seed)
    rate, plain_rate = _ratio(new_tokens - len(generations), total), _ratio(per_prompt[:, 3].sum(), plain_total)
    return {
        "prompts": len(per_prompt),
        "turns": len(generations),
        "rounds": rounds,
        "new_tokens": new_tokens,
        "tau": _rounded(tau(generations)),
        "tau_interval": interval(lambda s: s[:, 0] / s[:, 1]),
        "accepted_per_round": _rounded(_ratio(sum(sum(g.accepted_per_round) for g in generations), rounds)),
        "acceptance_by_position": acceptance_by_position(generations),
        "tree_nodes_per_round": _rounded(_ratio(sum(sum(g.tree_nodes) for g in generations), rounds)),
        "draft_calls_per_round": _rounded(_ratio(sum(sum(g.draft_calls) for g in generations), rounds)),
        "tokens_per_second": _rounded(rate, 2),
        "baseline_tokens_per_second": _rounded(plain_rate, 2),
        "speedup": _rounded(_ratio(rate or 0, plain_rate or 0)),
        "speedup_interval": interval(lambda s: (s[:, 0] / s[:, 2]) / (s[:, 3] / s[:, 4])),
        "time_share": {
            "draft": _rounded(_ratio(draft, total)),
            "verify": _rounded(_ratio(verify, total)),
            "other": _rounded(_ratio(total - draft - verify, total)),
        },
        "predicted_speedup": _rounded(_predicted(generations, draft, verify, rounds, plain_total, plain_rounds)),
        "matches_target": all(g.token_ids == b.token_ids for g, b in zip(generations, baseline, strict=True)),
    }


def bootstrap(
    per_prompt: np.ndarray, samples: int, seed: int
) -> Callable[[Callable[[np.ndarray], np.ndarray]], list[float] | None]:
    """95 % intervals of statistics of column sums, resampling prompts (answers of one prompt are not independent).

    Returns a function: it takes a statistic of resampled sums [samples, columns] and gives its interval, or None where
    the statistic is undefined.
    """
    draws = np.random.default_rng(seed).multinomial(
        len(per_prompt), np.full(len(per_prompt), 1 / len(per_prompt)), samples
    )
    sums = draws @ per_prompt  # [samples, columns]

    def interval(statistic: Callable[[np.ndarray], np.ndarray]) -> list[float] | None:
        with np.errstate(divide="ignore", invalid="ignore"):
            values = statistic(sums)
        values = values[np.isfinite(values)]
        return [round(float(v), 4) for v in np.percentile(values, INTERVAL)] if len(values) else None

    return interval


def _predicted(
    generations: Sequence[Generation], draft: float, verify: float, rounds: int, plain_total: float, plain_rounds: int
) -> float | None:
    """Speed-up by the cost model tau * T_t / (T_draft + T_v(n)): what is left if all but the forwards were free.

    T_t is one round of plain decoding; T_draft and T_v are means over this run's rounds.
    """
    value = tau(generations)
    if value is None or not plain_rounds or draft + verify <= 0:
        return None
    return value * (plain_total / plain_rounds) / ((draft + verify) / rounds)


def _ratio(a: float, b: float) -> float | None:
    return float(a / b) if b else None


def _rounded(value: float | None, digits: int = 4) -> float | None:
    return None if value is None else round(float(value), digits)
