"""Drafter checkpoints: a directory with the weights, their meaning, their target and their origin.

    config.json          kind, shape, and the identity of the target it was trained for
    model.safetensors    parameters, d2t and t2d, without the target's embedding table
    recipe.yaml          the resolved recipe
    provenance.json      versions, commit, command line, digests of the data

Writes are atomic (`recipes.files.atomic`). Other files in a replaced folder, such as notes, are kept.
"""

import json
import math
import platform
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from transformers.activations import ACT2FN

from draftsmith.models import drafters
from draftsmith.models.chat import FINGERPRINT_COVERS
from draftsmith.models.drafter_base import Drafter, DrafterConfig, FrozenHead
from draftsmith.models.layers import rotary
from draftsmith.models.rotation import checked_rotation
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vision import is_vision_language
from draftsmith.models.vocab import DraftVocab, sort_metadata
from draftsmith.recipes.errors import UserError, first_invalid, first_line, quoted
from draftsmith.recipes.files.atomic import atomic_folder, current_folder
from draftsmith.recipes.files.json_text import json_object
from draftsmith.recipes.files.reading import file_digest
from draftsmith.recipes.schema import Recipe


def provenance(data: dict[str, Path]) -> dict[str, Any]:
    """Versions, source commit, command line and data digests, for provenance.json."""
    packages = ("draftsmith", "torch", "transformers", "accelerate", "datasets")
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=Path(__file__).parent, capture_output=True, text=True, check=False
    )
    return {
        "versions": {name: metadata.version(name) for name in packages} | {"python": platform.python_version()},
        "commit": commit.stdout.strip() or None,
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "data": {name: {"file": path.name, "sha256": file_digest(path)} for name, path in data.items()},
    }


FILES = ("config.json", "model.safetensors", "recipe.yaml", "provenance.json")
# Fields of a shape that no key of a recipe sets. They are the target's, and for another project's drafters their own.
UNSET = ("head_dim", "rms_norm_eps", "max_position_embeddings", "hidden_act", "rope_parameters")


def save_drafter(
    directory: Path, drafter: Drafter, identity: dict[str, Any], recipe_yaml: str, made_by: dict[str, Any]
) -> None:
    """Writes the checkpoint, replacing an older one at the very end."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in drafter.state_dict().items()}
    shape = drafter.config
    kind = {"kind": shape.kind} | ({"base": shape.base} if shape.base is not None else {})
    config = kind | {"drafter": shape.to_dict(), "target": identity}
    with atomic_folder(directory, FILES) as partial:
        about = {"format": "pt", "config": json.dumps(_kind_and_shape(shape))}
        save_file(tensors, partial / "model.safetensors", metadata=about)
        sort_metadata(partial / "model.safetensors")
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        (partial / "recipe.yaml").write_text(recipe_yaml, encoding="utf-8")
        (partial / "provenance.json").write_text(json.dumps(made_by, indent=2) + "\n")


def _kind_and_shape(shape: DrafterConfig) -> dict[str, Any]:
    return {"kind": shape.kind, "base": shape.base} | shape.to_dict()


def weight_bytes(directory: Path) -> int:
    """Bytes of a drafter's weights; 0 where there are none yet."""
    return sum(file.stat().st_size for file in directory.glob("*.safetensors"))


def read_drafter_config(directory: Path) -> tuple[DrafterConfig, dict[str, Any]]:
    """(shape, identity of its target) from a drafter's config.json. Raises UserError if it is none."""
    directory = current_folder(directory)
    path = directory / "config.json"
    try:
        config = json_object(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{directory}: no drafter here (config.json is missing); the scripts in train/ write one"
        ) from None
    except NotADirectoryError:
        raise UserError(f"{directory}: a file; name the folder that holds a drafter's config.json") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    values, trained_for = config.get("drafter"), config.get("target")
    kind = drafters.config_class(config.get("kind"), config.get("base"), values) if isinstance(values, dict) else None
    if kind is None or not isinstance(values, dict) or not isinstance(trained_for, dict):
        raise UserError(
            f"{path}: not a drafter of a kind known here ({drafters.known_kinds()})"
            + "; `draftsmith import-drafter` reads drafters of other projects" * ("architectures" in config)
        )
    try:
        return TypeAdapter(kind).validate_json(json.dumps(values), strict=True), trained_for
    except (ValidationError, UserError) as error:
        text = first_invalid(error) if isinstance(error, ValidationError) else error
        raise UserError(f"{path}: damaged: {text}") from error


