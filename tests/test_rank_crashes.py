"""Killed at any moment, two ranks go on as if nothing had been, under DDP and ZeRO.

The slow tests kill both ranks at once or one of them, at drawn moments of the clock: what one rank leaves of another's
work only processes show. A sum of two ranks does not depend on who comes first, so a run that goes on is compared bit
for bit with one that nothing interrupts.
"""

import os
import random
import re
import shutil
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.models.vocab import DraftVocab
from draftsmith.train.run.checkpoints import list_checkpoints
from draftsmith.train.run.processes import StopRequest
from tests.conftest import make_target, make_tokenizer
from tests.crash import CAN_FORK, CrashLab, Ending
from tests.ranks import ON_CPUS
from tests.test_crashes import TRAIN, check_trained, cut, flip, logged
from tests.thinning import EXHAUSTIVE, a_few
from tests.training_runs import metrics, to_train, write_conversations

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="kills forked processes")

MODULES = [
    "draftsmith.train.run.trainer",
    "transformers.models.llama.modeling_llama",
    "deepspeed.ops.op_builder.all_ops",
    "deepspeed.runtime.zero.muon.muon_optimizer",  # imports torch's compiler, which takes seconds
]
RANKS = 2
STEPS, CONVERSATIONS = 12, 16
# What a rank says that was alive when another one died.
LOST_PEER = re.compile(r"torch\.distributed\.Dist\w+Error: |RuntimeError: .*(gloo|[Cc]onnect|[Pp]eer|[Ss]ocket|store)")


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where DeepSpeed puts what it compiles."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(scope="module")
def lab(compiled: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[CrashLab]:
    places = {"TORCH_EXTENSIONS_DIR": str(compiled), "TMPDIR": str(tmp_path_factory.mktemp("temporary"))}
    with CrashLab(MODULES, ON_CPUS | places | {"DS_ACCELERATOR": "cpu"}) as lab:
        yield lab


class Place:
    """Runs of two ranks from one recipe; saves, validations and replays lie between its twelve steps."""

    def __init__(self, folder: Path, lab: CrashLab):
        self.folder, self.lab = folder, lab
        self.recipe = folder / "recipe.yaml"
        make_target(num_layers=3).save_pretrained(folder / "target")
        make_tokenizer().save_pretrained(folder / "target")
        recipe = {
            "output_dir": str(folder / "never"),
            "target": {"model": str(folder / "target"), "dtype": "float32", "device": "cpu"},
            "drafter": {"vocab_size": 160, "capture_layers": [0, 1, 2]},
            "train": {
                "max_steps": STEPS,
                "batch_size": 2,
                "learning_rate": 0.003,
                "ttt_steps": 2,
                "save_every_steps": 3,
                "keep_checkpoints": 2,
                "log_every_steps": 2,
                "validate_every_steps": 4,
                "validation_conversations": 3,
                "mixed_precision": "no",
                "trackers": [],
            },
            "eval": {"tree": {"policy": "chain", "nodes": 2}},
        }
        self.recipe.write_text(yaml.safe_dump(recipe))
        self.wholes: dict[int, tuple[Path, Ending]] = {}

    def run(self, output: Path, stage: int, **how: Any) -> Ending:
        # Without replay a step's line may come after the next checkpoint: its sums are then saved and restored.
        overrides = [f"train.zero_stage={stage}", f"train.eval_replay={2 if stage else 0}"]
        return self.lab.run(TRAIN, [str(self.recipe), f"output_dir={output}", *overrides], ranks=RANKS, **how)

    def whole(self, stage: int) -> tuple[Path, Ending]:
        """(output_dir, how it ended) of a run that nothing interrupts."""
        if stage not in self.wholes:
            output = to_train(self.folder / f"whole{stage}", CONVERSATIONS)
            ending = self.run(output, stage)
            assert ending.statuses == [0] * RANKS, ending.output
            lines = metrics(output)
            wanted = {*range(2, STEPS + 1, 2), *range(4, STEPS + 1, 4), *(range(3, STEPS + 1, 3) if stage else ())}
            assert [line["step"] for line in lines] == sorted(wanted)
            assert sum("replay_tau" in line for line in lines) == (4 if stage else 0)
            self.wholes[stage] = output, ending
        return self.wholes[stage]


@pytest.fixture(scope="module")
def place(lab: CrashLab, tmp_path_factory: pytest.TempPathFactory) -> Place:
    return Place(tmp_path_factory.mktemp("ranks"), lab)


def check_killed(ending: Ending, rank: int | None) -> None:
    """The other ranks were killed with it, had ended, were ended by the launcher, or lost their peer."""
    assert -signal.SIGKILL in (ending.statuses if rank is None else [ending.statuses[rank]]), ending.output
    assert set(ending.statuses) <= {0, 1, -signal.SIGTERM, -signal.SIGKILL}, ending.output
    errors = re.findall(r"^(?:\[rank\d\]: )?([\w.]+(?:Error|Exception): .*)$", ending.output, re.MULTILINE)
    assert all(LOST_PEER.match(error) for error in errors), (errors, ending.output)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stage", "kills"), [(3, 5), *(pytest.param(stage, 60, marks=EXHAUSTIVE) for stage in (0, 2, 3))]
)
def test_kills_of_two_ranks_give_the_same_losses(stage: int, kills: int, place: Place, tmp_path: Path) -> None:
    expected, whole = place.whole(stage)
    chance, output = random.Random(stage), to_train(tmp_path / "run", CONVERSATIONS)
    while kills:
        rank = chance.choice((None, *range(RANKS)))
        ending = place.run(output, stage, rank=rank, kill_after=chance.random() * whole.seconds)
        if ending.status:
            check_killed(ending, rank)
            kills -= 1
        else:
            check_trained(output, expected)
            shutil.rmtree(output)
            to_train(output, CONVERSATIONS)
    assert place.run(output, stage).status == 0
    check_trained(output, expected)


