"""Write the target's hidden states of a recipe's conversations to disk, to train from them without the target.

    python data_gen/capture.py recipes/demo.yaml
    python data_gen/capture.py recipes/demo.yaml data.capture.dtype=int8 data.states=runs/demo/int8   # half the size
    python data_gen/capture.py recipes/demo.yaml --plan                     # what it would write, and how much
    python data_gen/capture.py recipes/demo.yaml --verify                 # reads all again, writes anew what is damaged
    torchrun --nproc_per_node 8 data_gen/capture.py recipes/demo.yaml     # the same store, by eight GPUs
    accelerate launch train/eagle3.py recipes/demo.yaml data.states=runs/demo/states

Which states: those that the recipe's drafter reads (drafter.kind, drafter.capture_layers) of every token, and the last
one where it teaches. Rows of training and of validation are captured alike; which are which may change afterwards.

Writes <data.states>, by default <output_dir>/states (`data_gen.states.store`). Its size is told first, and compared
with what is free. Stopped at any moment and started again, it makes the shards that are missing. For other rows,
another target, other layers or another dtype name another folder.

By several processes (`data_gen.states.capture_processes`) each makes the shards that it takes. What a shard holds hangs
on its rows alone, so that they write what one process writes.
"""

from argparse import ArgumentParser

from draftsmith.recipes.command.cli import Command, parse_command, run
from draftsmith.recipes.command.inputs import conversations, need
from draftsmith.recipes.command.launch import check_all_started, world_size


def main() -> None:
    check_all_started()
    # Several processes read the command line only once they have met, so that one of them reports a mistake.
    command = read_command() if world_size() == 1 else None
    from draftsmith.data_gen.states.capture_processes import Team
    from draftsmith.data_gen.states.capturing import capture_with

    capture_with(Team.of_environment(), read_command if command is None else lambda: command)


def read_command() -> Command:
    command = parse_command(__doc__, extra=_options)
    need(conversations(command.recipe))
    return command


def _options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--verify", action="store_true", help="read what is written again, compare its sha256, write anew what differs"
    )


if __name__ == "__main__":
    run(main, many_processes=True)
