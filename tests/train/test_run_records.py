"""What a run keeps and whom it tells: replay at every checkpoint, the best one, trackers, a profile."""

import gzip
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.eval.replay.replay import replay
from draftsmith.models.checkpoint import load_drafter
from draftsmith.models.drafters import drafting_of
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.prompt_reader import Rejects
from draftsmith.train.measure.metrics_line import ThroughputMeter
from draftsmith.train.run import loop
from draftsmith.train.run.checkpoints import list_checkpoints
from draftsmith.train.run.training_inputs import read_rows
from draftsmith.train.run.validation_replay import answers_of
from tests.data_gen.test_crashes import flip
from tests.training_runs import metrics, train
from tests.training_runs import recipe_path as recipe_path

__all__ = ["recipe_path"]  # a fixture

REPLAY = ("train.eval_replay=3", "eval.tree.nodes=10", "eval.tree.draft_calls=3", "eval.tree.top_k=4")


def test_replay_at_every_checkpoint_is_replay_of_what_is_saved(recipe_path: Path) -> None:
    """Along the turns of the first three validation conversations, in full; and training does not notice."""
    output = train(recipe_path, *REPLAY, "train.log_every_steps=4", "train.learning_rate=0.02")
    lines = metrics(output)
    assert [line["step"] for line in lines if "replay_tau" in line] == [3, 6]  # step 3 is a checkpoint, not a log step
    assert [line["step"] for line in lines] == [3, 4, 6]

    recipe = load_recipe(recipe_path, REPLAY)
    files = TargetFiles(recipe.target)
    target = files.load()
    drafter = load_drafter(output / "drafter", target, files.identity_of(target))
    _, validation = read_rows(recipe, files, Rejects())
    ids = list(dict.fromkeys(row.id for row in validation))[:3]
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
    assert not any(g.last_round_cut and g.accepted_per_round[-1] == 0 for g in rounds)
    [share, *_] = lines[-1]["replay_accepted_by_position"] or [0]
    assert share == pytest.approx(sum(first) / len(first), abs=1e-4)

    without = recipe_path.parent / "without"
    shutil.copytree(output, without, ignore=shutil.ignore_patterns("checkpoints", "drafter", "metrics.jsonl"))
    train(recipe_path, "train.log_every_steps=4", "train.learning_rate=0.02", f"output_dir={without}")
    mine, expected = (load_file(d / "drafter/model.safetensors") for d in (output, without))
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_replay_takes_so_many_conversations_with_all_their_rows() -> None:
    rows = [TrainingRow(id_, [1, 2, 3, 4], [(2, 4)]) for id_ in ("a", "a", "b", "c")]
    assert [answer.conversation_id for answer, _ in answers_of(rows, 2)] == ["a", "a", "b"]


# The best checkpoint.

TAUS = {1: 1.2, 2: 1.9, 3: 1.9, 4: 1.5, 5: 1.1, 6: 1.7}  # of equals the later step counts


def replay_says(monkeypatch: pytest.MonkeyPatch, taus: dict[int, float]) -> None:
    """Replay finds these, by the step: each is logged."""

    def replayed(self: loop.Loop) -> dict[str, Any]:
        return {"replay_tau": taus[max(self.metrics.values("lr"), default=0) + 1]}

    monkeypatch.setattr(loop.Loop, "replayed", replayed)


BY_REPLAY = [
    "train.keep_best=replay_tau",
    "train.eval_replay=2",
    "train.save_every_steps=1",
    "train.keep_checkpoints=1",
]


def kept_steps(output: Path) -> list[int]:
    return [int(path.name[-8:]) for path in list_checkpoints(output / "checkpoints")]


def drafter_is_of(output: Path, step: int) -> bool:
    drafter = load_file(output / "drafter/model.safetensors")
    saved = load_file(output / f"checkpoints/step-{step:08d}/model.safetensors")
    return all(torch.equal(drafter[name.removeprefix("drafter.")], tensor) for name, tensor in saved.items())


