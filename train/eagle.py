"""Train an EAGLE-1/2 or HASS drafter: it regresses features, and the target's own head turns them into tokens.

    accelerate launch train/eagle.py recipes/demo-eagle.yaml
    accelerate launch train/eagle.py recipes/demo-eagle.yaml output_dir=runs/demo-hass train.ttt_steps=4 \\
        train.top_k_loss=1                                                              # HASS: several steps
    python train/eagle.py recipes/demo-eagle.yaml --plan                            # what it would do

One step (train.ttt_steps=1) trains the drafter that EAGLE-1 and EAGLE-2 share: smooth L1 on the feature and a tenth of
the cross-entropy. More steps train HASS: the drafter reads its own features without gradient, and top_k_loss adds
the cross-entropy over the target's ten likeliest tokens.
"""

from draftsmith.recipes.command.cli import run
from draftsmith.train.run.training_command import train_kind


def main() -> None:
    train_kind(__doc__, "eagle")


if __name__ == "__main__":
    run(main, many_processes=True)
