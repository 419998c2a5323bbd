"""Two ranks that are killed, stopped or at odds go on as if nothing had been, under DDP and ZeRO.

What one rank leaves of another's work only processes show, so nearly all of this is slow. A sum of two ranks does not
depend on who comes first: a run that goes on is compared bit for bit with one that nothing interrupts.
"""

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.models.vocab import DraftVocab
from draftsmith.train.run.checkpoints import list_checkpoints
from draftsmith.train.run.processes import StopRequest
from tests.data_gen.crash import Ending, run_script
from tests.data_gen.test_crashes import check_trained, cut, lines_in
from tests.data_gen.test_crashes import recipe as recipe
from tests.thinning import EXHAUSTIVE, a_few
from tests.training_runs import metrics, to_train, write_conversations

RANKS = 2
STEPS, CONVERSATIONS = 12, 16
# Saves, validations and replays lie between the steps.
SETTINGS = {
    "train.max_steps": STEPS, "train.batch_size": 2, "train.ttt_steps": 2, "train.save_every_steps": 3,
    "train.validate_every_steps": 4, "train.validation_conversations": 3, "eval.tree": "{policy: chain, nodes: 2}",
}  # fmt: skip
# What a rank says that was alive when another one died.
LOST_PEER = re.compile(r"torch\.distributed\.Dist\w+Error: |RuntimeError: .*(gloo|[Cc]onnect|[Pp]eer|[Ss]ocket|store)")


class Place:
    """Runs of two ranks from one recipe."""

    def __init__(self, folder: Path, recipe: Path):
        self.folder, self.recipe = folder, recipe
        self.wholes: dict[int, Path] = {}

    def run(self, output: Path, stage: int, **how: Any) -> Ending:
        # Without replay a step's line may come after the next checkpoint: its sums are then saved and restored.
        own = {"train.zero_stage": stage, "train.eval_replay": 2 if stage else 0, "output_dir": output}
        overrides = [f"{key}={value}" for key, value in (SETTINGS | own).items()]
        return run_script("train/eagle3.py", [str(self.recipe), *overrides], ranks=RANKS, **how)

    def finish(self, output: Path, stage: int) -> str:
        """Runs to the end, which is that of a run that nothing interrupts; what was printed."""
        ending = self.run(output, stage)
        assert ending.statuses == [0] * RANKS, ending.output
        check_trained(output, self.whole(stage))
        return ending.output

    def whole(self, stage: int) -> Path:
        """output_dir of a run that nothing interrupts."""
        if stage not in self.wholes:
            output = self.wholes[stage] = to_train(self.folder / f"whole{stage}", CONVERSATIONS)
            ending = self.run(output, stage)
            assert ending.statuses == [0] * RANKS, ending.output
            lines = metrics(output)
            wanted = {*range(2, STEPS + 1, 2), *range(4, STEPS + 1, 4), *(range(3, STEPS + 1, 3) if stage else ())}
            assert [line["step"] for line in lines] == sorted(wanted)
            assert sum("replay_tau" in line for line in lines) == (4 if stage else 0)
        return self.wholes[stage]


@pytest.fixture(scope="module")
def place(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("ranks"), recipe)


def logged(output: Path, lines: int) -> Callable[[], bool]:
    return lambda: lines_in(output / "metrics.jsonl") >= lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "kills"), [(0, 2), *(pytest.param(stage, 20, marks=EXHAUSTIVE) for stage in (0, 2, 3))]
)
def test_kills_of_two_ranks_give_the_same_losses(stage: int, kills: int, place: Place, tmp_path: Path) -> None:
    """Of both at once, or of one of them: the other had ended, was ended by the launcher, or lost its peer."""
    chance, output = random.Random(stage), to_train(tmp_path / "run", CONVERSATIONS)
    for _ in range(kills):
        rank, lines = chance.choice((None, *range(RANKS))), chance.randint(1, 8)
        ending = place.run(output, stage, rank=rank, kill_when=logged(output, lines), kill_after=chance.random() / 4)
        if ending.status:
            killed = ending.statuses if rank is None else [ending.statuses[rank]]
            assert -signal.SIGKILL in killed, ending.output
            errors = re.findall(r"^(?:\[rank\d\]: )?([\w.]+(?:Error|Exception): .*)$", ending.output, re.MULTILINE)
            assert all(LOST_PEER.match(error) for error in errors), (errors, ending.output)
        else:
            check_trained(output, place.whole(stage))
            shutil.rmtree(output)
            to_train(output, CONVERSATIONS)
    place.finish(output, stage)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "rank"), a_few([(0, None), (2, 1), (3, 0)], (3, 0)))
