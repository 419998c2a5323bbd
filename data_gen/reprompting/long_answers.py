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
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_path
from draftsmith.recipes.files.lines import json_line
from draftsmith.recipes.files.lock import locked
from draftsmith.recipes.prompts.picture_files import data_url, store_picture
from draftsmith.recipes.prompts.picture_parts import pictures_of
from draftsmith.recipes.prompts.pictures import with_named_pictures
from draftsmith.recipes.prompts.reader import read_conversations
from draftsmith.recipes.prompts.records import Conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.prompts.sources import StorePicture, file_sources
from draftsmith.recipes.schema import Recipe
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
    """Writes the prompts, or with --plan says what they would be."""
    recipe, section = command.recipe, command.recipe.data.reprompt
    out = recipe.picture_prompts_path
    sources = as_list(section.sources)
    if out.resolve() in [Path(part).resolve() for source in sources for part in file_sources(source)]:
        raise UserError(f"data.reprompt.out: {out} is one of data.reprompt.sources, and would be replaced")
    if recipe.export.to is not None:  # else nothing here needs torch
        from draftsmith.models.formats.exporting import check_export
        from draftsmith.models.target_files import TargetFiles

        check_export(recipe, TargetFiles(recipe.target))
    if command.plan:
        _print_plan(recipe, sources)
        return
    rejects = Rejects(out.with_suffix(".rejects.jsonl"))
    store = partial(store_picture, folder=out.with_suffix(".pictures"))
    out.parent.mkdir(parents=True, exist_ok=True)
    taken = f"{out}: another process is writing it; wait for it, or name another data.reprompt.out"
    with locked(out.with_name(f".{out.name}.lock"), taken):
        read = read_conversations(sources, rejects, None, "data.reprompt.sources: ", store)
        conversations = in_drawn_order(Bar(read, desc="reading", unit="record"), section.seed)
        records = len(conversations) + rejects.total
        most = min(section.max_prompts or len(conversations), len(conversations))
        written = 0
        with atomic_path(out) as unfinished, unfinished.open("wb") as file:
            with Bar(total=most, desc="reprompting", unit="prompt") as bar:
                for prompt in prompts_for_long_answers(conversations, section, rejects, store):
                    file.write(json_line(prompt))
                    written += 1
                    bar.update()
                    if written == most:
                        break
            if not written:
                raise UserError(
                    f"data.reprompt.sources: none of {records:,} records gave a prompt; {rejects.summary()}"
                )
    print(f"{out}: {written:,} prompts of {records:,} records; {rejects.summary()}")
    if section.max_prompts and written < section.max_prompts:
        print(f"note: data.reprompt.max_prompts asks for {section.max_prompts:,}, and there are no more")


def in_drawn_order(conversations: Iterable[Conversation], seed: int) -> list[Conversation]:
    """The conversations in an order that depends on ids and seed alone, not on the order of the sources."""
    return sorted(conversations, key=lambda conversation: _hash(seed, "order", conversation.id))


def prompts_for_long_answers(
    conversations: Sequence[Conversation], section: RepromptSection, rejects: Rejects, store: StorePicture
) -> Iterator[dict[str, Any]]:
    """A record {"id", "messages", "meta"} for each conversation whose pictures can be used; the others go to `rejects`.

    Args:
        store: stores the bytes of a data URL and returns their path.
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
    """The messages without answers, each user turn as [instruction, picture, request].

    Raises ValueError if there is no picture.

    Args:
        messages: of `with_named_pictures`.
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
            instruction = _drawn(INSTRUCTIONS, "instruction", *words)
            request = _drawn(REQUESTS, "request", *words)
            request = request.replace("{words}", f"{section.min_words:,}")
            message = message | {"content": _turn(message["content"], instruction, request)}
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


def _print_plan(recipe: Recipe, sources: list[str]) -> None:
    section, rejects = recipe.data.reprompt, Rejects()

    read = read_conversations(sources, rejects, PLANNED, "data.reprompt.sources: ", data_url)
    conversations = in_drawn_order(read, section.seed)
    prompts = list(prompts_for_long_answers(conversations, section, rejects, data_url))
    most = "all usable records" if section.max_prompts is None else f"at most {section.max_prompts:,}"
    with PlanLines() as plan:
        plan.line("reads", ", ".join(sources))
        plan.line("prompts", most)
        plan.line("a sample", f"{len(conversations):,} records give {len(prompts):,} prompts; {rejects.summary()}")
        for message in prompts[0]["messages"] if prompts else ():
            shown = message["content"] if isinstance(message["content"], list) else [{"text": message["content"]}]
            for number, part in enumerate(shown):
                plan.line("" if number else message["role"], part.get("text") or f"[{part.get('path', '')[:100]}]")
        plan.writes(recipe.picture_prompts_path)
        if not prompts:
            plan.problems.append(f"data.reprompt.sources: none of {len(conversations):,} records gives a prompt")
