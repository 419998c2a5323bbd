"""Runs with pictures: from a store, interrupted, with replay, and in two processes."""

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data_gen.states.store import Store, states_length
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from tests.conftest import VOCAB_SIZE
from tests.evaluation_cases import write_lines
from tests.ranks import ROOT, run_ranks
from tests.store_cases import capture, rows_of
from tests.thinning import a_few
from tests.tiny_vision import FAMILIES, picture, save_vision_target
from tests.train.test_processes import check_same
from tests.training_runs import metrics, train, write_recipe

OVER_EAGLE = {"kind": "vispec", "compressed_tokens": 2}
OVER_EAGLE3 = {"kind": "vispec", "base": "eagle3"}
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "the", "dog", "ran", "to", "a", "red", "house", "by", "the"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for family in FAMILIES:
        save_vision_target(folder / family, family)
    for name, size in {"wide": (32, 16), "tall": (16, 24), "small": (16, 16)}.items():
        picture(*size, seed=len(name)).save(folder / f"{name}.png")
    return folder


def conversations_of(home: Path, count: int) -> list[dict[str, Any]]:
    """Every third one is text alone; the others show one picture or two."""
    records = []
    for i in range(count):
        shown = [{"type": "image", "path": str(home / f"{name}.png")} for name in ("wide", "tall", "small")[: i % 3]]
        question = {"role": "user", "content": [*shown, {"type": "text", "text": " ".join(WORDS[i % 9 : i % 9 + 4])}]}
        answer = {"role": "assistant", "content": " ".join(WORDS[i % 7 : i % 7 + 6])}
        records.append({"id": f"c{i}", "messages": [question, answer]})
    return records


def recipe_in(folder: Path, home: Path, family: str, drafter: dict[str, Any], **settings: Any) -> Path:
    """A recipe with its conversations and draft vocabulary."""
    write_lines(folder / "conversations.jsonl", *conversations_of(home, 15))
    DraftVocab.full(VOCAB_SIZE).save(folder / "draft_vocab.safetensors", {})
    train = {"max_steps": 4, "batch_size": 3, "save_every_steps": 2, "log_every_steps": 1, "validate_every_steps": 4}
    train |= {"validation_conversations": 3, "eval_replay": 3, "learning_rate": 3e-3, "mixed_precision": "no"}
    sections = {"train": train | settings, "eval": {"tree": {"policy": "chain", "nodes": 4}}}
    capture = {"dtype": "float32", "shard_megabytes": 0.05, "batch_tokens": 100}
    own: dict[str, Any] = {"output_dir": str(folder), "drafter": drafter, "data": {"capture": capture}}
    return write_recipe(folder, home / family, **own, **sections)


SPECIALISTS = {"specialists": 2, "positions_per_specialist": 1}
# And the drafter that the store was captured for.
CASES = [
    ("llava", OVER_EAGLE, OVER_EAGLE),
    ("llava", OVER_EAGLE, {"kind": "eagle"}),
    ("qwen2_5_vl", OVER_EAGLE3 | SPECIALISTS | {"compressed_tokens": 3}, OVER_EAGLE3),
    ("qwen2_5_vl", {"kind": "eagle"}, {"kind": "eagle"}),
]


@pytest.mark.parametrize(("family", "drafter", "captured_for"), a_few(CASES, CASES[2]))
def test_a_run_from_a_store_is_one_with_the_target(
    family: str,
    drafter: dict[str, Any],
    captured_for: dict[str, Any],
    home: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Last without the target: neither its layers nor its tower are there."""
    path = recipe_in(tmp_path / "run", home, family, drafter)
    capture(path, f"drafter={captured_for}")
    states, runs = tmp_path / "run/states", {}
    pictures = sorted(each.name for each in (states / "pictures").iterdir())
    assert len(pictures) == 2 and all(name.endswith(".safetensors") for name in pictures)
    offline = [f"data.states={states}"]
    alone = [*offline, f"target.model={states / 'target'}"]
    for name, more in {"online": [], "offline": offline, "alone": alone}.items():
        if name == "alone":
            monkeypatch.setattr(Target, "read_insert", lambda *_: pytest.fail("the tower was asked"))
        output = shutil.copytree(tmp_path / "run", tmp_path / name, ignore=shutil.ignore_patterns("states"))
        runs[name] = metrics(train(path, f"output_dir={output}", *more))
    assert runs["offline"] == runs["alone"]
    for mine, its in zip(runs["offline"], runs["online"], strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(its["grad_norm"], rel=1e-3)
        assert mine.get("replay_tau") == its.get("replay_tau")
    assert runs["online"][-1]["replay_tau"] >= 1


def test_a_store_without_states_of_pictures_serves_no_drafter_that_reads_them(
    home: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nor does capture go on with them."""
    path = recipe_in(tmp_path / "run", home, "llava", OVER_EAGLE)
    capture(path)
    states = tmp_path / "run/states"
    tokens, rows = Store(states).manifest.total("tokens"), rows_of(load_recipe(path))
    of_pictures = sum(each.length for row in rows for each in row.inserts)
    assert of_pictures > 100 and tokens == sum(map(states_length, rows)) - of_pictures
    assert f"of {tokens:,} tokens, " in capsys.readouterr().out
    baseline = "drafter={kind: eagle}"
    with pytest.raises(UserError, match=r"left out there, because .* vispec reads none; kind eagle .* another folder"):
        train(path, f"data.states={states}", baseline)
    with pytest.raises(UserError, match=r"picture_states: False there, True now\); name another data\.states"):
        capture(path, baseline)


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "stages"), [*a_few([(OVER_EAGLE3, (0, 1, 2))]), (OVER_EAGLE, (3,))])
def test_two_ranks_follow_the_trajectory_of_one(
    drafter: dict[str, Any], stages: Sequence[int], home: Path, tmp_path: Path
) -> None:
    """A micro-batch is one row, so that a rank often has text alone while the other has pictures."""
    settings = {"batch_size": 1, "gradient_accumulation_steps": 4}
    one = train(recipe_in(tmp_path / "one", home, "llava", drafter, **settings))
    for stage in stages:
        settings = {"batch_size": 1, "gradient_accumulation_steps": 2, "zero_stage": stage}
        path = recipe_in(tmp_path / f"zero{stage}", home, "llava", drafter, **settings)
        run_ranks(2, str(ROOT / "train/vispec.py"), [str(path)])
        check_same(path.parent, one, steps=4)
