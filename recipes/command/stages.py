"""The commands of Draftsmith and their order, for `draftsmith --help`, `draftsmith run` and "next:" lines."""

from __future__ import annotations

import os
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # `draftsmith --help` reads this file and should not wait for the schema
    from draftsmith.recipes.command.cli import Command
    from draftsmith.recipes.schema import Recipe

INSIDE_RUN = "DRAFTSMITH_INSIDE_RUN"
"""Environment variable that `draftsmith run` sets for its stages, which then print no "next:" lines."""


class Script(NamedTuple):
    """A command, and the script that does the same."""

    path: str  # from the repository's root; {kind} is the recipe's drafter.kind
    help: str

    @property
    def module(self) -> str:
        """The module with the command's `main`."""
        path = self.path.replace("{kind}", "run/command")
        return "draftsmith." + path.removesuffix(".py").replace("/", ".")


SCRIPTS = {
    "init": Script("models/starter.py", "write a commented recipe for a target"),
    "run": Script("recipes/command/pipeline.py", "run all stages of a recipe that are not done yet"),
    "regenerate": Script("data_gen/regenerate.py", "let the target write its own training answers"),
    "rank-vocab": Script("data_gen/rank_vocab.py", "choose the draft vocabulary"),
    "train": Script("train/{kind}.py", "train the drafter"),
    "evaluate": Script("eval/acceptance.py", "measure how many drafted tokens the target accepts"),
    "report": Script("eval/report.py", "build report.html again from an evaluation's files"),
    "plan": Script("eval/plan.py", "find the draft tree that is fastest on this machine"),
    "build-sam": Script("data_gen/build_sam.py", "sort a corpus for SAM-Decoding"),
    "reprompt": Script("data_gen/reprompt.py", "make prompts for long answers about pictures"),
    "conversations": Script("data_gen/conversations.py", "show what training reads, supervised tokens marked"),
    "contamination": Script("data_gen/contamination.py", "list training prompts that the evaluation asks, too"),
    "capture": Script("data_gen/capture.py", "write the target's hidden states to disk, to train without the target"),
    "label-trees": Script("data_gen/label_trees.py", "label draft trees for a C2T classifier"),
    "train-c2t": Script("train/c2t.py", "train a C2T classifier on them"),
    "export": Script("models/export.py", "write the drafter for vLLM, SGLang and other engines"),
    "import-drafter": Script("models/import_drafter.py", "read a drafter of another project"),
    "completion": Script("recipes/command/completion.py", "print shell completion for bash, zsh, fish or tcsh"),
}


def stages_of(recipe: Recipe) -> list[str]:
    """The commands from prompts to a measured and exported drafter, in order, as the recipe needs them.

    A recipe that measures no drafter or one from elsewhere, and sets nothing of `drafter` and `train`, trains none.
    """
    needed = recipe.eval.drafter is None and recipe.measures_drafter
    trains = needed or bool(recipe.drafter.meant or recipe.train.meant)
    trees = [recipe.eval.tree, *(contender.tree for contender in recipe.eval.also)]
    classifiers = {Path(tree.c2t.classifier) for tree in trees if tree.policy == "c2t" and tree.c2t.classifier}
    c2t = ["label-trees", "train-c2t"] if recipe.classifier_dir in classifiers else []
    return [
        *(["reprompt"] if recipe.reprompts else []),
        *(["regenerate"] if recipe.data.prompts is not None else []),
        *(["rank-vocab"] if trains else []),
        *(["capture"] if recipe.data.states is not None else []),
        *(["train"] if trains else []),
        *c2t,
        *(["build-sam"] if recipe.sam_path in recipe.static_sams else []),
        *(["evaluate"] if recipe.eval.prompts is not None or recipe.eval.mode == "replay" else []),
        *(["export"] if recipe.export.to is not None else []),
    ]


def print_next(command: Command, done: str) -> None:
    """Prints the command after `done`, unless `done` was only planned."""
    stages = stages_of(command.recipe)
    behind = stages[stages.index(done) + 1 :] if done in stages else []
    if behind and not command.plan and INSIDE_RUN not in os.environ:
        path = SCRIPTS[behind[0]].path.format(kind=command.recipe.drafter.kind)
        by_script = not sys.argv[0].startswith("draftsmith") and Path(path).exists()
        script = f"python {path}" if by_script else f"draftsmith {behind[0]}"
        print(f"next: {script} {shlex.join([command.recipe_path, *command.overrides])}")
