"""Plans which draft trees are fastest on this machine, behind eval/plan_tree.py and `policy: auto`.

Every candidate is replayed along recorded answers (`eval.replay.replay`), which gives its rounds: tokens, nodes and
draft calls. `eval.planner.round_costs` measures the cost of such rounds. Both give the speed-up over plain decoding.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from draftsmith.eval.decoding.contenders import Contender, check_contenders, loaded_proposer, main_contender
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measurement.benchmarks import PLAIN, Question, decode_all, recipe_questions
from draftsmith.eval.measurement.metrics import summarise, summarise_all
from draftsmith.eval.planner.round_costs import Costs, keep_known, measure_costs, predicted, read_known, room_for
from draftsmith.eval.replay import recorded_answers
from draftsmith.eval.replay.recorded_answers import RecordedAnswer, Recording, answer_tokens, errors_naming
from draftsmith.eval.replay.replay import Agreement, plain_rounds, replay_all
from draftsmith.eval.report_page.summary import interval, number
from draftsmith.models.checkpoint import read_drafter_config
from draftsmith.models.formats.named_drafters import with_measured_drafters
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.sampling import Sampling
from draftsmith.models.target import device_name
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import TreeSection

DEFAULT_CANDIDATES = (
    *({"policy": "chain", "nodes": tokens + 1} for tokens in range(1, 9)),
    # Larger trees are deeper and wider.
    *(
        {"policy": "eagle2", "nodes": nodes, "draft_calls": calls, "top_k": top_k}
        for nodes, fewest, most, top_k in (
            *((6, 2, 3, 4), (8, 3, 4, 4), (16, 4, 6, 4), (24, 4, 6, 8)),
            *((32, 4, 6, 8), (48, 5, 7, 10), (60, 4, 8, 10)),
        )
        for calls in range(fewest, most + 1)
    ),
    {"policy": "ddd", "nodes": 32},
    {"policy": "ddd", "nodes": 60},
    {"policy": "svip", "draft_calls": 10},
    {"policy": "svip", "draft_calls": 10, "svip": {"h": 0.5}},
    {"policy": "svip_tree", "nodes": 32, "draft_calls": 8, "top_k": 8},
    {"policy": "svip_tree", "nodes": 60, "draft_calls": 8},
)
LOOK = 8  # answers that are replayed before slow candidates are dropped
CLOSE = 0.9  # of the highest predicted speed: slower candidates are dropped
SHOWN_ROWS = 5  # of the table; so many are kept in any case
# plan.json's keys of a candidate and of a measured one; `eval.measurement.metrics` defines them.
PREDICTED = (
    *("tau", "tau_interval", "tree_nodes_per_round", "draft_calls_per_round", "wasted_nodes_per_round"),
    *("speedup", "speedup_interval"),
)
MEASURED = (*PREDICTED, "matches_target")


@dataclass
class Row:
    """One candidate and its prediction."""

    contender: Contender
    rounds: list[Generation]  # along the recorded answers, with predicted seconds
    numbers: dict[str, Any]  # of `metrics.summarise`
    measured: dict[str, Any] = field(default_factory=dict)  # if it was also decoded

    @property
    def speedup(self) -> float:
        return self.numbers["speedup"] or 0.0

    @property
    def seconds(self) -> float:
        """Mean time of a round."""
        return sum(g.decode_seconds for g in self.rounds) / max(1, sum(g.rounds for g in self.rounds))


@dataclass
class Plan:
    costs: Costs
    rows: list[Row]  # the fastest first; those that were dropped come last
    recording: Recording
    answers: Sequence[RecordedAnswer]  # along which the fastest were replayed
    agreement: str  # `Agreement` of the recorded answers, in words
    effort: str = ""  # what was replayed and measured, and in what time

    @property
    def best(self) -> Row | None:
        """None if no candidate is predicted to beat plain decoding."""
        return self.rows[0] if self.rows[0].speedup > 1 else None


def candidates_of(recipe: Recipe, asked: TreeSection | None = None) -> list[TreeSection]:
    """eval.planner.candidates, or the default ones.

    Args:
        asked: the section with policy `auto` (None: eval.tree). Its vocab_size is the candidates' default.

    Raises:
        UserError: an impossible candidate.
    """
    trees = recipe.eval.planner.candidates or [TreeSection.model_validate(tree) for tree in DEFAULT_CANDIDATES]
    problems = []
    for i, tree in enumerate(trees):
        where = f"eval.planner.candidates.{i}"
        if tree.policy == "auto":
            problems.append(f"{where}: auto is what chooses among the candidates; name a policy")
        elif tree in trees[:i]:
            problems.append(f"{where}: is given twice, first as candidates.{trees.index(tree)}")
        elif tree.draw == "sampled":
            problems.append(f"{where}: which tokens were drawn is not recorded; leave draw out")
    if problems:
        raise UserError(problems)
    asked = asked or recipe.eval.tree
    cut_to = asked.vocab_size if asked.policy == "auto" else None
    return [tree.model_copy(update={"vocab_size": tree.vocab_size or cut_to}) if cut_to else tree for tree in trees]


def recipe_keys(tree: TreeSection) -> dict[str, Any]:
    """The keys that define the tree in a recipe."""
    return tree.model_dump(mode="json", include={"policy", *tree.changed_keys})


def as_yaml(tree: TreeSection) -> str:
    """These keys as a recipe writes them; a candidate's name."""
    flow = yaml.safe_dump(recipe_keys(tree), default_flow_style=True, sort_keys=False, width=10_000)
    return flow.strip()[1:-1]


