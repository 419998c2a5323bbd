"""Kills while trees are labelled and while a folder is written."""

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data_gen import label_trees
from draftsmith.data_gen.trees import labelling
from draftsmith.data_gen.trees.labelled_trees import TreesManifest
from draftsmith.eval.decoding.contenders import Lineup
from draftsmith.models.c2t import C2tClassifier, C2tConfig
from draftsmith.models.checkpoint import read_drafter, save_drafter
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import atomic
from draftsmith.train import c2t
from draftsmith.train.run import classifier as classifier_training
from tests.c2t_cases import content_of, recipe_of
from tests.c2t_cases import place as place
from tests.crash import CAN_FORK, CrashLab, Fault

BEHIND_SCRIPTS = (labelling.__name__, classifier_training.__name__)  # they import slowly
LABEL, TRAIN = label_trees.__name__, c2t.__name__


@pytest.fixture(scope="module")
def lab() -> Iterator[CrashLab]:
    if not CAN_FORK:
        pytest.skip("kills forked processes")
    with CrashLab(
        [
            LABEL,
            TRAIN,
            "draftsmith.data_gen.trees.labelling",
            "draftsmith.train.run.classifier",
            "transformers.models.llama.modeling_llama",
        ]
    ) as lab:
        yield lab


@pytest.mark.slow
@pytest.mark.exhaustive
def test_labelling_goes_on_after_a_kill_at_any_moment(place: Path, lab: CrashLab, tmp_path: Path) -> None:
    def run(directory: Path, **how: Any) -> Any:
        return lab.run(LABEL, [str(place / "recipe.yaml"), f"labels.out={directory}"], **how)

    whole = run(tmp_path / "whole", count_events=True)
    assert whole.status == 0, whole.output
    assert whole.events["rename"] == 6
    expected = content_of(tmp_path / "whole")
    faults = [Fault("rename", n) for n in range(1, 7)] + [Fault("fsync", n) for n in (1, 3, 7)]
    faults += [Fault("write", n, 0.4) for n in range(1, 1 + whole.events["write"])]
    for number, fault in enumerate(faults):
        directory = tmp_path / f"killed {number}"
        assert run(directory, fault=fault).status == -signal.SIGKILL
        done = TreesManifest.read(directory)
        shards = (
            {shard["file"]: (directory / shard["file"]).stat().st_mtime_ns for shard in done.shards.values()}
            if done
            else {}
        )
        ending = run(directory)
        assert ending.status == 0, ending.output
        assert content_of(directory) == expected
        assert all((directory / name).stat().st_mtime_ns == changed for name, changed in shards.items())
    directory = tmp_path / "by the clock"
    for share in (0.5, 0.7, 0.8, 0.9):
        run(directory, kill_after=share * whole.seconds)
    (directory / ".tmpA1b2C3").touch()  # as safetensors leaves it
    assert run(directory).status == 0
    assert content_of(directory) == expected


class Killed(BaseException):
    """In a kill's place: nothing of ours catches it."""


@contextmanager
def killed_at(number: int) -> Iterator[None]:
    """Whoever writes dies before its `number`-th (from 1) deed among renames, deletions, new folders and new files."""
    deeds = 0

    def counted(deed: Callable[..., Any]) -> Callable[..., Any]:
        def do(*arguments: Any, **settings: Any) -> Any:
            nonlocal deeds
            deeds += 1
            if deeds == number:
                raise Killed
            return deed(*arguments, **settings)

        return do

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic.os, "replace", counted(os.replace))
        patch.setattr(atomic.shutil, "rmtree", counted(shutil.rmtree))
        patch.setattr(Path, "mkdir", counted(Path.mkdir))
        patch.setattr(Path, "write_text", counted(Path.write_text))
        yield


def write_version(directory: Path, version: str) -> None:
    with atomic.atomic_folder(directory, ("a", "b")) as partial:
        (partial / "a").write_text(version)
        (partial / "b").write_text(version)


