"""Evaluation prompts: conversations from any file that `recipes.prompts` reads, asked turn by turn.

The answers that a file may hold are dropped, and with them the tool results that reply to them: the target answers
itself. A later turn's prompt holds the target's own
earlier answers, from plain decoding, so that all contenders are asked exactly the same.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts import Conversation, Rejects, read_conversations


@dataclass(frozen=True)
class Question:
    """One conversation to be answered."""

    id: str
    category: str
    messages: list[dict[str, Any]]  # system and user messages only

    def turns(self) -> Iterator[list[dict[str, Any]]]:
        """What stands between two answers: the messages up to and including each user turn."""
        pending: list[dict[str, Any]] = []
        for message in self.messages:
            pending.append(message)
            if message["role"] == "user":
                yield pending
                pending = []


def load_questions(sources: str | list[str], rejects: Rejects, limit: int | None) -> list[Question]:
    """The first `limit` conversations of `sources`.

    Raises:
        UserError: nothing usable.
    """
    questions = [_question(conversation) for conversation in read_conversations(sources, rejects, limit)]
    if not questions:
        raise UserError(f"eval.prompts: nothing usable in {sources}; {rejects.summary()}")
    return questions


def _question(conversation: Conversation) -> Question:
    asked = [message for message in conversation.messages if message["role"] not in ("assistant", "tool")]
    return Question(conversation.id, str(conversation.meta.get("category", "")), asked)
