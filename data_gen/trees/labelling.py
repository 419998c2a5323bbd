"""Labels the nodes of draft trees, behind data_gen/label_trees.py."""

import hashlib
import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.data_gen.states.shards import file_problem
from draftsmith.data_gen.trees.labelled_trees import ROW_BYTES, Trees, TreesManifest, write_tree_shard
from draftsmith.eval.decoding.contenders import (
    Contender,
    Lineup,
    check_contenders,
    contender_named,
    drafter_record,
    vocab_of,
)
from draftsmith.eval.decoding.decode import Verified, decode
from draftsmith.eval.decoding.policies import Eagle2, PolicyProposer
from draftsmith.eval.decoding.target_facts import TargetFacts, positions_of
from draftsmith.eval.measured.benchmarks import PLAIN
from draftsmith.eval.recorded.answers import (
    RecordedAnswer,
    Recording,
    answer_tokens,
    answers_or_conversations,
    check_answers_before_loading,
    check_recorded_from,
    errors_naming,
    not_trained_on,
    other_sampling,
    read_answers,
    with_rounds,
    with_their_pictures,
)
from draftsmith.eval.recorded.replay import Agreement, RecordedVerifier, read_states
from draftsmith.models.c2t import DEPTH_CONVENTION, differing_keys, node_features
from draftsmith.models.costs import gigabytes
from draftsmith.models.draft_tree import Drafting, DraftTree
from draftsmith.models.formats.named_drafters import with_measured_drafters, yet_to_import
from draftsmith.models.prompt import Prompt
from draftsmith.models.sampling import Sampling
from draftsmith.models.target import Target
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import clear_partial_files
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import output_problem
from draftsmith.recipes.schema import LabelSection, Recipe, TreeSection

NOWHERE = -2  # parent of no node


def main(command: Command) -> None:
    recipe = with_measured_drafters(command.recipe, command.plan)
    check_place(recipe)
    contender = labelled_contender(recipe, command.contender)
    yet_to_train = command.plan and contender.drafter == recipe.drafter_dir and not recipe.drafter_dir.exists()
    drafter_exists = not yet_to_train and not yet_to_import(recipe, contender.drafter)
    with errors_naming("labels.answers"):
        check_contenders(recipe, [contender], command.plan)
        recording, answers = answers_to_label(recipe)
    made_of = made_of_labels(recipe, contender, answers, drafter_exists=drafter_exists)
    directory = recipe.labelled_trees_dir
    with ExitStack() as held:
        if not command.plan:
            TreesManifest.make_folder(directory)
            held.enter_context(alone_in(directory))
            clear_partial_files(directory)
        manifest = trees_so_far(directory, made_of, len(answers))
        if recording.note:
            print(f"note: {recording.note}")
        if said := other_sampling(answers, Sampling.of(recipe.eval)):
            print(
                f"note: labels.answers were drawn with other settings ({said}) than eval.temperature, top_p and top_k. "
                "A node counts as accepted where the answer has its token, so the classifier learns what such answers "
                "accept"
            )
        if command.plan:
            print_labelling_plan(recipe, contender, recording, answers, manifest)
            return
        batches = answer_batches(answers, recipe.labels.batch_size)
        if not remaining(manifest, batches, recipe.labels.max_rows):
            if not manifest.complete:
                manifest.complete = True
                manifest.write(directory)
            print(f"all is labelled: {trees_summary(manifest)}")
            return
        if manifest.shards:
            print(f"{directory}: {manifest.total('answers'):,} of {len(answers):,} answers are done, going on")
        lineup = Lineup(recipe.target)
        with errors_naming("labels.answers"):
            check_recorded_from(recording, lineup.identity)
            label_all(lineup, contender, recipe.labels, batches, manifest, directory)
        print(f"{directory}: {trees_summary(manifest)}")


# Input.


def check_place(recipe: Recipe) -> None:
    """Raises UserError if labels.out cannot be a folder, or if trees are deeper than the target's context."""
    problem = output_problem(recipe.labelled_trees_dir, folder=True)
    problems = [] if problem is None else [f"labels.out: {problem}"]
    calls = recipe.labels.draft_calls
    positions = positions_of(recipe.target)
    if calls >= positions:
        problems.append(
            f"labels.draft_calls: {calls:,} draft calls deep, in a target of {positions:,} positions; lower it"
        )
    if problems:
        raise UserError(problems)


