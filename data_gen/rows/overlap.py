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
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.launch import rank
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.files.lines import json_line
from draftsmith.recipes.prompts.picture_files import data_url
from draftsmith.recipes.prompts.picture_parts import pictures_of, with_picture_parts
from draftsmith.recipes.prompts.reader import read_conversations, read_training_prompts
from draftsmith.recipes.prompts.records import Conversation, folder_of, picture_digest, stored_conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.prompts.sources import records
from draftsmith.recipes.schema import Recipe, as_list

LeaveOut = Callable[[Conversation], str | None]  # gives the reason to leave a conversation out

GRAM = 13
SHARE = 0.5
COMMON = 3
LATER_TURN_WORDS = 8
MOST = 10_000
SHOWN_CHARACTERS = 120  # of a text, in a finding

# Scripts without spaces: each character is a word.
_UNSPACED = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff"
_WORD = re.compile(rf"[{_UNSPACED}]|[^\W_{_UNSPACED}]+")
_ASCII_WORD = re.compile("[a-z0-9]+")


@dataclass(frozen=True)
class EvaluationTurn:
    id: str  # of its conversation
    benchmark: str
    source: str
    text: str  # its beginning
    grams: int = 0  # distinct runs of words that count
    pictures: tuple[str, ...] = ()  # as `compared` gives them


@dataclass(frozen=True)
class Finding:
    """What a training conversation shares with the evaluation."""

    reason: str  # "exact" or "overlap"
    share: float  # of the evaluation turn's runs of words
    turn: EvaluationTurn
    text: str  # the training turn's beginning

    def __str__(self) -> str:
        share = "" if self.reason == "exact" else f" ({self.share:.0%} of its runs of {GRAM} words)"
        return f"{self.reason}: asks what {self.turn.id} of {self.turn.benchmark} asks{share}"


def comparable_words(text: str) -> list[str]:
    if text.isascii():
        return _ASCII_WORD.findall(text.lower())
    return _WORD.findall(unicodedata.normalize("NFKC", text).casefold())


class EvaluationIndex:
    """The evaluation's user turns, hashed: about 200 bytes for each distinct run of words."""

    def __init__(self, conversations: Iterable[Conversation]):
        self.conversations = 0
        self._exact: dict[str, EvaluationTurn] = {}
        self._turns: list[EvaluationTurn] = []  # those that have runs
        self._turns_of: dict[int, list[int]] = {}  # hash of a run -> numbers in _turns
        for conversation in conversations:
            self.conversations += 1
            messages, shown = compared(conversation)
            for number, text in enumerate(user_texts(messages)):
                words = comparable_words(text)
                key = _key(words, text, shown)
                if (number and len(words) < LATER_TURN_WORDS) or key in self._exact:
                    continue
                benchmark = str(conversation.meta.get("benchmark", ""))
                turn = EvaluationTurn(conversation.id, benchmark, conversation.source, _beginning(text), 0, shown)
                self._exact[key] = turn
                if len(words) >= GRAM:
                    for gram in set(_grams(words)):
                        self._turns_of.setdefault(gram, []).append(len(self._turns))
                    self._turns.append(turn)
        self._turns_of = {gram: turns for gram, turns in self._turns_of.items() if len(turns) < COMMON}
        counts = Counter(turn for turns in self._turns_of.values() for turn in turns)
        self._turns = [replace(turn, grams=counts[number]) for number, turn in enumerate(self._turns)]

    def find(self, conversation: Conversation) -> Finding | None:
        """The evaluation turn that a conversation shares most with; an equal turn wins.

        The same words about other pictures are another question.
        """
        best: Finding | None = None
        messages, pictures = compared(conversation)
        for text in user_texts(messages):
            words = comparable_words(text)
            if (same := self._exact.get(_key(words, text, pictures))) is not None:
                return Finding("exact", 1.0, same, _beginning(text))
            shared = Counter(turn for gram in set(_grams(words)) for turn in self._turns_of.get(gram, ()))
            for number, count in shared.items():
                share = count / self._turns[number].grams
                if self._turns[number].pictures != pictures:
                    continue
                if share >= SHARE and (best is None or share > best.share):
                    best = Finding("overlap", share, self._turns[number], _beginning(text))
        return best


def user_texts(messages: list[Any]) -> Iterator[str]:
    """The texts of user turns; skips malformed messages."""
    for message in messages:
        if not isinstance(message, dict) or message.get("role") != "user":
            continue
        content = message.get("content")
        if isinstance(content, list):
            parts = [part.get("text") for part in content if isinstance(part, dict)]
            content = "".join(part for part in parts if isinstance(part, str))
        if isinstance(content, str) and content.strip():
            yield content


def compared(conversation: Conversation) -> tuple[list[Any], tuple[str, ...]]:
    """(messages without placeholders, digests of the pictures in order), however the record names its pictures."""
    if not conversation.images and not conversation.other_parts:
        return conversation.messages, ()
    try:
        messages = with_picture_parts(conversation)
    except (ValueError, KeyError, TypeError, AttributeError):  # malformed: only its like is the same
        return conversation.messages, tuple(conversation.pictures)
    folder, parts = folder_of(conversation.source), pictures_of(messages)
    return messages, tuple(part.get("sha256") or picture_digest(part["path"], folder) for part in parts)


def _key(words: list[str], text: str, pictures: Sequence[str]) -> str:
    asked = " ".join(words) or "".join(text.split())  # punctuation alone has no words
    return "\n".join([asked, *pictures])


def _grams(words: list[str]) -> Iterator[int]:
    """Hashes of all runs of words."""
    return map(hash, zip(*(words[start:] for start in range(GRAM)), strict=False))


