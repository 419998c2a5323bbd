"""A recipe whose answers come from servers, and what must be true of the file that a run writes."""

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoConfig

from draftsmith.data_gen.server_client import generator as server_generator
from draftsmith.models.chat import render_prompt
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import VOCAB_SIZE, make_tokenizer
from tests.data_gen.fake_server import STOP, FakeServer, expected
from tests.data_gen.regeneration_place import RegenerationPlace

LIMIT = 24  # max_new_tokens


class Place(RegenerationPlace):
    """With a target that has a config and a tokenizer and no weights."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
        target = folder / "target"
        self._monkeypatch = monkeypatch
        self.change(FIRST_PAUSE_SECONDS=0.01, FIRST_LOOK_SECONDS=0.05)
        config = AutoConfig.for_model("llama", vocab_size=VOCAB_SIZE, eos_token_id=STOP, max_position_embeddings=512)
        config.save_pretrained(target)
        make_tokenizer().save_pretrained(target)
        self.tokenizer = TargetFiles(TargetSection(model=str(target))).tokenizer
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