def labelled_contender(recipe: Recipe, name: str | None = None) -> Contender:
    """The contender that drafts, with labels.draft_calls, labels.top_k, and the vocabulary cut of eval.tree.

    Raises UserError for an unknown name or a drafter without distributions.
    """
    contender = contender_named(recipe, name)
    if not contender.has_distributions:
        raise UserError(f"--contender: {contender.proposer} has no distribution to compute P and H from")
    # Labelling verifies no tree. With two nodes, no tree exceeds the target's positions.
    tree = TreeSection(
        policy="eagle2",
        nodes=2,
        draft_calls=recipe.labels.draft_calls,
        top_k=recipe.labels.top_k,
        vocab_size=contender.tree.vocab_size,
    )
    return replace(contender, tree=tree)


def answers_to_label(recipe: Recipe) -> tuple[Recording, list[RecordedAnswer]]:
    """The recorded answers of two tokens or more, in the order of labelling.

    Raises UserError for missing or damaged answers, or answers recorded from another target.
    """
    path = answers_or_conversations(recipe.labels.answers, recipe, "labels.answers")
    only, note = not_trained_on(recipe, path)
    recording = read_answers(path, only=only)
    recording.note = note
    target = TargetFacts.read(recipe.target)
    check_answers_before_loading(recording, target)
    answers = with_their_pictures(recording.of(PLAIN, PLAIN), target.tokenizer)
    return recording, sorted(with_rounds(answers, path, "labels.answers"), key=_rank)


def _rank(answer: RecordedAnswer) -> bytes:
    return hashlib.sha256(json.dumps(["labels", *answer.key]).encode()).digest()


def made_of_labels(
    recipe: Recipe, contender: Contender, answers: Sequence[RecordedAnswer], drafter_exists: bool = True
) -> dict[str, Any]:
    """`TreesManifest.made_of`: everything that determines the rows."""
    section, target = recipe.labels, TargetFacts.read(recipe.target)
    digest = hashlib.sha256()
    for answer in answers:
        prompt = Prompt.of(answer.prompt)
        digest.update(json.dumps([*answer.key, list(prompt), answer.tokens]).encode() + prompt.inserts_digest)
    return {
        "depth_convention": DEPTH_CONVENTION,
        "entropy_over": section.entropy_over,
        "top_k": section.top_k,
        "draft_calls": section.draft_calls,
        "batch_size": section.batch_size,  # changes the last bits of a distribution
        "drafter": drafter_record(contender, vocab_of(contender, target), recipe.target) if drafter_exists else {},
        "target": target.identity | {"dtype": recipe.target.dtype},
        "answers_sha256": digest.hexdigest(),
    }


def trees_so_far(directory: Path, made_of: dict[str, Any], answers: int) -> TreesManifest:
    """The folder's manifest up to the first damaged shard, or a new one. Raises UserError if its settings differ."""
    manifest = TreesManifest.read(directory)
    if manifest is None:
        return TreesManifest(made_of, answers)
    mine = made_of["drafter"]
    theirs = dict.fromkeys(mine) | manifest.made_of.get("drafter", {})  # a missing key counts as a difference
    others = {key: value for key, value in made_of.items() if key != "drafter"}
    different = manifest.differences(others, but=("target.model",))  # a target may be moved
    different += [f"drafter.{key}: {theirs[key]!r} there, {mine[key]!r} now" for key in differing_keys(theirs, mine)]
    if mine:
        manifest.refuse_if(sorted(different), directory)
    for number, entry in list(manifest.shards.items()):
        if file_problem(directory / entry["file"], entry, digest=True):
            print(f"note: {directory}: shard {number} is missing or damaged; labelling continues from there")
            manifest.shards = {n: manifest.shards[n] for n in range(number)}
            manifest.complete = False
            break
    return manifest


def answer_batches(answers: Sequence[RecordedAnswer], batch_size: int) -> list[list[RecordedAnswer]]:
    """Answers that are decoded together. Each batch is a shard, so a resumed run computes the same rows."""
    return [list(answers[start : start + batch_size]) for start in range(0, len(answers), batch_size)]


def remaining(manifest: TreesManifest, batches: Sequence[Sequence[RecordedAnswer]], max_rows: int | None) -> list[int]:
    """Numbers of the batches yet to label. Removes a last shard that an earlier, smaller max_rows cut."""
    if max_rows is not None and manifest.total("rows") >= max_rows:
        return []
    last = len(manifest.shards) - 1
    if last >= 0 and manifest.shards[last]["answers"] < len(batches[last]):
        del manifest.shards[last]
    return list(range(len(manifest.shards), len(batches)))


