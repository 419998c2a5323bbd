"""Chat templates as the recipe wishes them, answers as messages; where answers end, and what of them is supervised."""

import json
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from draftsmith.data_gen.server_client.server_answers import Vocabulary
from draftsmith.data_gen.training_rows.rows import TrainingRow, rows_of, turns_of_messages
from draftsmith.models.chat import (
    RenderError,
    answer_message,
    decode_answer,
    prompt_date,
    render_prompt,
    tokenizer_fingerprint,
)
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.turn_ends import answer_notes, stop_ids, turn_ends
from draftsmith.recipes.errors import UserError
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
    with pytest.raises(UserError, match=r"target\.thinking: the chat template has no switch"):
        tokenizer_of(make_dir(tmp_path / "own", own), thinking=False)


@pytest.mark.parametrize("value", ['it\'s "so"\n{{ 1 }} %} \\ é 😀', -1, 1e-07, True], ids=repr)
def test_template_args_keep_their_values(tmp_path: Path, value: Any) -> None:
    make_dir(tmp_path, "{{ effort is defined and effort | tojson }}")
    rendered = prompt_of(tmp_path, template_args={"effort": value})
    assert json.loads(rendered) == value and type(json.loads(rendered)) is type(value)


@pytest.mark.parametrize("template", ["\n\n  x{{ a }}", "  {% if a %}x{% endif %}\n", "\n{%- if a %}x{% endif %}"])
def test_setting_variables_adds_and_removes_nothing(tmp_path: Path, template: str) -> None:
    make_dir(tmp_path, template)
    given = tokenizer_of(tmp_path).apply_chat_template(USER, tokenize=False, a="v")
    assert tokenizer_of(tmp_path, template_args={"a": "v"}).apply_chat_template(USER, tokenize=False) == given


# As templates ask for the date: in a macro, if it is defined, to count with it.
DATED = """\
{%- macro today() %}{{ strftime_now('FORMAT') }}{% endmacro %}
{%- if strftime_now is defined and not date_string is defined %}{% set date_string = today() %}{% endif %}
{{- date_string + ' ' + (strftime_now('%d') | int - 1) | string }}"""


def test_a_template_writes_the_date_of_the_recipe(tmp_path: Path) -> None:
    day, wanted = "2025-07-06", "%Y-%m-%d, %d %b %Y: %A %a %B %-d %-m %e %F %D %j %H:%M:%S"
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


def test_ordinary_tokens_without_embedding_are_refused_special_ones_where_they_occur(tmp_path: Path) -> None:
    tokens = len(make_tokenizer())
    with pytest.raises(UserError, match=rf"knows tokens up to {tokens - 1} .* has {tokens - 1} rows"):
        tokenizer_of(make_dir(tmp_path, CHAT_TEMPLATE, vocab_size=tokens - 1))
    tokenizer = tokenizer_of(make_dir(tmp_path, CHAT_TEMPLATE, ["<image>"], vocab_size=tokens))
    assert render_prompt(tokenizer, USER)
    with pytest.raises(RenderError, match="a token the target lacks: '<image>'"):
        render_prompt(tokenizer, [{"role": "user", "content": "an <image> here"}])


# Answers as messages.


def ids_of(tokenizer: Any, text: str) -> list[int]:
    return tokenizer(text, add_special_tokens=False)["input_ids"]


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


# As SmolLM3 does it: tags around header, empty thought and answer; the prompt brings the first two in this mode.
SMOL = (
    "{%- set thought = '' if messages and '/think' in messages[0].content else '<think>\\n\\n</think>\\n' -%}"
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}"
    "{% generation %}{{ '<|assistant|>\\n' + thought + m.content + '<|end|>\\n' }}{% endgeneration %}"
    "{%- else -%}{{ '<|user|>\\n' + m.content + '<|end|>\\n' }}{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' + thought }}{%- endif -%}"
)
# As GLM does it: no end of turn. The next role's marker is the stop token; results of tools have a marker of their own.
GLM = (
    "{%- for m in messages -%}"
    "{%- if m.role == 'assistant' -%}"
    "{{ '<|assistant|>\\n' }}{% generation %}{{ m.content }}"
    "{%- for call in m.tool_calls or [] %}{{ call.function.name }}{% endfor %}{% endgeneration %}"
    "{%- else -%}{{ {'user': '<|user|>', 'tool': '<|observation|>'}[m.role] + '\\n' + m.content }}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{ '<|assistant|>\\n' }}{%- endif -%}"
)
GLM_SPECIAL = ("<|pad|>", "<|endoftext|>", "<|user|>", "<|assistant|>", "<|observation|>")  # ids 0-4
PAD_STOPS = {"eos_token": "<|pad|>"}
ASK, ANSWER = USER[0], {"role": "assistant", "content": "sat on"}
CALLED = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "look", "arguments": {}}}]}
RESULT = {"role": "tool", "content": "the mat"}


