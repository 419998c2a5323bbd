"""Draws the report's figures with matplotlib, as SVG for the page and as PNG files.

Colours have roles (`ink`, `grid`, `s1` for the first contender, ...). A PNG gets the light theme's values. An SVG gets
CSS variables and follows the reader's dark mode. Text remains text, in the page's font.
"""

import io
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator

MARKERS = "oDs^vPXp*h"  # of lines and contenders, one for each colour
LIGHT = {
    **{"page": "#fcfcfb", "card": "#ffffff", "ink": "#1b1f24", "muted": "#5c6470", "grid": "#dfe3e8"},
    **{"plain": "#69717d", "s1": "#1d5fc2", "s2": "#b4501a", "s3": "#1c7c54", "s4": "#7a3fb0", "s5": "#8a6500"},
    **{"s6": "#c02a90", "s7": "#0b7285", "s8": "#5b2c12", "s9": "#d0102a", "s10": "#3d5c00"},
    **{"draft": "#3f4d63", "verify": "#93a1b5", "other": "#d3dae3"},
    **{"t0": "#d6e6ff", "t1": "#fbe7bd", "t2": "#d3f0df", "t3": "#eedffa"},
}
DARK = {
    **{"page": "#14171c", "card": "#1a1e25", "ink": "#e6e8eb", "muted": "#9ca6b4", "grid": "#2e353f"},
    **{"plain": "#9ca6b4", "s1": "#7fb2ff", "s2": "#f5a26b", "s3": "#66cfa0", "s4": "#c6a0f5", "s5": "#f0d060"},
    **{"s6": "#f291ba", "s7": "#63c5da", "s8": "#b98a6c", "s9": "#ff6b6b", "s10": "#a9d13f"},
    **{"draft": "#c9d3e0", "verify": "#66728a", "other": "#3b4554"},
    **{"t0": "#1f3d6b", "t1": "#544316", "t2": "#1b4d38", "t3": "#463161"},
}
ROLES = list(LIGHT)
WIDTH = 360  # of every figure, in CSS pixels: a phone shows it nearly unscaled
TAG = re.compile(r"<[^>]*>")  # matplotlib writes > as &gt; in attributes and texts

Colours = Callable[[str], str]  # role -> what matplotlib takes


@dataclass(frozen=True)
class Plot:
    """One figure: `draw` makes it afresh in given colours."""

    name: str
    title: str
    description: str  # for screen readers
    draw: Callable[[Colours], Figure]


# Rendering.


def to_svg(plot: Plot) -> str:
    """The figure as an <svg> element for a page: without fixed size, fonts, or ids that could clash."""
    marks = {role: f"#0a0b{i:02x}" for i, role in enumerate(ROLES)}
    settings = {"svg.fonttype": "none", "svg.hashsalt": plot.name}
    with _style(settings):
        file = io.StringIO()
        plot.draw(marks.__getitem__).savefig(file, format="svg", transparent=True, metadata={"Date": None})
    text = file.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.S)
    used = {name for tag in TAG.findall(text) for name in re.findall(r"(?:url\(#|href=\"#)([^)\"]+)", tag)}

    def rewritten(match: re.Match[str]) -> str:
        tag = match[0]
        for role, mark in marks.items():
            tag = tag.replace(mark, f"var(--{role})")
        tag = re.sub(r"(font: [^;\"]*?px) [^;\"]*", r"\1 var(--sans)", tag)
        tag = re.sub(r' id="([^"]+)"', lambda m: m[0] if m[1] in used else "", tag)
        # Round to hundredths of a pixel.
        return re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda m: re.sub(r"(\.\d{2})\d+", r"\1", m[0]), tag)

    text = TAG.sub(rewritten, text)  # only tags: the text between them is arbitrary names
    head = re.match(r'<svg .*?viewBox="([^"]+)".*?>', text, flags=re.S)
    assert head is not None
    label = escape(f"{plot.title}. {plot.description}", {'"': "&quot;"})
    return f'<svg viewBox="{head[1]}" role="img" aria-label="{label}">' + text[head.end() :]


def write_png(plot: Plot, path: Path) -> None:
    """The figure as a PNG file in the light theme, its title on top, twice the page's resolution."""
    with _style({"figure.facecolor": LIGHT["card"]}):
        figure = plot.draw(LIGHT.__getitem__)
        figure.suptitle(plot.title, x=0.02, ha="left", fontsize=13, color=LIGHT["ink"])
        figure.savefig(path, dpi=144, format="png")


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
        style_axes(ax, colours)
    return figure, list(axes)


def style_axes(ax: Axes, colours: Colours) -> None:
    ax.tick_params(colors=colours("muted"), labelsize=11, length=0)
    ax.tick_params(axis="x", pad=7)  # the zeros of both axes meet in the corner
    ax.grid(axis="y", color=colours("grid"), linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["left", "bottom"]].set_visible(False)


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
