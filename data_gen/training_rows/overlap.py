"""Finds training conversations that ask what the evaluation asks.

Only user turns are compared, as words: Unicode NFKC, without case, punctuation and spacing. A conversation matches if
one of its user turns
    exact      has exactly the words of an evaluation turn
    overlap    holds at least half (SHARE) of an evaluation turn's distinct runs of 13 words (GRAM, the length by which
               Brown et al. 2020, arXiv 2005.14165, appendix C, filter); shorter evaluation turns only match exactly
With pictures, both must also show the same ones, compared by content: a file and a data URL of its bytes are the same.
A run that three or more evaluation turns share (COMMON) is a stock phrase and counts for none of them. Later turns of
an evaluation conversation that have fewer than 8 words (LATER_TURN_WORDS, "Go on.") are not compared.
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from itertools import chain
from typing import Any

from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError, collecting_problems
from draftsmith.recipes.files.atomic import atomic_write, json_line
from draftsmith.recipes.prompts.picture_parts import data_url, with_picture_parts
from draftsmith.recipes.prompts.prompt_reader import read_conversations, read_training_prompts
from draftsmith.recipes.prompts.records import Conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.base import as_list

Key = tuple[str, str]  # words and pictures of a user turn, which equal turns share
Finding = dict[str, Any]  # a line of contamination.jsonl

GRAM = 13
SHARE = 0.5
COMMON = 3
LATER_TURN_WORDS = 8
MOST = 10_000  # conversations of a source of eval.prompts, unless eval.max_prompts is more
SHOWN_CHARACTERS = 120  # of a text, in a finding

# Scripts without spaces: each character is a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")


class EvaluationIndex:
    """The evaluation's user turns, hashed: about 200 bytes for each distinct run of words."""

    def __init__(self, conversations: Iterable[Conversation]):
        self.conversations = 0
        self._turns: dict[Key, dict[str, str]] = {}  # what a finding says of each
        keys_of = defaultdict[int, list[Key]](list)  # by hash of a run of words
        for conversation in conversations:
            self.conversations += 1
            place = {"evaluation_id": conversation.id, "benchmark": str(conversation.meta.get("benchmark", ""))}
            place["evaluation_source"] = conversation.source
            for number, (text, words, key) in enumerate(user_turns(conversation)):
                if (number and len(words) < LATER_TURN_WORDS) or key in self._turns:
                    continue
                self._turns[key] = place | {"evaluation_text": _beginning(text)}
                for gram in _grams(words):
                    keys_of[gram].append(key)
        self._keys_of = {gram: keys for gram, keys in keys_of.items() if len(keys) < COMMON}
        self._grams = Counter(chain.from_iterable(self._keys_of.values()))

    def find(self, conversation: Conversation) -> Finding | None:
        """The evaluation turn that a conversation shares most with; an equal turn wins. "share" is of its runs."""
        found: list[tuple[float, str, Key, str]] = []
        for text, words, key in user_turns(conversation):
            if key in self._turns:
                found = [(1.0, "exact", key, text)]
                break
            shared = Counter(chain.from_iterable(self._keys_of.get(gram, ()) for gram in _grams(words)))
            shares = {other: count / self._grams[other] for other, count in shared.items() if other[1] == key[1]}
            found += [(share, "overlap", other, text) for other, share in shares.items() if share >= SHARE]
        if not found:
            return None
        share, reason, key, text = max(found, key=lambda each: each[0])
        own = {"id": conversation.id, "source": conversation.source, "line": conversation.line}
        return own | self._turns[key] | {"reason": reason, "share": round(share, 3), "text": _beginning(text)}


def user_turns(conversation: Conversation) -> Iterator[tuple[str, list[str], Key]]:
    """(text, words, key) of each user turn, without placeholders of pictures. Skips malformed messages."""
    messages, pictures = conversation.messages, conversation.pictures
    if pictures:
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # malformed: only its like is the same
            messages = with_picture_parts(conversation)
    for message in messages:
        if not isinstance(message, dict) or message.get("role") != "user":
            continue
        content = message.get("content")
        parts = content if isinstance(content, list) else [{"text": content}]
        texts = [part.get("text") for part in parts if isinstance(part, dict)]
        text = "".join(each for each in texts if isinstance(each, str))
        if text.strip():
            words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
            asked = " ".join(words) or "".join(text.split())  # punctuation alone has no words
            yield text, words, (asked, "\n".join(pictures))


def _grams(words: list[str]) -> set[int]:
    """Hashes of the distinct runs of words."""
    return set(map(hash, zip(*(words[start:] for start in range(GRAM)), strict=False)))


def _beginning(text: str) -> str:
    return " ".join(text.split())[:SHOWN_CHARACTERS]


