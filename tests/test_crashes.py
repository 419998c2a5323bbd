"""Killed at any moment, nothing is lost, nothing is twice, and the losses are the same.

The exhaustive tests kill regeneration and training 200 times each, half of the times by the clock and half at a drawn
write, rename or fsync; the quick ones die at the moments that were once wrong, and meet full disks, SIGTERM and Ctrl-C.
"""

import json
import random
import re
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file

from draftsmith.models.checkpoint import file_digest, load_drafter, read_drafter_config
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.schema import TargetSection
from draftsmith.train.run.checkpoints import list_checkpoints, settle
from tests.conftest import make_target, make_tokenizer
from tests.crash import CAN_FORK, CrashLab, Ending, Fault
from tests.store_cases import assert_same_store
from tests.thinning import a_few
from tests.training_runs import metrics, to_train

pytestmark = pytest.mark.skipif(not CAN_FORK, reason="kills forked processes")

BEHIND_SCRIPTS = ("draftsmith.data_gen.answers.regeneration", "draftsmith.train.run.trainer")  # they import slowly
REGENERATE, TRAIN = "draftsmith.data_gen.regenerate", "draftsmith.train.eagle3"
KILLS = 200
CONVERSATIONS = 40
STEPS = 30
CAPTURE_LAYERS = [0, 1, 2]


