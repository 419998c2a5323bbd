"""`draftsmith run` on the tiny target, as a process: what a user types."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from draftsmith.eval import report
from tests.training_runs import run_main

ROOT = Path(__file__).parents[2]
LAUNCH = (
    "-m accelerate.commands.launch --num_processes 1 --num_machines 1 --mixed_precision no --dynamo_backend no --cpu"
)


def command(words: str, *arguments: str) -> str:
    """What it prints."""
    done = subprocess.run(
        [sys.executable, *words.split(), *arguments], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0 and "\r" not in done.stdout + done.stderr, done.stderr
    return done.stdout


@pytest.mark.slow
def test_one_command_goes_through_all_and_a_launched_script_makes_the_same(target_dir: Path, tmp_path: Path) -> None:
    run, path = tmp_path / "run", str(tmp_path / "recipe.yaml")
    questions = [
        {"id": f"q{i}", "messages": [{"role": "user", "content": f"the cat {i} sat"}] * (1 + i % 2)} for i in range(12)
    ]
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(q) + "\n" for q in questions))
    recipe = {
        "output_dir": str(run),
        "target": {"model": str(target_dir), "dtype": "float32", "device": "cpu"},
        "data": {
            "prompts": str(tmp_path / "prompts.jsonl"),
            "max_length": 200,
            "generator": {"batch_size": 4, "max_new_tokens": 20, "temperature": 0},
        },
        "drafter": {"vocab_size": 20},
        "train": {"max_steps": 4, "batch_size": 4, "log_every_steps": 2, "mixed_precision": "no"},
        "eval": {
            "prompts": str(tmp_path / "prompts.jsonl"),
            "max_prompts": 4,
            "max_new_tokens": 16,
            "tree": {"nodes": 12, "draft_calls": 3, "top_k": 4},
            "also": [{"name": "lookup", "proposer": "prompt_lookup", "tree": {"policy": "chain", "nodes": 6}}],
        },
        "export": {"to": "vllm"},
    }
    Path(path).write_text(yaml.safe_dump(recipe))
    first = command("-m draftsmith.recipes.command.console run", path)
    stages = ("regenerate", "rank-vocab", "train", "evaluate", "export")
    assert [f"[{i}/5] draftsmith {stage} {path}" in first for i, stage in enumerate(stages, 1)] == [True] * 5
    assert f"{run}/export/vllm: read back, bit for bit" in first and "next: " not in first
    assert json.loads((run / "eval/acceptance.json").read_text())["matches_target"] is True
    page = (run / "eval/report.html").read_text()
    run_main(report, path)
    assert (run / "eval/report.html").read_text() == page  # built again from the files alone
    again = command("-m draftsmith.recipes.command.console run", path)
    assert again.count("  done ") == 5 and "nothing is left to do" in again
    drafter = load_file(run / "drafter/model.safetensors")  # the file's own header has no fixed order
    for made in ("drafter", "checkpoints"):
        shutil.rmtree(run / made)
    command(f"{LAUNCH} train/eagle3.py", path)
    same = load_file(run / "drafter/model.safetensors")
    assert same.keys() == drafter.keys() and all(torch.equal(same[name], drafter[name]) for name in drafter)
