"""Replay as validation: the acceptance that decoding would have with the current drafter (train.eval_replay).

The answers are the turns of validation conversations. At every root a tree of the recipe's eval.tree is drafted
(`eval.replay.replay`). So a run shows during training what eval/acceptance.py would measure, bonus token included. If
the target did not write the data's answers, this is the acceptance of the data's answers.

A store (data.states) serves as well as the target: it holds the states of every token up to the end of a row's last
answer. No random numbers are drawn, so a run trains the same with replay and without.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.eval.decoding.contenders import check_size
from draftsmith.eval.decoding.decode import Generation
from draftsmith.eval.decoding.policies import PolicyProposer, TreePolicy, policy_of
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.eval.replay.replay import StatesOf, replay
from draftsmith.models.drafter_base import Drafter
from draftsmith.models.drafters import drafting_of
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab, cut_by_file
from draftsmith.recipes.errors import UserError, collecting_problems
from draftsmith.recipes.schema import Recipe
from draftsmith.train.run.state_sources import StateSource, StoredStates


def check_replay(recipe: Recipe, files: TargetFiles) -> None:
    """Raises UserError if train.eval_replay has nothing to replay, or eval.tree cannot be replayed or is too large."""
    if not recipe.train.eval_replay:
        return
    tree, counts = recipe.eval.tree, recipe.token_counts_path
    refusals = {
        "there are no conversations to replay: train.validation_conversations is 0": (
            not recipe.train.validation_conversations
        ),
        f"replays the drafter, but eval.proposer is {recipe.eval.proposer}: leave one out": (
            recipe.eval.proposer != "drafter"
        ),
        "policy auto goes by speeds, and replay has none; name a policy in eval.tree": tree.policy == "auto",
        "eval.tree.draw: sampled cannot be replayed: no answer records what the drafter drew; leave draw out": (
            tree.draw == "sampled" and recipe.eval.temperature > 0
        ),
        f"eval.tree.vocab_size goes by {counts}, which does not exist; run `draftsmith rank-vocab` first": (
            tree.vocab_size is not None and not counts.exists()
        ),
    }
    problems = [f"train.eval_replay: {refusal}" for refusal, applies in refusals.items() if applies]
    if tree.policy != "auto":
        with collecting_problems(problems, "train.eval_replay: "):
            check_size(tree, files.positions)
    if problems:
        raise UserError(problems)


def answers_of(rows: Sequence[TrainingRow], conversations: int) -> list[tuple[RecordedAnswer, TrainingRow]]:
    """(answer, its row) for every turn of the first `conversations`. An answer's prompt is all that precedes it."""
    ids = list(dict.fromkeys(row.id for row in rows))[:conversations]
    return [
        (RecordedAnswer(row.prompt.until(start), row.input_ids[start:end], conversation_id=row.id), row)
        for row in rows
        if row.id in ids
        for start, end in row.spans
        if start > 0
    ]


@dataclass(frozen=True)
class ValidationReplay:
    """Replays answers with a tree policy."""

    answers: Sequence[tuple[RecordedAnswer, TrainingRow]]
    policy: TreePolicy
    batch_size: int  # answers side by side
    cut: DraftVocab | None = None  # the vocabulary to draft from; None: the drafter's own

    @classmethod
    def of(
        cls, recipe: Recipe, files: TargetFiles, rows: Sequence[TrainingRow], vocab: DraftVocab
    ) -> "ValidationReplay | None":
        """The replay that the recipe asks for; None: it asks for none. Raises UserError if eval.tree is unavailable."""
        answers, size, cut = answers_of(rows, recipe.train.eval_replay), recipe.eval.tree.vocab_size, None
        if not answers:
            return None
        if size is not None:
            cut = cut_by_file(recipe.token_counts_path, files.fingerprint, vocab, size, files.stop_ids)
        return cls(answers, policy_of(recipe.eval.tree), recipe.eval.replay_batch_size, cut)

    def share(
        self, target: Target, drafter: Drafter, rank: int, ranks: int, states: StateSource | None = None
    ) -> list[Generation]:
        """The rounds of this rank's answers. If `states` is no store, the target reads the answers."""
        # Sorted by length and dealt out in turn: ranks get shares of similar size.
        mine = sorted(self.answers, key=lambda answer: len(answer[0].tokens), reverse=True)[rank::ranks]
        if not mine:
            return []
        states_of: StatesOf | None = None
        if isinstance(states, StoredStates):  # of all tokens of each answer but the last one
            read = [(row, len(answer.prompt) + len(answer.tokens) - 1) for answer, row in mine]
            states_of = lambda numbers: states.captured([read[number] for number in numbers])  # noqa: E731
        proposer = PolicyProposer(drafting_of(drafter, self.cut), self.policy)
        with torch.autocast(target.device.type, enabled=False):  # as decoding runs
            return replay(target, proposer, [answer for answer, _ in mine], self.batch_size, states_of=states_of)
