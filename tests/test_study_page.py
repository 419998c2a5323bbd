"""The study's page: numbers from its lines, with intervals, and the document that shows them."""

import json
import math
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from docs.study import numbers as study_numbers
from docs.study import page as study_report
from docs.study import run as study
from docs.study import shapes
from docs.study.cells import (
    CHAIN,
    CUTS,
    DEMO_STEPS,
    LONGER,
    LONGEST_ANSWER,
    RECIPE,
    SIZES,
    TREE,
    VALIDATION,
    cells,
    demo_name,
    demo_speed_name,
    drafter_name,
    many_trees_name,
    on_demo,
    rate_name,
    speed_name,
    unrolled_name,
)
from docs.study.numbers import Found
from docs.study.plots import C2T_CURVES
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from tests.study_cases import ANSWERS, HERE


def rounds_of(seed: int, more: int) -> list[int]:
    return np.random.default_rng(seed).integers(2, 5 + more, ANSWERS).tolist()


def replay(seed: int, more: int) -> dict[str, Any]:
    return {
        "rounds_by_answer": rounds_of(seed, more),
        "answers_sha256": "same",
        "acceptance_by_position": [0.8, 0.7, 0.6, 0.5, 0.5, 0.5, None, None],
        "acceptance_by_position_interval": [[0.7, 0.9]] * 6 + [None, None],
        "tree_nodes_per_round": 60.0,
    }


TOKENS = np.random.default_rng(9).integers(10, 40, ANSWERS).tolist()


@pytest.fixture
def lines() -> dict[str, Any]:
    """Three seeds of EAGLE-2, two of HASS, four sizes of EAGLE-2 and one cut of FR-Spec."""

    def drafter(seed: int, more: int) -> dict[str, Any]:
        return {
            **{"kind": "drafter", "seed": seed, "commit": "abc", "seconds": 60.0, "train_seconds": 30.0},
            "commands": [f"python train/eagle.py train.eval_replay={VALIDATION}"],
            **{
                "parameters": 870_000,
                "validation": {"validation_accuracy": [0.4 + 0.1 * seed]},
                "replay": {TREE: replay(seed, more), CHAIN: replay(seed + 50, more + 3)},
            },
        }

    sizes = {name: 244 * size for size, name in SIZES.items()}
    common = {"commit": "abc", "seconds": 10.0, "seed": 0}
    return {
        "data": {**common, "training_conversations": sizes},
        "answers": {**common, "tokens_by_answer": TOKENS},
        **{drafter_name("eagle2", seed=seed): drafter(seed, 3) for seed in range(3)},
        **{drafter_name("eagle2", size): drafter(10 + size, 6) for size in (1, 2, 4)},
        **{drafter_name("hass", seed=seed): drafter(20 + seed, 2) for seed in (0, 2)},
        **{
            f"sampled/eagle3/seed{seed}": {
                **common,
                "decoded": {name: {"tau": tau, "tau_interval": [1, 4]} for name, tau in taus.items()},
            }
            for seed, taus in ((0, {TREE: 2.5, CHAIN: 1.0}), (2, {TREE: 3.0, CHAIN: 2.0}))
        },
        "fr-spec/answers": {
            **common,
            "replay": {TREE: replay(0, 3), **{str(size): replay(size, 5) for size in CUTS}},
        },
    }


def test_taus_are_means_over_seeds_of_tokens_by_rounds(lines: dict[str, Any]) -> None:
    found = Found(lines).tau("eagle2")
    assert found is not None
    by_hand = [(sum(TOKENS) - ANSWERS) / sum(rounds_of(seed, 3)) for seed in range(3)]
    assert list(found.by_seed.values()) == pytest.approx(by_hand)
    assert found.value == pytest.approx(sum(by_hand) / 3)
    assert found.interval[0] < found.value < found.interval[1]
    assert Found(lines).tau("poss1") is None


