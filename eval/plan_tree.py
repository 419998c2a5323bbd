"""Find the fastest draft tree on this machine from measured costs and the acceptance along recorded answers.

    python eval/plan_tree.py recipes/demo.yaml                    # predict, and print the recipe line of the fastest
    python eval/plan_tree.py recipes/demo.yaml --measure 5        # then decode with the best five, as a check
    python eval/plan_tree.py recipes/demo.yaml --plan             # what it would do

Every candidate (`eval.planner.candidates`, or chains, EAGLE-2, DDD and SVIP in several sizes) is replayed along
recorded answers, and the costs of its rounds are measured. Together they predict its speed-up (`eval.planner`). If no
candidate beats plain decoding, the plan recommends plain decoding.

Writes <eval.out>/plan.json. An evaluation with `eval.tree: {policy: auto}` begins with such a plan.
"""

from argparse import ArgumentParser

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.errors import UserError


def main() -> None:
    command = parse_command(__doc__, extra=_options)
    if command.measure < 0:
        raise UserError(f"--measure {command.measure}: give a number of candidates to decode with, or 0 for none")
    from draftsmith.eval.planner import planning

    planning.main(command)


def _options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--measure", type=int, default=0, metavar="K", help="also decode eval.prompts with the best K candidates"
    )


if __name__ == "__main__":
    run(main)
