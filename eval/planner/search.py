"""The planner: which draft trees are expected to be fastest on this machine, and are they? `eval/plan.py` shows it.

Every candidate is replayed along recorded answers (`eval.recorded.replay`), which gives its rounds: tokens, nodes,
draft calls. What such rounds cost is measured here and now (`eval.planner.cost_model`). Both together are the predicted
speed-up over plain decoding, with a bootstrap interval over conversations, widened by how far apart the repeats of the
measurement are.
"""

import heapq
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from draftsmith.eval.decoding.contenders import Contender, Lineup, named
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.measured.benchmarks import PLAIN, Bench, Question
from draftsmith.eval.measured.metrics import summarise, summarise_all
from draftsmith.eval.page.file_shapes import load
from draftsmith.eval.planner.cost_model import Costs, measure_costs, predicted, room_for
from draftsmith.eval.recorded.answers import (
    EVERYONE,
    RecordedAnswer,
    Recording,
    check_answers,
    check_recorded_from,
    drawn_unlike,
    read_answers,
    tokens_of,
)
from draftsmith.eval.recorded.replay import Agreement, plain_rounds, replay_all
from draftsmith.models.chat import load_config, load_tokenizer, tokenizer_fingerprint
from draftsmith.models.checkpoint import config_identity
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.sampling import Sampling
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Policy, Recipe, TreeSection
from draftsmith.recipes.validation import validation_rank

