"""Writes and reads the files of an evaluation: acceptance.json, generations.jsonl, report.html, and the table."""

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.eval.measurement.metrics import BOOTSTRAP_SAMPLES
from draftsmith.eval.report_page.html import build_html
from draftsmith.eval.report_page.summary import advice, equality, fastest, interval, notes, number, parts_of
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.json_text import json_object
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.schema import Recipe


def main(command: Command) -> None:
    recipe = command.recipe
    acceptance = read_acceptance(recipe.eval_out / "acceptance.json")
    if command.plan:
        for path in (recipe.eval_out / "acceptance.json", generations_path(recipe), metrics_path(recipe)):
            print(f"reads    {path}{'' if path.exists() else ': missing; the report will omit it'}")
        print(f"writes   {recipe.eval_out / 'report.html'}")
        return
    written = write_report(recipe)
    print_table(acceptance)
    print_written(written)


def generations_path(recipe: Recipe) -> Path:
    return recipe.eval_out / "generations.jsonl"


def metrics_path(recipe: Recipe) -> Path:
    """The metrics of the measured drafter's training, beside its directory."""
    return recipe.eval_drafter_dir.parent / recipe.metrics_path.name


# Files.

UNDRAFTED = {"proposer": None, "drafter": None, "tree": None, "lossless": True}


def write_acceptance(
    recipe: Recipe,
    numbers: dict[str, dict[str, Any]],
    described: dict[str, dict[str, Any]],
    main: str,
    baseline: str,
    made: dict[str, Any],
) -> Path:
    """Writes acceptance.json atomically: the main contender's numbers on top, all contenders' under their names.

    Args:
        numbers: from `metrics.summarise_all`.
        described: each contender's `contenders.describe`, `UNDRAFTED` for plain decoding.
        baseline: name of plain decoding.
        made: provenance: `device`, `dtype` and `made`.
    """
    section = recipe.eval
    shared = section.model_dump(include={"temperature", "top_p", "top_k", "max_new_tokens", "mode"}) | {
        "batch_size": section.replay_batch_size if section.mode == "replay" else section.batch_size,
        "bootstrap_samples": BOOTSTRAP_SAMPLES,
        "target": recipe.target.model,
        "drafter": str(recipe.eval_drafter_dir),
    }
    contenders = {name: described[name] | row for name, row in numbers["contenders"].items()}
    numbers = numbers | {"contenders": contenders}
    content = {"contender": main, "baseline": baseline} | contenders[main] | shared | made | numbers
    path = recipe.eval_out / "acceptance.json"
    atomic_write(path, json.dumps(content | {"recipe": dump_recipe(recipe)}, indent=2) + "\n")
    return path


def read_acceptance(path: Path) -> dict[str, Any]:
    """The content of acceptance.json. Raises UserError if it is missing, damaged or another version's."""
    keys = ("contender", "baseline", "contenders", "benchmarks", "categories", "turns", "made", "recipe")
    try:
        return json_object(path.read_bytes(), *keys)
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; run `draftsmith evaluate` first") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(
            f"{path}: {error}: damaged, or written by another version; run `draftsmith evaluate` again"
        ) from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, or none without the file. A last line that is being written does not count.

    Raises:
        UserError: a line is damaged.
    """
    metrics: list[dict[str, Any]] = []
    for row, line in enumerate(path.read_bytes().split(b"\n")[:-1] if path.exists() else [], start=1):
        try:
            metrics.append(json_object(line, "step", "loss", "simulated_tau"))
        except ValueError as error:
            raise UserError(
                f"{path}:{row}: {error}: damaged; delete the line, or move the file away for a report without the "
                "curves of training"
            ) from None
    return metrics


def write_report(recipe: Recipe) -> Path:
    """Writes report.html from the files in eval.out. Returns its path."""
    acceptance, metrics = read_acceptance(recipe.eval_out / "acceptance.json"), read_metrics(metrics_path(recipe))
    written = recipe.eval_out / "report.html"
    atomic_write(written, build_html(acceptance, metrics, generations_path(recipe)))
    return written


# The terminal.


def print_table(acceptance: dict[str, Any]) -> None:
    """Prints all contenders, then the main one by benchmark and turn if there are several. Fits 80 columns."""
    main, contenders = acceptance["contender"], acceptance["contenders"]
    parts = [(name, row[main]) for kind, name, row in parts_of(acceptance) if kind != "category"]
    about = f"{f'Parts: {main}. ' if parts else ''}tau: tokens per verification, the bonus token included. "
    told = [*notes(acceptance), fastest(acceptance), equality(acceptance)]
    # Names are Text: markup would interpret their brackets and colons, and double backslashes.
    caption = Text("\n".join(filter(None, [f"{about}95 %: bootstrap over prompts.", *told])), style="table.caption")
    table = Table(box=box.SIMPLE_HEAD, caption=caption, caption_justify="left")
    table.add_column("", overflow="fold")
    for heading in ("tau", "95 %", "nodes", "tok/s", "speed-up", "95 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, row in contenders.items():
        table.add_row(Text(name, style="bold" if name == main else ""), *_cells(row))
    if parts:
        table.add_section()
    for name, row in parts:
        table.add_row(Text(name), *_cells(row))
    Console().print(table)
    if said := advice(acceptance):
        print(said)


def print_written(*paths: Path) -> None:
    print(f"written in {paths[0].parent}: {', '.join(path.name for path in paths)}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        number(row["tau"]),
        interval(row["tau_interval"]),
        number(row["tree_nodes_per_round"], 1),
        number(row["tokens_per_second"], 0),
        number(row["speedup"]),
        interval(row["speedup_interval"]),
    )
