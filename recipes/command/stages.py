"""The commands of Draftsmith: for `draftsmith --help`, the stages of `draftsmith run`, and "next:" lines."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import current_folder

if TYPE_CHECKING:  # `draftsmith --help` reads this file and should not wait for the schema
    from draftsmith.recipes.command.cli import Command
    from draftsmith.recipes.schema import Recipe

INSIDE_RUN = "DRAFTSMITH_INSIDE_RUN"
"""Environment variable that `draftsmith run` sets for its stages, which then print no "next:" lines."""
Input = tuple[str, Path, str]  # what a command reads, where, and the command that writes it


@dataclass(frozen=True)
class Script:
    """A command, and the script that does the same."""

    path: str  # from the repository's root; {kind} is the recipe's drafter.kind
    help: str

    @property
    def module(self) -> str:
        """The module with the command's `main`."""
        path = self.path.replace("{kind}", "run/training_command")
        return "draftsmith." + path.removesuffix(".py").replace("/", ".")


@dataclass(frozen=True)
class Stage(Script):
    """A command that `draftsmith run` calls where the recipe needs it.

    Attributes:
        makes: its first file, in words.
        wanted_if: whether the recipe needs it.
        settings: sections of the recipe that affect its result, without the keys of `IRRELEVANT`, and single keys
            (dotted).
        reads: its input files, besides those of the target. What is no file, such as a Hub dataset, does not count.
        writes: its files.
        rewrites: it writes its files on every run; the others may have nothing left to do.
    """

    makes: str
    wanted_if: Callable[[Recipe], bool]
    settings: Callable[[Recipe], list[str]]
    reads: Callable[[Recipe], list[Path]]
    writes: Callable[[Recipe], list[Path]]
    rewrites: bool = True


# Settings that change a stage's speed, reports or servers, but not its result, and those that its `settings` name.
IRRELEVANT = {
    "target": {"device"},
    "data": {
        **dict.fromkeys(("capture", "contamination", "states", "ranking", "reprompt", "sam", "self_prompts"), True),
        "generator": {"batch_size", "concurrency", "timeout_seconds", "base_urls", "api_key_env", "drafter"},
    },
    "train": {"trackers", "log_every_steps", "save_every_steps", "keep_checkpoints"},
}


def _trains(recipe: Recipe) -> bool:
    """Whether the recipe measures the drafter that it trains, or sets something of `drafter` or `train`."""
    needed = recipe.eval.drafter is None and recipe.measures_drafter
    return needed or bool(recipe.drafter.changed_keys or recipe.train.changed_keys)


def _trains_classifier(recipe: Recipe) -> bool:
    """Whether a tree uses the classifier that the recipe trains."""
    trees = [contender.tree for contender in recipe.eval.contenders]
    return recipe.classifier_dir in [Path(t.c2t.classifier) for t in trees if t.policy == "c2t" and t.c2t.classifier]


def _of_answers(*others: str) -> Callable[[Recipe], list[str]]:
    """Settings of a stage that depends on the target's answers."""
    return lambda recipe: [
        *("target", "data", *others),
        *(["eval.prompts"] if recipe.data.contamination == "remove" else []),
        *(["eval.tree"] if "train" in others and recipe.train.eval_replay else []),
    ]


def local_sources(sources: str | list[str] | None) -> list[Path]:
    """The files of prompt sources, if they are local."""
    from draftsmith.recipes.prompts.benchmark_prompts import benchmark_of
    from draftsmith.recipes.prompts.sources import file_sources
    from draftsmith.recipes.sections.base import as_list

    parts = [part for name in as_list(sources) for part in file_sources(name)]
    return [Path((benchmark_of(part) or (None, None))[1] or part) for part in parts]


def files_of_model(place: str | None) -> list[Path]:
    """A model's file, or its files in a local folder, in order; of the Hub's, none."""
    path = Path(place or "none")
    kinds = ("json", "jinja", "safetensors", "gguf")
    return [path] if path.is_file() else sorted(file for kind in kinds for file in path.glob(f"*.{kind}"))


def files_of_target(recipe: Recipe) -> list[Path]:
    """What every stage reads."""
    target = recipe.target
    return [*files_of_model(target.model), *files_of_model(target.adapter), Path(target.chat_template or "")]


