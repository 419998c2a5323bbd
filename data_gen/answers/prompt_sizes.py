"""How much conversations will ask and be answered, before anything is answered: for `--plan`.

A later turn's prompt holds the whole history, and templates that rewrite it (Qwen3 strips earlier thoughts) make a
training row of every turn. So each turn counts for a row of its own, with all answers before it.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

from draftsmith.models.chat import RenderError, render_prompt
from draftsmith.recipes.prompts.reader import Conversation, questions

# Conversations that are rendered; of more, every n-th.
RENDERED_AT_MOST = 500
# Conversations of a hub dataset that are fetched for a plan.
HUB_SAMPLE = 50
# What stands in the place of an answer: a token or two, some templates refuse an empty one.
PLACEHOLDER = "a"
# JSON of a token id: six digits, a comma, a space. The text of an answer's token takes some 4 bytes more.
ID_BYTES, TEXT_BYTES = 8, 4
LINE_BYTES, TURN_BYTES = 700, 100  # keys, digests and the generator of a line; keys of a turn


@dataclass(frozen=True)
class PlannedConversation:
    """Tokens of each turn that has room for an answer; answers are taken to be as long as `answer` allows."""

    prompts: list[int]
    answers: list[int]
    first_prompt: int  # also where it leaves no room
    text_bytes: int  # of its messages and meta as JSON

    @property
    def rows(self) -> int:
        return len(self.prompts)

    @property
    def tokens(self) -> int:
        return sum(self.prompts) + sum(self.answers)

    @property
    def file_bytes(self) -> int:
        """Of its line in a conversations file."""
        turns = ID_BYTES * sum(self.prompts) + (ID_BYTES + TEXT_BYTES) * sum(self.answers) + TURN_BYTES * self.rows
        return LINE_BYTES + self.text_bytes + turns


def sampled(conversations: Sequence[Conversation]) -> Sequence[Conversation]:
    """All of them, or every n-th."""
    return conversations[:: -(-len(conversations) // RENDERED_AT_MOST) or 1]


def planned(
    tokenizer: PreTrainedTokenizerBase, conversation: Conversation, answer: float, limit: int
) -> PlannedConversation | None:
    """A conversation whose answers have `answer` tokens, in rows of at most `limit`; None where it cannot be asked."""
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
            break  # whatever the answers before
        prompts.append(min(limit - 1, int(tokens + number * answer)))
        answers.append(int(min(answer, limit - tokens)))
        history.append({"role": "assistant", "content": PLACEHOLDER})
    if first is None:
        return None
    text = json.dumps([conversation.messages, conversation.meta], default=str, ensure_ascii=False)
    return PlannedConversation(prompts, answers, first, len(text.encode()))
