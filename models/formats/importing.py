"""Drafters in other projects' formats: the EAGLE format (EAGLE, HASS, SpecForge, SGLang, ModelOpt, TensorRT-LLM) and
speculators'.

    folder --config keys, tensor names--> `Foreign`: shape, draft vocabulary, tensors by our names
           --the target's embeddings and identity--> our checkpoint

Nothing is guessed: a tensor without a place, a missing one, or a key that would change the arithmetic is an error.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from draftsmith.models.checkpoint import checked_shapes, provenance, save_drafter
from draftsmith.models.drafter_base import DrafterConfig
from draftsmith.models.drafters import build_drafter, kind_text
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.formats import eagle_format
from draftsmith.models.formats.folder import Folder
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError, first_invalid, quoted
from draftsmith.recipes.files.json_text import json_object
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.drafter import DrafterSection

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES_OF = {"d2t": (torch.int64, torch.int32), "t2d": (torch.bool,)}  # the rest are weights, in FLOATS
EMBEDDINGS = "embed_tokens.weight"


@dataclass(frozen=True)
class Foreign:
    """A drafter that was read from another project's format."""

    shape: DrafterConfig
    tensors: dict[str, torch.Tensor]  # by our names, d2t and t2d included
    embeddings: torch.Tensor | None  # the table that came along, to compare with the target's


