"""Write the study's tables and figures from its lines (`docs.study.run`).

    python -m docs.study.tables                        # docs/study/tables.md and figures, from docs/study/*.jsonl
    python -m docs.study.tables --folder runs/again    # the same in runs/again, from runs/again/*.jsonl

docs/study/tables.yaml lists the page's sections and what they compare.
"""

import argparse
import re
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import StatisticsError, mean
from typing import Any

import numpy as np
import yaml
from matplotlib.figure import Figure

from docs.study.numbers import CHAIN, SEEDS, Estimate, Found, cells_of, over_seeds
from docs.study.run import ROOT, TREE, Table, read_lines
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.files.atomic import atomic_write

LONGEST_ANSWER = 256  # tokens: data.generator.max_new_tokens of docs/study/study.yaml
STEPS = (600, 1200, 2400, 4800)
NOT_RUN = "not run"
STUDY_FOLDER = ROOT / "docs" / "study"
WANTED = yaml.safe_load((STUDY_FOLDER / "tables.yaml").read_text(encoding="utf-8"))
OBJECTIVES = WANTED["objectives"]
PLOTTED = list(dict.fromkeys(arm for _, *arms in WANTED["figures"].values() for arm in arms))


# Cells of tables.


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, *rows)).replace("|\n", f"|\n|{'---|' * len(head)}\n", 1)


def bracketed(value: float, interval: Sequence[float], digits: int = 2) -> str:
    return f"{value:.{digits}f} [{interval[0]:.{digits}f}, {interval[1]:.{digits}f}]"


def with_interval(found: Estimate | None) -> str:
    return NOT_RUN if found is None else bracketed(found.value, found.interval, found.digits)


def in_percent(found: Estimate | None) -> str:
    """A ratio as a gain."""
    if found is None:
        return NOT_RUN
    value, *ends = (gain(ratio, int(found.half_width < 0.01)) for ratio in (found.value, *found.interval))
    return f"{value} % [{', '.join(ends)}]"


def gain(ratio: float, digits: int = 0) -> str:
    """In per cent, with its sign: "-0" is below zero."""
    return f"{100 * (ratio - 1):+.{digits}f}"


def share(found: Estimate | None) -> str:
    if found is None:
        return NOT_RUN
    return f"{100 * found.value:.0f} % [{', '.join(f'{100 * end:.0f}' for end in found.interval)}]"


def by_seed(found: Estimate | None, shown: Callable[[float], str] | None = None) -> str:
    """Every seed's value; a dash for cells that have not run."""
    if found is None:
        return NOT_RUN
    shown = shown or (lambda tau: f"{tau:.{found.digits}f}")
    return ", ".join(shown(found.by_seed[seed]) if seed in found.by_seed else "-" for seed in SEEDS)


def counted(text: str, found: Estimate | None) -> str:
    """With the number of seeds, where it is not all."""
    seeds = len(SEEDS if found is None else found.by_seed)
    return text if seeds == len(SEEDS) else f"{text} ({seeds} seed{'s' * (seeds > 1)})"


def verdict(found: Estimate | None) -> str:
    """Whether a gain is significant, by the intervals over prompts and over seeds."""
    if found is None:
        return NOT_RUN
    if len(found.by_seed) < len(SEEDS):
        return f"unfinished: {len(found.by_seed)} of {len(SEEDS)} seeds"
    (low, high), (lowest, highest) = found.interval, over_seeds(found)
    return "holds" if min(low, lowest) > 1 else "worse" if max(high, highest) < 1 else "undecided"


def judged(found: Estimate | None) -> str:
    """In per cent, and whether it is undecided."""
    return counted(in_percent(found) + ", undecided" * (verdict(found) == "undecided"), found)


# Tables, by marker.


def progress(found: Found) -> str:
    hours = sum(line["seconds"] for line in found.lines.values()) / 3600
    left = len(found.table.cells.keys() - found.lines.keys())
    return f"{len(found.lines)} cells done in at least {hours:.1f} processor hours; {left} have not run."