@pytest.fixture(scope="module")
def lab() -> Iterator[CrashLab]:
    with CrashLab([*BEHIND_SCRIPTS, "transformers.models.llama.modeling_llama"]) as lab:
        yield lab


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe for both scripts, with its target and prompts: conversations of 1 to 3 turns and six bad lines."""
    folder = tmp_path_factory.mktemp("crashes")
    model = make_target(num_layers=len(CAPTURE_LAYERS))
    model.generation_config.eos_token_id = list(range(4, 320, 25))  # so that random weights end their answers
    model.save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    prompts: list[Any] = [
        {"id": f"q{i}", "messages": [{"role": "user", "content": f"the cat {i} {n}"} for n in range(1 + i % 3)]}
        for i in range(CONVERSATIONS)
    ]
    prompts[7:7] = [
        {"id": "long", "messages": [{"role": "user", "content": "rain " * 400}]},
        {"id": "mute", "messages": [{"role": "system", "content": "one line\u2028another\x85a third"}]},
        {"id": "image", "messages": [{"role": "user", "content": [{"type": "image", "url": "x"}]}]},
    ]
    lines = [json.dumps(prompt).encode() for prompt in prompts]
    lines[3:3] = [b'{"id": "torn", "messages": [', b"\xff\xfe\x00{", b"caf\xe9"]
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
        "train": {
            "max_steps": STEPS,
            "batch_size": 4,
            "learning_rate": 0.003,
            "save_every_steps": 3,
            "keep_checkpoints": 2,
            "log_every_steps": 2,
            "validate_every_steps": 5,
            "validation_conversations": 4,
            "ttt_steps": 3,
            "mixed_precision": "no",
            "trackers": [],
        },
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def arguments(recipe: Path, output: Path, *more: str) -> list[str]:
    return [str(recipe), f"output_dir={output}", *more]


def kill_until_it_ends(
    run: Callable[..., Ending], chance: random.Random, whole: Ending, at_most: int, after_each: Callable[[], None]
) -> Counter[str]:
    """Starts `run` again and again, killed at a drawn moment each time, until one ends by itself: kills by kind.

    Args:
        whole: how an uninterrupted run ended, its events counted.
        at_most: kills after which it is left alone.
        after_each: looks at what a kill left.
    """
    kills: Counter[str] = Counter()
    while True:
        if kills.total() == at_most:
            kind, ending = "none", run()
        elif chance.random() < 0.5:
            kind, ending = "clock", run(kill_after=chance.random() * whole.seconds)
        else:
            fault = Fault.drawn(chance, whole.events)
            kind, ending = fault.event, run(fault=fault)
        if ending.status == 0:
            return kills
        assert ending.status == -signal.SIGKILL, ending.output
        kills[kind] += 1
        after_each()


def told(
    capsys: pytest.CaptureFixture,
    what: str,
    runs: int,
    kills: Counter[str],
    started: float,
    found: Counter[str] | None = None,
) -> None:
    kinds = ", ".join(f"{count} {kind}" for kind, count in kills.most_common())
    counts = "".join(f"; {name} {count}" for name, count in (found or {}).items())
    with capsys.disabled():
        print(f"\n{what}: {kills.total()} kills ({kinds}) in {runs} runs, {time.monotonic() - started:.0f} s{counts}")


# Regeneration.


def regenerated(output: Path) -> tuple[bytes, dict[str, bytes], Counter[bytes]]:
    """(what is in the file, lines by conversation, rejects)."""
    content = (output / "conversations.jsonl").read_bytes()
    lines = {json.loads(line)["id"]: line for line in content.split(b"\n")[:-1]}
    return content, lines, Counter((output / "conversations.rejects.jsonl").read_bytes().split(b"\n"))


def check_regenerated(output: Path, expected: Path) -> None:
    content, lines, rejects = regenerated(output)
    _, expected_lines, expected_rejects = regenerated(expected)
    found = {
        "lost": len(expected_lines.keys() - lines.keys()),
        "twice": content.count(b"\n") - len(lines),
        "different": sum(lines[name] != line for name, line in expected_lines.items() if name in lines),
        "torn": len(content) - content.rfind(b"\n") - 1,
        "rejects lost": (expected_rejects - rejects).total(),
        "rejects twice": (rejects - expected_rejects).total(),
    }
    assert not any(found.values()), found


@pytest.fixture(scope="module")
def whole_regeneration(lab: CrashLab, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ending]:
    """(output_dir, how it ended) of a run that nothing interrupts."""
    output = tmp_path_factory.mktemp("whole")
    ending = lab.run(REGENERATE, arguments(recipe, output), count_events=True)
    assert ending.status == 0, ending.output
    content, lines, rejects = regenerated(output)
    assert len(lines) == content.count(b"\n") == CONVERSATIONS and len(rejects) == 6 + 1
    return output, ending


def with_states(output: Path) -> list[str]:
    """Arguments by which regeneration stores states, in several shards."""
    return [f"data.states={output / 'states'}", "data.capture={dtype: float32, shard_megabytes: 0.1}"]


@pytest.fixture(scope="module")
def whole_with_states(lab: CrashLab, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ending]:
    output = tmp_path_factory.mktemp("whole")
    ending = lab.run(REGENERATE, arguments(recipe, output, *with_states(output)), count_events=True)
    assert ending.status == 0 and " shards" in ending.output, ending.output
    return output, ending


@pytest.mark.slow
@pytest.mark.exhaustive
def test_200_kills_of_regeneration_lose_and_repeat_nothing(
    lab: CrashLab,
    recipe: Path,
    whole_regeneration: tuple[Path, Ending],
    whole_with_states: tuple[Path, Ending],
    tmp_path: Path,
    capsys: pytest.CaptureFixture,
) -> None:
    """Every second run stores states."""
    chance, kills, runs, started = random.Random(0), Counter[str](), 0, time.monotonic()
    while kills.total() < KILLS:
        output, kept = tmp_path / f"run{runs}", b""
        expected, whole = whole_with_states if runs % 2 else whole_regeneration
        more = with_states(output) if runs % 2 else []
        path = output / "conversations.jsonl"

        def no_line_was_touched(path: Path = path) -> None:
            nonlocal kept
            content = path.read_bytes() if path.exists() else b""
            assert content.startswith(kept)
            kept = content[: content.rfind(b"\n") + 1]

        def run(output: Path = output, more: list[str] = more, **how: Any) -> Ending:
            return lab.run(REGENERATE, arguments(recipe, output, *more), **how)

        kills += kill_until_it_ends(run, chance, whole, 20, no_line_was_touched)
        assert path.read_bytes().startswith(kept)
        check_regenerated(output, expected)
        if runs % 2:
            assert_same_store(output / "states", expected / "states")
        runs += 1
    told(capsys, "regeneration", runs, kills, started)


def test_states_go_on_where_a_kill_left_them(
    lab: CrashLab, recipe: Path, whole_with_states: tuple[Path, Ending], tmp_path: Path
) -> None:
    """Killed while the target's folder is made, before a row's states have their name, behind them in the middle of
    the conversation's line, and while shards take the rows' place. The rejected prompts are asked in every run."""
    run = arguments(recipe, tmp_path, *with_states(tmp_path))
    states = tmp_path / "states"
    for fault in (
        *(Fault("rename", 1), Fault("rename", 5), Fault("write", 14, 0.3), Fault("write", 9)),
        *(Fault("remove", 2), Fault("remove", 20)),
    ):
        ending = lab.run(REGENERATE, run, fault=fault)
        assert ending.status == -signal.SIGKILL, f"{fault}: {ending.output}"
    ending = lab.run(REGENERATE, run)
    assert ending.status == 0, ending.output
    check_regenerated(tmp_path, whole_with_states[0])
    assert_same_store(states, whole_with_states[0] / "states")


def test_a_disk_that_states_fill_is_one_message(
    lab: CrashLab, recipe: Path, whole_with_states: tuple[Path, Ending], tmp_path: Path
) -> None:
    run = arguments(recipe, tmp_path, *with_states(tmp_path))
    assert lab.run(REGENERATE, run, fault=Fault("rename", 5)).status == -signal.SIGKILL
    ending = lab.run(REGENERATE, run, file_limit=15_000)
    assert ending.status == 2 and "Traceback" not in ending.output and ending.output.count("cannot be written") == 1
    assert f"error: {tmp_path / 'states/written/'}" in ending.output and "make room" in ending.output
    assert lab.run(REGENERATE, run).status == 0
    check_regenerated(tmp_path, whole_with_states[0])
    assert_same_store(tmp_path / "states", whole_with_states[0] / "states")


def test_regeneration_goes_on_behind_torn_lines(
    lab: CrashLab, recipe: Path, whole_regeneration: tuple[Path, Ending], tmp_path: Path
) -> None:
    """Killed in the middle of a reject, twice (the second time while a part of it is cut off), and of an answer."""
    run = arguments(recipe, tmp_path)
    rejects = tmp_path / "conversations.rejects.jsonl"
    for fault in (Fault("write", 2), Fault("truncate", 1), Fault("write", 6, 0.9), Fault("write", 9, 0.999)):
        ending = lab.run(REGENERATE, run, fault=fault)
        assert ending.status == -signal.SIGKILL, ending.output
    torn = (tmp_path / "conversations.jsonl").read_bytes()
    assert torn and not torn.endswith(b"\n") and rejects.read_bytes().endswith(b"\n")
    ending = lab.run(REGENERATE, run)
    assert ending.status == 0 and "its last line was torn" in ending.output
    check_regenerated(tmp_path, whole_regeneration[0])


@pytest.mark.parametrize("full", a_few(["conversations.jsonl", "conversations.rejects.jsonl"], "conversations.jsonl"))
def test_a_full_disk_is_one_message_and_loses_nothing(
    lab: CrashLab, recipe: Path, whole_regeneration: tuple[Path, Ending], tmp_path: Path, full: str
) -> None:
    limit = {"conversations.jsonl": 12_000, "conversations.rejects.jsonl": 500}[full]
    ending = lab.run(REGENERATE, arguments(recipe, tmp_path), file_limit=limit)
    assert ending.status == 2 and "Traceback" not in ending.output
    assert ending.output.count("error: ") == 1
    assert f"error: {tmp_path / full}: cannot be written (File too large)" in ending.output
    left = (tmp_path / full).read_bytes()
    assert left.endswith(b"\n") and 0 < len(left) <= limit
    assert lab.run(REGENERATE, arguments(recipe, tmp_path)).status == 0
    assert (tmp_path / full).read_bytes().startswith(left)
    check_regenerated(tmp_path, whole_regeneration[0])


# Training.


@pytest.fixture(scope="module")
def whole_training(lab: CrashLab, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ending]:
    """(output_dir, how it ended) of a run that nothing interrupts."""
    output = to_train(tmp_path_factory.mktemp("whole"))
    ending = lab.run(TRAIN, arguments(recipe, output), count_events=True)
    assert ending.status == 0, ending.output
    steps = [line["step"] for line in metrics(output)]
    assert steps == [step for step in range(1, STEPS + 1) if step % 2 == 0 or step % 5 == 0]
    return output, ending


def check_trained(output: Path, expected: Path) -> Counter[str]:
    """The same metrics, drafter, checkpoints and files: every one of `expected`, and no other; what was counted."""
    mine, wanted = metrics(output), metrics(expected)
    steps, wanted_steps = (Counter(line["step"] for line in lines) for lines in (mine, wanted))
    tensors, wanted_tensors = (load_file(folder / "drafter/model.safetensors") for folder in (output, expected))
    assert tensors.keys() == wanted_tensors.keys()
    found = {
        "lines lost": (wanted_steps - steps).total(),
        "lines twice": (steps - wanted_steps).total(),
        "lines different": sum(a != b for a, b in zip(mine, wanted, strict=False)),
        "tensors different": sum(not torch.equal(tensors[name], wanted_tensors[name]) for name in tensors),
        "files": sorted(files_of(output) ^ files_of(expected)),
        "checkpoints different": sum(
            file_digest(path) != file_digest(expected / path.relative_to(output))
            for path in output.glob("checkpoints/*/*.safetensors")
            if (expected / path.relative_to(output)).exists()
        ),
        "draft vocabulary": digest_of_vocab(output) != digest_of_vocab(expected),
    }
    assert not any(found.values()), found
    for folder in list_checkpoints(output / "checkpoints"):
        settle(folder.parent)
    assert len(list_checkpoints(output / "checkpoints")) == 2  # none was set aside
    return Counter({name: count for name, count in found.items() if name.startswith("lines")} | {"lines": len(mine)})


def files_of(output: Path) -> set[str]:
    return {path.relative_to(output).as_posix() for path in output.rglob("*")}


def digest_of_vocab(output: Path) -> str:
    return file_digest(output / "draft_vocab.safetensors")


@pytest.mark.slow
@pytest.mark.exhaustive
def test_200_kills_of_training_give_the_same_losses(
    lab: CrashLab, recipe: Path, whole_training: tuple[Path, Ending], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    expected, whole = whole_training
    chance, kills, runs, started = random.Random(0), Counter[str](), 0, time.monotonic()
    found = Counter[str]()
    while kills.total() < KILLS:
        output = to_train(tmp_path / f"run{runs}")

        def run(output: Path = output, **how: Any) -> Ending:
            return lab.run(TRAIN, arguments(recipe, output), **how)

        kills += kill_until_it_ends(run, chance, whole, 20, lambda: None)
        # All steps are done: what is killed now is the replacement of the drafter that stands there.
        kills += kill_until_it_ends(run, chance, run(count_events=True), 5, lambda: None)
        runs += 1
        found.update(check_trained(output, expected))
        shutil.rmtree(output)
    told(capsys, "training", runs, kills, started, found)


def test_training_goes_on_where_checkpoints_are_half_written_or_half_deleted(
    lab: CrashLab, recipe: Path, whole_training: tuple[Path, Ending], tmp_path: Path
) -> None:
    run = arguments(recipe, to_train(tmp_path))
    checkpoints = tmp_path / "checkpoints"
    for fault, left in {
        # The first rename of a run is that of metrics.jsonl, the others publish checkpoints and retire old ones.
        Fault("rename", 2): {"step-00000003.partial"},  # complete but for its name
        Fault("rename", 3): {"step-00000003", "step-00000006.partial"},
        Fault("rename", 4): {"step-00000003", "step-00000006", "step-00000009"},
        Fault("rmdir", 1): {"step-00000003.old", "step-00000006", "step-00000009"},
        Fault("remove", 3): {"step-00000006.old", "step-00000009", "step-00000012"},
        Fault("write", 4): {"step-00000009", "step-00000012", "step-00000015.partial"},
        Fault("rename", 13): {"step-00000024", "step-00000027", "step-00000030"},  # no save will come any more
    }.items():
        ending = lab.run(TRAIN, run, fault=fault)
        assert ending.status == -signal.SIGKILL, ending.output
        assert {path.name for path in checkpoints.iterdir()} == left
    ending = lab.run(TRAIN, run)
    assert ending.status == 0, ending.output
    check_trained(tmp_path, whole_training[0])


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(
    lab: CrashLab, recipe: Path, whole_training: tuple[Path, Ending], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """Every file of the newest one: cut, gone, or with one bit flipped."""
    whole, _ = whole_training
    before, newest = list_checkpoints(whole / "checkpoints")
    names = sorted(path.name for path in newest.iterdir())
    assert {"manifest.json", "trainer_state.json", "model.safetensors", "optimizer.safetensors"} == set(names)
    for name in names:
        for harm in (cut, flip, Path.unlink):
            copy = tmp_path / "copy"
            shutil.copytree(whole / "checkpoints", copy)
            harm(copy / newest.name / name)
            settle(copy)
            printed = capsys.readouterr().out
            # A manifest of other digests makes any file look wrong.
            assert f"{copy / newest.name}: damaged: {'' if name == 'manifest.json' else name}" in printed
            assert {path.name for path in copy.iterdir()} == {before.name, f"{newest.name}.damaged"}
            shutil.rmtree(copy)

    shutil.copytree(whole, tmp_path / "run")
    damaged = tmp_path / "run/checkpoints" / newest.name
    flip(damaged / "optimizer.safetensors")
    ending = lab.run(TRAIN, arguments(recipe, tmp_path / "run"))
    assert ending.status == 0, ending.output
    assert f"{damaged}: damaged: optimizer.safetensors is not what was written (its sha256 differs)" in ending.output
    assert f"resumed from {damaged.parent / before.name}" in ending.output
    shutil.rmtree(damaged.with_suffix(".damaged"))
    check_trained(tmp_path / "run", whole)

    for checkpoint in list_checkpoints(damaged.parent):
        cut(checkpoint / "model.safetensors")
    left = files_of(tmp_path / "run")
    ending = lab.run(TRAIN, arguments(recipe, tmp_path / "run"))
    assert ending.status == 2 and "Traceback" not in ending.output
    assert ending.output.count("model.safetensors has ") == 2 and "delete the folder to start again" in ending.output
    assert files_of(tmp_path / "run") == left  # a second start must not begin anew


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    at = content.index(b"sha256") + 12 if path.name == "manifest.json" else len(content) // 2
    content[at] ^= 1
    path.write_bytes(content)


def test_a_drafter_is_there_whenever_its_replacement_is_killed(
    lab: CrashLab, recipe: Path, whole_training: tuple[Path, Ending], tmp_path: Path
) -> None:
    whole, _ = whole_training
    output = tmp_path / "run"
    shutil.copytree(whole, output)
    drafter, run = output / "drafter", arguments(recipe, output)
    (drafter / "provenance.json").write_text("older")
    expected = load_file(drafter / "model.safetensors")

    def killed_at(event: str, number: int) -> set[str]:
        """The drafter's folders then."""
        ending = lab.run(TRAIN, run, fault=Fault(event, number))
        assert ending.status == -signal.SIGKILL, ending.output
        read_drafter_config(drafter)
        return {path.name for path in output.glob("drafter*")}

    assert killed_at("rename", 2) == {"drafter", "drafter.partial"}  # the first rename is metrics.jsonl's
    assert (drafter / "provenance.json").read_text() == "older"
    assert killed_at("rename", 3) == {"drafter.replaced", "drafter.partial"}  # neither stands in its place
    found = load_drafter_of(recipe, drafter)
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    assert killed_at("mkdir", 4) == {"drafter"}  # the next writer puts the new one there before it began its own
    assert (drafter / "provenance.json").read_text() != "older"
    assert killed_at("rename", 3) == {"drafter.replaced", "drafter.partial"}
    assert lab.run(TRAIN, run).status == 0
    check_trained(output, whole)


