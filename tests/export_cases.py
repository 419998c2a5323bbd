"""A target on disk, trained drafters of every kind for it, and a foreign folder as its publishers write it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.eval.replay.recorded_answers import check_answers_before_loading, read_answers
from draftsmith.models.checkpoint import check_identity, load_drafter, read_drafter_config, save_drafter
from draftsmith.models.drafter_base import Drafter, DrafterConfig
from draftsmith.models.drafters import build_drafter
from draftsmith.models.feature_drafter import FeatureDrafter
from draftsmith.models.formats.exporting import Source
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from tests.conftest import VOCAB_SIZE, files_of, make_target, make_tokenizer
from tests.drafter_cases import chain_of, random_drafter, specialists
from tests.evaluation_cases import conversation, write_lines

Tensors = dict[str, torch.Tensor]
CUT = 200  # tokens of a draft vocabulary
# Those of `drafter_cases.random_drafter`: kind, base, what the config says of its own, tokens of a draft vocabulary.
DRAFTERS: dict[str, tuple[str, str | None, dict[str, Any], int | None]] = {
    "eagle3": ("eagle3", None, {}, CUT),
    "eagle3, whole vocabulary": ("eagle3", None, {"num_key_value_heads": 4}, None),
    "eagle3, two layers": ("eagle3", None, {"num_layers": 2}, CUT),
    "eagle3, biases": ("eagle3", None, {"num_layers": 2, "attention_bias": True}, CUT),
    "eagle3.1": ("eagle3", None, {"fc_norm": True, "norm_output": True, "num_key_value_heads": 1}, CUT),
    "eagle3, normed output": ("eagle3", None, {"norm_output": True}, CUT),
    "eagle": ("eagle", None, {"fc_bias": False}, None),
    "eagle, biases": ("eagle", None, {"attention_bias": True, "num_layers": 2}, None),
    "eagle, biased queries": ("eagle", None, {"attention_bias": True, "fc_bias": False}, None),
    "poss": ("poss", "eagle", specialists(2, 2), None),
}
# Of a target that scales its embeddings, with an epsilon that tells them from others.
SCALED: dict[str, Any] = {"family": "granite", "embedding_multiplier": 12.0, "rms_norm_eps": 0.3}
STATES = (1, 3, 6)  # unlike the published (2, 3, 4), so that no engine's default hides a mistake


@cache
def _target(overrides: str) -> Target:
    return Target(make_target(**json.loads(overrides)), STATES)


def target_of(**overrides: Any) -> Target:
    """The same object for the same settings."""
    return _target(json.dumps(overrides, sort_keys=True))


def drafter_named(name: str, **overrides: Any) -> FeatureDrafter:
    return random_drafter(target_of(**overrides), *DRAFTERS[name]).requires_grad_(False)


def save_target(directory: Path, **overrides: Any) -> Path:
    """The target of `target_of` with its tokenizer."""
    shards = {"max_shard_size": "40KB"} if overrides.pop("sharded", False) else {}
    target_of(**overrides).model.save_pretrained(directory, **shards)
    make_tokenizer().save_pretrained(directory)
    return directory


def trained(directory: Path, target_dir: Path | str, drafter: Drafter, **overrides: Any) -> Source:
    """A checkpoint as training writes it."""
    target = target_of(**overrides)
    files = files_of(target, str(target_dir))
    identity = files.identity_of(target) | {"layout": files.layout(torch.float32)}
    made = {"versions": {"draftsmith": "0"}, "command": ["draftsmith train", "x.yaml"], "data": {}}
    save_drafter(directory, drafter, identity, "", made)
    return Source.read(directory)


def loaded(directory: Path) -> FeatureDrafter:
    """The drafter of the tiny target in `directory`."""
    target = target_of()
    identity = files_of(target).identity_of(target)
    drafter = load_drafter(directory, target, identity, read_drafter_config(directory)[0].capture_layers)
    assert isinstance(drafter, FeatureDrafter)
    return drafter


PROMPT, CHAIN = [11, 12, 13, 14], [7, 21, 22, 23, 24]


@torch.no_grad()
def distributions(drafter: FeatureDrafter, target: Target, cut: DraftVocab | None = None) -> torch.Tensor:
    """[5, Vd] log-probabilities of a drafter along CHAIN behind PROMPT, after each of its tokens."""
    captured = target.states(torch.tensor([PROMPT]), drafter.config.capture_layers).captured[0]
    return torch.stack(chain_of(drafter, captured, [*PROMPT, *CHAIN], len(PROMPT) - 1, target, cut)[1])


def drafted(shape: DrafterConfig, tensors: Tensors) -> torch.Tensor:
    """`distributions` of a drafter with these weights, for the tiny target."""
    target, vocab = target_of(), DraftVocab.from_d2t(tensors["d2t"], tensors["t2d"])
    drafter: Any = build_drafter(shape, vocab, target.frozen_head)
    drafter.load_state_dict(tensors)
    return distributions(drafter, target)


PUBLISHED = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 1, "hidden_act": "silu"}
PUBLISHED |= {"hidden_size": 32, "intermediate_size": 24, "vocab_size": VOCAB_SIZE, "model_type": "llama"}


def published_eagle3(directory: Path, **keys: Any) -> Tensors:
    """An EAGLE-3 checkpoint as its authors publish them: their config keys, no rotary base. Tensors have their names
    and offsets here, too."""
    own = {"architectures": ["LlamaForCausalLMEagle3"], "max_position_embeddings": 2048}
    own |= {"bos_token_id": None, "rms_norm_eps": 1e-5, "tie_word_embeddings": False, "draft_vocab_size": CUT}
    tensors = drafter_named("eagle3").state_dict()
    write_folder(directory, PUBLISHED | own | keys, tensors)
    return tensors


def published_eagle(directory: Path) -> Tensors:
    """An EAGLE-2 checkpoint: fc with bias, one layer without its first norm, and a copy of the target's embeddings."""
    tensors = random_drafter(target_of(), "eagle", None, {}, None).state_dict()
    tensors = {name: tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")}
    tensors |= {"embed_tokens.weight": target_of().embedding_table.clone()}
    own = {"architectures": ["LlamaForCausalLM"], "bias": True, "rope_scaling": None}
    write_folder(directory, PUBLISHED | own | {"max_position_embeddings": 4096, "rms_norm_eps": 1e-6}, tensors)
    return tensors


def write_folder(directory: Path, config: Any, tensors: Tensors) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory


def assert_told_apart(folder: Path, one: TargetFiles, other: TargetFiles, by: str) -> None:
    """Answers of one target are refused for the other, by that key; a drafter may draft for both."""
    for mine, theirs in ((one, other), (other, one)):
        written_by = {key: value for key, value in theirs.identity.items() if value is not None}
        recording = read_answers(write_lines(folder / "c.jsonl", conversation(0, **written_by)))
        check_answers_before_loading(recording, theirs)
        with pytest.raises(UserError, match=rf"c\.jsonl:1: recorded from another target: {by}"):
            check_answers_before_loading(recording, mine)
        check_identity(folder, theirs.identity, mine.identity)
