"""Writes a drafter as a folder that an engine serves, and proves it before the folder gets its name.

checkpoint --write_folder--> <out>.partial --read back, every tensor and setting compared--> <out>
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from draftsmith.models.checkpoint import read_drafter_config, read_drafter_vocab, read_weights, shape_of_run
from draftsmith.models.drafter_base import DrafterConfig
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.formats import eagle_format, llama_cpp
from draftsmith.models.formats.engines import ENGINES, ServingEngine
from draftsmith.models.formats.folder import read_folder
from draftsmith.models.formats.importing import EMBEDDINGS, Foreign, format_of, read_foreign, reading_scaled
from draftsmith.models.target import tensor_digest
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_folder
from draftsmith.recipes.loader import placed
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.target import TargetSection

FILES = ("config.json", "model.safetensors", llama_cpp.DRAFTER)
FILES += ("README.md", "speculation_profile.json", "acceptance.png")


@dataclass(frozen=True)
class Source:
    """A trained drafter, as exports need it."""

    directory: Path
    shape: DrafterConfig
    target: dict[str, Any]  # its identity and layout (`TargetFiles`)
    vocab: DraftVocab
    tensors: dict[str, torch.Tensor]

    @classmethod
    def read(cls, directory: Path) -> "Source":
        """Raises UserError where there is no whole checkpoint."""
        shape, target = read_drafter_config(directory)
        target |= {"model": placed(target["model"])}
        return cls(directory, shape, target, read_drafter_vocab(directory, shape), read_weights(directory))

    @property
    def target_name(self) -> str:
        """The target's name for other people: of a local folder, its last part."""
        name = self.target["model"]
        return Path(name).name if Path(name).exists() else name


def able_engines(source: Source) -> list[ServingEngine]:
    """The engines that can serve the drafter."""
    return [engine for engine in ENGINES.values() if not engine.reasons(source.shape, source.target)]


def readers(source: Source, engine: ServingEngine) -> list[ServingEngine]:
    """The engines that serve what is exported to `engine`, which comes first: those that know it by the same name."""
    name = engine.architecture(source.shape)
    others = [each for each in able_engines(source) if each is not engine and each.architecture(source.shape) == name]
    return [engine, *others]


def check_engine(source: Source, engine: ServingEngine, out: Path) -> None:
    """Raises UserError with every reason why the engine cannot serve the drafter, and who can; and for a folder that
    holds a drafter of ours, such as the exported one."""
    if format_of(out) == "ours":
        raise UserError(f"{out}: holds a trained drafter, which the export would replace; name another folder")
    if reasons := engine.reasons(source.shape, source.target):
        able = ", ".join(other.name for other in able_engines(source))
        instead = f"it can be exported to {able}" if able else "no engine can; draftsmith's own loop (eval/) runs it"
        raise UserError([*(f"{source.directory}: {reason}" for reason in reasons), instead])


def source_to_train(recipe: Recipe, files: TargetFiles) -> Source:
    """The drafter that the recipe will train, without weights. Raises UserError if the target cannot have it."""
    shape = replace(shape_of_run(recipe, files), embedding_scale=files.planned_embedding_scale)
    target = {"model": recipe.target.model, "num_layers": files.text_config.num_hidden_layers}
    return Source(recipe.drafter_dir, shape, target, DraftVocab.full(shape.vocab_size), {})


def check_export(recipe: Recipe, files: TargetFiles) -> None:
    """Raises UserError if the recipe's run would end in an export that is refused, as far as configs tell."""
    if recipe.export.to is None:
        return
    try:
        source, engine = source_to_train(recipe, files), ENGINES[recipe.export.to]
        check_engine(source, engine, recipe.export_dir(engine.name))
        if engine.format == "gguf":
            llama_cpp.package()
    except UserError as error:
        raise UserError([f"export.to: {problem}" for problem in error.problems]) from None


def export(
    source: Source,
    engine: ServingEngine,
    out: Path,
    dtype: torch.dtype | None,
    beside: Mapping[str, str | bytes],
    target_gguf: Path | None = None,
) -> None:
    """Writes the folder. Raises UserError if the engine cannot serve the drafter, or the folder reads back as another.

    Args:
        dtype: of the weights; None: as trained.
        beside: further files by name.
        target_gguf: the target as llama.cpp serves it; its tokenizer goes into the drafter's file.
    """
    check_engine(source, engine, out)
    source = unscaled(source)
    with atomic_folder(out, FILES) as unfinished:
        write_folder(source, engine, unfinished, dtype, target_gguf)
        prove(source, engine, unfinished, dtype)
        for name, content in beside.items():
            (unfinished / name).write_bytes(content.encode() if isinstance(content, str) else content)


def unscaled(source: Source) -> Source:
    """An equal drafter that reads the target's embeddings without their scale, as engines give them.

    With fc_norm, no weights make up for it (`importing.reading_scaled`); then the file gets a scaled table.
    """
    scale = source.shape.embedding_scale
    if scale == 1:
        return source
    shape, tensors = replace(source.shape, embedding_scale=1.0), source.tensors
    if isinstance(shape, Eagle3Config) and shape.fc_norm:
        table = target_embeddings(source.target).to(tensors["fc.weight"].dtype) * scale
        return replace(source, shape=shape, tensors={**tensors, EMBEDDINGS: table})
    shape, tensors = reading_scaled(shape, tensors, 1 / scale)
    return replace(source, shape=shape, tensors=tensors)


