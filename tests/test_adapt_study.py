"""The study of adapted drafters: its questions, and the recipes that it writes."""

import json
from pathlib import Path
from typing import Any

import pytest

from docs.study import adapt
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.stdlib import split_of

QUESTION = [{"role": "user", "content": "?"}]


def test_questions_of_held_out_modules_are_not_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = [
        ("asyncio.x", "def f():\n    pass", "Documented. " * 9),
        ("asyncio.x", "def g():\n    pass", "Documented. " * 9),  # the same docstring again
        ("asyncio.x", "def h():\n    pass", "Short."),
        ("email.x", "def f():\n    pass", "Another text. " * 9),
    ]
    monkeypatch.setattr(adapt, "documented_functions", lambda: iter(found))
    adapt.write_questions(tmp_path)
    asked: dict[str, list[Any]] = {
        split: [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        for split in ("train", "heldout")
    }
    assert [split_of("asyncio"), split_of("email")] == list(asked)
    for split, module in (("train", "asyncio.x"), ("heldout", "email.x")):
        [question] = asked[split]
        assert question["messages"][0]["content"] == f"Document this function of `{module}`:\ndef f():\n    pass"


@pytest.mark.parametrize("method", adapt.METHODS)
def test_the_recipes_are_valid_and_differ_in_what_is_compared(tmp_path: Path, method: str) -> None:
    for split in ("train", "heldout"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps({"id": split, "messages": QUESTION}) + "\n")
    path = adapt.recipe(tmp_path, "run", Path("runs/demo"), max_steps=20, seed=2, **adapt.METHODS[method])
    recipe = load_recipe(path)
    assert (recipe.drafter.lora is None) == (method == "all weights")
    assert recipe.target.adapter == str(tmp_path / "adapter") and recipe.train.seed == 2
    assert recipe.drafter.init_from == "runs/demo/drafter" and recipe.drafter_dir == tmp_path / "run/drafter"
