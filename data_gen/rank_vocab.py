"""Count tokens and choose the draft vocabulary: stop and template tokens, then the most frequent ones.

    python data_gen/rank_vocab.py recipes/demo.yaml
    python data_gen/rank_vocab.py recipes/demo.yaml drafter.vocab_size=512
    python data_gen/rank_vocab.py recipes/demo.yaml --plan                    # what it would do
    python data_gen/rank_vocab.py recipes/demo.yaml output_dir=runs/ranking drafter.vocab_size=null \\
        data.conversations=runs/demo/conversations.jsonl \\
        data.ranking.sources='[{source: README.md}, {source: "docs/*.md", weight: 2}]'

Counts the tokens that training supervises, or the corpora of data.ranking.sources (docs/prompts-and-answers.md). Writes
into <output_dir>: draft_vocab.safetensors (EAGLE-3's d2t and t2d) and token_counts.safetensors, by which
eval.tree.vocab_size cuts any drafter's vocabulary further while decoding (FR-Spec). With drafter.init_from, the draft
vocabulary is that drafter's, and the counts only show how much of the text it covers. If checkpoints exist, another
mapping is refused.
"""

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.stages import made_by, print_next, require_files


def main() -> None:
    command = parse_command(__doc__)
    if not (command.plan or command.recipe.data.ranking.sources):
        require_files(made_by("regenerate", command.recipe))
    from draftsmith.data_gen.vocabulary import ranking

    ranking.main(command)
    print_next(command, "rank-vocab")


if __name__ == "__main__":
    run(main)