def version_of(directory: Path) -> str:
    folder = atomic.written(directory)
    (version,) = {(folder / name).read_text() for name in ("a", "b")}
    return version


@pytest.mark.parametrize("link", [False, True])
def test_a_folder_is_whole_and_a_stranger_s_files_are_kept_whatever_was_killed(link: bool, tmp_path: Path) -> None:
    """Two saves in a row, each killed at every deed: the second one begins where the first one left off."""
    seen, states = set(), set()
    for first in range(1, 30):
        for second in range(1, 30):
            root = tmp_path / f"{first} {second}"
            directory = real = root / "it"
            if link:
                (root / "elsewhere").mkdir(parents=True)
                real = root / "elsewhere/it"
                directory.symlink_to(real)
            write_version(directory, "0")
            (real / "notes").mkdir()
            (real / "notes/mine.txt").write_text("dear")
            (real / "left.txt").write_text("self")

            def kill(number: int, version: str, directory: Path = directory) -> bool:
                try:
                    with killed_at(number):
                        write_version(directory, version)
                except Killed:
                    return True
                return False

            one = kill(first, "1")
            states.add(tuple(sorted(path.name for path in real.parent.iterdir() if path != directory or not link)))
            found = version_of(directory)
            assert found in "01"
            two = kill(second, "2")
            assert version_of(directory) in {found, "2"}
            seen.add((found, version_of(directory)))
            write_version(directory, "3")
            assert version_of(directory) == "3"
            assert {path.name for path in real.iterdir()} == {"a", "b", "notes", "left.txt"}
            assert (real / "notes/mine.txt").read_text() == "dear"
            assert [path for path in real.parent.iterdir() if path != directory] == ([real] if link else [])
            assert directory.is_symlink() == link
            if not two:
                break
        if not one:
            break
    assert seen == {("0", "0"), ("0", "2"), ("1", "1"), ("1", "2")}
    assert ("it.partial", "it.replaced") in states  # neither stands in its place


def test_a_folder_that_is_all_that_is_left_is_put_back_and_nothing_of_equal_name_is_lost(tmp_path: Path) -> None:
    write_version(tmp_path / "it", "0")
    (tmp_path / "it").rename(tmp_path / "it.replaced")
    with pytest.raises(Killed), killed_at(2):  # the first deed puts it back
        write_version(tmp_path / "it", "1")
    assert version_of(tmp_path / "it") == "0"
    for folder in ("it", "it.replaced"):
        (tmp_path / folder).mkdir(exist_ok=True)
        (tmp_path / folder / "notes").write_text(folder)
    with pytest.raises(UserError, match="only one can be kept"):
        write_version(tmp_path / "it", "1")
    assert (tmp_path / "it.replaced/notes").read_text() == "it.replaced"
    (tmp_path / "file").write_text("dear")
    with pytest.raises(UserError, match="is a file; move it away"):
        write_version(tmp_path / "file", "1")
    assert (tmp_path / "file").read_text() == "dear"


def test_classifier_and_drafter_keep_what_is_not_theirs(place: Path, tmp_path: Path) -> None:
    recipe = recipe_of(place)
    lineup = Lineup(recipe.target)
    drafter = read_drafter(place / "run/drafter", lineup.target.frozen_head)
    writers: list[Callable[[], None]] = [
        lambda: C2tClassifier(C2tConfig()).save(tmp_path / "c2t", {"metrics.jsonl": ""}),
        lambda: save_drafter(tmp_path / "drafter", drafter, lineup.identity, "", {}),
    ]
    for name, write in zip(("c2t", "drafter"), writers, strict=True):
        write()
        own = set(content_of(tmp_path / name))
        (tmp_path / name / "README.md").write_text("dear")
        write()
        assert set(content_of(tmp_path / name)) == own | {"README.md"}
    C2tClassifier(C2tConfig()).save(tmp_path / "c2t")  # losses of another one do not stand beside it
    assert set(content_of(tmp_path / "c2t")) == {"config.json", "model.safetensors", "README.md"}