def test_ratios_are_paired_by_prompt_and_seed(lines: dict[str, Any]) -> None:
    found = Found(lines).ratio("hass", "eagle2")
    assert found is not None
    assert set(found.by_seed) == {0, 2}  # HASS has no seed 1
    sums = {
        name: [sum(rounds_of(seed + offset, more)) for seed in (0, 2)]
        for name, offset, more in (("h", 20, 2), ("e", 0, 3))
    }
    assert list(found.by_seed.values()) == pytest.approx([e / h for h, e in zip(sums["h"], sums["e"], strict=True)])
    assert found.value == pytest.approx(sum(1 / h for h in sums["h"]) / sum(1 / e for e in sums["e"]))
    # The interval against a slow twin that draws its own prompts.
    random, drawn = np.random.default_rng(1), []
    tokens = np.array(TOKENS) - 1
    rounds = {name: [np.array(rounds_of(seed + o, m)) for seed in (0, 2)] for name, o, m in (("h", 20, 2), ("e", 0, 3))}
    for _ in range(4000):
        of = random.integers(0, ANSWERS, ANSWERS)
        h, e = (np.mean([tokens[of].sum() / own[of].sum() for own in rounds[name]]) for name in "he")
        drawn.append(h / e)
    # A tenth of the interval: two bootstraps of thousands of samples differ by less.
    width = found.interval[1] - found.interval[0]
    assert found.interval == pytest.approx(np.percentile(drawn, [2.5, 97.5]), abs=width / 10)


def test_an_arm_compared_with_itself_gains_nothing_for_certain(lines: dict[str, Any]) -> None:
    found = Found(lines).ratio("hass", "hass")
    assert found is not None and found.value == 1 and found.interval == (1, 1)


