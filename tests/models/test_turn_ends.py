"""Where answers end and begin, by templates of every habit: stop tokens, and what recorded answers supervise."""

import json
from pathlib import Path
from typing import Any

import pytest

from draftsmith.data_gen.server_client.server_answers import Vocabulary
from draftsmith.data_gen.training_rows.rows import TrainingRow, rows_of, turns_of_messages
from draftsmith.models.chat import decode_answer, render_prompt
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.turn_ends import answer_notes, stop_ids, turn_ends
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import CHAT_TEMPLATE, make_config, make_tokenizer

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
ASK, ANSWER = {"role": "user", "content": "the cat"}, {"role": "assistant", "content": "sat on"}
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


@pytest.mark.parametrize("tidied", [str, untagged], ids=["tagged", "untagged"])
def test_what_a_template_writes_behind_the_stop_token_is_not_supervised(tmp_path: Path, tidied: Any) -> None:
    """Phi-3 ends a conversation with its end of text."""
    ended = CHAT_TEMPLATE.replace("{%- if add_g", "{%- if not add_generation_prompt %}\n<|pad|>{% endif %}{%- if add_g")
    section = saved(tmp_path, make_tokenizer(tidied(ended), roles=PAD_STOPS), {"eos_token_id": 4})
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
    with pytest.raises(ValueError, match=r"stop token inside: .* continues after '<\|end\|>'"):
        texts(tokenizer, ASK, {"role": "assistant", "content": "a<|end|>b"})
    assert Vocabulary(tokenizer, 320, stop_ids(tokenizer)).usual_stop == 4  # what servers strip
    (note,) = answer_notes(TargetFiles(section))
    assert "ends turns with '<|end|>'" in note and "eos_token_id" in note
    named = saved(tmp_path / "named", make_tokenizer(roles=PAD_STOPS), {"eos_token_id": [0, 4]})
    assert answer_notes(TargetFiles(named)) == []


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE.replace("<|end|>{% endg", "{{ '\\n' }}<|end|>{% endg"),  # behind a newline
        UNTAGGED.replace("<|end|>", "{{ '<|end|>' if not loop.last }}", 1),  # between turns only
    ],
)
def test_an_end_of_turn_is_found_where_it_stands(template: str) -> None:
    tokenizer = make_tokenizer(template, roles=PAD_STOPS)
    assert stop_ids(tokenizer) == (0, 4) and turn_ends(tokenizer).unnamed == 4
    assert texts(tokenizer, ASK, ANSWER, ASK, ANSWER)[0].endswith("<|end|>")


@pytest.mark.parametrize("template", [CHAT_TEMPLATE.replace("<|end|>", "</s>"), untagged(GLM)])
def test_a_template_whose_turns_no_stop_token_ends_is_told(tmp_path: Path, template: str) -> None:
    section = saved(tmp_path, make_tokenizer(template, GLM_SPECIAL, roles=PAD_STOPS))
    (note,) = answer_notes(TargetFiles(section))
    assert "no stop token (there are '<|pad|>')" in note and "target.chat_template" in note


@pytest.mark.parametrize(
    "template",
    [
        CHAT_TEMPLATE.replace("<|end|>{% endg", "</s>{% endg"),  # ordinary text ends turns
        CHAT_TEMPLATE.replace("{{ message['content'] }}<|end|>{% endg", "<|end|>{% endg"),  # shows no answer
        CHAT_TEMPLATE.replace("{%- for", "{{ raise_exception('no') }}{%- for", 1),
        CHAT_TEMPLATE.replace("<|end|>{% endg", " <|pad|><|end|>{% endg"),  # a named stop token follows
    ],
)
def test_what_is_no_end_of_turn(template: str) -> None:
    tokenizer = make_tokenizer(template, roles=PAD_STOPS)
    assert turn_ends(tokenizer)[:3:2] == (frozenset({0}), None)


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


@pytest.mark.parametrize("named", ["4", [4, "<|end|>"], 4.0, [4, None]])
def test_a_stop_token_that_is_no_id_is_refused(tmp_path: Path, named: Any) -> None:
    for key, file in (("generation", "generation_config.json"), ("config", "config.json")):
        section = saved(tmp_path / key, make_tokenizer(), **{key: {"eos_token_id": named}})
        with pytest.raises(UserError, match=rf"target\.model: the {file} of .*eos_token_id"):
            _ = TargetFiles(section).tokenizer
