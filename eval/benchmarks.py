"""Runs contenders over evaluation prompts: conversations from any file that `recipes.prompts` reads, turn by turn.

The answers that a file may hold are dropped: the target answers itself. A later turn's prompt holds the target's own
earlier answers, from plain decoding, so that all contenders are asked exactly the same. Every prompt is decoded by
everyone in turn, in an order that rotates from prompt to prompt: a machine that grows slower slows all alike.
"""

import json
from collections.abc import Collection, Hashable
from dataclasses import dataclass
from typing import IO, Any

from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from draftsmith.eval.decode import Generation, decode
from draftsmith.eval.generation_log import record_of, token_texts
from draftsmith.models.chat import RenderError, answer_message, as_text, decode_answer, render_prompt
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.models.target import Target
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompt_sources import short_names
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
    benchmark: str
    category: str | None


def load_questions(
    sources: str | list[str], rejects: Rejects, limit: int | None, first_turns_only: bool = False
) -> list[Question]:
    """The first `limit` conversations of each source, but for those that are not text only: they go to `rejects`.

    Raises:
        UserError: nothing usable.
    """
    names = [sources] if isinstance(sources, str) else sources
    found, shown = [], short_names(names)
    for source in names:  # one by one: benchmarks number their questions, all from 0
        for conversation in read_conversations(source, rejects, limit):
            try:
                as_text(conversation.messages, conversation.images)
            except RenderError as error:
                record = {"id": conversation.id, "messages": conversation.messages, "images": conversation.images}
                rejects.add(conversation.source, conversation.line, str(error), record)
            else:
                found.append(_question(conversation, shown[source], first_turns_only))
    if not found:
        raise UserError(f"eval.prompts: nothing usable in {sources}; {rejects.summary()}")
    return found


def _question(conversation: Conversation, source_name: str, first_turn_only: bool) -> Question:
    turns = list(questions(conversation.messages))
    benchmark, category = conversation.meta.get("benchmark"), conversation.meta.get("category")
    if benchmark == short_names([conversation.source])[conversation.source]:
        benchmark = source_name  # another source has the same short name
    return Question(
        conversation.id,
        conversation.source,
        conversation.line,
        turns[:1] if first_turn_only else turns,
        conversation.meta.get("tools"),
        str(benchmark or source_name),
        None if category is None else str(category),
    )


@dataclass(frozen=True)
class Bench:
    """What all contenders share.

    Attributes:
        max_length: tokens of prompt and answer that the target's positions allow.
        sampling: how everyone draws; the draws of an answer hang on `seed`, the turn and the contender alone.
    """

    target: Target
    tokenizer: PreTrainedTokenizerBase
    stop_ids: Collection[int]
    max_new_tokens: int
    max_length: int
    sampling: Sampling = GREEDY
    seed: int = 0

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

    def _answer(
        self, proposer: Proposer | None, prompt: list[int], key: Hashable, max_new_tokens: int | None = None
    ) -> Generation:
        draws = SeededDraws(self.seed, key)
        budget = max_new_tokens or self.max_new_tokens
        return decode(self.target, proposer, prompt, self.stop_ids, budget, self.sampling, draws)

    def run(
        self, asked: list[Question], proposers: dict[str, Proposer | None], shown: str, file: IO[str], rejects: Rejects
    ) -> dict[str, list[Generation]]:
        """Decodes every turn of every question by everyone, plainly too.

        Args:
            proposers: by contender's name; `PLAIN` must not be among them.
            shown: the main contender: the progress bar shows its tau, and its lines hold what the report needs.
            file: receives everyone's answers (`eval.generation_log`).
            rejects: receives turns that cannot be asked; the conversation ends there.

        Returns:
            One generation per turn for each name, `PLAIN` first; the same turns in the same order for all.
        """
        everyone: dict[str, Proposer | None] = {PLAIN: None} | proposers
        names = list(everyone)
        results: dict[str, list[Generation]] = {name: [] for name in names}
        tokens = rounds = 0  # of `shown`
        progress = tqdm(asked, desc="decode", unit="prompt")
        for question in progress:
            history: list[dict[str, Any]] = []
            for number, messages in enumerate(question.turns, start=1):
                history += messages
                try:
                    prompt = self.prompt(question, history)
                except ValueError as error:
                    rejects.add(question.source, question.line, str(error), {"id": question.id, "turn": number})
                    break
                if not results[PLAIN]:  # the first forwards of a process are slow; they are nobody's
                    for proposer in everyone.values():
                        self._answer(proposer, prompt, "warm-up", min(16, self.max_new_tokens))
                first = len(results[PLAIN]) % len(names)
                turn = {
                    name: self._answer(everyone[name], prompt, (question.benchmark, question.id, number, name))
                    for name in names[first:] + names[:first]
                }
                for name in names:
                    generation = turn[name]
                    generation.benchmark, generation.category = question.benchmark, question.category
                    generation.conversation_id, generation.turn = question.id, number
                    results[name].append(generation)
                    texts = self._shown(generation, messages) if name == shown else None
                    text = decode_answer(self.tokenizer, generation.token_ids)
                    file.write(json.dumps(record_of(generation, name, text, texts)) + "\n")
                file.flush()
                tokens += len(turn[shown].token_ids) - 1
                rounds += turn[shown].rounds
                history.append(answer_message(self.tokenizer, turn[PLAIN].token_ids))
            if rounds:
                progress.set_postfix(tau=f"{tokens / rounds:.2f}")
        if not results[PLAIN]:
            raise UserError(f"eval.prompts: not one of {len(asked)} prompts could be asked; {rejects.summary()}")
        return results

    def _shown(self, generation: Generation, messages: list[dict[str, Any]]) -> dict[str, Any]:
        """What the report shows of an answer: the user's words before it, and its tokens' texts."""
        asked = [message for message in messages if message["role"] == "user"][-1:]
        return {
            "question": as_text(asked)[0]["content"],
            "token_texts": token_texts(self.tokenizer, generation.token_ids),
        }