def test_cells_that_have_not_run_are_shown_so_and_nothing_is_made_up(lines: dict[str, Any]) -> None:
    found = Found(lines)
    tables = {name: make(found) for name, make in study_report.SECTIONS.items()}

    def row(name: str, *begins: str) -> list[str]:
        hits = [line for line in tables[name] if line.startswith("| " + " | ".join(begins) + " |")]
        assert len(hits) == 1, (name, begins)
        return [cell.strip() for cell in hits[0].strip("|").split("|")]

    assert row("drafters", "PosS-1")[1:] == ["not run"] * 4
    hass = row("drafters", "HASS")
    assert hass[1] == "0.87" and hass[3].split(", ")[1] == "-"  # the seed without a line
    assert row("compared", "HASS", "EAGLE-2")[2].endswith("]")
    assert row("compared", "PosS-1", "HASS")[2:] == ["not run"] * 3
    assert row("positions-chain", "EAGLE-2")[1:] == [f"{rate} ± 10" for rate in (80, 70, 60, 50, 50, 50)]
    assert row("positions-tree", "EAGLE-2")[7:] == ["-", "-"]  # no round was so deep
    assert row("positions-chain", "EAGLE-3")[1:] == ["not run"] * 6
    assert row("steps", "EAGLE-2")[1:] == ["50", *["-"] * 5] and row("steps", "EAGLE-3")[1:] == ["not run"] * 6
    first = Found(lines).tau("eagle2", seeds=(0,))
    assert row("data", "EAGLE-2, tree of 60")[4] == study_report.with_interval(first)  # of the seed that all sizes have
    both = study_report.with_interval(Found(lines).tau("eagle2"))
    assert row("longer", "EAGLE-2")[1:] == [both, *["not run"] * 3]
    assert row("longer", "EAGLE-3 vs. EAGLE-2, chain of 6")[1:] == ["not run"] * 4
    assert study_report._of_seeds(found.tau("hass"), study_report.with_interval).endswith("] (2 seeds)")
    assert row("fed", "EAGLE-3.1")[1:] == ["not run"] * 3
    assert row("endings", "EAGLE-2")[2] == "not run"  # no answer was so long
    assert row("endings", "EAGLE-2")[1] == study_report.with_interval(Found(lines).tau("eagle2"))
    assert row("endings", "EAGLE-3")[1:] == ["not run"] * 2
    assert row("data", "EAGLE-3, tree of 60")[1:] == ["not run"] * 4
    assert "not run" not in row("fr-spec", "the target's answers", "128")
    assert row("fr-spec", "the library's text", "128")[2:] == ["not run"] * 2
    assert row("c2t", "EAGLE-2")[1:] == ["not run"] * 7
    at_100 = {"eagle2_nodes": 100, "tau": 3.5, "eagle2_candidates": 1000}
    at_8 = {"eagle2_nodes": 8, "tau": 2.5, "eagle2_candidates": 100}
    beyond = {"share": None, "share_interval": None}
    equal = [
        at_100 | {"curve": "c2t, beam 15", "share": 0.8, "share_interval": [0.7, 0.9]},
        at_100 | beyond | {"curve": "c2t, beam all", "beyond": "above", "share_at_end": 2.0},
        at_8 | beyond | {"curve": "c2t, beam 15", "beyond": "below", "share_at_end": 0.97},
        at_8 | {"curve": "c2t, beam all", "share": 0.9, "share_interval": None},
    ]
    points = [
        {"curve": "c2t, beam 15", "tau": tau, "calls_per_round": calls, "candidates": nodes}
        for tau, calls, nodes in ((4.0, 6.0, 900), (3.0, 5.0, 600))
    ]
    found = Found({**lines, "c2t/eagle2": {"at_equal_tau": equal, "points": points}})
    assert study_report.c2t(found)[2] == "| EAGLE-2 | 100 | 3.50 | 1,000 | 0.80 [0.70, 0.90] | not reached | 5.5 | - |"
    assert study_report.c2t(found)[3] == "| EAGLE-2 | 8 | 2.50 | 100 | < 0.97 | 0.90 | - | - |"

    def claimed(line: dict[str, Any]) -> list[str]:
        rows = study_report.claims(Found({**lines, "c2t/eagle2": line}))
        return [row.split(" | ", 2)[2] for row in rows[-4:-2]]

    def of_seeds(*shares: float | None) -> str:
        """None: the curve does not reach the tau of EAGLE-2's tree of 100, but that of 8."""
        shown: list[dict[str, Any]] = [
            beyond | {"beyond": "above"} if x is None else {"share": x, "share_interval": [x - 0.1, x + 0.1]}
            for x in shares
        ]
        of_many: dict[str, Any] = {
            many_trees_name("eagle2", seed): {
                "at_equal_tau": [
                    at_100 | {"curve": C2T_CURVES[1]} | row,
                    at_8 | {"curve": C2T_CURVES[1], "share": 0.5, "share_interval": [0.4, 0.6]},
                ],
                "points": [],
            }
            for seed, row in enumerate(shown)
        }
        found = Found({**lines, **of_many})
        row = next(row for row in study_report.c2t(found) if "ten times" in row)
        assert row.count("3.50") == row.count("1,000") == len(shares)
        return study_report.claims(found)[-1].split(" | ", 2)[2]

    assert of_seeds(0.8, 0.81) == "0.80 [0.70, 0.90], 0.81 [0.71, 0.91] (N = 100) | unfinished: 2 of 3 seeds |"
    assert of_seeds(0.8, 0.81, 0.82).endswith("(N = 100) | holds |")
    assert of_seeds(0.8, 0.81, 0.95).endswith("(N = 100) | undecided |")  # over prompts
    assert of_seeds(0.5, 0.7, 0.89).endswith("(N = 100) | undecided |")  # over seeds
    assert of_seeds(1.2, 1.21, 1.22).endswith("(N = 100) | opposite |")
    # A seed that falls short is not judged at a smaller tree, where all do well.
    assert of_seeds(1.2, None, 1.3).endswith("], not reached, 1.30 [1.20, 1.40] (N = 100) | no interval |")

    judged = {"at_equal_tau": equal, "points": points}
    assert claimed(judged) == [
        "0.80 [0.70, 0.90] (N = 100) | holds (one seed) |",
        "0.90 (N = 8) | no interval (one seed) |",
    ]
    far = [points[0] | {"candidates": 1801}, points[1]]  # what lies between them is a guess
    assert claimed({"at_equal_tau": equal, "points": far})[0] == "0.80 (N = 100) | no interval (one seed) |"
    judged = {"at_equal_tau": equal[1:3], "points": points}
    assert claimed(judged) == ["< 0.97 (N = 8) | holds (one seed) |", "not reached | undecided |"]
    assert study_report.claims(found)[-5].endswith("] | keeps as much |")  # an interval that holds the paper's
    twice = lines["fr-spec/answers"]["replay"]["512"] | {"rounds_by_answer": [2 * n for n in rounds_of(0, 3)]}
    lines["fr-spec/answers"]["replay"]["512"] = twice
    assert study_report.claims(Found(lines))[-5].endswith("| keeps 50 % [50, 50] | keeps less (one seed) |")
    assert row("losses", "hybrid")[1:] == ["not run"] * 5
    soft = row("losses", "soft CE, steps by 0.8^k (EAGLE-3)")
    assert soft[1:4] == ["not run"] * 3 and soft[4:] == [
        "2.75 (2.50 [1.00, 4.00], not run, 3.00 [1.00, 4.00])",
        "1.50 (1.00 [1.00, 4.00], not run, 2.00 [1.00, 4.00])",
    ]
    assert row("costs", "HASS")[1:] == ["not run"] * 5
    passes = {"chain, 6 calls": [9.0, 6.0, 12.0], "eagle2, top_k 10, 8 calls": [16.0, 8.0, 20.0]}
    measured = {"milliseconds": {"hass": passes}, "training_tokens_per_second": {"hass": [900, 1000, 1400]}}
    costs = study_report.costs(Found({**lines, "timing": measured}))
    hass = next(line for line in costs if line.startswith("| HASS |"))
    assert hass == "| HASS | 1.5 (1.0-2.0) | 9.0 (6.0-12.0) | 2.0 (1.0-2.5) | 16.0 (8.0-20.0) | 1,000 |"
    assert all("not run" in cell for cell in row("rates", "EAGLE-2", "600")[3].split("; "))
    longer = {
        rate_name("eagle2", 4e-3, LONGER[0]): {"kind": "rate", "arm": "eagle2", "validation": {"replay_tau": 2.5}}
    }
    tables["rates"] = study_report.rates(Found(lines | longer))
    assert [row("rates", "EAGLE-2", steps)[3].count("0.004: 2.50") for steps in ("600", "1,200")] == [0, 1]
    assert tables["progress"][0].startswith(f"{len(lines)} of ")


