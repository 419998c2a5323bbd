"""Chooses how draft trees grow on this machine, behind eval/plan.py: prints what `eval.planner` finds."""

import json
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.eval.decoding.contenders import Contender, Lineup, check_contenders, main_contender
from draftsmith.eval.measured.benchmarks import PLAIN, Question, load_questions
from draftsmith.eval.planner.cost_model import DISAGREEING, REPEATS, Costs, probe_trees
from draftsmith.eval.planner.search import (
    SWEEPS,
    Plan,
    Row,
    candidates_of,
    contenders_from,
    drawn_otherwise,
    make_plan,
    mean_context,
    measure,
    planner_answers,
    round_seconds,
    sweep_of,
)
from draftsmith.eval.recorded.answers import RecordedAnswer, Recording, tokens_of
from draftsmith.models.checkpoint import provenance
from draftsmith.models.costs import hardware
from draftsmith.models.target import Target
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import CHAINS, Policy, Recipe, TreeSection

# What plan.json says of a candidate, and of one that was measured; `eval.measured.metrics` says what it means.
SHOWN = (
    *("tau", "tau_interval", "tree_nodes_per_round", "draft_calls_per_round", "wasted_nodes_per_round"),
    *("speedup", "speedup_interval"),
)
MEASURED = ("matches_target", "round_in_plain_rounds", "predicted_speedup_of_these_rounds")


def main(command: Command) -> None:
    recipe = command.recipe
    base = main_contender(recipe)
    trees = sweep_of(recipe, command.calibrate) if command.calibrate else candidates_of(recipe)
    contenders = contenders_from(recipe, base, trees)
    yet_to_train = command.plan and recipe.eval.drafter is None and not recipe.drafter_dir.exists()
    check_contenders(recipe, contenders, recipe.drafter_dir if yet_to_train else None)
    recording, answers = planner_answers(recipe, trees)
    if note := drawn_otherwise(recipe, answers):
        print(f"note: {note}")
    asked: list[Question] = []
    rejects = Rejects()
    if command.measure:
        if recipe.eval.prompts is None:
            raise UserError("--measure decodes eval.prompts, which is not given; name a prompt file, or stdlib:heldout")
        asked = load_questions(recipe.eval.prompts, rejects, recipe.eval.max_prompts, recipe.eval.turns == "first")
    out = recipe.eval_out / ("calibration.json" if command.calibrate else "plan.json")
    if command.plan:
        print_plan(recipe, contenders, recording, answers, command.measure, len(asked), out)
        return
    lineup = Lineup(recipe.target)
    plan = make_plan(lineup, recipe, contenders, recording, answers)
    print_costs(plan.costs)
    if command.calibrate:
        print_sweep(plan, command.calibrate)
    else:
        print_candidates(plan)
    if command.measure:
        measure(lineup, recipe, plan, command.measure, asked, rejects)
        print_measured(plan)
    print_choice(plan)
    write_plan(recipe, plan, lineup.target, out)
    print(f"written: {out}")


def choose_tree(lineup: Lineup, recipe: Recipe, contender: Contender) -> TreeSection:
    """What `policy: auto` of a contender stands for: the tree that is expected to be fastest here. Prints it, and why.

    Where nothing is expected to beat plain decoding that is said, and the best of the trees is returned all the same.

    Raises:
        UserError: no recorded answers, or another target's; candidates that cannot be.
    """
    trees = candidates_of(recipe, contender.tree)
    contenders = contenders_from(recipe, contender, trees)
    check_contenders(recipe, contenders)
    recording, answers = planner_answers(recipe, trees)
    if note := drawn_otherwise(recipe, answers):
        print(f"note: {note}")
    plan = make_plan(lineup, recipe, contenders, recording, answers)
    print_candidates(plan, most=5)
    print_noise(plan.costs)
    print_choice(plan)
    return plan.rows[0].tree


# What is told.


def print_plan(
    recipe: Recipe,
    contenders: Sequence[Contender],
    recording: Recording,
    answers: Sequence[RecordedAnswer],
    most: int,
    prompts: int,
    out: Path,
) -> None:
    trees = [contender.tree for contender in contenders]
    print(f"candidates   {len(contenders)}: {'; '.join(contender.name for contender in contenders)}")
    print(f"replays      {len(answers)} answers, {tokens_of(answers):,} tokens, from {recording.path}")
    print(
        f"measures     the costs of a round by {1 + len(probe_trees(trees))} probes, "
        f"{recipe.eval.planner.context or mean_context(answers)} tokens of context"
    )
    if most:
        print(f"decodes      {prompts} prompts plainly and by the best {min(most, len(contenders))} candidates")
    print(
        f"time         progress bars show the rate and what is left; the probes run {1 + REPEATS} times, and after the "
        "first\n             it is said how long the others take"
    )
    print(f"writes       {out}")