def write_folder(
    source: Source, engine: ServingEngine, folder: Path, dtype: torch.dtype | None, target_gguf: Path | None = None
) -> None:
    """config.json and model.safetensors, or drafter.gguf, in the engine's spelling."""
    shape, target = source.shape, source.target
    tensors = {name: _as(dtype, tensor) for name, tensor in engine_tensors(source, engine).items()}
    if engine.format == "gguf":
        return llama_cpp.write_gguf(folder / llama_cpp.DRAFTER, shape, source.vocab, tensors, target_gguf)
    stored = next(tensor.dtype for tensor in tensors.values() if tensor.is_floating_point())
    if engine.format == "speculators":
        config = eagle_format.speculators_config(shape, stored, target["model"], target["layout"]["architectures"])
        tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}
    else:
        architecture = engine.architecture(shape)
        assert architecture is not None  # `check_engine` sees to it
        config = eagle_format.eagle_config(shape, architecture, stored)
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def target_embeddings(target: Mapping[str, Any]) -> torch.Tensor:
    """The target's embedding table, alone, from its checkpoint on disk or on the Hub; `target` is from a drafter's
    config.json. Raises UserError if it is not the table that the drafter was trained with."""
    model, wanted = target["model"], target["layout"]["embeddings"]
    table = TargetFiles(TargetSection(model=model, revision=target.get("revision"))).tensor(wanted)
    if tensor_digest(table) != target["embedding_digest"]:
        raise UserError(
            f"{model}: {wanted} is not the table that the drafter was trained with; was the target changed?"
        )
    return table


def engine_tensors(source: Source, engine: ServingEngine) -> dict[str, torch.Tensor]:
    """The drafter's tensors by the EAGLE format's names, with those added that engines ask for and that change nothing.

    vLLM's layers above the first norm their input with `input_layernorm`, SGLang's with `hidden_norm`; the other one is
    loaded and not used. vLLM's attention_bias covers o_proj. SGLang's EAGLE-1 has a bias in fc. Speculators keeps the
    target's embeddings in the file.
    """
    shape, tensors = source.shape, dict(source.tensors)
    if source.vocab.is_full:
        for name in eagle_format.WEIGHTLESS:
            del tensors[name]
    if isinstance(shape, Eagle3Config) and engine.name in ("vllm", "sglang"):
        for i in range(1, shape.num_layers):
            tensors[f"layers.{i}.hidden_norm.weight"] = tensors[f"layers.{i}.input_layernorm.weight"].clone()
    if shape.attention_bias and engine.name == "vllm":
        for name in [name for name in tensors if name.endswith(".o_proj.weight")]:
            tensors[name.replace(".weight", ".bias")] = tensors[name].new_zeros(shape.hidden_size)
    if engine.name == "speculators" and EMBEDDINGS not in tensors:  # left out, it stays uninitialised memory there
        tensors[EMBEDDINGS] = target_embeddings(source.target).to(tensors["fc.weight"].dtype)
    if engine.name == "sglang" and "fc.bias" not in tensors and not shape.own_head:
        tensors["fc.bias"] = tensors["fc.weight"].new_zeros(shape.hidden_size)
    return tensors


def prove(source: Source, engine: ServingEngine, folder: Path, dtype: torch.dtype | None) -> None:
    """Raises UserError unless the folder reads back as the source: same settings, every tensor bit for bit."""
    if engine.format == "gguf":
        back = llama_cpp.read_gguf(folder / llama_cpp.DRAFTER, source.shape)
    else:
        back = read_foreign(read_folder(folder), facts(source))
    if difference := differs(source, back, dtype):
        raise UserError(f"{folder}: reads back as another drafter ({difference}); please report this as a defect")


def facts(source: Source) -> SimpleNamespace:
    """As much of the target's text config as `read_foreign` asks for."""
    return SimpleNamespace(num_hidden_layers=source.target["num_layers"], **source.shape.to_dict())


def differs(source: Source, back: Foreign, dtype: torch.dtype | None) -> str | None:
    """How a folder that was read back differs from its source, whose weights were rounded; None: not at all."""
    theirs = back.shape.to_dict()
    for key, value in source.shape.to_dict().items():
        if theirs.get(key) != value and key != "fc_bias":  # SGLang's has one of zeros
            return f"{key} {theirs.get(key)}, not {value}"
    tensors = back.tensors | {EMBEDDINGS: back.embeddings}
    for name, tensor in source.tensors.items():
        if (found := tensors.get(name)) is None or not torch.equal(_as(dtype, tensor).float(), found.float()):
            return f"another {name}"
    added = [name for name in back.tensors.keys() - source.tensors.keys() if back.tensors[name].any()]
    return f"more weights, {added[0]}" if added else None


def _as(dtype: torch.dtype | None, tensor: torch.Tensor) -> torch.Tensor:
    """Weights in a precision; None: in their own. Integers stay."""
    return tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor
