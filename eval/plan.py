"""Find the fastest draft tree on this machine from measured costs and the acceptance along recorded answers.

    python eval/plan.py recipes/demo.yaml                          # predict, and print the recipe line of the fastest
    python eval/plan.py recipes/demo.yaml --measure 5              # then decode with the best five, as a check
    python eval/plan.py recipes/demo.yaml --calibrate svip         # the threshold of a policy that stops early
    python eval/plan.py recipes/demo.yaml --precisions             # float32, bfloat16, int8, int4: costs of verifying n
    python eval/plan.py recipes/demo.yaml --plan                   # what it would do

Every candidate (`eval.planner.candidates`, or chains, EAGLE-2, DDD and SVIP in several sizes) is replayed along
recorded answers, and the costs of its rounds are measured. Together they predict its speed-up (`eval.planner`). If no
candidate beats plain decoding, the plan recommends plain decoding.

`--calibrate` sweeps the threshold of one policy and takes the fastest: h of svip (at fixed c) and svip_tree, threshold
of ddd. SVIP's authors chose h by the measured speed on eight prompts; for trees, neither SVIP nor DDD gives a method.
Choosing by predicted speed on held-out answers is our own rule.

`--precisions` times one forward pass of the target over n nodes in each precision (`eval.planner.precisions`). It needs
neither drafter nor answers, and writes precisions.json and precisions.png.

Writes <eval.out>/plan.json (with --calibrate: calibration.json). An evaluation with `eval.tree: {policy: auto}` begins
with such a plan.
"""

from argparse import ArgumentParser

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.errors import UserError


def main() -> None:
    command = parse_command(__doc__, extra=_options)
    if command.measure < 0:
        raise UserError(f"--measure {command.measure}: give a number of candidates to decode with, or 0 for none")
    if command.precisions:
        if command.measure or command.calibrate:
            raise UserError("--precisions measures the target alone; run it apart from --measure and --calibrate")
        from draftsmith.eval.planner import precisions

        return precisions.main(command.recipe, command.plan)
    from draftsmith.eval.planner import command as planning

    planning.main(command)


def _options(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--measure", type=int, default=0, metavar="K", help="also decode eval.prompts with the best K candidates"
    )
    parser.add_argument(
        "--precisions", action="store_true", help="measure the target's cost by precision and nodes instead"
    )
    parser.add_argument(
        "--calibrate", choices=("svip", "svip_tree", "ddd"), help="sweep the threshold of this policy instead"
    )


if __name__ == "__main__":
    run(main)
