"""The planner's search: predicts which draft trees are fastest on this machine.

Every candidate is replayed along recorded answers (`eval.recorded.replay`), which gives its rounds: tokens, nodes and
draft calls. `eval.planner.measuring` measures the cost of such rounds. Both give the predicted speed-up over plain
decoding, with a bootstrap interval over conversations, widened by the spread of the repeated measurements. After a
first look at all candidates only the fastest are replayed and measured further.
"""

import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from draftsmith.eval.decoding.contenders import Contender, Lineup, check_contenders, named
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.decoding.target_facts import TargetFacts
from draftsmith.eval.measured.benchmarks import PLAIN, Question, decode_all
from draftsmith.eval.measured.metrics import summarise, summarise_all
from draftsmith.eval.planner.cost_model import Costs, family, predicted
from draftsmith.eval.planner.measuring import REPEATS, CostMeter, Samples, room_for
from draftsmith.eval.recorded.answers import (
    EVERYONE,
    RecordedAnswer,
    Recording,
    answer_tokens,
    answers_or_conversations,
    check_answers_before_loading,
    check_recorded_from,
    errors_naming,
    kept_for_validation,
    other_sampling,
    read_answers,
    with_rounds,
    with_their_pictures,
)
from draftsmith.eval.recorded.replay import Agreement, plain_rounds, replay_all
from draftsmith.models.checkpoint import read_drafter_config
from draftsmith.models.prompt import Prompt
from draftsmith.models.quantize import precision_name
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Policy, Recipe, TreeSection

DEFAULT_CANDIDATES = (
    *({"policy": "chain", "nodes": tokens + 1} for tokens in range(1, 9)),
    # nodes, draft calls, top_k: larger trees are deeper and wider.
    *(
        {"policy": "eagle2", "nodes": nodes, "draft_calls": calls, "top_k": top_k}
        for nodes, calls, top_k in (
            *((8, 3, 4), (8, 4, 4), (16, 4, 4), (16, 5, 4), (16, 6, 4), (24, 4, 8), (24, 5, 8), (24, 6, 8)),
            *((32, 4, 8), (32, 5, 8), (32, 6, 8), (48, 5, 10), (48, 6, 10), (48, 7, 10)),
            *((60, 4, 10), (60, 5, 10), (60, 6, 10), (60, 7, 10), (60, 8, 10)),
        )
    ),
    {"policy": "ddd", "nodes": 32},
    {"policy": "ddd", "nodes": 60},
    {"policy": "svip", "draft_calls": 10},
    {"policy": "svip", "draft_calls": 10, "svip": {"h": 0.5}},
    {"policy": "svip_tree", "nodes": 32, "draft_calls": 8, "top_k": 8},
    {"policy": "svip_tree", "nodes": 60, "draft_calls": 8},
)
FIRST_LOOK = 8  # answers along which every candidate is replayed
NEAR = 0.8  # of the highest predicted speed: then trees of other depths are looked at, too
CLOSE = 0.9  # of the highest predicted speed: slower candidates are dropped after the look
SHOWN_ROWS = 5  # of the table; so many are kept in any case
DRAWN = "which tokens were drawn is not recorded; leave draw out"
SVIP_H = (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8)
SWEEPS: dict[Policy, tuple[str, str, tuple[float, ...]]] = {  # section, key, values
    "svip": ("svip", "h", SVIP_H),
    "svip_tree": ("svip", "h", SVIP_H),
    "ddd": ("ddd", "threshold", (-0.05, -0.1, -0.2, -0.3, -0.45, -0.6, -0.8, -1.0, -1.5, -2.0, -3.0)),
}


@dataclass
class Row:
    """One candidate and its prediction."""

    contender: Contender
    rounds: list[Generation]  # along the recorded answers, with predicted seconds
    numbers: dict[str, Any]  # of `metrics.summarise`
    by_repeat: list[float]  # the speed-up from each repeat of the measured costs alone
    measured: dict[str, Any] = field(default_factory=dict)  # if it was also decoded

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def short_name(self) -> str:
        """The name without the drafter, which all candidates of a plan share."""
        return self.name.removeprefix(f"{self.contender.kind}, ")

    @property
    def tree(self) -> TreeSection:
        return self.contender.tree

    @property
    def speedup(self) -> float:
        return self.numbers["speedup"] or 0.0

    @property
    def as_fast_as_plain(self) -> bool:
        """Whether the speed-up's interval contains 1."""
        low, high = self.numbers["speedup_interval"] or (self.speedup, self.speedup)
        return low <= 1 <= high


@dataclass
class Plan:
    costs: Costs
    rows: list[Row]  # the fastest first; those that were only looked at come last
    recording: Recording
    answers: Sequence[RecordedAnswer]
    agreement: str  # `Agreement` of the recorded answers, in words
    effort: str = ""  # what was replayed and measured, and in what time
    left_out: Sequence[str] = ()  # names of candidates that were not even looked at

    @property
    def best(self) -> Row | None:
        """None if no candidate is predicted to beat plain decoding."""
        return self.rows[0] if self.rows[0].speedup > 1 else None


# The candidates.


def candidates_of(recipe: Recipe, asked: TreeSection | None = None) -> list[TreeSection]:
    """eval.planner.candidates, or the default ones.

    Args:
        asked: the section with policy `auto` (None: eval.tree). Its vocab_size is the candidates' default.

    Raises:
        UserError: an impossible candidate.
    """
    trees = list(recipe.eval.planner.candidates) or [TreeSection.model_validate(tree) for tree in DEFAULT_CANDIDATES]
    problems = []
    for i, tree in enumerate(trees):
        where = f"eval.planner.candidates.{i}"
        if tree.policy == "auto":
            problems.append(f"{where}: auto is what chooses among the candidates; name a policy")
        elif tree in trees[:i]:
            problems.append(f"{where}: is given twice, first as candidates.{trees.index(tree)}")
        elif tree.draw == "sampled":
            problems.append(f"{where}: {DRAWN}")
    if problems:
        raise UserError(problems)
    asked = asked or recipe.eval.tree
    cut_to = asked.vocab_size if asked.policy == "auto" else None
    return [tree.model_copy(update={"vocab_size": tree.vocab_size or cut_to}) if cut_to else tree for tree in trees]


def sweep_of(recipe: Recipe, policy: Policy) -> list[TreeSection]:
    """The recipe's own tree of this policy (eval.tree, a candidate, or the default one) with every threshold.

    Raises:
        UserError: its tokens are drawn.
    """
    defaults = (TreeSection.model_validate(tree) for tree in DEFAULT_CANDIDATES)
    base = next(t for t in (recipe.eval.tree, *recipe.eval.planner.candidates, *defaults) if t.policy == policy)
    if base.draw == "sampled":
        raise UserError(f"{policy}'s tree: {DRAWN}")
    section, key, values = SWEEPS[policy]
    return [
        base.model_copy(update={section: getattr(base, section).model_copy(update={key: value})}) for value in values
    ]


def prepared(
    recipe: Recipe, base: Contender, trees: Sequence[TreeSection], plan: bool = False
) -> tuple[list[Contender], Recording, list[RecordedAnswer]]:
    """`base` with each of these trees, named, and `planner_answers`; all checked before weights are loaded.

    Raises:
        UserError: as `check_contenders` (which takes `plan`) and `planner_answers`.
    """
    # First without the trees, so that the drafter's faults are named once.
    check_contenders(recipe, [_with_tree(recipe, base, TreeSection(policy="auto"), base.place)], plan)
    places = (f"eval.planner.candidates.{i}" for i in range(len(trees)))
    contenders = named([_with_tree(recipe, base, tree, place) for tree, place in zip(trees, places, strict=True)])
    check_contenders(recipe, contenders, plan)
    return contenders, *planner_answers(recipe, trees)


def _with_tree(recipe: Recipe, base: Contender, tree: TreeSection, place: str = "") -> Contender:
    counts = recipe.token_counts_path if tree.vocab_size is not None else None
    # Of a router the drafter's own rounds are planned.
    return replace(base, name="", tree=tree, place=place, token_counts=counts, router=None)


# The recorded answers.


