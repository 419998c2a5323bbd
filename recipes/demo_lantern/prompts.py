"""Chat prompts that ask for a picture: the image demo's input, without a download.

A prompt is a caption and nothing else. There are 360 captions, so each comes many times, under another id; answers are
drawn at random, so each is another picture. The two splits share captions: what is held out is handwriting.
"""

import random
from collections.abc import Iterator
from typing import Any

from draftsmith.recipes.demo_lantern.pictures import CAPTIONS

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
