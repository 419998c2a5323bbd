"""Choose how draft trees grow on this machine: measured costs, acceptance from recorded answers, predicted speed-ups.

    python eval/plan.py recipes/demo.yaml                          # predict, and print the recipe line of the fastest
    python eval/plan.py recipes/demo.yaml --measure 5              # then decode the best five: is the prediction true?
    python eval/plan.py recipes/demo.yaml --calibrate svip         # the threshold of a policy that stops early
    python eval/plan.py recipes/demo.yaml --plan                   # what it would do

Every candidate (`eval.planner.candidates`, or chains, EAGLE-2, DDD and SVIP in several sizes) is replayed along
recorded answers, the costs of its rounds are measured, and both give its speed-up (`eval.planner`). Plain decoding is a
candidate, too: where nothing beats it, that is what is recommended.

`--calibrate` sweeps the threshold of one policy and takes the fastest: h of svip (at fixed c) and svip_tree, threshold
of ddd. SVIP's authors chose h on eight prompts by the speed that was measured; for trees neither SVIP nor DDD says how
to. That it is the predicted speed on held-out answers that decides, for all three, is our own rule.

Writes <eval.out>/plan.json (with --calibrate: calibration.json). A recipe with `eval.tree: {policy: auto}` goes through
all this before it is evaluated.
"""

from argparse import ArgumentParser

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.errors import UserError


def main() -> None:
    command = parse_command(__doc__, extra=_options)
    if command.measure < 0:
        raise UserError(f"--measure {command.measure}: a number of candidates to decode by, or 0 for none")
    from draftsmith.eval.planner import command as planning

    planning.main(command)


def _options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--measure", type=int, default=0, metavar="K", help="decode eval.prompts by the best K candidates, too"
    )
    parser.add_argument(
        "--calibrate", choices=("svip", "svip_tree", "ddd"), help="sweep the threshold of this policy instead"
    )


if __name__ == "__main__":
    run(main)
