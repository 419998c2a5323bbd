"""Chat templates as the recipe wishes them, answers as messages, and the tokenizer's place beside its model."""

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.models.chat import RenderError, answer_message, prompt_date, render_prompt, tokenizer_fingerprint
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import CHAT_TEMPLATE, make_config, make_tokenizer

USER = [{"role": "user", "content": "the cat"}]
# How templates ask for their switch: in a macro, for a namespace, by `is defined`, with a default.
THINKING = """\
{%- macro header() %}
    {%- if enable_thinking is defined and enable_thinking is false %}<think></think>{% endif %}
{%- endmacro %}
{%- set ns = namespace(mode='on' if enable_thinking is not defined or enable_thinking else 'off') %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{ message.content.split('</think>')[-1] }}<|end|>{% endgeneration %}
    {%- else %}
        {{- '<|user|>' + message.content + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}<|assistant|>{{ ns.mode }}{{ header() }}{% endif %}"""
HARMONY_TOKENS = ["<|start|>", "<|channel|>", "<|message|>", "<|return|>", "<|call|>"]


def with_tokens(special: Sequence[str], template: Any = CHAT_TEMPLATE) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer(template)
    tokenizer.add_tokens([AddedToken(token, special=True) for token in special])  # type: ignore[arg-type]
    return tokenizer


def make_dir(directory: Path, template: Any, special: Sequence[str] = (), vocab_size: int = 340) -> Path:
    """A tokenizer with `special` tokens more, and the config of a model with `vocab_size` embeddings."""
    with_tokens(special, template).save_pretrained(directory)
    make_config(num_layers=1, vocab_size=vocab_size).save_pretrained(directory)
    return directory


def tokenizer_of(directory: Path, **wishes: Any) -> PreTrainedTokenizerBase:
    return TargetFiles(TargetSection(model=str(directory), **wishes)).tokenizer


def prompt_of(directory: Path, tools: Any = None, **wishes: Any) -> str:
    tokenizer = tokenizer_of(directory, **wishes)
    return str(tokenizer.decode(list(render_prompt(tokenizer, USER, tools))))


# Templates.


def test_thinking_reaches_macros_namespaces_and_tests_of_definedness(tmp_path: Path) -> None:
    make_dir(tmp_path, THINKING)
    assert prompt_of(tmp_path).endswith("<|assistant|>on")
    assert prompt_of(tmp_path, thinking=True).endswith("<|assistant|>on")
    assert prompt_of(tmp_path, thinking=False).endswith("<|assistant|>off<think></think>")
    assert len({tokenizer_fingerprint(tokenizer_of(tmp_path, thinking=t)) for t in (None, True, False)}) == 3


def test_both_names_of_the_switch_are_set(tmp_path: Path) -> None:
    template = "{% if not thinking is defined %}{% set thinking = false %}{% endif %}{{ 'T' if thinking else 'F' }}"
    make_dir(tmp_path, template)
    assert (prompt_of(tmp_path), prompt_of(tmp_path, thinking=True)) == ("F", "T")
    # An attribute of a message, or a variable that the template sets itself, is no switch.
    own = "{% set enable_thinking = true %}{{ messages[0].thinking }}{{ enable_thinking }}"
    for name, other in (("plain", CHAT_TEMPLATE), ("own", own)):
        with pytest.raises(UserError, match=r"target\.thinking: the chat template has no switch"):
            tokenizer_of(make_dir(tmp_path / name, other), thinking=False)
    with pytest.raises(UserError, match=r"enable_thinking conflicts with target\.thinking"):
        tokenizer_of(make_dir(tmp_path, THINKING), thinking=True, template_args={"enable_thinking": False})


@pytest.mark.parametrize("value", ["low", 'it\'s "so"\n{{ 1 }} %} \\ é 😀', -1, 1e-07, True], ids=repr)
def test_template_args_keep_their_values(tmp_path: Path, value: Any) -> None:
    make_dir(tmp_path, "{{ effort is defined and effort | tojson }}")
    rendered = prompt_of(tmp_path, template_args={"effort": value})
    assert json.loads(rendered) == value and type(json.loads(rendered)) is type(value)


@pytest.mark.parametrize("template", ["\n\n  x{{ a }}", "  {% if a %}x{% endif %}\n", "\n{%- if a %}x{% endif %}"])
def test_setting_variables_adds_and_removes_nothing(tmp_path: Path, template: str) -> None:
    make_dir(tmp_path, template)
    given = tokenizer_of(tmp_path).apply_chat_template(USER, tokenize=False, a="v")
    assert tokenizer_of(tmp_path, template_args={"a": "v"}).apply_chat_template(USER, tokenize=False) == given


@pytest.mark.parametrize(
    ("template", "switches"),
    [
        ("{{ effort }}{{ messages[0].content }}", "effort"),
        ("{% for m in messages %}{% set b = m.a %}{{ b }}{% endfor %}", "none"),
        ("{% if c %}{% set b = b or c %}{% endif %}{{ b }}", "b, c"),
    ],
)
def test_what_a_template_sets_itself_is_no_switch(tmp_path: Path, template: str, switches: str) -> None:
    make_dir(tmp_path, template)
    for name in ("none_such", "messages", "a b"):
        with pytest.raises(UserError, match=f"does not read '{name}'; what it reads: {switches}$"):
            tokenizer_of(tmp_path, template_args={name: 1})


# As templates ask for the date: in a macro, if it is defined, to count with it.
DATED = """\
{%- macro today() %}{{ strftime_now('FORMAT') }}{% endmacro %}
{%- if strftime_now is defined and not date_string is defined %}{% set date_string = today() %}{% endif %}
{{- date_string + ' ' + (strftime_now('%d') | int - 1) | string }}"""


