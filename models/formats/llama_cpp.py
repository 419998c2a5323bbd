"""The target as llama.cpp serves it: converts it with llama.cpp's own converter, and checks that a drafter fits it."""

import subprocess
import sys
from pathlib import Path

import torch

from draftsmith.models.formats.exporting import Source
from draftsmith.models.formats.gguf_file import open_gguf, package
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_path
from draftsmith.recipes.files.hub import check_model

TARGET = "target.gguf"
CONVERTER = "convert_hf_to_gguf.py"
OUT_TYPES = {None: "auto", torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
TARGET_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.safetensors")
# Architectures with `t_layer_inp` in llama.cpp's src/models: those that hand a drafter their layers' inputs.
WITH_STATES = (
    *("bailingmoe3", "deepseek4", "gemma3n", "gemma4", "gpt-oss", "hunyuan-dense", "hunyuan_vl", "lfm2", "lfm2moe"),
    *("llama", "mimo2", "minimax-01", "minimax-m2", "muse-glimmer", "nanbeige", "nemotron_h", "nemotron_h_moe"),
    *("qwen3", "qwen35", "qwen35moe", "qwen3moe", "qwen3next", "qwen4exp"),
)


def check_target_gguf(source: Source, checkout: Path | None, target_gguf: Path | None) -> None:
    """Checks what an export to llama.cpp needs, before anything is written.

    Args:
        checkout: llama.cpp's sources; target_gguf: the target's file. Both may be None.

    Raises:
        UserError: a missing package or file, or a file of another target.
    """
    package()
    if checkout is not None and not (checkout / CONVERTER).is_file():
        raise UserError(f"--with-target {checkout}: no {CONVERTER} there; name the folder of llama.cpp's sources")
    if target_gguf is not None:
        check_fit(source, target_gguf)


def check_fit(source: Source, target_gguf: Path) -> None:
    """Raises UserError if a GGUF cannot be the drafter's target. Warns where llama.cpp may not serve the pair."""
    fields = open_gguf(target_gguf).fields
    architecture = fields["general.architecture"].contents() if "general.architecture" in fields else None
    block_count, width = (fields.get(f"{architecture}.{key}") for key in ("block_count", "embedding_length"))
    tokens = fields.get("tokenizer.ggml.tokens")
    found = {
        "num_layers": block_count and block_count.contents(),
        "hidden_size": width and width.contents(),
        "vocab_size": tokens and len(tokens.data),
    }
    if wrong := [
        f"{target_gguf}: {key} is {have}, the drafter's target has {source.target[key]}"
        for key, have in found.items()
        if have != source.target[key]
    ]:
        raise UserError([*wrong, "Is it the GGUF of " + source.target["model"] + "?"])
    if architecture not in WITH_STATES:
        print(
            f"{target_gguf}: llama.cpp 0.3.36 gives a drafter no states of {architecture} models and would stop at "
            "the start; a newer one may",
            file=sys.stderr,
        )


def convert_target(source: Source, checkout: Path, out: Path, dtype: torch.dtype | None) -> None:
    """Writes the target's GGUF with the converter of `checkout`, in a process of its own.

    Args:
        dtype: of the weights; None: the converter chooses after the checkpoint's.

    Raises:
        UserError: the target cannot be found, or the converter failed; with its last line.
    """
    folder = _local(source.target["model"], source.target.get("revision"))
    print(f"converting  {folder} (minutes for large targets)", flush=True)
    out.parent.mkdir(parents=True, exist_ok=True)
    driver = Path(__file__).with_name("run_converter.py")
    with atomic_path(out) as partial:
        arguments = [folder, "--outfile", partial, "--outtype", OUT_TYPES[dtype]]
        done = subprocess.run(
            [sys.executable, driver, checkout, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        if done.returncode or not partial.exists():
            last = (done.stdout.strip().splitlines() or ["no message"])[-1]
            raise UserError(
                f"{checkout / CONVERTER} could not convert {folder}: {last}; convert it yourself and name the file "
                "with --target-gguf"
            )
        check_fit(source, partial)


def _local(model: str, revision: str | None) -> Path:
    """The target's folder; a Hub id is looked up in the Hub's cache, or downloaded."""
    if Path(model).is_dir():
        return Path(model)
    check_model(model, revision)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(model, revision=revision, allow_patterns=list(TARGET_FILES)))
