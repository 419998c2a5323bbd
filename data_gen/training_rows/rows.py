"""Conversations as training rows: token ids and which of them the target wrote.

Every answer is a pair (prompt tokens, output tokens). A prompt that begins with the row so far continues the row; any
other prompt starts a new row. So a conversation is one row if the template keeps its history as it was written. It is
one row per turn if not: the template strips earlier thoughts, or retokenised text differs from what was generated.

    turn 1   prompt  U U H            output  a a a E             U user, H header of the assistant's turn,
    turn 2   prompt  U U H a a a E U U H      output  b b E       a b answers, E the stop token
    row              U U H a a a E U U H b b E
    supervised       . . . * * * * . . . * * *                    spans (3, 7) and (10, 13)

Sources of the pairs:
    regenerated files     the stored token ids; pictures of the messages take their placeholders' places
    templates             the conversation rendered up to the answer, with the header of the next turn, must be a
                          prefix, token by token, of the conversation rendered with the answer; the rest is the answer
    generation tags       the tokens of this rest inside the template's `{% generation %}`. Tags around the header or an
                          empty thought (SmolLM3) mark tokens that the prompt brings: no target writes them
    prompts that end      (R1) with `<think>`, if the template does not write thoughts back: the answer's text behind
                          its own `<think>`, or its reasoning_content and content; without a thought it is rejected
The stop token belongs to its turn, also where it opens the next one (GLM's `<|user|>`; `models.turn_ends`). Text that a
template writes behind it (a line break) does not.
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.training_rows.overlap import training_check
from draftsmith.models.chat import (
    FINGERPRINT_COVERS,
    RenderError,
    as_text,
    has_generation_tags,
    reads_pictures,
    render,
    render_marked,
    render_prompt,
    tokenizer_fingerprint,
    with_pictures,
)
from draftsmith.models.prompt import Insert, Prompt
from draftsmith.models.target_files import TargetFiles, bounded_rows, longest_row
from draftsmith.models.turn_ends import is_blank, turn_ends
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.launch import rank
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.command.stages import made_by, require_files
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.pictures import with_named_pictures
from draftsmith.recipes.prompts.records import Conversation, is_regenerated, stored_conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.prompts.sources import check_source, records
from draftsmith.recipes.schema import Recipe

Span = tuple[int, int]  # half-open
_EMPTY_THOUGHT = re.compile(r"\s*<think>\s*</think>")
MAX_TOKEN = 1 << 31  # larger than every token id


class Turn(NamedTuple):
    """An answer."""

    prompt: Prompt
    output: list[int]
    remark: str = ""  # where the template's generation tags and its generation prompt disagree


@dataclass(frozen=True)
class TrainingRow:
    """One sequence of tokens. Several rows of one conversation share its id."""

    id: str
    input_ids: list[int]
    spans: list[Span]  # what the target wrote: one per assistant turn, its stop token included
    inserts: tuple[Insert, ...] = ()  # embeddings that replace some tokens
    remarks: tuple[str, ...] = ()  # of the turns

    @property
    def prompt(self) -> Prompt:
        """The whole row as the target's input."""
        return Prompt(self.input_ids, self.inserts)


def usable_rows(recipe: Recipe, files: TargetFiles, rejects: Rejects) -> list[TrainingRow]:
    """A recipe's rows for training, validation and capture, in file order. Raises UserError if there are none."""
    require_files(made_by("regenerate", recipe))
    # What `list` finds, rank_vocab has reported.
    check = training_check(recipe) if recipe.data.contamination == "remove" else None
    if rank() == 0 and (note := bounded_rows(recipe, files)):
        print(note)
    leave_out, longest = check.look if check else None, longest_row(recipe, files)
    rows = training_rows(recipe.conversations_path, files.tokenizer, longest, rejects, leave_out)
    # Every picture is opened, for its size and content, which may take a while.
    return [row for row in Bar(rows, desc="reading", unit="row", leave=False, disable=rank() > 0) if is_usable(row)]


def is_usable(row: TrainingRow) -> bool:
    """Whether it has an answer of two tokens or more."""
    return any(end - start >= 2 for start, end in row.spans)


