"""The planner's search: predicts which draft trees are fastest on this machine.

Every candidate is replayed along recorded answers (`eval.replay.replay`), which gives its rounds: tokens, nodes and
draft calls. `eval.planner.round_costs` measures the cost of such rounds. Both give the speed-up over plain decoding.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import yaml

from draftsmith.eval.decoding.contenders import Contender, check_contenders, loaded_proposer
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measurement.benchmarks import PLAIN, Question, decode_all
from draftsmith.eval.measurement.metrics import summarise, summarise_all
from draftsmith.eval.planner.round_costs import Costs, keep_known, measure_costs, predicted, read_known, room_for
from draftsmith.eval.replay.recorded_answers import (
    RecordedAnswer,
    Recording,
    answer_tokens,
    answers_or_conversations,
    check_answers_before_loading,
    check_recorded_from,
    errors_naming,
    kept_for_validation,
    read_answers,
    with_rounds,
    with_their_pictures,
)
from draftsmith.eval.replay.replay import Agreement, plain_rounds, replay_all
from draftsmith.models.checkpoint import read_drafter_config
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.quantize import precision_name
from draftsmith.models.sampling import Sampling
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import TreeSection

DEFAULT_CANDIDATES = (
    *({"policy": "chain", "nodes": tokens + 1} for tokens in range(1, 9)),
    # Larger trees are deeper and wider.
    *(
        {"policy": "eagle2", "nodes": nodes, "draft_calls": calls, "top_k": top_k}
        for nodes, fewest, most, top_k in (
            *((8, 3, 4, 4), (16, 4, 6, 4), (24, 4, 6, 8)),
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


@dataclass
class Row:
    """One candidate and its prediction."""

    contender: Contender
    rounds: list[Generation]  # along the recorded answers, with predicted seconds
    numbers: dict[str, Any]  # of `metrics.summarise`
    measured: dict[str, Any] = field(default_factory=dict)  # if it was also decoded

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def tree(self) -> TreeSection:
        return self.contender.tree

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
    path = answers_or_conversations(section.answers, recipe, "eval.planner.answers")
    with errors_naming("eval.planner.answers"):
        recording = read_answers(path, only=None if section.answers else kept_for_validation(path, most, of=1))
        check_answers_before_loading(recording, files)
        room_for(files.positions, trees)  # checks that there is some
        answers = with_rounds(recording.of(PLAIN, PLAIN), path, "eval.planner.answers")
        if len(answers) > most:
            answers = [answers[i * len(answers) // most] for i in range(most)]
        return contenders, recording, with_their_pictures(answers, files.tokenizer)


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
            check_recorded_from(recording, models.identity)
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
        "precision": precision_name(contender.quantization),
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
        row.measured = measured[row.name]
