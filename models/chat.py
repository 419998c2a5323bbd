"""The target's tokenizer: prompts by its chat template, answers as messages, and a fingerprint.

`set_template` writes the recipe's settings (target.thinking, template_args, date) into the tokenizer's template.
Every rendering, mask and fingerprint then follows them.
"""

import datetime
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta
from transformers import PreTrainedTokenizerBase

from draftsmith.models.picture_prompts import PictureProcessor, in_parts
from draftsmith.models.prompt import Prompt, RenderError
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.picture_parts import pictures_of
from draftsmith.recipes.sections.target import TargetSection

Message = dict[str, Any]

FINGERPRINT_COVERS = "the vocabulary, the chat template, target.thinking and target.template_args"
THINKING_SWITCHES = ("enable_thinking", "thinking")
_CLOCK = "strftime_now"
_SET_BY_RENDERING = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", _CLOCK}
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")


@dataclass(frozen=True)
class _OfTarget:
    """What a target's tokenizer carries beside itself, for the functions here."""

    stops: frozenset[int] = frozenset()  # of the generation config
    beyond: frozenset[int] = frozenset()  # special tokens without an embedding
    pictures: PictureProcessor | None = None  # of vision-language targets
    day: str | None = None  # of templates that read the date
    undated: Any = None  # their template before the date was set


def attach(tokenizer: PreTrainedTokenizerBase, **facts: Any) -> None:
    """Adds facts of `_OfTarget` to a target's tokenizer."""
    tokenizer.of_target = replace(_target_of(tokenizer), **facts)  # type: ignore[attr-defined]


def _target_of(tokenizer: PreTrainedTokenizerBase) -> _OfTarget:
    return getattr(tokenizer, "of_target", _OfTarget())


def template_variables(target: TargetSection) -> dict[str, str | int | float | bool]:
    """The template variables that the recipe sets, thinking switches included, sorted by name."""
    switches = {} if target.thinking is None else dict.fromkeys(THINKING_SWITCHES, target.thinking)
    if both := sorted(switches.keys() & target.template_args.keys()):
        raise UserError(f"target.template_args: {both[0]} conflicts with target.thinking; set only one")
    return dict(sorted((target.template_args | switches).items()))


def set_template(tokenizer: PreTrainedTokenizerBase, target: TargetSection) -> None:
    """Sets the recipe's variables and date at the start of the template, or of each of several named ones."""
    template: Any = tokenizer.chat_template
    where = "target.chat_template" if target.chat_template is not None else "target.model"
    named = template if isinstance(template, dict) else {"default": template}
    if "default" not in named:
        raise UserError(
            f"target.model: the tokenizer's chat templates are named {', '.join(sorted(named))}, none of them default; "
            "write the one that is meant into a file and name it in target.chat_template"
        )
    read_by = {name: _variables_read(text, where) for name, text in named.items()}
    read = set().union(*read_by.values())
    wanted = template_variables(target)
    if target.thinking is not None and not read.intersection(THINKING_SWITCHES):
        raise UserError(
            "target.thinking: the chat template has no switch for it (it reads neither "
            f"{' nor '.join(THINKING_SWITCHES)}); leave target.thinking out"
        )
    for name in target.template_args:
        if name not in read - _SET_BY_RENDERING:
            others = ", ".join(sorted(read - _SET_BY_RENDERING)) or "none"
            raise UserError(f"target.template_args: the chat template does not read {name!r}; what it reads: {others}")

    def with_lines(lines: dict[str, str]) -> Any:
        """The template with those of these lines, by the variable that they set, that it needs."""
        changed = {name: "".join(lines[key] for key in lines if key in read_by[name]) + named[name] for name in named}
        return changed if isinstance(template, dict) else changed["default"]

    # One line each: transformers' rendering drops lines with a single tag.
    lines = {}
    for key, value in wanted.items():
        literal = str(value).lower() if isinstance(value, bool) else ascii(value)
        lines[key] = f"{{% set {key} = {literal} %}}\n"
    if _CLOCK in read:
        attach(tokenizer, day=target.day.isoformat(), undated=with_lines(lines))
        lines = {_CLOCK: _clock_at(target.day)} | lines
    elif target.date is not None:
        raise UserError("target.date: the chat template writes no date; leave target.date out")
    tokenizer.chat_template = with_lines(lines)