def test_a_claim_holds_only_where_prompts_and_seeds_say_so() -> None:
    def gain(low: float, high: float, *seeds: float) -> study_report.Estimate:
        return study_report.Estimate(1.0, (low, high), dict(enumerate(seeds)))

    def verdict(low: float, high: float, *seeds: float) -> str:
        return study_report.verdict(gain(low, high, *seeds))

    assert study_report.verdict(None) == "not run"
    assert verdict(1.01, 1.05, 1.02, 1.03, 1.04) == "holds"
    assert verdict(1.01, 1.05, 1.01, 1.02, 1.06) == "undecided"  # seeds that lie so far apart
    assert verdict(0.99, 1.05, 1.02, 1.03, 1.04) == "undecided"
    assert study_report.with_verdict(gain(0.99, 1.05, 1.02, 1.03, 1.04)).endswith("], undecided")
    assert study_report.with_verdict(gain(1.01, 1.05, 1.02, 1.03, 1.04)).endswith("]")
    assert verdict(0.9, 0.95, 0.9, 0.91, 0.93) == "opposite"
    assert verdict(1.01, 1.05, 1.02, 1.03) == "unfinished: 2 of 3 seeds"


def test_what_a_step_keeps_of_the_first_is_compared_seed_by_seed(lines: dict[str, Any]) -> None:
    """Of a drafter that was trained with one step, by a line of its own."""
    assert Found(lines).level("eagle3", "eagle2", 5) is None
    for seed in range(3):
        trained = lines[drafter_name("eagle2", seed=seed)]
        own = [0.5, 0.4, 0.4, 0.3, 0.2 + seed / 100, 0.2]
        lines[unrolled_name("eagle2", seed)] = {**trained, "validation": {"validation_accuracy": own}}
        own = [0.4, 0.4, 0.4, 0.4, 0.36, 0.3]
        lines[drafter_name("eagle3", seed=seed)] = {**trained, "validation": {"validation_accuracy": own}}
    found = Found(lines).level("eagle3", "eagle2", 5)
    assert found is not None
    assert list(found.by_seed.values()) == pytest.approx([0.9 / 0.4, 0.9 / 0.42, 0.9 / 0.44])
    assert "| EAGLE-2 | 50 | 40 | 40 | 30 | 21 | 20 |" in study_report.steps(Found(lines))
    claim = next(line for line in study_report.claims(Found(lines)) if "from step 1 to 5" in line)
    assert claim.endswith("| EAGLE-3 40 to 36 %; EAGLE-2 50 to 21 % | holds |")
    lines[drafter_name("eagle2")]["validation"] = {"validation_accuracy": [0.5]}
    del lines[unrolled_name("eagle2", 0)]  # outdated: the drafter was trained again
    claim = next(line for line in study_report.claims(Found(lines)) if "from step 1 to 5" in line)
    assert claim.endswith("| EAGLE-3 40 to 36 %; EAGLE-2 50 to 22 % | unfinished: 2 of 3 seeds |")


