"""Label draft trees for C2T: would the target accept each node of an uncut EAGLE-2 tree?

    python data_gen/label_trees.py recipes/demo.yaml
    python data_gen/label_trees.py recipes/demo.yaml labels.max_rows=100000 labels.out=runs/try.safetensors  # smallest
    python data_gen/label_trees.py recipes/demo.yaml --plan                       # what it would do

Replays recorded answers: the target reads each once, and a tree is drafted at every root that decoding with these trees
would reach. Each node that the beam search proposes becomes a row: 10 + 10 * 100 for a tree with labels.top_k 10 and 11
calls (arXiv 2502.13652, section 4.1). A row holds P, H and d (`models.c2t.node_features`), and whether the node lies on
the path that the target accepts. Rows with a NaN among the features are left out (as in the paper), as are rows below
the last token of an answer, whose next tokens are not recorded. Both are counted.

Answers are shuffled by a hash of their ids, so labels.max_rows takes a fair sample. Writes <labels.out> at the end; a
stopped run starts over.
"""

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.stages import print_next


def main() -> None:
    said = "who drafts the trees: a name under eval.also; default: eval.drafter"
    command = parse_command(__doc__, extra=lambda parser: parser.add_argument("--contender", metavar="NAME", help=said))
    from draftsmith.data_gen.c2t_labels import labelling

    labelling.main(command)
    print_next(command, "label-trees")


if __name__ == "__main__":
    run(main)
