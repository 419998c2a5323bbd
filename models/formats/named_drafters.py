"""Drafters as recipes name them: a folder of ours, a folder in a foreign format, or a Hub id (USER/NAME[@REVISION]).

name --here, or in the Hub's cache--> folder --a foreign one is imported, once--> folder of ours
"""

import hashlib
import json
import re
from pathlib import Path

from draftsmith.models.checkpoint import read_drafter_config
from draftsmith.models.drafters import config_of, kind_text
from draftsmith.models.formats import hub_push
from draftsmith.models.formats.folder import read_folder
from draftsmith.models.formats.importing import format_of, import_drafter, read_for
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.target_lora import adapter_digest
from draftsmith.recipes.errors import UserError, collecting_problems
from draftsmith.recipes.files.atomic import current_folder
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.files.reading import file_digest
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.target import TargetSection

HUB_ID = re.compile(r"(\w[\w.-]*/\w[\w.-]*)(?:@([\w./-]+))?")
LONGEST_IMPORT = 3600.0  # seconds that the other processes of a run wait for the one that imports


def own_drafter(name: str, recipe: Recipe, plan: bool) -> str:
    """The folder of a drafter of ours for a drafter's name; a foreign one is imported into recipe.imported_dir.

    A local folder goes before a Hub id of the same spelling. Names without a drafter return as they are: their readers
    report them.

    Args:
        plan: print what would be downloaded or imported, but do neither. The folder may then be missing
            (`yet_to_import`).
    """
    on_hub, directory = HUB_ID.fullmatch(name), Path(name)
    label = re.sub(r"[^\w.-]+", "--", name) if on_hub else directory.resolve().name
    if on_hub and not current_folder(directory).exists():
        repo_id, revision = on_hub.groups()
        cached = hub_push.cached(repo_id, revision) if plan else hub_push.fetch_drafter(repo_id, revision)
        if cached is None:
            print(f"note: {name!r} is no folder in {Path.cwd()}: the run would fetch it from the Hugging Face Hub")
            return str(recipe.imported_dir / label)
        name, directory = str(cached), cached
    if format_of(directory) != "foreign":
        return name
    files = TargetFiles(recipe.target)
    out = recipe.imported_dir / f"{label}-{_digest(directory, recipe.target)[:12]}"
    if current_folder(out).exists():
        return str(out)
    folder = read_folder(directory)
    if plan:
        shape = read_for(folder, files).shape
        print(f"note: {directory}: a foreign {kind_text(shape)}: the run would import it into {out}")
        return str(out)
    with alone_in(recipe.imported_dir, LONGEST_IMPORT):
        if not current_folder(out).exists():  # another process of this run may have been here
            import_drafter(folder, files, out)
            print(f"imported: {directory} into {out}", flush=True)
    return str(out)


def _digest(directory: Path, target: TargetSection) -> str:
    """Identifies the content of a foreign folder and the target that it is imported for."""
    files = sorted([directory / "config.json", *directory.glob("*.safetensors"), *directory.glob("*.index.json")])
    content = {path.name: file_digest(path) for path in files}
    model = str(Path(target.model).resolve()) if Path(target.model).exists() else target.model
    made_for = [model, target.revision, target.dtype, adapter_digest(target)]
    return hashlib.sha256(json.dumps([content, made_for], sort_keys=True).encode()).hexdigest()


def yet_to_import(recipe: Recipe, drafter: str | Path | None) -> bool:
    """Whether a drafter is one that `own_drafter` would fetch or import, were it no plan."""
    path = Path(drafter or ".")
    return path.parent == recipe.imported_dir and not current_folder(path).exists()


# The recipe with folders of ours in the place of all names.


def with_measured_drafters(recipe: Recipe, plan: bool) -> Recipe:
    """For measuring: eval.drafter, and the drafters under eval.also. Raises UserError with all problems."""
    names = {f"eval.also.{i}.drafter": contender.drafter for i, contender in enumerate(recipe.eval.also)}
    main, *others = _own({"eval.drafter": recipe.eval.drafter, **names}, recipe, plan)
    also = [
        section.model_copy(update={"drafter": name}) for section, name in zip(recipe.eval.also, others, strict=True)
    ]
    return recipe.model_copy(update={"eval": recipe.eval.model_copy(update={"drafter": main, "also": also})})


def with_writing_drafter(recipe: Recipe, plan: bool) -> Recipe:
    """For regeneration: data.generator.drafter. Raises UserError as `own_drafter`."""
    [found] = _own({"data.generator.drafter": recipe.data.generator.drafter}, recipe, plan)
    generator = recipe.data.generator.model_copy(update={"drafter": found})
    return recipe.model_copy(update={"data": recipe.data.model_copy(update={"generator": generator})})


def with_start(recipe: Recipe, plan: bool) -> Recipe:
    """For training and its vocabulary: drafter.init_from, and the size of its draft vocabulary, which comes along."""
    section = recipe.drafter
    [start] = _own({"drafter.init_from": section.init_from}, recipe, plan)
    if start is None:
        return recipe
    changed: dict[str, str | int] = {"init_from": start}
    try:
        shape = read_drafter_config(Path(start))[0]
    except UserError:
        shape = None  # its reader reports it
    if shape is not None and shape.own_head and config_of(section).own_head:
        if section.vocab_size is None and shape.draft_vocab_size != shape.vocab_size:
            changed["vocab_size"] = shape.draft_vocab_size
        elif section.vocab_size not in (None, shape.draft_vocab_size):
            raise UserError(
                f"drafter.vocab_size: {section.vocab_size:,}, but drafter.init_from ({section.init_from}) brings its "
                f"draft vocabulary of {shape.draft_vocab_size:,} tokens with it: leave vocab_size out"
            )
    return recipe.model_copy(update={"drafter": section.model_copy(update=changed)})


def _own(names: dict[str, str | None], recipe: Recipe, plan: bool) -> list[str | None]:
    """`own_drafter` for the names at these keys. Raises UserError with all problems, each with its key in front."""
    problems: list[str] = []
    found: list[str | None] = []
    for key, name in names.items():
        with collecting_problems(problems, f"{key}: "):
            found.append(name and own_drafter(name, recipe, plan))
    if problems:
        raise UserError(problems)
    return found
