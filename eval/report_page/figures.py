"""The report's figures: where the time goes, acceptance by position, and the training's curves.

Colours have roles (`ink`, `grid`, `s1` for the first contender, ...), which the page's style sheet uses, too.
"""

import base64
import io
import re
import textwrap
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, PercentFormatter

from draftsmith.eval.report_page.summary import drafting

MARKERS = "oDs^vP"  # of the contenders' lines; so many contenders have a colour
COLOURS = {
    **{"page": "#fcfcfb", "card": "#ffffff", "ink": "#1b1f24", "muted": "#5c6470", "grid": "#dfe3e8"},
    **{"plain": "#69717d", "s1": "#1d5fc2", "s2": "#b4501a", "s3": "#1c7c54", "s4": "#7a3fb0", "s5": "#8a6500"},
    **{"s6": "#c02a90", "draft": "#3f4d63", "verify": "#93a1b5", "other": "#d3dae3"},
    **{"t0": "#d6e6ff", "t1": "#fbe7bd", "t2": "#d3f0df", "t3": "#eedffa"},
}
WIDTH = 360  # of every figure, in CSS pixels: a phone shows it nearly unscaled
STYLE: Any = {
    **{"font.size": 11, "axes.titlesize": 11, "axes.titlelocation": "left", "axes.titlecolor": COLOURS["muted"]},
    **{"axes.labelcolor": COLOURS["muted"], "xtick.color": COLOURS["muted"], "ytick.color": COLOURS["muted"]},
    **{"axes.grid": True, "axes.grid.axis": "y", "grid.color": COLOURS["grid"], "axes.axisbelow": True},
    **{f"axes.spines.{side}": False for side in ("left", "right", "top", "bottom")},
    **{"xtick.major.size": 0, "xtick.major.pad": 7, "ytick.major.size": 0, "path.simplify_threshold": 0.5},
    **{"legend.frameon": False, "legend.labelcolor": COLOURS["muted"], "figure.constrained_layout.use": True},
    **{"figure.dpi": 72, "svg.fonttype": "none", "svg.hashsalt": "report"},
    "text.parse_math": False,  # names may hold dollar signs
}
MOST_POINTS = 240  # of a training curve
# Controls, lone surrogates, and what turns the direction of text, which must not reach beyond a name.
HARMFUL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def harmless(text: str) -> str:
    """`text` as a page may hold it."""
    return HARMFUL.sub("\ufffd", text)


def roles_of(acceptance: dict[str, Any]) -> dict[str, str]:
    """The colour roles of the main contender and the fastest others (in a replay: of greatest tau), in their order."""
    rows, main = drafting(acceptance), acceptance["contender"]
    others = sorted((n for n in rows if n != main), key=lambda n: (rows[n]["speedup"] or 0, rows[n]["tau"] or 0))
    best = {main, *others[1 - len(MARKERS) :]}
    return {name: f"s{i}" for i, name in enumerate((name for name in rows if name in best), start=1)}


def acceptance_figures(acceptance: dict[str, Any]) -> list[dict[str, str]]:
    """Time and acceptance by position, as far as there is something to show: `title`, `words` and `src` of each."""
    rows, roles = acceptance["contenders"], roles_of(acceptance)
    drafted = {name: rows[name] for name in roles if rows[name]["rounds"]}
    plain = acceptance["baseline"]
    timed = {name: rows[name] for name in (plain, *drafted) if drafted and rows[name]["tokens_per_second"]}
    figures = []
    with _style():
        if timed:
            words = "; ".join(f"{name}: {_milliseconds(row):.3g} ms, {_shares(row)}" for name, row in timed.items())
            figures.append(_rendered("Where the time of a token goes", f"{words}.", _times(timed)))
        if drafted:
            shares = {n: ", ".join(f"{s:.0%}" for s in row["acceptance_by_position"]) for n, row in drafted.items()}
            told = "; ".join(f"{name}: {each or 'nothing accepted'}" for name, each in shares.items())
            words = f"How often a drafted token is accepted when all before it were. {told}."
            lines = _by_position(drafted, roles, acceptance["contender"])
            figures.append(_rendered("Acceptance by position", words, lines))
    return figures


def training_figures(metrics: Sequence[dict[str, Any]]) -> list[dict[str, str]]:
    """Loss and simulated tau over the lines of metrics.jsonl."""
    figures = []
    with _style():
        for title, key in (("Loss", "loss"), ("Simulated tau", "simulated_tau")) if len(metrics) > 1 else ():
            checked = [line[f"validation_{key}"] for line in metrics if f"validation_{key}" in line]
            words = f"{metrics[-1][key]:.3g} after {metrics[-1]['step']} steps"
            words += f", {checked[-1]:.3g} in validation." if checked else "."
            figures.append(_rendered(title, words, _curve(metrics, key)))
    return figures


