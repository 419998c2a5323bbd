"""The target's tokenizer: prompts by its chat template, answers as messages, and a fingerprint.

Loading writes the recipe's settings (target.chat_template, thinking, template_args) into the tokenizer's template.
Every rendering, mask and fingerprint then follows them.
"""

import datetime
import hashlib
import json
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from jinja2 import Environment, TemplateError, TemplateSyntaxError, meta, nodes
from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase, ProcessorMixin

from draftsmith.models.families import attention_kinds, rotations
from draftsmith.models.image_tokens import unconditional_ids
from draftsmith.models.picture_prompts import PictureProcessor, in_parts
from draftsmith.models.prompt import Prompt, RenderError
from draftsmith.models.vision import is_vision_language
from draftsmith.recipes.errors import UserError, first_line, quoted
from draftsmith.recipes.files.hub import check_model
from draftsmith.recipes.prompts.picture_parts import pictures_of
from draftsmith.recipes.schema import TargetSection

Message = dict[str, Any]

FINGERPRINT_COVERS = "the vocabulary, the chat template, target.thinking and target.template_args"
# Sizes far beyond those of any model.
LARGEST = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1_000_000,
    "intermediate_size": 100_000_000,
    "num_attention_heads": 100_000,
    "vocab_size": 100_000_000,
    "max_position_embeddings": 1_000_000_000,
}
BORDER = "original_max_position_embeddings"
ROTARY_NUMBERS = ("rope_theta", "factor", BORDER, "low_freq_factor", "high_freq_factor")
TOKENIZER_FILES = ("tokenizer*", "vocab*", "*.model", "*.tiktoken", "*.bpe")  # one of them at least
THINKING_SWITCHES = ("enable_thinking", "thinking")
_CLOCK = "strftime_now"
# Template variables that rendering sets.
_SET_BY_RENDERING = {"messages", "tools", "documents", "add_generation_prompt", "raise_exception", _CLOCK}
_SET_BY_CALLS = ("truncation", "padding")
_GENERATION_TAG = re.compile(r"\{%[-+]?\s*(end)?generation\s*[-+]?%\}")


def load_tokenizer(target: TargetSection) -> PreTrainedTokenizerBase:
    """The target's tokenizer, with the recipe's chat template and variables.

    Raises:
        UserError: no tokenizer; no valid chat template; a variable that the template never reads; ordinary tokens
            without an embedding in the model; guidance that the target cannot have.
    """
    _check_no_gguf(target.model)
    check_model(target.model, target.revision)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            target.model, revision=target.revision, trust_remote_code=target.trust_remote_code
        )
    except StrictDataclassError:  # of config.json, which tokenizers read, too
        load_config(target)
        raise
    except (OSError, ValueError, ImportError, KeyError) as error:
        folder = Path(target.model)
        if folder.is_dir() and not any(any(folder.glob(pattern)) for pattern in TOKENIZER_FILES):
            reason = "the folder has no tokenizer; copy the target's tokenizer.json and tokenizer_config.json there"
        else:
            reason = first_line(error)
        raise UserError(f"target.model: cannot load a tokenizer from {target.model!r}: {reason}") from error
    if target.chat_template is not None:
        try:
            tokenizer.chat_template = Path(target.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"target.chat_template: cannot read {target.chat_template}: {first_line(error)}") from error
    if not tokenizer.chat_template:
        tokenizer.chat_template = processor_template(target)
    if not tokenizer.chat_template:
        raise UserError(
            f"target.model: the tokenizer of {target.model!r} has no chat template, so conversations cannot be written "
            "as its tokens; name a file with the template it was tuned with in target.chat_template"
        )
    _set_template(tokenizer, target)
    config = load_config(target)
    _check_vocabulary(tokenizer, config)
    setattr(tokenizer, _STOPS, _stops_of(load_generation_config(target), config))
    if target.guidance is not None:
        unconditional_ids(target, tokenizer, config)
    if is_vision_language(config):
        setattr(tokenizer, _PICTURES, PictureProcessor(target, config))
    return tokenizer


def processor_template(target: TargetSection) -> str | dict[str, str] | None:
    """The processor's chat template; None: there is none. LLaVA's tokenizers have none, and its processor has a file
    (chat_template.json), which tokenizers do not read."""
    try:
        return ProcessorMixin.get_processor_dict(target.model, revision=target.revision)[0].get("chat_template")
    except (OSError, ValueError, KeyError):  # no such file, or none that can be read
        return None


def template_variables(target: TargetSection) -> dict[str, str | int | float | bool]:
    """The template variables that the recipe sets, thinking switches included, sorted by name."""
    switches = {} if target.thinking is None else dict.fromkeys(THINKING_SWITCHES, target.thinking)
    if both := sorted(switches.keys() & target.template_args.keys()):
        raise UserError(f"target.template_args: {both[0]} conflicts with target.thinking; set only one")
    return dict(sorted((target.template_args | switches).items()))


def _set_template(tokenizer: PreTrainedTokenizerBase, target: TargetSection) -> None:
    """Sets the recipe's variables and date at the start of the template, or of each of several named ones.

    Each has its own line: transformers' rendering drops lines with a single tag.
    """
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
    changed = {
        name: "".join(f"{{% set {key} = {_literal(wanted[key])} %}}\n" for key in wanted if key in read_by[name]) + text
        for name, text in named.items()
    }
    if _CLOCK in read:
        day = target.day
        setattr(tokenizer, _DATED, (day.isoformat(), changed))
        changed = {name: (_clock_at(day) if _CLOCK in read_by[name] else "") + text for name, text in changed.items()}
    elif target.date is not None:
        raise UserError("target.date: the chat template writes no date; leave target.date out")
    tokenizer.chat_template = changed if isinstance(template, dict) else changed["default"]  # type: ignore[assignment]


def _clock_at(day: datetime.date) -> str:
    """Jinja's `strftime_now` for the start of a day, in place of transformers', which reads the clock: a function
    cannot be handed to a template."""
    short = {"%F": "%Y-%m-%d", "%D": "%m/%d/%y", "%T": "%H:%M:%S", "%e": f"{day.day:2d}"}
    bare = {f"%-{letter}": day.strftime(f"%{letter}").lstrip("0") or "0" for letter in "dmyHIMSj"}
    whole = {f"%{letter}": day.strftime(f"%{letter}") for letter in "aAbBcdGHIjmMpSuUVwWxXyY"}
    filters = "".join(f"|replace({key!a}, {text!a})" for key, text in (short | bare | whole).items())
    return f"{{% macro {_CLOCK}(format) %}}{{{{ format{filters} }}}}{{% endmacro %}}\n"


def prompt_date(tokenizer: PreTrainedTokenizerBase) -> str | None:
    """The day, YYYY-MM-DD, that prompts of a tokenizer by `load_tokenizer` name; None: its template reads no date."""
    return getattr(tokenizer, _DATED, (None,))[0]


def _variables_read(template: str, where: str) -> set[str]:
    """Variables that a template reads from outside. Raises UserError for an invalid Jinja template."""
    try:
        # Generation tags belong to transformers' Jinja only; they read nothing.
        tree = Environment(extensions=["jinja2.ext.loopcontrols"]).parse(_GENERATION_TAG.sub("", template))
        # Jinja's own list includes names that only some branches set: `{% if a %}{% set b = 1 %}{% endif %}{{ b }}`.
        return meta.find_undeclared_variables(tree) & _read_unset(tree, set())
    except TemplateSyntaxError as error:
        raise UserError(
            f"{where}: the chat template is not a valid Jinja template: line {error.lineno}: {error.message}"
        ) from error


