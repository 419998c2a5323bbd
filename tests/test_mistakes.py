"""Users' mistakes (mistakes.yaml): the command ends with 2 and one message, which names the key and the way out, before
anything is written."""

import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import yaml

from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.command import console
from draftsmith.recipes.loader import all_keys
from tests.recipes.test_recipes import SMALLEST, problems_of
from tests.training_runs import fresh_accelerator, no_dry_run, to_train, write_recipe

__all__ = ["no_dry_run"]  # a fixture

MISTAKES: dict[str, list[list[str]]] = yaml.load(
    Path(__file__).with_name("mistakes.yaml").read_text(),
    yaml.BaseLoader,  # `no` is text, too
)
OF_COMMANDS = [(command, *case) for command, cases in MISTAKES.items() if command != "recipe" for case in cases]
WITHOUT_RECIPE = ("import-drafter", "init", "evalute")


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, six_steps: Path, target_dir: Path) -> Path:
    """What the words of mistakes.yaml name: a tiny target, a finished run, runs before training, and other files."""
    folder = tmp_path_factory.mktemp("mistakes")
    (folder / "small.yaml").write_text(SMALLEST)
    (folder / "prompts.jsonl").write_text('{"prompt": "the cat"}\n')
    (folder / "taken").touch()
    (folder / "blank.jsonl").write_text("\n \n")
    for name in ("not-packed.jsonl.gz", "packed.parquet.gz"):
        shutil.copy(folder / "prompts.jsonl", folder / name)
    for name in ("folder", "written", "empty"):
        (folder / name).mkdir()
    shutil.copy(folder / "prompts.jsonl", folder / "written/conversations.jsonl")
    (folder / "target").symlink_to(target_dir)
    (folder / "done").symlink_to(six_steps / "run")
    for name in ("run", "wide", "other"):
        to_train(folder / name)
    DraftVocab(torch.arange(160), 352).save(folder / "wide/draft_vocab.safetensors")
    DraftVocab(torch.arange(160), 320).save(
        folder / "other/draft_vocab.safetensors", {"tokenizer_fingerprint": "another"}
    )
    write_recipe(folder, Path("target"), output_dir="run", eval={"prompts": "prompts.jsonl", "max_new_tokens": 9})
    return folder


@pytest.fixture
def in_place(place: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """In the place, which must be left as it was."""
    monkeypatch.chdir(place)

    def content() -> dict[Path, int | None]:
        """Of a folder its name alone: a lock may come in it."""
        paths = [path for path in place.rglob("*") if path.name != ".lock"]
        return {path: path.stat().st_mtime_ns if path.is_file() else None for path in paths}

    before = content()
    yield
    assert content() == before


def told(words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> str:
    """What `draftsmith` says of a mistake on stderr."""
    fresh_accelerator()
    monkeypatch.setattr(sys, "argv", ["draftsmith", *words])
    with pytest.raises(SystemExit) as ended:
        console.main()
    said = capsys.readouterr().err
    assert ended.value.code == 2 and "Traceback" not in said, said
    return said


@pytest.mark.parametrize("case", MISTAKES["recipe"], ids=" ".join)
def test_a_mistake_in_a_recipe_is_told_with_its_place(
    case: list[str], in_place: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    *words, key, fix = case
    said = told(["conversations", "small.yaml", *words], monkeypatch, capsys)
    assert re.match(r"error: (override '|small\.yaml)", said) and said.count("\n") == 1, said
    assert key in said and re.search(fix, said), said


@pytest.mark.usefixtures("in_place", "no_dry_run")
@pytest.mark.parametrize("case", OF_COMMANDS, ids=" ".join)
def test_a_mistake_is_told_before_anything_is_done(
    case: tuple[str, ...], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    command, *words, key, fix = case
    recipe = [] if command in WITHOUT_RECIPE else ["recipe.yaml"]
    said = told([command, *recipe, *words], monkeypatch, capsys)
    assert key in said and re.search(fix, said, re.DOTALL), said


def test_every_key_checks_its_type_and_is_meant_by_its_misspelling(in_place: None) -> None:
    checked = 0
    for key in all_keys():
        problems = problems_of("small.yaml", f"{key}=[[[1]]]")
        if any("expected a valid list, given a section" in problem for problem in problems):
            continue  # below a list of sections, which overrides reach by number
        assert any(f"`{key}" in problem for problem in problems), problems
        misspelt = f"{key[:-1]}q{key[-1]}=1"
        assert any(f"did you mean `{key}`" in problem for problem in problems_of("small.yaml", misspelt)), key
        checked += 1
    assert checked > 100