def print_labelling_plan(
    recipe: Recipe,
    contender: Contender,
    recording: Recording,
    answers: Sequence[RecordedAnswer],
    manifest: TreesManifest,
) -> None:
    section = recipe.labels
    nodes, tokens = section.nodes, answer_tokens(answers)
    most = nodes * (tokens - len(answers))  # one tree for every token except the first
    if section.max_rows is not None:
        most = min(most, section.max_rows + nodes * max(len(answer.tokens) for answer in answers))
    print(f"drafted by   {contender.model}, {nodes:,} nodes a tree ({section.draft_calls} calls, top {section.top_k})")
    print(f"answers      {len(answers):,} recorded in {recording.path}, {tokens:,} tokens")
    print(f"done         {trees_summary(manifest) if manifest.shards else 'nothing yet'}")
    print(f"rows         at most {most:,}, {gigabytes(most * ROW_BYTES)}; divided by tau if a round takes tau tokens")
    print(f"writes       {recipe.labelled_trees_dir}")


def trees_summary(manifest: TreesManifest) -> str:
    answers, rows, trees, accepted, nan, beyond = map(
        manifest.total, ("answers", "rows", "trees", "accepted", "dropped_nan", "dropped_beyond")
    )
    return (
        f"{rows:,} rows of {trees:,} trees along {answers:,} of {manifest.of:,} answers, "
        f"{accepted:,} accepted ({accepted / max(1, trees):.2f} a tree); left out: {nan:,} with NaN, {beyond:,} below "
        "the end of an answer"
    )


# Labelling.


@dataclass
class Labelled:
    """The trees of one answer, root by root."""

    features: list[torch.Tensor] = field(default_factory=list)  # [rows, 3] of each tree
    accepted: list[torch.Tensor] = field(default_factory=list)  # [rows] bool of each tree
    dropped_nan: int = 0
    dropped_beyond: int = 0

    @property
    def rows(self) -> int:
        return sum(map(len, self.accepted))


class LabellingVerifier(RecordedVerifier):
    """Verifies by recorded answers and labels every node. `Eagle2` calls `watch` with the nodes as the tree grows."""

    def __init__(
        self,
        answers: Sequence[RecordedAnswer],
        states_PF: torch.Tensor | None,
        target: Target,
        entropy_over: int,
    ):
        super().__init__(answers, states_PF, target)
        self.entropy_over = entropy_over
        self.watched: list[torch.Tensor] = []  # features [B, b * K, 3] of each call of this round
        self.live = list(range(len(answers)))
        self.labelled = [Labelled() for _ in answers]

    def watch(self, values_BbK: torch.Tensor, log_probs: torch.Tensor, depth: int) -> None:
        self.watched.append(node_features(values_BbK, log_probs, depth, self.entropy_over).flatten(1, 2))

    def accept(self, tree: DraftTree) -> Verified:
        # In the tree's order. The tree lacks the deepest nodes near the target's last position.
        features = torch.cat(self.watched, dim=1)[:, : tree.nodes - 1]
        self.watched = []
        on_path, last_B = self._path(tree)
        real = torch.ones_like(on_path) if tree.real is None else tree.real
        counts = on_path.sum(1).tolist()
        left = [len(answer.tokens) - done for answer, done in zip(self.answers, self.done, strict=True)]
        beyond = torch.zeros_like(on_path)
        if any(count == rest for count, rest in zip(counts, left, strict=True)):
            beyond = self._below(tree, last_B) & torch.tensor(
                [[count == rest] for count, rest in zip(counts, left, strict=True)], device=self.device
            )
        broken = features.isnan().any(-1)
        known = (real & ~beyond)[:, 1:]
        rows = [each.cpu() for each in (features.float(), on_path[:, 1:], known & ~broken)]
        lost = torch.stack(((known & broken).sum(1), (real & beyond).sum(1)), dim=1).tolist()
        for row, index in enumerate(self.live):
            of_row, kept = self.labelled[index], rows[2][row]
            if kept.any():
                of_row.features.append(rows[0][row][kept])
                of_row.accepted.append(rows[1][row][kept])
            of_row.dropped_nan += lost[row][0]
            of_row.dropped_beyond += lost[row][1]
        # The accepted path gives the same round as the tree, without the tree's large ancestor matrix.
        paths = [
            [answer.tokens[done - 1], *answer.tokens[done : done + count]]
            for answer, done, count in zip(self.answers, self.done, counts, strict=True)
        ]
        sizes = [tree.nodes] * tree.rows if tree.sizes is None else tree.sizes.tolist()
        return Verified(super().accept(DraftTree.chains(paths, self.device)).new_tokens, sizes)

    def _path(self, tree: DraftTree) -> tuple[torch.Tensor, torch.Tensor]:
        """(accepted nodes [B, N] bool, last node of the path [B])."""
        end = self.tokens.shape[1] - 1  # position of NO_TOKEN, which ends every path
        done_B = torch.tensor(self.done, device=self.device)
        on_path = torch.zeros_like(tree.tokens, dtype=torch.bool)
        last_B = torch.zeros_like(done_B)
        at_B = last_B
        for depth in range(tree.depth):
            next_B = self.tokens.gather(1, (done_B + depth).clamp(max=end)[:, None])
            child = (tree.parents == at_B[:, None]) & (tree.tokens == next_B)
            if tree.real is not None:
                child &= tree.real
            found_B = child.any(1)
            at_B = torch.where(found_B, child.int().argmax(1), NOWHERE)
            last_B = torch.where(found_B, at_B, last_B)
            on_path |= child
        return on_path, last_B

    @staticmethod
    def _below(tree: DraftTree, node_B: torch.Tensor) -> torch.Tensor:
        """[B, N] bool: the nodes below `node_B` of each tree."""
        below = torch.zeros_like(tree.tokens, dtype=torch.bool)
        for _ in range(tree.depth):
            below = (tree.parents == node_B[:, None]) | (
                below.gather(1, tree.parents.clamp(min=0)) & (tree.parents >= 0)
            )
        return below

    def keep(self, rows: Sequence[int]) -> None:
        super().keep(rows)
        self.live = [self.live[row] for row in rows]


