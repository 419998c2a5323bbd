"""Capture of hidden states: damage, disks, several processes, and that nothing is torn."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from draftsmith.data_gen.states import capturing
from draftsmith.data_gen.states.capturing import Capture
from draftsmith.data_gen.states.store import Store, StoreManifest, entry_path, file_problem
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.rejects import Rejects
from tests.crash_states import full_disk, restore, watched
from tests.data_gen.test_crashes import EVERY, cut, flip
from tests.store_cases import CONVERSATIONS, KINDS, SHARDS, capture, files_of, refusals
from tests.store_cases import copy as copy
from tests.store_cases import recipe_path as recipe_path
from tests.store_cases import store as store
from tests.store_cases import stores as stores
from tests.training_runs import to_train

ROOT = Path(__file__).parents[2]


# Damage.


@pytest.mark.parametrize(
    "name, harm, problem",
    [
        ("shard-00003.safetensors", cut, "bytes instead of"),
        ("shard-00003.safetensors", flip, "its sha256 differs"),
        ("target/head.safetensors", flip, "its sha256 differs"),
        ("target/tokenizer.json", Path.unlink, "no such file"),
    ],
)
def test_damaged_files_are_named_and_written_anew(
    recipe_path: Path, store: Path, copy: Path, tmp_path: Path, name: str, harm: Callable[[Path], None], problem: str
) -> None:
    output = to_train(tmp_path / "run", CONVERSATIONS)
    harm(copy / name)
    said = refusals(recipe_path, f"data.states={copy}", f"output_dir={output}", "train.max_steps=20")
    assert f"{copy / name}: " in said and problem in said and "draftsmith capture --verify" in said
    capture(recipe_path, f"data.states={copy}", "--verify")
    assert files_of(copy) == files_of(store)


@pytest.mark.parametrize("change", ["{", "[]", {"kind": "c2t"}, {"target_files": None}])
def test_a_damaged_manifest_is_told(copy: Path, change: str | dict[str, Any]) -> None:
    path = copy / "manifest.json"
    path.write_text(change if isinstance(change, str) else json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=r"manifest\.json: "):
        Store(copy)


# Disk.


@pytest.mark.parametrize("kind, dtype", [("eagle3", "fp8"), pytest.param("eagle", "float32", marks=pytest.mark.slow)])
def test_the_plan_says_within_two_percent_what_is_written(
    recipe_path: Path, tmp_path: Path, kind: str, dtype: str, capsys: pytest.CaptureFixture
) -> None:
    """Headers of files, config and tokenizer aside."""
    overrides = [*KINDS[kind], f"data.states={tmp_path / 'states'}", f"data.capture.dtype={dtype}"]
    capture(recipe_path, *overrides, "--plan")
    assert not (tmp_path / "states").exists() and "are free" in capsys.readouterr().out
    expected = capture_of(recipe_path, *overrides).bytes_left
    capture(recipe_path, *overrides)
    written = sum(path.stat().st_size for path in (tmp_path / "states").rglob("*.safetensors"))
    assert expected == pytest.approx(written, rel=0.02)
    assert Store(tmp_path / "states").manifest.complete


def capture_of(recipe_path: Path, *overrides: str) -> Capture:
    recipe = load_recipe(recipe_path, overrides)
    return Capture(recipe, TargetFiles(recipe.target), Rejects())


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    recipe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"MB are still to be written to .* and 0\.1 MB are free there: make room"):
        capture(recipe_path, f"data.states={tmp_path / 'states'}")
    assert not files_of(tmp_path / "states")


def test_written_rows_make_room_but_for_the_largest_shard(
    recipe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = capture_of(recipe_path, f"data.states={tmp_path}")
    (tmp_path / "written").mkdir()
    (tmp_path / "written/a.safetensors").write_bytes(bytes(10**6))
    wanted.manifest.files = {"config.json": {}}
    largest = max(map(wanted.wanted.bytes_of_rows, wanted.shards))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    free = largest
    wanted.check_room()
    free = largest - 1
    with pytest.raises(UserError, match="make room"):
        wanted.check_room()


# Several processes.


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size)):
        monkeypatch.setenv(name, str(value))


def test_processes_share_the_shards_and_write_what_one_writes(
    recipe_path: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Whichever ends last says that all is captured."""
    for rank, last in ((2, False), (0, False), (1, True)):
        as_rank(monkeypatch, rank, 3)
        capture(recipe_path, f"data.states={tmp_path}")
        own = {f"shard-{number:05d}.safetensors" for number in range(rank, SHARDS, 3)}
        assert own <= files_of(tmp_path).keys()
        printed = capsys.readouterr().out
        assert (f"{SHARDS} of {SHARDS} shards" in printed) is last and ("writes  " in printed) is (rank == 0)
    assert files_of(tmp_path) == files_of(store)