def test_trainings_are_compared_by_the_minute(lines: dict[str, Any]) -> None:
    eagle2, hass = ({seed: lines[drafter_name(arm, seed=seed)] for seed in (0, 2)} for arm in ("eagle2", "hass"))
    more = {drafter_name("eagle2", seed=seed, steps=LONGER[1]): line for seed, line in eagle2.items()}  # 0.5 minutes
    more |= {drafter_name("eagle3.1", seed=seed): line for seed, line in hass.items()}
    more |= {drafter_name("eagle3.1", seed=0, steps=LONGER[0]): hass[0] | {"train_seconds": 480.0}}
    more |= {drafter_name("eagle3.1", seed=2, steps=LONGER[0]): hass[2] | {"train_seconds": 9.0, "resumed": True}}
    gains = [f"{study_report.with_verdict(Found(lines).ratio('eagle2', 'hass', t))} (2 seeds)" for t in (TREE, CHAIN)]
    rows = study_report.by_the_minute(Found(lines | more))[2:]
    assert rows[0] == f"| 2,400 | 0.5 | 600 | 4.0 | {gains[0]} | {gains[1]} |"  # half of the 8 minutes of 1,200 steps
    assert rows[1] == "| 4,800 | not run | 1,200 | 8.0 | not run | not run |"


def test_the_interval_over_seeds_is_student_s() -> None:
    """Of logarithms 0, 0.1, 0.2: 0.1 +- t * 0.1 / sqrt(3), and t = 4.3027 as in every table."""
    found = study_numbers.over_seeds(study_numbers.Estimate(1.0, (1.0, 1.0), {k: math.exp(k / 10) for k in range(3)}))
    assert found == pytest.approx([math.exp(0.1 + sign * 4.3027 * 0.1 / 3**0.5) for sign in (-1, 1)], rel=1e-4)


def test_growth_and_shares_are_paired_by_prompt(lines: dict[str, Any]) -> None:
    lines |= {drafter_name("eagle3", size): lines[drafter_name("eagle2", 2)] for size in (1, 8)}
    found = Found(lines).growth("eagle3", "eagle2", (1, 8))
    assert found is not None and found.value == pytest.approx(sum(rounds_of(0, 3)) / sum(rounds_of(11, 6)))
    assert Found(lines).growth("eagle3", "eagle2", (1, 4)) is None
    claim = next(row for row in study_report.claims(Found(lines)) if "gains more from eight times" in row)
    assert claim.endswith("| undecided (one seed) |")  # two trainings
    lines |= {
        drafter_name("eagle3", 8, 1): lines[drafter_name("hass")],
        drafter_name("eagle3", 1, 1): lines[drafter_name("eagle2", 2)],
        drafter_name("eagle2", 1, 1): lines[drafter_name("eagle2", 4)],
    }
    first, found = found.value, Found(lines).growth("eagle3", "eagle2", (1, 8))
    second = sum(rounds_of(12, 6)) / sum(rounds_of(20, 2)) / (sum(rounds_of(14, 6)) / sum(rounds_of(1, 3)))
    assert found is not None and found.by_seed == pytest.approx({0: first, 1: second})
    assert found.value == pytest.approx((first + second) / 2)
    share = Found(lines).share_of("fr-spec/answers", "128", TREE)
    assert share is not None and share.value == pytest.approx(sum(rounds_of(0, 3)) / sum(rounds_of(128, 5)))
    assert share.interval[0] < share.value < share.interval[1]


def test_the_demo_s_target_has_lines_of_its_own(lines: dict[str, Any]) -> None:
    without = {name: make(Found(lines)) for name, make in study_report.SECTIONS.items() if name != "progress"}
    slow, fast = (lines[drafter_name(arm)] | {"steps": DEMO_STEPS} for arm in ("eagle2", "hass"))
    of_demo = {demo_name("eagle2"): slow, demo_name("hass-no-top10"): fast, on_demo("answers"): lines["answers"]}
    speeds = {speed_name("eagle2", "chain of 4"): {"tau": 2.5, "speedup": 1.5, "speedup_interval": [1.25, 2.0]}}
    speeds[speed_name("poss2", "chain of 4")] = {"tau": 2.5, "speedup": None, "speedup_interval": None}
    found = Found(lines | of_demo | {demo_speed_name(): {"speeds": speeds}})
    rows = {row.split(" | ")[0].strip("| "): row for row in study_report.on_the_demo(found)[2:]}
    assert study_report.with_interval(found.tau("eagle2", seeds=(0,))) in rows["EAGLE-2"]
    assert rows["EAGLE-2"].endswith(" | 0.5 |") and "| - |" in rows["EAGLE-2"]
    assert study_report.in_percent(found.ratio("hass", "eagle2", seeds=(0,))) in rows["HASS without its top-10 loss"]
    assert rows["PosS-2"] == f"| PosS-2 {'| not run ' * 5}|"
    timed = study_report.speeds(found)
    assert timed[2].endswith("| 2.50 | 1.50 [1.25, 2.00], not run, not run |") and "| 2.50 | not run, " in timed[-1]
    others = without.keys() - {"demo", "demo-speed"}
    assert all(study_report.SECTIONS[name](found) == without[name] for name in others)


def test_answers_that_were_cut_off_stand_apart(lines: dict[str, Any]) -> None:
    tokens = lines["answers"]["tokens_by_answer"] = [LONGEST_ANSWER if i % 5 == 0 else n for i, n in enumerate(TOKENS)]
    for cut_off in (True, False):
        own = [i for i, n in enumerate(tokens) if (n == LONGEST_ANSWER) == cut_off]
        found = Found(lines).tau("eagle2", cut_off=cut_off, seeds=(1,))
        assert found is not None
        assert found.value == pytest.approx(sum(tokens[i] - 1 for i in own) / sum(rounds_of(1, 3)[i] for i in own))
    assert load_recipe(HERE / RECIPE).data.generator.max_new_tokens == LONGEST_ANSWER


