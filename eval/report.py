"""acceptance.json and the table in the terminal. What the numbers mean is `eval.metrics`."""

import json
import os
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from draftsmith.models.target import Target
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.schema import Recipe


def write_acceptance(recipe: Recipe, contenders: dict[str, dict[str, Any]], main: str, target: Target) -> Path:
    """The main contender's numbers on top, everyone's under their names, and the recipe. Whole or not there."""
    shared = {
        "lossless": True,  # greedy acceptance keeps only what plain decoding would have produced
        "temperature": recipe.eval.temperature,
        "max_new_tokens": recipe.eval.max_new_tokens,
        "dtype": str(target.dtype).removeprefix("torch."),
        "device": str(target.device),
    }
    content = (
        {"contender": main} | contenders[main] | shared | {"contenders": contenders, "recipe": dump_recipe(recipe)}
    )
    path = recipe.eval_out / "acceptance.json"
    partial = path.with_suffix(".json.partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    os.replace(partial, path)
    return path


def print_table(contenders: dict[str, dict[str, Any]], main: str) -> None:
    """Fits 80 columns."""
    different = [name for name, row in contenders.items() if not row["matches_target"]]
    exact = f"not those of plain decoding: {', '.join(different)}" if different else "all those of plain decoding"
    caption = (
        "tau: tokens per verification, the bonus token included. 95 %: bootstrap over prompts.\n"
        f"Answers, token for token: {exact}."
    )
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    table.add_column("")
    for heading in ("tau", "95 %", "nodes", "tok/s", "speed-up", "95 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in contenders.items():
        table.add_row(
            f"[bold]{name}[/]" if name == main else name,
            _number(row["tau"], 2),
            _interval(row["tau_interval"]),
            _number(row["tree_nodes_per_round"], 1),
            _number(row["tokens_per_second"], 0),
            _number(row["speedup"], 2),
            _interval(row["speedup_interval"]),
        )
    Console().print(table)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _interval(bounds: list[float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f}"