@pytest.mark.slow
@pytest.mark.parametrize("stage", a_few([0, 2, 3], 3))
def test_a_rank_dies_while_a_checkpoint_is_written(stage: int, place: Place, tmp_path: Path) -> None:
    expected, _ = place.whole(stage)
    output = to_train(tmp_path, CONVERSATIONS)
    for rank, step in ((0, 6), (1, 9)):
        partial = output / f"checkpoints/step-{step:08d}.partial"
        ending = place.run(output, stage, rank=rank, kill_when=partial.exists)
        check_killed(ending, rank)
    ending = place.run(output, stage)
    assert ending.statuses == [0] * RANKS and "resumed from" in ending.output, ending.output
    check_trained(output, expected)


@pytest.mark.slow
def test_deepspeed_compiles_nothing(place: Place, compiled: Path) -> None:
    """A start that is killed while it does would leave a lock, for which every other one waits."""
    place.whole(2)
    assert not any(compiled.iterdir())


@pytest.mark.parametrize(
    ("stage", "rank", "again_after"),
    a_few([(0, None, 0.05), (2, 1, None), (3, 0, None)], (0, None, 0.05)),
)
def test_sigterm_stops_all_ranks_after_the_same_step(
    stage: int, rank: int | None, again_after: float | None, place: Place, tmp_path: Path
) -> None:
    """To both, by a scheduler and then by torchrun, which forwards its own; and to one alone."""
    expected, _ = place.whole(stage)
    output = to_train(tmp_path, CONVERSATIONS)
    stop: dict[str, Any] = {"kill_when": logged(output, 2), "kill_with": signal.SIGTERM, "again_after": again_after}
    ending = place.run(output, stage, rank=rank, **stop)
    assert ending.statuses == [0] * RANKS and "Traceback" not in ending.output, ending.output
    [stopped] = re.findall(r"SIGTERM: stopped after step (\d+), which is saved", ending.output)
    last = list_checkpoints(output / "checkpoints")[-1]
    assert last.name == f"step-{int(stopped):08d}" and not (output / "drafter").exists()
    ending = place.run(output, stage)
    assert ending.statuses == [0] * RANKS and ending.output.count(f"resumed from {last}") == 1, ending.output
    # The step that it stopped after may be one that is not saved otherwise; what there is at the end is the same.
    check_trained(output, expected)


@pytest.mark.slow
def test_ctrl_c_is_answered_once(place: Place, tmp_path: Path) -> None:
    output = to_train(tmp_path, CONVERSATIONS)
    late = "train.save_every_steps=9"
    stop: dict[str, Any] = {"kill_when": logged(output, 2), "kill_with": signal.SIGINT, "more": {0: [late], 1: [late]}}
    ending = place.run(output, 0, **stop)
    assert ending.statuses == [130] * RANKS and "Traceback" not in ending.output, ending.output
    [said] = re.findall(r"^interrupted.*", ending.output, re.M)  # on a line of its own
    assert re.match(r"interrupted after step [4-8]; no checkpoint yet \(the first one comes at step 9\): ", said), said


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
def test_a_damaged_checkpoint_is_named_once_and_the_one_before_is_used(place: Place, tmp_path: Path) -> None:
    whole, output = place.whole(2)[0], tmp_path / "run"
    shutil.copytree(whole, output)
    before, newest = list_checkpoints(output / "checkpoints")
    flip(newest / "optimizer.safetensors")
    ending = place.run(output, 2)
    assert ending.statuses == [0] * RANKS, ending.output
    [told] = re.findall(r"^.*: damaged: .*$", ending.output, re.MULTILINE)
    assert told.startswith(f"{newest}: damaged: optimizer.safetensors")
    assert ending.output.count(f"resumed from {before}") == 1
    shutil.rmtree(newest.with_suffix(".damaged"))
    check_trained(output, whole)
    for checkpoint in list_checkpoints(output / "checkpoints"):
        cut(checkpoint / "model.safetensors")
    check_refused(place.run(output, 2), "[rank 0] error: 3 problems", "delete the folder to start again")


