"""Folders in which tests let a target, or servers, write answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from draftsmith.data_gen import regenerate
from draftsmith.data_gen.server_client import generator as server_generator
from draftsmith.models.chat import render_prompt
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import VOCAB_SIZE, make_tokenizer
from tests.data_gen.fake_server import STOP, FakeServer, expected
from tests.training_runs import run_main

LIMIT = 24  # max_new_tokens of servers


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
        run_main(regenerate, self.recipe, *arguments)
        return self.printed()

    def printed(self) -> str:
        return self._capsys.readouterr().out

    @property
    def tokenizer(self) -> Any:
        return TargetFiles(TargetSection(model=str(self.target))).tokenizer

    def records(self, path: Path | None = None) -> list[dict[str, Any]]:
        """The lines of the file that a run writes, or of another."""
        path = path or self.path
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def by_id(self) -> dict[str, dict[str, Any]]:
        return {record["id"]: record for record in self.records()}


class ServedPlace(RegenerationPlace):
    """With a target that has a config and a tokenizer and no weights, whose answers come from servers."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
        target = folder / "target"
        self._monkeypatch = monkeypatch
        self.change(FIRST_PAUSE_SECONDS=0.01, FIRST_LOOK_SECONDS=0.05)
        config = AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, eos_token_id=STOP, max_position_embeddings=512)
        config.save_pretrained(target)
        make_tokenizer().save_pretrained(target)
        super().__init__(folder, target, capsys, {"kind": "openai", "max_new_tokens": LIMIT, "temperature": 0.7})

    def change(self, **constants: float) -> None:
        """Those of the module that asks servers."""
        for name, value in constants.items():
            self._monkeypatch.setattr(server_generator, name, value)

    def ask(self, count: int, turns: int = 2) -> None:
        """Conversations of 1 to `turns` user turns."""
        lines = [
            {"id": f"q{i}", "messages": [{"role": "user", "content": f"cat {i}.{n}"} for n in range(1 + i % turns)]}
            for i in range(count)
        ]
        self.write_prompts(*lines)

    def use(self, *servers: FakeServer, **generator: Any) -> None:
        self.generator |= {"base_urls": [server.url for server in servers], **generator}
        self.write_recipe()

    def leaves_some(self) -> str:
        """What a run prints that could not have all answered: it ends with 1."""
        with pytest.raises(SystemExit, match="1"):
            self.run()
        return self.printed()

    def fails(self, *arguments: str) -> tuple[list[str], str]:
        """(problems, what was printed) of a run that a UserError ends."""
        with pytest.raises(UserError) as error:
            self.run(*arguments)
        return error.value.problems, self.printed()

    def check(self, count: int | None = None) -> list[dict[str, Any]]:
        """Every conversation that is written is there once, with exactly the right answers. All of them, or `count`."""
        asked, tokenizer = [json.loads(line) for line in self.prompts.read_text().splitlines()], self.tokenizer
        turns = {line["id"]: len(line["messages"]) for line in asked}
        records = self.records()
        assert len({record["id"] for record in records}) == len(records) == (len(asked) if count is None else count)
        for record in records:
            for number, turn in enumerate(record["turns"]):
                prompt = render_prompt(tokenizer, record["messages"][: 2 * number + 1])
                right = expected(tokenizer, list(prompt), LIMIT)
                assert turn["prompt_token_ids"] == prompt
                assert (turn["output_token_ids"], turn["finish_reason"]) == right
                said = tokenizer.decode(right[0], skip_special_tokens=True)
                assert record["messages"][2 * number + 1] == {"role": "assistant", "content": said}
                assert right[1] == "stop" or number == len(record["turns"]) - 1
            assert len(record["turns"]) + record.get("unasked_turns", 0) == turns[record["id"]]
        return records