def _read_unset(node: nodes.Node, known: set[str]) -> set[str]:
    """Names that `node` reads before any branch in scope sets them; adds the names that it sets to `known`.

    Names set inside loops, macros and blocks go out of scope at their end.
    """
    inner = known
    if isinstance(node, nodes.Name):
        if node.ctx == "load":
            return {node.name} - known
        known.add(node.name)
        return set()
    if isinstance(node, nodes.Assign):  # its value is read before its name is set
        parts: list[nodes.Node] = [node.node, node.target]
    elif isinstance(node, nodes.AssignBlock):
        return _read_unset(nodes.Scope(node.body), known) | _read_unset(node.target, known)
    elif isinstance(node, nodes.For):
        iterated = _read_unset(node.iter, known)
        inner = set(known)
        parts = [node.target, *([node.test] if node.test else []), *node.body, *node.else_]
        return iterated.union(*[_read_unset(part, inner) for part in parts])
    elif isinstance(node, nodes.With):
        given = set().union(*[_read_unset(value, known) for value in node.values])
        inner = set(known)
        return given.union(*[_read_unset(part, inner) for part in (*node.targets, *node.body)])
    else:
        parts = list(node.iter_child_nodes())
        if isinstance(node, nodes.Macro | nodes.CallBlock | nodes.FilterBlock | nodes.Block | nodes.Scope):
            inner = set(known)
    return set().union(*[_read_unset(part, inner) for part in parts])


def _literal(value: str | int | float | bool) -> str:
    """A value as Jinja source."""
    return str(value).lower() if isinstance(value, bool) else ascii(value)


def load_generation_config(target: TargetSection) -> GenerationConfig:
    """The model's generation config, without loading the model.

    Raises UserError for an eos_token_id that is no token id.
    """
    try:
        config = GenerationConfig.from_pretrained(target.model, revision=target.revision or "main")
    except OSError:  # no generation_config.json
        config = GenerationConfig.from_model_config(load_config(target))
    if wrong := [i for i in _listed(config.eos_token_id) if type(i) is not int]:
        raise UserError(
            f"target.model: the generation_config.json of {target.model!r} has eos_token_id {quoted(wrong[0])}, not a "
            "whole number; write token ids as numbers there (in a copy of the model's folder)"
        )
    return config


def _listed(eos_token_id: Any) -> list[Any]:
    ids = eos_token_id if isinstance(eos_token_id, list | tuple) else [eos_token_id]
    return [i for i in ids if i is not None]


def _stops_of(generation_config: GenerationConfig, config: Any) -> frozenset[int]:
    """Stop tokens that the generation config names, without those that the model cannot write."""
    rows = config.get_text_config(decoder=True).vocab_size
    return frozenset(i for i in _listed(generation_config.eos_token_id) if 0 <= i < rows)


