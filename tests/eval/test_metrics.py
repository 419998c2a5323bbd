"""Numbers from hand-written traces; shares and intervals against slow twins; totals against their parts."""

import random
from typing import Any

import numpy as np
import pytest

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measurement.metrics import bootstrap, summarise, summarise_all, tau


def trace(accepted: list[int], is_cut: bool, length: int) -> Generation:
    out = Generation([1], list(range(length)), accepted, is_cut)
    out.tree_nodes, out.draft_calls, out.tried = [8] * len(accepted), [7] * len(accepted), [7] * len(accepted)
    out.draft_seconds, out.verify_seconds, out.decode_seconds = 0.2, 0.5, 1.0
    return out


def numbers(*generations: Generation) -> dict[str, Any]:
    return summarise(generations, generations, 0)


def random_trace(chance: random.Random) -> Generation:
    accepted = [chance.randrange(5) for _ in range(chance.randint(0, 6))]
    is_cut = bool(accepted) and chance.random() < 0.5
    return trace(accepted, is_cut, 1 + sum(accepted) + len(accepted) - is_cut)


def test_tau_on_hand_written_traces() -> None:
    # 1 token from the prefill; rounds of 2+1, 0+1, 3+1 tokens: 9 tokens in all, 8 in 3 rounds.
    whole = trace([2, 0, 3], False, 9)
    assert tau([whole]) == pytest.approx(8 / 3)
    # The last round ends at a stop token that was its second drafted token: 2 tokens, no bonus.
    stopped = trace([2, 2], True, 6)
    assert numbers(stopped)["tau"] == pytest.approx(5 / 2)
    assert numbers(whole, stopped)["tau"] == pytest.approx(13 / 5)  # over rounds, not a mean of means
    nothing = numbers(trace([], False, 1))  # the prefill's token was the stop token
    assert nothing["tau"] is None and nothing["acceptance_by_position"] == [] and nothing["accepted_histogram"] == []
    # whole: position 1 tried 3 times, accepted 2; position 2 tried 2, accepted 2; position 3 tried 2, accepted 1.
    assert numbers(whole)["acceptance_by_position"] == pytest.approx([2 / 3, 1.0, 0.5], abs=1e-4)
    # A cut round says nothing about the position where it was cut: 4 of 4 and 4 of 4, then position 3 fails once.
    assert numbers(whole, stopped)["acceptance_by_position"] == pytest.approx([4 / 5, 1.0, 1 / 3], abs=1e-4)
    assert numbers(whole, stopped)["accepted_histogram"] == [1, 0, 3, 1]


def test_a_position_that_nobody_drafted_was_not_tried() -> None:
    copied = trace([0, 0, 2], False, 6)  # prompt lookup: two rounds without a draft, then two copied tokens, both right
    copied.tried = [0, 0, 2]
    assert numbers(copied)["acceptance_by_position"] == [1.0, 1.0]
    wide = trace([1, 2, 1], False, 8)  # trees of two calls: only what was drafted that deep counts at position 2
    wide.tried = [2, 2, 1]
    assert numbers(wide)["acceptance_by_position"] == [1.0, 0.5]


@pytest.mark.parametrize(("infinite", "expected"), [(10, [24.975, 974.025]), (25, None), (40, None)])
def test_infinite_resamples_count_and_an_interval_has_two_ends(infinite: int, expected: list[float] | None) -> None:
    """Of 1,000 resamples with 0, 1, 2, ..., the 2.5th and 97.5th percentiles; the last ones are infinite."""
    values = np.arange(1000.0)
    values[len(values) - infinite :] = np.inf
    interval = bootstrap(np.ones((2, 1)), 0)
    assert interval(lambda sums: values) == (expected and pytest.approx(expected))


