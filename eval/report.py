"""Rebuild report.html and print the table from the files of an evaluation, without decoding.

    python eval/report.py recipes/demo.yaml
    python eval/report.py recipes/demo.yaml --plan                     # what it would read and write

Reads <eval.out>/acceptance.json and generations.jsonl, which eval/acceptance.py writes, and the metrics.jsonl beside
the drafter if there is one. `eval.measurement.metrics` defines the numbers.
"""

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.stages import require_files


def main() -> None:
    command = parse_command(__doc__)
    require_files(("eval.out", command.recipe.eval_out / "acceptance.json", "evaluate"))
    from draftsmith.eval.report_page import result_files

    result_files.main(command)


if __name__ == "__main__":
    run(main)
