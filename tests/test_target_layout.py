"""What a drafter's checkpoint says of its target's, for exports."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.schema import TargetSection
from tests.conftest import make_target


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True), ("gemma", True)])
def test_a_target_s_layout_names_tensors_of_its_checkpoint(family: str, tied: bool, tmp_path: Path) -> None:
    model = make_target(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    found = TargetFiles(TargetSection(model=str(tmp_path))).layout(torch.bfloat16)
    assert (found["architectures"], found["dtype"], found["tied"]) == ([type(model).__name__], "bfloat16", tied)
    assert found["model_type"] == model.config.model_type
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors[found["embeddings"]], model.get_input_embeddings().weight)
    assert (found["head"] in tensors) != tied
    assert torch.equal(model.state_dict()[found["head"]], model.get_output_embeddings().weight)