def test_summary_of_traces() -> None:
    plain = trace([0] * 8, False, 9)
    plain.decode_seconds = 2.0
    found = summarise([trace([2, 0, 3], False, 9)] * 4, [plain] * 4, seed=0)
    # 8 nodes a round are 7 drafts; 5 of 21 were accepted. 0.2 s for 21 calls, 0.5 s for 3 forwards.
    wanted = {
        **{"rounds": 12, "new_tokens": 36, "tau": 8 / 3, "tau_interval": [8 / 3, 8 / 3], "accepted_per_round": 5 / 3},
        **{"tokens_per_second": 8.0, "baseline_tokens_per_second": 4.0, "speedup": 2.0, "overhead_share": 0.3},
        **{"time_share": {"draft": 0.2, "verify": 0.5, "other": 0.3}, "wasted_nodes_per_round": 16 / 3},
        **{"tree_nodes_per_round_interval": [8, 8], "draft_calls_per_round_interval": [7, 7]},
        **{"draft_milliseconds_per_call": 200 / 21, "verify_milliseconds_per_round": 500 / 3, "tau_ratio": 1},
        # tau * T_t / (T_draft + T_v)
        "predicted_speedup": 8 / 3 * (2 / 8) / (0.7 / 3),
    }
    assert {name: found[name] for name in wanted} == {
        name: value if isinstance(value, dict) else pytest.approx(value, abs=1e-3) for name, value in wanted.items()
    }
    other, mine = trace([0] * 8, False, 9), trace([2, 0, 3], False, 9)
    other.token_ids = [9] * 9
    assert found["matches_target"] is True
    assert summarise([mine, mine], [other, plain], 0)["matches_target"] is False
    # Drawn answers need not be equal: nothing is said about it.
    assert summarise([mine], [other], 0, sampled=True)["matches_target"] is None
    # The ratio of sums weighs long answers more, the mean of ratios weighs prompts alike.
    slow, slower = trace([0] * 2, False, 3), trace([0] * 100, False, 101)
    slow.decode_seconds, slower.decode_seconds = 4.0, 2.0  # 4 times and twice as fast
    row = summarise([trace([1], False, 3), trace([1] * 50, False, 101)], [slow, slower], 0)
    assert row["speedup"] == pytest.approx((102 / 2) / (102 / 6))
    assert row["mean_prompt_speedup"] == pytest.approx(3.0) and row["mean_prompt_speedup_interval"] == [2.0, 4.0]


def test_intervals_resample_conversations_not_turns() -> None:
    """A conversation asked four times over tells no more than once."""
    plain = trace([0] * 8, False, 9)

    def turns(accepted: list[int], name: str) -> Generation:
        generation = trace(accepted, False, len(accepted) + sum(accepted) + 1)
        generation.conversation_id = name
        return generation

    once = [turns([i, i % 3], f"c{i}") for i in range(8)]
    four = [generation for generation in once for _ in range(4)]
    single, repeated = (summarise(g, [plain] * len(g), 0) for g in (once, four))
    assert (single["prompts"], single["answers"], repeated["prompts"], repeated["answers"]) == (8, 8, 8, 32)
    assert repeated["tau_interval"] == single["tau_interval"]
    assert numbers(once[0])["tau_interval"] is None  # one prompt says nothing about spread


def test_intervals_and_paired_ratios_against_slow_twins() -> None:
    """Resampling one prompt after another, by another generator and the same prompts for both sides."""
    chance = random.Random(4)
    mine, others = ([random_trace(chance) for _ in range(30)] for _ in range(2))
    for g in (*mine, *others):
        g.decode_seconds = chance.uniform(1, 3)
    plain = [trace([0] * 8, False, 9)] * 30
    row = summarise_all({"plain": plain, "main": mine, "other": others}, "plain", 0)["contenders"]["other"]

    def ratios(rows: list[int]) -> tuple[float, float, float]:
        tokens = [sum(len(side[i].token_ids) - 1 for i in rows) for side in (others, mine)]
        rounds = [sum(side[i].rounds for i in rows) for side in (others, mine)]
        seconds = [sum(side[i].decode_seconds for i in rows) for side in (others, mine)]
        taus = [each / count for each, count in zip(tokens, rounds, strict=True)]
        return taus[0], taus[0] / taus[1], tokens[0] / seconds[0] / (tokens[1] / seconds[1])

    names = ("tau", "tau_ratio", "speed_ratio")
    assert [row[name] for name in names] == pytest.approx(ratios(list(range(30))), abs=1e-4)
    drawn = np.array([ratios(chance.choices(range(30), k=30)) for _ in range(2000)])
    for name, values in zip(names, drawn.T, strict=True):
        assert row[f"{name}_interval"] == pytest.approx(np.percentile(values, (2.5, 97.5)), rel=0.05)


