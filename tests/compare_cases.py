"""A folder with drafters and recipes that tests of contenders share."""

from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from draftsmith.models.chat import tokenizer_fingerprint
from draftsmith.models.checkpoint import save_drafter
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab, save_token_counts
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import make_target, make_tokenizer
from tests.replay_cases import write_lines

PROMPTS = ["the cat", "the dog ran after the cat in the rain", "a mat", "rain", "the dog and the cat"]


def save_untrained(
    directory: Path,
    target_dir: Path,
    layers: tuple[int, ...] | None = None,
    seed: int = 0,
    draftable: range = range(3, 63),
) -> Path:
    """A drafter as training would save it, of these tokens; `layers` it reads."""
    section = TargetSection(model=str(target_dir))
    target = Target(TargetFiles(section).load_model("cpu"), layers)
    identity = TargetFiles(section).identity_of(target)
    vocab = DraftVocab(torch.tensor(draftable), target.vocab_size)
    torch.manual_seed(seed)
    config = Eagle3Config.for_target(target.config, target.vocab_size, target.capture_layers, vocab.size)
    save_drafter(directory, Eagle3Drafter(config, vocab), identity, "", {})
    return directory


@pytest.fixture(scope="module")
def place(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two drafters that read different layers, a small LM, token counts, prompts; and a recipe over them."""
    folder = tmp_path_factory.mktemp("compare")
    save_untrained(folder / "run/drafter", target_dir)
    save_untrained(folder / "other/drafter", target_dir, (1, 5), seed=1)
    make_target(num_layers=2, seed=3).save_pretrained(folder / "small")
    make_tokenizer().save_pretrained(folder / "small")
    tokenizer = TargetFiles(TargetSection(model=str(target_dir))).tokenizer
    counts = torch.arange(320).flip(0) + 1
    save_token_counts(folder / "run/token_counts.safetensors", counts, tokenizer_fingerprint(tokenizer), [4])
    turns = ({"id": f"q{i}", "turns": [text, "and the mat?"][: 1 + i % 2]} for i, text in enumerate(PROMPTS))
    write_lines(folder / "prompts.jsonl", *turns)
    content: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "target": {"model": str(target_dir), "dtype": "float32", "device": "cpu"},
        "eval": {
            "prompts": str(folder / "prompts.jsonl"),
            "max_new_tokens": 24,
            "tree": {"nodes": 12, "draft_calls": 3, "top_k": 4},
        },
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(content))
    other = content | {"output_dir": str(folder / "other"), "eval": {"tree": {"policy": "chain", "nodes": 4}}}
    (folder / "other.yaml").write_text(yaml.safe_dump(other))
    return folder
