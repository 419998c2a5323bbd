"""acceptance.json and the table in the terminal. What the numbers mean is `eval.metrics`."""

import json
import os
from pathlib import Path
from typing import Any

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
    table = Table(caption="tau: tokens per verification, bonus token included; [95 % intervals over prompts]")
    for heading in ("", "tau", "nodes", "tok/s", "speed-up", "exact"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, row in contenders.items():
        table.add_row(
            f"[bold]{name}[/]" if name == main else name,
            _with_interval(row["tau"], row["tau_interval"]),
            f"{row['tree_nodes_per_round'] or 0:.1f}",
            f"{row['tokens_per_second'] or 0:.0f}",
            _with_interval(row["speedup"], row["speedup_interval"]),
            "yes" if row["matches_target"] else "no",
        )
    Console().print(table)


def _with_interval(value: float | None, interval: list[float] | None) -> str:
    if value is None or interval is None:
        return "-"
    return f"{value:.2f} \\[{interval[0]:.2f} {interval[1]:.2f}]"
