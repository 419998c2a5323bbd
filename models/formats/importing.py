"""Turns a foreign drafter, in a folder or on the Hub, into a drafter folder of ours.

folder or Hub id --fetch--> folder --read_foreign--> shape, tensors --the target's identity--> our checkpoint
"""

from pathlib import Path
from typing import Any

from draftsmith.models.checkpoint import provenance, save_drafter
from draftsmith.models.drafter_base import DrafterConfig
from draftsmith.models.formats.folder import Folder
from draftsmith.models.formats.foreign import Foreign, check_scale, for_target, read_foreign
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.drafter import DrafterSection


def is_ours(directory: Path) -> bool:
    """Whether a folder holds a drafter in our own format."""
    return {"drafter", "target"} <= _config_of(directory).keys()


def is_foreign(directory: Path) -> bool:
    """Whether a folder holds a model in a format other than ours, to judge by its config.json."""
    return "architectures" in _config_of(directory) and not is_ours(directory)


def _config_of(directory: Path) -> dict[str, Any]:
    """A folder's config.json; empty where there is none, or none that can be read."""
    try:
        config = parse_json((directory / "config.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


def read_for(folder: Folder, files: TargetFiles) -> Foreign:
    """The drafter in a foreign folder, for a target by its config alone. Raises UserError where they do not fit."""
    foreign = read_foreign(folder, files.text_config)
    check_scale(foreign, files.planned_embedding_scale, str(folder.path))
    return foreign


def import_drafter(folder: Folder, files: TargetFiles, out: Path) -> DrafterConfig:
    """Writes the drafter of a foreign folder as one of ours, with the identity of the loaded target.

    Raises:
        UserError: it is not for this target, or nothing here could compute it.
    """
    foreign = read_for(folder, files)
    target = Target(files.load_model(), capture_layers=(0,))
    foreign = for_target(foreign, target.embedding_table, target.embedding_scale, str(folder.path))
    # Strangers trained it for the target as it is published.
    published = dict.fromkeys(files.changes)
    identity = files.identity_of(target) | published | {"layout": files.layout(target.dtype)}
    weights = {path.name: path for path in sorted(folder.path.glob("*.safetensors"))}
    made = provenance(weights) | {"imported": {"from": str(folder.path), "config": folder.config}}
    recipe = Recipe.model_validate(
        {"output_dir": str(out.parent), "target": files.section.model_dump(), "drafter": drafter_keys(foreign.shape)}
    )
    save_drafter(out, foreign.drafter(target.frozen_head), identity, dump_recipe(recipe), made)
    return foreign.shape


def drafter_keys(shape: DrafterConfig) -> dict[str, Any]:
    """The recipe's `drafter` section that trains a drafter of this shape."""
    keys = {name: value for name, value in shape.to_dict().items() if name in DrafterSection.model_fields}
    keys |= {"kind": shape.kind, "vocab_size": shape.draft_vocab_size}
    if shape.draft_vocab_size == shape.vocab_size:
        del keys["vocab_size"]
    if not shape.fuses:
        del keys["capture_layers"]
    return keys
