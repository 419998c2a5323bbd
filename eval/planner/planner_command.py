"""Chooses how draft trees grow on this machine: prints the fastest trees and writes plan.json."""

import json
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.eval.decoding.contenders import Contender, main_contender
from draftsmith.eval.measurement.benchmarks import PLAIN, Question, recipe_questions
from draftsmith.eval.planner.search import (
    SHOWN_ROWS,
    Plan,
    as_yaml,
    candidates_of,
    make_plan,
    mean_context,
    measure,
    prepared,
    recipe_keys,
)
from draftsmith.eval.replay.recorded_answers import answer_tokens, other_sampling
from draftsmith.eval.report_page.summary import interval, number
from draftsmith.models.formats.named_drafters import with_measured_drafters
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.sampling import Sampling
from draftsmith.models.target import device_name
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import TreeSection

# plan.json's keys of a candidate and of a measured one; `eval.measurement.metrics` defines them.
PREDICTED = (
    *("tau", "tau_interval", "tree_nodes_per_round", "draft_calls_per_round", "wasted_nodes_per_round"),
    *("speedup", "speedup_interval"),
)
MEASURED = (*PREDICTED, "matches_target")


def main(command: Command) -> None:
    recipe = with_measured_drafters(command.recipe, command.plan)
    planned = main_contender(recipe)
    if not planned.has_distributions:
        raise UserError(f"eval.proposer: the planner plans a drafter's trees, and {planned.proposer} has no drafter")
    if planned.quantization is not None:
        raise UserError("eval.quantization: the planner measures the recipe's own target; set target.quantization")
    if planned.relaxed is not None:
        raise UserError("eval.acceptance: the planner predicts what exact acceptance takes; leave it out")
    files, asked = TargetFiles.read(recipe.target), list[Question]()
    contenders, recording, answers = prepared(recipe, files, planned, candidates_of(recipe), command.plan)
    rejects = Rejects()
    if command.measure:
        if recipe.eval.prompts is None:
            raise UserError("--measure decodes eval.prompts, which is not given; name a prompt file, or mt_bench")
        asked = recipe_questions(recipe, files, rejects)
    out = recipe.eval_out / "plan.json"
    if command.plan:
        names, most = [contender.name for contender in contenders], min(command.measure, len(contenders))
        with PlanLines() as lines:
            lines.line("candidates", f"{len(names)}: {'; '.join(names)}")
            lines.line("replays", f"{len(answers)} answers, {answer_tokens(answers):,} tokens, from {recording.path}")
            lines.line("measures", f"the costs of a round at {mean_context(answers)} tokens of context")
            if most:
                lines.line("decodes", f"{len(asked)} prompts plainly and by the best {most} candidates")
            seconds = f"about {recipe.eval.planner.seconds:g} s"
            lines.line("time", f"{seconds}; more if a first look at all candidates takes longer")
            lines.writes(out)
        return
    device_name(recipe.target.device)  # refuses a device before anything is written
    with alone_in(recipe.eval_out):
        models = LoadedModels(files)
        plan = make_plan(models, recipe, contenders, recording, answers)
        if command.measure:
            measure(models, recipe, plan, command.measure, asked, rejects)
        print_result(plan, recipe)
        write_plan(recipe, plan, models, out)
    print(f"written: {out}")


def choose_tree(models: LoadedModels, recipe: Recipe, contender: Contender) -> TreeSection:
    """The tree predicted to be fastest here, for a contender with `policy: auto`. Prints why.

    Returns the best tree even if none is predicted to beat plain decoding.

    Raises:
        UserError: no recorded answers, another target's, or impossible candidates.
    """
    plan = make_plan(models, recipe, *prepared(recipe, models.files, contender, candidates_of(recipe, contender.tree)))
    print_result(plan, recipe)
    return plan.rows[0].tree


