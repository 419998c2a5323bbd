"""A folder in which tests let a target, or servers, write answers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.data_gen import regenerate


class RegenerationPlace:
    """A folder with prompts, a recipe for `target`, and calls of the script in this process.

    Args:
        generator: the recipe's section data.generator.
    """

    def __init__(self, folder: Path, target: Path, capsys: pytest.CaptureFixture, generator: dict[str, Any]):
        self.folder, self.target, self.out, self._capsys = folder, target, folder / "out", capsys
        self.path, self.rejects = self.out / "conversations.jsonl", self.out / "conversations.rejects.jsonl"
        self.recipe, self.prompts, self.generator = folder / "recipe.yaml", folder / "prompts.jsonl", generator
        self.write_recipe()

    def write_recipe(self) -> None:
        recipe = {
            "output_dir": str(self.out),
            "target": {"model": str(self.target), "dtype": "float32", "device": "cpu"},
            "data": {"prompts": str(self.prompts), "max_length": 200, "generator": self.generator},
        }
        self.recipe.write_text(yaml.safe_dump(recipe))

    def write_prompts(self, *lines: Any) -> None:
        """Bytes as they are, all else as JSON."""
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.prompts.write_bytes(b"".join(text + b"\n" for text in texts))

    def run(self, *arguments: str) -> str:
        """What a run prints."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(sys, "argv", ["regenerate.py", str(self.recipe), *arguments])
            regenerate.main()
        return self.printed()

    def printed(self) -> str:
        return self._capsys.readouterr().out

    def records(self, path: Path | None = None) -> list[dict[str, Any]]:
        """The lines of the file that a run writes, or of another."""
        path = path or self.path
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def by_id(self) -> dict[str, dict[str, Any]]:
        return {record["id"]: record for record in self.records()}