def _beginning(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= SHOWN_CHARACTERS else text[: SHOWN_CHARACTERS - 1] + "…"


# A recipe's check.


class Check:
    """Compares training conversations, one source after another, with all of eval.prompts.

    Args:
        remove: leave matching conversations out. Raises UserError if a source of eval.prompts cannot be read then.
    """

    def __init__(self, recipe: Recipe, remove: bool):
        self.remove, self._path = remove, recipe.contamination_path
        self.notes: list[str] = []  # sentences about what was not compared
        self.checked: Counter[str] = Counter()  # conversations by source
        self.findings: list[dict[str, Any]] = []
        unread: list[str] = []
        self.index = EvaluationIndex(self._evaluation(recipe, unread))
        if unread and remove:
            advice = (
                "data.contamination: remove needs all of them: fetch them, name files, or set data.contamination=list"
            )
            raise UserError([*unread, advice])

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
                self.notes.append(f"note: {unread[-1]}")
            if count == limit:
                self.notes.append(
                    f"note: contamination was checked against the first {limit:,} conversations of {source}"
                )

    def look(self, conversation: Conversation) -> str | None:
        """Records a match. Returns the reason to leave the conversation out if matches are removed, else None."""
        self.checked[conversation.source] += 1
        finding = self.index.find(conversation)
        if finding is None:
            return None
        self.findings.append(
            {
                "id": conversation.id,
                "source": conversation.source,
                "line": conversation.line,
                "evaluation_id": finding.turn.id,
                "benchmark": finding.turn.benchmark,
                "evaluation_source": finding.turn.source,
                "reason": finding.reason,
                "share": round(finding.share, 3),
                "text": finding.text,
                "evaluation_text": finding.turn.text,
            }
        )
        return f"contaminated: {finding}" if self.remove else None

    def report(self, write: bool = True) -> None:
        """Prints a summary line and lists the matches in the recipe's contamination_path."""
        if write:
            self._write()
        print("\n".join([*self.notes, f"contamination: {self._summary(write)}"]))

    def _summary(self, written: bool) -> str:
        checked, found = self.checked.total(), len(self.findings)
        if not self.index.conversations:
            return "nothing was compared: no conversation of eval.prompts could be read"
        asked = f"{self.index.conversations:,} evaluation conversations"
        if not found:
            return f"compared {checked:,} training conversations with {asked}: none ask the same"
        reasons = Counter(finding["reason"] for finding in self.findings)
        benchmarks = Counter(finding["benchmark"] for finding in self.findings)
        kinds = ", ".join(f"{count:,} {reason}" for reason, count in reasons.most_common())
        places = ", ".join(f"{name} {count:,}" for name, count in benchmarks.most_common())
        done = "left out" if self.remove else "kept (data.contamination: remove leaves them out)"
        listed = f"; listed in {self._path}" if written else ""
        return (
            f"{found:,} of {checked:,} training conversations ask what {asked} ask ({kinds}; {places}): {done}{listed}"
        )

    def _write(self) -> None:
        """Writes the findings and keeps lines about unchecked sources. Raises UserError for a foreign file."""
        path, lines = self._path, []
        try:
            held = path.read_bytes().splitlines() if path.exists() else []
            lines += [line + b"\n" for line in held if line and parse_json(line)["source"] not in self.checked]
        except (ValueError, KeyError, TypeError):
            raise UserError(f"{path}: not a list of contaminated conversations; move it away") from None
        lines += map(json_line, self.findings)
        if lines or path.exists():
            atomic_write(path, b"".join(lines))


def screen(
    recipe: Recipe, conversations: list[Conversation], rejects: Rejects, write: bool = True
) -> list[Conversation]:
    """Checks prompts before they are asked, reports matches, and returns the conversations to ask.

    Raises UserError if none is left, or if data.contamination is `remove` and a source of eval.prompts cannot be read.

    Args:
        rejects: receives matching conversations if data.contamination is `remove`.
        write: list the matches in the recipe's contamination_path.
    """
    if recipe.data.contamination == "off" or recipe.eval.prompts is None:
        return conversations
    check = Check(recipe, recipe.data.contamination == "remove")
    clean = []
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
    if recipe.data.contamination != "remove" or (check := training_check(recipe)) is None:
        return None
    if check.notes and rank() == 0:
        print("\n".join(check.notes))
    return check.look


def _from_elsewhere(recipe: Recipe) -> bool:
    return recipe.data.prompts is None or recipe.data.conversations is not None


# The script.


def main(command: Command) -> None:
    recipe = command.recipe
    prompts = as_list(recipe.data.prompts)
    file = recipe.conversations_path if _from_elsewhere(recipe) else None
    if file is not None and not file.exists():
        raise UserError(
            f"data.conversations: {file} does not exist; run `draftsmith regenerate` first, or name data.prompts"
        )
    if command.plan:
        plan = PlanLines()
        plan.line("reads", ", ".join([*prompts, *([str(file)] if file else [])]))
        plan.line("compares with", ", ".join(as_list(recipe.eval.prompts)))
        plan.writes(recipe.contamination_path)
        return
    check, rejects = Check(recipe, remove=False), Rejects()
    with Bar(desc="contamination", unit="conversation", leave=False) as progress:
        if prompts:
            for conversation in read_training_prompts(recipe.data, rejects, recipe.data.max_prompts):
                check.look(conversation)
                progress.update()
        for line, record in records(str(file), rejects) if file else ():
            try:
                check.look(stored_conversation(record, Path(str(file)), line))
            except ValueError as error:
                rejects.add(str(file), line, str(error), record)
            progress.update()
    print(f"compared: {', '.join(f'{count:,} conversations of {name}' for name, count in check.checked.items())}")
    check.report()
    print(rejects.summary())