def print_costs(costs: Costs) -> None:
    """Milliseconds, and multiples of a plain round."""

    def cell(seconds: float) -> str:
        return f"{1e3 * seconds:.2f} ({seconds / costs.plain:.2f})"

    side_by_side = f", {costs.rows} answers at a time" if costs.rows > 1 else ""
    caption = (
        f"Milliseconds at {costs.context} tokens of context{side_by_side}; in brackets, in rounds of plain decoding "
        f"({1e3 * costs.plain:.2f} ms)."
    )
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="Costs of a round", caption=caption, caption_justify="left"
    )
    for heading in ("target over n nodes", "of a chain", "of a tree"):
        table.add_column(heading, justify="right", no_wrap=True)
    seconds = {shape: dict(curve.points) for shape, curve in costs.verify.items()}
    for nodes in sorted(set().union(*seconds.values())):
        cells = [cell(seconds[shape][nodes]) if nodes in seconds.get(shape, {}) else "" for shape in ("chain", "tree")]
        table.add_row(f"{nodes:g}", *cells)
    Console().print(table)
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, caption="The first call reads what was committed.", caption_justify="left"
    )
    table.add_column("drafting", overflow="fold")
    for heading in ("first call", "each further", "up to"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, curve in costs.draft.items():
        (fewest, first), (most, last) = curve.points[0], curve.points[-1]
        further = cell((last - first) / (most - fewest)) if most > fewest else ""
        table.add_row(Text(name), cell(first), further, f"{most:g} calls")
    Console().print(table)
    print_noise(costs)


def print_noise(costs: Costs) -> None:
    """What there is to be said of how well the costs are known."""
    if noisy := costs.disagreeing:
        name, (low, high) = next(iter(noisy.items()))
        print(
            f"note: repeats of {len(noisy)} of {len(costs.probes)} probes are more than {DISAGREEING:.0%} apart; "
            f"farthest {name}: {low:.2f} to {high:.2f} plain rounds. Intervals are the wider; plan again while it is "
            "quiet"
        )
    if costs.busy:
        low, high = (1e3 * seconds for seconds in costs.plain_spread)
        print(
            f"note: something else uses this machine: half of the plain rounds took {low:.2f} to {high:.2f} ms, the "
            "others less or more. Plan again while it is quiet"
        )


def print_candidates(plan: Plan, most: int | None = None) -> None:
    """By predicted speed-up; `most`: no more than so many."""
    tokens, shown = tokens_of(plan.answers), plan.rows[:most]
    caption = (
        f"Predicted from {len(plan.answers)} recorded answers ({tokens:,} tokens; {plan.agreement}) and the costs of "
        "this machine. tau: tokens per verification, the bonus token included. ms: of a round. 95 %: bootstrap over "
        "conversations; of speed-ups widened by how far apart the repeats of the measured costs are."
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    table.add_column("", overflow="fold")
    for heading in ("nodes", "calls", "tau", "95 %", "ms", "speed-up", "95 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    lines = [
        (row.speedup, Text(row.short_name, style="bold" if row is plan.best else ""), _cells(row)) for row in shown
    ]
    plain = ("1.0", "0.0", "1.00", "", f"{1e3 * plan.costs.plain:.2f}", "1.00", "")
    lines.append((1.0, Text(PLAIN, style="bold" if plan.best is None else ""), plain))
    for _, name, cells in sorted(lines, key=lambda line: -line[0]):
        table.add_row(name, *cells)
    Console().print(table)


def _cells(row: Row) -> tuple[str, ...]:
    n = row.numbers
    return (
        f"{n['tree_nodes_per_round']:.1f}",
        f"{n['draft_calls_per_round']:.1f}",
        f"{n['tau']:.2f}",
        _interval(n["tau_interval"]),
        f"{1e3 * round_seconds(row.rounds):.2f}",
        f"{row.speedup:.2f}",
        _interval(n["speedup_interval"]),
    )


def print_sweep(plan: Plan, policy: Policy) -> None:
    """In the order of the threshold."""
    section, key, _ = SWEEPS[policy]
    rows = sorted(plan.rows, key=lambda row: getattr(getattr(row.tree, section), key))
    caption = (
        f"{plan.rows[0].tree.policy}, predicted from {len(plan.answers)} recorded answers. wasted: nodes of "
        "a round that were drafted and verified for nothing."
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=caption, caption_justify="left")
    for heading in (key, "nodes", "wasted", "calls", "tau", "95 %", "speed-up", "95 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in rows:
        value = getattr(getattr(row.tree, section), key)
        nodes, *others = _cells(row)
        del others[3]  # milliseconds
        cells = (f"{value:g}", nodes, f"{row.numbers['wasted_nodes_per_round']:.1f}", *others)
        table.add_row(*cells, style="bold" if row is plan.rows[0] else "")
    Console().print(table)


def print_measured(plan: Plan) -> None:
    """Prediction against measurement."""
    caption = (
        "Predicted > measured on eval.prompts, where plain decoding took its turn. round: its time in rounds of plain "
        "decoding. costs alone: the speed-up predicted for the rounds that were measured, so that tau cannot err."
    )
    table = Table(
        box=box.SIMPLE_HEAD,
        pad_edge=False,
        title="Prediction against measurement",
        caption=caption,
        caption_justify="left",
    )
    table.add_column("", overflow="fold")
    for heading in ("tau", "round", "costs alone", "speed-up", "95 %"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in plan.rows:
        if not (m := row.measured):
            continue
        table.add_row(
            Text(row.short_name),
            f"{row.numbers['tau']:.2f} > {m['tau']:.2f}",
            f"{round_seconds(row.rounds) / plan.costs.plain:.2f} > {m['round_in_plain_rounds']:.2f}",
            f"{m['predicted_speedup_of_these_rounds']:.2f} > {m['speedup']:.2f}",
            f"{row.speedup:.2f} > {m['speedup']:.2f}",
            _interval(m["speedup_interval"]),
        )
    Console().print(table)


def _interval(bounds: list[float] | None) -> str:
    return "-" if bounds is None else f"{bounds[0]:.2f}-{bounds[1]:.2f}"


def print_choice(plan: Plan) -> None:
    """The fastest, why it is, and the line of a recipe that says so."""
    first = plan.rows[0]
    if first.as_fast_as_plain:
        print(
            f"Not clearly faster than plain decoding: the best, {first.short_name}, gives {first.speedup:.2f} of its "
            f"speed, and {_interval(first.numbers['speedup_interval'])} is what this prediction leaves open. Measure "
            "it (--measure), or plan from more answers (eval.planner.max_answers) while the machine is quiet."
        )
    elif plan.best is None:
        print(
            f"Nothing is expected to beat plain decoding here: the best, {first.short_name}, gives "
            f"{first.speedup:.2f} of its speed. Decode without a drafter, or train it further."
        )
    else:
        draft, verify, rest = shares(first)
        print(
            f"Fastest: {first.short_name}: {first.numbers['tau']:.2f} tokens a round, which takes "
            f"{round_seconds(first.rounds) / plan.costs.plain:.2f} rounds of plain decoding ({draft:.0%} drafting, "
            f"{verify:.0%} verifying, {rest:.0%} else): {first.speedup:.2f} times as fast."
        )
    print(f"In the recipe:\n\neval:\n  tree: {line_of(first.tree)}\n")


def shares(row: Row) -> tuple[float, float, float]:
    """Of drafting, verifying and the rest in a row's expected time."""
    total = sum(g.decode_seconds for g in row.rounds)
    draft, verify = sum(g.draft_seconds for g in row.rounds) / total, sum(g.verify_seconds for g in row.rounds) / total
    return draft, verify, 1 - draft - verify


def line_of(tree: TreeSection) -> str:
    """The section on one line of YAML: what differs from the defaults, policy and sizes in any case."""
    return yaml.safe_dump(lean(tree), default_flow_style=True, sort_keys=False, width=10_000).strip()


def lean(tree: TreeSection) -> dict[str, Any]:
    """What a recipe has to say to mean this tree."""
    said = tree.model_dump(exclude_defaults=True)
    sizes: dict[str, Any] = {"policy": tree.policy}
    if tree.policy in CHAINS:
        sizes["nodes"] = tree.most
    elif tree.policy not in ("static", "c2t"):
        sizes |= {"nodes": tree.most, "draft_calls": tree.calls, "top_k": tree.width}
    said = (
        {key: value for key, value in said.items() if key not in ("nodes", "draft_calls")}
        if sizes.get("nodes")
        else said
    )
    return sizes | {key: value for key, value in said.items() if key not in sizes}


def write_plan(recipe: Recipe, plan: Plan, target: Target, path: Path) -> None:
    """plan.json, whole or not there."""
    rows = [
        {"name": row.name, "tree": lean(row.tree)}
        | {"round_milliseconds": round(1e3 * round_seconds(row.rounds), 4)}
        | {key: row.numbers[key] for key in SHOWN}
        | {"speedup_by_repeat": row.by_repeat, "as_fast_as_plain": row.as_fast_as_plain}
        | ({"measured": {key: row.measured[key] for key in (*SHOWN, *MEASURED)}} if row.measured else {})
        for row in plan.rows
    ]
    now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    content = {
        "chosen": None if plan.best is None else {"name": plan.best.name, "tree": lean(plan.best.tree)},
        "target": recipe.target.model,
        "drafter": str(plan.rows[0].contender.drafter),
        "device": str(target.device),
        "dtype": str(target.dtype).removeprefix("torch."),
        "made": provenance({}) | {"date": now, "hardware": hardware(target.device)},
        "answers": {
            "file": str(plan.recording.path),
            "answers": len(plan.answers),
            "tokens": tokens_of(plan.answers),
            "agreement": plan.agreement,
        },
        "costs": plan.costs.to_dict(),
        "candidates": rows,
        "recipe": dump_recipe(recipe),
    }
    atomic_write(path, json.dumps(content, indent=2) + "\n")
