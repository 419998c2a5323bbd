"""Measure how many drafted tokens the target accepts, and what that gains over plain decoding in the same run.

    python eval/acceptance.py recipes/demo.yaml
    python eval/acceptance.py recipes/demo.yaml eval.max_prompts=4 eval.tree.nodes=20     # a quick look
    python eval/acceptance.py recipes/demo.yaml --plan                                    # what it would do
    python eval/acceptance.py recipes/demo.yaml eval.mode=replay       # along recorded answers (`eval.replay.replay`)
    python eval/acceptance.py recipes/demo.yaml --compare \\
        "eval.tree.nodes=16" "ddd: eval.tree={policy: ddd}" "b: eval.drafter=runs/b/drafter" "c: other.yaml"

Every prompt is decoded plainly and with each contender: the one that the keys of `eval` describe, those under
`eval.also`, and one for each argument of --compare (another recipe for the same target, or overrides of this one). This
recipe's prompts and sampling apply to all. Writes <eval.out>/acceptance.json, generations.jsonl and report.html, and
prints a table; eval/report.py rebuilds the report and the table without decoding. For a tree of `policy: auto`, the
planner (eval/plan_tree.py) first chooses one.
"""

from argparse import ArgumentParser

from draftsmith.recipes.command.cli import check_output, parse_arguments, run
from draftsmith.recipes.command.stages import made_by, require_files
from draftsmith.recipes.loader import load_recipe


def main() -> None:
    command = parse_arguments(__doc__, extra=_compare_option)
    if not command.compare:  # else all recipes are loaded together, to report their problems at once
        recipe = load_recipe(command.recipe_path, command.overrides)
        check_output(recipe)
        if not command.plan and recipe.eval.drafter is None and recipe.measures_drafter:
            require_files(made_by("train", recipe))
    from draftsmith.eval.measurement import evaluation

    evaluation.main(command)


def _compare_option(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--compare",
        metavar="CONTENDER",
        nargs="+",
        action="extend",
        default=[],
        help="further contenders, one per argument: a recipe file, or overrides of the keys that describe one, in "
        "quotes (eval.tree, eval.drafter, eval.proposer, ...), with or without a name: "
        '"wide: eval.tree.nodes=100 eval.tree.top_k=16"',
    )


if __name__ == "__main__":
    run(main)
