"""Train the drafter of a recipe, whatever its kind.

    draftsmith train recipes/demo.yaml
    draftsmith train my.yaml --processes 8                # as torchrun --nproc_per_node 8 would start it

Each GPU of this machine gets a process; --processes 1 uses one. The scripts `train/eagle3.py`, `train/eagle.py`,
`train/poss.py` and `train/vispec.py` do the same under any launcher (accelerate launch, torchrun); their --help
explains the variants of each kind of drafter.
"""

import os
import sys
from argparse import ArgumentParser, ArgumentTypeError

from draftsmith.recipes.command.cli import Command, parse_command
from draftsmith.recipes.command.launch import check_all_started, rank, world_size
from draftsmith.recipes.command.stages import made_by, print_next, require_files
from draftsmith.recipes.errors import UserError

# The end of every --help.
FILES = """
Reads <output_dir>/conversations.jsonl (draftsmith regenerate) and <output_dir>/draft_vocab.safetensors (draftsmith
rank-vocab). Writes checkpoints/, metrics.jsonl and, at the end, drafter/. When started again, it resumes from the last
whole checkpoint. SIGTERM saves one and exits with 0; Ctrl-C exits at once with 130; a kill damages nothing. Give the
commands that write these files the same overrides of output_dir and drafter. For a try: output_dir=runs/try
train.max_steps=20 train.warmup_steps=2; --plan prints what a run would take.
"""


def main() -> None:
    """Trains the recipe's drafter in --processes processes, by default one for each GPU."""

    def options(parser: ArgumentParser) -> None:
        _options(parser)
        parser.add_argument(
            "--processes", type=_count, metavar="N", help="processes on this machine; default: one for each GPU, or one"
        )

    command = parse_command(f"{__doc__}{FILES}", extra=options)
    _check_inputs(command)
    if world_size() == 1:
        import torch

        command.processes = command.processes or max(1, torch.accelerator.device_count())
        if command.processes > 1 and not command.plan:
            launch(command, command.processes)
    train_drafter(command)


def launch(command: Command, processes: int) -> None:
    """Replaces this process by PyTorch's launcher."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    words = ["-m", "draftsmith.recipes.command.console", "train", command.recipe_path, *command.overrides]
    words += ["--profile", str(command.profile)] if command.profile else []
    print(f"{processes} processes: torchrun {' '.join([*launcher[2:], *words])}", flush=True)
    os.execv(sys.executable, [sys.executable, *launcher, *words])


def train_kind(doc: str | None, kind: str) -> None:
    """Trains the drafter of the recipe on the command line of a script for this kind, whose docstring is its --help."""
    command = parse_command(f"{doc}{FILES}", extra=_options)
    if (other := command.recipe.drafter.kind) != kind:
        raise UserError(f"drafter.kind: {other}; `draftsmith train` (or train/{other}.py) trains it")
    _check_inputs(command)
    train_drafter(command)


def train_drafter(command: Command) -> None:
    from draftsmith.train.run import trainer

    if trainer.main(command) and rank() == 0:
        print_next(command, "train")


def _check_inputs(command: Command) -> None:
    if not command.plan:
        check_all_started()
        require_files(made_by("regenerate", command.recipe), made_by("rank-vocab", command.recipe))


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--flops", type=float, metavar="TFLOPS", help="for --plan: TFLOP/s that one device reaches")
    parser.add_argument(
        "--profile", type=_count, metavar="N", help="trace N steps after a warm-up, into <output_dir>/profile"
    )


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)
