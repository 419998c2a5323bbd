"""drafter.gguf, the file that llama.cpp serves: metadata, tensors, and the vocabulary of the target.

    ours                                      drafter.gguf
    fc, norm, lm_head                         fc, output_norm, output
    midlayer.hidden_norm, .input_layernorm    blk.0.attn_norm_2, blk.0.attn_norm
    midlayer.self_attn, .mlp                  blk.0.attn_*, blk.0.ffn_*; rows of q and k in another order
    d2t, offsets                              d2t, target ids; left out where the draft vocabulary is whole
    the target's embeddings                   left out: llama.cpp takes the target's

llama.cpp rotates neighbours (rows 0 and 1, 2 and 3, ...) where transformers rotates halves (rows 0 and d/2, 1 and
d/2 + 1, ...). So the rows of each head of q and k are interleaved, as llama.cpp's converter does it:

    transformers   0  1  2  3 | 4  5  6  7          a head of 8 rows; 0 and 4 are one pair
    llama.cpp      0  4  1  5   2  6  3  7

Vectors stay in float32, as in the converter's files. Frequencies other than base^(-2i/d) are stored as divisors
(rope_freqs). A drafter reads and writes target ids, so it needs no tokenizer, and llama.cpp compares none for EAGLE-3:
the file says only how many tokens there are, unless the target's own GGUF is at hand to copy the tokenizer from.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from draftsmith.models.drafter_base import DrafterConfig
from draftsmith.models.formats.folder import Folder
from draftsmith.models.formats.foreign import Foreign
from draftsmith.models.layers import rotary
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError

NAME = "drafter.gguf"
ARCHITECTURE = "eagle3"
NAMES = {  # ours -> llama.cpp's
    "fc.weight": "fc.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "midlayer.hidden_norm.weight": "blk.0.attn_norm_2.weight",
    "midlayer.input_layernorm.weight": "blk.0.attn_norm.weight",
    "midlayer.post_attention_layernorm.weight": "blk.0.ffn_norm.weight",
    "midlayer.self_attn.q_proj.weight": "blk.0.attn_q.weight",
    "midlayer.self_attn.k_proj.weight": "blk.0.attn_k.weight",
    "midlayer.self_attn.v_proj.weight": "blk.0.attn_v.weight",
    "midlayer.self_attn.o_proj.weight": "blk.0.attn_output.weight",
    "midlayer.mlp.gate_proj.weight": "blk.0.ffn_gate.weight",
    "midlayer.mlp.up_proj.weight": "blk.0.ffn_up.weight",
    "midlayer.mlp.down_proj.weight": "blk.0.ffn_down.weight",
}
ROPE = "rope_freqs.weight"
FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}  # llama.cpp's numbers of a file's main type


def package() -> Any:
    """The module `gguf`.

    Raises:
        UserError: it is not installed.
    """
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            f"--to llama.cpp needs the package gguf ({error}): pip install 'draftsmith[llama-cpp]'"
        ) from None
    return gguf


def metadata_of(shape: DrafterConfig) -> dict[str, Any]:
    """What a drafter's file says of its shape, by llama.cpp's keys."""
    said = {
        "context_length": shape.max_position_embeddings,
        "embedding_length": shape.hidden_size,
        "block_count": shape.num_layers,
        "feed_forward_length": shape.intermediate_size,
        "attention.head_count": shape.num_attention_heads,
        "attention.head_count_kv": shape.num_key_value_heads,
        "attention.key_length": shape.head_dim,
        "attention.value_length": shape.head_dim,
        "attention.layer_norm_rms_epsilon": float(shape.rms_norm_eps),
        "rope.dimension_count": shape.head_dim,
        "rope.freq_base": float(shape.rope_parameters["rope_theta"]),
        "vocab_size": shape.vocab_size,
        "target_layers": list(shape.capture_layers),
        "target_hidden_size": shape.hidden_size,
        "norm_before_residual": False,
        "norm_before_fc": False,
    }
    return {f"{ARCHITECTURE}.{key}": value for key, value in said.items()}


def write_gguf(
    path: Path,
    shape: DrafterConfig,
    vocab: DraftVocab,
    tensors: Mapping[str, torch.Tensor],
    target_gguf: Path | None,
) -> None:
    """Writes a drafter's file.

    Args:
        tensors: by our names, floats all of one type.
        target_gguf: the target's file, to copy the tokenizer from.
    """
    gguf = package()
    kinds = gguf.GGMLQuantizationType
    stored = tensors["lm_head.weight"].dtype
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_type("model")
    writer.add_file_type(FILE_TYPES[stored])
    adders = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array, bool: writer.add_bool}
    for key, value in metadata_of(shape).items():
        adders[type(value)](key, value)
    if target_gguf is None:
        writer.add_tokenizer_model("none")
    else:
        for key, field in open_gguf(target_gguf).fields.items():
            if key.startswith("tokenizer."):
                writer.add_key_value(key, field.contents(), *field.types[:2])
    for ours, name in NAMES.items():
        tensor = tensors[ours]
        if heads := _rotated_heads(shape, ours):
            tensor = interleave(tensor, heads)
        if tensor.ndim == 1:
            tensor = tensor.float()
        if tensor.dtype == torch.bfloat16:  # unknown to numpy
            writer.add_tensor(name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=kinds.BF16)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    if shape.draft_vocab_size != shape.vocab_size:
        writer.add_tensor("d2t", vocab.to_target(torch.arange(vocab.size)).numpy(), raw_dtype=kinds.I64)
    divisors = rope_divisors(shape)
    if not torch.equal(divisors, torch.ones_like(divisors)):
        writer.add_tensor(ROPE, divisors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def open_gguf(path: Path) -> Any:
    """`gguf.GGUFReader` of a file.

    Raises:
        UserError: it is no whole GGUF file.
    """
    try:
        return package().GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a whole GGUF file: {error}") from None


def read_gguf(path: Path) -> Folder:
    """A file's metadata, to which `architectures` is added, and its tensors by llama.cpp's names."""
    reader = open_gguf(path)
    config = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    config["architectures"] = [config.get("general.architecture")]
    tensors = {each.name: torch.from_numpy(each.data.copy()) for each in reader.tensors}
    for each in reader.tensors:
        if each.tensor_type.name == "BF16":
            tensors[each.name] = tensors[each.name].view(torch.bfloat16)
    return Folder(path, config, tensors)


def read_back(file: Folder, shape: DrafterConfig) -> Foreign:
    """The drafter in a file that `engines.problems` found to describe `shape`.

    Raises:
        UserError: its frequencies, or its target ids, are none of `shape`.
    """
    raw = file.tensors
    tensors = {}
    for ours, name in NAMES.items():
        heads = _rotated_heads(shape, ours)
        tensors[ours] = interleave(raw[name], heads, back=True) if heads else raw[name]
    try:
        vocab = DraftVocab(raw["d2t"], shape.vocab_size) if "d2t" in raw else DraftVocab.full(shape.vocab_size)
    except ValueError as error:
        raise UserError(f"{file.path}: d2t: {error}; please report this as a defect") from None
    exponents = torch.arange(0, shape.head_dim, 2).double() / shape.head_dim
    divisors = raw.get(ROPE, torch.ones(len(exponents))).double()
    frequencies = file.config[f"{ARCHITECTURE}.rope.freq_base"] ** -exponents / divisors
    table = rotary(shape.rope_parameters, shape.head_dim, shape.max_position_embeddings)
    if table.attention_scaling != 1 or not torch.allclose(frequencies.float(), table.inv_freq, rtol=1e-5, atol=0):
        raise UserError(
            f"{file.path}: it would rotate by other frequencies than the drafter; please report this as a defect"
        )
    return Foreign(shape, vocab, tensors | {"d2t": vocab.d2t, "t2d": vocab.t2d}, None)


def interleave(weight: torch.Tensor, heads: int, back: bool = False) -> torch.Tensor:
    """Rows of each head from halves to neighbours, or back."""
    count = weight.shape[0] // heads // 2
    rows = weight.unflatten(0, (heads, count, 2) if back else (heads, 2, count))
    return rows.transpose(1, 2).reshape(weight.shape)


def rope_divisors(shape: DrafterConfig) -> torch.Tensor:
    """[head_dim / 2] numbers by which the frequencies base^(-2i/d) are divided."""
    plain = {"rope_type": "default", "rope_theta": shape.rope_parameters["rope_theta"]}
    tables = [rotary(each, shape.head_dim, shape.max_position_embeddings) for each in (plain, shape.rope_parameters)]
    return tables[0].inv_freq / tables[1].inv_freq


def _rotated_heads(shape: DrafterConfig, name: str) -> int:
    """Heads of a tensor with rotated rows; else 0."""
    if name.endswith("q_proj.weight"):
        return shape.num_attention_heads
    return shape.num_key_value_heads if name.endswith("k_proj.weight") else 0
