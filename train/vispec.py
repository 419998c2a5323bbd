"""Train a ViSpec drafter for a vision-language target: it reads a picture as a few compressed tokens and one vector.

    accelerate launch train/eagle.py my.yaml drafter='{kind: eagle}' output_dir=runs/text \\
        data.conversations=runs/text/conversations.jsonl train.rank_loss=0.01         # stage 1: text
    accelerate launch train/vispec.py my.yaml drafter.init_from=runs/text/drafter     # stage 2: pictures
    accelerate launch train/vispec.py my.yaml output_dir=runs/q16 drafter.compressed_tokens=16
    accelerate launch train/vispec.py my.yaml output_dir=runs/v3 drafter='{kind: vispec, base: eagle3}'   # over EAGLE-3
    accelerate launch train/vispec.py my.yaml output_dir=runs/blind drafter.compressed_tokens=0 \\
        drafter.global_vector=false                                                   # baseline: sees no picture
    accelerate launch train/eagle.py my.yaml output_dir=runs/all drafter='{kind: eagle}' # baseline: all tokens
    python train/vispec.py recipes/demo-vision.yaml --plan                          # what it would do

docs/pictures.md explains how prompts and answers with pictures are made, docs/methods.md this drafter.
"""

from draftsmith.recipes.command.cli import run
from draftsmith.train.run.training_command import train_kind


def main() -> None:
    train_kind(__doc__, "vispec")


if __name__ == "__main__":
    run(main, many_processes=True)