def claims(found: Found) -> str:
    rows = []
    for claim, paper, arm, base, *which in WANTED["claims"]:
        ratio = found.ratio(arm, base, **dict(*which))
        rows.append([claim, paper, in_percent(ratio), verdict(ratio)])
    return table(["claim", "paper", "here", "verdict"], rows)


def drafters(found: Found) -> str:
    rows = []
    for arm in (each for each in found.names if each not in OBJECTIVES):
        size = found.lines[cells_of(arm)[0]]["parameters"] / 1e6
        tree, chain = found.tau(arm), found.tau(arm, CHAIN)
        rows.append([found.names[arm], f"{size:.2f}", with_interval(tree), by_seed(tree), with_interval(chain)])
    return table(["arm", "million parameters", "tau, tree of 60", "seeds 0, 1, 2", "tau, chain of 6"], rows)


def compared(found: Found) -> str:
    rows = []
    for arm, base in WANTED["compared"]:
        tree, chain = (found.ratio(arm, base, each) for each in (TREE, CHAIN))
        rows.append([found.names[arm], found.names[base], in_percent(tree), by_seed(tree, gain), in_percent(chain)])
    return table(["arm", "compared with", "tau, tree of 60", "seeds 0, 1, 2", "tau, chain of 6"], rows)


def positions(found: Found, tree: str, depth: int) -> str:
    rows = []
    for arm in PLOTTED:
        rates = found.positions(arm, tree)
        shown = [f"{100 * rate.value:.0f} ± {max(1, round(100 * rate.half_width))}" for rate in rates]
        rows.append([found.names[arm], *shown])
    return table(["%", *(str(i + 1) for i in range(depth))], rows)


def steps(found: Found) -> str:
    rows = []
    for arm in (each for each in found.names if each not in OBJECTIVES):
        shown = [f"{100 * share:.0f}" for share in found.by_step(arm)]
        rows.append([found.names[arm], *shown, *["-"] * (6 - len(shown))])
    return table(["%", *"123456"], rows)


def longer(found: Found) -> str:
    return trained_alike(found, {f"{steps:,} steps": {"steps": steps} for steps in STEPS})


def fed(found: Found) -> str:
    whole = found.lines["data"]["training_conversations"]["x8"]
    times = {"x8": 1, "x16": 2, "x32": 4}
    which = {f"{n * whole:,} conversations": {"size": size, "steps": 2400} for size, n in times.items()}
    return trained_alike(found, which)


def trained_alike(found: Found, columns: Mapping[str, Mapping[str, Any]]) -> str:
    """tau of the arms that train for longer, and their gains over EAGLE-2 and PosS-2 after as much.

    Args:
        columns: which drafters, by head.
    """
    rows = []
    for arm in WANTED["longer"]:
        taus = [found.tau(arm, **which) for which in columns.values()]
        rows.append([found.names[arm], *(counted(with_interval(tau), tau) for tau in taus)])
    pairs = [("eagle3", "eagle2"), ("eagle3.1", "eagle2"), ("poss2", "eagle2"), ("eagle3.1", "poss2")]
    for (arm, base), tree in product(pairs, (TREE, CHAIN)):
        gains = [judged(found.ratio(arm, base, tree, **which)) for which in columns.values()]
        rows.append([f"{found.names[arm]} vs. {found.names[base]}, {tree}", *gains])
    return table(["tau, tree of 60", *columns], rows)


def minutes(found: Found) -> str:
    rows = []
    for own, other in ((2400, 600), (4800, 1200), (4800, 2400)):
        gains = [judged(found.ratio("eagle2", "eagle3.1", t, base_steps=other, steps=own)) for t in (TREE, CHAIN)]
        both = [f"{own:,}", found.minutes("eagle2", own), f"{other:,}", found.minutes("eagle3.1", other)]
        rows.append([*both, *gains])
    head = ["steps of EAGLE-2", "minutes", "steps of EAGLE-3.1", "minutes"]
    return table([*head, "EAGLE-2 vs. EAGLE-3.1, tree of 60", "chain of 6"], rows)


