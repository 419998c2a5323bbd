"""Finds the tokens that a chat template writes around turns, by rendering conversations.

A drafter that lacks a token ends its round at every occurrence. There are two kinds:

    control tokens      added tokens anywhere in a rendered conversation: <|im_start|>, <think>, <tool_call>. Engines
                        expect shared vocabularies to hold them, even those of other turns
    in the answer       the template's tokens inside the assistant's turn, which the target writes into its answers:
                        control tokens of thoughts and calls, "\\n\\n" behind an empty thought, `final` in Harmony

Ordinary words elsewhere (a default system prompt, "USER:") belong to neither. A ranking by foreign text always holds
both kinds; a ranking by the target's own answers holds the second.
"""

from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.training_rows.rows import turns_of_messages
from draftsmith.models.chat import RenderError, render, render_prompt
from draftsmith.models.turn_ends import ASKED, CALLED, RESULT
from draftsmith.recipes.errors import UserError

# Answers without a common token: a token in every rendering comes from the template.
ANSWERS = ("Yes", "12", "a b")
_TOOL = {
    "type": "function",
    "function": {
        "name": "look",
        "description": "Looks.",
        "parameters": {"type": "object", "properties": {"at": {"type": "string", "description": "What."}}},
    },
}


def template_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(target ids of both kinds, of the second), ascending. Raises UserError if the template takes no conversation."""
    control = set(tokenizer.added_tokens_decoder) | set(tokenizer.all_special_ids)
    anywhere, in_answers = set[int](), set[int]()
    rendered, refused = 0, ""
    drafts = list(zip(*map(_conversations, ANSWERS), strict=True))
    for tools, conversations in zip([None, None, None, None, [_TOOL]], drafts, strict=True):
        try:
            for messages in conversations:
                anywhere |= control & set(render(tokenizer, messages, tools))
                anywhere |= control & set(render_prompt(tokenizer, messages[:-1], tools))
            rendered += 1
        except RenderError as error:  # many templates know no system turn, or no tools
            refused = str(error)
            continue
        try:
            answers = [
                {token for turn in turns_of_messages(tokenizer, messages, tools) for token in turn.output}
                for messages in conversations
            ]
        except (RenderError, ValueError):  # an answer without a thought where the prompt opens one, and the like
            continue
        always = set.intersection(*answers)
        in_answers |= control & always if tools else always  # other tokens of a call are the tool's
    if not rendered:
        raise UserError(f"target.model: its chat template takes no conversation of a question and an answer: {refused}")
    return tuple(sorted(anywhere | in_answers)), tuple(sorted(in_answers))


def _conversations(text: str) -> list[list[dict[str, Any]]]:
    """Conversations with `text` as every answer and thought; the last one calls a tool."""
    answer = {"role": "assistant", "content": text}
    return [
        [ASKED, answer],
        [ASKED, answer, ASKED, answer],
        [{"role": "system", "content": "Be"}, ASKED, answer],
        [ASKED, answer | {"reasoning_content": text}],
        [ASKED, CALLED, RESULT, answer],
    ]