@torch.no_grad()
def label(
    drafting: Drafting,
    answers: Sequence[RecordedAnswer],
    states_PF: torch.Tensor | None,
    target: Target,
    section: LabelSection,
) -> list[Labelled]:
    """Labels uncut trees along each answer. `states_PF` as for `RecordedVerifier`."""
    verifier = LabellingVerifier(answers, states_PF, target, section.entropy_over)
    policy = Eagle2(1 + section.nodes, section.draft_calls, section.top_k, watch=verifier.watch)
    prompts, budgets = [answer.prompt for answer in answers], [len(answer.tokens) for answer in answers]
    decode(verifier, PolicyProposer(drafting, policy), prompts, (), budgets)
    drafting.reset(0)
    return verifier.labelled


def label_all(
    lineup: Lineup,
    contender: Contender,
    section: LabelSection,
    batches: Sequence[Sequence[RecordedAnswer]],
    manifest: TreesManifest,
    directory: Path,
) -> None:
    """Labels the remaining batches. Raises UserError if the answers are another target's."""
    target, agreement = lineup.target, Agreement.of(lineup.target)
    drafting = lineup.drafting(contender)
    todo = remaining(manifest, batches, section.max_rows)
    began, done = time.perf_counter(), 0
    with Bar(total=sum(answer_tokens(batches[number]) for number in todo), desc="labelling", unit="token") as bar:
        for number in todo:
            batch = batches[number]
            states = read_states(target, batch, drafting.capture_layers, agreement)
            agreement.check()
            labelled = label(drafting, batch, states, target, section)
            first = sum(map(len, batches[:number]))
            before, most = manifest.total("rows"), section.max_rows or math.inf
            kept = list(_first_with_rows(labelled, most - before))
            trees = Trees.of(
                [tree for answer in kept for tree in answer.features],
                [tree for answer in kept for tree in answer.accepted],
                [first + i for i, answer in enumerate(kept) for _ in answer.accepted],
            )
            dropped_nan = sum(answer.dropped_nan for answer in kept)
            if not trees.rows and dropped_nan:
                raise UserError(
                    f"{contender.model}: all {dropped_nan:,} nodes drafted along {len(kept)} answers have NaN "
                    "among P and H, so there is no row to learn from. Are the drafter's weights finite? Train it "
                    "again, or set target.dtype=float32"
                )
            counts = {
                "answers": len(kept),
                "dropped_nan": dropped_nan,
                "dropped_beyond": sum(answer.dropped_beyond for answer in kept),
            }
            manifest.shards[number] = write_tree_shard(directory, number, trees, counts)
            enough = manifest.total("rows") >= most
            manifest.complete = enough or number == todo[-1]
            manifest.write(directory)
            done += sum(answer.rows for answer in labelled)
            bar.update(answer_tokens(batch))
            bar.set_postfix_str(f"{manifest.total('rows'):,} rows, {done / (time.perf_counter() - began):,.0f} rows/s")
            if enough:
                break
    print(f"answers: {agreement}")


def _first_with_rows(labelled: Sequence[Labelled], rows: float) -> Iterator[Labelled]:
    """The first answers that together have at least `rows` rows."""
    for answer in labelled:
        if rows <= 0:
            return
        yield answer
        rows -= answer.rows
