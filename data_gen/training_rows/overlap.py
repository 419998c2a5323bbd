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

import json
import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.inputs import made_by, require_files
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.lines import json_line
from draftsmith.recipes.prompts.picture_files import data_url
from draftsmith.recipes.prompts.picture_parts import with_picture_parts
from draftsmith.recipes.prompts.reader import read_conversations, read_training_prompts
from draftsmith.recipes.prompts.records import Conversation, stored_conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.prompts.sources import records
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.base import as_list

LeaveOut = Callable[[Conversation], str | None]  # gives the reason to leave a conversation out
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
    """(text, words, key) of each user turn, without placeholders of pictures, however the record names its pictures."""
    messages, pictures = conversation.messages, conversation.pictures
    if pictures:
        with suppress(ValueError, KeyError, TypeError, AttributeError):  # malformed: only its like is the same
            messages = with_picture_parts(conversation)
    for message in messages:
        if not isinstance(message, dict) or message.get("role") != "user":
            continue
        text = message.get("content")
        if isinstance(text, list):
            parts = [part.get("text") for part in text if isinstance(part, dict)]
            text = "".join(part for part in parts if isinstance(part, str))
        if isinstance(text, str) and text.strip():
            words = _WORD.findall(unicodedata.normalize("NFKC", text).casefold())
            asked = " ".join(words) or "".join(text.split())  # punctuation alone has no words
            yield text, words, (asked, "\n".join(pictures))


def _grams(words: list[str]) -> set[int]:
    """Hashes of the distinct runs of words."""
    return set(map(hash, zip(*(words[start:] for start in range(GRAM)), strict=False)))


def _beginning(text: str) -> str:
    return " ".join(text.split())[:SHOWN_CHARACTERS]


# A recipe's check.


class Check:
    """Compares training conversations, one source after another, with all of eval.prompts.

    Args:
        remove: leave matching conversations out. Raises UserError if a source of eval.prompts cannot be read then.
    """

    def __init__(self, recipe: Recipe, remove: bool):
        self.remove, self._path = remove, recipe.contamination_path
        self.checked: Counter[str] = Counter()  # conversations by source
        self.findings: list[Finding] = []
        self.notes: list[str] = []  # sentences about what was not compared
        unread: list[str] = []
        self.index = EvaluationIndex(self._evaluation(recipe, unread))
        if unread and remove:
            wanted = "data.contamination: remove needs all of them: fetch them, name files"
            raise UserError([*unread, f"{wanted}, or set data.contamination=list"])
        self.notes += [f"note: {problem}" for problem in unread]

    def _evaluation(self, recipe: Recipe, unread: list[str]) -> Iterator[Conversation]:
        limit = max(MOST, recipe.eval.max_prompts or 0)
        for source in as_list(recipe.eval.prompts):
            count = 0
            try:
                for conversation in read_conversations(source, Rejects(), limit, store=data_url):
                    count += 1
                    yield conversation
            except UserError as error:
                unread.append(f"no contamination check against eval.prompts: {error.problems[0]}")
            if count == limit:
                first = f"the first {limit:,} conversations of {source}"
                self.notes.append(f"note: contamination was checked against {first}")

    def look(self, conversation: Conversation) -> str | None:
        """Records a match. Returns the reason to leave the conversation out if matches are removed, else None."""
        self.checked[conversation.source] += 1
        if (finding := self.index.find(conversation)) is None:
            return None
        self.findings.append(finding)
        share = f" ({finding['share']:.0%} of its runs of {GRAM} words)" if finding["reason"] == "overlap" else ""
        asks = f"{finding['reason']}: asks what {finding['evaluation_id']} of {finding['benchmark']} asks{share}"
        return f"contaminated: {asks}" if self.remove else None

    def report(self, write: bool = True) -> None:
        """Prints a summary, and lists the matches in the recipe's contamination_path beside those of other sources.

        Raises UserError if that is a foreign file.
        """
        if write:
            self._write()
        kinds, places = (Counter(each[key] for each in self.findings).most_common() for key in ("reason", "benchmark"))
        summary = (
            f"contamination: {len(self.findings):,} of {self.checked.total():,} training conversations ask what "
            f"{self.index.conversations:,} evaluation conversations ask"
        )
        if self.findings:
            counted = ", ".join(f"{count:,} {reason}" for reason, count in kinds)
            counted += "; " + ", ".join(f"{name} {count:,}" for name, count in places)
            done = "left out" if self.remove else "kept (data.contamination: remove leaves them out)"
            summary += f" ({counted}): {done}" + (f"; listed in {self._path}" if write else "")
        print("\n".join([*self.notes, summary]))

    def _write(self) -> None:
        path = self._path
        try:
            held = path.read_bytes().splitlines(keepends=True) if path.exists() else []
            lines = [line for line in held if json.loads(line)["source"] not in self.checked]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: not a list of contaminated conversations; move it away") from None
        if held or self.findings:
            atomic_write(path, b"".join([*lines, *map(json_line, self.findings)]))


def screen(
    recipe: Recipe, conversations: list[Conversation], rejects: Rejects, write: bool = True
) -> list[Conversation]:
    """The conversations to ask: all, or, if data.contamination is `remove`, those without a match. Reports matches.

    Raises UserError if none is left, or if data.contamination is `remove` and a source of eval.prompts cannot be read.

    Args:
        rejects: receives the conversations that are left out.
        write: list the matches in the recipe's contamination_path.
    """
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
    """The check of the conversations that training reads, or None if none is needed.

    Regenerated conversations were checked when they were written, so `list` checks only other ones. `remove` checks
    all, because they may be older than that setting.
    """
    action = recipe.data.contamination
    if action == "off" or recipe.eval.prompts is None or (action == "list" and not _from_elsewhere(recipe)):
        return None
    return Check(recipe, action == "remove")


def left_out_of_training(recipe: Recipe) -> LeaveOut | None:
    """Training's argument of `training_rows`. It leaves out what rank_vocab left out and reported."""
    check = training_check(recipe) if recipe.data.contamination == "remove" else None
    return check.look if check else None


def _from_elsewhere(recipe: Recipe) -> bool:
    return recipe.data.prompts is None or recipe.data.conversations is not None


# The script.


def main(command: Command) -> None:
    recipe, rejects = command.recipe, Rejects()
    prompts, files = as_list(recipe.data.prompts), [recipe.conversations_path] if _from_elsewhere(recipe) else []
    if files:
        require_files(made_by("regenerate", recipe))
    if command.plan:
        plan = PlanLines()
        plan.line("reads", ", ".join([*prompts, *map(str, files)]))
        plan.line("compares with", ", ".join(as_list(recipe.eval.prompts)))
        plan.writes(recipe.contamination_path)
        return
    check = Check(recipe, remove=False)
    asked = read_training_prompts(recipe.data, rejects, recipe.data.max_prompts) if prompts else ()
    stored = (conversation for file in files for conversation in _stored(file, rejects))
    for conversation in Bar(chain(asked, stored), desc="contamination", unit="conversation", leave=False):
        check.look(conversation)
    print(f"compared: {', '.join(f'{count:,} conversations of {name}' for name, count in check.checked.items())}")
    check.report()
    print(rejects.summary())


def _stored(file: Path, rejects: Rejects) -> Iterator[Conversation]:
    for line, record in records(str(file), rejects):
        try:
            yield stored_conversation(record, file, line)
        except ValueError as error:
            rejects.add(str(file), line, str(error), record)
