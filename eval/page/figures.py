"""The report's figures: acceptance by position, accepted tokens, time, parts of a benchmark, and the training's curves.

Tables and figures stay readable with twenty contenders. With more than `legend.FEW`, a colour stands for a family (same
drafter and policy, other sizes), and figures show each contender's number. The table and the comparison's legend
(`eval.page.comparison`) map numbers to names.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from draftsmith.eval.page.comparison import comparison_plot
from draftsmith.eval.page.drawing import WIDTH, Colours, Plot, label, name_lines, new_figure, percent, style_axes
from draftsmith.eval.page.legend import ROW as LEGEND_ROW
from draftsmith.eval.page.legend import Legend, shortened

LINES = 345  # pixels of the lines by position, without their legend
PANEL = 118  # pixels of a family's panel if there are many contenders
TIMED_ROW = 54  # pixels of a contender's name, bar and time shares if there are few
ROW = 18  # pixels of a contender's row if there are many
DASH = "\u2013"


def parts_of(acceptance: dict[str, Any]) -> Iterator[tuple[str, str, str, dict[str, Any]]]:
    """Yields (kind, benchmark, name, numbers by contender) for every part of acceptance.json, if there are several.

    Kinds: benchmark, category (after its benchmark, if that has several), turn.
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
    """Plots of the comparison, acceptance by position, histogram, time, and tau by part, as far as they apply."""
    legend = Legend.of(acceptance)
    drafting = {name: row for name, row in legend.drafting.items() if row["rounds"]}
    if not drafting:
        return []
    main = legend.main
    timed = {name: row for name, row in legend.contenders.items() if row["tokens_per_second"]}
    shares = "; ".join(
        f"{name}: {', '.join(f'{share:.0%}' for share in row['acceptance_by_position']) or 'nothing accepted'}"
        for name, row in drafting.items()
    )
    counts = "; ".join(f"{name}: {row['accepted_per_round']:.2f} a round" for name, row in drafting.items())
    times = "; ".join(
        f"{name}: {_milliseconds(row):.3g} ms a token, {_shares_in_words(row)}" for name, row in timed.items()
    )
    compared = comparison_plot(legend)
    plots = [compared] if compared is not None else []
    by_position = _by_family if legend.many else _by_position
    plots.append(
        Plot(
            "acceptance_by_position",
            "Acceptance by position" + ", family by family" * legend.many,
            f"How often a drafted token is accepted when all before it were. {shares}.",
            lambda colours: by_position(colours, legend, drafting),
        )
    )
    histograms = _shaded_histograms if legend.many else _histograms
    plots.append(
        Plot(
            "accepted_histogram",
            "Drafted tokens accepted in a round, share of rounds",
            f"Shares of rounds, a {'row' if legend.many else 'panel'} for each contender. {counts}.",
            lambda colours: histograms(colours, legend, drafting),
        )
    )
    if timed:
        draw = _times_in_rows if legend.many else _times
        plots.append(
            Plot(
                "time_per_token",
                "Where the time of a token goes",
                f"{times}.",
                lambda colours: draw(colours, legend, timed),
            )
        )
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
                lambda colours: _by_part(colours, legend, list(drafting), parts),
            )
        )
    return plots


def _by_position(colours: Colours, legend: Legend, drafting: dict[str, Any]) -> Figure:
    """One line per contender, with its number at the end and a legend below."""
    heights = [LINES] if len(drafting) == 1 else [LINES, LEGEND_ROW * len(drafting)]
    figure, (ax, *below) = new_figure(colours, heights)
    ends = []
    for name, row in drafting.items():
        shares = row["acceptance_by_position"]
        if not shares:
            continue
        positions = range(1, len(shares) + 1)
        bounds = [b or [share, share] for b, share in zip(row["acceptance_by_position_interval"], shares, strict=True)]
        colour = colours(legend.roles[name])
        if name == legend.main:  # more bands would hide the lines
            ax.fill_between(positions, *zip(*bounds, strict=True), color=colour, alpha=0.13, linewidth=0)  # type: ignore[arg-type]
        marker = legend.markers[name]
        ax.plot(positions, shares, color=colour, linewidth=1.8, marker=marker, markersize=4, clip_on=False)
        ends.append((positions[-1], shares[-1], str(legend.numbers[name]), legend.roles[name]))
    ax.set_ylim(0, 1)
    longest = max((x for x, *_ in ends), default=1)
    ax.set_xlim(0.7, longest + 0.3)
    ax.xaxis.set_major_locator(MaxNLocator(min(longest, 10), integer=True))
    percent(ax)
    label(ax, colours, "position in the draft", "accepted, where all before were")
    for legend_ax in below:
        for x in {x for x, *_ in ends}:
            name_lines(ax, colours, [end for end in ends if end[0] == x], gap=14 / (LINES - 60), right=x)
        legend.draw(legend_ax, colours, list(drafting))
    return figure


