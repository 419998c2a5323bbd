"""Targets in GGUF files, which llama.cpp and Ollama read: converted once, by transformers, to folders as on the Hub.

    model.gguf  ->  <HF_HOME>/draftsmith/gguf-3/<sha256>/config.json, tokenizer.json, ...   when it is first named
                    <HF_HOME>/draftsmith/gguf-3/<sha256>-float32/model.safetensors, ...     when it is first loaded

The names hold the file's digest, so a file that has changed is converted again, and the number of this conversion:
count it up with a change that mends converted files. Weights are dequantised to the dtype of the recipe: where
llama.cpp multiplies blocks of few bits, we multiply their values in that dtype.
"""

import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from huggingface_hub.constants import HF_HOME
from safetensors import SafetensorError
from tokenizers import Regex, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from draftsmith.models.layers import rotary
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.atomic import atomic_folder, atomic_write
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.files.reading import file_digest

CACHE = Path(HF_HOME) / "draftsmith" / "gguf-3"
SECONDS = 3600.0  # to wait for another process that converts the same file
UNREADABLE = (OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, AssertionError, ImportError)
UNREADABLE += (SafetensorError,)
SCALES = ("attention.scale", "logit_scale", "residual_scale", "embedding_scale")  # not read for Llamas
ENDS = ("eos", "eot", "eom")  # tokenizer.ggml.<name>_token_id: where answers end
LLAMA3: dict[str, Any] = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
ROTATION, PARTIAL = "rope_freqs.weight", "partial_rotary_factor"
DTYPES = {"F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32}

# How byte-level vocabularies cut a text before they merge its pieces, by `tokenizer.ggml.pre`, as in llama.cpp.
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
_DIGITS = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _GPT2])


def _words(digits: str) -> pre_tokenizers.PreTokenizer:
    """Llama 3's: contractions in any case, a word with the sign before it, at most so many digits, line breaks."""
    pattern = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), behavior="isolated"), _BYTES])


CUTS: dict[str, pre_tokenizers.PreTokenizer] = {
    **dict.fromkeys(("gpt-2", "olmo"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe", "dbrx"), _words("{1,3}")),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2"), _words("")),
}


def gguf_file(model: str) -> Path | None:
    """The GGUF file that `target.model` names: a file, or the only one of a folder without config.json."""
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise UserError(f"target.model: {model!r}: there is no such file")
        return path
    if not path.is_dir() or (path / "config.json").exists():
        return None
    files = sorted(file for file in path.iterdir() if file.suffix.lower() == ".gguf")
    if len(files) > 1:
        raise UserError(f"target.model: {model!r} holds {len(files)} GGUF files; name one, such as {files[0]}")
    return files[0] if files else None


def gguf_digest(file: Path) -> str:
    """sha256 of the file, kept by its path, size and time of change, since large files take a minute."""
    place, known = file.resolve(), file.stat()
    return _digest(place, known.st_size, known.st_mtime_ns)


@cache
def _digest(place: Path, size: int, changed: int) -> str:
    kept, known = CACHE / "digests.json", dict[str, Any]()
    with suppress(OSError, ValueError, TypeError):  # none yet, or damaged: it only saves time
        known = dict(json.loads(kept.read_text()))
    if known.get(str(place), [])[:2] != [size, changed]:
        known[str(place)] = [size, changed, file_digest(place)]
        with suppress(OSError):
            atomic_write(kept, json.dumps(known, indent=2))
    return known[str(place)][2]


def without_weights(file: Path) -> str:
    """The folder of config, tokenizer and generation config."""

    def fill(folder: Path) -> None:
        fields, kinds = _header(file)
        config = AutoConfig.from_pretrained(file.parent, gguf_file=file.name)
        if rotation := _rotation(file, fields, config):
            # Of a family with two rotations, the file describes that of full attention.
            config.rope_parameters.get("full_attention", config.rope_parameters).update(rotation)
        config.dtype = kinds.pop() if len(kinds) == 1 else torch.float32
        config.save_pretrained(folder)
        _tokenizer(file, fields, config).save_pretrained(folder)
        ends = {fields[key] for name in ENDS if (key := f"tokenizer.ggml.{name}_token_id") in fields}
        GenerationConfig(eos_token_id=sorted(ends) or None).save_pretrained(folder)

    return _converted(file, CACHE / gguf_digest(file), "", fill)


