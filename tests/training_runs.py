"""Tiny training runs, in this process: what they read, a recipe of six steps, and the lines that they log."""

import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState

from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.loader import load_recipe
from draftsmith.train import eagle, eagle3, poss, vispec
from draftsmith.train.measure import dry_run, training_plan
from draftsmith.train.measure.metrics_line import THROUGHPUT_KEYS

ROOT = Path(__file__).parent.parent


def write_conversations(path: Path, count: int, seed: int = 0) -> None:
    """Regenerated conversations with their token ids: every second one has two turns."""
    chance = random.Random(seed)
    lines = []
    for i in range(count):
        turns, history = [], []
        for _ in range(1 + i % 2):
            prompt = [*history, 2, *(chance.randrange(5, 320) for _ in range(chance.randint(3, 9))), 4, 3]
            answer = [*(chance.randrange(5, 320) for _ in range(chance.randint(4, 14))), 4]
            turns.append({"prompt_token_ids": prompt, "output_token_ids": answer, "finish_reason": "stop"})
            history = prompt + answer
        messages = [{"role": role, "content": "x"} for _ in turns for role in ("user", "assistant")]
        lines.append(json.dumps({"id": f"c{i}", "messages": messages, "turns": turns}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def to_train(output: Path, conversations: int = 24, draft_tokens: int = 160) -> Path:
    """An output_dir that holds what training reads."""
    write_conversations(output / "conversations.jsonl", conversations)
    DraftVocab(torch.arange(0, 320, 320 // draft_tokens), 320).save(output / "draft_vocab.safetensors")
    return output


SIX_STEPS: dict[str, Any] = {"max_steps": 6, "batch_size": 4, "learning_rate": 0.003, "ttt_steps": 3}
SIX_STEPS |= {"mixed_precision": "no", "save_every_steps": 3, "log_every_steps": 1}
SIX_STEPS |= {"validate_every_steps": 3, "validation_conversations": 4}


@pytest.fixture
def no_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of words: the dry run takes a second or two."""
    monkeypatch.setattr(dry_run, "dry_run", lambda *_, **__: dry_run.DryRun({dry_run.LAYER: 10_000_000}, 10**9))
    monkeypatch.setattr(training_plan, "row_flops", lambda *_: 10**9)


def write_recipe(folder: Path, target: Path, **sections: Any) -> Path:
    """folder/recipe.yaml, a recipe of six steps into folder/run."""
    content = {
        "output_dir": str(folder / "run"),
        "target": {"model": str(target), "dtype": "float32", "device": "cpu"},
        "drafter": {"vocab_size": 160},
        "train": SIX_STEPS,
        **sections,
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    return folder / "recipe.yaml"


def train_six_steps(folder: Path, target: Path) -> None:
    """Makes folder/run, with checkpoints of steps 3 and 6 and the drafter."""
    to_train(folder / "run")
    train(write_recipe(folder, target))


@pytest.fixture
def recipe_path(tmp_path: Path, target_dir: Path) -> Path:
    """A recipe of six steps with its conversations and draft vocabulary in place."""
    to_train(tmp_path / "run")
    return write_recipe(tmp_path, target_dir)


@pytest.fixture
def done_path(tmp_path: Path, target_dir: Path, six_steps: Path) -> Path:
    """`recipe_path` after its six steps."""
    shutil.copytree(six_steps / "run", tmp_path / "run")
    return write_recipe(tmp_path, target_dir)


def fresh_accelerator() -> None:
    """Forgets the accelerator of an earlier run in this process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def run_main(module: Any, *arguments: str | Path) -> None:
    """Runs a script in this process."""
    fresh_accelerator()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["script.py", *map(str, arguments)])
        module.main()


TRAINED_BY = {"eagle3": eagle3, "eagle": eagle, "poss": poss, "vispec": vispec}


def train(recipe_path: Path, *overrides: str, script: str | None = None) -> Path:
    """Runs the drafter's or another training script in this process; returns its output_dir."""
    recipe = load_recipe(recipe_path, [each for each in overrides if not each.startswith("--")])
    run_main(TRAINED_BY[script or recipe.drafter.kind], recipe_path, *overrides)
    return Path(recipe.output_dir)


def metrics(output: Path) -> list[dict]:
    """metrics.jsonl without what a clock decides."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in THROUGHPUT_KEYS} for line in lines]
