"""The report's figures with few and many contenders: numbers and colours."""

from typing import Any

import pytest

from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measured.benchmarks import PLAIN
from draftsmith.eval.measured.metrics import summarise_all
from draftsmith.eval.page import drawing
from draftsmith.eval.page import figures as plots
from draftsmith.eval.page.legend import Legend


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


def acceptance_of(content: dict[str, Any]) -> dict[str, Any]:
    return content | {"benchmarks": {}, "categories": {}, "turns": {}, "mode": "decode"}


@pytest.mark.parametrize("count", [2, 7, 24])
def test_the_comparison_numbers_every_contender_where_it_stands(count: int) -> None:
    content = acceptance_of(numbers_of(count))
    legend = Legend.of(content)
    plot = plots.acceptance_plots(content)[0]
    panels = plot.draw(drawing.COLOURS.__getitem__).axes
    assert plot.name == "comparison" and len(panels) == 2
    for ax, key in zip(panels, ("tau", "speedup"), strict=True):
        told = {text.get_text(): text.xy for text in ax.texts}  # type: ignore[attr-defined]
        assert told == {
            str(legend.numbers[name]): (row["tree_nodes_per_round"], row[key]) for name, row in legend.drafting.items()
        }
    assert [plot.name for plot in plots.acceptance_plots(acceptance_of(numbers_of(1)))] == [
        *("time_per_token", "acceptance_by_position")
    ]
