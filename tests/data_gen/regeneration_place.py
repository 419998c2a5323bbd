"""A folder in which tests let a target, or servers, write answers."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from draftsmith.data_gen import regenerate
from draftsmith.models.chat import render_prompt
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.sections.target import TargetSection
from tests.clock import POLL_SECONDS, lines_in
from tests.conftest import make_target, make_tokenizer
from tests.ranks import ROOT
from tests.training_runs import run_main, write_recipe

# Many stop tokens, so that random-weight targets end most of their answers.
STOPS = (4, 9, 11, 50, 60, 70, 80, 200, 210, 220, 230, 240, 250)


def save_target(folder: Path, **settings: Any) -> Path:
    """Of three layers; it ends most answers."""
    make_target(num_layers=3, eos_token_id=list(STOPS), **settings).save_pretrained(folder)
    make_tokenizer().save_pretrained(folder)
    return folder


class RegenerationPlace:
    """A folder with prompts, a recipe for `target`, and calls of the script in this process.

    Args:
        capsys: pytest's; only `run` and `printed` need it.
        generator: the recipe's section data.generator.
        sections: as `write_recipe` takes them.
    """

    def __init__(self, folder: Path, target: Path, capsys: Any, generator: dict[str, Any], **sections: Any):
        self.folder, self.target, self.out, self._capsys = folder, target, folder / "out", capsys
        self.path, self.rejects = self.out / "conversations.jsonl", self.out / "conversations.rejects.jsonl"
        self.recipe, self.prompts, self.generator = folder / "recipe.yaml", folder / "prompts.jsonl", generator
        self._sections = sections
        self.write_recipe()

    def write_recipe(self) -> None:
        data = {"prompts": str(self.prompts), "max_length": 200, "generator": self.generator}
        write_recipe(self.folder, self.target, output_dir=str(self.out), data=data, **self._sections)

    def write_prompts(self, *lines: Any) -> None:
        """Bytes as they are, all else as JSON."""
        texts = [line if isinstance(line, bytes) else json.dumps(line).encode() for line in lines]
        self.prompts.write_bytes(b"".join(text + b"\n" for text in texts))

    def ask(self, count: int, *more: Any, turns: int = 3) -> None:
        """Conversations q0, q1, .. of 1 to `turns` user turns, then `more` lines, as `write_prompts` takes them."""
        asked = [[{"role": "user", "content": f"the cat {i} {n}"} for n in range(1 + i % turns)] for i in range(count)]
        lines = [{"id": f"q{i}", "messages": messages, "meta": {"number": i}} for i, messages in enumerate(asked)]
        self.write_prompts(*lines, *more)

    def run(self, *arguments: str) -> str:
        """What a run prints."""
        run_main(regenerate, self.recipe, *arguments)
        return self.printed()

    def printed(self) -> str:
        return self._capsys.readouterr().out

    def kill_at(self, lines: int) -> None:
        """Runs in a process of its own, which is killed when so many conversations are written."""
        process = subprocess.Popen([sys.executable, str(ROOT / "data_gen/regenerate.py"), str(self.recipe)])
        while lines_in(self.path) < lines and process.poll() is None:
            time.sleep(POLL_SECONDS)
        process.kill()
        assert process.wait() == -signal.SIGKILL

    @property
    def tokenizer(self) -> Any:
        return TargetFiles(TargetSection(model=str(self.target))).tokenizer

    def records(self, path: Path | None = None) -> list[dict[str, Any]]:
        """The lines of the file that a run writes, or of another."""
        path = path or self.path
        return [json.loads(line) for line in path.read_bytes().splitlines()] if path.exists() else []

    def by_id(self, path: Path | None = None) -> dict[str, dict[str, Any]]:
        return {record["id"]: record for record in self.records(path)}

    def check(self, count: int | None = None) -> list[dict[str, Any]]:
        """The records: each conversation is there once, all of them or `count`, with what was asked and answered."""
        asked = {line["id"]: len(line["messages"]) for line in self.records(self.prompts)}
        records, tokenizer = self.records(), self.tokenizer
        assert len({record["id"] for record in records}) == len(records) == (len(asked) if count is None else count)
        for record in records:
            messages, turns = record["messages"], record["turns"]
            assert len(messages) == 2 * len(turns) == 2 * (asked[record["id"]] - record.get("unasked_turns", 0))
            for number, turn in enumerate(turns):
                assert turn["prompt_token_ids"] == render_prompt(tokenizer, messages[: 2 * number + 1])
                said = tokenizer.decode(turn["output_token_ids"], skip_special_tokens=True)
                assert messages[2 * number + 1] == {"role": "assistant", "content": said}
                assert turn["finish_reason"] == "stop" or number == len(turns) - 1  # a cut answer ends the conversation
        return records
