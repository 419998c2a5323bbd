"""The rotation of a drafter's heads: its kinds, and what becomes of a target's rotation and of other projects'.

A drafter rotates whole heads, by frequencies that no length changes. A target may rotate a part of each head, or by
frequencies that change with the length (longrope, dynamic). Its drafter then rotates whole heads with the target's
base: it is trained with that, and every engine can serve it.

One dict describes a rotation, by transformers' names: rope_type, rope_theta, and the settings of the kind.
`models.formats.engines` says which settings each engine reads.
"""

from collections.abc import Mapping
from typing import Any

from draftsmith.recipes.errors import UserError

# The settings of each kind that all engines with this kind read.
ROTATIONS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings", "beta_fast", "beta_slow"),
}
# Settings that some engines do not read. Drafters of other projects may have them, ours do not.
RARE: dict[str, tuple[str, ...]] = {"yarn": ("attention_factor", "mscale", "mscale_all_dim", "truncate")}
OPTIONAL = ("beta_fast", "beta_slow")
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def drafters_rotation(target: Mapping[str, Any], positions: int) -> dict[str, Any]:
    """The rotation of a drafter for a target with these rotary parameters. Raises UserError for a setting that is null.

    Args:
        positions: the target's max_position_embeddings, by which transformers replaces a yarn factor that is null.
    """
    kind = target["rope_type"] if target["rope_type"] in ROTATIONS else "default"
    if kind == "yarn" and target["factor"] is None:
        target = {**target, "factor": positions / target["original_max_position_embeddings"]}
    if missing := [key for key in ROTATIONS[kind] if key not in OPTIONAL and target.get(key) is None]:
        raise UserError(f"target.model: its config says null for {missing[0]}, which {kind} rotary scaling needs")
    return _described(kind, target, ROTATIONS[kind])


def checked_rotation(given: Mapping[str, Any], positions: int) -> dict[str, Any]:
    """The rotation of another project's drafter, without keys that its kind ignores. Raises ValueError for one that no
    drafter here has.

    Args:
        positions: its max_position_embeddings, which transformers takes for a missing original one.
    """
    kind, part = given.get("rope_type"), given.get("partial_rotary_factor")
    if not isinstance(kind, str) or kind not in ROTATIONS:
        raise ValueError(
            f"rope_type is {kind!r}; drafters here rotate by {', '.join(ROTATIONS)}, the same at every length"
        )
    if part not in (None, 1.0):
        raise ValueError(f"partial_rotary_factor is {part!r}; drafters here rotate whole heads")
    given = {"original_max_position_embeddings": positions, **given}
    return _described(kind, given, (*ROTATIONS[kind], *RARE.get(kind, ())))


def _described(kind: str, given: Mapping[str, Any], settings: tuple[str, ...]) -> dict[str, Any]:
    kept = {key: given[key] for key in ("rope_theta", *settings) if given.get(key) is not None}
    return PLAIN | {"rope_type": kind} | kept
