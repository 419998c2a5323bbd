"""Targets in GGUF files, written here as llama.cpp's converter writes them, against the model that they hold."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("gguf")
import gguf
from transformers import AutoTokenizer

from draftsmith.models import gguf_target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import make_target, make_tokenizer

TEXT = "<|user|>the cat sat 2026 times, isn't it?\n\n  and RAN<|end|>"
NAMES = {  # of transformers -> of GGUF
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    **{
        f"model.layers.{i}.{ours}": f"blk.{i}.{theirs}"
        for i in range(2)
        for ours, theirs in {
            "input_layernorm": "attn_norm",
            "post_attention_layernorm": "ffn_norm",
            **{f"self_attn.{x}_proj": f"attn_{x}" for x in "qkv"},
            "self_attn.o_proj": "attn_output",
            **{f"mlp.{x}_proj": f"ffn_{x}" for x in ("gate", "up", "down")},
        }.items()
    },
}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(gguf_target, "CACHE", tmp_path / "cache")
    return tmp_path / "cache"


def write_target(path: Path, kind: str = "F32", **changed: Any) -> Any:
    """Writes a Llama of two layers and returns it. Its matrices are of this type where rows can be cut into blocks.

    Args:
        changed: metadata by its key; None leaves it out. `extra` are tensors by name; one that is None is left out.
    """
    model, tokenizer = make_target(num_layers=2), make_tokenizer()
    writer = gguf.GGUFWriter(path, changed.pop("architecture", "llama"))
    extra = changed.pop("extra", {})
    sizes = {"embedding_length": 32, "feed_forward_length": 48, "block_count": 2, "context_length": 512}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 2, "rope.dimension_count": 8, "vocab_size": 320}
    metadata: dict[str, Any] = {f"llama.{key}": value for key, value in sizes.items()}
    metadata |= {"llama.attention.layer_norm_rms_epsilon": model.config.rms_norm_eps, "llama.rope.freq_base": 10000.0}
    metadata |= {"general.name": "tiny", "tokenizer.chat_template": tokenizer.chat_template}
    metadata |= {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2", "tokenizer.ggml.eos_token_id": 4}
    adders = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    for key, value in (metadata | changed).items():
        if value is not None:
            adders[type(value)](key, value)
    tokens = sorted(tokenizer.get_vocab(), key=tokenizer.get_vocab().__getitem__)
    writer.add_token_list(tokens)
    writer.add_token_types([3 if i < 5 else 1 for i in range(len(tokens))])  # control, normal
    writer.add_token_merges(
        [" ".join(pair) for pair in json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]]
    )
    for name, tensor in model.state_dict().items():
        module, _, part = name.rpartition(".")
        rows = tensor
        if "q_proj" in name or "k_proj" in name:  # from halves of a head to neighbours, as llama.cpp rotates
            rows = tensor.view(-1, 2, 4, 32).transpose(1, 2).reshape(tensor.shape)
        data, as_type = rows.numpy(), None
        if kind != "F32" and tensor.ndim == 2 and tensor.shape[1] % 32 == 0:
            as_type = gguf.GGMLQuantizationType[kind]
            data = gguf.quants.quantize(data, as_type)
            with torch.no_grad():  # what the file says from here on
                said = torch.from_numpy(gguf.quants.dequantize(data, as_type))
                back = said.view(-1, 4, 2, 32).transpose(1, 2).reshape(tensor.shape)
                tensor.copy_(back if rows is not tensor else said)
        if extra.get(f"{NAMES[module]}.{part}", data) is not None:
            writer.add_tensor(f"{NAMES[module]}.{part}", data, raw_dtype=as_type)
    for name, data in extra.items():
        if data is not None:
            writer.add_tensor(name, data.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def files_at(path: Path, **settings: Any) -> TargetFiles:
    return TargetFiles(TargetSection(model=str(path), **settings))


@pytest.mark.parametrize("kind", ["F32", "Q8_0", "Q4_1"])
def test_weights_tokens_and_stops_are_the_model_s(tmp_path: Path, kind: str, cache: Path) -> None:
    path, tokenizer = tmp_path / "one/tiny.gguf", make_tokenizer()
    path.parent.mkdir()
    model = write_target(path, kind)
    files = files_at(path)
    assert files.tokenizer(TEXT)["input_ids"] == tokenizer(TEXT)["input_ids"]
    assert files.tokenizer.chat_template == tokenizer.chat_template
    assert files.stop_ids == (4,)
    assert not list(cache.rglob("*.safetensors"))  # plans ask for no weights
    ids = torch.tensor([tokenizer(TEXT)["input_ids"]])
    assert torch.equal(files.load_model()(ids).logits, model(ids).logits)
    assert torch.equal(files.tensor("lm_head.weight"), model.lm_head.weight)
    served = AutoTokenizer.from_pretrained(files.weights_place)  # engines read that folder alone
    assert served(TEXT)["input_ids"] == ids[0].tolist() and served.chat_template == tokenizer.chat_template
    assert files_at(path, dtype="bfloat16").load_model().dtype == torch.bfloat16


def test_it_is_converted_once_until_it_changes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "one/tiny.gguf"
    path.parent.mkdir()
    write_target(path)
    first = files_at(path)
    first.load_model()
    assert capsys.readouterr().out.count("converting") == 2  # what tells of the model, and its weights
    again = files_at(path.parent)  # a folder that holds it alone
    again.load_model()
    assert capsys.readouterr().out == ""
    assert again.identity["gguf"] == first.identity["gguf"]
    base: dict[str, Any] = {"llama.rope.freq_base": 500000.0}
    write_target(path, **base)
    changed = files_at(path)
    assert changed.config.rope_parameters["rope_theta"] == 500000.0
    assert changed.identity["gguf"] != first.identity["gguf"]


def divisors(factor: float) -> torch.Tensor:
    """Llama 3.1's of 4 frequencies of base 10,000: by `factor` those whose wave is longer than 8,192 positions."""
    waves = 2 * torch.pi * 10000.0 ** (torch.arange(4) / 4)
    smooth = ((8192 / waves - 1) / 3).clamp(0, 1)
    return 1 / (smooth + (1 - smooth) / factor)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        ({}, {"rope_type": "default"}),
        ({"extra": {"rope_freqs.weight": divisors(8)}}, {"rope_type": "llama3", "factor": 8.0}),
        ({"extra": {"rope_freqs.weight": divisors(32)}}, {"rope_type": "llama3", "factor": 32.0}),
        ({"type": "linear", "factor": 4.0}, {"rope_type": "linear", "factor": 4.0}),
        (
            {"type": "yarn", "factor": 4.0, "original_context_length": 128},
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128},
        ),
    ],
)
def test_rotations(tmp_path: Path, written: Mapping[str, Any], read: Mapping[str, Any]) -> None:
    keys = {key if key == "extra" else f"llama.rope.scaling.{key}": value for key, value in written.items()}
    write_target(tmp_path / "tiny.gguf", **keys)
    found = files_at(tmp_path / "tiny.gguf").config.rope_parameters
    assert read.items() <= found.items()


