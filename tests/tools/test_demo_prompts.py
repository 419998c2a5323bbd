"""What the demos ask: shipped files are what `demos.prompts` writes; splits of the library share nothing."""

import itertools
import json
from pathlib import Path

from demos.prompts import OUT, caption_conversations, scene_conversations
from demos.stdlib import split_of
from draftsmith.recipes.prompts.pictures import read_picture
from draftsmith.recipes.prompts.reader import read_conversations
from draftsmith.recipes.prompts.records import Conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.prompts.sources import records


def shipped(name: str) -> list[Conversation]:
    rejects = Rejects()
    found = list(read_conversations(str(OUT / f"{name}.jsonl.gz"), rejects))
    assert not rejects.total
    return found


def test_shipped_pictures_and_captions_are_those_that_the_program_makes(tmp_path: Path) -> None:
    """Pictures by their pixels: another zlib packs them in other bytes."""
    for split, rows in (("train", 3600), ("heldout", 360)):
        found = [record for _, record in records(str(OUT / f"captions-{split}.jsonl.gz"), Rejects())]
        assert found == list(caption_conversations(split)) and len(found) == rows
    for split, rows in (("train", 2000), ("heldout", 160)):
        found = shipped(f"scenes-{split}")
        assert len(found) == rows
        for conversation, made in itertools.islice(zip(found, scene_conversations(split), strict=False), 20):
            one, other = json.loads(json.dumps(conversation.messages)), made["messages"]
            pictures = [read_picture(each[0]["content"][0].pop("url"), tmp_path).image for each in (one, other)]
            assert (conversation.id, one) == (made["id"], other)
            assert pictures[0].tobytes() == pictures[1].tobytes()


def test_shipped_questions_keep_the_library_s_modules_apart() -> None:
    names = ("train", "heldout", "copy")
    train, heldout, copied = ([each.meta["module"] for each in shipped(f"stdlib-{name}")] for name in names)
    assert (len(train), len(heldout), len(copied)) == (5173, 617, 715)
    assert {split_of(module) for module in train} == {"train"}
    assert {split_of(module) for module in heldout + copied} == {"heldout"}