def load_drafter_of(recipe: Path, drafter: Path) -> dict[str, torch.Tensor]:
    model = str(recipe.parent / "target")
    target = Target(TargetFiles(TargetSection(model=model, dtype="float32", device="cpu")).load_model(), CAPTURE_LAYERS)
    identity = TargetFiles(TargetSection(model=model)).identity_of(target)
    return load_drafter(drafter, target, identity).state_dict()


def test_a_full_disk_keeps_the_checkpoints_that_there_are(
    lab: CrashLab, recipe: Path, whole_training: tuple[Path, Ending], tmp_path: Path
) -> None:
    run = arguments(recipe, to_train(tmp_path))
    checkpoints = tmp_path / "checkpoints"
    assert lab.run(TRAIN, run, fault=Fault("rename", 3)).status == -signal.SIGKILL
    for limit in (50_000, 100_000):  # too little for model.safetensors, for optimizer.safetensors
        ending = lab.run(TRAIN, run, file_limit=limit)
        assert ending.status == 2 and "Traceback" not in ending.output
        assert f"error: {checkpoints / 'step-00000006.partial'}: cannot be written (" in ending.output
    ending = lab.run(TRAIN, run)
    assert ending.status == 0 and f"resumed from {checkpoints / 'step-00000003'}" in ending.output
    check_trained(tmp_path, whole_training[0])


