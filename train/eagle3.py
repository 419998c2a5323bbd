"""Train an EAGLE-3 drafter by training-time test, with the target in the same process.

    accelerate launch train/eagle3.py recipes/demo.yaml
    python train/eagle3.py recipes/demo.yaml output_dir=runs/eagle3 drafter.fc_norm=false \\
        drafter.norm_output=false                                       # as first published, without 3.1's norms
    python train/eagle3.py recipes/demo.yaml data.states=runs/demo/states               # from data_gen/capture.py
    python train/eagle3.py recipes/demo.yaml --plan                                 # what it would do
"""

from draftsmith.recipes.command.cli import run
from draftsmith.train.run.training_command import train_kind


def main() -> None:
    train_kind(__doc__, "eagle3")


if __name__ == "__main__":
    run(main, many_processes=True)