DEFAULT_CANDIDATES = (
    *({"policy": "chain", "nodes": tokens + 1} for tokens in range(1, 9)),
    # nodes, draft calls, top_k: the larger, the deeper and the wider.
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
SWEEPS: dict[Policy, tuple[str, str, tuple[float, ...]]] = {  # section, key, values
    "svip": ("svip", "h", (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8)),
    "svip_tree": ("svip", "h", (0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.55, 0.6, 0.7, 0.8)),
    "ddd": ("ddd", "threshold", (-0.05, -0.1, -0.2, -0.3, -0.45, -0.6, -0.8, -1.0, -1.5, -2.0, -3.0)),
}


@dataclass
class Row:
    """One candidate, and what is expected of it."""

    contender: Contender
    rounds: list[Generation]  # along the recorded answers, with the seconds that they are expected to take
    numbers: dict[str, Any]  # of `metrics.summarise`
    measured: dict[str, Any] = field(default_factory=dict)
    by_repeat: list[float] = field(default_factory=list)  # the speed-up, by each repeat of the measured costs alone

    @property
    def name(self) -> str:
        return self.contender.name

    @property
    def short_name(self) -> str:
        """All candidates of a plan have one drafter: without it."""
        return self.name.removeprefix(f"{self.contender.kind}, ")

    @property
    def tree(self) -> TreeSection:
        return self.contender.tree

    @property
    def speedup(self) -> float:
        return self.numbers["speedup"] or 0.0

    @property
    def as_fast_as_plain(self) -> bool:
        """Does the interval of its speed-up contain 1? Then it cannot be told from plain decoding."""
        low, high = self.numbers["speedup_interval"] or (self.speedup, self.speedup)
        return low <= 1 <= high


@dataclass
class Plan:
    costs: Costs
    rows: list[Row]  # the fastest first
    recording: Recording
    answers: Sequence[RecordedAnswer]
    agreement: str  # how far the recorded answers are the target's own, in words

    @property
    def best(self) -> Row | None:
        """None where nothing is expected to beat plain decoding."""
        return self.rows[0] if self.rows[0].speedup > 1 else None


# What is chosen among.


def candidates_of(recipe: Recipe, asked: TreeSection | None = None) -> list[TreeSection]:
    """eval.planner.candidates, or the default ones.

    Args:
        asked: the section whose policy is `auto` (None: eval.tree); its vocabulary is that of all candidates which name
            none of their own.

    Raises:
        UserError: one that cannot be a candidate.
    """
    trees = list(recipe.eval.planner.candidates) or _defaults()
    problems = []
    for i, tree in enumerate(trees):
        where = f"eval.planner.candidates.{i}"
        if tree.policy == "auto":
            problems.append(f"{where}: auto is what chooses among the candidates; name a policy")
        elif tree in trees[:i]:
            problems.append(f"{where}: stands there twice, first as candidates.{trees.index(tree)}")
        elif tree.draw == "sampled":
            problems.append(f"{where}: which tokens a drawn chain had drafted is not recorded; leave draw out")
    if problems:
        raise UserError(problems)
    asked = asked or recipe.eval.tree
    if asked.policy != "auto" or asked.vocab_size is None:
        return trees
    return [tree if tree.vocab_size else tree.model_copy(update={"vocab_size": asked.vocab_size}) for tree in trees]


def _defaults() -> list[TreeSection]:
    return [TreeSection.model_validate(tree) for tree in DEFAULT_CANDIDATES]


def sweep_of(recipe: Recipe, policy: Policy) -> list[TreeSection]:
    """The recipe's own tree of this policy (eval.tree, a candidate, or the default one) with every threshold."""
    base = next(t for t in (recipe.eval.tree, *recipe.eval.planner.candidates, *_defaults()) if t.policy == policy)
    section, key, values = SWEEPS[policy]
    return [
        base.model_copy(update={section: getattr(base, section).model_copy(update={key: value})}) for value in values
    ]


def contenders_from(recipe: Recipe, base: Contender, trees: Sequence[TreeSection]) -> list[Contender]:
    """Everyone drafts as `base` does, each with a tree of these."""
    counts = recipe.token_counts_path
    return named(
        [
            replace(
                base,
                name="",
                tree=tree,
                place=f"eval.planner.candidates.{i}",
                token_counts=counts if tree.vocab_size is not None else None,
            )
            for i, tree in enumerate(trees)
        ]
    )


# What it is predicted from.


def planner_answers(
    recipe: Recipe, trees: Sequence[TreeSection] | None = None
) -> tuple[Recording, list[RecordedAnswer]]:
    """A file of recorded answers, and at most eval.planner.max_answers of them: of the file that the recipe names,
    spread evenly over it; else of the conversations that training keeps for validation. All is checked that can be
    before weights are loaded.

    Args:
        trees: whose costs are to be measured; None: those of `candidates_of`.

    Raises:
        UserError: there are none, or they are another target's; eval.planner.context is more than the target has.
    """
    section, most = recipe.eval.planner, recipe.eval.planner.max_answers
    with _named("eval.planner.answers"):
        if section.answers is not None:
            recording = read_answers(Path(section.answers))
        else:
            path = recipe.conversations_path
            if not path.exists():
                raise UserError(
                    f"eval.planner.answers: not given, and there are no conversations in {path}; "
                    "data_gen/regenerate.py writes them, or name a generations.jsonl of eval/acceptance.py"
                )
            recording = read_answers(path, only=validation_ids(path, most))
        config = load_config(recipe.target).get_text_config(decoder=True)
        fingerprint = tokenizer_fingerprint(load_tokenizer(recipe.target))
        check_recorded_from(
            recording, config_identity(config, recipe.target.model, recipe.target.revision, fingerprint)
        )
        check_answers(recording, config.vocab_size, config.max_position_embeddings)
        positions: int = config.max_position_embeddings
        _check_context(recipe, candidates_of(recipe) if trees is None else trees, positions)
        answers = [answer for answer in _anyone_s(recording) if len(answer.tokens) > 1]
    if not answers:
        raise UserError(
            f"eval.planner.answers: {recording.path} holds no answer of two tokens or more, and such take no round"
        )
    if len(answers) > most:
        answers = [answers[i * len(answers) // most] for i in range(most)]
    return recording, answers


def _check_context(recipe: Recipe, trees: Sequence[TreeSection], positions: int) -> None:
    """Costs are measured at the context that was asked for, or not at all."""
    context, room = recipe.eval.planner.context, room_for(positions, trees)
    if context is not None and context > room:
        raise UserError(
            f"eval.planner.context: {context:,} tokens, but the target has {positions:,} positions, and the rounds "
            f"that are timed behind the context take {positions - room:,} of them; set it to {room:,} or less"
        )


def _anyone_s(recording: Recording) -> list[RecordedAnswer]:
    """Plain decoding's answers, or the only ones there are, or anyone's greedy ones: those are the same for all."""
    if len(recording.answers) > 1 and not {PLAIN, EVERYONE} & set(recording.answers):
        greedy = [
            answers
            for answers in recording.answers.values()
            if all(answer.sampling is not None and answer.sampling.greedy for answer in answers)
        ]
        if not greedy:
            drawn = any(answer.sampling is not None for answer in recording)
            why = "were drawn, so that no two agree" if drawn else "may have been drawn (no acceptance.json beside it)"
            raise UserError(
                f"eval.answers: {recording.path} holds answers of {', '.join(map(repr, recording.answers))}, which "
                f"{why}, and none of plain decoding; keep its lines of plain decoding, or name another file"
            )
        return max(greedy, key=len)
    return recording.of(PLAIN, PLAIN)


def validation_ids(path: Path, most: int) -> set[str]:
    """Ids of the first conversations that training keeps for validation: those whose hash is lowest."""

    def ids() -> Iterator[str]:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                try:
                    if line.strip() and isinstance(name := load(line).get("id"), str):
                        yield name
                except ValueError as error:
                    raise UserError(f"eval.planner.answers: {path}:{number}: {error}") from None

    return set(heapq.nsmallest(most, ids(), key=validation_rank))


@contextmanager
def _named(key: str) -> Iterator[None]:
    """Replay's messages name its own key of the recipe."""
    try:
        yield
    except UserError as error:
        raise UserError([problem.replace("eval.answers", key) for problem in error.problems]) from error


def drawn_otherwise(recipe: Recipe, answers: Sequence[RecordedAnswer]) -> str | None:
    """What is to be said where the answers were drawn otherwise than the evaluation draws: their tau is another one."""
    said = drawn_unlike(answers, Sampling(recipe.eval.temperature, recipe.eval.top_p, recipe.eval.top_k))
    if said is None:
        return None
    return (
        f"eval.planner.answers were drawn otherwise ({said}) than eval.temperature, top_p and top_k say; tau is "
        "predicted for answers like those"
    )


def mean_context(answers: Sequence[RecordedAnswer]) -> int:
    """Committed tokens of a round, on average over the answers' tokens."""
    summed = sum(len(a.tokens) * (len(a.prompt) + len(a.tokens) / 2) for a in answers)
    return max(1, round(summed / tokens_of(answers)))


# The plan.


def make_plan(
    lineup: Lineup,
    recipe: Recipe,
    contenders: Sequence[Contender],
    recording: Recording,
    answers: Sequence[RecordedAnswer],
) -> Plan:
    """Replays every contender, measures what its rounds cost, and sorts by the speed-up that follows.

    Args:
        contenders: of one drafter, with different trees.
        recording, answers: what `planner_answers` found.

    Raises:
        UserError: the answers are another target's; no room in the target's positions for such trees.
    """
    target, section = lineup.target, recipe.eval.planner
    sampling = Sampling(recipe.eval.temperature, recipe.eval.top_p, recipe.eval.top_k)
    proposers = {contender.name: lineup.proposer(contender, sampling) for contender in contenders}
    agreement = Agreement.of(target)
    with (
        _named("eval.planner.answers"),
        Bar(total=tokens_of(answers) * len(contenders), desc="replay", unit="token", leave=False) as progress,
    ):
        check_recorded_from(recording, lineup.identity)
        rounds = replay_all(target, proposers, answers, recipe.eval.replay_batch_size, agreement, progress.update)

    def proposer_of(tree: TreeSection) -> Proposer:
        return lineup.proposer(replace(contenders[0], tree=tree, token_counts=recipe.token_counts_path), sampling)

    costs = measure_costs(
        target,
        proposer_of,
        [_as_grown(contender.tree, rounds[contender.name]) for contender in contenders],
        [[*answer.prompt, *answer.tokens] for answer in answers],
        section.context or mean_context(answers),
        sampling,
        recipe.eval.batch_size,
    )
    rows = ranked(costs, contenders, rounds, answers, recipe.eval.bootstrap_samples, recipe.eval.seed)
    return Plan(costs, rows, recording, answers, str(agreement))


def _as_grown(tree: TreeSection, rounds: Sequence[Generation]) -> TreeSection:
    """C2T's limit is what its classifier lets pass: costs are measured up to the largest tree that was seen."""
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
    """The fastest first; of equally fast ones the one that was named first.

    Args:
        rounds: of every contender, along `answers`.

    The interval of a speed-up is the bootstrap's over conversations, and wider on either side by as much as the lowest
    and the highest speed-up that single repeats of the measurement give lie beside that of all.
    """
    undrafted = [plain_rounds(answer) for answer in answers]
    plain = predicted(costs, None, undrafted)
    rows = []
    for contender in contenders:
        expected = predicted(costs, contender.tree, rounds[contender.name])
        numbers = summarise(expected, plain, bootstrap_samples, seed, sampled=True)
        by_repeat = [
            _seconds(predicted(one, None, undrafted)) / _seconds(predicted(one, contender.tree, rounds[contender.name]))
            for one in costs.repeats
        ]
        if by_repeat and numbers["speedup_interval"] is not None:
            low, high = numbers["speedup_interval"]
            usual = _seconds(plain) / _seconds(expected)
            widened = low * min(1.0, min(by_repeat) / usual), high * max(1.0, max(by_repeat) / usual)
            numbers["speedup_interval"] = [round(bound, 4) for bound in widened]
        rows.append(Row(contender, expected, numbers, by_repeat=[round(each, 4) for each in by_repeat]))
    return sorted(rows, key=lambda row: -row.speedup)


def measure(lineup: Lineup, recipe: Recipe, plan: Plan, most: int, asked: list[Question], rejects: Rejects) -> None:
    """Decodes the evaluation's prompts by the best rows of the plan, and plainly; fills in their `measured`."""
    target = lineup.target
    sampling = Sampling(recipe.eval.temperature, recipe.eval.top_p, recipe.eval.top_k)
    bench = Bench(
        target,
        lineup.tokenizer,
        lineup.stop_ids,
        recipe.eval.max_new_tokens,
        target.config.max_position_embeddings,
        sampling,
        recipe.eval.seed,
        recipe.eval.batch_size,
    )
    rows = plan.rows[:most]
    proposers: dict[str, Proposer | None] = {row.name: lineup.proposer(row.contender, sampling) for row in rows}
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        results = bench.run(asked, proposers, rows[0].name, nowhere, rejects)
    samples, seed = recipe.eval.bootstrap_samples, recipe.eval.seed
    measured = summarise_all(results, PLAIN, samples, seed, not sampling.greedy)["contenders"]
    for row in rows:
        # What the same rounds should have taken: apart from tau, is the cost model right?
        expected = predicted(plan.costs, row.tree, results[row.name])
        plain = predicted(plan.costs, None, results[PLAIN])
        row.measured = measured[row.name] | {
            "round_in_plain_rounds": in_plain_rounds(results[row.name], results[PLAIN]),
            "predicted_speedup_of_these_rounds": summarise(expected, plain, samples, seed, sampled=True)["speedup"],
        }


def _seconds(generations: Sequence[Generation]) -> float:
    return sum(g.decode_seconds for g in generations)


def round_seconds(generations: Sequence[Generation]) -> float:
    """Mean time of a round."""
    return _seconds(generations) / max(1, sum(g.rounds for g in generations))


def in_plain_rounds(generations: Sequence[Generation], plain: Sequence[Generation]) -> float:
    """Mean time of a round, in rounds of plain decoding."""
    return round(round_seconds(generations) / round_seconds(plain), 4)