def training_rows(
    path: str | Path,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
    rejects: Rejects,
    leave_out: Callable[[Conversation], str | None] | None = None,
) -> Iterator[TrainingRow]:
    """The rows of a conversations file, in its order: regenerated conversations, those with their own answers in any
    format of `recipes.prompts`, or both.

    Raises UserError for a missing file, another tokenizer's tokens, or a file without a usable row.

    Args:
        max_length: longer rows go to `rejects`.
        leave_out: called for every readable conversation; gives the reason to leave it out.
    """
    path = Path(path)
    if problem := check_source(str(path)):
        raise UserError(f"data.conversations: {problem}")
    fingerprint, usable = tokenizer_fingerprint(tokenizer), 0
    for line, record in records(str(path), rejects):
        try:
            if regenerated := is_regenerated(record):
                _check_fingerprint(record, fingerprint, path, line)
            conversation = stored_conversation(record, path, line)
            turns = _stored_turns(tokenizer, record, conversation) if regenerated else turns_of(tokenizer, conversation)
            if leave_out and (reason := leave_out(conversation)):
                raise ValueError(reason)
        except (RenderError, ValueError) as error:
            rejects.add(str(path), line, str(error), record)
            continue
        for row in rows_of(conversation.id, turns):
            if len(row.input_ids) > max_length:
                reason = f"longer than data.max_length: {len(row.input_ids)} tokens, the limit is {max_length}"
                rejects.add(str(path), line, reason, record)
                continue
            usable += 1
            yield row
    if not usable:
        raise UserError(f"data.conversations: {path} contains no usable training rows; {rejects.summary()}")


def rows_of(conversation_id: str, turns: Sequence[Turn]) -> Iterator[TrainingRow]:
    """Joins turns to rows: a prompt that begins with the row so far continues the row."""
    row, spans, remarks = Prompt(()), list[Span](), list[str]()
    for prompt, output, remark in turns:
        if spans and not prompt.begins_with(row):
            yield TrainingRow(conversation_id, list(row), spans, row.inserts, tuple(remarks))
            spans, remarks = [], []
        row = prompt.then(output)
        spans = [*spans, (len(prompt), len(row))]
        remarks += [remark] if remark else []
    if spans:
        yield TrainingRow(conversation_id, list(row), spans, row.inserts, tuple(remarks))


def _check_fingerprint(record: dict[str, Any], fingerprint: str, path: Path, line: int) -> None:
    generator = record.get("generator", {})
    written = generator.get("tokenizer_fingerprint", fingerprint) if isinstance(generator, dict) else None
    if not isinstance(written, str):
        raise ValueError("wrong type: `generator` must be an object with a tokenizer_fingerprint")
    if written != fingerprint:
        raise UserError(
            f"{path}:{line}: its tokens were made by another tokenizer (fingerprint {written[:16]}, target "
            f"{generator.get('target')}) than the recipe's target has ({fingerprint[:16]}): a fingerprint covers "
            f"{FINGERPRINT_COVERS}. Regenerate for this target, or use the target settings that they were made with"
        )


def _stored_turns(tokenizer: PreTrainedTokenizerBase, record: dict[str, Any], conversation: Conversation) -> list[Turn]:
    turns = []
    for number, turn in enumerate(record["turns"]):
        for key in ("prompt_token_ids", "output_token_ids"):
            tokens = turn.get(key) if isinstance(turn, dict) else None
            whole = isinstance(tokens, list) and all(type(token) is int and 0 <= token < MAX_TOKEN for token in tokens)
            if not tokens or not whole:
                raise ValueError(f"wrong type: turn {number} must have non-empty lists of prompt and output token ids")
        prompt = with_pictures(tokenizer, turn["prompt_token_ids"], conversation.messages)
        turns.append(Turn(prompt, turn["output_token_ids"]))
    return turns


def turns_of(tokenizer: PreTrainedTokenizerBase, conversation: Conversation) -> list[Turn]:
    """`turns_of_messages` of a conversation."""
    if reads_pictures(tokenizer):
        messages = with_named_pictures(conversation, _no_place).messages
    else:
        messages = as_text(conversation.messages, conversation.images)
    return turns_of_messages(tokenizer, messages, conversation.meta.get("tools"))


def _no_place(content: bytes) -> str:
    raise ValueError("picture without a file: `draftsmith regenerate` and `draftsmith reprompt` write it into one")


def turns_of_messages(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: list[Any] | None = None
) -> list[Turn]:
    """Prompt and output of every assistant message, by the tokenizer's chat template. Raises RenderError if it refuses
    the messages, and ValueError, "kind: detail", if it does not show which tokens the assistant writes."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("no assistant turn: nothing to train on")
    turns = []
    for number, i in enumerate(answers, start=1):
        text, start, end, remark = _answer(tokenizer, messages[: i + 1], tools, number)
        following = "tool" if messages[i].get("tool_calls") else "user"
        if i + 1 < len(messages):
            following = messages[i + 1]["role"]
        output = _with_stop(tokenizer, text, start, end, following, number)
        turns.append(Turn(text.until(start), output, remark))
    return turns


def _answer(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[dict[str, Any]], tools: list[Any] | None, number: int
) -> tuple[Prompt, int, int, str]:
    """(all tokens, start, end, remark) of the last message, assistant turn `number`, without what ends it."""
    tagged = has_generation_tags(tokenizer)
    try:
        prompt = render_prompt(tokenizer, messages[:-1], tools)
    except RenderError:
        if messages[1:] or not tagged:
            raise
        prompt = Prompt(())  # of a greeting, which nobody asks for
    ids, mask = render_marked(tokenizer, messages, tools) if tagged else (render(tokenizer, messages, tools), [])
    at = len(prompt)  # tokens that the prompt brings
    if not ids.begins_with(prompt):
        at = next((i for i, (x, y) in enumerate(zip(prompt, ids, strict=False)) if x != y), min(len(prompt), len(ids)))
    if at < len(prompt) and str(tokenizer.decode(prompt[-8:])).rstrip().endswith("<think>"):
        written = _with_thought(tokenizer, messages[-1], ids, number)
        return prompt.then(written), len(prompt), len(prompt) + len(written), ""
    if tagged:
        return ids, *_marked(mask, at, number, whole=at == len(prompt))
    if at < len(prompt):
        raise ValueError(
            f"prompt is no prefix: assistant turn {number} rendered with its answer differs from its prompt at token "
            f"{at}: {tokenizer.decode(ids[at : at + 4])!r} instead of {tokenizer.decode(prompt[at : at + 4])!r}"
        )
    if at == len(ids):
        raise ValueError(f"empty mask: the template writes no token of assistant turn {number}")
    empty = _EMPTY_THOUGHT.match(str(tokenizer.decode(ids[at : at + 24]))) and "<think>" not in str(messages[-1])
    return ids, at, len(ids), "the template writes an empty thought, which the generation prompt lacks" if empty else ""


def _marked(mask: Sequence[bool], at: int, number: int, whole: bool) -> tuple[int, int, str]:
    """(start, end, remark) of the tokens that generation tags mark behind the first `at` tokens, which the prompt
    brings; `whole`: the prompt has no other tokens."""
    starts = [i for i in range(at, len(mask)) if mask[i] and (i == at or not mask[i - 1])]
    if not starts:
        raise ValueError(f"empty mask: the template marks no token of assistant turn {number}")
    if len(starts) > 1:  # or the tokenizer cannot map characters to tokens
        raise ValueError(f"mask and turns differ: the template marks {len(starts)} spans in assistant turn {number}")
    start, remark = starts[0], ""
    if not whole:
        remark = "the template writes another header before an answer than in the generation prompt"
    elif start > at:
        remark = "generation tags leave out tokens between the generation prompt and the answer"
    elif at and mask[at - 1]:
        remark = "generation tags also mark what the generation prompt brings"
    return start, start + sum(mask[at:]), remark


def _with_thought(tokenizer: PreTrainedTokenizerBase, message: dict[str, Any], ids: Prompt, number: int) -> list[int]:
    """The answer's tokens behind a prompt that ends with `<think>`, if the template, which gives `ids`, writes no
    thought back."""
    content, reasoning = message.get("content") or "", message.get("reasoning_content")
    if reasoning:
        content = f"{reasoning.strip()}\n</think>\n\n{content}"
    elif "</think>" not in content:
        raise ValueError(
            f"no thought: the prompt of assistant turn {number} opens one with <think>, its answer has none"
        )
    written = tokenizer(content.removeprefix("<think>").lstrip(), add_special_tokens=False)["input_ids"]
    # The template's end of a turn.
    last = next((token for token in reversed(list(ids)) if not is_blank(tokenizer, [token])), None)
    return [*written, last] if last in _special_tokens(tokenizer) else written


def _with_stop(
    tokenizer: PreTrainedTokenizerBase, ids: Prompt, start: int, end: int, following: str, number: int
) -> list[int]:
    """The answer in ids[start:end] up to the stop token, which may stand behind it, or which the next message, of the
    role `following`, brings. Raises ValueError if text follows the first stop token."""
    ends = turn_ends(tokenizer)
    stop = next((i for i in range(start, len(ids)) if ids[i] in ends.stops), None)
    if stop is not None and stop < end and not is_blank(tokenizer, ids[stop + 1 : end], skip_special_tokens=True):
        name = tokenizer.convert_ids_to_tokens(ids[stop])
        raise ValueError(f"stop token inside: assistant turn {number} continues after {name!r}")
    if stop is not None and is_blank(tokenizer, ids[end:stop]):
        return ids[start : stop + 1]
    special = _special_tokens(tokenizer)
    last = next((i for i in reversed(range(start, end)) if ids[i] in special), None)
    if last is not None and is_blank(tokenizer, ids[last + 1 : end]):  # another token ends the turn
        return ids[start : last + 1]
    if end < len(ids) and ids[end] in special:
        return ids[start : end + 1]
    if behind := ends.behind.get(following):
        return [*(ids[start:] if is_blank(tokenizer, ids[end:]) else ids[start:end]), *behind]
    return ids[start:end]


def _special_tokens(tokenizer: PreTrainedTokenizerBase) -> set[int]:
    return {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} | turn_ends(tokenizer).stops


# Showing rows.


def show(command: Command) -> None:
    """Prints rows and a summary, behind data_gen/conversations.py."""
    recipe, path = command.recipe, command.recipe.conversations_path
    if command.plan:
        PlanLines().reads(made_by("regenerate", recipe))
        print(f"prints {command.show} rows and a summary, writes nothing")
        return
    files = TargetFiles(recipe.target)
    tokenizer = files.tokenizer
    rejects, remarks, stops = Rejects(), Counter[str](), turn_ends(tokenizer).stops
    ids, rows, answers, tokens, supervised = set(), 0, 0, 0, 0
    for row in Bar(training_rows(path, tokenizer, longest_row(recipe, files), rejects), unit="row", leave=False):
        if rows < command.show:
            Bar.write(f"--- {row.id}: {len(row.input_ids)} tokens, spans {row.spans}\n{marked(tokenizer, row)}\n")
        rows += 1
        ids.add(row.id)
        tokens += len(row.input_ids)
        supervised += sum(end - start for start, end in row.spans)
        answers += len(row.spans)
        remarks.update(row.remarks)
        remarks["no stop token ends them"] += sum(row.input_ids[end - 1] not in stops for _, end in row.spans)
    for remark, count in remarks.items():
        if count:
            print(f"note: {count:,} of {answers:,} answers: {remark}")
    print(
        f"{path}: {rows:,} rows of {len(ids):,} conversations, {tokens:,} tokens, "
        f"{supervised:,} supervised ({supervised / tokens:.1%}); {rejects.summary()}"
    )


def marked(tokenizer: PreTrainedTokenizerBase, row: TrainingRow, colour: bool | None = None) -> str:
    """The row's text, supervised tokens green on a terminal, in [[double brackets]] elsewhere."""
    before, after = ("\x1b[32m", "\x1b[0m") if (sys.stdout.isatty() if colour is None else colour) else ("[[", "]]")
    text, at = "", 0
    for start, end in row.spans:
        other, answer = tokenizer.decode(row.input_ids[at:start]), tokenizer.decode(row.input_ids[start:end])
        text, at = f"{text}{other}{before}{answer}{after}", end
    return f"{text}{tokenizer.decode(row.input_ids[at:])}"
