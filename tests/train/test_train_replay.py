"""Replay while training: tau at every checkpoint, what a kill leaves of it, and what cannot be replayed."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.replay.answers import RecordedAnswer
from draftsmith.eval.replay.replay import replay
from draftsmith.models.checkpoint import load_drafter
from draftsmith.models.drafters import drafting_of
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.reader import Rejects
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.train.run.inputs import read_rows
from draftsmith.train.run.loop import Loop
from draftsmith.train.run.validation_replay import answers_of
from tests.thinning import a_few
from tests.training_runs import metrics, train
from tests.training_runs import no_dry_run as no_dry_run
from tests.training_runs import recipe_path as recipe_path

REPLAY = ("train.eval_replay=3", "eval.tree.nodes=10", "eval.tree.draft_calls=3", "eval.tree.top_k=4")


def test_replay_at_every_checkpoint_is_replay_of_what_is_saved(recipe_path: Path, target_dir: Path) -> None:
    """Along the turns of the first three validation conversations, in full; and training does not notice."""
    output = train(recipe_path, *REPLAY, "train.log_every_steps=4", "train.learning_rate=0.02")
    lines = metrics(output)
    assert [line["step"] for line in lines if "replay_tau" in line] == [3, 6]  # step 3 is a checkpoint, not a log step
    assert [line["step"] for line in lines] == [3, 4, 6]

    section = TargetSection(model=str(target_dir), dtype="float32")
    target = Target(TargetFiles(section).load_model())
    identity = TargetFiles(TargetSection(model=str(target_dir))).identity_of(target)
    drafter = load_drafter(output / "drafter", target, identity)
    recipe = load_recipe(recipe_path, REPLAY)
    _, validation = read_rows(recipe, TargetFiles(recipe.target), Rejects())
    ids = list(dict.fromkeys(row.id for row in validation))[:3]
    assert len(ids) == 3
    answers = [
        RecordedAnswer(turn["prompt_token_ids"], turn["output_token_ids"])
        for record in map(json.loads, (output / "conversations.jsonl").read_text().splitlines())
        if record["id"] in ids
        for turn in record["turns"]
    ]
    proposer = PolicyProposer(drafting_of(drafter), policy_of(recipe.eval.tree))
    rounds = [replay(target, proposer, [answer], 1)[0] for answer in answers]
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    assert lines[-1]["replay_tau"] == pytest.approx(tokens / sum(g.rounds for g in rounds), abs=1e-4)
    first = [g.accepted_per_round[i] > 0 for g in rounds for i in range(g.rounds)]
    cut_at_once = sum(g.last_round_cut and g.accepted_per_round[-1] == 0 for g in rounds)
    assert cut_at_once == 0
    shares = lines[-1]["replay_accepted_by_position"]
    assert (shares[0] if shares else 0) == pytest.approx(sum(first) / len(first), abs=1e-4)

    without = recipe_path.parent / "without"
    shutil.copytree(output, without, ignore=shutil.ignore_patterns("checkpoints", "drafter", "metrics.jsonl"))
    train(recipe_path, "train.log_every_steps=4", "train.learning_rate=0.02", f"output_dir={without}")
    mine, expected = (load_file(d / "drafter/model.safetensors") for d in (output, without))
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


class Killed(BaseException):
    """What nothing in the loop catches, as a kill."""


@pytest.mark.parametrize("at", a_few([3, 6], 3))
def test_a_kill_between_checkpoint_and_replay_loses_neither(
    recipe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The checkpoint comes first, and the step's line is logged once, with its replay."""
    replayed, killed = Loop.replayed, tmp_path / "killed"
    whole = train(recipe_path, *REPLAY)
    shutil.copytree(whole, killed, ignore=shutil.ignore_patterns("checkpoints", "drafter", "metrics.jsonl"))

    def replayed_or_killed(self: Loop) -> dict:
        if len((killed / "metrics.jsonl").read_text().splitlines()) == at - 1:
            raise Killed
        return replayed(self)

    with monkeypatch.context() as patched, pytest.raises(Killed):
        patched.setattr(Loop, "replayed", replayed_or_killed)
        train(recipe_path, *REPLAY, f"output_dir={killed}")
    assert (killed / "metrics.jsonl").read_text().count("\n") == at - 1
    assert not (killed / "drafter").exists()
    for _ in range(2):  # a run that is complete writes no line again
        train(recipe_path, *REPLAY, f"output_dir={killed}")
        assert metrics(killed) == metrics(whole)
    mine, expected = (load_file(d / "drafter/model.safetensors") for d in (killed, whole))
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_replay_takes_so_many_conversations_with_all_their_rows() -> None:
    rows = [TrainingRow(id_, [1, 2, 3, 4], [(2, 4)]) for id_ in ("a", "a", "b", "c")]
    assert [answer.conversation_id for answer, _ in answers_of(rows, 2)] == ["a", "a", "b"]