def data(found: Found) -> str:
    counts = found.lines["data"]["training_conversations"]
    rows = []
    for arm, tree in product(("eagle2", "eagle3"), (TREE, CHAIN)):
        taus = (with_interval(found.first(arm, size, tree)) for size in counts)
        rows.append([f"{found.names[arm]}, {tree}", *taus])
    return table(["arm and tree", *(f"{size}: {count:,} conversations" for size, count in counts.items())], rows)


def demo(found: Found) -> str:
    rows, which = [], {"steps": 2400, "demo": True}
    for arm in WANTED["demo"]:
        tree, chain = (found.tau(arm, each, **which) for each in (TREE, CHAIN))
        ratio = "-" if arm == "eagle2" else judged(found.ratio(arm, "eagle2", **which))
        shown = [with_interval(tree), by_seed(tree), ratio, with_interval(chain), found.minutes(arm, **which)]
        rows.append([found.names[arm], *shown])
    head = ["arm", "tau, tree of 60", "seeds 0, 1, 2", "vs. EAGLE-2", "tau, chain of 6", "minutes of training"]
    return table(head, rows)


def demo_speed(found: Found) -> str:
    lines = [found.lines[f"demo/speed{end}"] for end in ("", "/seed1", "/seed2")]
    rows = [[found.names[arm]] for arm in WANTED["demo"]]
    for row, tree in product(rows, ("tree of 16", "chain of 4")):
        own = [line["decoded"][f"{row[0]}, {tree}"] for line in lines]
        row.append(f"{mean(each['tau'] for each in own):.2f}")
        row.append(", ".join(bracketed(each["speedup"], each["speedup_interval"]) for each in own))
    return table(["arm", *(f"{of}, {t}" for t in ("tree of 16", "chain of 4") for of in ("tau", "speed-up"))], rows)


def endings(found: Found) -> str:
    """tau along answers that ended by themselves, and along those that were cut off."""
    tokens = np.array(found.lines["answers"]["tokens_by_answer"])
    kinds = tokens < LONGEST_ANSWER, tokens >= LONGEST_ANSWER
    counts = [f"{own.sum()} answers, {100 * tokens[own].sum() / tokens.sum():.0f} % of the tokens" for own in kinds]
    rows = [[found.names[arm], *(with_interval(found.tau(arm, keep=own)) for own in kinds)] for arm in PLOTTED]
    return table(["tau, tree of 60", f"ended by themselves: {counts[0]}", f"cut off at 256: {counts[1]}"], rows)


CORPORA = {"answers": "the target's answers", "library": "the library's text"}
CUTS = {128: "128", 256: "256", 512: "512", 768: "768", 1024: TREE}  # contenders by tokens


def fr_spec(found: Found) -> str:
    rows = []
    for (corpus, words), (size, contender) in product(CORPORA.items(), CUTS.items()):
        (tau, part), all_ = found.cut(corpus, contender), contender == TREE
        rows.append([words, "all 1,024" if all_ else f"{size}", with_interval(tau), "100 %" if all_ else share(part)])
    return table(["ranked by", "tokens", "tau, tree of 60", "share of the whole vocabulary's tau"], rows)


def losses(found: Found) -> str:
    """EAGLE-3 with other objectives: gains of greedy replays, and taus of sampled answers."""
    rows = []
    for arm in ("eagle3", *OBJECTIVES):
        name = found.names[arm] if arm in OBJECTIVES else "soft CE, steps by 0.8^k (EAGLE-3)"
        row = [name, with_interval(found.tau(arm))]
        row += [in_percent(found.ratio(arm, "eagle3", tree)) for tree in (TREE, CHAIN)]
        lines = [found.lines.get(f"sampled/{arm}/seed{seed}") for seed in SEEDS]
        for tree in (TREE, CHAIN):
            own = [line and line["decoded"][tree] for line in lines]
            shown = (bracketed(each["tau"], each["tau_interval"]) if each else NOT_RUN for each in own)
            row.append(f"{mean(each['tau'] for each in own if each):.2f} ({', '.join(shown)})")
        rows.append(row)
    head = ["loss", "greedy: tau, tree of 60", "vs. soft CE", "chain of 6, vs. soft CE"]
    return table([*head, "temperature 1: tau, tree of 60 (seeds)", "chain of 6 (seeds)"], rows)


