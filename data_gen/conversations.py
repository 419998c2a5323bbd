"""Show conversations as the rows that training reads, and which of their tokens are supervised.

    python data_gen/conversations.py recipes/demo.yaml --show 3        # supervised tokens marked
    python data_gen/conversations.py recipes/demo.yaml --show 0        # the summary alone

Reads data.conversations (default: <output_dir>/conversations.jsonl) and writes nothing.
"""

from argparse import ArgumentParser

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.inputs import conversations, need


def main() -> None:
    command = parse_command(__doc__, extra=_options, writes=False)
    if not command.plan:
        need(conversations(command.recipe))
    from draftsmith.data_gen.training_rows import shown as shown_rows

    shown_rows.main(command)


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--show", type=int, default=3, metavar="N", help="print N rows, supervised tokens marked")


if __name__ == "__main__":
    run(main)
