"""States that regeneration stores while it writes: capture's store, without a second run of the target."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data_gen import capture as capture_script
from draftsmith.data_gen.answers import generators
from draftsmith.data_gen.states import capturing
from draftsmith.data_gen.states.store import StoreManifest
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from tests.conftest import make_tokenizer
from tests.data_gen.test_crashes import cut
from tests.data_gen.test_drafted_answers import add_drafter
from tests.data_gen.test_regenerate import Workspace
from tests.data_gen.test_regenerate import place as place  # the fixture
from tests.store_cases import SMALL_SHARDS, assert_same_store, rows_of
from tests.thinning import a_few
from tests.training_runs import run_main

LAYERS = "drafter.capture_layers=[0,1,2]"
EAGLE = "drafter={kind: eagle}"


def states_of(place: Workspace, *more: str, dtype: str = "float32", name: str = "states") -> list[str]:
    """Arguments of a run that stores states in several shards."""
    return [f"data.states={place.folder / name}", f"data.capture.dtype={dtype}", *SMALL_SHARDS, *(more or (LAYERS,))]


def capture(place: Workspace, *arguments: str) -> None:
    run_main(capture_script, place.recipe, *arguments)


def assert_as_captured(place: Workspace, *arguments: str, **how: str) -> None:
    """The stored states are those that a run of the target gives."""
    capture(place, *states_of(place, *arguments, **how, name="captured"))
    assert_same_store(place.folder / "states", place.folder / "captured")


@pytest.mark.parametrize(
    "drafter, dtype, drafts",
    a_few([(LAYERS, "float32", True), (EAGLE, "bfloat16", True), (EAGLE, "fp8", False)], (LAYERS, "float32", True)),
)
def test_the_store_is_there_when_the_answers_are(
    place: Workspace, monkeypatch: pytest.MonkeyPatch, drafter: str, dtype: str, drafts: bool
) -> None:
    """Conversations of one to three turns, rows that replace others, answers cut by both limits and of one token."""
    place.ask(12)
    drafted = [f"data.generator.drafter={add_drafter(place, steps=30)}"] if drafts else []
    plain = ["data.max_length=36", f"data.conversations={place.folder / 'plain.jsonl'}"]
    place.run(*plain)
    printed = place.run("data.max_length=36", *states_of(place, drafter, dtype=dtype), *drafted)
    assert f"{place.folder / 'states'}: " in printed and "shards" in printed
    turns = [turn for record in place.records() for turn in record["turns"]]
    assert {len(turn["output_token_ids"]) == 1 for turn in turns} == {True, False}
    written = {record["id"]: record["turns"] for record in place.records()}
    assert written == {record["id"]: record["turns"] for record in place.records(place.folder / "plain.jsonl")}
    assert_as_captured(place, drafter, "data.max_length=36", dtype=dtype)
    monkeypatch.setattr(TargetFiles, "load", lambda *_: pytest.fail("the target was loaded"))
    capture(place, "data.max_length=36", *states_of(place, drafter, dtype=dtype))


@pytest.mark.slow
def test_templates_that_rewrite_history_give_a_row_for_each_turn(place: Workspace) -> None:
    tokenizer = make_tokenizer()
    shown = "{% if m['role'] == 'user' %}{{ m['content'] }}{% endif %}"
    tokenizer.chat_template = "{% for m in messages %}{{ m['role'] }}" + shown + "{% endfor %}"
    tokenizer.save_pretrained(place.target)
    place.ask(9)
    place.run(*states_of(place))
    assert len(rows_of(load_recipe(place.recipe, states_of(place)))) > len(place.records())
    assert_as_captured(place)


def test_capture_adds_only_what_was_answered_without_states(
    place: Workspace, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    place.ask(12)
    place.run("data.max_prompts=5")
    printed = place.run(*states_of(place))
    total = len(rows_of(load_recipe(place.recipe)))
    before = sum(int(row.id[1:]) < 5 for row in rows_of(load_recipe(place.recipe)))
    assert f"the states of {total - before} of {total} rows are stored; `draftsmith capture` adds the rest" in printed
    assert StoreManifest.read(place.folder / "states") is None
    ran: list[str] = []
    states_of_rows = capturing.states_of

    def watched(rows: Any, *others: Any) -> Any:
        ran.extend(row.id for row in rows)
        return states_of_rows(rows, *others)

    monkeypatch.setattr(capturing, "states_of", watched)
    capture(place, *states_of(place), "--plan")
    assert f"written        {total - before} of {total} rows with their answers" in capsys.readouterr().out
    capture(place, *states_of(place))
    assert len(ran) == before and all(int(name[1:]) < 5 for name in ran)
    assert_as_captured(place)


def zeros(path: Path) -> None:
    path.write_bytes(b"\0" * path.stat().st_size)  # as a power cut may leave it


@pytest.mark.parametrize("harm", a_few([cut, zeros, Path.unlink], zeros))
def test_damaged_rows_are_captured_anew(place: Workspace, harm: Callable[[Path], None]) -> None:
    place.ask(6)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(capturing.Capture, "run", lambda *_: None)  # killed before it
        place.run(*states_of(place))
    harm(next((place.folder / "states/written").glob("*.safetensors")))
    place.run(*states_of(place))  # all is answered: makes the store if all rows are there
    capture(place, *states_of(place))
    assert_as_captured(place)


def test_states_of_two_kinds_do_not_mix(place: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ask(6)
    place.run("data.max_prompts=3")
    place.run(*states_of(place), "data.max_prompts=5")  # three rows lack states
    with pytest.raises(UserError, match=r"capture_layers: \[0, 1, 2\] there, \[0, 1\] now"):
        capture(place, *states_of(place, "drafter.capture_layers=[0,1]"))
    monkeypatch.setattr(generators, "LoadedModels", None)
    with pytest.raises(UserError, match=r"dtype: 'float32' there, 'fp8' now"):
        place.run(*states_of(place, dtype="fp8"))


def test_the_plan_says_how_large_the_states_are(place: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    place.ask(6)
    with monkeypatch.context() as patch:
        patch.setattr(generators, "LoadedModels", None)
        printed = place.run("--plan", *states_of(place))
        assert "states         [0, 1, 2] and the last, in float32: at most " in printed
        assert "are free" in printed and not (place.folder / "states").exists()
        assert "states  " not in place.run("--plan", LAYERS)
        usage = shutil.disk_usage(place.folder)._replace(free=15_000)  # enough for one of them
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        for plan in ([], ["--plan"]):
            with pytest.raises(UserError, match=r"data\.states: at least 0\.0 MB are to be written to .* with the an"):
                place.run(*states_of(place), *plan)
        with pytest.raises(UserError, match=r"drafter\.capture_layers: .* between 0 and 2"):
            place.run(*states_of(place, "drafter.capture_layers=[7]"))
