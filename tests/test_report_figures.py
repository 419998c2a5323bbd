"""The report's figures with many contenders: numbers, families, nothing hidden."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measured.benchmarks import PLAIN
from draftsmith.eval.measured.metrics import summarise_all
from draftsmith.eval.page import drawing as figures
from draftsmith.eval.page import figures as plots
from draftsmith.eval.page import html as html_report
from draftsmith.eval.page.comparison import LABEL, comparison_plot
from draftsmith.eval.page.legend import FEW, Legend
from tests.compare_cases import place as place

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
def test_numbers_in_the_comparison_hide_nothing(count: int) -> None:
    """Of all contenders: a number in each panel and in the legend, no two over each other, dots near their nodes."""
    content = numbers_of(count)
    legend = Legend.of(content)
    plot = comparison_plot(legend)
    assert plot is not None
    figure: Figure = plot.draw(figures.LIGHT.__getitem__)
    *panels, below = figure.axes
    assert len(panels) == 2
    assert [text.get_text() for text in below.texts][1::2] == list(legend.drafting)
    for ax, key in zip(panels, ("tau", "speedup"), strict=True):
        texts = {text.get_text(): text for text in ax.texts}
        assert set(texts) == {str(i + 1) for i in range(count)}
        places = [ax.transData.transform(text.get_position()) for text in texts.values()]
        for i, (x, y) in enumerate(places):
            for a, b in places[:i]:
                assert abs(x - a) >= LABEL[0] - 0.1 or abs(y - b) >= LABEL[1] - 0.1
        dots = [line.get_xydata() for line in ax.lines if str(line.get_marker()) in figures.MARKERS]
        assert len(dots) == count
        drawn = sorted(ax.transData.transform(dot[0])[0] for dot in dots)  # type: ignore[index]
        true = sorted(
            ax.transData.transform((row["tree_nodes_per_round"], row[key]))[0] for row in legend.drafting.values()
        )
        assert max(abs(a - b) for a, b in zip(drawn, true, strict=True)) < 32
    assert comparison_plot(Legend.of(numbers_of(1))) is None


def test_no_interval_runs_through_a_number_of_near_neighbours() -> None:
    """A chain of five nodes, and prompt lookup of about as many, which vary from prompt to prompt."""
    content = numbers_of(2)
    lookup, chain = list(content["contenders"].values())[1:]
    nodes = "tree_nodes_per_round"
    lookup |= {nodes: 4.6, f"{nodes}_interval": [3.9, 5.3], "tau": 1.58, "tau_interval": [1.39, 1.8]}
    chain |= {nodes: 5.0, f"{nodes}_interval": [5.0, 5.0], "tau": 1.44, "tau_interval": [1.34, 1.57]}
    plot = comparison_plot(Legend.of(content))
    assert plot is not None
    ax = plot.draw(figures.LIGHT.__getitem__).axes[0]
    intervals = [ax.transData.transform(line.get_xydata()) for line in ax.lines if line.get_linewidth() == 1.4]  # type: ignore[arg-type]
    assert len(intervals) == 4
    for text in ax.texts:
        x, y = ax.transData.transform(text.get_position())
        for (left, low), (right, high) in intervals:
            beside = x + LABEL[0] / 2 < left or x - LABEL[0] / 2 > right
            assert beside or y + LABEL[1] / 2 < low or y - LABEL[1] / 2 > high, text.get_text()


def test_many_contenders_are_told_apart_by_number_and_family() -> None:
    few, many = Legend.of(numbers_of(FEW)), Legend.of(numbers_of(24))
    assert len({few.roles[name] for name in few.drafting}) == FEW and not few.many
    by_policy: dict[str, set[str]] = {}
    for name, role in many.roles.items():
        by_policy.setdefault(name.split()[0], set()).add(role)
    assert all(len(roles) == 1 for roles in by_policy.values())  # a family has one colour
    assert len(set().union(*by_policy.values())) == len(by_policy)  # and no other has it
    ten = numbers_of(24)
    for i, row in enumerate(list(ten["contenders"].values())[1:13]):
        row["tree"] = {"policy": f"policy {i}", "nodes": 9, "vocab_size": None}
    looks = Legend.of(ten)
    assert len({looks.families[name] for name in looks.drafting}) > figures.SERIES
    seen = {looks.families[name]: (looks.roles[name], looks.markers[name]) for name in looks.drafting}
    assert len(set(seen.values())) == len(seen)
    assert len({role for role, _ in list(seen.values())[:10]}) == 10
    cut = numbers_of(7)
    for row, size in zip(list(cut["contenders"].values())[1:], (64, 128), strict=False):
        row["tree"]["vocab_size"] = size
    assert Legend.of(cut).label("eagle2 0") == "eagle2 0, 64 tokens" and Legend.of(cut).label("ddd 4") == "ddd 4"
    assert many.roles[PLAIN] == "plain" and many.numbers["eagle2 0"] == 1


def test_lines_of_many_stand_family_by_family() -> None:
    content = numbers_of(24)
    legend = Legend.of(content)
    (plot,) = [p for p in plots.acceptance_plots(content | PARTLESS) if p.name == "acceptance_by_position"]
    shown = [ax for ax in plot.draw(figures.LIGHT.__getitem__).axes if ax.get_visible()]
    assert [ax.get_title(loc="left") for ax in shown] == list(legend.family_names.values())
    numbers = [{text.get_text() for text in ax.texts} for ax in shown]
    for name, family in legend.families.items():
        assert [str(legend.numbers[name]) in panel for panel in numbers] == [i == family for i in range(len(shown))]


def test_a_replay_shows_no_speeds(place: Path, tmp_path: Path) -> None:
    content = numbers_of(3)
    for row in content["contenders"].values():
        for key in ("speedup", "tokens_per_second", "speed_ratio", "mean_prompt_speedup", "overhead_share"):
            row[key] = row[f"{key}_interval"] = None
    plot = comparison_plot(Legend.of(content))
    assert plot is not None and len(plot.draw(figures.LIGHT.__getitem__).axes) == 2  # one panel, the legend
    assert plot.title == "tau by verified nodes" and "speed" not in plot.description
    assert "times nothing" in html_report.verdict(Legend.of(content), "replay")[0]
