"""Count tokens and choose the draft vocabulary: stop and template tokens, then the most frequent ones.

    python data_gen/rank_vocab.py recipes/demo.yaml
    python data_gen/rank_vocab.py recipes/demo.yaml drafter.vocab_size=512
    python data_gen/rank_vocab.py recipes/demo.yaml --plan                    # what it would do
    python data_gen/rank_vocab.py recipes/demo.yaml output_dir=runs/ranking drafter.vocab_size=null \\
        data.conversations=runs/demo/conversations.jsonl \\
        data.ranking.sources='[{source: README.md}, {source: "docs/*.md", weight: 2}]'

Counts the tokens that training supervises, with the same rows left out (conversations.training_rejects.jsonl lists
them). Writes two files into <output_dir>: draft_vocab.safetensors (EAGLE-3's d2t and t2d) and token_counts.safetensors.
By these counts, eval.tree.vocab_size cuts any drafter's vocabulary further while decoding (FR-Spec). A mapping never
changes under a trained drafter: if checkpoints exist, another mapping is refused. The counts are always rewritten. The
vocabulary always holds the stop tokens and the template's tokens in answers (marks of thoughts and calls), seen or not.

data.ranking.sources counts other corpora, or a weighted blend of several: text files by path or pattern, datasets as
hf:org/name:split, and `answers`, the supervised tokens. The vocabulary then holds all control tokens of the chat
template, even those of other turns. <output_dir>/ranking keeps each corpus's counts and rejected records. A killed run
resumes from them, and another blend of the same corpora reuses them. ranking_coverage.json holds the share of each
corpus, and of the target's own answers if they exist, that a vocabulary of each size covers.
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
