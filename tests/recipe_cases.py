"""A small recipe that tests of recipes write and read."""

from pathlib import Path

import pytest

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe

SMALLEST = "output_dir: runs/x\ntarget:\n  model: org/name\n"


@pytest.fixture
def write(tmp_path: Path):
    def write(text: str) -> str:
        path = tmp_path / "recipe.yaml"
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def problems_of(path: str, *overrides: str) -> list[str]:
    with pytest.raises(UserError) as caught:
        load_recipe(path, overrides)
    return caught.value.problems
