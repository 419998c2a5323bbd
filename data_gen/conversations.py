"""Show conversations as the rows that training reads, and which of their tokens are supervised.

    python data_gen/conversations.py recipes/demo.yaml --show 3        # supervised tokens marked
    python data_gen/conversations.py recipes/demo.yaml --show 0        # the summary alone

Reads data.conversations (default: <output_dir>/conversations.jsonl) and writes nothing.
"""

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.stages import made_by, require_files


def main() -> None:
    said = "print N rows, supervised tokens marked"
    command = parse_command(
        __doc__,
        extra=lambda parser: parser.add_argument("--show", type=int, default=3, metavar="N", help=said),
        writes=False,
    )
    if not command.plan:
        require_files(made_by("regenerate", command.recipe))
    from draftsmith.data_gen.training_rows.rows import show

    show(command)


if __name__ == "__main__":
    run(main)