def test_what_all_prompts_share_has_no_spread() -> None:
    """Prompts of very different speed, the other always a quarter faster."""
    chance = random.Random(4)
    mine, plain = [random_trace(chance) for _ in range(30)], [trace([0] * 8, False, 9)] * 30
    for g in mine:
        g.decode_seconds = chance.uniform(1, 3)
    faster = [Generation(**vars(g)) for g in mine]
    for g in faster:
        g.decode_seconds /= 1.25
    rows = summarise_all({"plain": plain, "main": mine, "faster": faster}, "plain", 0, main="main")["contenders"]
    assert rows["faster"]["speed_ratio_interval"] == rows["main"]["fastest_ratio_interval"] == [1.25, 1.25]
    assert rows["faster"]["tau_ratio_interval"] == [1.0, 1.0]
    low, high = rows["faster"]["tokens_per_second_interval"]
    assert low < rows["main"]["tokens_per_second_interval"][1] and high > 1.25 * low
    # Plain decoding in another precision drafts nothing, however fast it is.
    for g in mine:
        g.decode_seconds *= 9
    both = {"plain": plain, "plain int8": faster, "main": mine}
    rows = summarise_all(both, "plain", 0, own_plain={"main": "plain int8"})["contenders"]
    assert rows["main"]["fastest_ratio"] == 1.0


def test_what_was_not_timed_has_no_speeds() -> None:
    """Replay knows rounds and no seconds."""
    drafted, plain = [trace([2, 0, 3], False, 9) for _ in range(3)], [trace([0] * 8, False, 9) for _ in range(3)]
    for g in (*drafted, *plain):
        g.draft_seconds = g.verify_seconds = g.decode_seconds = 0.0
    row = summarise_all({"plain": plain, "a": drafted}, "plain", 0, sampled=True)["contenders"]["a"]
    assert row["tau"] == pytest.approx(8 / 3, abs=1e-4) and row["tau_ratio"] == 1
    timed = ("tokens_per_second", "speedup", "mean_prompt_speedup", "speed_ratio", "fastest_ratio", "overhead_share")
    never = ("matches_target", "predicted_speedup", "draft_milliseconds_per_call", "verify_milliseconds_per_round")
    assert {row[name] for name in (*timed, *(f"{name}_interval" for name in timed), *never)} == {None}
    assert set(row["time_share"].values()) == {None}


def conversation(benchmark: str, name: str, category: str | None, turns: int, accepted: int) -> list[Generation]:
    out = []
    for turn in range(1, turns + 1):
        generation = trace([accepted] * turn, False, 1 + turn * (accepted + 1))
        generation.benchmark, generation.conversation_id = benchmark, name
        generation.category, generation.turn = category, turn
        out.append(generation)
    return out


def test_parts_are_summed_from_their_own_turns() -> None:
    # Two benchmarks number their questions alike: "0" of the one is not "0" of the other.
    drafted = [
        *conversation("chat", "0", "writing", 2, 1),
        *conversation("chat", "1", "maths", 2, 2),
        *conversation("code", "0", None, 1, 5),
    ]
    plain = [trace([0] * (len(g.token_ids) - 1), False, len(g.token_ids)) for g in drafted]
    for g, p in zip(drafted, plain, strict=True):
        p.benchmark, p.conversation_id, p.category, p.turn = g.benchmark, g.conversation_id, g.category, g.turn
    out = summarise_all({"plain": plain, "drafter": drafted}, "plain", 0)
    rows = {name: part["drafter"] for name, part in (out["benchmarks"] | out["categories"] | out["turns"]).items()}
    assert {name: (row["accepted_per_round"], row["prompts"], row["answers"]) for name, row in rows.items()} == {
        **{"chat": (1.5, 2, 4), "code": (5, 1, 1), "chat/writing": (1, 1, 2), "chat/maths": (2, 1, 2)},
        **{"1": (pytest.approx(8 / 3, abs=1e-4), 3, 3), "2": (1.5, 2, 2)},
    }
    total = out["contenders"]["drafter"]
    assert (total["prompts"], total["answers"]) == (3, 5)
    assert sum(row["drafter"]["rounds"] for row in out["turns"].values()) == total["rounds"]
    single = summarise_all({"plain": plain[-1:], "drafter": drafted[-1:]}, "plain", 0)
    assert single["categories"] == {} and single["benchmarks"]["code"] == single["contenders"]
