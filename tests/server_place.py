"""A recipe whose answers come from servers, and what must be true of the file that a run writes."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from transformers import AutoConfig

from draftsmith.data_gen import regenerate
from draftsmith.data_gen.server import generator as server_generator
from draftsmith.models.chat import load_tokenizer, render_prompt
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetSection
from tests.conftest import VOCAB_SIZE, make_tokenizer
from tests.fake_server import STOP, FakeServer, expected

LIMIT = 24  # max_new_tokens


class Place:
    """A folder with a target that has a config and a tokenizer and no weights, prompts, a recipe, and calls of main."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
        self.folder, self.out = folder, folder / "out"
        self.path, self.rejects = self.out / "conversations.jsonl", self.out / "conversations.rejects.jsonl"
        self.recipe, self.prompts, target = folder / "recipe.yaml", folder / "prompts.jsonl", folder / "target"
        self._monkeypatch, self._capsys = monkeypatch, capsys
        monkeypatch.setattr(server_generator, "FIRST_PAUSE_SECONDS", 0.01)
        monkeypatch.setattr(server_generator, "FIRST_LOOK_SECONDS", 0.05)
        config = AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, eos_token_id=STOP, max_position_embeddings=512)
        config.save_pretrained(target)
        make_tokenizer().save_pretrained(target)
        self.tokenizer = load_tokenizer(TargetSection(model=str(target)))
        self.content = {
            "output_dir": str(self.out),
            "target": {"model": str(target), "device": "cpu"},
            "data": {
                "prompts": str(self.prompts),
                "max_length": 200,
                "generator": {"kind": "openai", "max_new_tokens": LIMIT, "temperature": 0.7},
            },
        }

    def ask(self, count: int, turns: int = 2) -> None:
        """Conversations of 1 to `turns` user turns."""
        lines = [
            {"id": f"q{i}", "messages": [{"role": "user", "content": f"cat {i}.{n}"} for n in range(1 + i % turns)]}
            for i in range(count)
        ]
        self.prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def use(self, *servers: FakeServer, **generator: Any) -> None:
        section = self.content["data"]["generator"]
        section |= {"base_urls": [server.url for server in servers], **generator}
        self.recipe.write_text(yaml.safe_dump(self.content))

    def run(self, *arguments: str) -> str:
        self._monkeypatch.setattr(sys, "argv", ["regenerate.py", str(self.recipe), *arguments])
        regenerate.main()
        return self._capsys.readouterr().out

    def leaves_some(self, *arguments: str) -> str:
        """What a run prints that could not have all answered: it ends with 1."""
        with pytest.raises(SystemExit, match="1"):
            self.run(*arguments)
        return self._capsys.readouterr().out

    def fails(self, *arguments: str) -> tuple[list[str], str]:
        """(problems, what was printed) of a run that a UserError ends."""
        with pytest.raises(UserError) as error:
            self.run(*arguments)
        return error.value.problems, self._capsys.readouterr().out

    def records(self, path: Path | None = None) -> list[dict[str, Any]]:
        path = path or self.path
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def check(self, count: int | None = None) -> list[dict[str, Any]]:
        """Every conversation that is written is there once, with exactly the right answers. All of them, or `count`."""
        asked = [json.loads(line) for line in self.prompts.read_text().splitlines()]
        turns = {line["id"]: len(line["messages"]) for line in asked}
        records = self.records()
        assert len({record["id"] for record in records}) == len(records) == (len(asked) if count is None else count)
        for record in records:
            for number, turn in enumerate(record["turns"]):
                prompt = render_prompt(self.tokenizer, record["messages"][: 2 * number + 1])
                right = expected(self.tokenizer, list(prompt), LIMIT)
                assert turn["prompt_token_ids"] == prompt
                assert (turn["output_token_ids"], turn["finish_reason"]) == right
                said = self.tokenizer.decode(right[0], skip_special_tokens=True)
                assert record["messages"][2 * number + 1] == {"role": "assistant", "content": said}
                assert right[1] == "stop" or number == len(record["turns"]) - 1
            assert len(record["turns"]) + record.get("unasked_turns", 0) == turns[record["id"]]
        return records


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Place:
    return Place(tmp_path, monkeypatch, capsys)