def saved(directory: Path, tokenizer: Any, generation: Any = None, config: Any = None) -> TargetSection:
    """A target without weights: its tokenizer, its config and its generation config."""
    tokenizer.save_pretrained(directory)
    settings = make_config(num_layers=1).to_dict() | {"eos_token_id": None, **(config or {})}
    (directory / "config.json").write_text(json.dumps(settings))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return TargetSection(model=str(directory))


def untagged(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def glm(directory: Path, template: str = GLM) -> Any:
    tokenizer = make_tokenizer(template, GLM_SPECIAL, {"pad_token": "<|pad|>", "eos_token": "<|endoftext|>"})
    return TargetFiles(saved(directory, tokenizer, {"eos_token_id": [1, 2, 4]})).tokenizer


def rows(tokenizer: Any, *messages: dict[str, Any]) -> list[TrainingRow]:
    return list(rows_of("c", turns_of_messages(tokenizer, messages)))


def texts(tokenizer: Any, *messages: dict[str, Any]) -> list[str]:
    """What is supervised; each span begins where a prompt of the target ends."""
    found, asked = [], []
    for row in rows(tokenizer, *messages):
        found += [str(tokenizer.decode(row.input_ids[start:end])) for start, end in row.spans]
        asked += [row.input_ids[:start] for start, _ in row.spans]
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    assert asked == [list(render_prompt(tokenizer, messages[:i])) for i in answers]
    return found


# What is supervised.


@pytest.mark.parametrize("template", [SMOL, untagged(SMOL)], ids=["tagged", "untagged"])
@pytest.mark.parametrize("mode", ["", " /think"])
def test_header_and_empty_thought_of_the_prompt_are_not_supervised(template: str, mode: str) -> None:
    tokenizer = make_tokenizer(template)
    asked = {"role": "user", "content": f"the cat{mode}"}
    talk = [asked, ANSWER, ASK, ANSWER, ANSWER]  # two answers in a row: the tags mark them as one
    assert texts(tokenizer, *talk) == ["sat on<|end|>"] * 3


@pytest.mark.parametrize("template", [GLM, untagged(GLM)], ids=["tagged", "untagged"])
def test_the_next_roles_marker_is_supervised_where_it_is_the_stop_token(tmp_path: Path, template: str) -> None:
    tokenizer = glm(tmp_path, template)
    talk = [ASK, ANSWER, ASK, CALLED, RESULT, ANSWER]
    assert texts(tokenizer, *talk) == ["sat on<|user|>", "look<|observation|>", "sat on<|user|>"]
    assert len(rows(tokenizer, *talk)) == 1  # the stop token opens the next message
    assert texts(tokenizer, ASK, CALLED) == ["look<|observation|>"]
    # An answer that another answer follows does not end there.
    assert texts(tokenizer, ASK, ANSWER, ANSWER) == ["sat on", "sat on<|user|>"]


def test_what_a_template_writes_behind_the_stop_token_is_not_supervised(tmp_path: Path) -> None:
    """Phi-3 ends a conversation with its end of text."""
    ended = CHAT_TEMPLATE.replace("{%- if add_g", "{%- if not add_generation_prompt %}\n<|pad|>{% endif %}{%- if add_g")
    for template in (ended, untagged(ended)):
        section = saved(tmp_path, make_tokenizer(template, roles=PAD_STOPS), {"eos_token_id": 4})
        assert texts(TargetFiles(section).tokenizer, ASK, ANSWER) == ["sat on<|end|>"]


UNTAGGED = untagged(CHAT_TEMPLATE)
DISAGREE = {
    "": CHAT_TEMPLATE,
    "generation tags also mark what the generation prompt brings": SMOL,
    "generation tags leave out tokens": CHAT_TEMPLATE.replace("{% generation %}", "\n{% generation %}"),
    "another header": CHAT_TEMPLATE.replace("_prompt -%}<|assistant|>", "_prompt -%}<|assistant|>{{ ' ' }}"),
    "an empty thought": UNTAGGED.replace("<|assistant|>{{", "<|assistant|><think>\n\n</think>\n{{"),
}


@pytest.mark.parametrize("remark", DISAGREE)
def test_tags_that_disagree_with_the_generation_prompt(remark: str) -> None:
    (row,) = rows(make_tokenizer(DISAGREE[remark]), ASK, ANSWER)
    assert len(row.remarks) == bool(remark) and all(remark in each for each in row.remarks)


# Stop tokens.


def test_stop_tokens_of_generation_config_tokenizer_and_template(tmp_path: Path) -> None:
    assert stop_ids(make_tokenizer()) == (4,)
    beyond = [9, 7, 320, -1]  # 320 rows
    assert TargetFiles(saved(tmp_path, make_tokenizer(), {"eos_token_id": beyond})).stop_ids == (4, 7, 9)
    assert TargetFiles(saved(tmp_path / "c", make_tokenizer(), config={"eos_token_id": 9})).stop_ids == (4, 9)
    with pytest.raises(UserError, match=r"names a stop token .*ends no turn with a special token"):
        stop_ids(make_tokenizer(CHAT_TEMPLATE.replace("<|end|>", ""), roles={}))


def test_an_end_of_turn_that_nothing_names_is_a_stop_token(tmp_path: Path) -> None:
    """Base models tuned on chat, and the first Llama-3: <|end|> ends turns, another token ends texts."""
    section = saved(tmp_path, make_tokenizer(roles=PAD_STOPS), {"eos_token_id": 0})
    tokenizer: Any = TargetFiles(section).tokenizer
    assert stop_ids(tokenizer) == (0, 4) and turn_ends(tokenizer).unnamed == 4
    assert texts(tokenizer, ASK, ANSWER) == ["sat on<|end|>"]
    assert Vocabulary(tokenizer, 320, stop_ids(tokenizer)).usual_stop == 4  # what servers strip
    (note,) = answer_notes(TargetFiles(section))
    assert "ends turns with '<|end|>'" in note and "eos_token_id" in note
    named = saved(tmp_path / "named", make_tokenizer(roles=PAD_STOPS), {"eos_token_id": [0, 4]})
    assert answer_notes(TargetFiles(named)) == []


@pytest.mark.parametrize(
    ("template", "found"),
    [
        (CHAT_TEMPLATE.replace("<|end|>{% endg", "{{ '\\n' }}<|end|>{% endg"), True),  # behind a newline
        (UNTAGGED.replace("<|end|>", "{{ '<|end|>' if not loop.last }}", 1), True),  # between turns only
        (CHAT_TEMPLATE.replace("<|end|>{% endg", "</s>{% endg"), False),  # ordinary text ends turns
        (CHAT_TEMPLATE.replace("{{ message['content'] }}<|end|>{% endg", "<|end|>{% endg"), False),  # shows no answer
        (CHAT_TEMPLATE.replace("{%- for", "{{ raise_exception('no') }}{%- for", 1), False),
        (CHAT_TEMPLATE.replace("<|end|>{% endg", " <|pad|><|end|>{% endg"), False),  # a named stop token follows
    ],
)
def test_an_end_of_turn_is_found_where_it_stands(template: str, found: bool) -> None:
    tokenizer = make_tokenizer(template, roles=PAD_STOPS)
    ends = turn_ends(tokenizer)
    assert (ends.stops, ends.unnamed) == (({0, 4}, 4) if found else ({0}, None))
    assert not found or texts(tokenizer, ASK, ANSWER, ASK, ANSWER)[0].endswith("<|end|>")


@pytest.mark.parametrize("template", [CHAT_TEMPLATE.replace("<|end|>", "</s>"), untagged(GLM)])
def test_a_template_whose_turns_no_stop_token_ends_is_told(tmp_path: Path, template: str) -> None:
    section = saved(tmp_path, make_tokenizer(template, GLM_SPECIAL, roles=PAD_STOPS))
    (note,) = answer_notes(TargetFiles(section))
    assert "no stop token (there are '<|pad|>')" in note and "target.chat_template" in note


def test_the_end_of_a_harmony_channel_ends_no_answer() -> None:
    special = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|return|>")
    template = CHAT_TEMPLATE.replace("<|assistant|>", "<|start|>assistant<|channel|>final<|message|>")
    assert turn_ends(make_tokenizer(template, special, {"eos_token": "<|return|>"})).stops == {4}


def test_stop_tokens_that_are_not_special_stay_out_of_the_next_prompt(tmp_path: Path) -> None:
    tokenizer = make_tokenizer(roles=PAD_STOPS)
    tokenizer.add_tokens(["<stop>"])
    stop: Any = tokenizer.convert_tokens_to_ids("<stop>")
    loaded: Any = TargetFiles(saved(tmp_path, tokenizer, {"eos_token_id": stop})).tokenizer
    assert decode_answer(loaded, [*loaded("sat on")["input_ids"], stop]) == "sat on"
