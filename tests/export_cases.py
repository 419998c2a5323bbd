"""A target on disk, trained drafters of every kind for it, and a foreign folder as its publishers write it."""

import json
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftsmith.models.checkpoint import save_drafter
from draftsmith.models.drafter_base import Drafter
from draftsmith.models.drafters import build_drafter, config_class
from draftsmith.models.feature_drafter import FeatureDrafter
from draftsmith.models.formats.exporting import Source
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from tests.conftest import VOCAB_SIZE, files_of, make_target, make_tokenizer

CUT = 200  # tokens of a draft vocabulary
# (kind, base, draft tokens or None, what its config says beyond the target's shape)
DRAFTERS: dict[str, tuple[str, str | None, int | None, dict[str, Any]]] = {
    "eagle3": ("eagle3", None, CUT, {}),
    "eagle3, whole vocabulary": ("eagle3", None, None, {"num_key_value_heads": 4}),
    "eagle3, two layers": ("eagle3", None, CUT, {"num_layers": 2}),
    "eagle3, biases": ("eagle3", None, CUT, {"num_layers": 2, "attention_bias": True}),
    "eagle3.1": ("eagle3", None, CUT, {"fc_norm": True, "norm_output": True, "num_key_value_heads": 1}),
    "eagle3, normed output": ("eagle3", None, CUT, {"norm_output": True}),
    "eagle": ("eagle", None, None, {"fc_bias": False}),
    "eagle, biases": ("eagle", None, None, {"attention_bias": True, "num_layers": 2}),
    "eagle, biased queries": ("eagle", None, None, {"attention_bias": True, "fc_bias": False}),
    "poss": ("poss", "eagle", None, {"positions_per_specialist": 2, "specialists": 2}),
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


def drafter_named(name: str, states: tuple[int, ...] = STATES, **overrides: Any) -> FeatureDrafter:
    """Random weights; norms, too, whose ones would hide a missing norm."""
    kind, base, tokens, own = DRAFTERS[name]
    target = target_of(**overrides)
    torch.manual_seed(3)
    vocab = DraftVocab.full(VOCAB_SIZE)
    if tokens is not None:
        vocab = DraftVocab(torch.randperm(VOCAB_SIZE)[:tokens].sort().values, VOCAB_SIZE)
    shape = config_class(kind, base)
    assert shape is not None
    layers = states if kind == "eagle3" else (target.num_layers,)
    own = {"intermediate_size": 24, "embedding_scale": target.embedding_scale, **own}
    config = shape.for_target(target.config, VOCAB_SIZE, layers, vocab.size, **own)
    drafter = build_drafter(config, vocab, target.frozen_head)
    assert isinstance(drafter, FeatureDrafter)
    with torch.no_grad():
        for parameter_name, parameter in drafter.named_parameters():
            if "norm" in parameter_name or "bias" in parameter_name:
                parameter += 0.3 * torch.randn_like(parameter)
    return drafter.eval().requires_grad_(False)


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


def published_eagle3(directory: Path) -> dict[str, torch.Tensor]:
    """An EAGLE-3 checkpoint as its authors publish them: their names, offsets, config keys, no rotary base."""
    hidden, heads, groups, dim, wide = 32, 4, 2, 8, 40
    generator = torch.Generator().manual_seed(5)

    def random(*sizes: int) -> torch.Tensor:
        return 0.2 * torch.randn(*sizes, generator=generator)

    ids = torch.randperm(VOCAB_SIZE, generator=generator)[:CUT].sort().values
    marked = torch.zeros(VOCAB_SIZE, dtype=torch.bool)
    marked[ids] = True
    tensors = {
        "d2t": ids - torch.arange(CUT),
        "t2d": marked,
        "fc.weight": random(hidden, 3 * hidden),
        "lm_head.weight": random(CUT, hidden),
        "norm.weight": 1 + random(hidden),
        "midlayer.hidden_norm.weight": 1 + random(hidden),
        "midlayer.input_layernorm.weight": 1 + random(hidden),
        "midlayer.post_attention_layernorm.weight": 1 + random(hidden),
        "midlayer.self_attn.q_proj.weight": random(heads * dim, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": random(groups * dim, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": random(groups * dim, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": random(hidden, heads * dim),
        "midlayer.mlp.gate_proj.weight": random(wide, hidden),
        "midlayer.mlp.up_proj.weight": random(wide, hidden),
        "midlayer.mlp.down_proj.weight": random(hidden, wide),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "bos_token_id": None,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "max_position_embeddings": 2048,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "vocab_size": VOCAB_SIZE,
        "draft_vocab_size": CUT,
    }
    write_folder(directory, config, tensors)
    return tensors


def published_eagle(directory: Path, table: torch.Tensor) -> dict[str, torch.Tensor]:
    """An EAGLE-2 checkpoint: fc with bias, one layer without its first norm, and a copy of the target's embeddings."""
    hidden, wide = 32, 48
    generator = torch.Generator().manual_seed(6)

    def random(*sizes: int) -> torch.Tensor:
        return 0.2 * torch.randn(*sizes, generator=generator)

    tensors = {
        "embed_tokens.weight": table.clone(),
        "fc.weight": random(hidden, 2 * hidden),
        "fc.bias": random(hidden),
        "layers.0.post_attention_layernorm.weight": 1 + random(hidden),
        "layers.0.self_attn.q_proj.weight": random(32, hidden),
        "layers.0.self_attn.k_proj.weight": random(16, hidden),
        "layers.0.self_attn.v_proj.weight": random(16, hidden),
        "layers.0.self_attn.o_proj.weight": random(hidden, 32),
        "layers.0.mlp.gate_proj.weight": random(wide, hidden),
        "layers.0.mlp.up_proj.weight": random(wide, hidden),
        "layers.0.mlp.down_proj.weight": random(hidden, wide),
    }
    config = {
        "architectures": ["LlamaForCausalLM"],
        "bias": True,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "max_position_embeddings": 4096,
        "model_type": "llama",
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 1,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "vocab_size": VOCAB_SIZE,
    }
    write_folder(directory, config, tensors)
    return tensors


def write_folder(directory: Path, config: Any, tensors: dict[str, torch.Tensor]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory
