"""Label draft trees for C2T: of every node of uncut EAGLE-2 trees, would the target accept it?

    python data_gen/label_trees.py recipes/demo.yaml
    python data_gen/label_trees.py recipes/demo.yaml labels.max_rows=100000 labels.out=runs/try/trees   # smallest run
    python data_gen/label_trees.py recipes/demo.yaml --contender "eagle3, tree of 16"     # of one under eval.also
    python data_gen/label_trees.py recipes/demo.yaml --plan                       # what it would do

Replays recorded answers (`eval.recorded.replay`): the target reads each once, and a tree is drafted at every root that
decoding with these trees would come to. Nothing is cut: all nodes that the beam search ever proposed are rows, 10 + 10
* 100 of a tree with labels.top_k 10 and 11 calls (arXiv 2502.13652, section 4.1). A row is P, H and d as decoding
computes them (`models.c2t.node_features`), and whether the node lies on the path that the target accepts.

Left out, and counted:
- rows with a NaN among the features (as in the paper);
- rows below the last token of an answer: what the target would have said there is not recorded.

Answers are labels.answers; by default the conversations that training keeps for validation, because a drafter is surer
of those that it has learnt. They are taken in an order drawn by their ids, so that labels.max_rows is a fair sample.
Writes <labels.out> (`data_gen.trees.labelled_trees`). Stopped at any moment and started again, it goes on behind the
last whole shard; with a greater max_rows it goes on, too. Other settings, another drafter or target are refused there.
"""

from argparse import ArgumentParser

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.stages import print_next


def main() -> None:
    command = parse_command(__doc__, extra=_options)
    from draftsmith.data_gen.trees import labelling

    labelling.main(command)
    print_next(command, "label-trees")


def _options(parser: ArgumentParser) -> None:
    parser.add_argument("--contender", metavar="NAME", help="who drafts: one under eval.also; default: eval.drafter")


if __name__ == "__main__":
    run(main)
