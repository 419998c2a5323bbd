"""Writes and reads the files of an evaluation: acceptance.json, generations.jsonl, report.html, and the table."""

import json
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.eval.page.drawing import write_png
from draftsmith.eval.page.figures import acceptance_plots, parts_of, training_plots
from draftsmith.eval.page.file_shapes import AcceptanceFile, MetricsLine, check, load
from draftsmith.eval.page.html import (
    RELAXED,
    build_html,
    choose_answers,
    choose_images,
    different_contenders,
    precisions,
    relaxed_contenders,
    rounds_coarsely,
)
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.schema import Recipe

NEXT = 5  # contenders that the terminal compares with the fastest
WORTHLESS_TAU = 1.05


def main(command: Command) -> None:
    recipe = command.recipe
    acceptance = read_acceptance(recipe.eval_out / "acceptance.json")
    if command.plan:
        for path in (recipe.eval_out / "acceptance.json", generations_path(recipe), metrics_path(recipe)):
            print(f"reads    {path}{'' if path.exists() else ': missing; the report will omit it'}")
        print(f"writes   {recipe.eval_out / 'report.html'}{' and plots as PNG files' if recipe.eval.png else ''}")
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
    shared = {
        "temperature": recipe.eval.temperature,
        "top_p": recipe.eval.top_p,
        "top_k": recipe.eval.top_k,
        "max_new_tokens": recipe.eval.max_new_tokens,
        "batch_size": recipe.eval.replay_batch_size if recipe.eval.mode == "replay" else recipe.eval.batch_size,
        "mode": recipe.eval.mode,
        "bootstrap_samples": recipe.eval.bootstrap_samples,
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
    """acceptance.json with `clean` texts. Raises UserError if it is missing, damaged or older."""
    try:
        content = load(path.read_bytes(), tidy=True)
        check(content, AcceptanceFile)
        return content
    except FileNotFoundError:
        raise UserError(f"{path} does not exist; run `draftsmith evaluate` first") from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(
            f"{path}: {error}: damaged, or written by another version; run `draftsmith evaluate` again"
        ) from None


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The lines of metrics.jsonl, or none without the file. The last line may be incomplete.

    Raises:
        UserError: another line is damaged.
    """
    try:
        *lines, rest = path.read_bytes().split(b"\n") if path.exists() else [b""]
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    metrics: list[dict[str, Any]] = []
    for number, line in enumerate([*lines, rest] if rest.endswith(b"}") else lines, start=1):
        try:
            metrics.append(load(line))
            check(metrics[-1], MetricsLine)
            if (steps := len(metrics[-1]["accuracy"])) != (before := len(metrics[0]["accuracy"])):
                raise ValueError(f"accuracy: {steps} unroll steps, the first line has {before}")
        except ValueError as error:
            raise UserError(
                f"{path}:{number}: {error}: not what training writes; delete the line, or move the file away for a "
                "report without the curves of training"
            ) from None
    return metrics


def write_report(recipe: Recipe) -> list[Path]:
    """Writes report.html, and the plots if eval.png is set, from the files in eval.out. Returns their paths."""
    out = recipe.eval_out
    acceptance, metrics = read_acceptance(out / "acceptance.json"), read_metrics(metrics_path(recipe))
    answers: list[dict[str, Any]] = []
    faults: list[str] = []
    if (generations := generations_path(recipe)).exists():
        answers, faults = choose_answers(generations, acceptance["contender"], recipe.eval.report_answers)
    images = choose_images(generations, list(acceptance["contenders"]), answers) if answers else []
    page = build_html(acceptance, metrics, answers, faults, images)
    if faults:
        print(f"unreadable lines of generations.jsonl, left out: {len(faults)}, the first: {faults[0]}")
    written = [out / "report.html"]
    atomic_write(written[0], page)
    for plot in [*acceptance_plots(acceptance), *training_plots(metrics)] if recipe.eval.png else []:
        written.append(out / f"{plot.name}.png")
        write_png(plot, written[-1])
    return written


# The terminal.


def print_table(acceptance: dict[str, Any]) -> None:
    """Prints all contenders, then the main one by benchmark and turn if there are several. Fits 80 columns."""
    main, contenders = acceptance["contender"], acceptance["contenders"]
    parts = [(name, row[main]) for kind, _, name, row in parts_of(acceptance) if kind != "category"]
    # Names are Text: markup would interpret their brackets and colons, and double backslashes.
    caption = Text(
        f"{f'Parts: {main}. ' if parts else ''}tau: tokens per verification, the bonus token included. "
        f"95 %: bootstrap over prompts.{_side_by_side(acceptance)}{_inner(acceptance)}{_moved(acceptance)}"
        f"{_fastest(acceptance)}\n{_equality(acceptance)}",
        style="table.caption",
    )
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
    for line in advice(acceptance):
        print(line)


def advice(acceptance: dict[str, Any]) -> list[str]:
    """A note if the target accepts almost no drafted token."""
    main = acceptance["contender"]
    row = acceptance["contenders"][main]
    tau = row["tau"]
    if tau is None or tau >= WORTHLESS_TAU or row["proposer"] != "drafter":
        return []
    return [
        f"note: tau {tau:.2f}: the target accepted almost nothing that {main} drafted. Train longer, while the loss "
        "in metrics.jsonl still falls, or on more answers; its validation_simulated_tau should be well above 1"
    ]


def print_written(paths: list[Path]) -> None:
    print(f"written in {paths[0].parent}: {', '.join(path.name for path in paths)}")


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        _number(row["tau"], 2),
        interval_text(row["tau_interval"]),
        _number(row["tree_nodes_per_round"], 1),
        _number(row["tokens_per_second"], 0),
        _number(row["speedup"], 2),
        interval_text(row["speedup_interval"]),
    )


def _side_by_side(acceptance: dict[str, Any]) -> str:
    """A caption if speeds are those of a batch."""
    if acceptance["mode"] == "replay" or acceptance["batch_size"] == 1:
        return ""
    return f"\nSpeeds: {acceptance['batch_size']} answers decoded side by side, by plain decoding, too."


def _inner(acceptance: dict[str, Any]) -> str:
    """A caption for each hierarchy."""
    rows = acceptance["contenders"].items()
    told = [f"{name} {row['inner_tau']:.2f}" for name, row in rows if row.get("inner_tau") is not None]
    return f"\nTokens per verification by the small model: {', '.join(told)}." if told else ""


def _fastest(acceptance: dict[str, Any]) -> str:
    """A caption: the speed of the fastest contender over that of the next ones. Their intervals are paired."""
    rows = {name: row for name, row in acceptance["contenders"].items() if row["proposer"] is not None}
    best = next((name for name, row in rows.items() if row.get("fastest_ratio") == 1), None)
    others = {name: row for name, row in rows.items() if name != best and row.get("fastest_ratio_interval")}
    told = [
        f"  {name} {row['fastest_ratio']:.2f} ({interval_text(row['fastest_ratio_interval'])})"
        for name, row in sorted(others.items(), key=lambda item: item[1]["fastest_ratio"])
    ]
    heading = f"Fastest drafting: {best}. Times as fast as the next ones, paired by prompt:"
    return "\n".join(["", heading, *told[:NEXT]]) if told else ""


def _moved(acceptance: dict[str, Any]) -> str:
    """A caption for relaxed rules."""
    rows = acceptance["contenders"].items()
    told = [f"{name} {row['total_variation']:.3f}" for name, row in rows if row.get("total_variation") is not None]
    what = (
        "Total variation from the target's distribution"
        if acceptance["temperature"]
        else "Probability moved, of temperature 1"
    )
    return "\n".join(["", f"{what}, a token:", *(f"  {line}" for line in told)]) if told else ""


def _equality(acceptance: dict[str, Any]) -> str:
    if acceptance["mode"] == "replay":
        return "Replayed: the rounds that decoding these recorded answers would have had. Nothing was timed."
    relaxed = relaxed_contenders(acceptance)
    others = ", but not of " + "; ".join(relaxed) + f": {RELAXED}" if relaxed else ""
    if acceptance["temperature"] > 0:
        drawn = f"Answers were drawn at temperature {acceptance['temperature']}"
        return f"{drawn}, by the target's own distribution (lossless){others}."
    different = different_contenders(acceptance)
    if not different:
        return f"Answers, token for token: all those of plain decoding{others}."
    told = ", ".join(f"{name}{_share(acceptance['contenders'][name])}" for name in different)
    said = f"Answers, token for token: not all those of plain decoding: {told}. {_cause(acceptance, different)}"
    return f"{said} The rest are those of plain decoding{others}." if relaxed else said


def _share(row: dict[str, Any]) -> str:
    share = row.get("matching_share")  # older files lack it
    return "" if share is None else f" ({share:.0%} are)"


def _cause(acceptance: dict[str, Any], different: list[str]) -> str:
    """Why greedy answers differ. The page explains it at more length."""
    coarse = [name for name in different if rounds_coarsely(acceptance, name)]
    exact = [name for name in different if name not in coarse]
    said = [f"{precisions(acceptance, coarse)} rounds: longer forwards, other last bits."] if coarse else []
    said += [f"In {precisions(acceptance, exact)} that is a defect: please report it."] if exact else []
    return " ".join(said)


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def interval_text(bounds: list[float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f}"