def planner_answers(
    recipe: Recipe, trees: Sequence[TreeSection] | None = None
) -> tuple[Recording, list[RecordedAnswer]]:
    """A file of recorded answers, and at most eval.planner.max_answers of them, checked before weights are loaded.

    They are spread evenly over eval.planner.answers, or over the conversations that training keeps for validation.

    Args:
        trees: their costs will be measured; None: those of `candidates_of`.

    Raises:
        UserError: no answers, or another target's; eval.planner.context exceeds the target's positions.
    """
    section, most = recipe.eval.planner, recipe.eval.planner.max_answers
    path = answers_or_conversations(section.answers, recipe, "eval.planner.answers")
    with errors_naming("eval.planner.answers"):
        recording = read_answers(path, only=None if section.answers else kept_for_validation(path, most, of=1))
        target = TargetFacts.read(recipe.target)
        check_answers_before_loading(recording, target)
        room = room_for(target.positions, candidates_of(recipe) if trees is None else trees)
        if section.context is not None and section.context > room:
            raise UserError(
                f"eval.planner.context: {section.context:,} tokens, but the target has {target.positions:,} positions, "
                f"and the rounds that are timed behind the context take {target.positions - room:,} of them; set it to "
                f"{room:,} or less"
            )
        answers = with_rounds(_answers_for_all(recording), path, "eval.planner.answers")
        if len(answers) > most:
            answers = [answers[i * len(answers) // most] for i in range(most)]
        return recording, with_their_pictures(answers, target.tokenizer)


def _answers_for_all(recording: Recording) -> list[RecordedAnswer]:
    """Plain decoding's answers, or the only ones, or a contender's greedy ones, which are the same for all."""
    if len(recording.answers) > 1 and not {PLAIN, EVERYONE} & set(recording.answers):
        greedy = [each for each in recording.answers.values() if all(answer.known_greedy for answer in each)]
        if not greedy:
            drawn = any(answer.sampling is not None for answer in recording)
            why = "were drawn, so no two agree" if drawn else "may have been drawn (no acceptance.json beside it)"
            raise UserError(
                f"eval.answers: {recording.path} holds answers of {', '.join(map(repr, recording.answers))}, which "
                f"{why}, and none of plain decoding; keep its lines of plain decoding, or name another file"
            )
        return max(greedy, key=len)
    return recording.of(PLAIN, PLAIN)


def sampling_note(recipe: Recipe, answers: Sequence[RecordedAnswer]) -> str | None:
    """A note if the answers were sampled with other settings than the evaluation's, because tau then differs."""
    if (settings := other_sampling(answers, Sampling.of(recipe.eval))) is None:
        return None
    return (
        f"eval.planner.answers were drawn with other settings ({settings}) than eval.temperature, top_p and top_k; tau "
        "is predicted for answers like those"
    )


def mean_context(answers: Sequence[RecordedAnswer]) -> int:
    """Mean number of committed tokens before a round."""
    summed = sum(len(a.tokens) * (len(a.prompt) + len(a.tokens) / 2) for a in answers)
    return max(1, round(summed / answer_tokens(answers)))


# The prediction, and the decoding that checks it.


def make_plan(
    lineup: Lineup,
    recipe: Recipe,
    contenders: Sequence[Contender],
    recording: Recording,
    answers: Sequence[RecordedAnswer],
) -> Plan:
    """Replays contenders, measures the cost of their rounds, and sorts by the predicted speed-up.

    The first look replays them along some answers and measures costs once. Of trees that differ in depth alone it takes
    the middle one, and the others if that one is nearly as fast as the fastest. The fastest contenders are replayed
    along the other answers, and their costs measured again, as far as eval.planner.seconds allow.

    Args:
        contenders, recording, answers: from `prepared`.

    Raises:
        UserError: the answers are another target's, or the target has too few positions for such trees.
    """
    target, section, sampling = lineup.target, recipe.eval, Sampling.of(recipe.eval)
    began, agreement, path = time.monotonic(), Agreement.of(target), recipe.planner_costs_path
    some, others = first_look(answers)
    rounds: dict[str, list[Generation]] = {contender.name: [] for contender in contenders}

    def replay(contenders: Sequence[Contender], answers: Sequence[RecordedAnswer]) -> None:
        proposers = {contender.name: lineup.proposer(contender, sampling) for contender in contenders}
        total = answer_tokens(answers) * len(contenders)
        with errors_naming("eval.planner.answers"), Bar(total=total, desc="replay", unit="token", leave=False) as bar:
            found = replay_all(target, proposers, answers, section.replay_batch_size, agreement, bar.update)
        for name, generations in found.items():
            rounds[name] += generations

    def rows_of(costs: Costs, contenders: Sequence[Contender], along: Sequence[RecordedAnswer]) -> list[Row]:
        return ranked(costs, contenders, rounds, along, section.bootstrap_samples, section.seed)

    with errors_naming("eval.planner.answers"):
        check_recorded_from(recording, lineup.identity)
    depths = by_depth(contenders)
    middle = [each[len(each) // 2] for each in depths]
    replay(middle, some)
    calls = {contender.name: sum(sum(g.draft_calls) for g in rounds[contender.name]) for contender in middle}
    seconds_a_call = (time.monotonic() - began) / max(1, sum(calls.values()))
    context = section.planner.context or mean_context(answers)
    key = _machine(lineup), _measured(lineup, recipe, contenders[0], context)
    meter = CostMeter(
        target,
        lambda tree: lineup.proposer(_with_tree(recipe, contenders[0], tree), sampling),
        [_as_grown(contender.tree, rounds[contender.name]) for contender in contenders],
        [Prompt.of(answer.prompt).then(answer.tokens) for answer in answers],
        context,
        sampling,
        section.batch_size,
        Samples.read(path, *key),
    )
    meter.measure(meter.trees, 1)
    costs = meter.costs(first=1)  # however many repeats the file has
    if costs.busy:  # one repeat then says too little
        meter.measure(meter.trees, 2)
        costs = meter.costs()
    looked = rows_of(costs, middle, some)
    worth = [row.contender for row in looked if row.speedup >= NEAR * looked[0].speedup]
    deeper = [each for group in depths if group[len(group) // 2] in worth for each in group if each not in middle]
    if deeper:
        replay(deeper, some)
        looked = rows_of(costs, [*middle, *deeper], some)
    best = [row.contender for row in looked]
    now = time.monotonic()
    left = max(began + section.planner.seconds - now, section.planner.seconds / 3)  # a look alone says too little
    if others:
        close = sum(row.speedup >= CLOSE * looked[0].speedup for row in looked)
        # Half of the time that is left is for the replay, the other half for measuring.
        takes = [seconds_a_call * sum(sum(g.draft_calls) for g in rounds[each.name]) for each in best]
        within = np.cumsum(takes) * len(others) / len(some) <= left / 2
        best = best[: max(1, min(int(within.sum()), max(close, SHOWN_ROWS)))]
        replay(best, others)
    meter.measure([contender.tree for contender in best], REPEATS, now + left)
    costs = meter.costs()
    if meter.measured and not costs.busy:
        meter.samples.keep(path, *key)
    rows = rows_of(costs, best, [*some, *others])
    rest = rows_of(costs, [row.contender for row in looked if row.contender not in best], some)
    along = f"{len(best)} of {len(contenders)} candidates along all {len(answers)} answers"
    effort = (
        f"Planned in {time.monotonic() - began:.0f} s: {along}"
        + (f", {len(rest)} along {len(some)}" if rest else "")
        + (f"; costs of {meter.known} of {len(meter.probes)} probes were in {path}" if meter.known else "")
    )
    left_out = [contender.name for contender in contenders if not rounds[contender.name]]
    return Plan(costs, [*rows, *rest], recording, answers, str(agreement), effort, left_out)


def by_depth(contenders: Sequence[Contender]) -> list[list[Contender]]:
    """Groups of EAGLE-2 trees that differ in draft calls alone, from few calls to many; any other is a group."""
    groups: dict[str, list[Contender]] = {}
    for contender in contenders:
        tree = contender.tree
        key = tree.model_dump_json(exclude={"draft_calls"} if tree.policy == "eagle2" else None)
        groups.setdefault(key, []).append(contender)
    return [sorted(group, key=lambda contender: contender.tree.calls) for group in groups.values()]


def first_look(answers: Sequence[RecordedAnswer]) -> tuple[list[RecordedAnswer], list[RecordedAnswer]]:
    """(answers for all candidates, answers for the fastest ones): a quarter, evenly spread, and the rest."""
    count = max(FIRST_LOOK, len(answers) // 4)
    if 2 * count > len(answers):
        return list(answers), []
    first = {i * len(answers) // count for i in range(count)}
    return [answers[i] for i in sorted(first)], [each for i, each in enumerate(answers) if i not in first]


def _machine(lineup: Lineup) -> dict[str, Any]:
    """What all costs depend on."""
    about = lineup.made()
    made = about["made"]
    return {"device": about["device"], "dtype": about["dtype"]} | {
        key: made[key] for key in ("hardware", "versions", "commit")
    }


def _measured(lineup: Lineup, recipe: Recipe, contender: Contender, context: int) -> dict[str, Any]:
    """What costs depend on beside the machine and the probe. A drafter's shape does, its weights do not."""
    shape = None if contender.drafter is None else read_drafter_config(contender.drafter)[0]
    found = {
        "target": lineup.identity,
        "precision": precision_name(contender.quantization),
        "proposer": contender.proposer,
        "drafter": None if shape is None else {"kind": shape.kind, **shape.to_dict()},
        "draft_model": None if contender.draft_model is None else contender.draft_model.model_dump(mode="json"),
        "context": context,
        "rows": recipe.eval.batch_size,
        "greedy": Sampling.of(recipe.eval).greedy,
    }
    return json.loads(json.dumps(found))  # as a file returns it


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
    bootstrap_samples: int,
    seed: int,
) -> list[Row]:
    """Predictions, the fastest first; ties keep the given order.

    Args:
        rounds: of every contender, along `answers`.

    A speed-up's interval is the bootstrap's over conversations. Each bound is widened by the ratio of the lowest or
    highest speed-up of a single repeat to that of all repeats.
    """
    undrafted = [plain_rounds(answer) for answer in answers]
    rows = []
    for contender in contenders:

        def both(costs: Costs, contender: Contender = contender) -> tuple[list[Generation], list[Generation]]:
            return predicted(costs, contender.tree, rounds[contender.name]), predicted(costs, None, undrafted)

        expected, plain = both(costs)
        numbers = summarise(expected, plain, bootstrap_samples, seed, sampled=True)
        by_repeat = [_speedup(*both(one)) for one in costs.repeats if family(contender.tree) in one.draft]
        if by_repeat and numbers["speedup_interval"] is not None:
            low, high = numbers["speedup_interval"]
            usual = _speedup(expected, plain)
            widened = low * min(1.0, min(by_repeat) / usual), high * max(1.0, max(by_repeat) / usual)
            numbers["speedup_interval"] = [round(bound, 4) for bound in widened]
        rows.append(Row(contender, expected, numbers, [round(each, 4) for each in by_repeat]))
    return sorted(rows, key=lambda row: -row.speedup)


def measure(lineup: Lineup, recipe: Recipe, plan: Plan, most: int, asked: list[Question], rejects: Rejects) -> None:
    """Decodes the evaluation's prompts with the plan's best rows and plainly, and fills in their `measured`."""
    rows = plan.rows[:most]
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        results = decode_all(lineup, recipe, [row.contender for row in rows], asked, nowhere, rejects)
    settings = recipe.eval.bootstrap_samples, recipe.eval.seed
    measured = summarise_all(results, PLAIN, *settings, sampled=recipe.eval.temperature > 0)["contenders"]
    plain = predicted(plan.costs, None, results[PLAIN])
    for row in rows:
        decoded = results[row.name]
        # The predicted time of the decoded rounds checks the cost model apart from errors in tau.
        expected = predicted(plan.costs, row.tree, decoded)
        row.measured = measured[row.name] | {
            "round_in_plain_rounds": round(round_seconds(decoded) / round_seconds(results[PLAIN]), 4),
            "predicted_speedup_of_these_rounds": summarise(expected, plain, *settings, sampled=True)["speedup"],
        }


def _speedup(generations: Sequence[Generation], plain: Sequence[Generation]) -> float:
    """Of the same answers."""
    return sum(g.decode_seconds for g in plain) / sum(g.decode_seconds for g in generations)


def round_seconds(generations: Sequence[Generation]) -> float:
    """Mean time of a round."""
    return sum(g.decode_seconds for g in generations) / max(1, sum(g.rounds for g in generations))