def rates(found: Found) -> str:
    """Each family's search, the rate in bold that its arms train with."""
    rows = []
    families: dict[str, str] = {}  # the arm that searches, the first of each
    for arm, words in found.table.arms.items():
        families.setdefault(words["family"], arm)
    for (end, trained), (family, arm) in product((("", 600), ("/steps1200", 2400)), families.items()):
        tried = [cell for cell in found.table.cells if re.fullmatch(rf"rate/{re.escape(family)}/[\d.]+{end}", cell)]
        if tried:
            command = found.table.cells[cells_of(arm, steps=trained)[0]][1]
            taus = sorted((cell.split("/")[2], found.lines[cell]["validation"]["replay_tau"]) for cell in tried)
            marks = ("**" * (f"train.learning_rate={rate}" in command) for rate, _ in taus)
            shown = (f"{mark}{rate}: {tau:.2f}{mark}" for mark, (rate, tau) in zip(marks, taus, strict=True))
            rows.append([found.names[arm], "1,200" if end else "600", "; ".join(shown)])
    return table(["searched with", "steps", "rate: replay tau on the validation answers"], rows)


def vision(found: Found) -> str:
    """Means over the seeds, each seed's value, and the time of a round's draft calls where it was measured."""
    rows = []
    for arm, name in found.names.items():
        row = [name]
        for end, tree in (("", TREE), ("/sampled", TREE), ("", "tree of 30")):
            taus = [found.lines[f"{arm}/seed{seed}{end}"]["replay"][tree]["tau"] for seed in SEEDS]
            row.append(f"{mean(taus):.2f} ({', '.join(f'{tau:.2f}' for tau in taus)})")
        timed = found.lines.get(f"{arm}/decoded", {}).get("decoded", {}).get(TREE)
        drafting = timed and f"{timed['draft_milliseconds_per_call'] * timed['draft_calls_per_round']:.1f}"
        rows.append([*row, drafting or "\u2013"])
    head = ["drafter", "tau, greedy", "tau, temperature 1", "tau of the tree of 30, greedy", "ms of drafting"]
    return table(head, rows)


def real_model(found: Found) -> str:
    """Of each arm: means over its seeds, and each seed's value where there are several."""
    rows = []
    for arm, name in found.names.items():
        cells = (f"drafter/{arm}/seed{seed}" for seed in SEEDS)
        lines = [found.lines[cell] for cell in cells if cell in found.lines]
        if not lines:
            rows.append([name, *[NOT_RUN] * 5])
            continue
        row = [name, found.table.arms[arm]["steps"], f"{lines[0]['parameters'] / 1e6:.1f}"]
        for tree in (TREE, "chain of 4"):
            seeds = [line["replay"][tree] for line in lines]
            low, high = (mean(ends) for ends in zip(*(each["tau_interval"] for each in seeds), strict=True))
            taus = [each["tau"] for each in seeds]
            own = f" ({', '.join(f'{tau:.2f}' for tau in taus)})" if len(taus) > 1 else ""
            row.append(bracketed(mean(taus), (low, high)) + own)
        accuracy = zip(*(line["validation"]["validation_accuracy"] for line in lines), strict=True)
        rows.append([*map(str, row), ", ".join(f"{100 * mean(step):.0f}" for step in accuracy)])
    head = ["drafter", "steps", "million parameters", "tau, tree of 60", "tau, chain of 4", "accuracy"]
    return table(head, rows)


# Figures.

Points = Sequence[tuple[float, Estimate | None]]