def test_the_best_checkpoint_is_kept_and_its_drafter_saved(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replay_says(monkeypatch, TAUS)
    output = train(recipe_path, *BY_REPLAY)
    assert kept_steps(output) == [3, 6]
    assert drafter_is_of(output, 3) and not drafter_is_of(output, 6)
    assert "drafter, of step 3, which has the best replay_tau: 1.90" in capsys.readouterr().out
    made_by = json.loads((output / "drafter/provenance.json").read_text())
    assert made_by["checkpoint"] == {"step": 3, "replay_tau": 1.9}

    # Longer, the last one is the best, and nothing else needs to stay.
    replay_says(monkeypatch, TAUS | {7: 2.0})
    train(recipe_path, *BY_REPLAY, "train.max_steps=7")
    assert kept_steps(output) == [7] and drafter_is_of(output, 7)


def test_a_damaged_best_checkpoint_does_not_cost_the_one_behind_it(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replay_says(monkeypatch, TAUS | {2: 1.8})
    output = train(recipe_path, *BY_REPLAY, "train.keep_checkpoints=9")
    flip(output / "checkpoints/step-00000003/model.safetensors")
    train(recipe_path, *BY_REPLAY)  # keeps one
    assert kept_steps(output) == [2, 6] and drafter_is_of(output, 2)


# Trackers.


def tracked(output: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows: (step, value) of each name."""
    events = EventAccumulator(str(output / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_shows_every_step_once_though_the_run_was_killed(recipe_path: Path) -> None:
    output = train(recipe_path)
    shutil.rmtree(output / "checkpoints/step-00000006")  # as if killed behind step 6, before it was saved
    train(recipe_path)
    assert len(list((output / "tensorboard").iterdir())) == 2
    shown, lines = tracked(output), metrics(output)
    for key in ("loss", "grad_norm", "lr", "simulated_tau", "skipped_steps"):
        assert shown[key] == [(line["step"], pytest.approx(line[key])) for line in lines], key
    assert shown["accuracy/2"] == [(line["step"], pytest.approx(line["accuracy"][2])) for line in lines]
    assert [step for step, _ in shown["validation_loss"]] == [3, 6]
    assert [step for step, _ in shown["tokens_per_second"]] == [1, 2, 3, 4, 5, 6]


# A profile, and the meter of throughput.


@pytest.mark.slow
def test_a_profile_shows_the_parts_of_a_step_and_changes_nothing(
    recipe_path: Path, six_steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = train(recipe_path, "--profile=2", "train.validate_every_steps=6")
    for mine, its in zip(metrics(output), metrics(six_steps / "run"), strict=True):
        assert (mine["loss"], mine["grad_norm"]) == (its["loss"], its["grad_norm"])
    trace = output / "profile/rank0.trace.json.gz"
    assert f"profile: {trace}, from step 3 on" in capsys.readouterr().out
    with gzip.open(trace) as file:
        names = Counter(event.get("name") for event in json.load(file)["traceEvents"] if event.get("ph") == "X")
    for part in ("rows", "target", "teacher", "unroll and loss", "backward", "optimizer"):
        assert names[part] == 2, part
    assert "aten::" in trace.with_name("rank0.txt").read_text()


def test_the_meter_measures_what_came_since_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    meter = ThroughputMeter(torch.device("cpu"), peak_tokens_per_second=200.0)
    meter.start({"tokens": 100.0, "columns": 50.0})
    meter.steps += 1
    meter.steps += 1
    told = meter.read({"tokens": 300.0, "columns": 60.0}, steps_left=10)
    assert (told["tokens_per_second"], told["columns_per_second"], told["mfu"]) == (100, 5, 0.5)
    assert told["eta_seconds"] == 10
    monkeypatch.undo()
    assert "mfu" not in ThroughputMeter(torch.device("cpu")).read({"tokens": 1.0, "columns": 1.0}, 1)
