"""Prints training rows with their supervised tokens marked, behind data_gen/conversations.py."""

import sys
from collections import Counter

from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.training_rows.rows import TrainingRow, training_rows
from draftsmith.models.context_limits import longest_row
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.turn_ends import turn_ends
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.inputs import made_by
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.prompts.rejects import Rejects


def main(command: Command) -> None:
    recipe, path = command.recipe, command.recipe.conversations_path
    if command.plan:
        PlanLines().reads(made_by("regenerate", recipe))
        print(f"prints {command.show} rows and a summary, writes nothing")
        return
    files = TargetFiles(recipe.target)
    tokenizer = files.tokenizer
    rejects, remarks, stops = Rejects(), Counter[str](), turn_ends(tokenizer).stops
    ids, rows, answers, tokens, supervised = set(), 0, 0, 0, 0
    for row in Bar(training_rows(path, tokenizer, longest_row(recipe, files), rejects), unit="row", leave=False):
        if rows < command.show:
            Bar.write(f"--- {row.id}: {len(row.input_ids)} tokens, spans {row.spans}\n{marked(tokenizer, row)}\n")
        rows += 1
        ids.add(row.id)
        tokens += len(row.input_ids)
        supervised += sum(end - start for start, end in row.spans)
        answers += len(row.spans)
        remarks.update(row.remarks)
        remarks["no stop token ends them"] += sum(row.input_ids[end - 1] not in stops for _, end in row.spans)
    for remark, count in remarks.items():
        if count:
            print(f"note: {count:,} of {answers:,} answers: {remark}")
    print(
        f"{path}: {rows:,} rows of {len(ids):,} conversations, {tokens:,} tokens, "
        f"{supervised:,} supervised ({supervised / tokens:.1%}); {rejects.summary()}"
    )


def marked(tokenizer: PreTrainedTokenizerBase, row: TrainingRow, colour: bool | None = None) -> str:
    """The row's text, supervised tokens green on a terminal, in [[double brackets]] elsewhere."""
    before, after = ("\x1b[32m", "\x1b[0m") if (sys.stdout.isatty() if colour is None else colour) else ("[[", "]]")
    text, at = "", 0
    for start, end in row.spans:
        other, answer = tokenizer.decode(row.input_ids[at:start]), tokenizer.decode(row.input_ids[start:end])
        text, at = f"{text}{other}{before}{answer}{after}", end
    return f"{text}{tokenizer.decode(row.input_ids[at:])}"