def test_sigterm_stops_all_ranks_after_the_same_step(
    stage: int, rank: int | None, place: Place, tmp_path: Path
) -> None:
    """To both, by a scheduler, and to one alone."""
    output = to_train(tmp_path, CONVERSATIONS)
    ending = place.run(output, stage, rank=rank, kill_when=logged(output, 2), kill_with=signal.SIGTERM)
    assert ending.statuses == [0] * RANKS and "Traceback" not in ending.output, ending.output
    [stopped] = re.findall(r"SIGTERM: stopped after step (\d+), which is saved", ending.output)
    last = list_checkpoints(output / "checkpoints")[-1]
    assert last.name == f"step-{int(stopped):08d}" and not (output / "drafter").exists()
    assert place.finish(output, stage).count(f"resumed from {last}") == 1


@pytest.mark.slow
def test_ctrl_c_is_answered_once(place: Place, tmp_path: Path) -> None:
    output = to_train(tmp_path, CONVERSATIONS)
    late = {rank: ["train.save_every_steps=9"] for rank in range(RANKS)}
    ending = place.run(output, 0, kill_when=logged(output, 2), kill_with=signal.SIGINT, more=late)
    assert ending.statuses == [130] * RANKS and "Traceback" not in ending.output, ending.output
    [said] = re.findall(r"^interrupted.*", ending.output, re.M)  # on a line of its own
    assert re.match(r"interrupted after step [4-8]; no checkpoint yet", said), said


def test_a_later_sigterm_ends_a_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    request, now, sent = StopRequest(), [100.0], list[int]()
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "kill", lambda _, number: sent.append(number))
    monkeypatch.setattr(signal, "signal", lambda *given: sent.extend(given))
    for now[0] in (100.0, 100.5, 104.9):
        request.note()
        assert request.came and not sent
    now[0] = 105.1
    request.note()
    assert sent == [signal.SIGTERM, signal.SIG_DFL, signal.SIGTERM]


@pytest.mark.slow
@pytest.mark.parametrize("cases", [slice(2), pytest.param(slice(2, None), marks=pytest.mark.exhaustive)])
def test_ranks_that_see_otherwise_do_not_wait_for_each_other(cases: slice, place: Place, tmp_path: Path) -> None:
    """Conversations, recipe, vocabulary, checkpoints. All ranks say no, and one of them why."""
    run, other, third = (to_train(tmp_path / name, CONVERSATIONS) for name in ("run", "other", "third"))
    broken = tmp_path / "broken"
    shutil.copytree(place.whole(0), broken)
    for checkpoint in list_checkpoints(broken / "checkpoints"):
        cut(checkpoint / "model.safetensors")
    write_conversations(tmp_path / "fewer.jsonl", CONVERSATIONS - 1)
    DraftVocab(torch.arange(1, 320, 2), 320).save(other / "draft_vocab.safetensors")
    for output, more, said in [
        (run, f"data.conversations={tmp_path / 'fewer.jsonl'}", "training rows: rank 0 has '"),
        (broken, "train.max_steps=12", "delete the folder to start again"),
        (run, "train.max_steps=9", "train.max_steps: rank 0 has 12, rank 1 has 9"),
        (run, f"output_dir={other}", "draft vocabulary: rank 0 has '"),
        (place.whole(0), f"output_dir={third}", "output_dir must be one folder"),
    ][cases]:
        ending = place.run(output, 0, more={1: [more]})
        assert ending.statuses == [2] * RANKS and "Traceback" not in ending.output, ending.output
        assert ending.output.count("] error: ") == 1 and said in ending.output, ending.output
        assert not (run / "checkpoints").exists()