def shape_of_run(recipe: Recipe, files: TargetFiles) -> DrafterConfig:
    """The shape of the recipe's drafter. What the recipe leaves open is taken from drafter.init_from, if one is there.
    Raises UserError if the drafter is not possible for this target."""
    if drafters.config_of(recipe.drafter).reads_pictures and not is_vision_language(files.config):
        raise UserError(
            f"drafter.kind: {recipe.drafter.kind} reads pictures, and {recipe.target.model} "
            f"({files.config.model_type}) reads text only; take a vision-language target, or kind {recipe.drafter.base}"
        )
    shape = drafters.drafter_shape(recipe.drafter, files.text_config)
    if recipe.drafter.init_from is None:
        return shape
    try:
        start = read_drafter_config(Path(recipe.drafter.init_from))[0]
    except UserError:
        return shape  # training says why
    return replace(shape, **{name: getattr(start, name) for name in UNSET})


def differences(there: dict[str, Any], here: dict[str, Any], before: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(key, value there, value here) of all differences from `here`; nested keys are `section.key`."""
    for key, mine in here.items():
        theirs = there.get(key)
        if isinstance(mine, dict) and isinstance(theirs, dict):
            both = mine | dict.fromkeys(theirs.keys() - mine.keys())
            yield from differences(theirs, both, f"{before}{key}.")
        elif theirs != mine:
            yield f"{before}{key}", theirs, mine


def check_identity(directory: Path, trained_for: dict[str, Any], here: dict[str, Any]) -> None:
    """Raises UserError with every difference for a drafter made for another target.

    Models are moved and copied, so name and revision are not compared. A drafter can be measured with a fine-tuned or
    quantised target and adapted to it, so adapter and quantisation are not compared, either; nor is a GGUF file, whose
    embeddings and tokenizer are.
    """
    different = [
        f"{key}: the drafter was trained for {quoted(trained_for.get(key))}, this target has {here[key]!r}"
        for key in here
        if key not in ("model", "revision", "gguf", "adapter", "quantization", "guidance")
        and trained_for.get(key) != here[key]
    ]
    if different:
        raise UserError(
            f"{directory}: a drafter for another target ({quoted(trained_for.get('model'))}, not {here['model']!r}): "
            + "; ".join(different)
            + f" (a fingerprint covers {FINGERPRINT_COVERS})" * ("tokenizer_fingerprint: " in "".join(different))
        )


def read_drafter_vocab(directory: Path, shape: DrafterConfig) -> DraftVocab:
    """The drafter's vocabulary from model.safetensors, after a check of the file against `shape`. Reads no weights.

    Raises UserError for a file that is missing, cut short, or written with another config, and for tensors that are
    missing, too many or of another shape.
    """
    path, mend = current_folder(directory) / "model.safetensors", "copy the whole folder again, or train again"
    try:
        with safe_open(path, framework="pt") as file:
            found = {name: file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
            tensors = {name: file.get_tensor(name) for name in {"d2t", "t2d"} & found.keys()}
            written = json_object((file.metadata() or {}).get("config", "{}").encode())
    except FileNotFoundError:
        raise UserError(f"{directory}: model.safetensors is missing; {mend}") from None
    except (OSError, ValueError, SafetensorError) as error:
        raise UserError(f"{path}: damaged or cut short: {error}; {mend}") from None
    # Shapes alone do not tell: two specialists of one position each have the same tensors as one of two positions.
    here = json.loads(json.dumps(_kind_and_shape(shape)))
    problems = [
        f"{key} is {quoted(here.get(key))}, the weights were written with {quoted(value)}"
        for key, value in written.items()
        if here.get(key) != value
    ]
    if not problems:
        wanted = checked_shapes(directory, shape, found)
        problems += [f"{name} is missing" for name in wanted.keys() - found.keys()]
        problems += [f"{name} has no place" for name in found.keys() - wanted.keys()]
        both = wanted.keys() & found.keys()
        problems += [f"{name} is {found[name]}, not {wanted[name]}" for name in both if found[name] != wanted[name]]
    if problems:
        more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
        raise UserError(
            f"{directory}: config.json, which describes {drafters.kind_text(shape)}, is not the one of "
            f"model.safetensors: {'; '.join(sorted(problems)[:3])}{more}; {mend}"
        )
    return DraftVocab.from_d2t(tensors["d2t"], tensors["t2d"], where=str(path))


def checked_shapes(directory: Path, shape: DrafterConfig, found: Mapping[str, list[int]]) -> dict[str, list[int]]:
    """Names and shapes of the tensors of a drafter of this shape. Raises UserError if no drafter has it, or if it has
    more layers, or wider ones, than the `found` tensors: even on the meta device, a million layers take minutes."""
    widest = max((size for sizes in found.values() if 0 not in sizes for size in sizes), default=0)
    described = max(
        shape.hidden_size * max(2, len(shape.capture_layers)),
        shape.intermediate_size,
        max(shape.num_attention_heads, shape.num_key_value_heads) * shape.head_dim,
    )
    try:
        if shape.cached_layers > len(found) or described > widest:
            raise ValueError(
                f"{shape.cached_layers:,} layers, up to {described:,} wide; its weights are {len(found):,} tensors, up "
                f"to {widest:,} wide"
            )
        if shape.hidden_act not in list(ACT2FN):
            raise ValueError(f"hidden_act is {quoted(shape.hidden_act)}, not the name of an activation")
        checked_rotation(shape.rope_parameters, shape.max_position_embeddings)
        table = rotary(shape.rope_parameters, shape.head_dim, shape.max_position_embeddings)
        if not table.inv_freq.isfinite().all() or not math.isfinite(table.attention_scaling):
            raise ValueError(f"frequencies that are not finite, by rope_parameters {quoted(shape.rope_parameters)}")
        return drafters.tensor_shapes(shape)
    except Exception as error:  # torch and transformers let any error of their arithmetic and lookups through
        raise UserError(
            f"{directory}: config.json describes no drafter, or another one: {first_line(error)[:200]}; copy the whole "
            "folder again"
        ) from error


def load_drafter(
    directory: Path, target: Target, identity: dict[str, Any], capture: Sequence[int] | None = None
) -> Drafter:
    """The drafter in `directory`, in evaluation mode on the target's device.

    Args:
        capture: layers captured for the drafter; they must be those of its training. None: the target's.
    """
    shape, trained_for = read_drafter_config(directory)
    check_identity(directory, trained_for, identity)
    given = tuple(target.capture_layers if capture is None else capture)
    if shape.capture_layers != given:
        raise UserError(
            f"{directory}: the drafter reads target states {list(shape.capture_layers)}, "
            f"this run captures {list(given)}"
        )
    return read_drafter(directory, target.frozen_head).to(target.device)


def read_drafter(directory: Path, head: FrozenHead | None = None) -> Drafter:
    """The drafter in `directory`, in evaluation mode on the CPU.

    Args:
        head: the target's. Without it, kinds that use the target's head give no logits.
    """
    shape, _ = read_drafter_config(directory)
    drafter = drafters.build_drafter(shape, read_drafter_vocab(directory, shape), head)
    drafter.load_state_dict(read_weights(directory))
    return drafter.eval().requires_grad_(False)


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """All tensors of model.safetensors, which `read_drafter_vocab` has checked."""
    return load_file(current_folder(directory) / "model.safetensors")
