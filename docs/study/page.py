"""Tables and plots of the study's lines (`docs.study.run`), written between the markers of docs/results.md.

    python -m docs.study.page
    python -m docs.study.page --results runs/mine.jsonl --doc runs/mine.md --plots runs/plots

Text between `<!-- study:NAME -->` and `<!-- end -->` is replaced; the rest of the file does not change. Tables show
cells without a line as not run; plots leave them out.
"""

import argparse
import itertools
import os
import re
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from docs.study.cells import (
    ALL,
    ARMS,
    CHAIN,
    CUTS,
    DEMO_STEPS,
    LONG,
    LONGER,
    LONGEST_ANSWER,
    LOSSES,
    MORE,
    ON_DEMO,
    RATE_ARM,
    SCALED,
    SEEDS,
    SIZES,
    SPEEDS,
    STEPS,
    TIMED,
    TREE,
    UNROLL,
    best_rate,
    cells,
    current,
    demo_speed_name,
    many_trees_name,
    rate_name,
    rates_of,
    sampled_name,
    speed_name,
)
from docs.study.numbers import Estimate, Found, over_seeds
from docs.study.plots import C2T_CURVES, C2T_WORDS, CORPORA, OF_SIZES, PLOT_SECTIONS, PLOTTED, plots
from docs.study.run import RESULTS, read_lines
from draftsmith.eval.measured.c2t_curves import far_apart
from draftsmith.eval.page.drawing import write_png
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_path, atomic_write

