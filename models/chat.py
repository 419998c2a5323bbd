"""The target's tokenizer: prompts by its chat template, stop tokens, and a fingerprint that tells tokenizers apart."""

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateError
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from draftsmith.models.families import attention_kinds
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetSection

Message = dict[str, Any]


class RenderError(Exception):
    """One conversation that the chat template does not take; the message says why, "kind: detail"."""


def load_tokenizer(target: TargetSection) -> PreTrainedTokenizerBase:
    """The tokenizer of the target.

    Raises:
        UserError: there is none, or it has no chat template.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target.model, revision=target.revision, trust_remote_code=target.trust_remote_code
        )
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"target.model: cannot load a tokenizer from {target.model!r}: {reason}") from error
    if not tokenizer.chat_template:
        raise UserError(
            f"target.model: the tokenizer of {target.model!r} has no chat template, so conversations cannot be written "
            "as its tokens; name a file with the template it was tuned with in target.chat_template"
        )
    return tokenizer


def load_generation_config(target: TargetSection) -> GenerationConfig:
    """The generation config that loading the model would give it, without loading the model."""
    try:
        return GenerationConfig.from_pretrained(target.model, revision=target.revision or "main")
    except OSError:  # models without generation_config.json: made from the model's config
        return GenerationConfig.from_model_config(load_config(target))


def load_config(target: TargetSection) -> Any:
    """The model's config.

    Raises:
        UserError: there is none, or it is one of a family that cannot be drafted for (`families.attention_kinds`).
    """
    adapter = Path(target.model) / "adapter_config.json"
    if adapter.exists():
        raise UserError(
            f"target.model: {target.model!r} holds an adapter ({adapter.name}), not a whole model; merge it into its "
            "base first (peft: PeftModel.from_pretrained(base, adapter).merge_and_unload()), save that, tokenizer and "
            "all, and name its directory"
        )
    try:
        config = AutoConfig.from_pretrained(
            target.model, revision=target.revision, trust_remote_code=target.trust_remote_code
        )
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"target.model: no config at {target.model!r}: {first_line(error)}") from error
    attention_kinds(config)
    return config


def first_line(error: Exception) -> str:
    """What other libraries say, without the pages that follow."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Any] | None = None
) -> list[int]:
    """Token ids of `messages` with the header of the next assistant turn.

    The template is tokenised as it stands: no second BOS is added to the one that it may write.

    Args:
        tools: function schemas, for templates that list them in the system turn.

    Raises:
        RenderError: the template refuses these messages, or they are not text only.
    """
    return _apply(tokenizer, messages, tools, add_generation_prompt=True)["input_ids"]


def render(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Any] | None = None
) -> list[int]:
    """Token ids of `messages` as they stand. Raises RenderError where the template refuses them."""
    return _apply(tokenizer, messages, tools)["input_ids"]


def render_marked(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Any] | None = None
) -> tuple[list[int], list[bool]]:
    """(token ids, what the template's generation tags enclose), for templates that have them."""
    out = _apply(tokenizer, messages, tools, return_assistant_tokens_mask=True)
    return out["input_ids"], [bool(marked) for marked in out["assistant_masks"]]


def has_generation_tags(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Does the chat template say which of its text the model writes (`{% generation %}`)?"""
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None


def decode_answer(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """An answer's text as the next prompt holds it: without special tokens, blanks as they were generated."""
    return str(tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


def as_text(messages: Sequence[Message], images: Sequence[str] = ()) -> list[Message]:
    """The messages as templates of text models take them: content parts joined to one text, nothing put between.

    Args:
        images: what the conversation shows beside its messages.

    Raises:
        RenderError: "not text only: ..." where there is an image or a part that is not text.
    """
    contents = [message.get("content") for message in messages]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    kinds = {part["type"] for part in parts} - {"text"}
    if images or kinds:
        raise RenderError(f"not text only: {', '.join(sorted(kinds)) or 'images'}")
    return [
        message | {"content": "".join(part["text"] for part in content)} if isinstance(content, list) else message
        for message, content in zip(messages, contents, strict=True)
    ]


def _apply(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Any] | None, **settings: Any
) -> Any:
    messages = as_text(messages)
    try:
        return tokenizer.apply_chat_template(messages, tools, tokenize=True, return_dict=True, **settings)
    except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
        reason = str(error) or type(error).__name__
        raise RenderError(f"the chat template refuses it: {reason}") from error


def stop_ids(tokenizer: PreTrainedTokenizerBase, generation_config: GenerationConfig) -> tuple[int, ...]:
    """Tokens that end an answer, ascending: those of the generation config and the tokenizer's own.

    Raises:
        UserError: neither names one.
    """
    configured: Any = generation_config.eos_token_id
    tokenizers_own: Any = tokenizer.eos_token_id
    named = [*(configured if isinstance(configured, list | tuple) else [configured]), tokenizers_own]
    ids = {int(i) for i in named if i is not None}
    if not ids:
        raise UserError(
            "target.model: neither generation_config.json nor the tokenizer names a stop token (eos_token_id); "
            "answers would never end"
        )
    return tuple(sorted(ids))


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over vocabulary, merges, normalisation and chat template: equal in every process for equal tokenizers.

    Truncation and padding are left out: calls set them, and they say nothing about the tokens' meaning.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules: Any = None
    if backend is not None:
        rules = json.loads(backend.to_str())
        rules.pop("truncation", None)
        rules.pop("padding", None)
    content = {"rules": rules, "vocab": tokenizer.get_vocab(), "chat_template": tokenizer.chat_template}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
