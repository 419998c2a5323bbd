"""Estimates the tokens of prompts and answers for `--plan`.

A later turn's prompt holds the whole history. Templates that rewrite it (Qwen3 strips earlier thoughts) make a training
row of every turn, so each turn counts as a row of its own.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from draftsmith.models.chat import RenderError, reads_pictures, render_prompt
from draftsmith.recipes.prompts.picture_files import data_url
from draftsmith.recipes.prompts.pictures import with_named_pictures
from draftsmith.recipes.prompts.reader import Conversation, questions

RENDERED_AT_MOST = 500  # conversations; every n-th of more
HUB_SAMPLE = 50  # conversations of a hub dataset that a plan fetches
PLACEHOLDER = "a"  # an answer; some templates refuse an empty one
# JSON of a token id: six digits, a comma, a space. An answer's token also takes about 4 bytes of text.
ID_BYTES, TEXT_BYTES = 8, 4
LINE_BYTES, TURN_BYTES = 700, 100  # keys, digests and the generator of a line; keys of a turn


@dataclass(frozen=True)
class PlannedConversation:
    """Tokens of each turn that has room for an answer."""

    prompts: list[int]
    answers: list[int]
    first_prompt: int  # counted even if it leaves no room
    text_bytes: int  # of messages and meta as JSON

    @property
    def rows(self) -> int:
        return len(self.prompts)

    @property
    def tokens(self) -> int:
        return sum(self.prompts) + sum(self.answers)

    @property
    def file_bytes(self) -> int:
        """Size of its line in a conversations file."""
        turns = ID_BYTES * sum(self.prompts) + (ID_BYTES + TEXT_BYTES) * sum(self.answers) + TURN_BYTES * self.rows
        return LINE_BYTES + self.text_bytes + turns


def sampled(conversations: Sequence[Conversation]) -> Sequence[Conversation]:
    return conversations[:: -(-len(conversations) // RENDERED_AT_MOST) or 1]


def planned(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, answer: float, limit: int
) -> PlannedConversation | None:
    """Sizes if answers have `answer` tokens and rows at most `limit`. None if the conversation cannot be asked."""
    if reads_pictures(tokenizer):
        try:
            conversation = with_named_pictures(conversation, data_url)
        except ValueError:
            return None
    history: list[dict] = []
    prompts, answers, first = [], [], None
    for number, turn in enumerate(questions(conversation.messages)):
        history += turn
        try:
            tokens = len(render_prompt(tokenizer, history, conversation.meta.get("tools")))
        except RenderError:
            break
        first = tokens if first is None else first
        if tokens >= limit:
            break
        prompts.append(min(limit - 1, int(tokens + number * answer)))
        answers.append(int(min(answer, limit - tokens)))
        history.append({"role": "assistant", "content": PLACEHOLDER})
    if first is None:
        return None
    text = json.dumps([conversation.messages, conversation.meta], default=str, ensure_ascii=False)
    return PlannedConversation(prompts, answers, first, len(text.encode()))
