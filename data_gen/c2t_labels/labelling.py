"""Labels the nodes of draft trees, behind data_gen/label_trees.py."""

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from draftsmith.data_gen.c2t_labels.labelled_trees import Trees
from draftsmith.eval.decoding.contenders import (
    Contender,
    check_contenders,
    contenders_of,
    loaded_drafting,
    loaded_identity,
)
from draftsmith.eval.decoding.decode import Verified, decode
from draftsmith.eval.decoding.policies import Eagle2, PolicyProposer
from draftsmith.eval.measurement.benchmarks import PLAIN
from draftsmith.eval.replay.recorded_answers import (
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
from draftsmith.eval.replay.replay import NO_TOKEN, Agreement, RecordedVerifier, read_states
from draftsmith.models.c2t import node_features
from draftsmith.models.draft_tree import Drafting, DraftTree
from draftsmith.models.formats.named_drafters import with_measured_drafters
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.sampling import Sampling
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import TreeSection
from draftsmith.recipes.sections.train import LabelSection


def main(command: Command) -> None:
    recipe = with_measured_drafters(command.recipe, command.plan)
    section, path = recipe.labels, recipe.labelled_trees_path
    files = TargetFiles.read(recipe.target)
    contender = labelled_contender(recipe, files, command.contender)
    with errors_naming("labels.answers"):
        check_contenders(recipe, files, [contender], command.plan)
        recording, answers = answers_to_label(recipe, files)
    if recording.note:
        print(f"note: {recording.note}")
    if said := other_sampling(answers, Sampling.of(recipe.eval)):
        print(f"note: labels.answers were drawn with other settings ({said}) than eval's; the classifier learns theirs")
    tokens = answer_tokens(answers)
    if command.plan:
        most = section.nodes * (tokens - len(answers))  # one tree for every token except the first
        if section.max_rows is not None:
            most = min(most, section.max_rows + section.nodes * max(len(answer.tokens) for answer in answers))
        plan = PlanLines()
        plan.line("drafted by", f"{contender.model}, {section.nodes:,} nodes a tree")
        plan.line("answers", f"{len(answers):,} recorded in {recording.path}, {tokens:,} tokens", "counted")
        plan.line("rows", f"at most {most:,}; divided by tau if a round takes tau tokens", "exact")
        plan.writes(path)
        return
    with alone_in(path.parent), errors_naming("labels.answers"):
        models = LoadedModels(files)
        check_recorded_from(recording, models.identity)
        trees = label_all(models, contender, section, answers)
        trees.write(path)
    count, accepted, about = len(trees.sizes), int(trees.accepted.sum()), trees.about
    print(
        f"{path}: {len(trees.accepted):,} rows of {count:,} trees along {about['answers']:,} of {len(answers):,} "
        f"answers, {accepted:,} accepted ({accepted / count:.2f} a tree); left out: {about['dropped_nan']:,} with NaN, "
        f"{about['dropped_beyond']:,} below the end of an answer"
    )


def labelled_contender(recipe: Recipe, files: TargetFiles, name: str | None = None) -> Contender:
    """The contender that drafts, with labels.draft_calls, labels.top_k, and its own vocabulary cut. Raises UserError
    with all problems of its name, drafter and trees.

    Args:
        name: of one under eval.also; None: the recipe's own.
    """
    section, positions, problems = recipe.labels, files.positions, list[str]()
    contenders = {contender.name: contender for contender in contenders_of(recipe)}
    contender = next(iter(contenders.values())) if name is None else contenders.get(name)
    if contender is None:
        problems.append(f"--contender: no contender is called {name!r}; there are {', '.join(map(repr, contenders))}")
    elif contender.entry.drafting is None:
        problems.append(f"--contender: {contender.proposer} has no distribution to compute P and H from")
    if section.draft_calls >= positions:
        problems.append(
            f"labels.draft_calls: {section.draft_calls:,} calls, but the target has {positions:,} positions"
        )
    if problems or contender is None:
        raise UserError(problems)
    # Labelling verifies no tree. With two nodes, no tree exceeds the target's positions.
    calls, width, cut = section.draft_calls, section.top_k, contender.tree.vocab_size
    tree = TreeSection(policy="eagle2", nodes=2, draft_calls=calls, top_k=width, vocab_size=cut)
    return replace(contender, tree=tree)


def answers_to_label(recipe: Recipe, files: TargetFiles) -> tuple[Recording, list[RecordedAnswer]]:
    """The recorded answers of two tokens or more, shuffled by a hash of their ids. Raises UserError for missing,
    damaged or another target's answers."""
    path = answers_or_conversations(recipe.labels.answers, recipe, "labels.answers")
    only, note = not_trained_on(recipe, path)
    recording = read_answers(path, only=only)
    recording.note = note
    check_answers_before_loading(recording, files)
    answers = with_their_pictures(recording.of(PLAIN, PLAIN), files.tokenizer)

    def place(answer: RecordedAnswer) -> bytes:
        return hashlib.sha256(json.dumps(["labels", *answer.key]).encode()).digest()

    return recording, sorted(with_rounds(answers, path, "labels.answers"), key=place)


@dataclass
class Labelled:
    """The trees of one answer, root by root."""

    features: list[torch.Tensor] = field(default_factory=list)  # [rows, 3] of each tree
    accepted: list[torch.Tensor] = field(default_factory=list)  # [rows] bool of each tree
    dropped_nan: int = 0
    dropped_beyond: int = 0


class LabellingVerifier(RecordedVerifier):
    """Verifies by recorded answers and labels every node. `Eagle2` calls `watch` with the nodes as the tree grows."""

    def __init__(self, answers: Sequence[RecordedAnswer], states_PF: torch.Tensor | None, target: Target):
        super().__init__(answers, states_PF, target)
        self.watched: list[torch.Tensor] = []  # features [B, b * K, 3] of each call of this round
        self.live = list(range(len(answers)))
        self.labelled = [Labelled() for _ in answers]

    def watch(self, values_BbK: torch.Tensor, log_probs: torch.Tensor, depth: int) -> None:
        self.watched.append(node_features(values_BbK, log_probs, depth).flatten(1, 2))

    def accept(self, tree: DraftTree) -> Verified:
        # Of the M drafted nodes, level by level. The tree lacks the deepest near the target's last position.
        features_BM3 = torch.cat(self.watched, dim=1)[:, : tree.nodes - 1]
        levels = [torch.full((each.shape[1],), depth) for depth, each in enumerate(self.watched)]
        ahead_M = torch.cat(levels)[: tree.nodes - 1].to(self.device)
        self.watched = []
        done_B = torch.tensor(self.done, device=self.device)
        said_BM = self.tokens.gather(1, (done_B[:, None] + ahead_M).clamp(max=self.tokens.shape[1] - 1))
        ended_BM = said_BM == NO_TOKEN  # deeper than the rest of the answer
        right_BM = (tree.tokens[:, 1:] == said_BM) | ended_BM
        reached_BN = torch.ones_like(tree.tokens, dtype=torch.bool)
        for _ in range(tree.depth):
            reached_BN[:, 1:] = reached_BN.gather(1, tree.parents[:, 1:]) & right_BM
        reached_BM = reached_BN[:, 1:] & tree.drafted[:, 1:]
        accepted_BM, beyond_BM = reached_BM & ~ended_BM, reached_BM & ended_BM
        broken_BM = features_BM3.isnan().any(-1)
        known_BM = tree.drafted[:, 1:] & ~beyond_BM
        sums = accepted_BM.sum(1), (known_BM & broken_BM).sum(1), beyond_BM.sum(1)
        rows = [each.cpu() for each in (features_BM3.float(), accepted_BM, known_BM & ~broken_BM)]
        counts, *lost = torch.stack(sums).tolist()
        for index, features, accepted, kept, nan, beyond in zip(self.live, *rows, *lost, strict=True):
            of_answer = self.labelled[index]
            if kept.any():
                of_answer.features.append(features[kept])
                of_answer.accepted.append(accepted[kept])
            of_answer.dropped_nan += nan
            of_answer.dropped_beyond += beyond
        # The accepted path gives the same round as the tree, without the tree's large ancestor matrix.
        paths = [
            answer.tokens[done - 1 : done + count]
            for answer, done, count in zip(self.answers, self.done, counts, strict=True)
        ]
        sizes = [tree.nodes] * tree.rows if tree.sizes is None else tree.sizes.tolist()
        return Verified(super().accept(DraftTree.chains(paths, self.device)).new_tokens, sizes)

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
    verifier = LabellingVerifier(answers, states_PF, target)
    policy = Eagle2(1 + section.nodes, section.draft_calls, section.top_k, watch=verifier.watch)
    prompts, budgets = [answer.prompt for answer in answers], [len(answer.tokens) for answer in answers]
    decode(verifier, PolicyProposer(drafting, policy), prompts, (), budgets)
    return verifier.labelled


def label_all(
    models: LoadedModels, contender: Contender, section: LabelSection, answers: Sequence[RecordedAnswer]
) -> Trees:
    """The trees along all answers, or along the first that together have labels.max_rows rows. Raises UserError if the
    answers are another target's, or if the drafter's distributions are NaN."""
    target, agreement, drafting = models.target, Agreement.of(models.target), loaded_drafting(models, contender)
    found: list[Labelled] = []
    rows, most = 0, section.max_rows or math.inf
    with Bar(total=answer_tokens(answers), desc="labelling", unit="token") as bar:
        for start in range(0, len(answers), section.batch_size):
            batch = answers[start : start + section.batch_size]
            states = read_states(target, batch, drafting.capture_layers, agreement)
            agreement.check()
            for answer in label(drafting, batch, states, target, section):
                if rows < most:
                    found.append(answer)
                    rows += sum(map(len, answer.accepted))
            if not rows:
                raise UserError(
                    f"{contender.model}: all nodes drafted along {len(found)} answers have NaN among P and H, so there "
                    "is no row to learn from. Are the drafter's weights finite? Train it again, or set "
                    "target.dtype=float32"
                )
            bar.update(answer_tokens(batch))
            bar.set_postfix_str(f"{rows:,} rows")
            if rows >= most:
                break
    print(f"answers: {agreement}")
    accepted = [tree for answer in found for tree in answer.accepted]
    return Trees(
        torch.cat([tree for answer in found for tree in answer.features]),
        torch.cat(accepted),
        torch.tensor([len(tree) for tree in accepted]),
        {
            "drafter": loaded_identity(models, contender, drafting.vocab),
            "top_k": section.top_k,
            "draft_calls": section.draft_calls,
            "answers": len(found),
            "dropped_nan": sum(answer.dropped_nan for answer in found),
            "dropped_beyond": sum(answer.dropped_beyond for answer in found),
        },
    )
