"""Runs contenders over evaluation prompts: conversations from any file that `recipes.prompts` reads, turn by turn.

The answers that a file may hold are dropped: the target answers itself. A later turn's prompt holds the target's own
earlier answers, from plain decoding, so that all contenders are asked exactly the same. Every prompt is decoded by
everyone in turn, in an order that rotates from prompt to prompt: a machine that grows slower slows all alike.
"""

import json
from collections.abc import Collection
from dataclasses import dataclass
from typing import IO, Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from draftsmith.eval.decode import Generation, decode
from draftsmith.eval.metrics import tau
from draftsmith.models.chat import RenderError, answer_message, as_text, render_prompt
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts import Conversation, Rejects, questions, read_conversations

PLAIN = "plain decoding"


@dataclass(frozen=True)
class Question:
    """One conversation to be answered."""

    id: str
    source: str  # its place, for rejects
    line: int | None
    turns: list[list[dict[str, Any]]]  # the messages that stand before each answer
    tools: list[Any] | None  # function schemas for the chat template


def load_questions(sources: str | list[str], rejects: Rejects, limit: int | None) -> list[Question]:
    """The first `limit` conversations of `sources`, but for those that are not text only: they go to `rejects`.

    Raises:
        UserError: nothing usable.
    """
    found = []
    for conversation in read_conversations(sources, rejects, limit):
        try:
            as_text(conversation.messages, conversation.images)
        except RenderError as error:
            record = {"id": conversation.id, "messages": conversation.messages, "images": conversation.images}
            rejects.add(conversation.source, conversation.line, str(error), record)
        else:
            found.append(_question(conversation))
    if not found:
        raise UserError(f"eval.prompts: nothing usable in {sources}; {rejects.summary()}")
    return found


def _question(conversation: Conversation) -> Question:
    return Question(
        conversation.id,
        conversation.source,
        conversation.line,
        list(questions(conversation.messages)),
        conversation.meta.get("tools"),
    )


@dataclass(frozen=True)
class Bench:
    """What all contenders share.

    Attributes:
        max_length: tokens of prompt and answer that the target's positions allow.
    """

    target: Target
    tokenizer: PreTrainedTokenizerBase
    stop_ids: Collection[int]
    max_new_tokens: int
    max_length: int

    def prompt(self, question: Question, messages: list[dict[str, Any]]) -> list[int]:
        """Token ids of the next prompt. Raises ValueError where it cannot be asked."""
        try:
            ids = render_prompt(self.tokenizer, messages, question.tools)
        except RenderError as error:
            raise ValueError(str(error)) from error
        if len(ids) + self.max_new_tokens > self.max_length:
            raise ValueError(
                f"too long: {len(ids)} prompt tokens and {self.max_new_tokens} new ones exceed the target's "
                f"{self.max_length} positions"
            )
        return ids

    def run(
        self, asked: list[Question], proposers: dict[str, Proposer | None], shown: str, file: IO[str], rejects: Rejects
    ) -> dict[str, list[Generation]]:
        """Decodes every turn of every question by everyone, plainly too.

        Args:
            proposers: by contender's name; `PLAIN` must not be among them.
            shown: the contender whose answers go to `file`, one JSON line a turn, and whose tau the progress bar shows.
            rejects: receives turns that cannot be asked; the conversation ends there.

        Returns:
            One generation per turn for each name, `PLAIN` first; the same turns in the same order for all.
        """
        everyone: dict[str, Proposer | None] = {PLAIN: None} | proposers
        names = list(everyone)
        results: dict[str, list[Generation]] = {name: [] for name in names}
        progress = tqdm(asked, desc="decode", unit="prompt")
        for question in progress:
            history: list[dict[str, Any]] = []
            for number, messages in enumerate(question.turns):
                history += messages
                try:
                    prompt = self.prompt(question, history)
                except ValueError as error:
                    rejects.add(question.source, question.line, str(error), {"id": question.id, "turn": number})
                    break
                if not results[PLAIN]:  # the first forwards of a process are slow; they are nobody's
                    for proposer in everyone.values():
                        decode(self.target, proposer, prompt, self.stop_ids, min(16, self.max_new_tokens))
                first = len(results[PLAIN]) % len(names)
                turn = {
                    name: decode(self.target, everyone[name], prompt, self.stop_ids, self.max_new_tokens)
                    for name in names[first:] + names[:first]
                }
                for name in names:
                    turn[name].conversation_id = question.id
                    results[name].append(turn[name])
                file.write(json.dumps(_record(question, number, turn[shown])) + "\n")
                file.flush()
                history.append(answer_message(self.tokenizer, turn[PLAIN].token_ids))
            if (value := tau(results[shown])) is not None:
                progress.set_postfix(tau=f"{value:.2f}")
        if not results[PLAIN]:
            raise UserError(f"eval.prompts: not one of {len(asked)} prompts could be asked; {rejects.summary()}")
        return results


def _record(question: Question, turn: int, generation: Generation) -> dict[str, Any]:
    return {
        "id": question.id,
        "turn": turn,
        "prompt_token_ids": generation.prompt_token_ids,
        "token_ids": generation.token_ids,
        "accepted_per_round": generation.accepted_per_round,
    }