def format_of(directory: Path) -> Literal["ours", "foreign"] | None:
    """The format of the drafter in a folder, to judge by its config.json; None: it holds none that can be read."""
    try:
        config = json_object((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return None
    return "ours" if {"drafter", "target"} <= config.keys() else "foreign" if "architectures" in config else None


def read_foreign(folder: Folder, target: Any) -> Foreign:
    """The drafter in a foreign folder. Raises UserError if it does not fit together, or does not fit the target.

    Args:
        target: the target's text config, to which foreign configs leave sizes and positions.
    """
    try:
        shape = eagle_format.read_config(folder.config, target, folder.tensors)
        for what, theirs, ours in (
            (
                "reads states of width",
                folder.config.get("target_hidden_size") or target.hidden_size,
                target.hidden_size,
            ),
            ("is of width", shape.hidden_size, target.hidden_size),
            ("vocab_size is", shape.vocab_size, target.vocab_size),
        ):
            if theirs != ours:
                raise ValueError(
                    f"{what} {theirs}, the target's {ours}; name the target that it was trained for. Only drafters as "
                    "wide as their target are known here"
                )
        return _placed(folder, shape)
    except ValueError as error:
        text = first_invalid(error) if isinstance(error, ValidationError) else error
        raise UserError(f"{folder.path}: {text}") from None


def _placed(folder: Folder, shape: DrafterConfig) -> Foreign:
    """The tensors at their places in a drafter of this shape, each checked."""
    found: dict[str, torch.Tensor] = {}
    names: dict[str, str] = {}
    for name, tensor in folder.tensors.items():
        if tensor.dtype not in (kinds := DTYPES_OF.get(name, FLOATS)):
            raise ValueError(f"{name} is of type {tensor.dtype}, not {' or '.join(map(str, kinds))}")
        # In the precision that it is used in: a float64 may be finite, and infinite as a float32.
        if not tensor.float().isfinite().all():
            raise ValueError(f"{name} holds numbers that are not finite; the checkpoint is damaged")
    for old, new in eagle_format.our_names(shape, folder.tensors):
        tensor = folder.tensors[old]
        if new.endswith("o_proj.bias") and not tensor.any():
            continue  # vLLM asks for one; zeros change nothing
        if new in found and not torch.equal(found[new], tensor):
            raise ValueError(f"{names[new]} and {old} are two tensors for one place ({new})")
        found[new], names[new] = tensor, old
    vocab, order = _vocabulary(folder.tensors, shape)
    wanted = checked_shapes(folder.path, shape, {name: list(tensor.shape) for name, tensor in folder.tensors.items()})
    problems = [f"{name} is missing" for name in wanted.keys() - found.keys() - set(eagle_format.WEIGHTLESS)]
    for new, tensor in found.items():
        if new not in wanted:
            problems.append(f"{names[new]} has no place in {kind_text(shape)}")
        elif list(tensor.shape) != wanted[new]:
            problems.append(f"{names[new]} is {list(tensor.shape)}, not {wanted[new]}")
    if problems:
        raise ValueError("; ".join(sorted(problems)[:5]) + f"; and {len(problems) - 5} more" * (len(problems) > 5))
    if order is not None:
        found["lm_head.weight"] = found["lm_head.weight"][order].contiguous()
    table = next((tensor for name, tensor in folder.tensors.items() if name.endswith(EMBEDDINGS)), None)
    return Foreign(shape, found | {"d2t": vocab.d2t.clone(), "t2d": vocab.t2d.clone()}, table)


def _vocabulary(tensors: Mapping[str, torch.Tensor], shape: DrafterConfig) -> tuple[DraftVocab, torch.Tensor | None]:
    """(draft vocabulary, order in which the head's rows ascend by target id; None: they do already)."""
    size, whole = shape.draft_vocab_size, shape.vocab_size
    if not shape.own_head or "d2t" not in tensors:
        if size != whole:
            raise ValueError(f"draft_vocab_size is {size:,} of {whole:,}, but there is no d2t")
        return DraftVocab.full(whole), None
    d2t = tensors["d2t"]
    if list(d2t.shape) != [size]:
        raise ValueError(f"d2t is of shape {list(d2t.shape)}, not {size:,} numbers")
    ascending, order = (d2t.long() + torch.arange(size)).sort()
    try:
        vocab = DraftVocab(ascending, whole)
    except ValueError as error:
        raise ValueError(f"d2t must hold offsets (target = i + d2t[i]) to different tokens; {error}") from None
    if "t2d" in tensors and not torch.equal(tensors["t2d"], vocab.t2d):
        raise ValueError("t2d marks other target tokens than d2t leads to")
    return vocab, None if torch.equal(order, torch.arange(size)) else order


def reading_scaled(
    shape: DrafterConfig, tensors: Mapping[str, torch.Tensor], scale: float
) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    """(shape, tensors) of a drafter that makes of embeddings s x (s = `scale`) what the given one makes of x.

    EAGLE-1's fc takes the scale into its columns. In EAGLE-3 a norm follows, whose epsilon alone tells x from s x:

        norm(s x, s^2 epsilon) = norm(x, epsilon)

    All norms of a drafter share one epsilon. So the residual stream, which all others read, is multiplied by s, too: fc
    and all projections that end in it. Norms of the target's states (fc_norm) cannot follow.
    """
    changed = dict(tensors)
    if not isinstance(shape, Eagle3Config):
        changed["fc.weight"] = tensors["fc.weight"].clone()
        changed["fc.weight"][:, : shape.hidden_size] /= scale  # [embedding; feature]
        return shape, changed
    assert not shape.fc_norm
    # With norm_output, the last norm's output is the next feature, which the stream begins with.
    ends = ("fc.weight", *["norm.weight"] * shape.norm_output)
    for name, tensor in tensors.items():
        if name in ends or name.endswith(("o_proj.weight", "down_proj.weight")):
            changed[name] = tensor * scale
    if shape.norm_output:
        changed["lm_head.weight"] = tensors["lm_head.weight"] / scale
    epsilon = float(f"{shape.rms_norm_eps * scale**2:.6g}")  # six digits survive float32
    return replace(shape, rms_norm_eps=epsilon), changed


def read_for(folder: Folder, files: TargetFiles) -> Foreign:
    """The drafter in a foreign folder, for a target by its config alone. Raises UserError where they do not fit."""
    foreign, scale = read_foreign(folder, files.text_config), files.planned_embedding_scale
    if foreign.embeddings is None:
        _check_scale(foreign.shape, scale, folder.path)
    return foreign


def import_drafter(folder: Folder, files: TargetFiles, out: Path) -> None:
    """Writes the drafter of a foreign folder as one of ours, with the identity of the loaded target."""
    foreign = read_for(folder, files)
    target = Target(files.load_model(), capture_layers=(0,))
    shape, tensors = _for_target(foreign, target.embedding_table, target.embedding_scale, folder.path)
    # Strangers trained it for the target as it is published.
    published = dict.fromkeys(files.changes)
    identity = files.identity_of(target) | published | {"layout": files.layout(target.dtype)}
    made = provenance({path.name: path for path in sorted(folder.path.glob("*.safetensors"))})
    vocab = DraftVocab.from_d2t(tensors["d2t"], tensors["t2d"])
    keys = {name: value for name, value in shape.to_dict().items() if name in DrafterSection.model_fields}
    keys |= {"kind": shape.kind, "vocab_size": None if vocab.is_full else vocab.size}
    if not shape.fuses:
        keys["capture_layers"] = None
    section = {"output_dir": str(out.parent), "target": files.section.model_dump(), "drafter": keys}
    drafter = build_drafter(shape, vocab, target.frozen_head)
    drafter.load_state_dict(tensors)
    recipe = dump_recipe(Recipe.model_validate(section))
    save_drafter(
        out, drafter, identity, recipe, made | {"imported": {"from": str(folder.path), "config": folder.config}}
    )


def _for_target(
    foreign: Foreign, table: torch.Tensor, scale: float, where: Path
) -> tuple[DrafterConfig, dict[str, torch.Tensor]]:
    """(shape, tensors) of the drafter as one of ours: it reads the target's embeddings, rows of `table` times `scale`.

    Other projects give drafters the unscaled rows, or those of a table that comes along. Tables are compared in
    bfloat16, since files are often rounded.
    """
    own, shape, tensors = foreign.embeddings, foreign.shape, foreign.tensors
    if own is not None and scale != 1 and _same_table(own, table.float() * scale):
        return replace(shape, embedding_scale=scale), tensors
    if own is not None and not _same_table(own, table):
        raise UserError(
            f"{where}: embed_tokens is {quoted(list(own.shape))} and not the target's table; a drafter with embeddings "
            "of its own is not supported. Was it trained for this target?"
        )
    if scale == 1:
        return shape, tensors
    _check_scale(shape, scale, where)
    shape, tensors = reading_scaled(shape, tensors, scale)
    return replace(shape, embedding_scale=scale), tensors


def _check_scale(shape: DrafterConfig, scale: float, where: Path) -> None:
    """Raises UserError for a drafter with fc_norm that reads the unscaled table of a target that scales it."""
    if scale != 1 and isinstance(shape, Eagle3Config) and shape.fc_norm:
        raise UserError(
            f"{where}: the target scales its embeddings by {scale:g}, and other projects give drafters the unscaled "
            "table; a drafter with fc_norm cannot be rewritten for the scaled one, which drafters read here"
        )


def _same_table(one: torch.Tensor, other: torch.Tensor) -> bool:
    rounded = (each.detach().cpu().to(torch.bfloat16) for each in (one, other))
    return one.shape == other.shape and torch.equal(*rounded)