def _by_family(colours: Colours, legend: Legend, drafting: dict[str, Any]) -> Figure:
    """One panel per family, on equal axes, each with the main contender's line in grey."""
    families = legend.grouped(name for name, row in drafting.items() if row["acceptance_by_position"])
    rows = max(1, -(-len(families) // 2))
    most = max(map(len, families.values()), default=1)
    panel = max(PANEL, 30 + 11 * most)
    figure = Figure(figsize=(WIDTH / 72, (30 + panel * rows) / 72), dpi=72, layout="constrained")
    figure.get_layout_engine().set(w_pad=3 / 72, h_pad=4 / 72, wspace=0.02, hspace=0.02)  # type: ignore[union-attr]
    axes = list(figure.subplots(rows, 2, sharex=True, sharey=True, squeeze=False).flat)
    longest = max((len(row["acceptance_by_position"]) for row in drafting.values()), default=1)
    main = drafting.get(legend.main, {}).get("acceptance_by_position") or []
    for ax in axes[len(families) :]:
        ax.set_visible(False)
    for place, (ax, (family, names)) in enumerate(zip(axes, families.items(), strict=False)):
        style_axes(ax, colours)
        ax.set_ylim(0, 1)
        ax.set_xlim(0.7, longest + 0.3)
        ax.xaxis.set_major_locator(MaxNLocator(min(longest, 6), integer=True))
        ax.yaxis.set_major_locator(MaxNLocator(2))
        ax.tick_params(labelbottom=place >= len(families) - 2)  # with nothing below it
        percent(ax)
        ax.plot(range(1, len(main) + 1), main, color=colours("muted"), linewidth=3, alpha=0.3)
        ends = []
        for name in names:
            shares = drafting[name]["acceptance_by_position"]
            weight = 2.0 if name == legend.main else 1.3
            style: Any = {"color": colours(legend.roles[name]), "marker": legend.markers[name], "markersize": 3}
            ax.plot(range(1, len(shares) + 1), shares, linewidth=weight, markeredgewidth=0, **style)
            ends.append((len(shares), shares[-1], str(legend.numbers[name]), legend.roles[name]))
        name_lines(ax, colours, ends, gap=13 / (panel - 30))
        words = shortened(legend.family_names[family], 24)
        ax.set_title(words, color=colours(legend.roles[names[0]]), fontsize=11, loc="left")
    figure.supxlabel("position in the draft; grey: the main contender", fontsize=11, color=colours("muted"))
    return figure


def _histograms(colours: Colours, legend: Legend, drafting: dict[str, Any]) -> Figure:
    figure, axes = new_figure(colours, [88] * len(drafting), more=46, sharex=True)
    deepest = max(len(row["accepted_histogram"]) for row in drafting.values())
    tallest = max(max(row["accepted_histogram"]) / row["rounds"] for row in drafting.values())
    for ax, (name, row) in zip(axes, drafting.items(), strict=True):
        shares = [count / row["rounds"] for count in row["accepted_histogram"]]
        ax.bar(range(len(shares)), shares, width=0.82, color=colours(legend.roles[name]))
        ax.set_ylim(0, tallest * 1.08)
        ax.set_xlim(-0.6, max(deepest, 4) - 0.4)
        ax.yaxis.set_major_locator(MaxNLocator(2))
        ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
        percent(ax)
        words = f"{shortened(name, 40)}: {row['accepted_per_round']:.2f} a round"
        ax.set_title(words, color=colours(legend.roles[name]), fontsize=11, loc="left")
    label(axes[-1], colours, "drafted tokens accepted in a round")
    return figure


def _shaded_histograms(colours: Colours, legend: Legend, drafting: dict[str, Any]) -> Figure:
    """One row per contender, darker for larger shares of rounds."""
    figure, (ax,) = new_figure(colours, [60 + ROW * len(drafting)])
    deepest = max(max(len(row["accepted_histogram"]) for row in drafting.values()), 5)
    tallest = max(max(row["accepted_histogram"]) / row["rounds"] for row in drafting.values())
    for place, (name, row) in enumerate(drafting.items()):
        for accepted, count in enumerate(row["accepted_histogram"]):
            shade = (count / row["rounds"] / tallest) ** 0.7  # keeps rare rounds visible
            ax.barh(place, 0.94, 0.86, accepted - 0.47, color=colours(legend.roles[name]), alpha=shade, linewidth=0)
        ax.text(
            *(deepest - 0.3, place, f"{row['accepted_per_round']:.2f}"),
            va="center",
            fontsize=10,
            color=colours(legend.roles[name]),
        )
    _numbered_rows(ax, colours, legend, list(drafting))
    ax.set_xlim(-0.6, deepest - 0.4 + 0.1 * deepest)
    ax.xaxis.set_major_locator(MaxNLocator(12, integer=True))
    label(ax, colours, "drafted tokens accepted in a round", "darker: a larger share; at the right the mean")
    return figure


def _numbered_rows(ax: Axes, colours: Colours, legend: Legend, names: list[str]) -> None:
    """Labels rows with the contenders' numbers, and plain decoding with a dash."""
    ax.set_yticks(range(len(names)), [str(legend.numbers.get(name, DASH)) for name in names], fontsize=10)
    for tick, name in zip(ax.get_yticklabels(), names, strict=True):
        tick.set_color(colours(legend.roles[name]))
    ax.set_ylim(len(names) - 0.4, -0.6)
    ax.grid(visible=False)


def _milliseconds(row: dict[str, Any]) -> float:
    return 1000 / row["tokens_per_second"]


def _time_shares(row: dict[str, Any]) -> dict[str, float]:
    """Time shares by part. Plain decoding's `draft` in older files is the loop's own work and counts as `other`."""
    shares = {part: share for part, share in row["time_share"].items() if share is not None}
    if row["proposer"] is None and "draft" in shares:
        shares["other"] = shares.get("other", 0.0) + shares.pop("draft")
    return shares


def _shares_in_words(row: dict[str, Any]) -> str:
    return " · ".join(f"{part} {100 * share:.0f} %" for part, share in _time_shares(row).items())


def _time_bar(ax: Axes, colours: Colours, place: int, row: dict[str, Any], height: float) -> None:
    left = 0.0
    for part, share in _time_shares(row).items():
        width = share * _milliseconds(row)
        ax.barh(place, width, left=left, height=height, color=colours(part), linewidth=0)
        left += width


def _times(colours: Colours, legend: Legend, timed: dict[str, Any]) -> Figure:
    """One bar per contender, with its name above and its shares below."""
    figure, (ax,) = new_figure(colours, [64 + TIMED_ROW * len(timed)])
    longest = max(map(_milliseconds, timed.values()))
    for place, (name, row) in enumerate(timed.items()):
        _time_bar(ax, colours, place, row, 0.24)
        shown = shortened(name, 44)
        ax.text(0, place - 0.19, shown, fontsize=11, color=colours("ink"), va="bottom")
        whole = f"{_milliseconds(row):.3g} ms"
        ax.text(longest, place - 0.19, whole, ha="right", fontsize=11, color=colours("ink"), va="bottom")
        ax.text(0, place + 0.19, _shares_in_words(row), fontsize=10, color=colours("muted"), va="top")
    ax.set_ylim(len(timed) - 0.45, -0.5)
    ax.set_yticks([])
    ax.set_xlim(0, longest)
    ax.grid(visible=False)
    label(ax, colours, "milliseconds per token")
    _time_legend(ax, colours)
    return figure


def _times_in_rows(colours: Colours, legend: Legend, timed: dict[str, Any]) -> Figure:
    """One bar per contender, labelled by number."""
    figure, (ax,) = new_figure(colours, [74 + ROW * len(timed)])
    for place, row in enumerate(timed.values()):
        _time_bar(ax, colours, place, row, 0.72)
    _numbered_rows(ax, colours, legend, list(timed))
    ax.set_xlim(0, None)
    label(ax, colours, "milliseconds per token")
    _time_legend(ax, colours)
    return figure


def _time_legend(ax: Axes, colours: Colours) -> None:
    keys = [Patch(color=colours(part), label=part) for part in ("draft", "verify", "other")]
    legend = ax.legend(
        handles=keys, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, frameon=False, fontsize=11, borderpad=0.2
    )
    for text in legend.get_texts():
        text.set_color(colours("muted"))


def _by_part(colours: Colours, legend: Legend, drafting: list[str], parts: dict[str, Any]) -> Figure:
    figure, (ax,) = new_figure(colours, [60 + 20 * len(parts)])
    main = legend.main
    for place, row in enumerate(parts.values()):
        if (bounds := row[main]["tau_interval"]) is not None:
            colour = colours(legend.roles[main])
            ax.plot(bounds, [place, place], color=colour, linewidth=2, alpha=0.5, solid_capstyle="round")
        for name in [*(other for other in drafting if other != main), *[main] * (main in drafting)]:
            if (value := row[name]["tau"]) is not None:
                size, alpha = (6, 1.0) if name == main else (4, 0.6 if legend.many else 1.0)
                colour, marker = colours(legend.roles[name]), legend.markers[name]
                ax.plot(value, place, marker, markersize=size, color=colour, alpha=alpha)
    ax.set_yticks(range(len(parts)), [shortened(name, 24) for name in parts])
    ax.set_ylim(len(parts) - 0.5, -0.5)
    ax.set_xlim(1, None)
    ax.grid(axis="x", color=colours("grid"), linewidth=0.8)
    label(ax, colours, "tau: tokens per verification")
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
    """About `most` evenly spaced lines, as many lines with validation, and the last line."""
    every = max(1, len(metrics) // most)
    validated = [i for i, line in enumerate(metrics) if "validation_loss" in line]
    kept = {*range(0, len(metrics), every), *validated[:: max(1, len(validated) // most)], *range(len(metrics))[-1:]}
    return [metrics[i] for i in sorted(kept)]


def _curve(colours: Colours, lines: list[dict[str, Any]], name: str) -> Figure:
    figure, (ax,) = new_figure(colours, [220])
    ax.plot([line["step"] for line in lines], [line[name] for line in lines], color=colours("s1"), linewidth=1.4)
    ends = [(lines[-1]["step"], lines[-1][name], "training", "s1")]
    checked = [(line["step"], line[f"validation_{name}"]) for line in lines if f"validation_{name}" in line]
    if checked:
        ax.plot(*zip(*checked, strict=True), color=colours("s2"), marker="o", markersize=3.5, linewidth=1.4)
        ends.append((*checked[-1], "validation", "s2"))
    _over_steps(ax, colours)
    if checked:
        name_lines(ax, colours, ends, gap=0.1)
    return figure


def _accuracy(colours: Colours, lines: list[dict[str, Any]]) -> Figure:
    figure, (ax,) = new_figure(colours, [220])
    count = len(lines[-1]["accuracy"])
    steps = [line["step"] for line in lines]
    for i in range(count):
        fade = 1 - 0.6 * i / max(1, count - 1)
        ax.plot(steps, [line["accuracy"][i] for line in lines], color=colours("s1"), alpha=fade, linewidth=1.3)
    ax.set_ylim(0, 1)
    percent(ax)
    _over_steps(ax, colours)
    ends = [(steps[-1], value, f"step {i + 1}", "s1") for i, value in enumerate(lines[-1]["accuracy"])]
    name_lines(ax, colours, ends, gap=0.09)
    return figure


def _over_steps(ax: Axes, colours: Colours) -> None:
    ax.autoscale_view()
    ax.set_xlim(0, ax.dataLim.x1)
    ax.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    ax.yaxis.set_major_locator(MaxNLocator(5))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    ax.set_ylim(0, None)
    label(ax, colours, "optimiser steps")