def test_what_data_gains_is_the_ratio_of_two_sizes(lines: dict[str, Any]) -> None:
    found = Found(lines).ratio("eagle2", "eagle2", sizes=(8, 1))
    assert found is not None and set(found.by_seed) == {0}
    assert found.value == pytest.approx(sum(rounds_of(11, 6)) / sum(rounds_of(0, 3)))


def test_a_study_without_a_line_makes_every_section() -> None:
    found = Found({})
    for name, make in study_report.SECTIONS.items():
        assert make(found), name
    assert study_report.plots(found) == []


@pytest.mark.parametrize("half, shown", [(0.001, "2.123"), (0.04, "2.12"), (0.3, "2.12"), (0.7, "2.1")])
def test_no_more_digits_than_the_interval_allows(half: float, shown: str) -> None:
    estimate = study_report.Estimate(2.1234, (2.1234 - half, 2.1234 + half), {0: 2.1234})
    assert study_report.with_interval(estimate).split()[0] == shown


def test_lines_along_other_answers_are_refused(lines: dict[str, Any]) -> None:
    lines[drafter_name("hass")]["replay"][TREE]["answers_sha256"] = "other"
    with pytest.raises(UserError, match="were not measured along the same answers"):
        Found(lines)


def test_what_lies_between_markers_is_replaced_and_nothing_else() -> None:
    text = "before\n<!-- study:a -->\nold\n<!-- end -->\nbetween\n<!-- study:b -->\n<!-- end -->\nafter\n"
    filled, missing = study_report.fill(text, {"a": "A", "b": "B", "c": "C"})
    assert filled == text.replace("old", "A").replace("b -->\n", "b -->\nB\n")
    assert missing == ["c"]
    assert study_report.fill(filled, {"a": "A", "b": "B", "c": "C"})[0] == filled


