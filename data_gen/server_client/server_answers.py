"""Checks a server's reply to one prompt and reads its token ids, cut behind the first stop token.

Servers put them into
    choice.token_ids                        vLLM, SGLang: asked for by return_token_ids
    choice.output_token_ids, .output_ids    others
    choice.logprobs.tokens                  vLLM: "token_id:123", asked for by return_tokens_as_token_ids
    choice.logprobs.content[].token         vLLM, in chat completions: the same
    choice.logprobs.content[].id            llama.cpp: asked for by logprobs=1
Without any of these, the target's tokenizer makes ids from the text, which may differ from the generated ones. So it
does for llama.cpp's answers with a character of several tokens, because llama.cpp gives only the last of these ids.
"""

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.models.prompt import Prompt
from draftsmith.models.turn_ends import turn_ends
from draftsmith.recipes.prompts.rejects import is_unicode

_TOKEN_ID = re.compile(r"token_id:(\d{1,9})")
# Two correct detokenisers may differ in blanks at the start and around special tokens, and in the number of U+FFFD for
# bytes that are not UTF-8 (the end of a cut answer).
_LOOSE = re.compile(r"[\s\ufffd]+")


class Failed(Exception):
    """A failed try; another one may succeed, after `pause` seconds if the server asks for that."""

    def __init__(self, reason: str, unreachable: bool = False, busy: bool = False, pause: float = 0.0):
        super().__init__(reason)
        self.unreachable, self.busy, self.pause = unreachable, busy, pause


class Unfinished(Failed):
    """The server did not finish: aborted, or no finish_reason."""


class Refused(Exception):
    """The server will never answer this prompt. The message is "kind: detail"."""


@dataclass
class Completion:
    """One reply, unchecked."""

    text: str = ""
    token_ids: list[Any] | None = None
    skips_ids: bool = False  # token_ids may lack tokens: llama.cpp's logprobs
    prompt_token_ids: list[Any] | None = None
    finish_reason: str | None = None
    stopped_at: int | str | None = None  # the token or text that ended the answer, if the server names it
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    secrets: Collection[str] = ()  # as `one_line` takes them

    @classmethod
    def of(cls, body: Any, secrets: Collection[str] = ()) -> "Completion":
        """Of a completion or a chat completion. Raises Failed for an error or a malformed reply."""
        if isinstance(body, dict) and body.get("error"):
            raise Failed(f"error in the reply: {error_text(body, secrets)}")
        match body:
            case {"choices": [{"message": {**message}} as choice]}:
                text, prompt = message.get("content"), body.get("prompt_token_ids")
                if message.get("reasoning_content") or message.get("reasoning"):
                    raise Failed("the server takes thoughts out of the text: start it without a reasoning parser")
            case {"choices": [{**choice}]}:
                text, prompt = choice.get("text"), choice.get("prompt_token_ids")
            case _:
                raise Failed("the reply has no list of one choice")
        reason = choice.get("finish_reason")
        if not isinstance(text, str | None) or not isinstance(reason, str | None):
            raise Failed("the text or the finish_reason of the reply is not a string")
        ids, skips_ids = _token_ids(choice)
        usage = body["usage"] if isinstance(body.get("usage"), dict) else {}
        counts = {key: value for key, value in usage.items() if type(value) is int}
        stops = (choice.get("stop_reason"), choice.get("matched_stop"))  # vLLM, SGLang
        return cls(
            text=text or "",
            token_ids=ids,
            skips_ids=skips_ids,
            prompt_token_ids=prompt if isinstance(prompt, list) else None,
            finish_reason=reason,
            stopped_at=next((stop for stop in stops if stop is not None), None),
            prompt_tokens=counts.get("prompt_tokens"),
            completion_tokens=counts.get("completion_tokens"),
            secrets=secrets,
        )


