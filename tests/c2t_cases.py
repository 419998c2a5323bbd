"""Labelled trees, a recipe over a taught drafter, and its scripts: what tests of C2T share."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
import yaml

from draftsmith.data_gen.c2t_labels.labelled_trees import Trees
from draftsmith.models.checkpoint import save_drafter
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.target import TargetSection
from tests.pairs import PROMPTS, greedy, pair_of


def made_trees(trees: int, rows: int, seed: int = 0, law: Callable[..., torch.Tensor] | None = None) -> Trees:
    """Trees of `rows` nodes or a few fewer; accepted by a law of P, H and d, by default what is probable."""
    chance = torch.Generator().manual_seed(seed)
    features, accepted = [], []
    for tree in range(trees):
        count = rows - tree % 3
        P, H = torch.rand(count, generator=chance) ** 3, 3 * torch.rand(count, generator=chance)
        d = torch.randint(0, 10, (count,), generator=chance).float()
        features.append(torch.stack((P, H, d), dim=-1))
        accepted.append((P > 0.7) & (d < 7) if law is None else law(P, H, d))
    sizes = torch.tensor([*map(len, accepted)])
    return Trees(torch.cat(features), torch.cat(accepted), sizes, {"drafter": {"proposer": "toy"}})


def same_trees(a: Trees, b: Trees) -> bool:
    tensors = (torch.equal(getattr(a, name), getattr(b, name)) for name in ("features", "accepted", "sizes"))
    return all(tensors) and a.about == b.about


@pytest.fixture(scope="session")
def place(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe over a drafter that was taught half of the recorded answers."""
    folder = tmp_path_factory.mktemp("c2t")
    section = TargetSection(model=str(target_dir), dtype="float32")
    target = Target(TargetFiles(section).load_model("cpu"))
    _, drafter = pair_of("llama", None)  # of the same weights
    identity = TargetFiles(section).identity_of(target)
    save_drafter(folder / "run/drafter", drafter, identity, "", {})
    prompts = [*PROMPTS, *([20 + i, 30, 40 + i] for i in range(4))]
    lines = [
        {
            "id": f"c{i}",
            "turns": [{"prompt_token_ids": prompt, "output_token_ids": greedy(target, prompt, 24 + i)}],
            "generator": {"temperature": 0.0},
        }
        for i, prompt in enumerate(prompts)
    ]
    (folder / "answers.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {
        "output_dir": str(folder / "run"),
        "target": {"model": str(target_dir), "dtype": "float32", "device": "cpu"},
        "labels": {"answers": str(folder / "answers.jsonl"), "top_k": 4, "draft_calls": 4, "batch_size": 3},
        "classifier": {"epochs": 4, "validation_share": 0.2},
        "eval": {
            "answers": str(folder / "answers.jsonl"),
            "tree": {"draft_calls": 4, "top_k": 4, "nodes": 10},
            "also": [{"name": "lookup", "proposer": "prompt_lookup", "tree": {"policy": "chain", "nodes": 6}}],
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return folder


@pytest.fixture
def script(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def run(module: ModuleType, *arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", [module.__name__, str(place / "recipe.yaml"), *arguments])
        capsys.readouterr()
        module.main()
        return capsys.readouterr().out

    return run


def recipe_of(place: Path, *overrides: str) -> Recipe:
    return load_recipe(place / "recipe.yaml", overrides)


def content_of(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.name != ".lock"}
