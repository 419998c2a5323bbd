"""Prompts for long answers about pictures, behind data_gen/reprompt.py.

    caption data     <image>\\nRender a clear summary.        -> "a dog on a beach"       (dropped)
    prompt           [Render a clear summary.] [picture] [Answer in at least 1,000 words.]

The order of the three is ViSpec's (Kang et al. 2025, arXiv 2509.15235). Three things differ from its script. It has
one request; here a hash of the conversation's id draws one of several, so the drafter does not learn one prompt by
heart. Text between two pictures keeps its place, because it may refer to them. Every user turn asks for a long answer;
the script knows one turn.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_path, json_line
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.prompts.picture_parts import data_url, pictures_of, store_picture
from draftsmith.recipes.prompts.pictures import with_named_pictures
from draftsmith.recipes.prompts.prompt_reader import read_conversations
from draftsmith.recipes.prompts.records import Conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.prompts.sources import StorePicture, file_sources
from draftsmith.recipes.sections.base import as_list
from draftsmith.recipes.sections.data import RepromptSection

PLANNED = 200  # records that --plan reads

# For pictures that come without one. ViSpec takes LLaVA-Pretrain's instructions, which all ask for a short summary.
INSTRUCTIONS = (
    "Describe this picture.",
    "What does the picture show?",
    "Tell me about everything in this picture.",
    "Explain what can be seen here.",
)
REQUESTS = (
    "Answer in at least {words} words.",
    "Your answer must have {words} words or more. Leave out no detail.",
    "Please write at length: at least {words} words, going through the picture part by part.",
    "Take your time and be thorough. An answer of fewer than {words} words is too short.",
    "Explain everything that matters for this, in {words} words at the least.",
)


def main(command: Command) -> None:
    recipe, section = command.recipe, command.recipe.data.reprompt
    out, sources = recipe.picture_prompts_path, as_list(section.sources)
    if out.resolve() in [Path(part).resolve() for source in sources for part in file_sources(source)]:
        raise UserError(f"data.reprompt.out: {out} is one of data.reprompt.sources, and would be replaced")
    if recipe.export.to is not None:  # else nothing here needs torch
        from draftsmith.models.formats.exporting import check_export
        from draftsmith.models.target_files import TargetFiles

        check_export(recipe, TargetFiles(recipe.target))
    if command.plan:
        print_reprompting_plan(section, sources, out)
        return
    rejects = Rejects(out.with_suffix(".rejects.jsonl"))
    store = partial(store_picture, folder=out.with_suffix(".pictures"))
    with alone_in(out.parent, file=out.name):
        conversations = read_in_drawn_order(sources, section, rejects, store)
        records = len(conversations) + rejects.total
        written, prompts = 0, prompts_for_long_answers(conversations, section, rejects, store)
        with atomic_path(out) as unfinished, unfinished.open("wb") as file:
            most = min(section.max_prompts or len(conversations), len(conversations))
            for prompt in Bar(islice(prompts, most), total=most, desc="reprompting", unit="prompt"):
                file.write(json_line(prompt))
                written += 1
            if not written:
                raise UserError(
                    f"data.reprompt.sources: none of {records:,} records gave a prompt; {rejects.summary()}"
                )
    print(f"{out}: {written:,} prompts of {records:,} records; {rejects.summary()}")
    if section.max_prompts and written < section.max_prompts:
        print(f"note: data.reprompt.max_prompts asks for {section.max_prompts:,}, and there are no more")


def read_in_drawn_order(
    sources: list[str], section: RepromptSection, rejects: Rejects, store: StorePicture, limit: int | None = None
) -> list[Conversation]:
    """The sources' conversations in an order that depends on ids and seed alone."""
    read = read_conversations(sources, rejects, limit, "data.reprompt.sources: ", store)
    bar = Bar(read, desc="reading", unit="record")
    return sorted(bar, key=lambda conversation: _hash(section.seed, "order", conversation.id))


def prompts_for_long_answers(
    conversations: Sequence[Conversation], section: RepromptSection, rejects: Rejects, store: StorePicture
) -> Iterator[dict[str, Any]]:
    """A record {"id", "messages", "meta"} for each conversation whose pictures can be used; the others go to `rejects`.

    `store` writes the bytes of a data URL into a file and returns its path.
    """
    for conversation in conversations:
        try:
            named = with_named_pictures(conversation, store, section.folder)
            messages = reprompted(conversation.id, named.messages, section)
        except ValueError as error:
            rejects.add_conversation(conversation, str(error))
            continue
        yield {"id": conversation.id, "messages": messages, "meta": conversation.meta}


def reprompted(
    conversation_id: str, messages: Sequence[dict[str, Any]], section: RepromptSection
) -> list[dict[str, Any]]:
    """The `messages` (of `with_named_pictures`) without answers, each user turn as [instruction, picture, request].

    Raises ValueError if there is no picture.
    """
    if not pictures_of([message for message in messages if message["role"] == "user"]):
        raise ValueError("no picture: the record names none")
    asked: list[dict[str, Any]] = []
    for message in messages:
        if message["role"] == "assistant":
            if message.get("tool_calls"):
                asked.append(message)
            continue
        if message["role"] == "user":
            words = (section.seed, str(len(asked)), conversation_id)
            request = _drawn(REQUESTS, "request", *words).format(words=f"{section.min_words:,}")
            content = _turn(message["content"], _drawn(INSTRUCTIONS, "instruction", *words), request)
            message = message | {"content": content}
        asked.append(message)
    return asked


def _turn(parts: list[dict[str, Any]], instruction: str, request: str) -> list[dict[str, Any]]:
    kinds = "".join("t" if part["type"] == "text" else "p" for part in parts)
    if "t" in kinds.strip("t"):  # between pictures
        return [*parts, {"type": "text", "text": request}]
    texts = [part for part in parts if part["type"] == "text" and part["text"].strip()]
    pictures = [part for part in parts if part["type"] != "text"]
    asked = "\n".join(part["text"].strip() for part in texts) or instruction
    return [{"type": "text", "text": asked}, *pictures, {"type": "text", "text": request}]


def _drawn(phrasings: Sequence[str], *words: Any) -> str:
    return phrasings[int.from_bytes(_hash(*words)[:8], "big") % len(phrasings)]


def _hash(*words: Any) -> bytes:
    return hashlib.sha256(json.dumps(words).encode()).digest()


def print_reprompting_plan(section: RepromptSection, sources: list[str], out: Path) -> None:
    rejects = Rejects()
    conversations = read_in_drawn_order(sources, section, rejects, data_url, PLANNED)
    prompts = list(prompts_for_long_answers(conversations, section, rejects, data_url))
    with PlanLines() as plan:
        plan.line("reads", ", ".join(sources))
        plan.line("prompts", f"at most {section.max_prompts:,}" if section.max_prompts else "all usable records")
        plan.line("a sample", f"{len(conversations):,} records give {len(prompts):,} prompts; {rejects.summary()}")
        for message in prompts[0]["messages"] if prompts else ():
            shown = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
            for part in shown:
                plan.line(message["role"], part.get("text") or f"[{part.get('path', '')[:100]}]")
        plan.writes(out)
        if not prompts:
            plan.problems.append(f"data.reprompt.sources: none of {len(conversations):,} records gives a prompt")
