"""Conversations under way: the next prompt of each, and its record after the last answer."""

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.answers.generators import Asked, GeneratedAnswer
from draftsmith.data_gen.server_client.client import ChatPrompt
from draftsmith.data_gen.server_client.generator import Unanswered
from draftsmith.models.chat import RenderError, answer_message, as_text, reads_pictures, render_prompt
from draftsmith.models.prompt import Prompt
from draftsmith.recipes.prompts.picture_parts import data_url
from draftsmith.recipes.prompts.pictures import with_named_pictures
from draftsmith.recipes.prompts.prompt_reader import asked_digest, questions
from draftsmith.recipes.prompts.records import Conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.prompts.sources import StorePicture


@dataclass
class _Progress:
    """One conversation under way."""

    conversation: Conversation
    pending: deque[list[dict[str, Any]]]  # for each answer yet to be asked for, the messages before it
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[dict[str, Any]] = field(default_factory=list)
    answered: int = 0  # messages up to the last answer
    prompt: Prompt = field(default_factory=lambda: Prompt(()))  # of the current answer


class OpenConversations:
    """Makes prompts from conversations, turn by turn, and finished records from the answers.

    A record names its pictures as `with_named_pictures` does; `store` gives a path to those without a file.
    """

    def __init__(
        self,
        conversations: list[Conversation],
        tokenizer: PreTrainedTokenizerBase,
        max_length: int,
        rejects: Rejects,
        store: StorePicture = data_url,
    ):
        self.rejected = 0  # conversations that could not be asked
        self.failed: dict[str, str] = {}  # conversation id -> why this run has no answer
        self.counts: Counter[str] = Counter()  # of answers: answers, tokens, cut, retokenised; user turns: unasked
        self._fresh = iter(conversations)
        self._continued: deque[_Progress] = deque()  # the next prompt is ready
        self._open: dict[str, _Progress] = {}  # waiting for an answer
        self._tokenizer, self._max_length, self._rejects, self._store = tokenizer, max_length, rejects, store

    def prompts(self) -> Iterator[Asked | None]:
        """Prompts of open conversations first, which keeps few open. None: every next prompt needs an answer."""
        while True:
            progress = self._continued.popleft() if self._continued else self._next_fresh()
            if progress is not None:
                self._open[progress.conversation.id] = progress
                yield (progress.conversation.id, len(progress.turns)), progress.prompt
            elif self._open:
                yield None
            else:
                return

    def take(self, answer: GeneratedAnswer) -> dict[str, Any] | None:
        """Adds an answer to its conversation. Returns the conversation's record after its last turn, else None."""
        (conversation_id, _), output_ids, finish_reason, retokenised = answer
        progress = self._open.pop(conversation_id)
        progress.messages.append(answer_message(self._tokenizer, output_ids))
        progress.answered = len(progress.messages)
        turn = {
            "prompt_token_ids": list(progress.prompt),
            "output_token_ids": output_ids,
            "finish_reason": finish_reason,
        }
        progress.turns.append(turn | {"retokenised": True} if retokenised else turn)
        cut = finish_reason == "length"
        self.counts.update(answers=1, tokens=len(output_ids), cut=cut, retokenised=retokenised)
        if cut or not progress.pending:
            return self._record(progress, len(progress.pending), "the answer before was cut")
        try:
            self._prepare(progress)
        except (RenderError, ValueError) as error:
            return self._record(progress, len(progress.pending), str(error))
        self._continued.append(progress)
        return None

    def give_up(self, unanswered: Unanswered) -> dict[str, Any] | None:
        """Ends a conversation early. Returns its record if earlier turns were answered and this one was refused."""
        conversation_id, turn = unanswered.key
        progress = self._open.pop(conversation_id)
        if not unanswered.refused:
            self.failed[conversation_id] = unanswered.reason
            return None
        if turn == 0:
            self._reject(progress.conversation, unanswered.reason)
            return None
        del progress.messages[progress.answered :]  # the question, with the calls and results before it
        return self._record(progress, len(progress.pending) + 1, unanswered.reason)

    def _next_fresh(self) -> _Progress | None:
        """The next conversation that can be asked; rejects the ones before it."""
        for conversation in self._fresh:
            try:
                if reads_pictures(self._tokenizer):
                    messages = with_named_pictures(conversation, self._store).messages
                else:
                    messages = conversation.messages
                    as_text(messages, conversation.images)  # refuses pictures, in whatever turn
                progress = _Progress(conversation, deque(questions(messages)))
                self._prepare(progress)
                return progress
            except (RenderError, ValueError) as error:
                self._reject(conversation, str(error))
        return None

    def _reject(self, conversation: Conversation, problem: str) -> None:
        self._rejects.add_conversation(conversation, problem)
        self.rejected += 1

    def _prepare(self, progress: _Progress) -> None:
        """Renders the prompt of the next answer. Raises RenderError or ValueError, leaving `progress` unchanged."""
        messages, tools = [*progress.messages, *progress.pending[0]], progress.conversation.meta.get("tools")
        prompt = render_prompt(self._tokenizer, messages, tools)
        if prompt.inserts:  # servers read the messages
            prompt = ChatPrompt(prompt.token_ids, prompt.inserts, messages, tools or ())
        if len(prompt) >= self._max_length:
            raise ValueError(
                f"longer than data.max_length: a prompt of {len(prompt)} tokens, the limit is {self._max_length}"
            )
        progress.messages, progress.prompt = messages, prompt
        progress.pending.popleft()

    def _record(self, progress: _Progress, unasked: int, reason: str) -> dict[str, Any]:
        self.counts["unasked"] += unasked
        conversation = progress.conversation
        record: dict[str, Any] = {"id": conversation.id, "messages": progress.messages, "turns": progress.turns}
        record["asked_digest"] = asked_digest(conversation)
        if unasked:
            record |= {"unasked_turns": unasked, "unasked_reason": reason}
        return record | {"meta": conversation.meta}
