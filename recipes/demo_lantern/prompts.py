"""Chat prompts that ask for a picture: the image demo's input, without a download.

    python -m draftsmith.recipes.demo_lantern.prompts runs/demo-lantern     # prompts-train.jsonl, prompts-heldout.jsonl

A prompt is a caption and nothing else. There are 360 captions, so each comes many times, under another id; answers are
drawn at random, so each is another picture. The two splits share captions: what is held out is handwriting.
"""

import argparse
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from draftsmith.recipes.command.cli import run
from draftsmith.recipes.demo_lantern.pictures import CAPTIONS, SPLITS
from draftsmith.recipes.files.atomic import atomic_write

ROUNDS = {"train": 10, "heldout": 1}  # how often a split has every caption


def caption_conversations(split: str) -> Iterator[dict[str, Any]]:
    """Conversations of one split, in a fixed order: `{"id", "messages": [user]}`, every caption once a round."""
    for number in range(ROUNDS[split]):
        for caption in random.Random(f"{split}/{number}").sample(CAPTIONS, len(CAPTIONS)):
            name = caption.text.replace(" ", "-")
            yield {
                "id": f"captions/{split}/{number}/{name}",
                "messages": [{"role": "user", "content": caption.text}],
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path, help="folder for the two files")
    out: Path = parser.parse_args().out
    for split in SPLITS:
        lines = [json.dumps(conversation) for conversation in caption_conversations(split)]
        atomic_write(out / f"prompts-{split}.jsonl", "\n".join(lines) + "\n")
        print(f"{len(lines):5} prompts in {out / f'prompts-{split}.jsonl'}")


if __name__ == "__main__":
    run(main)