def _clock_at(day: datetime.date) -> str:
    """`strftime_now` for the start of a day as Jinja's source, because transformers hands no function to templates."""
    short = {"%F": "%Y-%m-%d", "%D": "%m/%d/%y", "%T": "%H:%M:%S", "%e": f"{day.day:2d}"}
    bare = {f"%-{letter}": day.strftime(f"%{letter}").lstrip("0") or "0" for letter in "dmyHIMSj"}
    whole = {f"%{letter}": day.strftime(f"%{letter}") for letter in "aAbBcdGHIjmMpSuUVwWxXyY"}
    filters = "".join(f"|replace({key!a}, {text!a})" for key, text in (short | bare | whole).items())
    return f"{{% macro {_CLOCK}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n"


def prompt_date(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The day, YYYY-MM-DD, that a target's prompts name; None: its template reads no date."""
    return _target_of(tokenizer).day


def _variables_read(template: str, where: str) -> set[str]:
    """Variables that a template reads from outside, or that only some of its branches set."""
    try:
        # Generation tags are known to transformers' Jinja only.
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", template))
        return meta.find_undeclared_variables(tree)
    except TemplateSyntaxError as error:
        raise UserError(
            f"{where}: the chat template is not a valid Jinja template: line {error.lineno}: {error.message}"
        ) from error


def listed_stops(eos_token_id: Any) -> list[Any]:
    """A config's stop tokens, which it names as one, several or none."""
    if isinstance(eos_token_id, list | tuple):
        return list(eos_token_id)
    return [] if eos_token_id is None else [eos_token_id]


def named_stop_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Stop tokens by name: those of the target's generation config and of the tokenizer."""
    return _target_of(tokenizer).stops.union(listed_stops(tokenizer.eos_token_id))


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Any] | None = None
) -> Prompt:
    """The target's prompt: `messages` and the header of the next assistant turn.

    A vision-language target's messages may have pictures, as parts {"type": "image", "path": ...}. `tools` are function
    schemas. Raises RenderError if the template refuses them, or if some content is not what the target reads.
    """
    return _apply(tokenizer, messages, tools, add_generation_prompt=True)[0]


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Any] | None = None) -> Prompt:
    """`messages` without the header of the next turn. Raises as `render_prompt` does."""
    return _apply(tokenizer, messages, tools)[0]


def render_marked(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Any] | None = None
) -> tuple[Prompt, list[bool]]:
    """(`messages`, True for tokens inside generation tags), for templates with such tags."""
    prompt, marks = _apply(tokenizer, messages, tools, return_assistant_tokens_mask=True)
    return prompt, [bool(marked) for marked in marks]


def with_pictures(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], messages: Sequence[Message]) -> Prompt:
    """A stored prompt, with all its placeholders, and the pictures of its messages; messages behind it may follow.

    Raises RenderError if the placeholders are not those of the pictures, or if a picture cannot be read.
    """
    pictures = _target_of(tokenizer).pictures
    shown = pictures_of([message for message in messages if isinstance(message, dict)])  # as stored, not checked
    if pictures is None and shown:
        raise RenderError("not text only: image")
    return Prompt(ids) if pictures is None else Prompt(ids, pictures.placed(ids, in_parts([{"content": shown}])[1]))