@pytest.mark.parametrize(
    "text, message",
    [
        ("<!-- study:a -->\nx\n", "study:a has no <!-- end -->"),
        ("<!-- study:a -->\n<!-- study:b -->\n<!-- end -->\n", "study:a has no <!-- end -->"),
        ("<!-- study:z -->\n<!-- end -->\n", "study:z: no such section"),
    ],
)
def test_damaged_markers_are_told(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        study_report.fill(text, {"a": "A", "b": "B"})


def test_plots_of_what_is_there(lines: dict[str, Any], tmp_path: Path) -> None:
    made = {plot.name: plot for plot in study_report.plots(Found(lines))}
    assert set(made) == {"positions", "positions_poss", "data", "fr_spec"}  # C2T and PosS over EAGLE-3 have not run
    for plot in made.values():
        study_report.write_png(plot, tmp_path / f"{plot.name}.png")
        assert (tmp_path / f"{plot.name}.png").read_bytes().startswith(b"\x89PNG")
    assert "HASS" in made["positions"].description and "PosS" not in made["positions"].description


def test_the_curves_of_shapes_are_those_of_the_first_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def table(head: str, *rows: str) -> str:
        return "\n".join([f"| layers x width | {head} |", "|---|---|---|", *rows])

    head = "gain of a chain of 4, tau 2.3 | of a tree of 60, tau 3"
    ours = table(head, "| 8 x 256 | 1.28 | 0.65 |", "| 16 x 192 | 1.36 | 0.81 | (busy)", "| mean | - | - |")
    served = table(
        "a round with a chain of 4 / T_t | gain, tau 2.3", "| 8 x 256 | 4.15 (4.05-4.22) | 0.55 (0.54-0.57) |"
    )
    of_a_gpu = table(head, "| 32 x 4096 | 1.76 | 1.74 |")
    page = "\n\n".join(
        [
            "From which target on\npays",
            f"A chain of 4, tau 2.3 | as here:\n{ours}",
            f"llama.cpp:\n{served}",
            of_a_gpu,
            "the end\n",
        ]
    )
    (ax,) = shapes.plot_of(page).draw(lambda role: "#000000").axes
    drawn = {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in ax.lines[:-1]}
    assert drawn == {
        "chain, width 256": [[8, 1.28]],
        "chain, width 192": [[16, 1.36]],
        "tree, width 256": [[8, 0.65]],
        "tree, width 192": [[16, 0.81]],
        "llama.cpp, chain, width 256": [[8, 0.55]],
    }
    bands = [(each.get_datalim(ax.transData).y0, each.get_datalim(ax.transData).y1) for each in ax.collections]
    assert bands == [(1.28, 1.28), (1.36, 1.36), (0.65, 0.65), (0.81, 0.81), (0.54, 0.57)]
    with pytest.raises(UserError, match="--tables: the page has none"):
        shapes.plot_of(served.replace("2.3", "2.4"))
    with pytest.raises(UserError, match="--tables: the row `8 x 256` has fewer cells than its head"):
        shapes.plot_of(ours.replace(" 1.28 |", ""))
    (tmp_path / "empty.md").touch()
    argv = ["shapes.py", "--tables", str(tmp_path / "empty.md"), "--plot", str(tmp_path / "plot.png")]
    monkeypatch.setattr(sys, "argv", argv)
    with pytest.raises(UserError, match="--tables: the page has none"):
        shapes.main()  # which measures nothing instead


def test_the_report_command(lines: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    results, doc = tmp_path / "results.jsonl", tmp_path / "results.md"
    results.write_text("".join(json.dumps({"cell": name, **line}) + "\n" for name, line in lines.items()))
    parts = "".join(f"<!-- study:{name} -->\n<!-- end -->\n" for name in ("drafters", "plot-data", "plot-c2t_few"))
    doc.write_text(f"# Ours\n{parts}")
    argv = ["study_report.py", "--results", str(results), "--doc", str(doc), "--plots", str(tmp_path / "plots")]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(sys, "argv", [*argv, "--results", str(tmp_path / "reslts.jsonl")])
    with pytest.raises(UserError, match=r"--results: .*reslts\.jsonl does not exist"):
        study_report.main()  # and the tables of another study stay as they are
    assert doc.read_text() == f"# Ours\n{parts}"
    monkeypatch.setattr(sys, "argv", argv)
    study_report.main()
    assert "| HASS | 0.87 |" in doc.read_text() and doc.read_text().startswith("# Ours\n")
    assert "](plots/data.png)\n<!-- end -->" in doc.read_text()
    assert "<!-- study:plot-c2t_few -->\nnot run\n" in doc.read_text()  # no picture of what was not measured
    assert {path.name for path in (tmp_path / "plots").iterdir()} == {
        *("positions.png", "positions_poss.png", "data.png", "fr_spec.png")
    }


def test_the_committed_document_has_a_marker_for_every_section() -> None:
    text = (HERE / "docs" / "results.md").read_text(encoding="utf-8")
    _, missing = study_report.fill(text, dict.fromkeys((*study_report.SECTIONS, *study_report.PLOT_SECTIONS), ""))
    assert not missing


def test_the_committed_lines_can_be_read_and_reported() -> None:
    found = Found(study.read_lines(HERE / study.RESULTS))
    known = {cell.name for cell in cells(found.lines)}
    assert set(found.lines) <= known
    for name, line in found.lines.items():
        for tree in (TREE, CHAIN) if line["kind"] == "drafter" else ():
            own = line["replay"][tree]
            of_answers = found.lines["answers"]["tokens_by_answer"]
            assert len(own["rounds_by_answer"]) == len(of_answers), name
            # tau as eval/acceptance.py gives it, from what the report goes by.
            assert own["tau"] == pytest.approx((sum(of_answers) - len(of_answers)) / own["rounds"], abs=1e-4)
            assert sum(own["rounds_by_answer"]) == own["rounds"]
