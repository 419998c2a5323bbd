"""Draws the report's figures with matplotlib, as SVG pictures.

Colours have roles (`ink`, `grid`, `s1` for the first contender, ...), which the page's style sheet uses, too.
"""

import base64
import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

MARKERS = "oDs^vPXp*h"  # of lines and contenders, one for each colour
COLOURS = {
    **{"page": "#fcfcfb", "card": "#ffffff", "ink": "#1b1f24", "muted": "#5c6470", "grid": "#dfe3e8"},
    **{"plain": "#69717d", "s1": "#1d5fc2", "s2": "#b4501a", "s3": "#1c7c54", "s4": "#7a3fb0", "s5": "#8a6500"},
    **{"s6": "#c02a90", "s7": "#0b7285", "s8": "#5b2c12", "s9": "#d0102a", "s10": "#3d5c00"},
    **{"draft": "#3f4d63", "verify": "#93a1b5", "other": "#d3dae3"},
    **{"t0": "#d6e6ff", "t1": "#fbe7bd", "t2": "#d3f0df", "t3": "#eedffa"},
}
WIDTH = 360  # of every figure, in CSS pixels: a phone shows it nearly unscaled
# Controls, lone surrogates, and what turns the direction of text, which must not reach beyond a name.
HARMFUL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")

Colours = Callable[[str], str]  # role -> what matplotlib takes


@dataclass(frozen=True)
class Plot:
    """One figure: `draw` makes it afresh in given colours."""

    name: str
    title: str
    description: str  # for screen readers
    draw: Callable[[Colours], Figure]


# Rendering.


def harmless(text: str) -> str:
    """`text` as a page may hold it."""
    return HARMFUL.sub("\ufffd", text)


def to_data_url(plot: Plot) -> str:
    """The figure as an SVG picture that needs no file."""
    with _style({"svg.fonttype": "none", "svg.hashsalt": plot.name}):
        file = io.BytesIO()
        plot.draw(COLOURS.__getitem__).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return f"data:image/svg+xml;base64,{base64.b64encode(file.getvalue()).decode()}"


@contextmanager
def _style(settings: dict[str, Any]) -> Iterator[None]:
    ours: Any = {
        "font.size": 12,
        "text.parse_math": False,  # names may hold dollar signs
        "axes.spines.top": False,
        "axes.spines.right": False,
        "path.simplify_threshold": 0.5,
    }
    with matplotlib.rc_context(ours | settings), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing")  # names may be in any script
        yield


def new_figure(
    colours: Colours, heights: Sequence[float], more: float = 0, sharex: bool = False
) -> tuple[Figure, list[Axes]]:
    """Stacked axes with these relative heights. The figure is `sum(heights) + more` pixels high."""
    figure = Figure(figsize=(WIDTH / 72, (sum(heights) + more) / 72), dpi=72, layout="constrained")
    figure.get_layout_engine().set(w_pad=4 / 72, h_pad=4 / 72, hspace=0.03)  # type: ignore[union-attr]
    axes = figure.subplots(len(heights), 1, sharex=sharex, squeeze=False, height_ratios=heights)[:, 0]
    for ax in axes:
        ax.tick_params(colors=colours("muted"), labelsize=11, length=0)
        ax.tick_params(axis="x", pad=7)  # the zeros of both axes meet in the corner
        ax.grid(axis="y", color=colours("grid"), linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["left", "bottom"]].set_visible(False)
    return figure, list(axes)


def set_axis_titles(ax: Axes, colours: Colours, x: str | None = None, y: str | None = None) -> None:
    """Sets axis titles. The y title stands horizontally on top."""
    if x is not None:
        ax.set_xlabel(x, color=colours("muted"), fontsize=11)
    if y is not None:
        ax.set_title(y, color=colours("muted"), fontsize=11, loc="left")


def octaves(ax: Axes, ticks: int, form: str) -> None:
    """A logarithmic x axis with ticks at powers of 2, written in `form`."""
    ax.set_xscale("log", base=2)
    ax.xaxis.set_major_locator(LogLocator(2, numticks=ticks))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:{form}}"))
    ax.minorticks_off()


def percent(ax: Axes) -> None:
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))


def line_legend(ax: Axes, colours: Colours, handles: Sequence[Artist], **place: Any) -> None:
    """Names the labelled lines or bars, where `place` (of `Axes.legend`) says or where there is room."""
    ax.legend(handles=handles, frameon=False, fontsize=11, borderpad=0.2, labelcolor=colours("muted"), **place)
