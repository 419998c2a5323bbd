"""What llama.cpp serves: drafter.gguf, and the target's own GGUF, by llama.cpp's converter.

    ours                                      drafter.gguf
    fc, norm, lm_head                         fc, output_norm, output
    midlayer.hidden_norm, .input_layernorm    blk.0.attn_norm_2, blk.0.attn_norm
    midlayer.self_attn, .mlp                  blk.0.attn_*, blk.0.ffn_*; rows of q and k in another order
    d2t, offsets                              d2t, target ids; left out where the draft vocabulary is whole
    the target's embeddings                   left out: llama.cpp takes the target's

llama.cpp rotates neighbours (rows 0 and 1, ...) where transformers rotates halves (rows 0 and d/2, ...). So the rows of
each head of q and k are interleaved, as llama.cpp's converter does it:

    transformers   0  1  2  3 | 4  5  6  7          a head of 8 rows; 0 and 4 are one pair
    llama.cpp      0  4  1  5   2  6  3  7

Vectors stay in float32, as in the converter's files. Frequencies other than base^(-2i/d) are stored as divisors
(rope_freqs). A drafter reads and writes target ids, so it needs no tokenizer, and llama.cpp compares none for EAGLE-3:
the file says only how many tokens there are, unless the target's own GGUF is at hand to copy the tokenizer from.
"""

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download

from draftsmith.models.drafter_base import DrafterConfig
from draftsmith.models.formats.importing import Foreign
from draftsmith.models.layers import rotary
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_path
from draftsmith.recipes.files.hub_fetch import check_model

DRAFTER = "drafter.gguf"
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
FILE_TYPES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 32}  # llama.cpp's numbers of a file's main type
TARGET = "target.gguf"
CONVERTER = "convert_hf_to_gguf.py"
OUT_TYPES = {None: "auto", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
TARGET_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")


def package() -> Any:
    """The module `gguf`. Raises UserError if it is not installed."""
    try:
        import gguf
    except ImportError as error:
        raise UserError(
            f"--to llama.cpp needs the package gguf ({error}): pip install 'draftsmith[llama-cpp]'"
        ) from None
    return gguf


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
    writer = gguf.GGUFWriter(path, ARCHITECTURE)
    writer.add_type("model")
    writer.add_file_type(FILE_TYPES[tensors["lm_head.weight"].dtype])
    adders = {int: writer.add_uint32, float: writer.add_float32, list: writer.add_array, bool: writer.add_bool}
    metadata = {
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
    for key, value in metadata.items():
        adders[type(value)](f"{ARCHITECTURE}.{key}", value)
    if target_gguf is None:
        writer.add_tokenizer_model("none")
    else:
        for key, field in open_gguf(target_gguf).fields.items():
            if key.startswith("tokenizer."):
                writer.add_key_value(key, field.contents(), *field.types[:2])
    for ours, name in NAMES.items():
        tensor = _interleaved(shape, ours, tensors[ours])
        if tensor.ndim == 1:
            tensor = tensor.float()
        if tensor.dtype == torch.bfloat16:  # unknown to numpy
            writer.add_tensor(name, tensor.contiguous().view(torch.uint8).numpy(), raw_dtype=kinds.BF16)
        else:
            writer.add_tensor(name, tensor.contiguous().numpy())
    if shape.draft_vocab_size != shape.vocab_size:
        writer.add_tensor("d2t", vocab.to_target(torch.arange(vocab.size)).numpy(), raw_dtype=kinds.I64)
    rope = shape.rope_parameters
    plain = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    tables = [rotary(each, shape.head_dim, shape.max_position_embeddings) for each in (plain, rope)]
    divisors = tables[0].inv_freq / tables[1].inv_freq  # [head_dim / 2]
    if (divisors != 1).any():
        writer.add_tensor("rope_freqs.weight", divisors.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def open_gguf(path: Path) -> Any:
    """`gguf.GGUFReader` of a file. Raises UserError if it is no whole GGUF file."""
    try:
        return package().GGUFReader(path)
    except (OSError, ValueError, KeyError, IndexError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: not a whole GGUF file: {error}") from None


def read_gguf(path: Path, shape: DrafterConfig) -> Foreign:
    """The drafter in a file that `write_gguf` wrote for `shape`, rotary frequencies apart."""
    raw: dict[str, torch.Tensor] = {}
    for each in open_gguf(path).tensors:
        tensor = torch.from_numpy(each.data.copy())
        raw[each.name] = tensor.view(torch.bfloat16) if each.tensor_type.name == "BF16" else tensor
    tensors = {ours: _interleaved(shape, ours, raw[name], back=True) for ours, name in NAMES.items()}
    vocab = DraftVocab(raw["d2t"], shape.vocab_size) if "d2t" in raw else DraftVocab.full(shape.vocab_size)
    return Foreign(shape, tensors | {"d2t": vocab.d2t, "t2d": vocab.t2d}, None)


def _interleaved(shape: DrafterConfig, name: str, weight: torch.Tensor, back: bool = False) -> torch.Tensor:
    """q and k with the rows of each head from halves to neighbours, or back; other tensors as they are."""
    rotated = {"q_proj": shape.num_attention_heads, "k_proj": shape.num_key_value_heads}
    heads, half = rotated.get(name.split(".")[-2]), shape.head_dim // 2
    if heads is None:
        return weight
    rows = weight.unflatten(0, (heads, half, 2) if back else (heads, 2, half))
    return rows.transpose(1, 2).reshape(weight.shape)


def check_fit(target: Mapping[str, Any], target_gguf: Path) -> None:
    """Raises UserError if a GGUF cannot be the drafter's target."""
    fields = open_gguf(target_gguf).fields
    said = {key: field.contents() for key, field in fields.items() if not key.startswith("tokenizer.")}
    architecture = said.get("general.architecture")
    found = {
        "num_layers": said.get(f"{architecture}.block_count"),
        "hidden_size": said.get(f"{architecture}.embedding_length"),
        "vocab_size": len(fields["tokenizer.ggml.tokens"].data) if "tokenizer.ggml.tokens" in fields else None,
    }
    if wrong := [
        f"{target_gguf}: {key} is {have}, the drafter's target has {target[key]}"
        for key, have in found.items()
        if have != target[key]
    ]:
        raise UserError([*wrong, "Is it the GGUF of " + target["model"] + "?"])


def convert_target(target: Mapping[str, Any], checkout: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Writes the target's GGUF with the converter of `checkout`, in a process of its own.

    Args:
        dtype: of the weights; None: the converter chooses after the checkpoint's.
    """
    folder = target["model"]
    if not Path(folder).is_dir():
        revision = target.get("revision")
        check_model(folder, revision)
        folder = snapshot_download(folder, revision=revision, allow_patterns=list(TARGET_FILES))
    print(f"converting  {folder} (minutes for large targets)", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    driver = Path(__file__).with_name("run_converter.py")
    with atomic_path(out) as partial:
        command = [sys.executable, driver, checkout, folder, "--outfile", partial, "--outtype", OUT_TYPES[dtype]]
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode or not partial.exists():
            last = (done.stdout.strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"{checkout / CONVERTER} could not convert {folder}: {last}; convert it yourself and name the file "
                "with --target-gguf"
            )
        check_fit(target, partial)
