"""The report's figures with many contenders: numbers, colours, nothing hidden."""

from typing import Any

import pytest
from matplotlib.figure import Figure
from matplotlib.text import Text

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measured.benchmarks import PLAIN
from draftsmith.eval.measured.metrics import summarise_all
from draftsmith.eval.page import drawing as figures
from draftsmith.eval.page import figures as plots
from draftsmith.eval.page import html as html_report
from draftsmith.eval.page.comparison import DOT, comparison_plot
from draftsmith.eval.page.legend import FEW, Legend

PARTLESS: dict[str, Any] = {"benchmarks": {}, "categories": {}, "turns": {}}


def numbers_of(count: int) -> dict[str, Any]:
    """acceptance.json's content for contenders of every size and policy."""
    trees = [("eagle2", n) for n in (8, 16, 30, 60)] + [("ddd", 60), ("svip", 9), ("static", 26)]
    trees += [("eagle2", 60)] * 6 + [("chain", n) for n in range(3, 20)]
    trees = trees[:count]
    plain = [Generation([1], list(range(40)), [0] * 39, False, [1] * 39, [0] * 39) for _ in range(4)]
    results: dict[str, list[Generation]] = {PLAIN: plain}
    for i, (policy, nodes) in enumerate(trees):
        rows = []
        for prompt in range(4):
            accepted = [min(nodes - 1, 1 + (i + prompt + r) % 3) for r in range(12)]
            out = Generation([1], list(range(1 + sum(accepted) + 12)), accepted, False, [nodes] * 12, [3] * 12)
            rows.append(out)
        results[f"{policy} {i}"] = rows
    for prompt, generations in enumerate(zip(*results.values(), strict=True)):
        for g in generations:
            g.conversation_id, g.decode_seconds = str(prompt), 0.01 * g.rounds
            g.draft_seconds, g.verify_seconds = 0.3 * g.decode_seconds, 0.6 * g.decode_seconds
    rows = summarise_all(results, PLAIN, 100, 0)
    for (name, row), tree in zip(rows["contenders"].items(), [None, *trees], strict=True):
        shape = None if tree is None else {"policy": tree[0], "nodes": tree[1], "vocab_size": None}
        row |= {"proposer": None if name == PLAIN else "drafter", "drafter": "d", "tree": shape}
    return rows | {"contender": next(name for name in results if name != PLAIN), "baseline": PLAIN}


@pytest.mark.parametrize("count", [2, 6, 7, 24])
def test_dots_in_the_comparison_hide_nothing(count: int) -> None:
    """A dot of each contender in each panel, near its nodes, and none over another."""
    content = numbers_of(count)
    legend = Legend.of(content)
    plot = comparison_plot(legend)
    assert plot is not None
    figure: Figure = plot.draw(figures.LIGHT.__getitem__)
    *panels, below = figure.axes
    assert len(panels) == 2
    assert [text.get_text() for text in below.texts] == legend.coloured
    for ax, key in zip(panels, ("tau", "speedup"), strict=True):
        dots = [line.get_xydata() for line in ax.lines if str(line.get_marker()) in figures.MARKERS + "."]
        places = [ax.transData.transform(dot[0]) for dot in dots]  # type: ignore[index]
        assert len(places) == count
        for i, (x, y) in enumerate(places):
            for a, b in places[:i]:
                assert abs(x - a) > DOT or abs(y - b) > DOT - 2
        true = sorted(
            ax.transData.transform((row["tree_nodes_per_round"], row[key]))[0] for row in legend.drafting.values()
        )
        assert max(abs(x - b) for (x, _), b in zip(sorted(map(tuple, places)), true, strict=True)) < 32
    assert comparison_plot(Legend.of(numbers_of(1))) is None


def test_the_best_of_many_have_colours() -> None:
    few, many = Legend.of(numbers_of(FEW)), Legend.of(numbers_of(24))
    assert len({few.roles[name] for name in few.drafting}) == FEW and not few.many
    best = {name for name in many.drafting if many.roles[name] != "plain"}
    assert len({many.roles[name] for name in best}) == len({many.markers[name] for name in best}) == len(best) == FEW
    fastest = sorted(many.drafting, key=lambda name: many.drafting[name]["speedup"])[-FEW:]
    assert many.main in best and set(fastest) - best <= {fastest[0]}
    by_policy: dict[str, set[int]] = {}
    for name, family in many.families.items():
        by_policy.setdefault(name.split()[0], set()).add(family)
    assert all(len(families) == 1 for families in by_policy.values())
    cut = numbers_of(7)
    for row, size in zip(list(cut["contenders"].values())[1:], (64, 128), strict=False):
        row["tree"]["vocab_size"] = size
    assert Legend.of(cut).label("eagle2 0") == "eagle2 0, 64 tokens" and Legend.of(cut).label("ddd 4") == "ddd 4"
    assert many.roles[PLAIN] == "plain" and many.numbers["eagle2 0"] == 1


@pytest.mark.parametrize("count", [6, 24])
def test_the_figures_hold_the_best_and_the_main_contender(count: int) -> None:
    content = numbers_of(count)
    shown = Legend.of(content).coloured
    for plot in plots.acceptance_plots(content | PARTLESS):
        axes = plot.draw(figures.LIGHT.__getitem__).axes
        texts = [text.get_text() for ax in axes for text in ax.get_children() if isinstance(text, Text)]
        for name in shown:
            assert any(text.startswith(name) for text in texts), plot.name
            assert f"{name}: " in plot.description
        others = set(content["contenders"]) - {PLAIN, *shown}
        assert all((f"{name}: " in plot.description) == (plot.name == "comparison") for name in others)


def test_a_replay_shows_no_speeds() -> None:
    content = numbers_of(3)
    for row in content["contenders"].values():
        for key in ("speedup", "tokens_per_second", "speed_ratio", "mean_prompt_speedup", "overhead_share"):
            row[key] = row[f"{key}_interval"] = None
    plot = comparison_plot(Legend.of(content))
    assert plot is not None and len(plot.draw(figures.LIGHT.__getitem__).axes) == 2  # one panel, the legend
    assert plot.title == "tau by verified nodes" and "speed" not in plot.description
    assert "times nothing" in html_report.verdict(Legend.of(content), "replay")[0]