def prepared(
    recipe: Recipe, files: TargetFiles, base: Contender, trees: Sequence[TreeSection], plan: bool = False
) -> tuple[list[Contender], Recording, list[RecordedAnswer]]:
    """(`base` with each of these trees, named; the file of recorded answers; at most eval.planner.max_answers of them).

    The answers are spread evenly over eval.planner.answers, or over the conversations that training keeps for
    validation. All is checked before weights are loaded.

    Raises:
        UserError: as `check_contenders` (which takes `plan`); no answers, or another target's; trees too deep for the
            target's positions.
    """
    # First without the trees, so that the drafter's faults are named once.
    base = replace(base, name="", tree=TreeSection(policy="auto"), router=None)  # its own rounds are planned
    check_contenders(recipe, files, [base], plan)
    contenders = [
        replace(base, name=as_yaml(tree), tree=tree, place=f"eval.planner.candidates.{i}")
        for i, tree in enumerate(trees)
    ]
    check_contenders(recipe, files, contenders, plan)
    section, most = recipe.eval.planner, recipe.eval.planner.max_answers
    path = recorded_answers.answers_or_conversations(section.answers, recipe, "eval.planner.answers")
    with errors_naming("eval.planner.answers"):
        only = None if section.answers else recorded_answers.kept_for_validation(path, most, of=1)
        recording = recorded_answers.read_answers(path, only=only)
        recorded_answers.check_answers_before_loading(recording, files)
        room_for(files.positions, trees)  # checks that there is some
        answers = recorded_answers.with_rounds(recording.of(PLAIN, PLAIN), path, "eval.planner.answers")
        if len(answers) > most:
            answers = [answers[i * len(answers) // most] for i in range(most)]
        return contenders, recording, recorded_answers.with_their_pictures(answers, files.tokenizer)


def mean_context(answers: Sequence[RecordedAnswer]) -> int:
    """Mean number of committed tokens before a round."""
    summed = sum(len(a.tokens) * (len(a.prompt) + len(a.tokens) / 2) for a in answers)
    return max(1, round(summed / answer_tokens(answers)))


def make_plan(
    models: LoadedModels,
    recipe: Recipe,
    contenders: Sequence[Contender],
    recording: Recording,
    answers: Sequence[RecordedAnswer],
) -> Plan:
    """Replays contenders, measures the cost of their rounds, and sorts by the predicted speed-up.

    All are replayed along the first LOOK answers, and the costs measured. The slow ones are then dropped, and the
    others replayed along the next answers, as far as eval.planner.seconds allow, of which a third is left in any case.

    Args:
        contenders, recording, answers: from `prepared`.

    Raises:
        UserError: the answers are another target's, or the target has too few positions for such trees.
    """
    section, sampling, agreement = recipe.eval, Sampling.of(recipe.eval), Agreement.of(models.target)
    began = time.monotonic()
    deadline = began + section.planner.seconds
    rounds: dict[str, list[Generation]] = {contender.name: [] for contender in contenders}
    seen: list[RecordedAnswer] = []
    kept, costs, rows = list(contenders), None, list[Row]()
    looks = max(1, len(answers) // LOOK)
    for look in range(looks):
        some, start = answers[look::looks], time.monotonic()
        proposers = {contender.name: loaded_proposer(models, contender, sampling) for contender in kept}
        total = answer_tokens(some) * len(kept)
        with errors_naming("eval.planner.answers"), Bar(total=total, desc="replay", unit="token", leave=False) as bar:
            recorded_answers.check_recorded_from(recording, models.identity)
            batch = section.replay_batch_size
            for name, found in replay_all(models.target, proposers, some, batch, agreement, bar.update).items():
                rounds[name] += found
        seen += some
        seconds_each = (time.monotonic() - start) / len(kept)
        if costs is None:
            # A look alone says too little. Half of the time that is left is for measuring.
            deadline = max(deadline, time.monotonic() + section.planner.seconds / 3)
            costs = _costs(models, recipe, contenders, rounds, answers, (time.monotonic() + deadline) / 2)
        rows = ranked(costs, contenders, rounds, seen, section.seed)
        enough = CLOSE * rows[0].speedup
        kept = [row.contender for i, row in enumerate(rows[: len(kept)]) if i < SHOWN_ROWS or row.speedup > enough]
        if time.monotonic() + seconds_each * len(kept) > deadline:
            break
    assert costs is not None
    along = sum(len(row.rounds) == len(seen) for row in rows)
    effort = f"Planned in {time.monotonic() - began:.0f} s: {along} of {len(rows)} candidates along {len(seen)} answers"
    return Plan(costs, rows, recording, seen, str(agreement), effort)


def _costs(
    models: LoadedModels,
    recipe: Recipe,
    contenders: Sequence[Contender],
    rounds: dict[str, list[Generation]],
    answers: Sequence[RecordedAnswer],
    deadline: float,
) -> Costs:
    """The costs of the contenders' rounds, from the file or measured and kept there. `rounds` are each contender's."""
    sampling, path, first = Sampling.of(recipe.eval), recipe.planner_costs_path, contenders[0]
    context = mean_context(answers)
    key = _depend_on(models, recipe, first, context)
    known = read_known(path, key)
    before = len(known)
    costs = measure_costs(
        models.target,
        lambda tree: loaded_proposer(models, replace(first, tree=tree), sampling),
        [_as_grown(contender.tree, rounds[contender.name]) for contender in contenders],
        [[*answer.prompt, *answer.tokens] for answer in answers],
        context,
        sampling,
        recipe.eval.batch_size,
        known,
        deadline,
    )
    if len(known) > before and not costs.busy:
        keep_known(path, key, known)
    return costs


def _depend_on(models: LoadedModels, recipe: Recipe, contender: Contender, context: int) -> str:
    """What costs depend on beside the probe. A drafter's shape does, its weights do not."""
    about = models.made()
    shape = None if contender.drafter is None else read_drafter_config(contender.drafter)[0]
    found = {
        **{key: about[key] for key in ("device", "dtype")},
        **{key: about["made"][key] for key in ("hardware", "versions", "commit")},
        "target": models.identity,
        "proposer": contender.proposer,
        "drafter": None if shape is None else {"kind": shape.kind, **shape.to_dict()},
        "draft_model": None if contender.draft_model is None else contender.draft_model.model_dump(mode="json"),
        "context": context,
        "rows": recipe.eval.batch_size,
        "greedy": Sampling.of(recipe.eval).greedy,
    }
    return json.dumps(found, sort_keys=True)


def _as_grown(tree: TreeSection, rounds: Sequence[Generation]) -> TreeSection:
    """A C2T tree limited to the largest one seen, because its size depends on the classifier."""
    if tree.policy != "c2t":
        return tree
    seen = max((nodes for generation in rounds for nodes in generation.tree_nodes), default=2)
    return tree.model_copy(update={"nodes": max(2, seen)})


def ranked(
    costs: Costs,
    contenders: Sequence[Contender],
    rounds: dict[str, list[Generation]],
    answers: Sequence[RecordedAnswer],
    seed: int,
) -> list[Row]:
    """Predictions, the fastest first. Contenders with rounds along only the first of the `answers` come last."""
    plain = predicted(costs, None, [plain_rounds(answer) for answer in answers])
    rows = []
    for contender in contenders:
        expected = predicted(costs, contender.tree, rounds[contender.name])
        numbers = summarise(expected, plain[: len(expected)], seed, sampled=True)
        rows.append(Row(contender, expected, numbers))
    return sorted(rows, key=lambda row: (-len(row.rounds), -row.speedup))


def measure(
    models: LoadedModels, recipe: Recipe, plan: Plan, most: int, asked: list[Question], rejects: Rejects
) -> None:
    """Decodes the evaluation's prompts with the plan's best rows and plainly, and fills in their `measured`."""
    rows = plan.rows[:most]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        results = decode_all(models, recipe, [row.contender for row in rows], asked, nowhere, rejects)
    measured = summarise_all(results, PLAIN, recipe.eval.seed, sampled=recipe.eval.temperature > 0)["contenders"]
    for row in rows:
        row.measured = measured[row.contender.name]


# The command, and what it prints and writes.


def main(command: Command) -> None:
    recipe = with_measured_drafters(command.recipe, command.plan)
    planned = main_contender(recipe)
    if planned.entry.drafting is None:
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
    return plan.rows[0].contender.tree


def print_result(plan: Plan, recipe: Recipe) -> None:
    """Prints the fastest candidates, notes on their reliability, and the recipe line of the first."""
    if settings := recorded_answers.other_sampling(plan.answers, Sampling.of(recipe.eval)):
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
        lines.append((row.speedup, Text(row.contender.name, style="bold" if row is plan.best else ""), cells))
    for _, name, cells in sorted(lines, key=lambda line: -line[0]):
        table.add_row(name, *cells)
    Console().print(table)


def print_choice(plan: Plan) -> None:
    """Prints the fastest candidate, its costs, and its recipe line."""
    first = plan.rows[0]
    if plan.best is None:
        print(
            f"Nothing is expected to beat plain decoding here: the best, {first.contender.name}, gives "
            f"{first.speedup:.2f} of its speed. Decode without a drafter, or train it further."
        )
    else:
        shares = first.numbers["time_share"]
        print(
            f"Fastest: {first.contender.name}: {first.numbers['tau']:.2f} tokens a round, which takes "
            f"{first.seconds / plan.costs.plain:.2f} rounds of plain decoding ({shares['draft']:.0%} drafting, "
            f"{shares['verify']:.0%} verifying): {first.speedup:.2f} times as fast."
        )
    print(f"In the recipe:\n\neval:\n  tree: {{{as_yaml(first.contender.tree)}}}\n")


def write_plan(recipe: Recipe, plan: Plan, models: LoadedModels, path: Path) -> None:
    rows = [
        {"name": row.contender.name, "tree": recipe_keys(row.contender.tree)}
        | {"answers": len(row.rounds), "round_milliseconds": round(1e3 * row.seconds, 4)}
        | {key: row.numbers[key] for key in PREDICTED}
        | ({"measured": {key: row.measured[key] for key in MEASURED}} if row.measured else {})
        for row in plan.rows
    ]
    content = {
        "chosen": None if plan.best is None else {key: rows[0][key] for key in ("name", "tree")},
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