@pytest.mark.parametrize(
    ("cut", "pieces"),
    [
        ("gpt-2", ["It", "'", "S", "Ġ2026", "ĊĊ"]),
        ("smollm", ["It", "'", "S", "Ġ", "2", "0", "2", "6", "ĊĊ"]),
        ("llama-bpe", ["It", "'S", "Ġ", "202", "6", "ĊĊ"]),
        ("qwen2", ["It", "'S", "Ġ", "2", "0", "2", "6", "ĊĊ"]),
    ],
)
def test_how_texts_are_cut_before_merges(tmp_path: Path, cut: str, pieces: list[str]) -> None:
    write_target(tmp_path / "tiny.gguf", **{"tokenizer.ggml.pre": cut})
    tokenizer: Any = files_at(tmp_path / "tiny.gguf").stored_tokenizer()
    found = [piece for piece, _ in tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("It'S 2026\n\n")]
    assert found == pieces


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"architecture": "rwkv7"}, "architecture rwkv7"),
        ({"tokenizer.ggml.pre": "martian"}, "rule 'martian'"),
        ({"split.count": 3}, "several files"),
        ({"extra": {"rope_freqs.weight": torch.full((4,), 7.0)}}, "rope_freqs"),
        ({"extra": {"rope_factors_long.weight": torch.ones(4)}}, "rope_factors_long"),
        ({"llama.attention.scale": 0.5}, "attention.scale"),
        ({"extra": {"blk.1.attn_q.weight": None}}, "missing: model.layers.1.self_attn.q_proj"),
        ({"extra": {"blk.0.attn_q.bias": torch.ones(32)}}, "weights are not"),
        ({"llama.rope.scaling.type": "longrope"}, "longrope"),
    ],
)
def test_files_that_cannot_be_read(tmp_path: Path, changed: Mapping[str, Any], told: str, cache: Path) -> None:
    write_target(tmp_path / "tiny.gguf", **changed)
    with pytest.raises(UserError, match=rf"target\.model.*tiny\.gguf.*{told}.*name the folder or Hub id"):
        files_at(tmp_path / "tiny.gguf").load_model()
    assert not list(cache.rglob("*.safetensors"))


def test_places_without_one_gguf(tmp_path: Path) -> None:
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    for place, told in {"": "holds 2 GGUF files", "a.gguf": "cannot be converted", "c.gguf": "no such file"}.items():
        with pytest.raises(UserError, match=told):
            _ = files_at(tmp_path / place).config
