"""Write the files that the study's cells read and no `draftsmith` command writes. docs/study/*.yaml call it:

python -m docs.study.prepare shares runs/study/data/training/conversations.jsonl runs/study/data
python -m docs.study.prepare library runs/study/fr-spec/library/library.jsonl
"""

import argparse
import json
import random
import sysconfig
from itertools import islice
from pathlib import Path

from demos.descriptions import questions_about
from demos.prompts import scene_conversations
from demos.scenes import scene_at
from demos.stdlib import KINDS, split_of, stdlib_conversations
from draftsmith.recipes.command.cli import run
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.reading import open_bytes
from draftsmith.recipes.prompts.records import validation_rank

VALIDATION = 48  # conversations
MOST = 4  # times as many conversations as the recipe asks for
PICTURES = 2000  # asked about in training


def shares(conversations: Path, folder: Path) -> None:
    """Writes x1, x2, x4 and x8: the same validation conversations and one to eight eighths of the others, each share
    inside the next, in the order of a hash of their ids."""
    with open_bytes(conversations) as lines:
        by_id = {json.loads(line)["id"]: line for line in lines}
    order = sorted(by_id, key=validation_rank)
    for size in (1, 2, 4, 8):
        share = set(order[: VALIDATION + (len(order) - VALIDATION) * size // 8])
        atomic_write(folder / f"x{size}.jsonl", b"".join(line for id_, line in by_id.items() if id_ in share))


def more_prompts(conversations: Path, place: Path) -> None:
    """Writes the questions of the training modules that the recipe does not ask: first those about other functions,
    then the other kind of question about each. None ranks among the validation conversations, which stay the same."""
    asked = {json.loads(line)["id"] for line in conversations.read_bytes().splitlines()}
    every = {
        conversation["id"]: conversation
        for kinds in (KINDS, *((kind,) for kind in KINDS))
        for conversation in stdlib_conversations("train", kinds)
    }
    last_kept = sorted(map(validation_rank, asked))[VALIDATION - 1]
    others = (each for id_, each in every.items() if id_ not in asked and validation_rank(id_) > last_kept)
    wanted = islice(others, (len(asked) - VALIDATION) * (MOST - 1))
    lines = (json.dumps({"id": each["id"], "messages": each["messages"][:1]}) + "\n" for each in wanted)
    atomic_write(place, "".join(lines))


def more(conversations: Path, others: Path, folder: Path) -> None:
    """Writes x16 and x32: all of the conversations, and others, so that there are two and four times as many."""
    whole, further = (path.read_bytes().splitlines(keepends=True) for path in (conversations, others))
    for times in (2, MOST):
        added = further[: (len(whole) - VALIDATION) * (times - 1)]
        atomic_write(folder / f"x{8 * times}.jsonl", b"".join(whole + added))


def library(place: Path) -> None:
    """Writes the source text of the interpreter's library without the held-out modules."""
    root = Path(sysconfig.get_paths()["stdlib"])
    lines = []
    for source in sorted(root.rglob("*.py")):
        parts = source.relative_to(root).with_suffix("").parts
        skipped = {"site-packages", "dist-packages", "__pycache__"}.intersection(parts)
        if not skipped and split_of(".".join(parts)) == "train":
            lines.append(json.dumps({"text": source.read_text(encoding="utf-8", errors="ignore")}) + "\n")
    atomic_write(place, "".join(lines))


def picture_questions(place: Path) -> None:
    """Writes a question about each training picture of the vision demo."""
    lines = []
    for index, shown in enumerate(islice(scene_conversations("train"), PICTURES)):
        question, _ = next(questions_about(scene_at("train", index), random.Random(index)))
        [message] = shown["messages"]
        content = [message["content"][0], {"type": "text", "text": question}]
        lines.append(json.dumps({"id": shown["id"], "messages": [message | {"content": content}]}) + "\n")
    atomic_write(place, "".join(lines))


def main() -> None:
    made = {each.__name__.replace("_", "-"): each for each in (shares, more_prompts, more, library, picture_questions)}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=made)
    parser.add_argument("paths", type=Path, nargs="+", help="what is read, then what is written")
    options = parser.parse_args()
    made[options.what](*options.paths)


if __name__ == "__main__":
    run(main)