def check_refused(ending: Ending, *words: str) -> None:
    """All ranks say no, and one of them why."""
    assert ending.statuses == [2] * RANKS and "Traceback" not in ending.output, ending.output
    assert ending.output.count("] error: ") == 1 and all(word in ending.output for word in words), ending.output


@pytest.mark.slow
def test_ranks_that_see_otherwise_do_not_wait_for_each_other(place: Place, tmp_path: Path) -> None:
    """Conversations, recipe, vocabulary, checkpoints."""
    run, other = to_train(tmp_path / "run", CONVERSATIONS), to_train(tmp_path / "other", CONVERSATIONS)
    write_conversations(tmp_path / "fewer.jsonl", CONVERSATIONS - 1)
    DraftVocab(torch.arange(1, 320, 2), 320).save(other / "draft_vocab.safetensors")
    for stage, more, words in (
        (0, f"data.conversations={tmp_path / 'fewer.jsonl'}", ("training rows: rank 0 has '", ", rank 1 has '")),
        (2, "train.max_steps=9", ("train.max_steps: rank 0 has 12, rank 1 has 9",)),
        (0, f"output_dir={other}", ("draft vocabulary: rank 0 has '", ", rank 1 has '")),
    ):
        check_refused(place.run(run, stage, more={1: [more]}), "the processes disagree", *words)
        assert not (run / "checkpoints").exists()
    shutil.copytree(place.whole(2)[0], run, dirs_exist_ok=True)
    to_train(other, CONVERSATIONS)
    ending = place.run(run, 2, more={1: [f"output_dir={other}"]})
    check_refused(ending, f"[rank 1] error: {other / 'checkpoints'}", "output_dir must be one folder")


@pytest.mark.slow
def test_a_full_disk_ends_all_ranks_with_one_message(place: Place, tmp_path: Path) -> None:
    output = to_train(tmp_path, CONVERSATIONS)
    for stage in (0, 2):
        ending = place.run(output, stage, file_limit=40_000)
        check_refused(ending, f"error: {output / 'checkpoints/step-00000003.partial'}: cannot be written (")
    assert place.run(output, 0).statuses == [0] * RANKS
    check_trained(output, place.whole(0)[0])


# The lab itself.


@pytest.mark.slow
def test_the_lab_launches_and_ends_ranks_as_torchrun_does(tmp_path: Path) -> None:
    def once(code: str) -> list[str]:
        return ["-n", "1", "-r", "1", f"import os, signal, time; rank = os.environ['RANK']; {code}"]

    def prints(line: str) -> str:
        """In one write, begun with a line's end: `print` writes text and end apart, and ranks' writes may mix."""
        return f"os.write(1, f'\\n{line}\\n'.encode())"

    ready = [tmp_path / f"ready{rank}" for rank in range(RANKS)]
    sleeps = f"open({str(tmp_path / 'ready')!r} + rank, 'w').close(); time.sleep(60)"

    def all_ready() -> bool:
        return all(path.exists() for path in ready)

    with CrashLab(["timeit", "draftsmith.recipes.command.cli"]) as lab:
        ending = lab.run("timeit", once(prints('{rank} of {os.environ["WORLD_SIZE"]}')), ranks=RANKS)
        assert ending.statuses == [0, 0] and {"0 of 2", "1 of 2"} <= set(ending.output.splitlines())
        for code, rank, statuses in (
            (sleeps, None, [-signal.SIGKILL, -signal.SIGKILL]),
            (sleeps, 0, [-signal.SIGKILL, -signal.SIGTERM]),
            (f"signal.signal(signal.SIGTERM, signal.SIG_IGN); {sleeps}", 1, [-signal.SIGKILL, -signal.SIGKILL]),
        ):
            ending = lab.run("timeit", once(code), ranks=RANKS, rank=rank, kill_when=all_ready)
            assert ending.statuses == statuses and ending.status == -signal.SIGKILL
            for path in ready:
                path.unlink()
        fails = f"rank == '1' and os._exit(3); {sleeps}"
        ending = lab.run("timeit", once(fails), ranks=RANKS)
        assert ending.statuses == [-signal.SIGTERM, 3] and ending.status == 3
        ending = lab.run("timeit", once(prints("more")), ranks=RANKS, more={1: [prints("mine")]})
        assert ending.output.splitlines().count("mine") == 1
        with pytest.raises(AssertionError, match=r"still ran after 0\.5 s(.|\n)*Fatal Python error: Aborted"):
            lab.run("timeit", once(sleeps), ranks=RANKS, timeout=0.5)
