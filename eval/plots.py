"""The report's figures, drawn once by matplotlib: as SVG for the page, in the page's colours, and as PNG files.

Colours go by role (`ink`, `grid`, `s1` for the first contender, ...). A PNG gets the light theme's values; an SVG gets
CSS variables, so that a figure follows the reader's dark mode. Text stays text, in the page's font.
"""

import io
import re
import textwrap
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

SERIES = 6  # colours for contenders, then they repeat; markers repeat after seven, so the pairs last for 42
MARKERS = "oDs^vPX"
LIGHT = {
    **{"page": "#fcfcfb", "card": "#ffffff", "ink": "#1b1f24", "muted": "#5c6470", "grid": "#dfe3e8"},
    **{"plain": "#69717d", "s1": "#1d5fc2", "s2": "#b4501a", "s3": "#1c7c54", "s4": "#7a3fb0", "s5": "#8a6500"},
    **{"s6": "#b02a6f", "draft": "#3f4d63", "verify": "#93a1b5", "other": "#d3dae3"},
    **{"t0": "#d6e6ff", "t1": "#fbe7bd", "t2": "#d3f0df", "t3": "#eedffa"},
}
DARK = {
    **{"page": "#14171c", "card": "#1a1e25", "ink": "#e6e8eb", "muted": "#9ca6b4", "grid": "#2e353f"},
    **{"plain": "#9ca6b4", "s1": "#7fb2ff", "s2": "#f5a26b", "s3": "#66cfa0", "s4": "#c6a0f5", "s5": "#dcb955"},
    **{"s6": "#f291ba", "draft": "#c9d3e0", "verify": "#66728a", "other": "#3b4554"},
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
    description: str  # what it shows, in words, for those who do not see it
    draw: Callable[[Colours], Figure]


def role_of(names: Sequence[str], name: str, plain: str) -> str:
    """The colour role of a contender, the same in every figure and table."""
    return "plain" if name == plain else f"s{1 + [n for n in names if n != plain].index(name) % SERIES}"


# Rendering.


def to_svg(plot: Plot) -> str:
    """The figure as an <svg> element that stands alone in a page: no fixed size, no fonts, no ids that could clash."""
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
        # Hundredths of a pixel are enough.
        return re.sub(r' (?:d|x|y|transform)="[^"]*"', lambda m: re.sub(r"(\.\d{2})\d+", r"\1", m[0]), tag)

    text = TAG.sub(rewritten, text)  # what stands between tags are names, which may look like anything
    head = re.match(r'<svg .*?viewBox="([^"]+)".*?>', text, flags=re.S)
    assert head is not None
    label = escape(f"{plot.title}. {plot.description}", {'"': "&quot;"})
    return f'<svg viewBox="{head[1]}" role="img" aria-label="{label}">' + text[head.end() :]


def write_png(plot: Plot, path: Path) -> None:
    """The figure as a PNG file in the light theme, its title on top, twice the page's resolution."""
    with _style({"figure.facecolor": LIGHT["card"]}):
        figure = plot.draw(LIGHT.__getitem__)
        figure.suptitle(plot.title, x=0.02, ha="left", fontsize=13, color=LIGHT["ink"])
        figure.savefig(path, dpi=144)


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


def _figure(colours: Colours, height: float, rows: int = 1) -> tuple[Figure, list[Axes]]:
    """`rows` axes above each other that share the x axis, on `height` pixels."""
    figure = Figure(figsize=(WIDTH / 72, height / 72), dpi=72, layout="constrained")
    figure.get_layout_engine().set(w_pad=4 / 72, h_pad=4 / 72, hspace=0.03)  # type: ignore[union-attr]
    axes = figure.subplots(rows, 1, sharex=True, squeeze=False)[:, 0]
    for ax in axes:
        ax.tick_params(colors=colours("muted"), labelsize=11, length=0)
        ax.grid(axis="y", color=colours("grid"), linewidth=0.8)
        ax.set_axisbelow(True)
        ax.spines[["left", "bottom"]].set_visible(False)
    return figure, list(axes)


def _label(ax: Axes, colours: Colours, x: str | None = None, y: str | None = None) -> None:
    """Axis titles; that of y stands on top, to be read without turning the head."""
    if x is not None:
        ax.set_xlabel(x, color=colours("muted"), fontsize=11)
    if y is not None:
        ax.set_title(y, color=colours("muted"), fontsize=11, loc="left")


def _percent(ax: Axes) -> None:
    ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:.0f} %"))


def _name_lines(
    ax: Axes, colours: Colours, ends: Sequence[tuple[float, float, str, str]], gap: float, width: int = 15
) -> None:
    """Names of lines at the right margin, at the height of their ends but never over each other.

    Args:
        ends: (x, y, name, colour role) of each line's last point; the axes' limits must be set.
        gap: least distance of two names, as a share of the axes' height.
        width: characters of a row of a name; a name has two rows.
    """
    low, high = ax.get_ylim()
    heights = _apart([(y - low) / (high - low) for _, y, _, _ in ends], min(gap, 1 / max(1, len(ends))))
    right = ax.get_xlim()[1]
    for (x, y, name, role), height in zip(ends, heights, strict=True):
        at = low + height * (high - low)
        if right - x > 0.05 * (right - ax.get_xlim()[0]):
            ax.plot([x, right], [y, at], color=colours(role), linewidth=0.7, alpha=0.45, linestyle=(0, (1, 2)))
        ax.annotate(
            _rows(name, width),
            (right, at),
            xytext=(5, 0),
            textcoords="offset points",
            va="center",
            fontsize=11,
            color=colours(role),
            annotation_clip=False,
            linespacing=1.05,
        )


def _rows(name: str, width: int) -> str:
    """`name` on at most two rows."""
    return "\n".join(textwrap.wrap(name, width, max_lines=2, placeholder="…", break_on_hyphens=False)) or "?"


def _apart(heights: list[float], gap: float) -> list[float]:
    """The same heights moved as little as a sweep from below and one from above need to keep `gap` within 0..1."""
    order = sorted(range(len(heights)), key=lambda i: heights[i])
    placed = [min(max(heights[i], gap / 2), 1 - gap / 2) for i in order]
    for i in range(1, len(placed)):
        placed[i] = max(placed[i], placed[i - 1] + gap)
    top = 1 - gap / 2
    for i in reversed(range(len(placed))):
        placed[i] = min(placed[i], top)
        top = placed[i] - gap
    result = [0.0] * len(heights)
    for i, height in zip(order, placed, strict=True):
        result[i] = height
    return result


# Acceptance.


def parts_of(acceptance: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """(kind, benchmark, name, numbers by contender) of every part of acceptance.json; none where there is but one.

    Kinds: benchmark, category (after its benchmark, where that has several), turn.
    """
    benchmarks, categories, turns = (acceptance[part] for part in ("benchmarks", "categories", "turns"))
    for benchmark, numbers in benchmarks.items():
        inside = {name: row for name, row in categories.items() if name.startswith(f"{benchmark}/")}
        if len(benchmarks) > 1:
            yield "benchmark", benchmark, benchmark, numbers
        for name, row in inside.items() if len(inside) > 1 else ():
            yield "category", benchmark, name.removeprefix(f"{benchmark}/"), row
    if len(turns) > 1:
        yield "turn", "", "first turns", turns["1"]
        yield "turn", "", "later turns", turns["2"]


def acceptance_plots(acceptance: dict[str, Any]) -> list[Plot]:
    """By position, histogram, time, and tau by part where there are several parts."""
    contenders, plain, main = acceptance["contenders"], acceptance["baseline"], acceptance["contender"]
    drafting = {name: row for name, row in contenders.items() if name != plain and row["rounds"]}
    if not drafting:
        return []
    names = list(contenders)
    roles = {name: role_of(names, name, plain) for name in names}
    markers = {name: MARKERS[i % len(MARKERS)] for i, name in enumerate(drafting)}
    shares = "; ".join(
        f"{name}: {', '.join(f'{share:.0%}' for share in row['acceptance_by_position']) or 'nothing accepted'}"
        for name, row in drafting.items()
    )
    counts = "; ".join(f"{name}: {row['accepted_per_round']:.2f} a round" for name, row in drafting.items())
    times = "; ".join(
        f"{name}: {_milliseconds(row):.3g} ms a token, {_shares_in_words(row)}"
        for name, row in contenders.items()
        if row["tokens_per_second"]
    )
    plots = [
        Plot(
            "acceptance_by_position",
            "Acceptance by position",
            f"How often a drafted token is accepted when all before it were. {shares}.",
            lambda colours: _by_position(colours, drafting, main, roles, markers),
        ),
        Plot(
            "accepted_histogram",
            "Drafted tokens accepted in a round",
            f"Shares of rounds, a panel for each contender. {counts}.",
            lambda colours: _histograms(colours, drafting, roles),
        ),
        Plot(
            "time_per_token",
            "Where the time of a token goes",
            f"{times}.",
            lambda colours: _times(colours, {n: r for n, r in contenders.items() if r["tokens_per_second"]}),
        ),
    ]
    parts = {
        f"{benchmark} / {name}" if kind == "category" and len(acceptance["benchmarks"]) > 1 else name: row
        for kind, benchmark, name, row in parts_of(acceptance)
        if kind in ("benchmark", "category")
    }
    if len(parts) > 1:
        words = "; ".join(f"{name}: {row[main]['tau']}" for name, row in parts.items())
        plots.append(
            Plot(
                "tau_by_part",
                "tau by benchmark",
                f"{main}, with 95 % intervals. {words}.",
                lambda colours: _by_part(colours, parts, list(drafting), main, roles, markers),
            )
        )
    return plots


def _by_position(
    colours: Colours, drafting: dict[str, Any], main: str, roles: dict[str, str], markers: dict[str, str]
) -> Figure:
    figure, (ax,) = _figure(colours, 290)
    ends = []
    for name, row in drafting.items():
        shares = row["acceptance_by_position"]
        if not shares:
            continue
        positions = range(1, len(shares) + 1)
        bounds = [b or [share, share] for b, share in zip(row["acceptance_by_position_interval"], shares, strict=True)]
        colour = colours(roles[name])
        if name == main:  # all of them over each other would hide the lines
            ax.fill_between(positions, *zip(*bounds, strict=True), color=colour, alpha=0.13, linewidth=0)  # type: ignore[arg-type]
        ax.plot(positions, shares, color=colour, marker=markers[name], markersize=4, linewidth=1.8)
        ends.append((positions[-1], shares[-1], name, roles[name]))
    ax.set_ylim(0, 1)
    longest = max((x for x, *_ in ends), default=1)
    ax.set_xlim(0.7, longest + 0.3)
    ax.xaxis.set_major_locator(MaxNLocator(min(longest, 10), integer=True))
    _percent(ax)
    _name_lines(ax, colours, ends, gap=0.14)
    _label(ax, colours, "position in the draft", "accepted, where all before were")
    return figure


def _histograms(colours: Colours, drafting: dict[str, Any], roles: dict[str, str]) -> Figure:
    figure, axes = _figure(colours, 46 + 68 * len(drafting), len(drafting))
    deepest = max(len(row["accepted_histogram"]) for row in drafting.values())
    tallest = max(max(row["accepted_histogram"]) / row["rounds"] for row in drafting.values())
    for ax, (name, row) in zip(axes, drafting.items(), strict=True):
        shares = [count / row["rounds"] for count in row["accepted_histogram"]]
        ax.bar(range(len(shares)), shares, width=0.82, color=colours(roles[name]))
        ax.set_ylim(0, tallest * 1.08)
        ax.set_xlim(-0.6, max(deepest, 4) - 0.4)
        ax.yaxis.set_major_locator(MaxNLocator(2))
        ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        _percent(ax)
        words = f"{textwrap.shorten(name, 36, placeholder='…') or '?'}: {row['accepted_per_round']:.2f}"
        ax.text(
            0.99, 0.97, words, transform=ax.transAxes, ha="right", va="top", fontsize=11, color=colours(roles[name])
        )
    _label(axes[-1], colours, "drafted tokens accepted in a round")
    _label(axes[0], colours, y="share of rounds, and the mean")
    return figure


def _milliseconds(row: dict[str, Any]) -> float:
    return 1000 / row["tokens_per_second"]


def _shares_in_words(row: dict[str, Any]) -> str:
    return " · ".join(f"{part} {100 * share:.0f} %" for part, share in row["time_share"].items() if share is not None)


def _times(colours: Colours, contenders: dict[str, Any]) -> Figure:
    figure, (ax,) = _figure(colours, 44 + 46 * len(contenders))
    for place, (name, row) in enumerate(contenders.items()):
        left = 0.0
        for part, share in row["time_share"].items():
            width = (share or 0) * _milliseconds(row)
            ax.barh(place, width, left=left, height=0.4, color=colours(part), linewidth=0)
            left += width
        label = textwrap.shorten(name, 30, placeholder="…") or "?"
        ax.text(0, place - 0.27, label, va="bottom", fontsize=11, color=colours("ink"))
        longest = max(_milliseconds(r) for r in contenders.values())
        ax.text(
            longest, place - 0.27, _shares_in_words(row), va="bottom", ha="right", fontsize=10, color=colours("muted")
        )
    ax.set_ylim(len(contenders) - 0.6, -0.75)
    ax.set_yticks([])
    ax.set_xlim(0, None)
    ax.grid(visible=False)
    _label(ax, colours, "milliseconds per token")
    return figure


def _by_part(
    colours: Colours,
    parts: dict[str, Any],
    drafting: list[str],
    main: str,
    roles: dict[str, str],
    markers: dict[str, str],
) -> Figure:
    figure, (ax,) = _figure(colours, 60 + 20 * len(parts))
    for place, row in enumerate(parts.values()):
        if (bounds := row[main]["tau_interval"]) is not None:
            ax.plot(bounds, [place, place], color=colours(roles[main]), linewidth=2, alpha=0.5, solid_capstyle="round")
        for name in drafting:
            if (value := row[name]["tau"]) is not None:
                size = 6 if name == main else 4
                ax.plot(
                    value, place, marker=markers[name], markersize=size, color=colours(roles[name]), linestyle="none"
                )
    ax.set_yticks(range(len(parts)), [textwrap.shorten(name, 24, placeholder="…") or "?" for name in parts])
    ax.set_ylim(len(parts) - 0.5, -0.5)
    ax.set_xlim(1, None)
    ax.grid(axis="x", color=colours("grid"), linewidth=0.8)
    _label(ax, colours, "tau: tokens per verification")
    return figure


# Training.


def training_plots(metrics: Sequence[dict[str, Any]]) -> list[Plot]:
    """Loss, accuracy per unroll step, simulated tau and learning rate over the lines of metrics.jsonl."""
    lines = _thinned(metrics)
    if len(lines) < 2:
        return []
    last = lines[-1]

    def words(name: str) -> str:
        value = next((line[f"validation_{name}"] for line in reversed(lines) if f"validation_{name}" in line), None)
        tail = f", {value:.3g} in validation" if value is not None else ""
        return f"{last[name]:.3g} after {last['step']} steps{tail}."

    accuracy = ", ".join(f"{share:.0%}" for share in last["accuracy"])
    return [
        Plot("loss", "Loss", words("loss"), lambda colours: _curve(colours, lines, "loss")),
        Plot(
            "accuracy",
            "Accuracy by unroll step",
            f"Steps 1 to {len(last['accuracy'])} at the end: {accuracy}.",
            lambda colours: _accuracy(colours, lines),
        ),
        Plot(
            "simulated_tau",
            "Simulated tau",
            words("simulated_tau"),
            lambda colours: _curve(colours, lines, "simulated_tau"),
        ),
        Plot(
            "learning_rate",
            "Learning rate",
            f"At most {max(line['lr'] for line in lines):.2g}.",
            lambda colours: _curve(colours, lines, "lr"),
        ),
    ]


def _thinned(metrics: Sequence[dict[str, Any]], most: int = 240) -> list[dict[str, Any]]:
    """Every n-th line, so that about `most` are left, as many of those that validated, and the last one."""
    every = max(1, len(metrics) // most)
    validated = [i for i, line in enumerate(metrics) if "validation_loss" in line]
    kept = {*range(0, len(metrics), every), *validated[:: max(1, len(validated) // most)], *range(len(metrics))[-1:]}
    return [metrics[i] for i in sorted(kept)]


def _curve(colours: Colours, lines: list[dict[str, Any]], name: str) -> Figure:
    figure, (ax,) = _figure(colours, 220)
    ax.plot([line["step"] for line in lines], [line[name] for line in lines], color=colours("s1"), linewidth=1.4)
    ends = [(lines[-1]["step"], lines[-1][name], "training", "s1")]
    checked = [(line["step"], line[f"validation_{name}"]) for line in lines if f"validation_{name}" in line]
    if checked:
        ax.plot(*zip(*checked, strict=True), color=colours("s2"), marker="o", markersize=3.5, linewidth=1.4)
        ends.append((*checked[-1], "validation", "s2"))
    _over_steps(ax, colours)
    if checked:
        _name_lines(ax, colours, ends, gap=0.1)
    return figure


def _accuracy(colours: Colours, lines: list[dict[str, Any]]) -> Figure:
    figure, (ax,) = _figure(colours, 220)
    count = len(lines[-1]["accuracy"])
    steps = [line["step"] for line in lines]
    for i in range(count):
        fade = 1 - 0.6 * i / max(1, count - 1)
        ax.plot(steps, [line["accuracy"][i] for line in lines], color=colours("s1"), alpha=fade, linewidth=1.3)
    ax.set_ylim(0, 1)
    _percent(ax)
    _over_steps(ax, colours)
    ends = [(steps[-1], value, f"step {i + 1}", "s1") for i, value in enumerate(lines[-1]["accuracy"])]
    _name_lines(ax, colours, ends, gap=0.09)
    return figure


def _over_steps(ax: Axes, colours: Colours) -> None:
    ax.autoscale_view()
    ax.set_xlim(0, ax.dataLim.x1)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.set_ylim(0, None)
    _label(ax, colours, "optimiser steps")
