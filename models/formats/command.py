"""The commands `export` and `import-drafter`."""

import sys
from argparse import Namespace
from importlib.metadata import version
from pathlib import Path
from typing import Any

from draftsmith.models.drafters import kind_text
from draftsmith.models.formats import card as cards
from draftsmith.models.formats import hub, importing, llama_cpp
from draftsmith.models.formats.engines import ENGINES, ServingEngine
from draftsmith.models.formats.exporting import (
    DTYPES,
    Source,
    able_engines,
    check_engine,
    check_out,
    export,
    readers,
    source_to_train,
)
from draftsmith.models.formats.folder import read_folder
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.inputs import made_by, require_files
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import current_folder
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import ExportSection
from draftsmith.recipes.sections.target import TargetSection


def export_main(command: Command, recipe: Recipe | None) -> None:
    """Exports the recipe's drafter, or the checkpoint that the command line names.

    Raises:
        UserError: no drafter there, an unknown engine, or one that cannot serve this drafter.
    """
    engine = _engine(command.to or (None if recipe is None else recipe.export.to) or "vllm")
    directory, measured_file, out = _places(command, recipe, engine)
    yet_to_train = recipe is not None and not current_folder(directory).exists()
    if recipe is not None and yet_to_train:
        source = source_to_train(recipe, TargetFiles(recipe.target))
    else:
        source = Source.read(directory)
    check_out(out, directory)
    check_engine(source, engine)
    _check_options(command, source, engine)
    measured = cards.read_measurement(measured_file, source)
    which = f"{kind_text(source.shape)} for {source.target['model']}" + ", yet to be trained" * yet_to_train
    plan = PlanLines()
    plan.line("drafter", f"{directory}: {which}")
    others = ", ".join(other.title for other in able_engines(source) if other is not engine)
    plan.line("engine", f"{engine.title}; also able: {others or 'none'}")
    why = "was measured with other weights" if measured_file.exists() else "does not exist"
    unmeasured = f"none: {measured_file} {why}; run draftsmith evaluate for a card with numbers"
    plan.line("acceptance", str(measured_file if measured else unmeasured))
    if command.plan:
        plan.writes(out)
        return
    _write(command, recipe, source, engine, measured, out)


def _write(
    command: Command,
    recipe: Recipe | None,
    source: Source,
    engine: ServingEngine,
    measured: dict[str, Any] | None,
    out: Path,
) -> None:
    """Writes the folder, uploads it if that is asked, and prints how to serve it."""
    lines = PlanLines()
    section, recipe_path = (ExportSection(), None) if recipe is None else (recipe.export, command.recipe_path)
    dtype = DTYPES[section.dtype] if section.dtype != "trained" else None
    target_gguf = command.target_gguf
    if command.with_target:
        target_gguf = out / llama_cpp.TARGET
        llama_cpp.convert_target(source, command.with_target, target_gguf, dtype)
        lines.line("wrote", f"{target_gguf}: the target, by {command.with_target}")
    name, serves = command.push_to_hub or str(out), readers(source, engine)
    if command.push_to_hub and engine.format == "gguf":
        name = f"$(hf download {name})"  # llama-server's -md takes a file
    card = cards.card(source, serves, measured, name, command.push_to_hub is not None, section.license, recipe_path)
    extra = cards.measurement_files(source, measured)
    export(source, engine, out, dtype, {"README.md": card, **extra}, target_gguf)
    lines.line("wrote", f"{out}: read back, logits equal")
    if len(serves) > 1:
        lines.line("", f"{', '.join(other.title for other in serves[1:])} read the same folder")
    if command.push_to_hub:
        message = f"{kind_text(source.shape)} drafter for {source.target_name}, by draftsmith {version('draftsmith')}"
        where = hub.push(out, command.push_to_hub, command.private, command.revision, message)
        lines.line("uploaded", where)
    if note := cards.before_serving(source, source.target["model"]):
        print(f"note: {note}")
    target = str(target_gguf or cards.served_target(source, source.target["model"]))
    for other in serves:
        print(f"{other.title}:\n  {other.command(source.shape, target, name)}")
    if recipe is not None and recipe.target.dtype == "float32" and engine.name == "vllm":
        print("Equal answers need the precision of the measurement: add --dtype float32", file=sys.stderr)


def _places(command: Command, recipe: Recipe | None, engine: ServingEngine) -> tuple[Path, Path, Path]:
    """(the drafter, its acceptance.json, the folder to write)."""
    if recipe is None:
        if command.overrides:
            raise UserError(
                f"{command.overrides[0]}: {command.recipe_path} is a checkpoint, which has no keys to replace"
            )
        directory = Path(command.recipe_path)
        run = directory.parent
        return directory, run / "eval" / "acceptance.json", command.out or run / "export" / engine.name
    if not command.plan:
        require_files(made_by("train", recipe))
    return recipe.drafter_dir, recipe.eval_out / "acceptance.json", command.out or recipe.export_dir(engine.name)


def _check_options(command: Command, source: Source, engine: ServingEngine) -> None:
    """Raises UserError for options that do not fit the engine or the drafter."""
    if command.push_to_hub:
        hub.check_name(command.push_to_hub)
        if engine.format == "speculators" and Path(source.target["model"]).exists():
            raise UserError(
                f"--push-to-hub: a folder of speculators names its target, here {source.target['model']}, which is "
                "nowhere else; push --to vllm, which names none"
            )
    if engine.format == "gguf":
        if command.with_target and source.target.get("adapter"):
            raise UserError("--with-target: would convert the target without its adapter; convert the merged target")
        llama_cpp.check_target_gguf(source, command.with_target, command.target_gguf)
    elif command.with_target or command.target_gguf:
        raise UserError(f"--with-target and --target-gguf: {engine.title} reads no GGUF; they belong to --to llama.cpp")


def _engine(name: str) -> ServingEngine:
    if name not in ENGINES:
        raise UserError(f"--to {name}: no engine of that name; one of {', '.join(ENGINES)}")
    return ENGINES[name]


def import_main(arguments: Namespace) -> None:
    """Imports the drafter that the command line names.

    Raises:
        UserError: it cannot be read, is not for this target, or is ours already.
    """
    files = TargetFiles(TargetSection(model=arguments.target, revision=arguments.target_revision))
    directory = Path(arguments.drafter)
    if not directory.is_dir():
        directory = hub.fetch_drafter(arguments.drafter, arguments.revision, arguments.allow_bin)
    if importing.is_ours(directory):
        raise UserError(f"{directory}: already a drafter of draftsmith; name it as eval.drafter or drafter.init_from")
    if arguments.out.resolve() == directory.resolve():
        raise UserError(f"--out {arguments.out}: is the folder to import, which would be replaced; name another one")
    folder = read_folder(directory, arguments.allow_bin)
    foreign = importing.read_for(folder, files)
    shape = foreign.shape
    plan = PlanLines()
    plan.line("drafter", f"{directory}: {kind_text(shape)}, {shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens")
    if arguments.plan:
        plan.writes(arguments.out)
        return
    importing.import_drafter(folder, files, arguments.out)
    plan.line("wrote", str(arguments.out))
    print(f"next: draftsmith evaluate your-recipe.yaml eval.drafter={arguments.out}")