def figures(found: Found) -> dict[str, tuple[str, str, str, dict[str, Points]]]:
    """By file name: title, axes, and points by line."""
    names, counts = found.names, found.lines["data"]["training_conversations"]
    accepted, made = "acceptance, given that all before were accepted", {}
    for name, (title, *arms) in WANTED["figures"].items():
        lines: dict[str, Points] = {names[arm]: list(enumerate(found.positions(arm, CHAIN), 1)) for arm in arms}
        made[name] = title, "draft position", accepted, lines
    lines = {names[arm]: [(n, found.tau(arm, steps=n)) for n in STEPS] for arm in WANTED["longer"]}
    made["longer"] = "tau against optimiser steps", "optimiser steps of 8 conversations", "tau, tree of 60", lines
    sizes = [(arm, [(n, found.first(arm, size, TREE)) for size, n in counts.items()]) for arm in ("eagle2", "eagle3")]
    lines = {names[arm]: points for arm, points in sizes}
    axis = "training conversations, at equal optimiser steps"
    made["data"] = "tau against training conversations", axis, "tau, tree of 60", lines
    lines = {words: [(size, found.cut(each, cut)[0]) for size, cut in CUTS.items()] for each, words in CORPORA.items()}
    made["fr_spec"] = "FR-Spec: tau by draft vocabulary", "tokens to draft from", "tau, tree of 60", lines
    return made


def draw(place: Path, title: str, x: str, y: str, lines: Mapping[str, Points]) -> None:
    """Writes a PNG: lines with their intervals. Points that are not of all seeds are left out."""
    figure = Figure(figsize=(5, 4), layout="constrained")
    ax = figure.subplots()
    ax.set(title=title, xlabel=x, ylabel=y, xscale="linear" if x == "draft position" else "log")
    for (name, points), marker in zip(lines.items(), "oDs^", strict=False):
        most = max((len(own.by_seed) for _, own in points if own), default=0)
        there = [(at, own.value, *own.interval) for at, own in points if own and len(own.by_seed) == most]
        at, taus, low, high = np.array(there).reshape(-1, 4).T
        ax.fill_between(at, low, high, alpha=0.15)
        ax.plot(at, taus, marker=marker, label=name)
    ticks = sorted({at for points in lines.values() for at, _ in points})
    ax.set_xticks(ticks, [f"{at:,}" for at in ticks])
    ax.minorticks_off()
    ax.grid(axis="y", alpha=0.3)
    ax.legend()
    place.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(place, dpi=144)


# The page.

MADE = (progress, claims, drafters, compared, steps, longer, fed, minutes, demo, demo_speed, endings, data, fr_spec)
STUDY: dict[str, Callable[[Found], str]] = {
    **{each.__name__.replace("_", "-"): each for each in (*MADE, losses, rates)},
    "positions-chain": lambda found: positions(found, CHAIN, 6),
    "positions-tree": lambda found: positions(found, TREE, 8),
}
LINES = {  # cells, tables
    "results": ("cells.yaml", STUDY),
    "smollm2": ("smollm2.yaml", {"real-model": real_model}),
    "vision": ("vision.yaml", {"vision": vision}),
}


def made(make: Callable[[Found], Any], found: Found, otherwise: Any = NOT_RUN) -> Any:
    """`otherwise` where lines are missing."""
    try:
        return make(found)
    except (KeyError, StatisticsError):
        return otherwise


def page(sections: Mapping[str, str]) -> str:
    """The sections of tables.yaml in its order, each with its heading, text and table."""
    parts = [WANTED["page"]]
    for name, (heading, text) in WANTED["sections"].items():
        parts += [f"## {heading}", text, sections[name]]
    return "\n\n".join(part.rstrip("\n") for part in parts if part) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=STUDY_FOLDER, help="of the lines; default: docs/study")
    folder = parser.parse_args().folder
    sections: dict[str, str] = {}
    for name, (cells, makers) in LINES.items():
        found = Found(Table(Path("docs/study") / cells), read_lines(folder / f"{name}.jsonl"))
        sections |= {section: made(make, found) for section, make in makers.items()}
        for file, figure in made(figures, found, {}).items():
            draw(folder / f"{file}.png", *figure)
    atomic_write(folder / "tables.md", page(sections))
    print(f"written: {folder / 'tables.md'}")


if __name__ == "__main__":
    run(main)