def _start(recipe: Recipe) -> list[Path]:
    return [Path(recipe.drafter.init_from) / "model.safetensors"] if recipe.drafter.init_from else []


def _read_by_evaluate(recipe: Recipe) -> list[Path]:
    section, contenders = recipe.eval, recipe.eval.contenders
    drafters = [recipe.eval_drafter_dir] if recipe.measures_drafter else []
    drafters += [Path(each.drafter) for each in section.also if each.drafter]
    drafters += [Path(each.tree.c2t.classifier) for each in contenders if each.tree.c2t.classifier]
    return [
        *recipe.static_sams,
        *(folder / "model.safetensors" for folder in drafters),
        *(file for each in contenders if each.draft_model for file in files_of_model(each.draft_model.model)),
        *([recipe.token_counts_path] if any(each.tree.vocab_size for each in contenders) else []),
        *local_sources(section.prompts),
        *([Path(section.answers or recipe.eval_out / "generations.jsonl")] if section.mode == "replay" else []),
        *(Path(each.acceptance.neighbours) for each in contenders if each.acceptance),
        Path(section.planner.answers or ""),
    ]


def _exported(recipe: Recipe) -> list[Path]:
    weights = ["drafter.gguf"] if recipe.export.to == "llama.cpp" else ["config.json", "model.safetensors"]
    return [recipe.export_dir(recipe.export.to or "") / name for name in (*weights, "README.md")]


def _both(folder: Path) -> list[Path]:
    """The files of a drafter or classifier."""
    return [folder / "model.safetensors", folder / "config.json"]


# In the order in which a run calls them.
STAGES = {
    "reprompt": Stage(
        "data_gen/reprompt.py",
        "make prompts for long answers about pictures",
        makes="data.prompts",
        wanted_if=lambda recipe: recipe.reprompts,
        settings=lambda recipe: ["data.reprompt"],
        reads=lambda recipe: local_sources(recipe.data.reprompt.sources),
        writes=lambda recipe: [recipe.picture_prompts_path],
    ),
    "self-prompt": Stage(
        "data_gen/self_prompt.py",
        "let the target write the prompts",
        makes="data.prompts",
        wanted_if=lambda recipe: recipe.prompts_itself,
        settings=lambda recipe: ["target", "data.self_prompts"],
        reads=lambda recipe: [],
        writes=lambda recipe: [recipe.self_prompts_path],
    ),
    "regenerate": Stage(
        "data_gen/regenerate.py",
        "let the target write its own training answers",
        makes="data.conversations",
        wanted_if=lambda recipe: recipe.data.prompts is not None,
        settings=_of_answers(),
        reads=lambda recipe: [*local_sources(recipe.data.prompts), *local_sources(recipe.eval.prompts)],
        writes=lambda recipe: [recipe.conversations_path],
        rewrites=False,
    ),
    "rank-vocab": Stage(
        "data_gen/rank_vocab.py",
        "choose the draft vocabulary",
        makes="draft vocabulary",
        wanted_if=_trains,
        settings=_of_answers("drafter", "data.ranking"),
        reads=lambda recipe: [
            *(recipe.conversations_path, *_start(recipe)),
            *(Path(each.source) for each in recipe.data.ranking.sources),
        ],
        writes=lambda recipe: [recipe.draft_vocab_path, recipe.own_counts_path],
        rewrites=False,
    ),
    "capture": Stage(
        "data_gen/capture.py",
        "write the target's hidden states to disk, to train without the target",
        makes="data.states",
        wanted_if=lambda recipe: recipe.data.states is not None,
        settings=_of_answers("drafter"),
        reads=lambda recipe: [recipe.conversations_path],
        writes=lambda recipe: [recipe.states_dir / "manifest.json"],
        rewrites=False,
    ),
    "train": Stage(
        "train/{kind}.py",
        "train the drafter",
        makes="drafter",
        wanted_if=_trains,
        settings=_of_answers("drafter", "train"),
        reads=lambda recipe: [
            *(recipe.conversations_path, recipe.draft_vocab_path, *_start(recipe)),
            *([recipe.states_dir / "manifest.json"] if recipe.data.states is not None else []),
        ],
        writes=lambda recipe: _both(recipe.drafter_dir),
    ),
    "label-trees": Stage(
        "data_gen/label_trees.py",
        "label draft trees for a C2T classifier",
        makes="labelled trees",
        wanted_if=_trains_classifier,
        settings=_of_answers("eval", "labels"),
        reads=lambda recipe: [
            recipe.eval_drafter_dir / "model.safetensors",
            Path(recipe.labels.answers or recipe.conversations_path),
        ],
        writes=lambda recipe: [recipe.labelled_trees_path],
    ),
    "train-c2t": Stage(
        "train/c2t.py",
        "train a C2T classifier on them",
        makes="classifier",
        wanted_if=_trains_classifier,
        settings=lambda recipe: ["classifier"],
        reads=lambda recipe: [recipe.classifier_rows_path],
        writes=lambda recipe: _both(recipe.classifier_dir),
    ),
    "build-sam": Stage(
        "data_gen/build_sam.py",
        "sort a corpus for SAM-Decoding",
        makes="sorted corpus",
        wanted_if=lambda recipe: recipe.sam_path in recipe.static_sams,
        settings=lambda recipe: ["target", "data.sam"],
        reads=lambda recipe: [
            *([recipe.conversations_path] if "answers" in recipe.data.sam.names else []),
            *map(Path, recipe.data.sam.names),
        ],
        writes=lambda recipe: [recipe.sam_path],
    ),
    "evaluate": Stage(
        "eval/acceptance.py",
        "measure how many drafted tokens the target accepts",
        makes="evaluation",
        wanted_if=lambda recipe: recipe.eval.prompts is not None or recipe.eval.mode == "replay",
        settings=lambda recipe: ["target", "eval"],
        reads=_read_by_evaluate,
        writes=lambda recipe: [recipe.eval_out / ("replay" * (recipe.eval.mode == "replay")) / "acceptance.json"],
    ),
    "export": Stage(
        "models/export.py",
        "write the drafter for vLLM, SGLang and other engines",
        makes="export",
        wanted_if=lambda recipe: recipe.export.to is not None,
        settings=lambda recipe: ["export"],
        reads=lambda recipe: [*_both(recipe.drafter_dir), recipe.eval_out / "acceptance.json"],
        writes=_exported,
    ),
}

