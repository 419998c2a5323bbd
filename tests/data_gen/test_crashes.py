"""Killed at any moment, nothing is lost, nothing is twice, and the losses are the same.

Every state that a kill could leave of regeneration and of training is enumerated in this process. A few runs are killed
for real, because what one rank leaves of another's work only processes show: these are slow. A sum of two ranks does
not depend on who comes first: a run that goes on is compared bit for bit with one that nothing interrupts.
"""

import functools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import yaml
from safetensors.torch import load_file

from draftsmith.data_gen import regenerate
from draftsmith.models.checkpoint import file_digest
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.train import eagle3
from draftsmith.train.run.checkpoints import list_checkpoints, settle
from draftsmith.train.run.processes import StopRequest
from tests.conftest import make_target, make_tokenizer
from tests.crash_states import State, full_disk, restore, state_of, synced_before_renamed, watched
from tests.ranks import LAST_WORDS_SECONDS, ON_CPUS, ROOT, free_port, words_of_launcher
from tests.store_cases import SMALL_SHARDS, assert_same_store
from tests.thinning import EXHAUSTIVE, a_few
from tests.training_runs import SIX_STEPS, metrics, run_main, to_train, write_conversations

CONVERSATIONS = 6
POLL_SECONDS = 0.002
CAPTURE_LAYERS = [0, 1, 2]


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe for both scripts, with its target and prompts: conversations of 1 to 3 turns and three bad lines."""
    folder = tmp_path_factory.mktemp("crashes")
    model = make_target(num_layers=len(CAPTURE_LAYERS))
    model.generation_config.eos_token_id = list(range(4, 320, 25))  # so that random weights end their answers
    model.save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    prompts: list[Any] = [
        {"id": f"q{i}", "messages": [{"role": "user", "content": f"the cat {i} {n}"} for n in range(1 + i % 3)]}
        for i in range(CONVERSATIONS)
    ]
    prompts.insert(2, {"id": "long", "messages": [{"role": "user", "content": "rain " * 400}]})
    lines = [json.dumps(prompt).encode() for prompt in prompts]
    lines[3:3] = [b'{"id": "torn", "messages": [', b"\xff\xfe\x00{"]
    (folder / "prompts.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    sections = {
        "output_dir": str(folder / "never"),
        "target": {"model": str(folder / "target"), "dtype": "float32", "device": "cpu"},
        "data": {
            "prompts": str(folder / "prompts.jsonl"),
            "max_length": 200,
            "generator": {"batch_size": 4, "max_new_tokens": 20, "temperature": 1.0},
        },
        "drafter": {"vocab_size": 160, "capture_layers": CAPTURE_LAYERS},
        "train": SIX_STEPS | {"save_every_steps": 2, "keep_checkpoints": 2, "log_every_steps": 2, "trackers": []},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def lines_in(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


# Regeneration.


def regenerated(output: Path) -> tuple[bytes, dict[str, bytes], Counter[bytes]]:
    """(what is in the file, lines by conversation, rejects)."""
    content = (output / "conversations.jsonl").read_bytes()
    lines = {json.loads(line)["id"]: line for line in content.split(b"\n")[:-1]}
    return content, lines, Counter((output / "conversations.rejects.jsonl").read_bytes().split(b"\n"))


def check_regenerated(output: Path, expected: Path, with_states: bool = False) -> None:
    """No line is lost, changed, torn or there twice, and no reject."""
    content, *found = regenerated(output)
    assert found == list(regenerated(expected)[1:])
    assert content.count(b"\n") == len(found[0]) == CONVERSATIONS and content.endswith(b"\n")
    if with_states:
        assert_same_store(output / "states", expected / "states")


def regenerate_in(recipe: Path, output: Path, with_states: bool) -> None:
    states = [f"data.states={output / 'states'}", "data.capture.dtype=float32", *SMALL_SHARDS] if with_states else []
    run_main(regenerate, recipe, f"output_dir={output}", *states)


EVERY = [17, pytest.param(1, marks=EXHAUSTIVE)]  # a test goes on from each n-th of the states


class Whole(NamedTuple):
    """A run that nothing interrupted, and what a kill could have left of it."""

    output: Path
    states: list[State]


@pytest.fixture(scope="module")
def whole_regeneration(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[bool], Whole]:
    """With states or without."""

    @functools.cache
    def of(with_states: bool) -> Whole:
        output = tmp_path_factory.mktemp("whole")
        with synced_before_renamed(), watched(output) as states:
            regenerate_in(recipe, output, with_states)
        written = [state.get("conversations.jsonl") or b"" for state in states]
        assert any(content and not content.endswith(b"\n") for content in written)  # torn ones are among them
        return Whole(output, states)

    return of


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("with_states", [False, True])
def test_regeneration_goes_on_from_whatever_a_kill_left(
    recipe: Path, whole_regeneration: Callable[[bool], Whole], tmp_path: Path, with_states: bool, every: int
) -> None:
    whole = whole_regeneration(with_states)
    for state in whole.states[::every]:
        output = restore(state, tmp_path / "out")
        regenerate_in(recipe, output, with_states)
        content = state.get("conversations.jsonl") or b""
        assert (output / "conversations.jsonl").read_bytes().startswith(content[: content.rfind(b"\n") + 1])
        check_regenerated(output, whole.output, with_states)


@pytest.mark.parametrize(
    ("full", "limit"), {"conversations.jsonl": 3000, "conversations.rejects.jsonl": 100, "states/written": 6000}.items()
)
def test_a_full_disk_is_one_message_and_loses_nothing(
    recipe: Path, whole_regeneration: Callable[[bool], Whole], tmp_path: Path, full: str, limit: int
) -> None:
    with_states = full == "states/written"
    whole, output = whole_regeneration(with_states), tmp_path / "out"
    if with_states:  # the target's files are there, which are larger than the limit
        restore(next(state for state in whole.states if "states/written/manifest.json" in state), output)
    with pytest.raises(UserError, match=r"cannot be written.*File too large.*make room") as end, full_disk(limit):
        regenerate_in(recipe, output, with_states)
    assert len(end.value.problems) == 1 and str(output / full) in end.value.problems[0]
    left = {path: path.read_bytes() for path in output.glob("*.jsonl")}
    assert left and all(content.endswith(b"\n") or not content for content in left.values())
    regenerate_in(recipe, output, with_states)
    assert all(path.read_bytes().startswith(content) for path, content in left.items())
    check_regenerated(output, whole.output, with_states)


# Training.


def train_in(recipe: Path, output: Path, *more: str) -> None:
    run_main(eagle3, recipe, f"output_dir={output}", *more)


@pytest.fixture(scope="module")
def whole_training(recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    output = to_train(tmp_path_factory.mktemp("whole"))
    with synced_before_renamed(), watched(output) as states:
        train_in(recipe, output)
    assert [line["step"] for line in metrics(output)] == [2, 3, 4, 6]
    return Whole(output, states)


def check_trained(output: Path, expected: Path) -> None:
    """The same metrics, drafter, checkpoints and files: every one of `expected`, and no other."""
    assert metrics(output) == metrics(expected)
    assert files_of(output) == files_of(expected)
    tensors, wanted = (load_file(folder / "drafter/model.safetensors") for folder in (output, expected))
    assert tensors.keys() == wanted.keys() and all(torch.equal(tensors[name], wanted[name]) for name in tensors)
    for path in (output / "draft_vocab.safetensors", *output.glob("checkpoints/*/*.safetensors")):
        assert file_digest(path) == file_digest(expected / path.relative_to(output)), path
    whole = list_checkpoints(output / "checkpoints")
    settle(output / "checkpoints")
    assert list_checkpoints(output / "checkpoints") == whole and len(whole) == 2  # none was set aside


def files_of(output: Path) -> set[str]:
    return {path.relative_to(output).as_posix() for path in output.rglob("*")}


def test_every_kill_leaves_whole_checkpoints(whole_training: Whole, tmp_path: Path) -> None:
    """None is lost once it is there, until newer ones are."""
    newest = 0
    for state in whole_training.states:
        checkpoints = restore(state, tmp_path / "out") / "checkpoints"
        settle(checkpoints)
        steps = [int(path.name[-8:]) for path in list_checkpoints(checkpoints)]
        assert not list(checkpoints.glob("*.*")) and max(steps, default=0) >= newest
        newest = max(steps, default=0)
    assert newest == 6


@pytest.mark.parametrize("every", EVERY)
def test_training_goes_on_from_whatever_a_kill_left(
    recipe: Path, whole_training: Whole, tmp_path: Path, every: int
) -> None:
    for state in whole_training.states[::every]:
        output = restore(state, tmp_path / "out")
        train_in(recipe, output)
        check_trained(output, whole_training.output)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(b"sha256") + 12 if path.name == "manifest.json" else len(content) // 2
    content[at] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize("harm", [cut, flip, Path.unlink])
def test_damaged_checkpoints_are_named_and_set_aside(
    whole_training: Whole, tmp_path: Path, capsys: pytest.CaptureFixture, harm: Callable[[Path], None]
) -> None:
    """Each file of the newest one."""
    before, newest = list_checkpoints(whole_training.output / "checkpoints")
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


def test_the_checkpoint_before_a_damaged_one_is_used(
    recipe: Path, whole_training: Whole, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    output = tmp_path / "run"
    shutil.copytree(whole_training.output, output)
    before, damaged = list_checkpoints(output / "checkpoints")
    flip(damaged / "optimizer.safetensors")
    train_in(recipe, output)
    assert f"resumed from {before}" in capsys.readouterr().out
    shutil.rmtree(damaged.with_suffix(".damaged"))
    check_trained(output, whole_training.output)
    for checkpoint in list_checkpoints(damaged.parent):
        cut(checkpoint / "model.safetensors")
    left = state_of(output)
    with pytest.raises(UserError, match="delete the folder to start again") as end:
        train_in(recipe, output)
    assert sum("model.safetensors: damaged" in problem for problem in end.value.problems) == 2
    assert state_of(output) == left  # a second start must not begin anew


def test_a_full_disk_keeps_the_checkpoints_that_there_are(
    recipe: Path, whole_training: Whole, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    first = "checkpoints/step-00000002"
    states = (state for state in whole_training.states if f"{first}/trainer_state.json" in state)
    output = restore(next(states), tmp_path / "run")
    for limit in (50_000, 100_000):  # too little for model.safetensors, for optimizer.safetensors
        with pytest.raises(UserError, match=r"step-00000004\.partial: cannot be written"), full_disk(limit):
            train_in(recipe, output)
    train_in(recipe, output)
    assert f"resumed from {output / first}" in capsys.readouterr().out
    check_trained(output, whole_training.output)


@contextmanager
def signalled_when(ready: Callable[[], bool], number: signal.Signals) -> Iterator[None]:
    """Sends a signal to this process, once, as soon as `ready` says so."""

    def send() -> None:
        while not ready():
            time.sleep(POLL_SECONDS)
        os.kill(os.getpid(), number)

    before = signal.signal(number, signal.default_int_handler)  # unless the run has a handler of its own
    sender = threading.Thread(target=send, daemon=True)
    sender.start()
    try:
        yield
        sender.join(60)
    finally:
        signal.signal(number, before)


def test_sigterm_saves_and_ctrl_c_says_where_it_goes_on(
    recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    def logged(lines: int) -> Callable[[], bool]:
        return lambda: lines_in(output / "metrics.jsonl") >= lines

    output, long = to_train(tmp_path / "run"), "train.max_steps=18"
    checkpoints = output / "checkpoints"
    with signalled_when(logged(1), signal.SIGTERM):
        train_in(recipe, output, long)
    stopped = re.search(r"SIGTERM: stopped after step (\d+), which is saved", capsys.readouterr().out)
    assert stopped and list_checkpoints(checkpoints)[-1].name == f"step-{int(stopped[1]):08d}"
    assert not (output / "drafter").exists()
    said = rf"interrupted after step \d+; the same command resumes from step \d+ \({checkpoints}"
    with pytest.raises(KeyboardInterrupt, match=said), signalled_when(logged(6), signal.SIGINT):
        train_in(recipe, output, long)
    train_in(recipe, output, long)
    whole = to_train(tmp_path / "whole")
    train_in(recipe, whole, long)
    check_trained(output, whole)


# Two ranks.

RANKS = 2
NOTICED_SECONDS = 0.1  # after a rank failed the launcher ends the others; torchrun looks as often
PATIENCE_SECONDS = 2.0  # of the launcher with a rank that got SIGTERM; torchrun's is 30
TIMEOUT_SECONDS = 300.0
STEPS, TALKS = 12, 16
# Saves, validations and replays lie between the steps.
SETTINGS = {
    "train.max_steps": STEPS, "train.batch_size": 2, "train.ttt_steps": 2, "train.save_every_steps": 3,
    "train.validate_every_steps": 4, "train.validation_conversations": 3, "eval.tree": "{policy: chain, nodes: 2}",
}  # fmt: skip
# What a rank says that was alive when another one died.
LOST_PEER = re.compile(r"torch\.distributed\.Dist\w+Error: |RuntimeError: .*(gloo|[Cc]onnect|[Pp]eer|[Ss]ocket|store)")


class Ending(NamedTuple):
    """How a run ended."""

    statuses: list[int]  # exit codes by rank; -n: signal n ended it
    output: str  # stdout and stderr of all


def run_ranks(
    argv: Sequence[str],
    more: Mapping[int, Sequence[str]] | None = None,
    rank: int | None = None,
    kill_when: Callable[[], bool] | None = None,
    kill_after: float = 0.0,
    kill_with: signal.Signals = signal.SIGKILL,
) -> Ending:
    """Trains with RANKS processes. If one fails, the others are ended as torchrun does it: SIGTERM, then SIGKILL.

    Raises AssertionError with the output, in which the stacks of all threads stand, after TIMEOUT_SECONDS.

    Args:
        more: by rank, arguments that it alone is given, behind `argv`.
        rank: which one of them is killed; None: all.
        kill_when: asked all the time; `kill_after` seconds after it is first true, `kill_with` is sent.
    """
    port, failed, end = free_port(), False, time.monotonic() + TIMEOUT_SECONDS
    with tempfile.TemporaryFile("ab+") as log:
        processes = [
            subprocess.Popen(
                [sys.executable, str(ROOT / "train/eagle3.py"), *argv, *(more or {}).get(each, ())],
                cwd=ROOT,
                env=os.environ | ON_CPUS | words_of_launcher(each, RANKS, port),
                stdout=log,
                stderr=log,
                # Jobs that a shell runs in the background ignore Ctrl-C, and so would their children.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
            for each in range(RANKS)
        ]
        # When which signal goes to whom; after SIGABRT faulthandler prints the stacks.
        due = [(end, signal.SIGABRT, processes), (end + LAST_WORDS_SECONDS, signal.SIGKILL, processes)]
        while any(process.poll() is None for process in processes):
            now = time.monotonic()
            if kill_when is not None and kill_when():
                due.append((now + kill_after, kill_with, processes if rank is None else [processes[rank]]))
                kill_when = None
            if not failed and any(process.poll() for process in processes):
                failed, noticed = True, now + NOTICED_SECONDS
                due += [(noticed, signal.SIGTERM, processes), (noticed + PATIENCE_SECONDS, signal.SIGKILL, processes)]
            for at, number, whom in due:
                for process in whom if at <= now else ():
                    process.send_signal(number)  # to none that has ended
            due = [each for each in due if each[0] > now]
            time.sleep(POLL_SECONDS)
        log.seek(0)
        output = log.read().decode(errors="replace")
    assert time.monotonic() < end, f"still running after {TIMEOUT_SECONDS} s:\n{output}"
    return Ending([process.returncode for process in processes], output)


class Place:
    """Runs of two ranks from one recipe."""

    def __init__(self, folder: Path, recipe: Path):
        self.folder, self.recipe = folder, recipe
        self.wholes: dict[int, Path] = {}

    def run(self, output: Path, stage: int, **how: Any) -> Ending:
        # Without replay a step's line may come after the next checkpoint: its sums are then saved and restored.
        own = {"train.zero_stage": stage, "train.eval_replay": 2 if stage else 0, "output_dir": output}
        overrides = [f"{key}={value}" for key, value in (SETTINGS | own).items()]
        return run_ranks([str(self.recipe), *overrides], **how)

    def finish(self, output: Path, stage: int) -> str:
        """Runs to the end, which is that of a run that nothing interrupts; what was printed."""
        ending = self.run(output, stage)
        assert ending.statuses == [0] * RANKS, ending.output
        check_trained(output, self.whole(stage))
        return ending.output

    def whole(self, stage: int) -> Path:
        """output_dir of a run that nothing interrupts."""
        if stage not in self.wholes:
            output = self.wholes[stage] = to_train(self.folder / f"whole{stage}", TALKS)
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
    chance, output = random.Random(stage), to_train(tmp_path / "run", TALKS)
    for _ in range(kills):
        rank, lines = chance.choice((None, *range(RANKS))), chance.randint(1, 8)
        ending = place.run(output, stage, rank=rank, kill_when=logged(output, lines), kill_after=chance.random() / 4)
        if any(ending.statuses):
            killed = ending.statuses if rank is None else [ending.statuses[rank]]
            assert -signal.SIGKILL in killed, ending.output
            errors = re.findall(r"^(?:\[rank\d\]: )?([\w.]+(?:Error|Exception): .*)$", ending.output, re.MULTILINE)
            assert all(LOST_PEER.match(error) for error in errors), (errors, ending.output)
        else:
            check_trained(output, place.whole(stage))
            shutil.rmtree(output)
            to_train(output, TALKS)
    place.finish(output, stage)


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "rank"), a_few([(0, None), (2, 1), (3, 0)], (3, 0)))
def test_sigterm_stops_all_ranks_after_the_same_step(
    stage: int, rank: int | None, place: Place, tmp_path: Path
) -> None:
    """To both, by a scheduler, and to one alone."""
    output = to_train(tmp_path, TALKS)
    ending = place.run(output, stage, rank=rank, kill_when=logged(output, 2), kill_with=signal.SIGTERM)
    assert ending.statuses == [0] * RANKS and "Traceback" not in ending.output, ending.output
    [stopped] = re.findall(r"SIGTERM: stopped after step (\d+), which is saved", ending.output)
    last = list_checkpoints(output / "checkpoints")[-1]
    assert last.name == f"step-{int(stopped):08d}" and not (output / "drafter").exists()
    assert place.finish(output, stage).count(f"resumed from {last}") == 1


@pytest.mark.slow
def test_ctrl_c_is_answered_once(place: Place, tmp_path: Path) -> None:
    output = to_train(tmp_path, TALKS)
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
    run, other, third = (to_train(tmp_path / name, TALKS) for name in ("run", "other", "third"))
    broken = tmp_path / "broken"
    shutil.copytree(place.whole(0), broken)
    for checkpoint in list_checkpoints(broken / "checkpoints"):
        cut(checkpoint / "model.safetensors")
    write_conversations(tmp_path / "fewer.jsonl", TALKS - 1)
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
