"""The commands `export` and `import-drafter`."""

import sys
from argparse import Namespace
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import torch

from draftsmith.models.drafters import kind_text
from draftsmith.models.formats import card as cards
from draftsmith.models.formats import hub_push, llama_cpp
from draftsmith.models.formats.engines import ENGINES, ServingEngine
from draftsmith.models.formats.exporting import Source, able_engines, check_engine, export, readers, source_to_train
from draftsmith.models.formats.folder import read_folder
from draftsmith.models.formats.importing import format_of, import_drafter, read_for
from draftsmith.models.gguf_target import gguf_file, with_weights
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.stages import made_by, require_files
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import current_folder
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import ExportSection
from draftsmith.recipes.sections.target import TargetSection


def export_main(command: Command, recipe: Recipe | None) -> None:
    """Exports the recipe's drafter, or the checkpoint that the command line names."""
    section = ExportSection() if recipe is None else recipe.export
    name = command.to or section.to or "vllm"
    if name not in ENGINES:
        raise UserError(f"--to {name}: no engine of that name; one of {', '.join(ENGINES)}")
    engine = ENGINES[name]
    if recipe is None:
        if command.overrides:
            raise UserError(
                f"{command.overrides[0]}: {command.recipe_path} is a checkpoint, which has no keys to replace"
            )
        directory = Path(command.recipe_path)
        measured_file = directory.parent / "eval" / "acceptance.json"
        out = command.out or directory.parent / "export" / engine.name
    else:
        if not command.plan:
            require_files(made_by("train", recipe))
        directory, measured_file = recipe.drafter_dir, recipe.eval_out / "acceptance.json"
        out = command.out or recipe.export_dir(engine.name)
    yet_to_train = recipe is not None and not current_folder(directory).exists()
    source = source_to_train(recipe, TargetFiles(recipe.target)) if recipe and yet_to_train else Source.read(directory)
    check_engine(source, engine, out)
    _check_options(command, source, engine)
    measured = cards.read_measurement(measured_file, source)
    target_name = source.target["model"]
    plan = PlanLines()
    which = f"{kind_text(source.shape)} for {target_name}" + ", yet to be trained" * yet_to_train
    plan.line("drafter", f"{directory}: {which}")
    others = ", ".join(other.title for other in able_engines(source) if other is not engine)
    plan.line("engine", f"{engine.title}; also able: {others or 'none'}")
    why = "was measured with other weights" if measured_file.exists() else "does not exist"
    unmeasured = f"none: {measured_file} {why}; run draftsmith evaluate for a card with numbers"
    plan.line("acceptance", str(measured_file if measured else unmeasured))
    if command.plan:
        plan.writes(out)
        return

    dtype = None if section.dtype == "trained" else getattr(torch, section.dtype)
    own = None if not Path(target_name).exists() else gguf_file(target_name)
    target_gguf = command.target_gguf or (own if engine.format == "gguf" else None)
    if command.with_target:
        target_gguf = out / llama_cpp.TARGET
        llama_cpp.convert_target(source.target, command.with_target, target_gguf, dtype)
        plan.line("wrote", f"{target_gguf}: the target, by {command.with_target}")
    if own is not None and engine.format != "gguf" and not source.target.get("adapter"):
        # These engines read the folder to which the file was converted.
        target_name = with_weights(own, getattr(torch, source.target["layout"]["dtype"]))
        source = replace(source, target=source.target | {"model": target_name})
    folder, serves, repo_id = str(out), readers(source, engine), command.push_to_hub
    if repo_id:
        folder = f"$(hf download {repo_id})" if engine.format == "gguf" else repo_id  # llama-server's -md takes a file
    recipe_path = None if recipe is None else command.recipe_path
    card = cards.card(source, serves, measured, folder, repo_id is not None, section.license, recipe_path)
    extra = cards.measurement_files(source, measured)
    export(source, engine, out, dtype, {"README.md": card, **extra}, target_gguf)
    plan.line("wrote", f"{out}: read back, bit for bit")
    if len(serves) > 1:
        plan.line("", f"{', '.join(other.title for other in serves[1:])} read the same folder")
    if repo_id:
        message = f"{kind_text(source.shape)} drafter for {source.target_name}, by draftsmith {version('draftsmith')}"
        plan.line("uploaded", hub_push.push(out, repo_id, command.private, command.revision, message))
    if note := cards.before_serving(source, target_name):
        print(f"note: {note}")
    served = str(target_gguf or cards.served_target(source, target_name))
    for other in serves:
        print(f"{other.title}:\n  {other.command(source.shape, served, folder)}")
    if recipe is not None and recipe.target.dtype == "float32" and engine.name == "vllm":
        print("Equal answers need the precision of the measurement: add --dtype float32", file=sys.stderr)


def _check_options(command: Command, source: Source, engine: ServingEngine) -> None:
    """Raises UserError for options that do not fit the engine or the drafter."""
    if command.push_to_hub:
        hub_push.check_name(command.push_to_hub)
        if engine.format == "speculators" and Path(source.target["model"]).exists():
            raise UserError(
                f"--push-to-hub: a folder of speculators names its target, here {source.target['model']}, which is "
                "nowhere else; push --to vllm, which names none"
            )
    checkout, target_gguf = command.with_target, command.target_gguf
    if engine.format != "gguf" and (checkout or target_gguf):
        raise UserError(f"--with-target and --target-gguf: {engine.title} reads no GGUF; they belong to --to llama.cpp")
    if engine.format == "gguf":
        llama_cpp.package()
    if checkout and source.target.get("adapter"):
        raise UserError("--with-target: would convert the target without its adapter; convert the merged target")
    if checkout and str(source.target["model"]).lower().endswith(".gguf"):
        raise UserError(
            "--with-target: the target is a GGUF file already, which llama.cpp reads as it is; leave it out"
        )
    if checkout and not (checkout / llama_cpp.CONVERTER).is_file():
        raise UserError(
            f"--with-target {checkout}: no {llama_cpp.CONVERTER} there; name the folder of llama.cpp's sources"
        )
    if target_gguf:
        llama_cpp.check_fit(source.target, target_gguf)


def import_main(arguments: Namespace) -> None:
    """Imports the drafter that the command line names."""
    files = TargetFiles(TargetSection(model=arguments.target, revision=arguments.target_revision))
    directory, out = Path(arguments.drafter), arguments.out
    if not directory.is_dir():
        directory = hub_push.fetch_drafter(arguments.drafter, arguments.revision, arguments.allow_bin)
    if format_of(directory) == "ours":
        raise UserError(f"{directory}: already a drafter of draftsmith; name it as eval.drafter or drafter.init_from")
    if out.resolve() == directory.resolve():
        raise UserError(f"--out {out}: is the folder to import, which would be replaced; name another one")
    folder = read_folder(directory, arguments.allow_bin)
    shape = read_for(folder, files).shape
    plan = PlanLines()
    plan.line("drafter", f"{directory}: {kind_text(shape)}, {shape.draft_vocab_size:,} of {shape.vocab_size:,} tokens")
    if arguments.plan:
        plan.writes(out)
        return
    import_drafter(folder, files, out)
    plan.line("wrote", str(out))
    print(f"next: draftsmith evaluate your-recipe.yaml eval.drafter={out}")
