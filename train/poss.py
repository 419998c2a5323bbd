"""Train position specialists (PosS): a separate layer for every few draft positions.

    accelerate launch train/poss.py recipes/demo-poss.yaml
    accelerate launch train/poss.py recipes/demo-poss.yaml output_dir=runs/poss3 drafter.positions_per_specialist=3 \\
        drafter.specialists=2                                                           # PosS-3
    accelerate launch train/poss.py recipes/demo-poss.yaml output_dir=runs/poss-eagle3 drafter.base=eagle3 \\
        drafter.vocab_size=768                                                          # over EAGLE-3's features
    accelerate launch train/poss.py recipes/demo-poss.yaml output_dir=runs/poss-from \\
        drafter.init_from=runs/demo-eagle/drafter                                       # all from one trained layer
    python train/poss.py recipes/demo-poss.yaml --plan                              # what it would do

Specialists extend EAGLE-1's drafter, trained like HASS (the published form), or EAGLE-3's.
"""

from draftsmith.recipes.command.cli import run
from draftsmith.train.run.training_command import train_kind


def main() -> None:
    train_kind(__doc__, "poss")


if __name__ == "__main__":
    run(main, many_processes=True)