def with_weights(file: Path, dtype: torch.dtype) -> str:
    """The folder of the whole model in this dtype."""
    name, rest = str(dtype).removeprefix("torch."), without_weights(file)

    def fill(folder: Path) -> None:
        config = AutoConfig.from_pretrained(rest)
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            file.parent, gguf_file=file.name, config=config, dtype=dtype, output_loading_info=True
        )
        model, report = loaded
        # transformers draws what is missing at random, and drops what has no place in its model.
        tensors = [each for each in _reader(str(file)).tensors if each.name != ROTATION]
        held, said = sum(p.numel() for p in model.parameters()), sum(int(each.n_elements) for each in tensors)
        if report["missing_keys"] or held != said:
            missing = ", ".join(sorted(report["missing_keys"])[:3]) or "none"
            raise ValueError(
                f"its {said:,} weights are not the {held:,} of transformers' {config.model_type} (missing: {missing})"
            )
        # transformers refuses to write what it read from few bits, though these are plain weights now.
        vars(model).pop("hf_quantizer", None)
        vars(model.config).pop("quantization_config", None)
        model.save_pretrained(folder)
        for path in Path(rest).iterdir():  # an engine reads this folder alone
            if path.name != "config.json":
                shutil.copy(path, folder)

    return _converted(file, CACHE / f"{gguf_digest(file)}-{name}", f" to {name}", fill)


def _converted(file: Path, folder: Path, how: str, fill: Callable[[Path], None]) -> str:
    """The folder, filled by the first process that asks for it."""
    if folder.exists():
        return str(folder)
    try:
        import gguf
    except ImportError as error:
        raise UserError(f"target.model: GGUF files are read by the package gguf ({error}): pip install gguf") from None
    try:
        with alone_in(CACHE, SECONDS, folder.name):
            if not folder.exists():
                print(f"converting  {file}{how}, once, into {folder}", flush=True)
                # By itself, transformers parses the header three times: minutes for large vocabularies.
                with patch.object(gguf, "GGUFReader", _reader), atomic_folder(folder, ()) as partial:
                    fill(partial)
    except UNREADABLE as error:
        raise UserError(
            f"target.model: {str(file)!r} cannot be converted: {first_line(error)}; if that is no matter of this "
            "machine, name the folder or Hub id of the model that it was made from, with safetensors"
        ) from error
    return str(folder)


@cache
def _reader(path: str | Path) -> Any:
    from gguf.gguf_reader import GGUFReader

    return GGUFReader(path)


def _header(file: Path) -> tuple[dict[str, Any], set[torch.dtype | None]]:
    """(settings but long lists, dtypes of the matrices; None: quantised)."""
    reader = _reader(str(file))
    fields = {key: field.contents() for key, field in reader.fields.items() if len(field.data) == 1}
    if fields.get("split.count", 1) > 1:
        raise ValueError("it is one of several files of a model; join them with llama-gguf-split --merge")
    return fields, {DTYPES.get(each.tensor_type.name) for each in reader.tensors if len(each.shape) > 1}


def _rotation(file: Path, fields: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Changes of `rope_parameters`, which transformers does not take from the file."""
    prefix = f"{fields['general.architecture']}.rope.scaling"
    kind, factor = fields.get(f"{prefix}.type", "none"), fields.get(f"{prefix}.factor")
    tensors = {each.name: each for each in _reader(str(file)).tensors}
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    turned = fields.get(f"{fields['general.architecture']}.rope.dimension_count", width)
    partial = getattr(config, "partial_rotary_factor", None) or (config.rope_parameters or {}).get(PARTIAL, 1.0)
    if turned != int(width * partial):
        raise ValueError(f"it rotates {turned} of a head's {width} dimensions")
    if strange := [name for name in tensors if name.startswith("rope_factors")]:
        raise ValueError(f"its rotation is by {strange[0]}, which is not read here")
    if config.model_type == "llama" and (scales := [key for key in SCALES if f"llama.{key}" in fields]):
        raise ValueError(f"it sets {scales[0]}, which Llamas do not have")
    if ROTATION in tensors:  # Llama 3.1's rule, as divisors of the frequencies
        here = torch.from_numpy(tensors[ROTATION].data.copy())
        for divisor in (8.0, 32.0):  # of 3.1, of 3.2
            rule = LLAMA3 | {"factor": divisor}
            plain, scaled = (
                rotary(config.rope_parameters | each, config.head_dim, 8192).inv_freq for each in ({}, rule)
            )
            if torch.allclose(plain / scaled, here, rtol=1e-4):
                return rule
        raise ValueError("its rope_freqs are not those of Llama 3.1 or 3.2")
    if kind == "linear":
        return {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        border = fields[f"{prefix}.original_context_length"]
        return {"rope_type": kind, "factor": factor, "original_max_position_embeddings": border}
    if kind != "none":
        raise ValueError(f"its rotation is of kind {kind}, not linear, yarn or Llama 3's")
    return {}


def _tokenizer(file: Path, fields: Mapping[str, Any], config: Any) -> Any:
    """transformers' tokenizer for the file, with llama.cpp's cuts before merges."""
    tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, config=config)
    backend, cuts = tokenizer.backend_tokenizer, fields.get("tokenizer.ggml.pre", "default")
    if fields.get("tokenizer.ggml.model") == "gpt2":
        if cuts in CUTS:
            backend.pre_tokenizer = CUTS[cuts]
        elif not isinstance(backend.pre_tokenizer, pre_tokenizers.Sequence):  # transformers does not know them either
            raise ValueError(f"its tokenizer cuts texts by the rule {cuts!r}, which is not known here")
    return tokenizer
