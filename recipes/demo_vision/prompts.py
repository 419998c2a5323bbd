"""Chat prompts about drawn scenes: the vision demo's input, without a download."""

import io
import random
from collections.abc import Iterator
from typing import Any

from draftsmith.recipes.demo_vision.descriptions import REQUESTS
from draftsmith.recipes.demo_vision.scenes import draw, scene_at
from draftsmith.recipes.prompts.picture_files import data_url

PROMPTS = {"train": 20_000, "heldout": 1_000}  # of each split; the series of scenes has no end


def scene_conversations(split: str) -> Iterator[dict[str, Any]]:
    """Conversations of one split, in a fixed order: `{"id", "messages": [user]}`, the picture before the request.

    Pictures are PNG files in data URLs; a command that writes conversations stores them beside its file.
    """
    for index in range(PROMPTS[split]):
        picture = io.BytesIO()
        draw(scene_at(split, index)).save(picture, format="PNG")
        request = random.Random(f"{split}/{index}").choice(REQUESTS)
        content = [{"type": "image", "url": data_url(picture.getvalue())}, {"type": "text", "text": request}]
        yield {"id": f"scenes/{split}/{index}", "messages": [{"role": "user", "content": content}]}
