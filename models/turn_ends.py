"""Where the target's answers end: its stop tokens, and what its chat template writes behind an answer.

    template with an end of turn      <user> Go <assistant> Yes <end>          the target writes <end>
    template without one (GLM)        <user> Go <assistant> Yes <user> ...     it writes the next role's marker, which
                                                                               its generation config names as a stop

Both are found by rendering two conversations that differ in the last answer only.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from transformers import PreTrainedTokenizerBase

from draftsmith.models.chat import RenderError, is_harmony, named_stop_ids, render
from draftsmith.recipes.errors import UserError, quoted

if TYPE_CHECKING:
    from draftsmith.models.target_files import TargetFiles

# Conversations for probes of a template; the two answers share no token.
ASKED: dict[str, Any] = {"role": "user", "content": "Go"}
ANSWERS = ({"role": "assistant", "content": "Yes"}, {"role": "assistant", "content": "12"})
_CALL = {"type": "function", "id": "call00001", "function": {"name": "look", "arguments": {"at": "it"}}}
CALLED = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
RESULT = {"role": "tool", "name": "look", "tool_call_id": "call00001", "content": "it"}

# Settings of generation configs that change what a target writes and that decoding does not apply, with neutral values.
_NOT_APPLIED = {
    **{"repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0, "num_beams": 1},
    **{"min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "min_new_tokens": 0},
    **{"suppress_tokens": [], "begin_suppress_tokens": [], "bad_words_ids": [], "sequence_bias": {}},
}


class TurnEnds(NamedTuple):
    """How answers end."""

    stops: frozenset[int]  # tokens that end an answer
    usual: int | None  # the one that the template writes behind an answer; None: none
    unnamed: int | None  # the same, where neither generation config nor tokenizer names it
    behind: dict[str, tuple[int, ...]]  # what the target writes behind an answer, by the next message's role; the stop
    # token is last. Empty for templates that write it themselves, and for those whose stop token is unknown


def stop_ids(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Tokens that end an answer, ascending: those of the generation config, the tokenizer and the template's turns."""
    if not (stops := turn_ends(tokenizer).stops):
        raise UserError(
            "target.model: neither generation_config.json nor the tokenizer names a stop token (eos_token_id), and the "
            "chat template ends no turn with a special token; answers would never end"
        )
    return tuple(sorted(stops))


def turn_ends(tokenizer: PreTrainedTokenizerBase) -> TurnEnds:
    """How answers end by the tokenizer's chat template. Kept with the tokenizer."""
    named = named_stop_ids(tokenizer)
    key = tokenizer.chat_template, named
    kept = getattr(tokenizer, "turn_ends", None)
    if kept is None or kept[0] != key:
        kept = key, _turn_ends(tokenizer, named)
        tokenizer.turn_ends = kept  # type: ignore[attr-defined]
    return kept[1]


def _turn_ends(tokenizer: PreTrainedTokenizerBase, named: frozenset[int]) -> TurnEnds:
    ending = shown = _shared(tokenizer, -1, *([ASKED, answer] for answer in ANSWERS))
    if is_blank(tokenizer, ending):  # some end turns only between turns
        shown = _shared(tokenizer, -1, *([ASKED, answer, ASKED] for answer in ANSWERS))
    # What a user turn begins with: the role's marker ends no turn before it.
    opening = _shared(tokenizer, 1, *([{"role": "user", "content": text}] for text in ("Go", "12")))
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special} - set(opening)
    first = next((i for i in shown if not is_blank(tokenizer, [i])), None)
    # Harmony's <|end|> ends a channel.
    found = first in special and not named.intersection(shown) and not is_harmony(tokenizer)
    stops = named | {first} if found and first is not None else named
    behind: dict[str, tuple[int, ...]] = {}
    if not stops.intersection(ending):
        for role, messages in (("user", [ASKED, ANSWERS[0], ASKED]), ("tool", [ASKED, CALLED, RESULT])):
            behind[role] = _until_stop(tokenizer, messages, stops)
    usual = next((i for i in (*ending, *behind.get("user", ())) if i in stops), None)
    return TurnEnds(stops, usual, first if found else None, behind)


def user_turn(tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], int]:
    """(what stands before a user's question, system turn included; the special token that ends the question).

    Raises UserError for templates that show no such place.
    """
    asked = [[{"role": "user", "content": text}] for text in ("Go", "12")]
    opening, behind = _shared(tokenizer, 1, *asked), _shared(tokenizer, -1, *asked)
    special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    ends = next((i for i in behind if not is_blank(tokenizer, [i])), None)
    if not opening or ends not in special:
        raise UserError(
            "data.prompts: self: the chat template does not end a user's turn with a special token, so the target's "
            "own questions would have no end; name a file of prompts"
        )
    return opening, ends


def _shared(tokenizer: PreTrainedTokenizerBase, step: int, *conversations: list[dict[str, Any]]) -> list[int]:
    """What two conversations begin with (`step` 1) or end with (-1), alike; empty where that does not show."""
    try:
        one, other = (list(render(tokenizer, messages))[::step] for messages in conversations)
    except RenderError:
        return []
    return one[: next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)][::step]


def _until_stop(tokenizer: PreTrainedTokenizerBase, messages: list[Any], stops: frozenset[int]) -> tuple[int, ...]:
    """What stands between the last but one message, an answer, and the end of the next stop token but for blanks."""
    try:
        answered, followed = render(tokenizer, messages[:-1]), render(tokenizer, messages)
    except RenderError:
        return ()
    behind = followed[len(answered) :] if followed.begins_with(answered) else []
    at = next((n for n, i in enumerate(behind) if i in stops), None)
    return tuple(behind[: at + 1]) if at is not None and is_blank(tokenizer, behind[:at]) else ()


def is_blank(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], skip_special_tokens: bool = False) -> bool:
    return not str(tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens)).strip()


def answer_notes(files: "TargetFiles") -> list[str]:
    """Sentences about answers that differ from what the target's generation config asks for."""
    tokenizer = files.tokenizer
    config, ends, notes = files.generation_config, turn_ends(tokenizer), []
    if ends.unnamed is not None:
        notes.append(
            f"note: the chat template ends turns with {tokenizer.convert_ids_to_tokens(ends.unnamed)!r}, and neither "
            "generation_config.json nor the tokenizer names it as a stop token (eos_token_id): answers end there. An "
            "engine that serves the target must be told"
        )
    elif ends.usual is None:
        named = ", ".join(repr(tokenizer.convert_ids_to_tokens(i)) for i in sorted(ends.stops))
        notes.append(
            f"note: the chat template ends turns with no stop token (there are {named}): where the target writes none "
            "of its own, answers run to the limit. Name one in the target's generation_config.json (eos_token_id), or "
            "give a template that ends turns with one (target.chat_template)"
        )
    for key, neutral in _NOT_APPLIED.items():
        value = getattr(config, key, None)
        if value is not None and value != neutral:
            notes.append(f"note: the target's generation_config asks for {key} {quoted(value)}; it is not applied")
    return notes
