"""Drafters in other projects' formats: the EAGLE format (EAGLE, HASS, SpecForge, SGLang, ModelOpt, TensorRT-LLM) and
speculators'.

    folder --which format?--> config keys, tensor names --> shape, draft vocabulary, tensors by our names

Nothing is guessed: a tensor without a place, a missing one, or a key that would change the arithmetic is an error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from draftsmith.models.checkpoint import check_rotary, check_sizes
from draftsmith.models.draft_tree import Committed
from draftsmith.models.drafter_base import Drafter, DrafterConfig, FrozenHead
from draftsmith.models.drafters import build_drafter, drafting_of, kind_text, tensor_shapes
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.formats import eagle, speculators
from draftsmith.models.formats.eagle import Contradiction
from draftsmith.models.formats.folder import Folder
from draftsmith.models.prompt import DecoderInputs, PlacedInsert
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError, quoted

FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)
DTYPES_OF = {"d2t": (torch.int64, torch.int32), "t2d": (torch.bool,)}  # the rest are weights, in FLOATS


@dataclass(frozen=True)
class Foreign:
    """A drafter that was read from another project's format."""

    shape: DrafterConfig
    vocab: DraftVocab
    tensors: dict[str, torch.Tensor]  # by our names, d2t and t2d included
    embeddings: torch.Tensor | None  # the table that came along, to compare with the target's

    def drafter(self, head: FrozenHead | None) -> Drafter:
        """The module on the CPU, in evaluation mode."""
        drafter = build_drafter(self.shape, self.vocab, head)
        drafter.load_state_dict(self.tensors)
        return drafter.eval().requires_grad_(False)


def read_foreign(folder: Folder, target: Any) -> Foreign:
    """The drafter in a foreign folder.

    Args:
        target: the target's text config, to which foreign configs leave sizes and positions.

    Raises:
        UserError: the folder does not fit together, or does not fit the target.
    """
    try:
        config = folder.config
        if speculators.is_speculators(config):
            config = speculators.plain_config(config)
        shape = eagle.read_config(config, target, folder.tensors)
        _check_target(shape, _width_read(folder, config, shape), target)
        check_sizes(folder.path, shape, {name: list(tensor.shape) for name, tensor in folder.tensors.items()})
        check_rotary(folder.path, shape)
        return _placed(folder, shape)
    except Contradiction as error:
        raise UserError(f"{folder.path}: {error}") from None


def _width_read(folder: Folder, config: Mapping[str, Any], shape: DrafterConfig) -> int:
    """The width of the states that the drafter reads: the config's word, or what its fc has columns for."""
    said, fc = config.get("target_hidden_size"), folder.tensors.get("fc.weight")
    if type(said) is int:
        return said
    if not shape.fuses or fc is None or fc.ndim != 2 or fc.shape[1] % len(shape.capture_layers):
        return shape.hidden_size  # EAGLE-1 has the target's width; an odd fc is reported later
    return fc.shape[1] // len(shape.capture_layers)


def _check_target(shape: DrafterConfig, reads: int, target: Any) -> None:
    if reads != target.hidden_size:
        raise Contradiction(
            f"reads states of width {reads:,}, the target's are {target.hidden_size:,} wide; name the target that it "
            "was trained for"
        )
    if shape.hidden_size != reads:
        raise Contradiction(
            f"the drafter is {shape.hidden_size:,} wide, the target {reads:,}; only drafters as wide as their target "
            "are known here, so leave this one to a serving engine and train one of the target's width"
        )
    if shape.vocab_size != target.vocab_size:
        raise Contradiction(
            f"vocab_size is {shape.vocab_size:,}, the target's is {target.vocab_size:,}; name the target that it was "
            "trained for"
        )


def _placed(folder: Folder, shape: DrafterConfig) -> Foreign:
    """The tensors at their places in a drafter of this shape, each checked."""
    for name, tensor in folder.tensors.items():
        if tensor.dtype not in (kinds := DTYPES_OF.get(name, FLOATS)):
            raise Contradiction(f"{name} is of type {tensor.dtype}, not {' or '.join(map(str, kinds))}")
    found, names = {}, {}
    for old, new in eagle.our_names(shape, folder.tensors):
        tensor = folder.tensors[old]
        if new.endswith("o_proj.bias") and not tensor.any():
            continue  # vLLM asks for one; zeros change nothing
        if new in found and not torch.equal(found[new], tensor):
            raise Contradiction(f"{names[new]} and {old} are two tensors for one place ({new})")
        found[new], names[new] = tensor, old
    vocab, order = _vocabulary(folder.tensors, shape)
    wanted = tensor_shapes(shape, vocab)
    problems = [f"{name} is missing" for name in wanted.keys() - found.keys() - set(eagle.WEIGHTLESS)]
    for new, tensor in found.items():
        if new not in wanted:
            problems.append(f"{names[new]} has no place in {kind_text(shape)}")
        elif list(tensor.shape) != wanted[new]:
            problems.append(f"{names[new]} is {list(tensor.shape)}, not {wanted[new]}")
    if problems:
        raise Contradiction("; ".join(sorted(problems)[:5]) + f"; and {len(problems) - 5} more" * (len(problems) > 5))
    table = next((tensor for name, tensor in folder.tensors.items() if name.endswith("embed_tokens.weight")), None)
    for name, tensor in {**found, **({} if table is None else {"embed_tokens.weight": table})}.items():
        # In the precision that it is used in: a float64 may be finite, and infinite as a float32.
        if not tensor.float().isfinite().all():
            raise Contradiction(f"{names.get(name, name)} holds numbers that are not finite; the checkpoint is damaged")
    if order is not None:
        found["lm_head.weight"] = found["lm_head.weight"][order].contiguous()
    return Foreign(shape, vocab, found | {"d2t": vocab.d2t.clone(), "t2d": vocab.t2d.clone()}, table)


