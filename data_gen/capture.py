"""Write the target's hidden states for a recipe's conversations to disk, to train from them without the target.

    python data_gen/capture.py recipes/demo.yaml
    python data_gen/capture.py recipes/demo.yaml data.capture.dtype=int8 data.states=runs/demo/int8   # half the size
    python data_gen/capture.py recipes/demo.yaml --plan                     # what it would write, and how much
    python data_gen/capture.py recipes/demo.yaml --verify                 # reads all files and rewrites damaged ones
    torchrun --nproc_per_node 8 data_gen/capture.py recipes/demo.yaml     # the same store, by eight GPUs
    accelerate launch train/eagle3.py recipes/demo.yaml data.states=runs/demo/states

Writes the states that the recipe's drafter reads to <data.states>, by default <output_dir>/states. Those that
data_gen/regenerate.py has stored with the answers are not computed again. Training and
validation rows are both captured, so their split may change later. When a stopped run is started again, it writes the
missing shards. Other rows, another target, other layers or another dtype need another folder (docs/training.md).
"""

from argparse import ArgumentParser

from draftsmith.recipes.command.cli import Command, parse_command, run
from draftsmith.recipes.command.inputs import made_by, require_files
from draftsmith.recipes.command.launch import check_all_started, world_size


def main() -> None:
    check_all_started()
    # Several processes connect before they read the command line, so a mistake is reported once.
    command = read_command() if world_size() == 1 else None
    from draftsmith.data_gen.states.capture_processes import Team
    from draftsmith.data_gen.states.capturing import capture_with

    capture_with(Team.of_environment(), read_command if command is None else lambda: command)


def read_command() -> Command:
    command = parse_command(__doc__, extra=_options)
    if not command.plan or command.recipe.data.prompts is None:  # else regeneration may write them later
        require_files(made_by("regenerate", command.recipe))
    return command


def _options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--verify", action="store_true", help="check the sha256 of every written file and rewrite damaged ones"
    )


if __name__ == "__main__":
    run(main, many_processes=True)