@contextmanager
def _style() -> Iterator[None]:
    with matplotlib.rc_context(STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # names may be in any script
        yield


def _rendered(title: str, words: str, figure: Figure) -> dict[str, str]:
    """The figure as an SVG picture that needs no file. `words` are for screen readers."""
    file = io.BytesIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    src = f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"title": title, "words": words, "src": src}


def _axes(height: int, x: str, y: str = "") -> tuple[Figure, Axes]:
    """A figure of `height` pixels. The y title stands on top, horizontally."""
    figure = Figure(figsize=(WIDTH / 72, height / 72))
    ax = figure.subplots()
    ax.set_xlabel(x)
    ax.set_title(y)
    return figure, ax


def _by_position(drafted: dict[str, Any], roles: dict[str, str], main: str) -> Figure:
    """One line per contender, with a legend below."""
    figure, ax = _axes(280 + 17 * len(drafted), "position in the draft", "accepted, where all before were")
    for marker, (name, row) in zip(MARKERS, drafted.items(), strict=False):
        shares, colour = row["acceptance_by_position"], COLOURS[roles[name]]
        positions = range(1, len(shares) + 1)
        ax.plot(positions, shares, color=colour, marker=marker, markersize=4, label=_shortened(name), clip_on=False)
        if name == main and shares:  # more bands would hide the lines
            spread = row["acceptance_by_position_interval"]
            low, high = zip(*(b or (s, s) for b, s in zip(spread, shares, strict=True)), strict=True)
            ax.fill_between(positions, low, high, color=colour, alpha=0.13, linewidth=0)
    longest = max(1, *(len(row["acceptance_by_position"]) for row in drafted.values()))
    ax.set_xlim(0.7, longest + 0.3)
    ax.set_ylim(0, 1)
    ax.xaxis.set_major_locator(MaxNLocator(min(longest, 10), integer=True))
    ax.yaxis.set_major_formatter(PercentFormatter(1, symbol=" %"))
    figure.legend(handles=ax.lines, loc="outside lower left", labelcolor="linecolor", labelspacing=0.2)
    return figure


def _milliseconds(row: dict[str, Any]) -> float:
    return 1000 / row["tokens_per_second"]


def _shares(row: dict[str, Any]) -> str:
    return " · ".join(f"{part} {100 * share:.0f} %" for part, share in row["time_share"].items() if share)


def _times(timed: dict[str, Any]) -> Figure:
    """One bar per contender, with its name above and its shares below."""
    figure, ax = _axes(64 + 54 * len(timed), "milliseconds per token")
    longest = max(map(_milliseconds, timed.values()))
    for place, (name, row) in enumerate(timed.items()):
        left = 0.0
        for part, share in row["time_share"].items():
            width = (share or 0) * _milliseconds(row)
            ax.barh(place, width, left=left, height=0.24, color=COLOURS[part], label="" if place else part)
            left += width
        ax.text(0, place - 0.19, _shortened(name), color=COLOURS["ink"], va="bottom")
        ax.text(longest, place - 0.19, f"{_milliseconds(row):.3g} ms", ha="right", va="bottom", color=COLOURS["ink"])
        ax.text(0, place + 0.19, _shares(row), fontsize=10, color=COLOURS["muted"], va="top")
    ax.set_ylim(len(timed) - 0.45, -0.5)
    ax.set_yticks([])
    ax.grid(visible=False)
    figure.legend(loc="outside upper left", ncols=3)
    return figure


def _shortened(text: str) -> str:
    return textwrap.shorten(harmless(text), 44, placeholder="…") or "?"


def _curve(metrics: Sequence[dict[str, Any]], name: str) -> Figure:
    figure, ax = _axes(220, "optimiser steps")
    for key, label, role, marker in ((name, "training", "s1", ""), (f"validation_{name}", "validation", "s2", "o")):
        lines = [line for line in metrics if key in line]
        lines = [*lines[: -1 : max(1, len(lines) // MOST_POINTS)], *lines[-1:]]  # evenly spaced, with the last one
        steps, values = [line["step"] for line in lines], [line[key] for line in lines]
        ax.plot(steps, values, color=COLOURS[role], marker=marker, markersize=3.5, linewidth=1.4, label=label)
    ax.set_xlim(left=0)
    ax.set_ylim(bottom=0)
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.legend()
    return figure