@dataclass(frozen=True)
class Vocabulary:
    """The target's token ids and stop tokens."""

    tokenizer: PreTrainedTokenizerBase
    size: int  # rows of the target's embedding
    stop_ids: tuple[int, ...]

    @property
    def usual_stop(self) -> int:
        """The stop token that a server has most likely stripped."""
        written, own = turn_ends(self.tokenizer).usual, self.tokenizer.eos_token_id
        return next(stop for stop in (written, own, self.stop_ids[0]) if stop in self.stop_ids)

    def text(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        options = {"skip_special_tokens": skip_special_tokens, "clean_up_tokenization_spaces": False}
        return str(self.tokenizer.decode(list(ids), **options))


def read_answer(
    said: Completion, prompt: Sequence[int], limit: int, vocabulary: Vocabulary
) -> tuple[list[int], str, bool]:
    """(token ids, "stop" or "length", whether the ids were made from text).

    Raises Failed if the reply contradicts itself, the request (`limit`: its max_tokens) or the vocabulary, and Refused
    if the server ended the answer for another reason.
    """
    if said.finish_reason in (None, "abort", "error"):
        raise Unfinished(f"finish_reason {said.finish_reason}: the server did not finish the answer")
    if said.finish_reason not in ("stop", "length"):
        raise Refused(f"finish_reason {one_line(said.finish_reason, said.secrets)}: the server ended the answer")
    if not is_unicode(said.text):
        raise Failed("the text of the reply holds half a character")
    if said.prompt_token_ids is not None and not _is_prompt(said.prompt_token_ids, Prompt.of(prompt)):
        raise Failed(f"it answers another prompt than the {len(prompt)} tokens that it was sent")
    if said.prompt_tokens is not None and said.prompt_tokens != len(prompt):
        raise Failed(f"it counts {said.prompt_tokens} prompt tokens and was sent {len(prompt)}")
    counted = said.completion_tokens
    if counted is not None and counted > limit:
        raise Failed(f"it counts {counted} tokens where at most {limit} were asked for")
    if not said.text and not said.token_ids and not (said.finish_reason == "stop" and counted == 1):
        raise Failed("the answer is empty")
    retokenised = said.token_ids is None or (said.skips_ids and len(said.token_ids) < (counted or 0))
    if retokenised:
        # A cut answer may end inside a character, which servers show as U+FFFD.
        text = said.text.rstrip("\ufffd") if said.finish_reason == "length" else said.text
        ids = vocabulary.tokenizer(text, add_special_tokens=False)["input_ids"]
    else:
        ids = _given(said, limit, vocabulary)
    end = next((i + 1 for i, token in enumerate(ids) if token in vocabulary.stop_ids), None)
    reason = "stop" if end else said.finish_reason
    if end:
        ids = ids[:end]
    elif reason == "stop":
        ids = [*ids, _stripped_stop(said, len(ids), retokenised, vocabulary)]
    if len(ids) > limit and not retokenised:
        raise Failed(f"{len(ids)} tokens, the stop token included, where at most {limit} were asked for")
    # Retokenised text may have more tokens than the target wrote.
    return (ids[:limit], "length", True) if len(ids) > limit else (ids, reason, retokenised)


def _is_prompt(ids: list[Any], prompt: Prompt) -> bool:
    """Whether a server's ids are the prompt's outside the pictures, for which engines have ids of their own."""
    covered = {column for each in prompt.inserts for column in range(each.first, each.first + each.length)}
    text = [column for column in range(len(prompt)) if column not in covered]
    return len(ids) == len(prompt) and all(ids[column] == prompt[column] for column in text)


def _given(said: Completion, limit: int, vocabulary: Vocabulary) -> list[int]:
    ids: list[Any] = said.token_ids or []
    if wrong := [i for i in ids if type(i) is not int or not 0 <= i < vocabulary.size]:
        shown = one_line(repr(wrong[0]), said.secrets)
        raise Failed(f"token id {shown} is none of the target's {vocabulary.size}: is another model served?")
    if len(ids) > limit:
        raise Failed(f"{len(ids)} tokens where at most {limit} were asked for")
    stripped = said.finish_reason == "stop" and (not ids or ids[-1] not in vocabulary.stop_ids)
    if said.completion_tokens is not None and said.completion_tokens - len(ids) not in ((0, 1) if stripped else (0,)):
        raise Failed(f"it counts {said.completion_tokens} tokens and gives {len(ids)}")
    if said.text:
        bare = ids[:-1] if ids and ids[-1] in vocabulary.stop_ids else ids
        spellings = (vocabulary.text(ids), vocabulary.text(bare), vocabulary.text(ids, skip_special_tokens=True))
        if _LOOSE.sub("", said.text) not in [_LOOSE.sub("", spelling) for spelling in spellings]:
            decoded, text = (one_line(each, said.secrets) for each in (spellings[0], said.text))
            raise Failed(
                f"its tokens are {decoded} for the target's tokenizer, its text is {text}: is another model served?"
            )
    return ids


def _stripped_stop(said: Completion, written: int, retokenised: bool, vocabulary: Vocabulary) -> int:
    """The stop token that ended an answer of `written` other tokens."""
    at = said.stopped_at
    if at in vocabulary.stop_ids:
        return int(at)
    if at is not None:
        shown = one_line(repr(at), said.secrets)
        raise Failed(f"it stopped at {shown}, which is none of the stop tokens {list(vocabulary.stop_ids)}")
    if not retokenised and said.completion_tokens == written:
        raise Failed("finish_reason stop, and no stop token among the tokens")
    return vocabulary.usual_stop


def error_text(body: Any, secrets: Collection[str] = ()) -> str:
    """The message of an error in any known form, as `one_line` shows it."""
    for key in ("error", "message", "detail"):
        if isinstance(body, dict) and body.get(key):
            return error_text(body[key], secrets)
    return one_line(body if isinstance(body, str) else repr(body), secrets)


def _token_ids(choice: dict[str, Any]) -> tuple[list[Any] | None, bool]:
    """(the ids, None without any; whether some may be missing)."""
    for key in ("token_ids", "output_token_ids", "output_ids"):
        if isinstance(choice.get(key), list):
            return choice[key], False
    logprobs = choice["logprobs"] if isinstance(choice.get("logprobs"), dict) else {}
    tokens, content = logprobs.get("tokens"), logprobs.get("content")
    if isinstance(content, list) and all(isinstance(item, dict) for item in content):
        if all("id" in item for item in content):
            return [item["id"] for item in content], True
        tokens = [item.get("token") for item in content]
    if isinstance(tokens, list) and tokens:
        matches = [_TOKEN_ID.fullmatch(token) if isinstance(token, str) else None for token in tokens]
        if all(matches):
            return [int(match[1]) for match in matches if match], False
    return None, False


def one_line(text: str, secrets: Collection[str] = (), length: int = 200) -> str:
    """A server's text on one line, without unprintable characters; "***" stands for a secret, "..." marks a cut."""
    for secret in secrets:
        text = text.replace(secret, "***")
    start = text[: 10 * length]
    words = "".join(character for character in " ".join(start.split()) if character.isprintable())
    return words if len(words) <= length and len(start) == len(text) else words[:length] + "..."
