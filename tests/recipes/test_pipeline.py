"""The commands of a run one after another, as processes, on the tiny target: what a user types."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]


def command(script: str, *arguments: str, check: bool = True) -> subprocess.CompletedProcess:
    done = subprocess.run(
        [sys.executable, *script.split(), *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if check:
        assert done.returncode == 0, done.stderr
    return done


@pytest.fixture(scope="module")
def recipe_path(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    folder = tmp_path_factory.mktemp("pipeline")
    questions = [
        {"id": f"q{i}", "messages": [{"role": "user", "content": f"the cat {i} sat"}] * (1 + i % 2)} for i in range(12)
    ]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    recipe = {
        "output_dir": str(folder / "run"),
        "target": {"model": str(target_dir), "dtype": "float32", "device": "cpu"},
        "data": {
            "prompts": str(folder / "prompts.jsonl"),
            "max_length": 200,
            "generator": {"batch_size": 4, "max_new_tokens": 20, "temperature": 0},
        },
        "drafter": {"vocab_size": 20},
        "train": {"max_steps": 4, "batch_size": 4, "log_every_steps": 2, "mixed_precision": "no"},
        "eval": {
            "prompts": str(folder / "prompts.jsonl"),
            "max_prompts": 4,
            "max_new_tokens": 16,
            "tree": {"nodes": 12, "draft_calls": 3, "top_k": 4},
            "also": [
                {"name": "chain", "tree": {"policy": "chain", "nodes": 4}},
                {"name": "lookup", "proposer": "prompt_lookup", "tree": {"policy": "chain", "nodes": 6}},
            ],
        },
        "export": {"to": "vllm"},
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


@pytest.fixture(scope="module")
def trained(recipe_path: Path) -> Path:
    """The recipe, with a drafter trained by it."""
    launch = "-m accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no"
    command("data_gen/regenerate.py", str(recipe_path))
    command("data_gen/rank_vocab.py", str(recipe_path))
    command(f"{launch} --dynamo_backend no --cpu train/eagle3.py", str(recipe_path))
    return recipe_path


@pytest.mark.slow
def test_one_command_goes_through_all_and_finds_what_the_scripts_made(trained: Path) -> None:
    run = trained.parent / "run"
    answers, drafter = (run / "conversations.jsonl").read_bytes(), load_file(run / "drafter/model.safetensors")
    first = command("-m draftsmith.recipes.command.console run", str(trained))
    stages = ("regenerate", "rank-vocab", "train", "evaluate", "export")
    assert [f"[{i}/5] draftsmith {stage} {trained}" in first.stdout for i, stage in enumerate(stages, 1)] == [True] * 5
    assert "all 12 conversations are done" in first.stdout and "next: " not in first.stdout
    assert "\r" not in first.stdout + first.stderr
    assert (run / "conversations.jsonl").read_bytes() == answers
    again = load_file(run / "drafter/model.safetensors")  # the file's own header has no fixed order
    assert again.keys() == drafter.keys() and all(torch.equal(again[name], drafter[name]) for name in drafter)
    assert json.loads((run / "eval/acceptance.json").read_text())["matches_target"] is True
    page = (run / "eval/report.html").read_text()
    command("eval/report.py", str(trained))
    assert (run / "eval/report.html").read_text() == page  # built again from the files alone
    assert f"{run}/export/vllm: read back, bit for bit" in first.stdout
    again = command("-m draftsmith.recipes.command.console run", str(trained))
    assert again.stdout.count("  done ") == 5 and "nothing is left to do" in again.stdout