def logged(output: Path, lines: int) -> Callable[[], bool]:
    path = output / "metrics.jsonl"
    return lambda: path.exists() and path.read_bytes().count(b"\n") >= lines


def test_sigterm_saves_and_ctrl_c_ends_without_a_traceback(
    lab: CrashLab, recipe: Path, whole_training: tuple[Path, Ending], tmp_path: Path
) -> None:
    run = arguments(recipe, to_train(tmp_path))
    ending = lab.run(TRAIN, run, kill_when=logged(tmp_path, 4), kill_with=signal.SIGTERM)
    assert ending.status == 0 and "Traceback" not in ending.output, ending.output
    stopped = re.search(r"SIGTERM: stopped after step (\d+), which is saved", ending.output)
    last = list_checkpoints(tmp_path / "checkpoints")[-1]
    assert stopped and last.name == f"step-{int(stopped[1]):08d}" and not (tmp_path / "drafter").exists()
    ending = lab.run(TRAIN, run, kill_when=logged(tmp_path, 12), kill_with=signal.SIGINT)
    assert ending.status == 130 and "Traceback" not in ending.output, ending.output
    said = re.search(r"^interrupted after step (\d+); the same command resumes from step (\d+) \(", ending.output, re.M)
    last = list_checkpoints(tmp_path / "checkpoints")[-1]
    assert said and int(said[1]) >= 12 and last.name == f"step-{int(said[2]):08d}" and f"({last})" in ending.output
    ending = lab.run(TRAIN, run)
    assert ending.status == 0 and "resumed from" in ending.output
    check_trained(tmp_path, whole_training[0])