def _vocabulary(tensors: Mapping[str, torch.Tensor], shape: DrafterConfig) -> tuple[DraftVocab, torch.Tensor | None]:
    """(draft vocabulary, order in which the head's rows ascend by target id; None: they do already)."""
    size, whole = shape.draft_vocab_size, shape.vocab_size
    if not shape.own_head or "d2t" not in tensors:
        if size != whole:
            raise Contradiction(f"draft_vocab_size is {size:,} of {whole:,}, but there is no d2t")
        return DraftVocab.full(whole), None
    d2t = tensors["d2t"]
    if list(d2t.shape) != [size]:
        raise Contradiction(f"d2t is of shape {list(d2t.shape)}, not {size:,} numbers")
    ascending, order = (d2t.long() + torch.arange(size)).sort()
    try:
        vocab = DraftVocab(ascending, whole)
    except ValueError as error:
        raise Contradiction(f"d2t must hold offsets (target = i + d2t[i]) to different tokens; {error}") from None
    if "t2d" in tensors and not torch.equal(tensors["t2d"], vocab.t2d):
        raise Contradiction("t2d marks other target tokens than d2t leads to")
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


class EmbeddingTable:
    """An embedding table in a target's place."""

    def __init__(self, table: torch.Tensor):
        self.table = table

    def embed(self, ids: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.table[ids].to(dtype or self.table.dtype)

    def inputs(
        self,
        ids: torch.Tensor,
        positions: torch.Tensor | None = None,
        inserts: Sequence[PlacedInsert] = (),
        dtype: torch.dtype | None = None,
    ) -> DecoderInputs:
        places = torch.arange(ids.shape[1], device=ids.device)[None] if positions is None else positions
        return DecoderInputs(self.embed(ids, dtype), places)


@torch.no_grad()
def probe_log_probs(drafter: Drafter, steps: int = 3, columns: int = 12) -> torch.Tensor:
    """[steps, Vd] log-probabilities along a drafted chain over random features and embeddings, the same in each call.

    Equal results of two drafters mean equal weights in equal places: it compares an export with its source.
    """
    config = drafter.config
    generator = torch.Generator().manual_seed(0)
    table = torch.randn(config.vocab_size, config.hidden_size, generator=generator) * config.embedding_scale
    width = config.hidden_size * len(config.capture_layers)
    features = torch.randn(1, columns, width, generator=generator)
    tokens = torch.randint(config.vocab_size, (1, columns + 1), generator=generator).tolist()
    drafting = drafting_of(drafter)
    drafting.set_rows([], 1)
    drafting.observe(Committed(EmbeddingTable(table), tokens, features, [columns]))
    found = [drafting.root_log_probs()[0]]
    for depth in range(1, steps):
        best = drafting.vocab.to_target(found[-1].argmax())[None, None]
        found.append(drafting.expand(torch.tensor([[depth - 1]]), best, depth)[0, 0])
    return torch.stack(found)


def probe_head(shape: DrafterConfig) -> FrozenHead | None:
    """A random head in the target's place, for kinds that use it."""
    if shape.own_head:
        return None
    weight = torch.randn(shape.vocab_size, shape.hidden_size, generator=torch.Generator().manual_seed(1))
    return FrozenHead(weight, None, lambda logits: logits)


def for_target(foreign: Foreign, table: torch.Tensor, scale: float, where: str) -> Foreign:
    """The drafter as one of ours: it reads the target's embeddings, which are rows of `table` times `scale`.

    Other projects give drafters the unscaled rows, or those of a table that comes along. Tables are compared in
    bfloat16, since files are often rounded.

    Raises:
        UserError: its table is another one, or see `check_scale`.
    """
    own, shape = foreign.embeddings, foreign.shape
    if own is not None and scale != 1 and _same_table(own, table.float() * scale):
        return replace(foreign, shape=replace(shape, embedding_scale=scale))
    if own is not None and not _same_table(own, table):
        raise UserError(
            f"{where}: embed_tokens is {quoted(list(own.shape))} and not the target's table; a drafter with embeddings "
            "of its own is not supported. Was it trained for this target?"
        )
    if scale == 1:
        return foreign
    check_scale(replace(foreign, embeddings=None), scale, where)
    shape, tensors = reading_scaled(shape, foreign.tensors, scale)
    return replace(foreign, shape=replace(shape, embedding_scale=scale), tensors=tensors)


def check_scale(foreign: Foreign, scale: float, where: str) -> None:
    """Raises UserError for a drafter with fc_norm that reads the unscaled table of a target that scales it."""
    if scale != 1 and foreign.embeddings is None and isinstance(foreign.shape, Eagle3Config) and foreign.shape.fc_norm:
        raise UserError(
            f"{where}: the target scales its embeddings by {scale:g}, and other projects give drafters the unscaled "
            "table; a drafter with fc_norm cannot be rewritten for the scaled one, which drafters read here"
        )


def _same_table(one: torch.Tensor, other: torch.Tensor) -> bool:
    rounded = (each.detach().cpu().to(torch.bfloat16) for each in (one, other))
    return one.shape == other.shape and torch.equal(*rounded)
