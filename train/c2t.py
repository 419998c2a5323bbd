"""Train the C2T classifier on labelled draft trees, or calibrate one for another drafter or target.

    python train/c2t.py recipes/demo.yaml
    python train/c2t.py recipes/demo.yaml classifier.epochs=2 classifier.out=runs/try/c2t         # the smallest run
    python train/c2t.py recipes/demo.yaml classifier.init_from=runs/other/c2t                     # calibration
    python train/c2t.py recipes/demo.yaml --plan                                                  # what it would do

Reads what data_gen/label_trees.py wrote. Writes <classifier.out> at the end, in one piece: config.json and
model.safetensors (`models.c2t`), recipe.yaml, provenance.json and metrics.jsonl (one line per epoch). To use it:
eval.tree.policy=c2t eval.tree.c2t.classifier=<classifier.out>. The last table that it prints has the nodes that each
beta lets pass.

As published (arXiv 2502.13652, section 4.1): binary cross-entropy, Adam, 1e-3, batches of 1,024 rows, 10 epochs, 95 %
of the data for training; calibration with 1e-4 on a tenth of the data. Our choices where the paper is silent:
- validation holds out whole trees, because siblings share their entropy;
- training reads 10 rejected rows for each accepted one, resampled every epoch; validation counts
  all rows;
- the epoch with the highest recall on validation trees is kept; ties go to the lowest positive rate, then to the
  earliest epoch. Both rates count C >= 0.5 as positive: a node that is more likely accepted than not, under the
  distribution of the sub-sampled rows. Recall alone favours an epoch that passes everything: watch the positive rate.

The paper's ten epochs ran over 9 million rows. With a million, as in the demo, a hundred epochs make about as many
steps. classifier.seed decides all random numbers.
"""

from draftsmith.recipes.command.cli import parse_command, run
from draftsmith.recipes.command.stages import print_next


def main() -> None:
    command = parse_command(__doc__)
    from draftsmith.train.run import classifier as classifier_training

    classifier_training.main(command)
    print_next(command, "train-c2t")


if __name__ == "__main__":
    run(main)