def print_result(plan: Plan, recipe: Recipe) -> None:
    """Prints the fastest candidates, notes on their reliability, and the recipe line of the first."""
    if settings := other_sampling(plan.answers, Sampling.of(recipe.eval)):
        print(
            f"note: eval.planner.answers were drawn with other settings ({settings}) than eval.temperature, top_p and "
            "top_k; tau is predicted for answers like those"
        )
    print_ranking(plan)
    print(plan.effort)
    if plan.costs.busy:
        print("note: something else uses this machine: plain rounds took unequal times. Plan again while it is quiet")
    print_choice(plan)


def print_ranking(plan: Plan) -> None:
    """Prints the best few by predicted speed-up, all measured ones, and plain decoding."""
    measured = sum(bool(row.measured) for row in plan.rows)
    shown = plan.rows[: max(SHOWN_ROWS, measured)]
    caption = (
        f"The best {len(shown)} of {len(plan.rows)} candidates, predicted from {len(plan.answers)} recorded answers "
        f"({answer_tokens(plan.answers):,} tokens; {plan.agreement}) and the costs of this machine at "
        f"{plan.costs.context} tokens of context. 95 %: bootstrap over conversations."
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    table.add_column("", overflow="fold")
    for heading in ("nodes", "tau", "speed-up", "95 %", *(("measured", "95 %") if measured else ())):
        table.add_column(heading, justify="right", no_wrap=True)
    lines = [(1.0, Text(PLAIN, style="bold" if plan.best is None else ""), ["1.0", "1.00", "1.00"])]
    for row in shown:
        cells = [number(row.numbers["tree_nodes_per_round"], 1), number(row.numbers["tau"])]
        for numbers in filter(None, (row.numbers, row.measured)):
            cells += [number(numbers["speedup"]), interval(numbers["speedup_interval"])]
        lines.append((row.speedup, Text(row.name, style="bold" if row is plan.best else ""), cells))
    for _, name, cells in sorted(lines, key=lambda line: -line[0]):
        table.add_row(name, *cells)
    Console().print(table)


def print_choice(plan: Plan) -> None:
    """Prints the fastest candidate, its costs, and its recipe line."""
    first = plan.rows[0]
    if plan.best is None:
        print(
            f"Nothing is expected to beat plain decoding here: the best, {first.name}, gives "
            f"{first.speedup:.2f} of its speed. Decode without a drafter, or train it further."
        )
    else:
        shares = first.numbers["time_share"]
        print(
            f"Fastest: {first.name}: {first.numbers['tau']:.2f} tokens a round, which takes "
            f"{first.seconds / plan.costs.plain:.2f} rounds of plain decoding ({shares['draft']:.0%} drafting, "
            f"{shares['verify']:.0%} verifying): {first.speedup:.2f} times as fast."
        )
    print(f"In the recipe:\n\neval:\n  tree: {{{as_yaml(first.tree)}}}\n")


def write_plan(recipe: Recipe, plan: Plan, models: LoadedModels, path: Path) -> None:
    rows = [
        {"name": row.name, "tree": recipe_keys(row.tree)}
        | {"answers": len(row.rounds), "round_milliseconds": round(1e3 * row.seconds, 4)}
        | {key: row.numbers[key] for key in PREDICTED}
        | ({"measured": {key: row.measured[key] for key in MEASURED}} if row.measured else {})
        for row in plan.rows
    ]
    content = {
        "chosen": None if plan.best is None else {"name": plan.best.name, "tree": recipe_keys(plan.best.tree)},
        "target": recipe.target.model,
        "drafter": str(plan.rows[0].contender.drafter),
        **models.made(),
        "answers": {
            "file": str(plan.recording.path),
            "answers": len(plan.answers),
            "tokens": answer_tokens(plan.answers),
            "agreement": plan.agreement,
        },
        "costs": plan.costs.to_dict(),
        "candidates": rows,
        "recipe": dump_recipe(recipe),
    }
    atomic_write(path, json.dumps(content, indent=2) + "\n")
