"""Write the demos' prompts to recipes/demo_prompts, where the recipes find them.

    python -m demos.prompts        # or `make demo-prompts`; with CPython 3.11, whose library the questions are about

    stdlib-train, stdlib-heldout       questions about the standard library, answered by its own code (`demos.stdlib`)
    stdlib-copy                        conversations about held-out modules whose answers repeat what stands there
    scenes-train, scenes-heldout       drawn pictures to be described (`demos.scenes`), PNG files in data URLs
    captions-train, captions-heldout   captions that ask for a picture (`demos.digits`)

There are 360 captions, so each comes many times, under another id; answers are drawn at random, so each is another
picture. Both splits have all captions: what is held out is handwriting.
"""

import argparse
import gzip
import io
import json
import random
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from demos.descriptions import REQUESTS
from demos.digits import CAPTIONS
from demos.scenes import draw, scene_at
from demos.stdlib import copy_conversations, stdlib_conversations
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.prompts.picture_parts import data_url

OUT = Path(__file__).parents[1] / "recipes" / "demo_prompts"
PYTHON = (3, 11)  # of the shipped files
SCENES = {"train": 2000, "heldout": 160}  # the demo's recipe asks for 2000 and 40, the study for 160
ROUNDS = {"train": 10, "heldout": 1}  # how often a split has every caption


def scene_conversations(split: str) -> Iterator[dict[str, Any]]:
    """Conversations of one split, `{"id", "messages": [user]}`, the picture before the request."""
    for index in range(SCENES[split]):
        picture = io.BytesIO()
        draw(scene_at(split, index)).save(picture, format="PNG")
        request = random.Random(f"{split}/{index}").choice(REQUESTS)
        content = [{"type": "image", "url": data_url(picture.getvalue())}, {"type": "text", "text": request}]
        yield {"id": f"scenes/{split}/{index}", "messages": [{"role": "user", "content": content}]}


def caption_conversations(split: str) -> Iterator[dict[str, Any]]:
    """Conversations of one split, `{"id", "messages": [user]}`, every caption once a round."""
    for number in range(ROUNDS[split]):
        for caption in random.Random(f"{split}/{number}").sample(CAPTIONS, len(CAPTIONS)):
            name = caption.text.replace(" ", "-")
            yield {
                "id": f"captions/{split}/{number}/{name}",
                "messages": [{"role": "user", "content": caption.text}],
            }


def write(path: Path, conversations: Iterable[dict[str, Any]]) -> None:
    """As packed JSON lines, without the time of day."""
    text = "".join(f"{json.dumps(each, ensure_ascii=False)}\n" for each in conversations)
    atomic_write(path, gzip.compress(text.encode(), mtime=0))
    print(f"{path}: {text.count(chr(10)):,} conversations, {path.stat().st_size:,} bytes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, help="folder; default: the shipped one")
    out = parser.parse_args().out
    if out == OUT and sys.version_info[:2] != PYTHON:
        raise UserError("the shipped questions are about CPython 3.11's library; run its python, or give another --out")
    out.mkdir(parents=True, exist_ok=True)
    for split in ("train", "heldout"):
        write(out / f"stdlib-{split}.jsonl.gz", stdlib_conversations(split))
        write(out / f"scenes-{split}.jsonl.gz", scene_conversations(split))
        write(out / f"captions-{split}.jsonl.gz", caption_conversations(split))
    write(out / "stdlib-copy.jsonl.gz", copy_conversations())


if __name__ == "__main__":
    run(main)
