"""drafter.lora: what is trained, what stays, that merging changes nothing, and that a run resumes."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.models.checkpoint import read_drafter
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.drafter import LoraSection
from draftsmith.train.run.lora import add_lora, merge_lora
from tests.export_cases import drafter_named
from tests.training_runs import metrics, train
from tests.training_runs import recipe_path as recipe_path

LAYERS = ("fc", "q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj", "lm_head")


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_only_the_low_rank_matrices_learn_and_the_run_resumes(recipe_path: Path, six_steps: Path) -> None:
    start = six_steps / "run/drafter"
    settings = (f"drafter.init_from={start}", "drafter.lora={r: 2, alpha: 4}", "train.learning_rate=0.05")
    run = train(recipe_path, *settings)
    before, after = weights(start), weights(run / "drafter")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        is_linear = name.split(".")[-2:-1] and name.split(".")[-2] in LAYERS
        change = after[name].double() - weight.double()
        assert bool(change.any()) == bool(is_linear), name
        if is_linear:
            values = torch.linalg.svdvals(change)
            assert values[2] < 1e-4 * values[0], name  # of rank 2

    checkpoint = weights(run / "checkpoints/step-00000006")
    assert all(name.endswith((".a", ".b")) for name in checkpoint)
    read_drafter(run / "drafter")  # an ordinary one

    straight = metrics(run)
    shutil.rmtree(run / "drafter")
    shutil.rmtree(run / "checkpoints/step-00000006")
    train(recipe_path, *settings)
    again = weights(run / "drafter")
    assert all(torch.equal(again[name], tensor) for name, tensor in after.items())
    assert metrics(run) == straight
    with pytest.raises(UserError, match=r"drafter\.lora\.alpha: the checkpoint has 4\.0, this run has 8\.0"):
        train(recipe_path, *settings[::2], "drafter.lora={r: 2, alpha: 8}", "train.max_steps=7")


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "poss"])
def test_merging_changes_no_logits(kind: str) -> None:
    torch.manual_seed(3)
    drafter = drafter_named(kind)
    states = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    add_lora(drafter, LoraSection(r=3, alpha=6.0, modules=None))
    trained = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    assert trained and all(name.endswith((".a", ".b")) for name in trained)
    x = torch.randn(2, 5, drafter.config.hidden_size)
    embedding = torch.randn_like(x)
    captured = torch.randn(2, 5, drafter.config.hidden_size * len(drafter.config.capture_layers))

    def computed() -> list[torch.Tensor]:
        layer: Any = drafter.stacks[0][0]
        h = drafter.entry(drafter.fuse(captured), embedding)
        return [h, layer.mlp(x), layer.self_attn.q_proj(layer.enter(h)[0])] + (
            [drafter.logits(x)] if drafter.config.own_head else []
        )

    at_first = computed()
    with torch.no_grad():
        for parameter in trained.values():
            parameter += 0.1 * torch.randn_like(parameter)
        unmerged = computed()
    assert not any(torch.equal(one, other) for one, other in zip(at_first[1:], unmerged[1:], strict=True))
    sum(each.square().sum() for each in computed()).backward()  # type: ignore[union-attr]
    assert all(p.grad is None for p in drafter.parameters() if not p.requires_grad)
    merge_lora(drafter)
    with torch.no_grad():
        assert all(torch.equal(one, other) for one, other in zip(computed(), unmerged, strict=True))
    assert drafter.state_dict().keys() == states.keys()
    name = next(name for name in trained if name.endswith(".b")).split(".parametrizations")[0]
    low_rank = (trained[f"{name}.parametrizations.weight.0.{each}"].detach() for each in "ba")
    expected = states[f"{name}.weight"] + 6.0 / 3 * torch.matmul(*low_rank)
    torch.testing.assert_close(drafter.state_dict()[f"{name}.weight"], expected)