@pytest.mark.parametrize("day", ["2025-07-06", "2024-12-31"])
def test_a_template_writes_the_date_of_the_recipe(tmp_path: Path, day: str) -> None:
    wanted = "%Y-%m-%d, %d %b %Y: %A %a %B %-d %-m %e %F %D %j %H:%M:%S"
    make_dir(tmp_path, DATED.replace("FORMAT", wanted))
    tokenizer = tokenizer_of(tmp_path, date=day)
    asked = date.fromisoformat(day)
    assert tokenizer.apply_chat_template(USER, tokenize=False) == f"{asked:{wanted}} {asked.day - 1}"
    assert prompt_date(tokenizer) == day
    # A drafter is for every day.
    assert tokenizer_fingerprint(tokenizer) == tokenizer_fingerprint(tokenizer_of(tmp_path))
    given = tokenizer_of(tmp_path, date=day, template_args={"date_string": "now"})
    assert given.apply_chat_template(USER, tokenize=False) == f"now {asked.day - 1}"
    assert tokenizer_fingerprint(given) != tokenizer_fingerprint(tokenizer)


def test_dates_are_read_as_yaml_writes_them(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("output_dir: run\ntarget: {model: m, date: 2025-07-06}\n")
    assert load_recipe(tmp_path / "recipe.yaml").target.date == "2025-07-06"
    with pytest.raises(UserError, match=r"target\.date: the chat template writes no date"):
        tokenizer_of(make_dir(tmp_path, CHAT_TEMPLATE), date="2025-07-06")


def test_a_template_from_a_file(tmp_path: Path) -> None:
    base, file = make_dir(tmp_path / "base", None), tmp_path / "chat.jinja"
    with pytest.raises(UserError, match=r"no chat template.*target\.chat_template"):
        tokenizer_of(base)
    file.write_text(CHAT_TEMPLATE)
    wished, tuned = tokenizer_of(base, chat_template=str(file)), make_dir(tmp_path / "tuned", CHAT_TEMPLATE)
    assert tokenizer_fingerprint(wished) == tokenizer_fingerprint(tokenizer_of(tuned))
    for content, message in ((b"a\n{% if b %}\n{% endfor %}", "Jinja.*line 3"), (b"\xff\xfe", "cannot read")):
        file.write_bytes(content)
        with pytest.raises(UserError, match=message):
            tokenizer_of(base, chat_template=str(file))


def test_named_templates(tmp_path: Path) -> None:
    named = {"default": "D{{ effort }}", "tool_use": "T{{ effort }}"}
    make_dir(tmp_path / "both", named)
    wishes: dict[str, Any] = {"template_args": {"effort": "low"}}
    assert prompt_of(tmp_path / "both", **wishes) == "Dlow"
    assert prompt_of(tmp_path / "both", tools=[{"type": "function", "function": {"name": "f"}}], **wishes) == "Tlow"
    make_dir(tmp_path / "other", {"rag": "R", "tool_use": "T"})
    with pytest.raises(UserError, match="named rag, tool_use, none of them default"):
        tokenizer_of(tmp_path / "other")


# The tokenizer beside its model.


def test_a_tokenizer_larger_than_the_embedding_is_refused(tmp_path: Path) -> None:
    tokens = len(make_tokenizer())
    with pytest.raises(UserError, match=rf"knows tokens up to {tokens - 1} .* has {tokens - 1} rows"):
        tokenizer_of(make_dir(tmp_path, CHAT_TEMPLATE, vocab_size=tokens - 1))


def test_a_special_token_without_embedding_refuses_only_what_holds_it(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(make_dir(tmp_path, CHAT_TEMPLATE, ["<image>"], vocab_size=len(make_tokenizer())))
    assert render_prompt(tokenizer, USER)
    with pytest.raises(RenderError, match="a token the target lacks: '<image>'"):
        render_prompt(tokenizer, [{"role": "user", "content": "an <image> here"}])


# Answers as messages.


def ids_of(tokenizer: PreTrainedTokenizerFast, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("ANALYSISthe cat<|end|><|start|>assistantFINALa dog<|return|>", {"thinking": "the cat", "content": "a dog"}),
        ("ANALYSISthe cat", {"thinking": "the cat", "content": ""}),  # cut
        (
            "ANALYSISx<|end|><|start|>assistant<|channel|>commentary<|message|>wait <|end|><|start|>assistantANALYSISy"
            "<|end|><|start|>assistantFINALz",
            {"thinking": "xy", "content": "wait z"},
        ),
        ("a dog<|return|>", {"content": "a dog"}),  # no channel at all
        ("<|channel|>analysis", {"content": ""}),  # cut in a header
    ],
)
def test_harmony_answers(text: str, message: dict[str, str]) -> None:
    for name in ("analysis", "final"):
        text = text.replace(name.upper(), f"<|channel|>{name}<|message|>")
    tokenizer = with_tokens(HARMONY_TOKENS)
    assert answer_message(tokenizer, ids_of(tokenizer, text)) == {"role": "assistant"} | message


def test_thoughts_in_text_stay_in_the_content() -> None:
    """Also where the tags are special tokens: the template finds them, so they must not vanish."""
    special = with_tokens(["<think>", "</think>", "<tool>"], CHAT_TEMPLATE + "{{ '' if '</think><think>' }}")
    for tokenizer, said in ((make_tokenizer(), "<think>the cat</think> a dog"), (special, "the cat</think> a dog")):
        assert answer_message(tokenizer, ids_of(tokenizer, f"{said}<|end|>"))["content"] == said
    assert answer_message(special, ids_of(special, "a <tool>dog<|end|>"))["content"] == "a dog"
