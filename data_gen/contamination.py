"""Find training conversations that ask what the evaluation asks, and list them.

    python data_gen/contamination.py recipes/demo.yaml
    python data_gen/contamination.py my.yaml data.prompts=my.jsonl eval.prompts=mt_bench:question.jsonl
    python data_gen/contamination.py recipes/demo.yaml --plan                 # what it would compare

Compares data.prompts (and data.conversations, if the recipe names it) with eval.prompts and writes
<output_dir>/contamination.jsonl: one line for each match, with the beginnings of both texts.
`data_gen/training_rows/overlap.py` says when two user turns count as the same question. data_gen/regenerate.py runs
the same check first. With data.contamination: remove, matches are left out there, in data_gen/rank_vocab.py and in
training.

eval.max_prompts does not limit the comparison, which reads up to 10,000 conversations of each source. A source that
cannot be read is named and skipped; with data.contamination: remove, it is an error.
"""

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.errors import UserError


def main() -> None:
    command = parse_command(__doc__)
    if command.recipe.eval.prompts is None:
        raise UserError("eval.prompts: not given; there is nothing to compare the training conversations with")
    from draftsmith.data_gen.training_rows import overlap

    overlap.main(command)


if __name__ == "__main__":
    run(main)