def test_each_process_verifies_its_own_shards(
    recipe_path: Path, store: Path, copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in (2, 3):
        flip(copy / f"shard-{number:05d}.safetensors")
    as_rank(monkeypatch, 1, 2)
    capture(recipe_path, f"data.states={copy}", "--verify")
    differing = {name for name, content in files_of(store).items() if files_of(copy)[name] != content}
    assert differing == {"shard-00002.safetensors"}


def test_shards_of_something_else_are_not_mixed_in(recipe_path: Path, tmp_path: Path, copy: Path) -> None:
    """As a process writes them that sees other conversations, or another target, than rank 0."""
    entry = json.loads(entry_path(copy, 2).read_text())
    entry_path(copy, 2).write_text(json.dumps(entry | {"made_of": "else"}))
    for use in (lambda: Store(copy), lambda: capture(recipe_path, f"data.states={copy}")):
        with pytest.raises(UserError, match=r"shard-00002\.safetensors: its states differ from the manifest's"):
            use()


def test_each_process_takes_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        taken: ClassVar[list[int]] = []
        device_count = staticmethod(lambda: 2)
        set_device = staticmethod(taken.append)

    as_rank(monkeypatch, 1, 3)
    assert capturing.device_of_rank("cpu") is None
    monkeypatch.setattr(torch, "get_device_module", lambda device: Cuda)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert capturing.device_of_rank("auto") == "cuda:1" and Cuda.taken == [1]
    assert capturing.device_of_rank("cuda:0") is None
    as_rank(monkeypatch, 2, 3)
    with pytest.raises(UserError, match=r"the machine of rank 2 has 2 of kind cuda for 3 processes or more; start 2"):
        capturing.device_of_rank("auto")
    as_rank(monkeypatch, 0, 1)
    assert capturing.device_of_rank("auto") is None  # `TargetFiles.load` decides


def test_two_captures_do_not_write_into_one_folder(recipe_path: Path, copy: Path) -> None:
    (copy / "shard-00002.safetensors").unlink()
    left = files_of(copy)
    with alone_in(copy), pytest.raises(UserError, match="another run is writing there"):
        capture(recipe_path, f"data.states={copy}")
    assert files_of(copy) == left
    capture(recipe_path, f"data.states={copy}")
    assert len(files_of(copy)) == len(left) + 1


# Kills.


@pytest.mark.parametrize("every", EVERY)
def test_a_capture_that_was_killed_goes_on(recipe_path: Path, store: Path, tmp_path: Path, every: int) -> None:
    """What was whole is not made again. In the second half, the target's folder replaces a damaged one."""
    directory = tmp_path / "states"
    with watched(directory) as states:
        capture(recipe_path, f"data.states={directory}")
        (directory / "target/head.safetensors").unlink()
        capture(recipe_path, f"data.states={directory}")
    for state in states:
        check_what_a_kill_left(restore(state, directory))
    for state in states[::-every]:  # the last one holds the complete store
        restore(state, directory)
        for left in (".tmpA1b2C3", ".lock"):  # as safetensors and a killed process leave them
            (directory / left).touch()
        manifest = StoreManifest.read(directory)
        whole = [directory / said["file"] for said in manifest.shards.values()] if manifest else []
        before = {path: path.stat().st_mtime_ns for path in whole}
        capture(recipe_path, f"data.states={directory}")
        assert all(path.stat().st_mtime_ns == written for path, written in before.items())
        assert files_of(directory) == files_of(store)


def check_what_a_kill_left(directory: Path) -> None:
    """Whatever has an entry is whole."""
    manifest = StoreManifest.read(directory)
    for said in manifest.shards.values() if manifest else ():
        assert file_problem(directory / said["file"], said, digest=True) is None


def test_a_disk_that_fills_up_is_one_message_and_what_was_written_is_whole(
    recipe_path: Path, store: Path, tmp_path: Path
) -> None:
    directory = tmp_path / "states"
    message = r"states: cannot be written .*shards are whole"
    with pytest.raises(UserError, match=message), full_disk(90_000):  # the target's files are smaller
        capture(recipe_path, f"data.states={directory}")
    check_what_a_kill_left(directory)
    assert not list(directory.glob("*.partial"))
    capture(recipe_path, f"data.states={directory}")
    assert files_of(directory) == files_of(store)