class Check:
    """Compares training conversations with all of eval.prompts.

    Args:
        remove: leave matches out. A source of eval.prompts that cannot be read is a UserError then.
    """

    def __init__(self, recipe: Recipe, remove: bool):
        self.remove, self._path = remove, recipe.contamination_path
        self.checked = 0  # conversations
        self.findings: list[Finding] = []
        self._notes: list[str] = []  # about what was not compared
        unread: list[str] = []
        self.index = EvaluationIndex(self._evaluation(recipe, unread))
        if unread and remove:
            wanted = "data.contamination: remove needs all of them: fetch them, name files"
            raise UserError([*unread, f"{wanted}, or set data.contamination=list"])
        self._notes += unread

    def _evaluation(self, recipe: Recipe, unread: list[str]) -> Iterator[Conversation]:
        limit = max(MOST, recipe.eval.max_prompts or 0)
        for source in as_list(recipe.eval.prompts):
            count = 0
            with collecting_problems(unread, "no contamination check against eval.prompts: "):
                for conversation in read_conversations(source, Rejects(), limit, store=data_url):
                    count += 1
                    yield conversation
            if count == limit:
                self._notes.append(f"contamination was checked against the first {limit:,} conversations of {source}")

    def look(self, conversation: Conversation) -> str | None:
        """Records a match. Returns the reason to leave the conversation out if matches are removed, else None."""
        self.checked += 1
        if (finding := self.index.find(conversation)) is None:
            return None
        self.findings.append(finding)
        share = f" ({finding['share']:.0%} of its runs of {GRAM} words)" if finding["reason"] == "overlap" else ""
        asks = f"{finding['reason']}: asks what {finding['evaluation_id']} of {finding['benchmark']} asks{share}"
        return f"contaminated: {asks}" if self.remove else None

    def report(self, write: bool = True) -> None:
        """Prints a summary and, with `write`, replaces the list in contamination_path if there are matches."""
        if write and self.findings:
            atomic_write(self._path, b"".join(map(json_line, self.findings)))
        kinds, places = (Counter(each[key] for each in self.findings).most_common() for key in ("reason", "benchmark"))
        summary = (
            f"contamination: {len(self.findings):,} of {self.checked:,} training conversations ask what "
            f"{self.index.conversations:,} evaluation conversations ask"
        )
        if self.findings:
            counted = ", ".join(f"{count:,} {reason}" for reason, count in kinds)
            counted += "; " + ", ".join(f"{name} {count:,}" for name, count in places)
            done = "left out" if self.remove else "kept (data.contamination: remove leaves them out)"
            summary += f" ({counted}): {done}" + f"; listed in {self._path}" * write
        print("\n".join([*(f"note: {note}" for note in self._notes), summary]))


def screen(
    recipe: Recipe, conversations: list[Conversation], rejects: Rejects, write: bool = True
) -> list[Conversation]:
    """The conversations to ask: all, or, if data.contamination is `remove`, those without a match; the others go to
    `rejects`. Reports matches, as `Check.report` does. Raises UserError if none is left."""
    if recipe.data.contamination == "off" or recipe.eval.prompts is None:
        return conversations
    check, clean = Check(recipe, recipe.data.contamination == "remove"), []
    for conversation in Bar(conversations, desc="contamination", unit="conversation", leave=False):
        if reason := check.look(conversation):
            rejects.add_conversation(conversation, reason)
        else:
            clean.append(conversation)
    check.report(write)
    if conversations and not clean:
        raise UserError(
            f"data.prompts: all {len(conversations):,} conversations ask what eval.prompts ask; none is left to answer"
        )
    return clean


def training_check(recipe: Recipe) -> Check | None:
    """The check of the conversations that training reads, or None.

    Regenerated ones were checked when they were written, so `list` checks only others. `remove` checks all, because
    they may be older than that setting.
    """
    action = recipe.data.contamination
    if recipe.eval.prompts is None or not (action == "remove" or (action == "list" and _from_elsewhere(recipe))):
        return None
    return Check(recipe, action == "remove")


def _from_elsewhere(recipe: Recipe) -> bool:
    return recipe.data.prompts is None or recipe.data.conversations is not None


def main(command: Command) -> None:
    """Behind data_gen/contamination.py."""
    recipe, rejects = command.recipe, Rejects()
    prompts, files = as_list(recipe.data.prompts), [str(recipe.conversations_path)] * _from_elsewhere(recipe)
    if command.plan:
        plan = PlanLines()
        plan.line("reads", ", ".join([*prompts, *files]))
        plan.line("compares with", ", ".join(as_list(recipe.eval.prompts)))
        plan.writes(recipe.contamination_path)
        return
    check = Check(recipe, remove=False)
    asked = read_training_prompts(recipe.data, rejects, recipe.data.max_prompts) if prompts else ()
    stored = read_conversations(files, rejects) if files else ()
    for conversation in Bar(chain(asked, stored), desc="contamination", unit="conversation", leave=False):
        check.look(conversation)
    check.report()
    print(rejects.summary())