def has_generation_tags(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template marks the model's own text (`{% generation %}`)."""
    return _GENERATION_TAG.search(tokenizer.get_chat_template()) is not None


def decode_answer(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """An answer's text for the next prompt: without special tokens and stop tokens, whitespace unchanged.

    Special tokens around thoughts stay if the template mentions them: such a template drops the thoughts.
    """
    template, added = tokenizer.get_chat_template(), tokenizer.added_tokens_decoder
    special = {i for i, token in added.items() if token.special}
    special.update(tokenizer.all_special_ids, named_stop_ids(tokenizer) & added.keys())
    names = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in special.intersection(ids)}
    dropped = {i for i, name in names.items() if "think" not in name.lower() or name not in template}
    return str(tokenizer.decode([i for i in ids if i not in dropped], clean_up_tokenization_spaces=False))


def answer_message(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Message:
    """An answer as a message of the next prompt: its whole text, from which templates drop thoughts (Qwen3, R1).

    Harmony models (gpt-oss) answer in channels; their template takes the analysis as `thinking`:

        <|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>Yes.<|return|>
    """
    marks = _harmony_marks(tokenizer)
    if not is_harmony(tokenizer):
        return {"role": "assistant", "content": decode_answer(tokenizer, ids)}
    texts: dict[str, list[int]] = {"analysis": [], "final": []}
    channel, header, in_header = "final", [], False
    for i in ids:
        if i in (marks["<|start|>"], marks["<|channel|>"]):
            header, in_header = [], True
        elif i == marks["<|message|>"]:
            words = str(tokenizer.decode(header)).split()
            # Commentary beside tool calls is for the user, too.
            channel, in_header = "analysis" if words[:1] == ["analysis"] else "final", False
        else:
            (header if in_header else texts[channel]).append(i)
    message = {"role": "assistant", "content": decode_answer(tokenizer, texts["final"])}
    thoughts = decode_answer(tokenizer, texts["analysis"])
    return message | {"thinking": thoughts} if thoughts else message


_HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")


def is_harmony(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the target answers in Harmony's channels."""
    return len(_harmony_marks(tokenizer)) == len(_HARMONY)


def _harmony_marks(tokenizer: PreTrainedTokenizerBase) -> dict[str, int]:
    return {token.content: i for i, token in tokenizer.added_tokens_decoder.items() if token.content in _HARMONY}


def as_text(messages: Sequence[Message], images: Sequence[str] = ()) -> list[Message]:
    """The messages with content parts joined to one text, without separators.

    Raises RenderError, "not text only: ...", for parts of other kinds and for `images` outside the messages.
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
) -> tuple[Prompt, Sequence[int]]:
    """(the rendered prompt, 1 for tokens inside generation tags where `settings` ask for them)"""
    pictures = _target_of(tokenizer).pictures
    parts, sources = in_parts(messages) if pictures is not None else ([], [])
    messages = parts if sources or (parts and not _shows_strings(tokenizer)) else as_text(messages)
    try:
        out: Any = tokenizer.apply_chat_template(messages, tools, tokenize=True, return_dict=True, **settings)
    except (TemplateError, TypeError, ValueError, KeyError, IndexError) as error:
        reason = str(error) or type(error).__name__
        raise RenderError(f"the chat template refuses it: {reason}") from error
    ids, inserts = out["input_ids"], ()
    marks = out.get("assistant_masks", [0] * len(ids))
    if pictures is not None:
        ids, marks, inserts = pictures.expanded(ids, marks, sources)
    if beyond := _target_of(tokenizer).beyond.intersection(ids):
        raise RenderError(f"a token the target lacks: {tokenizer.convert_ids_to_tokens(min(beyond))!r}")
    return Prompt(ids, inserts), marks


def reads_pictures(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether this is the tokenizer of a vision-language target."""
    return _target_of(tokenizer).pictures is not None


def _shows_strings(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template shows contents that are a string. LLaVA's silently drops all but lists of parts."""
    probe = [{"role": "user", "content": "probe"}]
    try:
        return "probe" in str(tokenizer.apply_chat_template(probe, tokenize=False))
    except (TemplateError, TypeError, ValueError, KeyError, IndexError):
        return True  # it refuses what it cannot show


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over vocabulary, merges, normalisation and chat template: equal in every process for equal tokenizers.

    The template includes target.thinking and target.template_args, not the date: a drafter is for every day.
    """
    backend, rules = getattr(tokenizer, "backend_tokenizer", None), None
    if backend is not None:
        rules = json.loads(backend.to_str())
        del rules["truncation"], rules["padding"]  # calls set them
    template = _target_of(tokenizer).undated or tokenizer.chat_template
    content = {"rules": rules, "vocab": tokenizer.get_vocab(), "chat_template": template}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
