"""Count tokens and choose the draft vocabulary: the most frequent ones, stop and template tokens always inside.

    python data_gen/rank_vocab.py recipes/demo.yaml
    python data_gen/rank_vocab.py recipes/demo.yaml drafter.vocab_size=512
    python data_gen/rank_vocab.py recipes/demo.yaml --plan                    # what it would do
    python data_gen/rank_vocab.py recipes/demo.yaml output_dir=runs/ranking drafter.vocab_size=null \\
        data.conversations=runs/demo/conversations.jsonl \\
        data.ranking.sources='[{source: README.md}, {source: "docs/*.md", weight: 2}]'

Counts the tokens that training supervises: it reads the conversations that training reads, with the same rows left out
(they stand in conversations.training_rejects.jsonl). Writes two files into <output_dir>: draft_vocab.safetensors
(EAGLE-3's d2t and t2d) and token_counts.safetensors, by which eval.tree.vocab_size cuts any drafter's vocabulary
further while decoding (FR-Spec). A mapping never changes under a trained drafter: where checkpoints exist, another one
is refused. The counts are only a ranking and are written anew. Always inside are the stop tokens and what the chat
template writes into answers (marks of thoughts and calls), seen or not.

With data.ranking.sources, other corpora are counted, or a weighted blend of several: text files by path or pattern,
datasets as hf:org/name:split, and `answers`, the supervised tokens. All control tokens of the chat template are then
always inside, those of other turns, too. What is counted of a corpus stands in <output_dir>/ranking, with what could
not be used: a killed run goes on from there, and another blend of the same corpora counts nothing anew.
ranking_coverage.json says which share of each corpus, and of the target's own answers where they are there, a
vocabulary of each size covers.
"""

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.inputs import conversations, need
from draftsmith.recipes.command.stages import print_next


def main() -> None:
    command = parse_command(__doc__)
    if not (command.plan or command.recipe.data.ranking.sources):
        need(conversations(command.recipe))
    from draftsmith.data_gen.corpus import ranking

    ranking.main(command)
    print_next(command, "rank-vocab")


if __name__ == "__main__":
    run(main)