SCRIPTS: dict[str, Script] = {
    "init": Script("models/init_recipe.py", "write a commented recipe for a target"),
    "run": Script("recipes/command/pipeline.py", "run all stages of a recipe that are not done yet"),
    **STAGES,
    "report": Script("eval/report.py", "build report.html again from an evaluation's files"),
    "plan-tree": Script("eval/plan_tree.py", "find the draft tree that is fastest on this machine"),
    "conversations": Script("data_gen/conversations.py", "show what training reads, supervised tokens marked"),
    "contamination": Script("data_gen/contamination.py", "list training prompts that the evaluation asks, too"),
    "import-drafter": Script("models/import_drafter.py", "read a drafter of another project"),
    "completion": Script("recipes/command/completion.py", "print shell completion for bash, zsh, fish or tcsh"),
}


def stages_of(recipe: Recipe) -> list[str]:
    """The stages from prompts to a measured and exported drafter, in order, as the recipe needs them."""
    return [name for name, stage in STAGES.items() if stage.wanted_if(recipe)]


def made_by(command: str, recipe: Recipe) -> Input:
    """The first file of a stage."""
    stage = STAGES[command]
    return stage.makes, stage.writes(recipe)[0], command


def is_there(path: Path) -> bool:
    """Whether the file exists, also in a folder that a kill left half renamed."""
    return (current_folder(path.parent) / path.name).exists()


def require_files(*inputs: Input) -> None:
    """Raises UserError with all inputs that are missing."""
    missing = [
        f"{what}: {path} does not exist; run `draftsmith {command}` first"
        for what, path, command in inputs
        if not is_there(path)
    ]
    if missing:
        raise UserError(missing)


def print_next(command: Command, done: str) -> None:
    """Prints the command after `done`, unless `done` was only planned."""
    stages = stages_of(command.recipe)
    after = stages[stages.index(done) + 1 :] if done in stages else []
    if after and not command.plan and INSIDE_RUN not in os.environ:
        print(f"next: draftsmith {after[0]} {shlex.join([command.recipe_path, *command.overrides])}")
