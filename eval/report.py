"""Build report.html, and print the table, from the files of an evaluation: nothing is decoded again.

    python eval/report.py recipes/demo.yaml
    python eval/report.py recipes/demo.yaml eval.report_answers=40 eval.png=true     # more answers, plots as PNG files
    python eval/report.py recipes/demo.yaml --plan                                   # what it would read and write

Reads <eval.out>/acceptance.json and generations.jsonl, and the metrics.jsonl beside the drafter where there is one;
eval/acceptance.py writes the former two and ends with this. What the numbers mean is `eval.measured.metrics`.
"""

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.inputs import need


def main() -> None:
    command = parse_command(__doc__)
    need(("eval.out", command.recipe.eval_out / "acceptance.json", "eval/acceptance.py"))
    from draftsmith.eval.page import files as report_files

    report_files.main(command)


if __name__ == "__main__":
    run(main)