def named_stop_ids(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Stop tokens by name: those of the generation config (of a tokenizer by `load_tokenizer`) and of the tokenizer."""
    return getattr(tokenizer, _STOPS, frozenset()).union(_listed(tokenizer.eos_token_id))


def load_config(target: TargetSection) -> Any:
    """The model's config.

    Raises:
        UserError: there is none, or its family is not supported (`families.attention_kinds`).
    """
    if (Path(target.model) / "adapter_config.json").exists():
        raise UserError(
            f"target.model: {target.model!r} holds an adapter (adapter_config.json), not a whole model; name its "
            "base as target.model and this folder as target.adapter (docs/adapting.md)"
        )
    _check_no_gguf(target.model)
    check_model(target.model, target.revision)
    try:
        config = AutoConfig.from_pretrained(
            target.model, revision=target.revision, trust_remote_code=target.trust_remote_code
        )
    except StrictDataclassError as error:
        wrong = str(error.__cause__ or first_line(error)).partition(". Errors: ")[0]
        raise UserError(
            f"target.model: the config.json of {target.model!r} has a value that transformers refuses: {wrong}; "
            "correct it (in a copy of the model's folder)"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"target.model: no model at {target.model!r}: {_why_no_config(target.model, error)}") from error
    _check_numbers(target.model, config.get_text_config(decoder=True))
    attention_kinds(config)
    return config


def _check_no_gguf(model: str) -> None:
    """Raises UserError for a GGUF file, and for a folder that holds no other model."""
    path = Path(model)
    if path.suffix.lower() == ".gguf":
        what = f"{model!r} is a GGUF file" if path.exists() else f"no such file: {model!r}, and GGUF is not read here"
    elif not (path / "config.json").exists() and (files := sorted(path.glob("*.gguf"))):
        what = f"{model!r} holds a GGUF file ({files[0].name}) and no config.json"
    else:
        return
    raise UserError(
        f"target.model: {what}; name the folder or Hub id of the model that it was converted from, with config.json, "
        "tokenizer and safetensors (target.quantization gives it few bits)"
    )


def _check_numbers(model: str, config: Any) -> None:
    """Raises UserError for impossible sizes, before anything is built from them."""
    wrong = [
        f"{name} {quoted(value)}, not a whole number from 1 to {most:,}"
        for name, most in LARGEST.items()
        if (value := getattr(config, name, None)) is not None
        if type(value) is not int or not 1 <= value <= most
    ]
    wrong += [
        f"{name} {quoted(value)} among its rope_parameters, not a number above 0"
        for rope in rotations(config)
        for name in ROTARY_NUMBERS
        if (value := rope.get(name)) is not None or (name, rope["rope_type"]) == (BORDER, "longrope")
        if not (isinstance(value, (int, float)) and 0 < value < math.inf)
    ]
    if wrong:
        raise UserError(f"target.model: the config.json of {model!r} has {'; '.join(wrong)}")


def _why_no_config(model: str, error: Exception) -> str:
    if Path(model).is_dir():
        return first_line(error) if (Path(model) / "config.json").exists() else "the directory has no config.json"
    if not re.fullmatch(r"[\w.-]*\w(/[\w.-]+)?", model):
        return "no such directory"
    return f"{first_line(error)} (an adapter is not a model: merge it into its base)"


def render_prompt(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Any] | None = None
) -> Prompt:
    """The target's prompt: `messages` and the header of the next assistant turn.

    Tokenising adds no second BOS to the template's own.

    Args:
        messages: a vision-language target's may have pictures, as parts {"type": "image", "path": ...} of a content.
        tools: function schemas, for templates that list them in the system turn.

    Raises:
        RenderError: the template refuses these messages, or some content is not what the target reads.
    """
    return _apply(tokenizer, messages, tools, add_generation_prompt=True)[0]


def render(tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Any] | None = None) -> Prompt:
    """`messages` without the header of the next turn. Raises RenderError where the template refuses them."""
    return _apply(tokenizer, messages, tools)[0]


def render_marked(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Any] | None = None
) -> tuple[Prompt, list[bool]]:
    """(`messages`, True for tokens inside generation tags), for templates with such tags."""
    prompt, marks = _apply(tokenizer, messages, tools, return_assistant_tokens_mask=True)
    return prompt, [bool(marked) for marked in marks]


def with_pictures(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int], messages: Sequence[Message]) -> Prompt:
    """A stored prompt with the pictures of its messages in their places.

    Args:
        ids: as `render_prompt` made them, with all placeholders of each picture.
        messages: of the prompt; those behind it may follow.

    Raises:
        RenderError: the placeholders are not those of the pictures, or a picture cannot be read.
    """
    pictures: PictureProcessor | None = getattr(tokenizer, _PICTURES, None)
    shown = pictures_of([message for message in messages if isinstance(message, dict)])  # as stored, not checked
    if pictures is None and shown:
        raise RenderError("not text only: image")
    return Prompt(ids) if pictures is None else Prompt(ids, pictures.placed(ids, in_parts([{"content": shown}])[1]))


def has_generation_tags(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template marks the model's own text (`{% generation %}`)."""
    return re.search(r"\{%-?\s*generation\s*-?%\}", tokenizer.get_chat_template()) is not None


def decode_answer(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    """An answer's text for the next prompt: without special tokens and stop tokens, whitespace unchanged.

    Special tokens around thoughts stay if the template mentions them: such a template drops the thoughts.
    """
    template = tokenizer.get_chat_template()
    special: set[int] = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
    special.update(tokenizer.all_special_ids, named_stop_ids(tokenizer) & tokenizer.added_tokens_decoder.keys())
    names = {i: str(tokenizer.convert_ids_to_tokens(i)) for i in special.intersection(ids)}
    thoughts = {i for i, name in names.items() if "think" in name.lower() and name in template}
    kept = [i for i in ids if i not in special or i in thoughts]
    return str(tokenizer.decode(kept, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def answer_message(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> Message:
    """An answer as a message of the next prompt.

    Templates of models that think in text (Qwen3, R1) drop earlier thoughts from the content, so content is the whole
    text. Harmony models (gpt-oss) answer in channels, marked by special tokens; their template takes the analysis as
    `thinking` and the user's text as `content`:

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

    Args:
        images: the conversation's images, outside its messages.

    Raises:
        RenderError: "not text only: ..." for images and other parts.
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


def _check_vocabulary(tokenizer: PreTrainedTokenizerBase, config: Any) -> None:
    """Raises UserError for ordinary tokens beyond the model's embedding.

    Special tokens beyond it are common (an image token shared by a family's text models). Rendering refuses texts with
    one.
    """
    rows = config.get_text_config(decoder=True).vocab_size
    beyond = {i: token for token, i in tokenizer.get_vocab().items() if i >= rows}
    added = tokenizer.added_tokens_decoder
    if any(i not in added or not added[i].special for i in beyond):
        raise UserError(
            f"target.model: its tokenizer knows tokens up to {max(beyond)} ({beyond[max(beyond)]!r}), its embedding "
            f"has {rows} rows: one of the two is not this model's"
        )
    setattr(tokenizer, _BEYOND, frozenset(beyond))


_BEYOND = "tokens_beyond_the_embedding"
_STOPS = "stop_tokens_of_the_generation_config"
_DATED = "date_and_undated_templates"  # of templates that read the date
_PICTURES = "picture_processor"  # of vision-language targets


def _apply(
    tokenizer: PreTrainedTokenizerBase, messages: Sequence[Message], tools: list[Any] | None, **settings: Any
) -> tuple[Prompt, Sequence[int]]:
    """(what the template makes of `messages`, 1 for tokens inside generation tags where `settings` ask for them)"""
    pictures: PictureProcessor | None = getattr(tokenizer, _PICTURES, None)
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
    if beyond := getattr(tokenizer, _BEYOND, frozenset()).intersection(ids):
        raise RenderError(f"a token the target lacks: {tokenizer.convert_ids_to_tokens(min(beyond))!r}")
    return Prompt(ids, inserts), marks


def reads_pictures(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the target that `load_tokenizer` read this tokenizer of is a vision-language model."""
    return getattr(tokenizer, _PICTURES, None) is not None


def _shows_strings(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the chat template shows contents that are a string. LLaVA's shows lists of parts only, and drops others
    without a word."""
    probe = [{"role": "user", "content": "probe"}]
    try:
        return "probe" in str(tokenizer.apply_chat_template(probe, tokenize=False))
    except (TemplateError, TypeError, ValueError, KeyError, IndexError):
        return True  # it refuses what it cannot show


def tokenizer_fingerprint(tokenizer: PreTrainedTokenizerBase) -> str:
    """sha256 over vocabulary, merges, normalisation and chat template: equal in every process for equal tokenizers.

    The template of `load_tokenizer` includes target.thinking and target.template_args. The date of prompts is left out:
    a drafter is for every day. So are truncation and padding: calls set them.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    rules: Any = None
    if backend is not None:
        rules = {key: value for key, value in json.loads(backend.to_str()).items() if key not in _SET_BY_CALLS}
    template: Any = tokenizer.chat_template
    if (dated := getattr(tokenizer, _DATED, None)) is not None:
        template = dated[1] if isinstance(template, dict) else dated[1]["default"]
    content = {"rules": rules, "vocab": tokenizer.get_vocab(), "chat_template": template}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=True).encode()).hexdigest()
