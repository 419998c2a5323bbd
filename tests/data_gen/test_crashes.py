"""Killed at any moment, nothing is lost, nothing is twice, and the losses are the same.

Every state that a kill could leave of regeneration and of training is enumerated in this process. A few runs are killed
for real, because what one rank leaves of another's work only processes show: these are slow. A sum of two ranks does
not depend on who comes first: a run that goes on is compared bit for bit with one that nothing interrupts.
"""

import functools
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data_gen import regenerate
from draftsmith.recipes.errors import UserError
from draftsmith.train import eagle3
from draftsmith.train.run.checkpoints import list_checkpoints, settle
from draftsmith.train.run.processes import StopRequest
from tests.clock import POLL_SECONDS, lines_in, signalled_when
from tests.crash_states import EVERY, cut, flip, full_disk, restore, state_of, synced_before_renamed, watched
from tests.data_gen.regeneration_place import RegenerationPlace, save_target
from tests.ranks import LAST_WORDS_SECONDS, ON_CPUS, ROOT, free_port, words_of_launcher
from tests.store_cases import SMALL_SHARDS, assert_same_store
from tests.thinning import EXHAUSTIVE, a_few
from tests.training_runs import SIX_STEPS, metrics, run_main, to_train, write_conversations

REGENERATION, WITH_STATES, TRAINING = "regeneration", "regeneration with states", "training"


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe for both scripts, with its target and prompts: conversations of 1 to 3 turns and three bad lines."""
    folder = tmp_path_factory.mktemp("crashes")
    generator = {"batch_size": 4, "max_new_tokens": 20, "temperature": 1.0}
    drafter = {"vocab_size": 160, "capture_layers": [0, 1, 2]}
    steps = SIX_STEPS | {"save_every_steps": 2, "keep_checkpoints": 2, "log_every_steps": 2, "trackers": []}
    place = RegenerationPlace(folder, save_target(folder / "target"), None, generator, drafter=drafter, train=steps)
    long = {"id": "long", "prompt": "rain " * 400}
    place.ask(6, long, b'{"id": "torn", "messages": [', b"\xff\xfe\x00{")
    return place.recipe


class Whole:
    """A run that nothing interrupted, and what a kill could have left of it.

    Args:
        kind: REGENERATION, WITH_STATES or TRAINING.
    """

    def __init__(self, recipe: Path, output: Path, kind: str):
        self.recipe, self.output, self.kind = recipe, output, kind
        with synced_before_renamed(), watched(output) as self.states:
            self.run(output)

    def run(self, output: Path, *more: str) -> None:
        states = [f"data.states={output / 'states'}", "data.capture.dtype=float32", *SMALL_SHARDS]
        script = eagle3 if self.kind == TRAINING else regenerate
        run_main(script, self.recipe, f"output_dir={output}", *more, *(states if self.kind == WITH_STATES else ()))

    def go_on(self, output: Path) -> None:
        """Runs where another run was killed, to the same end."""
        self.run(output)
        (check_trained if self.kind == TRAINING else check_regenerated)(output, self.output)


Wholes = Callable[[str], Whole]  # by kind


@pytest.fixture(scope="module")
def wholes(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Wholes:
    @functools.cache
    def whole(kind: str) -> Whole:
        output = tmp_path_factory.mktemp("whole")
        return Whole(recipe, to_train(output) if kind == TRAINING else output, kind)

    return whole


@pytest.fixture
def training(wholes: Wholes) -> Whole:
    return wholes(TRAINING)


def check_regenerated(output: Path, expected: Path) -> None:
    """No line is lost, changed, torn or there twice, and no reject."""
    for name in ("conversations.jsonl", "conversations.rejects.jsonl"):
        found, wanted = ((folder / name).read_bytes().splitlines(keepends=True) for folder in (output, expected))
        assert sorted(found) == sorted(wanted)
    if (expected / "states").exists():
        assert_same_store(output / "states", expected / "states")


def check_trained(output: Path, expected: Path) -> None:
    """The same metrics, drafter, checkpoints and files: every one of `expected`, and no other."""
    assert metrics(output) == metrics(expected)
    left, wanted = state_of(output), state_of(expected)
    assert left.keys() == wanted.keys()
    assert not [name for name in left if name.endswith(".safetensors") and left[name] != wanted[name]]
    whole = list_checkpoints(output / "checkpoints")
    settle(output / "checkpoints")
    assert list_checkpoints(output / "checkpoints") == whole and len(whole) == 2  # none was set aside


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("kind", [REGENERATION, WITH_STATES, TRAINING])
def test_a_run_goes_on_from_whatever_a_kill_left(wholes: Wholes, tmp_path: Path, kind: str, every: int) -> None:
    for state in wholes(kind).states[::every]:
        output = restore(state, tmp_path / "out")
        wholes(kind).go_on(output)
        content = state.get("conversations.jsonl") or b""
        assert (output / "conversations.jsonl").read_bytes().startswith(content[: content.rfind(b"\n") + 1])


def test_whole_runs_leave_what_kills_can_hurt(wholes: Wholes) -> None:
    """Answers to each prompt and torn ones, metrics of each step that has some."""
    whole = wholes(WITH_STATES)
    assert lines_in(whole.output / "conversations.jsonl") == 6
    written = [state.get("conversations.jsonl") or b"" for state in whole.states]
    assert any(content and not content.endswith(b"\n") for content in written)
    assert [line["step"] for line in metrics(wholes(TRAINING).output)] == [2, 3, 4, 6]


@pytest.mark.parametrize(
    ("full", "limit"), {"conversations.jsonl": 3000, "conversations.rejects.jsonl": 100, "states/written": 6000}.items()
)
def test_a_full_disk_is_one_message_and_loses_nothing(wholes: Wholes, tmp_path: Path, full: str, limit: int) -> None:
    with_states = full == "states/written"
    whole, output = wholes(WITH_STATES if with_states else REGENERATION), tmp_path / "out"
    if with_states:  # the target's files are there, which are larger than the limit
        restore(next(state for state in whole.states if "states/written/manifest.json" in state), output)
    with pytest.raises(UserError, match=r"cannot be written.*File too large.*make room") as end, full_disk(limit):
        whole.run(output)
    assert len(end.value.problems) == 1 and str(output / full) in end.value.problems[0]
    left = {path: path.read_bytes() for path in output.glob("*.jsonl")}
    assert left and all(content.endswith(b"\n") or not content for content in left.values())
    whole.go_on(output)
    assert all(path.read_bytes().startswith(content) for path, content in left.items())


# Training.


def test_every_kill_leaves_whole_checkpoints(training: Whole, tmp_path: Path) -> None:
    """None is lost once it is there, until newer ones are."""
    newest = 0
    for state in training.states:
        checkpoints = restore(state, tmp_path / "out") / "checkpoints"
        settle(checkpoints)
        steps = [int(path.name[-8:]) for path in list_checkpoints(checkpoints)]
        assert not list(checkpoints.glob("*.*")) and max(steps, default=0) >= newest
        newest = max(steps, default=0)
    assert newest == 6


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
def test_damaged_checkpoints_are_named_and_set_aside(
    training: Whole, tmp_path: Path, capsys: pytest.CaptureFixture, harm: Callable[[Path], None]
) -> None:
    """Each file of the newest one."""
    before, newest = list_checkpoints(training.output / "checkpoints")
    names = sorted(path.name for path in newest.iterdir())
    assert {"manifest.json", "trainer_state.json", "model.safetensors", "optimizer.safetensors"} == set(names)
    for name in names:
        copy = tmp_path / name
        shutil.copytree(newest.parent, copy)
        harm(copy / newest.name / name)
        settle(copy)
        # A manifest of other digests makes any file look wrong.
        assert (
            f"{copy / newest.name}/{'' if name == 'manifest.json' else f'{name}: damaged: '}" in capsys.readouterr().out
        )
        assert {path.name for path in copy.iterdir()} == {before.name, f"{newest.name}.damaged"}


def test_the_checkpoint_before_is_then_used(training: Whole, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output = tmp_path / "run"
    shutil.copytree(training.output, output)
    before, damaged = list_checkpoints(output / "checkpoints")
    flip(damaged / "optimizer.safetensors")
    training.run(output)
    assert f"resumed from {before}" in capsys.readouterr().out
    shutil.rmtree(damaged.with_suffix(".damaged"))
    check_trained(output, training.output)
    for checkpoint in list_checkpoints(damaged.parent):
        cut(checkpoint / "model.safetensors")
    left = state_of(output)
    with pytest.raises(UserError, match="delete the folder to start again") as end:
        training.run(output)
    assert sum("model.safetensors: damaged" in problem for problem in end.value.problems) == 2
    assert state_of(output) == left  # a second start must not begin anew


def test_a_full_disk_keeps_older_checkpoints(training: Whole, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    first = "checkpoints/step-00000002"
    states = (state for state in training.states if f"{first}/trainer_state.json" in state)
    output = restore(next(states), tmp_path / "run")
    for limit in (50_000, 100_000):  # too little for model.safetensors, for optimizer.safetensors
        with pytest.raises(UserError, match=r"step-00000004\.partial: cannot be written"), full_disk(limit):
            training.run(output)
    training.go_on(output)
    assert f"resumed from {output / first}" in capsys.readouterr().out


def logged(output: Path, lines: int) -> Callable[[], bool]:
    return lambda: lines_in(output / "metrics.jsonl") >= lines


def test_sigterm_saves_and_ctrl_c_says_where(training: Whole, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    output, long = to_train(tmp_path / "run"), "train.max_steps=18"
    checkpoints = output / "checkpoints"
    with signalled_when(logged(output, 1), signal.SIGTERM):
        training.run(output, long)
    stopped = re.search(r"SIGTERM: stopped after step (\d+), which is saved", capsys.readouterr().out)
    assert stopped and list_checkpoints(checkpoints)[-1].name == f"step-{int(stopped[1]):08d}"
    assert not (output / "drafter").exists()
    said = rf"interrupted after step \d+; the same command resumes from step \d+ \({checkpoints}"
    with pytest.raises(KeyboardInterrupt, match=said), signalled_when(logged(output, 6), signal.SIGINT):
        training.run(output, long)
    training.run(output, long)
    whole = to_train(tmp_path / "whole")
    training.run(whole, long)
    check_trained(output, whole)


# Two ranks.

RANKS = 2
NOTICED_SECONDS = 0.1  # after a rank failed the launcher ends the others; torchrun looks as often
PATIENCE_SECONDS = 2.0  # of the launcher with a rank that got SIGTERM; torchrun's is 30
TIMEOUT_SECONDS = 300.0
TALKS = 16
# Saves, validations and replays lie between the steps.
SETTINGS = {
    "train.max_steps": 12, "train.batch_size": 2, "train.ttt_steps": 2, "train.save_every_steps": 3,
    "train.validate_every_steps": 4, "train.validation_conversations": 3, "eval.tree": "{policy: chain, nodes: 2}",
}  # fmt: skip
# What a rank says that was alive when another one died.
LOST_PEER = re.compile(r"torch\.distributed\.Dist\w+Error: |RuntimeError: .*(gloo|[Cc]onnect|[Pp]eer|[Ss]ocket|store)")


class Place:
    """Runs of two ranks from one recipe."""

    def __init__(self, folder: Path, recipe: Path):
        self.folder, self.recipe = folder, recipe
        self.wholes: dict[int, Path] = {}

    def run(
        self,
        output: Path,
        stage: int,
        more: Sequence[str] = ("", ""),
        rank: int | None = None,
        kill_when: Callable[[], bool] = lambda: False,
        kill_after: float = 0.0,
        kill_with: signal.Signals = signal.SIGKILL,
    ) -> tuple[list[int], str]:
        """Trains with RANKS processes. If one fails, the others are ended as torchrun does it: SIGTERM, then SIGKILL.

        Returns the exit codes by rank, -n if signal n ended it, and what all printed. Raises AssertionError with that
        output, in which the stacks of all threads stand, after TIMEOUT_SECONDS.

        Args:
            more: an override for each rank.
            rank: which one of them is killed; None: all.
            kill_when: asked all the time; `kill_after` seconds after it is first true, `kill_with` is sent.
        """
        # Without replay a step's line may come after the next checkpoint: its sums are then saved and restored.
        own = {"train.zero_stage": stage, "train.eval_replay": 2 if stage else 0, "output_dir": output}
        words = [sys.executable, str(ROOT / "train/eagle3.py"), str(self.recipe)]
        words += [f"{key}={value}" for key, value in (SETTINGS | own).items()]
        port, killed, failed, end = free_port(), False, False, time.monotonic() + TIMEOUT_SECONDS
        with tempfile.TemporaryFile("ab+") as log:
            processes = [
                subprocess.Popen(
                    [*words, override] if override else words,
                    cwd=ROOT,
                    env=os.environ | ON_CPUS | words_of_launcher(each, RANKS, port),
                    stdout=log,
                    stderr=log,
                    # Jobs that a shell runs in the background ignore Ctrl-C, and so would their children.
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
                )
                for each, override in enumerate(more)
            ]
            # When which signal goes to whom; after SIGABRT faulthandler prints the stacks.
            due = [(end, signal.SIGABRT, processes), (end + LAST_WORDS_SECONDS, signal.SIGKILL, processes)]
            while any(process.poll() is None for process in processes):
                now = time.monotonic()
                if not killed and kill_when():
                    killed = True
                    due.append((now + kill_after, kill_with, processes if rank is None else [processes[rank]]))
                if not failed and any(process.poll() for process in processes):
                    failed, soon = True, now + NOTICED_SECONDS
                    due += [(soon, signal.SIGTERM, processes), (soon + PATIENCE_SECONDS, signal.SIGKILL, processes)]
                for _, number, whom in (each for each in due if each[0] <= now):
                    for process in whom:
                        process.send_signal(number)  # to none that has ended
                due = [each for each in due if each[0] > now]
                time.sleep(POLL_SECONDS)
            log.seek(0)
            printed = log.read().decode(errors="replace")
        assert time.monotonic() < end, f"still running after {TIMEOUT_SECONDS} s:\n{printed}"
        return [process.returncode for process in processes], printed

    def printed(self, status: int, *arguments: Any, **how: Any) -> str:
        """By a run whose ranks all end with this exit code, and none with a traceback."""
        statuses, printed = self.run(*arguments, **how)
        assert statuses == [status] * RANKS and "Traceback" not in printed, printed
        return printed

    def finish(self, output: Path, stage: int) -> str:
        """Runs to the end, which is that of a run that nothing interrupts; what was printed."""
        printed = self.printed(0, output, stage)
        check_trained(output, self.whole(stage))
        return printed

    def whole(self, stage: int) -> Path:
        """output_dir of a run that nothing interrupts."""
        if stage not in self.wholes:
            output = self.wholes[stage] = to_train(self.folder / f"whole{stage}", TALKS)
            self.printed(0, output, stage)
            assert sum("replay_tau" in line for line in metrics(output)) == (4 if stage else 0)
        return self.wholes[stage]


@pytest.fixture(scope="module")
def place(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("ranks"), recipe)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "kills"), [(0, 2), *(pytest.param(stage, 20, marks=EXHAUSTIVE) for stage in (0, 2, 3))]
)
def test_kills_of_two_ranks_give_the_same_losses(stage: int, kills: int, place: Place, tmp_path: Path) -> None:
    """Of both at once, or of one of them: the other had ended, was ended by the launcher, or lost its peer."""
    chance, output = random.Random(stage), to_train(tmp_path / "run", TALKS)
    for _ in range(kills):
        rank, lines = chance.choice((None, *range(RANKS))), chance.randint(1, 8)
        how = {"kill_when": logged(output, lines), "kill_after": chance.random() / 4}
        statuses, printed = place.run(output, stage, rank=rank, **how)
        if any(statuses):
            assert -signal.SIGKILL in (statuses if rank is None else [statuses[rank]]), printed
            errors = re.findall(r"^(?:\[rank\d\]: )?([\w.]+(?:Error|Exception): .*)$", printed, re.MULTILINE)
            assert all(LOST_PEER.match(error) for error in errors), (errors, printed)
        else:
            check_trained(output, place.whole(stage))
            shutil.rmtree(output)
            to_train(output, TALKS)
    place.finish(output, stage)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "rank"), a_few([(0, None), (2, 1), (3, 0)], (3, 0)))
def test_sigterm_stops_all_ranks_at_the_same_step(stage: int, rank: int | None, place: Place, tmp_path: Path) -> None:
    """To both, by a scheduler, and to one alone."""
    output = to_train(tmp_path, TALKS)
    printed = place.printed(0, output, stage, rank=rank, kill_when=logged(output, 2), kill_with=signal.SIGTERM)
    [stopped] = re.findall(r"SIGTERM: stopped after step (\d+), which is saved", printed)
    last = list_checkpoints(output / "checkpoints")[-1]
    assert last.name == f"step-{int(stopped):08d}" and not (output / "drafter").exists()
    assert place.finish(output, stage).count(f"resumed from {last}") == 1


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
    """Conversations, recipe, checkpoints. All ranks say no, and one of them why."""
    run, third = (to_train(tmp_path / name, TALKS) for name in ("run", "third"))
    broken = tmp_path / "broken"
    shutil.copytree(place.whole(0), broken)
    for checkpoint in list_checkpoints(broken / "checkpoints"):
        cut(checkpoint / "model.safetensors")
    write_conversations(tmp_path / "fewer.jsonl", TALKS - 1)
    for output, more, said in [
        (run, f"data.conversations={tmp_path / 'fewer.jsonl'}", "training rows: rank 0 has '"),
        (broken, "train.max_steps=12", "delete the folder to start again"),
        (run, "train.max_steps=9", "train.max_steps: rank 0 has 12, rank 1 has 9"),
        (place.whole(0), f"output_dir={third}", "output_dir must be one folder"),
    ][cases]:
        printed = place.printed(2, output, 0, ["", more])
        assert printed.count("] error: ") == 1 and said in printed, printed
        assert not (run / "checkpoints").exists()