DOC, PLOTS = Path("docs/results.md"), Path("docs/study")
NOT_RUN, NOT_REACHED = "not run", "not reached"
LEVEL = 5  # compared with the first step
FR_SPEC_KEPT = 0.98  # of tau with half the vocabulary (FR-Spec, table 1)
TOP10 = {"1": "hass"} | {weight: f"hass-top10-{weight}" for weight in ("0.3", "0.1", "0.03")}  # arms by weight
# (arm, the arm that it is compared with)
COMPARED = (
    *(("eagle3", "eagle2"), ("hass", "eagle2"), ("hass3", "eagle2"), ("hass3", "hass"), ("eagle3", "hass")),
    *((f"poss{n}", base) for base in ("eagle2", "hass") for n in (1, 2, 3)),
    *(("hass-no-top10", base) for base in ("hass", "eagle2", "hass2-no-top10")),
    *(("hass2-no-top10", base) for base in ("eagle2", "poss2")),
    *(("poss2", "hass-no-top10"), ("matched", "hass-no-top10"), ("poss2", "matched")),
    *((f"poss{n}-eagle3", "eagle3") for n in (1, 2, 3)),
    *(("poss2-eagle3-whole", "poss2-eagle3"), ("poss2-eagle3-whole", "eagle3")),
    *(("matched-eagle3", "eagle3"), ("poss2-eagle3", "matched-eagle3")),
    *(("losses-of-eagle3", "eagle2"), ("losses-of-eagle3", "eagle3"), ("eagle3-norm", "eagle3")),
    ("losses-of-eagle3", "hass-no-top10"),
    *(("eagle3.1", base) for base in ("eagle3", "eagle2", "hass-no-top10", "hass2-no-top10", "poss2")),
    *(("fc-norm", "eagle3"), ("norm-output", "eagle3"), ("poss2-eagle3.1", "eagle3.1")),
    *((arm, "eagle3-further") for arm in ("poss2-further", "poss2-further-0.9", "poss2-further-whole")),
    ("poss2-further-whole", "poss2-further-0.9"),
    *((arm, "hass-top10-0") for arm in TOP10.values()),
    ("hass-top10-0", "hass-no-top10"),
)
UNREPORTED = "not reported"
EAGLE3S_PAPER = "+52 % (6.23, 4.11; Llama-3.1-8B, five tasks)"
LONG_CONTEXT = "up to twice as much at long context (arXiv 2605.09992)"
SIX_STEPS = "Six unroll steps beat two for HASS without the top-10 loss"
TWO_STEPS = "EAGLE-3.1 beats HASS without the top-10 loss, two steps"
SECOND = "HASS without the top-10 loss, two steps, beats EAGLE-2"
# (claim, finding of the paper or its reviewers, arm, the arm that it beats)
CLAIMS = (
    ("HASS beats EAGLE-2", "+6 % of tau (4.37, 4.11; Llama-3.1-8B, five tasks)", "hass", "eagle2"),
    ("HASS beats EAGLE-2, with its published three steps", "as above", "hass3", "eagle2"),
    ("EAGLE-3 beats EAGLE-2", EAGLE3S_PAPER, "eagle3", "eagle2"),
    ("PosS-1 beats HASS", "+2.1 % of speed over all (Llama-3-8B), +0.3 % (Llama-2-13B)", "poss1", "hass"),
    ("PosS-2 beats HASS", "as above", "poss2", "hass"),
    ("PosS-3 beats HASS", "as above", "poss3", "hass"),
    ("PosS-2 beats HASS without the top-10 loss, which PosS lacks", UNREPORTED, "poss2", "hass-no-top10"),
    ("PosS-2 beats one layer of as many parameters", "asked for by reviewers", "poss2", "matched"),
    ("PosS-3 over EAGLE-3 beats EAGLE-3, detached", "about +10 %, not detached", "poss3-eagle3", "eagle3"),
    ("PosS-2 over EAGLE-3 beats EAGLE-3, not detached", "as above", "poss2-eagle3-whole", "eagle3"),
    (
        "PosS-2 from a trained EAGLE-3 beats EAGLE-3 trained as long, detached",
        "as above",
        "poss2-further",
        "eagle3-further",
    ),
    ("The same, steps weighted by 0.9^k, detached", "as above", "poss2-further-0.9", "eagle3-further"),
    ("The same, steps weighted by 0.9^k, not detached", "as above", "poss2-further-whole", "eagle3-further"),
    ("PosS-2 over EAGLE-3 beats one layer of as many parameters", UNREPORTED, "poss2-eagle3", "matched-eagle3"),
    (
        "EAGLE-1's layer learns better by EAGLE-3's losses than by its own",
        UNREPORTED,
        "losses-of-eagle3",
        "hass-no-top10",
    ),
    ("EAGLE-1's layer, by EAGLE-3's losses, beats EAGLE-2", UNREPORTED, "losses-of-eagle3", "eagle2"),
    ("EAGLE-1's layer, by EAGLE-3's losses, beats EAGLE-3", UNREPORTED, "losses-of-eagle3", "eagle3"),
    ("The target's final norm before EAGLE-3's head helps", UNREPORTED, "eagle3-norm", "eagle3"),
    ("EAGLE-3.1's norms help EAGLE-3", LONG_CONTEXT, "eagle3.1", "eagle3"),
    ("EAGLE-3.1 beats EAGLE-2", UNREPORTED, "eagle3.1", "eagle2"),
    ("EAGLE-3.1 beats PosS-2", UNREPORTED, "eagle3.1", "poss2"),
    ("PosS-2 over EAGLE-3.1 beats EAGLE-3.1, detached", UNREPORTED, "poss2-eagle3.1", "eagle3.1"),
    *(
        (
            f"A top-10 loss of weight {weight} helps HASS, at equal rate",
            "published with weight 1",
            arm,
            "hass-top10-0",
        )
        for weight, arm in TOP10.items()
    ),
    (SIX_STEPS, UNREPORTED, "hass-no-top10", "hass2-no-top10"),
    (TWO_STEPS, UNREPORTED, "eagle3.1", "hass2-no-top10"),
    (SECOND, UNREPORTED, "hass2-no-top10", "eagle2"),
)
# The same, of the demo's deeper target.
DEMO_CLAIMS = (
    ("EAGLE-3 beats EAGLE-2", EAGLE3S_PAPER, "eagle3", "eagle2"),
    ("EAGLE-3.1's norms help EAGLE-3", LONG_CONTEXT, "eagle3.1", "eagle3"),
    ("EAGLE-3.1 beats EAGLE-2", UNREPORTED, "eagle3.1", "eagle2"),
    (TWO_STEPS, UNREPORTED, "eagle3.1", "hass2-no-top10"),
    (SECOND, UNREPORTED, "hass2-no-top10", "eagle2"),
    (SIX_STEPS, UNREPORTED, "hass-no-top10", "hass2-no-top10"),
    ("PosS-2 beats HASS without the top-10 loss", UNREPORTED, "poss2", "hass-no-top10"),
    ("EAGLE-3.1 beats PosS-2", UNREPORTED, "eagle3.1", "poss2"),
)
# Claimed to gain more from more data than EAGLE-2: (arm, data sizes, steps, words)
GROWN = (
    ("eagle3", (min(SIZES), ALL), STEPS, "eight times the data"),
    *(
        (arm, (ALL, max(MORE)), LONGER[1], f"four times the data, {LONGER[1]:,} steps")
        for arm in ("eagle3", "eagle3.1")
    ),
)
BY_THE_MINUTE = ((LONGER[1], STEPS), (LONGER[2], LONGER[0]), (LONGER[2], LONGER[1]))  # of EAGLE-2, of EAGLE-3.1
CHAIN_CALLS, TREE_CALLS = "chain, {} calls", "eagle2, top_k 10, {} calls"  # names in eval/plan.py's timings
# (the paper's share, EAGLE-2's N for our verdict)
C2T_CLAIMED = {C2T_CURVES[0]: ("0.78 (N = 100, Llama-2-7B)", 100), C2T_CURVES[1]: ("0.77 (N = 290, the same)", 180)}
C2T_ROWS = {  # of each seed
    "EAGLE-2": ["c2t/eagle2"],
    "EAGLE-2, ten times the trees": [many_trees_name("eagle2", seed) for seed in SEEDS],
    "EAGLE-3": ["c2t/eagle3"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--results", type=Path, default=Path(RESULTS), help=f"default: {RESULTS}")
    parser.add_argument("--doc", type=Path, default=DOC, help=f"default: {DOC}")
    parser.add_argument("--plots", type=Path, default=PLOTS, help=f"folder; default: {PLOTS}")
    options = parser.parse_args()
    if not options.results.exists():
        raise UserError(f"--results: {options.results} does not exist; docs/study/run.py writes it")
    found = Found(current(read_lines(options.results.absolute())))
    try:
        text = options.doc.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--doc: {options.doc} cannot be read ({error.strerror}); it holds the markers") from None
    try:
        options.plots.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--plots: {options.plots} is no folder and cannot become one ({error.strerror})") from None
    drawn = plots(found)
    folder = os.path.relpath(options.plots, options.doc.parent)
    sections = {name: "\n".join(make(found)) for name, make in SECTIONS.items()} | dict.fromkeys(PLOT_SECTIONS, NOT_RUN)
    sections |= {f"plot-{plot.name}": f"![{plot.title}]({folder}/{plot.name}.png)" for plot in drawn}
    filled, missing = fill(text, sections)
    atomic_write(options.doc, filled)
    print(f"written: {options.doc}{''.join(f'; no marker for {name}' for name in missing)}")
    for plot in drawn:
        place = options.plots / f"{plot.name}.png"
        with atomic_path(place) as unfinished:
            write_png(plot, unfinished)
        print(f"written: {place}")


def fill(text: str, sections: dict[str, str]) -> tuple[str, list[str]]:
    """(`text` with the sections between their markers, names of sections without a marker).

    Raises:
        UserError: a marker without its end, or of an unknown section.
    """
    for name in re.findall(r"<!-- study:(\S+) -->", text):
        if name not in sections:
            raise UserError(f"--doc: marker study:{name}: no such section; there are {', '.join(sections)}")
    missing = []
    for name, content in sections.items():
        pattern = rf"(<!-- study:{re.escape(name)} -->\n)(.*?)(<!-- end -->)"
        if f"<!-- study:{name} -->" not in text:
            missing.append(name)
            continue
        # The nearest end; a marker in between means that this one has none.
        match = re.search(pattern, text, flags=re.S)
        if match is None or "<!-- study:" in match[2]:
            raise UserError(f"--doc: marker study:{name} has no <!-- end --> behind it")
        text = text[: match.end(1)] + content + "\n" + text[match.start(3) :]
    return text, missing


# Tables.


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *("| " + " | ".join(row) + " |" for row in rows)]


def digits_of(half_width: float) -> int:
    """Decimals for a number with an interval of this half width, 1 to 3."""
    return 3 if half_width < 0.005 else 2 if half_width < 0.5 else 1


def with_interval(found: Estimate | None) -> str:
    if found is None:
        return NOT_RUN
    return bracketed(found.value, found.interval, digits_of(found.half_width))


def bracketed(value: float, interval: Sequence[float], digits: int = 2) -> str:
    low, high = interval
    return f"{value:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def seeds_of(found: Estimate | None) -> str:
    digits = 0 if found is None else digits_of(found.half_width)
    return _by_seed(found, lambda value: f"{value:.{digits}f}")


def _by_seed(found: Estimate | None, shown: Callable[[float], str]) -> str:
    """Every seed's value; a dash for cells that have not run."""
    if found is None:
        return NOT_RUN
    return ", ".join(shown(found.by_seed[seed]) if seed in found.by_seed else "-" for seed in SEEDS)


def in_percent(found: Estimate | None) -> str:
    """A ratio as a gain."""
    if found is None:
        return NOT_RUN
    digits = 1 if found.half_width < 0.01 else 0
    value, low, high = (_gain(x, digits) for x in (found.value, *found.interval))
    return f"{value} % [{low}, {high}]"


def _gain(ratio: float, digits: int = 0) -> str:
    """In per cent, with its sign: "-0" is below zero."""
    return f"{100 * (ratio - 1):+.{digits}f}"


def progress(found: Found) -> list[str]:
    every = cells(found.all_lines)
    left = [cell.name for cell in every if cell.name not in found.all_lines]
    hours = sum(line["seconds"] for line in found.all_lines.values()) / 3600
    return [f"{len(every) - len(left)} of {len(every)} cells done in at least {hours:.1f} processor hours."]


def drafters(found: Found) -> list[str]:
    rows = []
    for arm, about in ARMS.items():
        lines = found.of(arm)
        first = next(iter(lines.values()), None)
        size = f"{first['parameters'] / 1e6:.2f}" if first else NOT_RUN
        tree = found.tau(arm)
        rows.append([about.name, size, with_interval(tree), seeds_of(tree), with_interval(found.tau(arm, CHAIN))])
    return table(["arm", "million parameters", "tau, tree of 60", "seeds 0, 1, 2", "tau, chain of 6"], rows)


def costs(found: Found) -> list[str]:
    rows = []
    for arm in TIMED:
        times = [found.milliseconds(arm, name) for name in (CHAIN_CALLS.format(6), TREE_CALLS.format(8))]
        cells_ = []
        for time, calls in zip(times, (6, 8), strict=True):
            cells_ += [NOT_RUN, NOT_RUN] if time is None else [_spread(time, calls), _spread(time, 1)]
        rates = found.lines.get("timing", {}).get("training_tokens_per_second", {}).get(arm)
        rows.append([ARMS[arm].name, *cells_, f"{statistics.median(rates):,.0f}" if rates else NOT_RUN])
    head = ["arm", "ms a call, chain", "ms a round, chain", "ms a call, tree", "ms a round, tree"]
    return table([*head, "training, tokens a second"], rows)


def _spread(time: tuple[float, float, float], calls: int) -> str:
    """Median, minimum and maximum of all passes, to about two digits."""
    median, least, most = (x / calls for x in time)
    digits = 1 if median >= 1 else 2
    return f"{median:.{digits}f} ({least:.{digits}f}-{most:.{digits}f})"


def compared(found: Found) -> list[str]:
    rows = []
    for arm, base in COMPARED:
        tree, chain = found.ratio(arm, base), found.ratio(arm, base, CHAIN)
        seeds = _by_seed(tree, _gain)
        rows.append([ARMS[arm].name, ARMS[base].name, in_percent(tree), seeds, in_percent(chain)])
    return table(["arm", "compared with", "tau, tree of 60", "seeds 0, 1, 2", "tau, chain of 6"], rows)


def losses(found: Found) -> list[str]:
    """EAGLE-3 with other objectives: gains of greedy replays, and taus of sampled answers."""
    rows = []
    for arm in ("eagle3", *LOSSES):
        name = LOSSES[arm].name if arm in LOSSES else "soft CE, steps by 0.8^k (EAGLE-3)"
        tree, chain = found.ratio(arm, "eagle3"), found.ratio(arm, "eagle3", CHAIN)
        greedy = [with_interval(found.tau(arm)), in_percent(tree), in_percent(chain)]
        sampled = []
        for shape in (TREE, CHAIN):
            lines = [found.lines.get(sampled_name(arm, seed)) for seed in SEEDS]
            own = [line["decoded"][shape] if line else None for line in lines]
            taus = [numbers["tau"] for numbers in own if numbers is not None]
            by_seed = ", ".join(
                NOT_RUN if numbers is None else bracketed(numbers["tau"], numbers["tau_interval"]) for numbers in own
            )
            sampled.append(f"{sum(taus) / len(taus):.2f} ({by_seed})" if taus else NOT_RUN)
        rows.append([name, *greedy, *sampled])
    head = ["loss", "greedy: tau, tree of 60", "vs. soft CE", "chain of 6, vs. soft CE"]
    return table([*head, "temperature 1: tau, tree of 60 (seeds)", "chain of 6 (seeds)"], rows)


def verdict(found: Estimate | None) -> str:
    """Whether a gain is significant, by the intervals over prompts and over seeds."""
    if found is None:
        return NOT_RUN
    of_seeds = over_seeds(found)
    if of_seeds is None:
        return f"unfinished: {len(found.by_seed)} of {len(SEEDS)} seeds"
    if min(found.interval[0], of_seeds[0]) > 1:
        return "holds"
    if max(found.interval[1], of_seeds[1]) < 1:
        return "opposite"
    return "undecided"


def with_verdict(gain: Estimate | None) -> str:
    """In per cent, and whether it is undecided."""
    return in_percent(gain) + ", undecided" * (verdict(gain) == "undecided")


def claims(found: Found) -> list[str]:
    gains = [(claim, paper, found.ratio(arm, base)) for claim, paper, arm, base in CLAIMS]
    for claim, paper, arm, base in DEMO_CLAIMS:
        gains.append((f"{claim}, on the demo's target", paper, found.demo.ratio(arm, base, steps=DEMO_STEPS)))
    reported = {arm: paper for _, paper, arm, base in CLAIMS if base == "eagle2"}
    for steps, arm in itertools.product(LONGER, LONG[1:]):
        claim = f"{ARMS[arm].name} beats EAGLE-2, after {steps:,} steps"
        gains.append((claim, reported.get(arm, UNREPORTED), found.ratio(arm, "eagle2", steps=steps)))
    claim = f"EAGLE-3.1's norms help EAGLE-3, after {LONGER[1]:,} steps"
    gains.append((claim, LONG_CONTEXT, found.ratio("eagle3.1", "eagle3", steps=LONGER[1])))
    times = dict(zip(MORE, ("twice", "four times"), strict=True))
    for size, arm in itertools.product(MORE, LONG[1:]):
        claim = f"{ARMS[arm].name} beats EAGLE-2, after {LONGER[1]:,} steps on {times[size]} the data"
        ratio = found.ratio(arm, "eagle2", sizes=(size, size), steps=LONGER[1])
        gains.append((claim, reported.get(arm, UNREPORTED), ratio))
    rows = [[claim, paper, in_percent(ratio), verdict(ratio)] for claim, paper, ratio in gains]
    for arm, (less, more), steps, words in GROWN:
        both = "; ".join(
            f"{ARMS[each].name} {in_percent(found.ratio(each, each, sizes=(more, less), steps=steps))}"
            for each in (arm, "eagle2")
        )
        growth = found.growth(arm, "eagle2", (less, more), steps)
        # Smaller sizes have one seed, and two trainings of one seed differ as much as these do (docs/log.md).
        seen = verdict(growth) if growth is None or less == ALL else "undecided (one seed)"
        rows.append([f"{ARMS[arm].name} gains more from {words}", "it rises, EAGLE-2 hardly (in a figure)", both, seen])
    for arm in ("eagle3", "eagle3.1"):
        level, of_both = found.level(arm, "eagle2", LEVEL), NOT_RUN
        if level is not None:
            by_step = {each: _mean_by_step(found, each) for each in (arm, "eagle2")}
            of_both = "; ".join(
                f"{ARMS[each].name} {own[0]:.0f} to {own[LEVEL - 1]:.0f} %" for each, own in by_step.items()
            )
        about = f"{ARMS[arm].name}'s accuracy falls less from step 1 to {LEVEL}"
        rows.append([about, "acceptance stays nearly level, EAGLE's falls (in a figure)", of_both, verdict(level)])
    kept = found.share_of("fr-spec/answers", "512", TREE)
    here, seen = NOT_RUN, NOT_RUN
    if kept is not None:
        here, seen = f"keeps {_kept(kept)}", "keeps as much"
        if kept.interval[1] < FR_SPEC_KEPT or kept.interval[0] > FR_SPEC_KEPT:
            seen = f"keeps {'less' if kept.value < FR_SPEC_KEPT else 'more'} (one seed)"
    rows.append(["FR-Spec: half the vocabulary", "keeps 98 % (64 k of 128 k, Llama-3-8B)", here, seen])
    for name, trees in (("EAGLE-2", ""), ("EAGLE-2, ten times the trees", ", ten times the trees")):
        planned = C2T_ROWS[name]
        lines = [found.lines[cell] for cell in planned if cell in found.lines]
        for curve, words in zip(C2T_CURVES, C2T_WORDS, strict=True):
            paper, nodes = C2T_CLAIMED[curve]
            here, seen = _c2t_judged(lines, len(planned), curve, nodes)
            rows.append([f"C2T verifies fewer nodes than EAGLE-2 at equal tau, {words}{trees}", paper, here, seen])
    return table(["claim", "paper", "here", "verdict"], rows)


def _c2t_judged(lines: Sequence[Mapping[str, Any]], planned: int, curve: str, nodes: int) -> tuple[str, str]:
    """(shares, verdict) compared with EAGLE-2's tree of `nodes`, or the largest smaller tree with a tau that a curve
    reaches, of the seeds that have run. The interval over prompts is the hull of the seeds' own."""
    if not lines:
        return NOT_RUN, NOT_RUN
    judged = [
        row for line in lines for row in _at_equal_tau(line) if row["curve"] == curve and row["eagle2_nodes"] <= nodes
    ]
    reached = [row for row in judged if row["share"] is not None or row.get("beyond") == "below"]
    if not reached:
        return NOT_REACHED, "undecided"
    largest = max(row["eagle2_nodes"] for row in reached)
    rows = [row for row in judged if row["eagle2_nodes"] == largest]  # one of each seed
    here = f"{', '.join(map(_share_of, rows))} (N = {largest})"
    if len(lines) < planned:
        return here, f"unfinished: {len(lines)} of {planned} seeds"
    one = " (one seed)" * (planned == 1)
    if all(row.get("beyond") == "below" for row in rows):  # a curve that begins above this tau verifies fewer nodes
        return here, f"holds{one}"
    gains = {seed: 1 / row["share"] for seed, row in enumerate(rows) if row["share_interval"] is not None}
    if len(gains) < planned:
        return here, f"no interval{one}"
    ends = [1 / end for row in rows for end in row["share_interval"]]
    if planned == 1:
        return here, _side(sorted(ends))
    return here, verdict(Estimate(statistics.geometric_mean(gains.values()), (min(ends), max(ends)), gains))


def _side(interval: Sequence[float]) -> str:
    """The verdict on one seed's gain, by its interval over prompts."""
    low, high = interval
    return f"{'holds' if low > 1 else 'opposite' if high < 1 else 'undecided'} (one seed)"


def _kept(found: Estimate) -> str:
    """A share of tau."""
    value, low, high = (f"{100 * x:.0f}" for x in (found.value, *found.interval))
    return f"{value} % [{low}, {high}]"


def positions(found: Found, tree: str, depth: int) -> list[str]:
    rows = []
    for arm in PLOTTED:
        rates = found.positions(arm, tree)[:depth]
        shown = [f"{100 * rate.value:.0f} ± {max(1, round(100 * rate.half_width))}" for rate in rates]
        rows.append([ARMS[arm].name, *shown, *["-" if shown else NOT_RUN] * (depth - len(shown))])
    return table(["%", *(str(i + 1) for i in range(depth))], rows)


def steps(found: Found) -> list[str]:
    """Agreement of each unroll step with the target on the validation answers; means over seeds."""
    rows = []
    for arm, about in ARMS.items():
        shown = [f"{rate:.0f}" for rate in _mean_by_step(found, arm)] or [NOT_RUN] * UNROLL
        rows.append([about.name, *shown, *["-"] * (UNROLL - len(shown))])
    return table(["%", *(str(i + 1) for i in range(UNROLL))], rows)


def _mean_by_step(found: Found, arm: str) -> list[float]:
    """Per cent, for the steps that all seeds have."""
    every = list(found.by_step(arm).values())
    return [100 * sum(own) / len(own) for own in zip(*every, strict=False)]


def data(found: Found) -> list[str]:
    counts = found.lines.get("data", {}).get("training_conversations", {})
    rows = []
    for arm in reversed(SCALED):
        for tree in (TREE, CHAIN):
            taus = [found.tau(arm, tree, size, seeds=OF_SIZES) for size in SIZES]
            rows.append([f"{ARMS[arm].name}, {tree}", *map(with_interval, taus)])
    head = [f"{name}{f': {counts[name]:,} conversations' if name in counts else ''}" for name in SIZES.values()]
    return table(["arm and tree", *head], rows)


def longer(found: Found) -> list[str]:
    """tau after more steps."""
    return _trained_alike(found, {f"{steps:,} steps": (ALL, steps) for steps in (STEPS, *LONGER)})


def fed(found: Found) -> list[str]:
    """tau after LONGER[1] steps on more conversations."""
    whole = found.lines.get("data", {}).get("training_conversations", {}).get(SIZES[ALL], 0)
    return _trained_alike(found, {f"{whole * size // ALL:,} conversations": (size, LONGER[1]) for size in (ALL, *MORE)})


def by_the_minute(found: Found) -> list[str]:
    """EAGLE-2 and EAGLE-3.1 after trainings of about as many minutes, and of more for EAGLE-3.1."""
    rows = []
    for of_both in BY_THE_MINUTE:
        row = []
        for arm, steps in zip(("eagle2", "eagle3.1"), of_both, strict=True):
            row += [f"{steps:,}", _in_minutes(found.minutes(arm, steps))]
        for tree in (TREE, CHAIN):
            gain = found.ratio("eagle2", "eagle3.1", tree, steps=of_both[0], base_steps=of_both[1])
            row.append(_of_seeds(gain, with_verdict))
        rows.append(row)
    head = ["steps of EAGLE-2", "minutes", "steps of EAGLE-3.1", "minutes"]
    return table([*head, "EAGLE-2 vs. EAGLE-3.1, tree of 60", "chain of 6"], rows)


def _in_minutes(minutes: float | None) -> str:
    return NOT_RUN if minutes is None else f"{minutes:.1f}"


def _trained_alike(found: Found, columns: Mapping[str, tuple[int, int]]) -> list[str]:
    """tau of the arms that train for longer, and their gains over EAGLE-2 and PosS-2 after as much.

    Args:
        columns: (data size, steps) by head.
    """
    rows = []
    for arm in LONG:
        taus = [found.tau(arm, size=size, steps=steps) for size, steps in columns.values()]
        rows.append([ARMS[arm].name, *(_of_seeds(tau, with_interval) for tau in taus)])
    pairs = [*((arm, "eagle2") for arm in LONG[1:]), ("eagle3.1", "poss2")]
    for (arm, base), tree in itertools.product(pairs, (TREE, CHAIN)):
        gains = [found.ratio(arm, base, tree, (size, size), steps) for size, steps in columns.values()]
        words = f"{ARMS[arm].name} vs. {ARMS[base].name}, {tree}"
        rows.append([words, *(_of_seeds(gain, with_verdict) for gain in gains)])
    return table(["tau, tree of 60", *columns], rows)


def _of_seeds(found: Estimate | None, shown: Callable[[Estimate | None], str]) -> str:
    """With the number of seeds, where it is not all."""
    if found is None or len(found.by_seed) == len(SEEDS):
        return shown(found)
    return f"{shown(found)} ({len(found.by_seed)} seed{'s' * (len(found.by_seed) > 1)})"


def on_the_demo(found: Found) -> list[str]:
    """The demo's deeper target: taus, gains and speed-ups."""
    rows = []
    for arm in ON_DEMO:
        tree, chain = (found.demo.tau(arm, shape, steps=DEMO_STEPS) for shape in (TREE, CHAIN))
        gain = found.demo.ratio(arm, "eagle2", steps=DEMO_STEPS)
        taus = [
            with_interval(tree),
            seeds_of(tree),
            "-" if arm == "eagle2" else with_verdict(gain),
            with_interval(chain),
        ]
        rows.append([ARMS[arm].name, *taus, _in_minutes(found.demo.minutes(arm, DEMO_STEPS))])
    head = ["arm", "tau, tree of 60", "seeds 0, 1, 2", "vs. EAGLE-2", "tau, chain of 6"]
    return table([*head, "minutes of training"], rows)


def speeds(found: Found) -> list[str]:
    """Speed-ups on the demo's target, of each seed, and the taus of these trees."""
    of_seeds = [found.all_lines.get(demo_speed_name(seed), {}).get("speeds", {}) for seed in SEEDS]
    rows = []
    for arm in ON_DEMO:
        shown = [ARMS[arm].name]
        for tree in SPEEDS:
            own = [speeds.get(speed_name(arm, tree)) for speeds in of_seeds]
            taus = [row["tau"] for row in own if row]
            shown += [f"{statistics.mean(taus):.2f}" if taus else NOT_RUN, ", ".join(map(_speed, own))]
        rows.append(shown)
    head = [f"{of}, {tree}" for tree in SPEEDS for of in ("tau", "speed-up")]
    return table(["arm", *head], rows)


def _speed(row: Mapping[str, Any] | None) -> str:
    if row is None or row["speedup_interval"] is None:
        return NOT_RUN
    return bracketed(row["speedup"], row["speedup_interval"])


def endings(found: Found) -> list[str]:
    """tau along answers that ended by themselves, and along those that were cut off."""
    rows = []
    for arm in PLOTTED:
        taus = [found.tau(arm, cut_off=cut_off) for cut_off in (False, True)]
        rows.append([ARMS[arm].name, *map(with_interval, taus)])
    counts = ["", ""]
    if "answers" in found.lines:
        cut_off, tokens = found.cut_off(), np.array(found.lines["answers"]["tokens_by_answer"])
        counts = [
            f": {own.sum()} answers, {100 * tokens[own].sum() / tokens.sum():.0f} % of the tokens"
            for own in (~cut_off, cut_off)
        ]
    head = [f"ended by themselves{counts[0]}", f"cut off at {LONGEST_ANSWER}{counts[1]}"]
    return table(["tau, tree of 60", *head], rows)


def fr_spec(found: Found) -> list[str]:
    rows = []
    for corpus, words in CORPORA.items():
        whole = found.tau_of(f"fr-spec/{corpus}", TREE)
        for size in CUTS:
            own = found.tau_of(f"fr-spec/{corpus}", str(size))
            share = found.share_of(f"fr-spec/{corpus}", str(size), TREE)
            rows.append([words, f"{size:,}", with_interval(own), NOT_RUN if share is None else _kept(share)])
        rows.append([words, "all 1,024", with_interval(whole), NOT_RUN if whole is None else "100 %"])
    return table(["ranked by", "tokens", "tau, tree of 60", "share of the whole vocabulary's tau"], rows)


def c2t(found: Found) -> list[str]:
    head = ["drafter", "EAGLE-2's N", "tau", "nodes verified", *(f"C2T's share, {words}" for words in C2T_WORDS)]
    head += [f"C2T's calls a round, {words}" for words in C2T_WORDS]
    rows = []
    for name, of_name in C2T_ROWS.items():
        of_seeds = [_c2t_rows(found.lines[cell]) for cell in of_name if cell in found.lines]
        if not of_seeds:
            rows.append([name, *[NOT_RUN] * (len(head) - 1)])
        for of_size in zip(*of_seeds, strict=True):
            (size, *_), *columns = zip(*of_size, strict=True)
            rows.append([name, size, *map(", ".join, columns)])
    return table(head, rows)


def _c2t_rows(line: Mapping[str, Any]) -> list[list[str]]:
    """EAGLE-2's trees by size: N, tau, nodes, then C2T's shares and calls."""
    by_size: dict[int, dict[str, Mapping[str, Any]]] = {}
    for row in _at_equal_tau(line):
        by_size.setdefault(row["eagle2_nodes"], {})[row["curve"]] = row
    rows = []
    for size, curves in by_size.items():
        shares = [_share_of(curves[name]) if name in curves else NOT_RUN for name in C2T_CURVES]
        of_both = next(iter(curves.values()))
        calls = [_calls_at(line["points"], name, of_both["tau"]) for name in C2T_CURVES]
        rows.append([f"{size}", f"{of_both['tau']:.2f}", f"{of_both['eagle2_candidates']:,}", *shares, *calls])
    return rows


def _at_equal_tau(line: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The line's comparisons. Older lines have intervals between far-apart points, too: not shown."""
    rows = []
    for row in line["at_equal_tau"]:
        own = [point for point in line["points"] if point["curve"] == row["curve"]]
        rows.append({**row, "share_interval": None} if far_apart(own, row["tau"]) else row)
    return rows


def _calls_at(points: Sequence[Mapping[str, Any]], curve: str, tau: float) -> str:
    """A curve's calls a round at `tau`, interpolated linearly."""
    own = sorted((point["tau"], point["calls_per_round"]) for point in points if point["curve"] == curve)
    if not own or not own[0][0] <= tau <= own[-1][0]:
        return "-"
    calls = np.interp(tau, [at for at, _ in own], [calls for _, calls in own])
    return f"{calls:.1f}"


def _share_of(row: Mapping[str, Any]) -> str:
    """The nodes that C2T verifies at EAGLE-2's tau, as a share of EAGLE-2's."""
    if row["share"] is None:
        return f"< {row['share_at_end']:.2f}" if row.get("beyond") == "below" else NOT_REACHED
    if row["share_interval"] is None:
        return f"{row['share']:.2f}"
    return bracketed(row["share"], row["share_interval"])


def rates(found: Found) -> list[str]:
    rows = []
    searched = [arm for arm in ARMS if RATE_ARM[ARMS[arm].family] == arm]
    longer = [arm for arm in searched if ARMS[arm].family in {ARMS[each].family for each in LONG}]
    for steps, arm in [(STEPS, arm) for arm in searched] + [(LONGER[0], arm) for arm in longer]:
        family = ARMS[arm].family
        tried = rates_of(family, found.lines, steps)
        lines = {rate: found.lines.get(rate_name(family, rate, steps)) for rate in tried}
        taus = {rate: line["validation"]["replay_tau"] for rate, line in lines.items() if line is not None}
        best = best_rate(family, found.lines, steps) if len(taus) == len(tried) else None
        shown = []
        for rate in tried:
            mark = "**" if rate == best else ""
            shown.append(f"{mark}{rate:g}: {f'{taus[rate]:.2f}' if rate in taus else NOT_RUN}{mark}")
        if steps == STEPS:
            others = [about.name for name, about in ARMS.items() if about.family == family and name != arm]
            others += ["EAGLE-3 by other losses"] * (family == "eagle3")
        else:
            others = [f"itself for {LONGER[1]:,} and {LONGER[2]:,} steps"]
        rows.append([ARMS[arm].name, f"{steps:,}", "; ".join(others) or "-", "; ".join(shown)])
    return table(["searched with", "steps", "also used by", "rate: replay tau on the validation answers"], rows)


SECTIONS: dict[str, Callable[[Found], list[str]]] = {
    "progress": progress,
    "claims": claims,
    "drafters": drafters,
    "costs": costs,
    "compared": compared,
    "positions-chain": partial(positions, tree=CHAIN, depth=6),
    "positions-tree": partial(positions, tree=TREE, depth=8),
    "steps": steps,
    "longer": longer,
    "minutes": by_the_minute,
    "fed": fed,
    "demo": on_the_demo,
    "demo-speed": speeds,
    "endings": endings,
    "data": data,
    "fr-spec": fr_spec,
    "c2t": c2t,
    "losses": losses,
    "rates": rates,
}


if __name__ == "__main__":
    run(main)
