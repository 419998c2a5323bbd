"""Training conversations that ask what the evaluation asks: found, listed, and left out where the recipe says so.

    python data_gen/contamination.py recipes/demo.yaml
    python data_gen/contamination.py my.yaml data.prompts=my.jsonl eval.prompts=mt_bench:question.jsonl
    python data_gen/contamination.py recipes/demo.yaml --plan                 # what it would compare

Compares data.prompts (and data.conversations, where the recipe names it) with eval.prompts and writes
<output_dir>/contamination.jsonl: one line for each training conversation that was found, with both texts' beginnings.
data_gen/regenerate.py does the same before it asks anything. With data.contamination: remove it leaves out what it
finds, and so do data_gen/rank_vocab.py and the training, whose conversations may come from elsewhere.

Only user turns are compared, as words. `data_gen/rows/overlap.py` says when two turns count as the same question.

All of eval.prompts is compared, whatever eval.max_prompts says, up to 10,000 conversations of each source (MOST). A
source that cannot be read now, for example a benchmark that was never fetched and no network, is named and passed over;
with data.contamination: remove it is an error.
"""

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.errors import UserError


def main() -> None:
    command = parse_command(__doc__)
    if command.recipe.eval.prompts is None:
        raise UserError("eval.prompts: not given; there is nothing to compare the training conversations with")
    from draftsmith.data_gen.rows import overlap

    overlap.main(command)


if __name__ == "__main__":
    run(main)
