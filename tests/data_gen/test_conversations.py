"""Conversations to token ids and loss masks: against templates of every habit, text marked by hand, and damage."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import strategies as st
from tokenizers import processors
from transformers import AddedToken, PreTrainedTokenizerFast

from draftsmith.data_gen import conversations
from draftsmith.data_gen.answers.conversation_log import ConversationLog
from draftsmith.data_gen.answers.generators import GeneratedAnswer
from draftsmith.data_gen.answers.open_conversations import OpenConversations
from draftsmith.data_gen.training_rows.overlap import EvaluationIndex
from draftsmith.data_gen.training_rows.rows import TrainingRow, rows_of, training_rows, turns_of_messages
from draftsmith.models.chat import RenderError, decode_answer, render_prompt, tokenizer_fingerprint
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.prompt_reader import asked_digest, read_conversations
from draftsmith.recipes.prompts.records import Conversation
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import CHAT_TEMPLATE, make_target, make_tokenizer
from tests.evaluation_cases import write_lines as write
from tests.models.test_tools_and_thoughts import EVERYTHING, QWEN, THOUGHTFUL
from tests.strategies import damaged_lines, damaged_records, for_all
from tests.thinning import EXHAUSTIVE
from tests.training_runs import run_main, write_recipe

END = 4
TAGS = ("{% generation %}", "{% endgeneration %}")
# As ChatML does it: a line break behind every end token.
LINES = CHAT_TEMPLATE.replace("<|end|>", "<|end|>{{ '\\n' }}")
# As Qwen3 and R1 do it: thoughts are shown in the last answer only.
THOUGHTS = CHAT_TEMPLATE.replace(
    "{{ message['content'] }}<|end|>{% endgeneration %}",
    "{{ message['content'] if loop.last else message['content'].split('</think>')[-1] }}<|end|>{% endgeneration %}",
)


def tokenizer_with(template: str = CHAT_TEMPLATE, tags: bool = True) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    for tag in () if tags else TAGS:
        template = template.replace(tag, "")
    tokenizer.chat_template = template
    return tokenizer


def talk(*contents: str, system: str | None = None) -> list[dict[str, Any]]:
    """Messages from contents: user and assistant in turn."""
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *messages] if system is not None else messages


def rows(tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]) -> list[TrainingRow]:
    return list(rows_of("c", turns_of_messages(tokenizer, messages)))


def texts(tokenizer: PreTrainedTokenizerFast, row: TrainingRow) -> list[str]:
    return [str(tokenizer.decode(row.input_ids[start:end])) for start, end in row.spans]


TWO_TURNS = talk("the cat", "sat\non  the mat", "and the dog?", "ran after the rain", system="in the rain")


# Masks by the template.


@pytest.mark.parametrize("tags", [True, False])
@pytest.mark.parametrize(
    ("template", "end"),
    [
        (CHAT_TEMPLATE, "<|end|>"),
        (LINES, "<|end|>"),
        (CHAT_TEMPLATE.replace("<|end|>{% end", "{% end"), ""),  # a template that writes no end token
        (CHAT_TEMPLATE.replace("<|end|>{% endgeneration %}", "{% endgeneration %}<|end|>"), "<|end|>"),  # nor marks it
    ],
)
def test_one_row_with_a_span_per_turn(template: str, end: str, tags: bool) -> None:
    tokenizer = tokenizer_with(template, tags)
    (row,) = rows(tokenizer, TWO_TURNS)
    assert texts(tokenizer, row) == [f"sat\non  the mat{end}", f"ran after the rain{end}"]
    rendered = str(tokenizer.apply_chat_template(TWO_TURNS, tokenize=False))
    assert tokenizer.decode(row.input_ids) == rendered.rstrip("\n")  # what stands behind the last turn is not needed


@pytest.mark.parametrize("messages", [TWO_TURNS, talk("a", "b"), talk("a", ""), talk("a", " b \n", "c", "\n")])
@pytest.mark.parametrize("template", [CHAT_TEMPLATE, LINES, THOUGHTS])
def test_generation_tags_and_prefix_comparison_agree(template: str, messages: list[dict[str, Any]]) -> None:
    assert rows(tokenizer_with(template), messages) == rows(tokenizer_with(template, tags=False), messages)


@pytest.mark.parametrize(
    ("template", "messages", "reason"),
    [
        (  # two marked stretches in one turn
            CHAT_TEMPLATE.replace("{% generation %}", "{% generation %}a{% endgeneration %}b{% generation %}"),
            talk("the cat", "sat"),
            "mask and turns differ:",
        ),
        (
            "{{ messages | length }}{% for m in messages %}{{ m.content }}{% endfor %}",
            TWO_TURNS,
            "prompt is no prefix: ",
        ),
        # As text the prompt is a prefix, but in tokens "th" and "e" join.
        ("{% for m in messages %}{{ m.content }}{% endfor %}", talk("th", "e cat"), "prompt is no prefix: .* at token"),
        ("{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}", TWO_TURNS, "empty mask:"),
        (CHAT_TEMPLATE, talk("q"), "no assistant turn:"),
        (CHAT_TEMPLATE, talk("q", "a<|end|>b"), "stop token inside:"),
    ],
)
def test_what_the_template_does_not_tell_is_refused(template: str, messages: list[dict[str, Any]], reason: str) -> None:
    with pytest.raises(ValueError, match=f"^{reason}"):
        turns_of_messages(tokenizer_with(template), messages)


def test_no_second_bos() -> None:
    tokenizer = tokenizer_with("<|system|>" + CHAT_TEMPLATE)
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(  # type: ignore[assignment]
        single="<|system|> $A", special_tokens=[("<|system|>", 1)]
    )
    assert tokenizer("x")["input_ids"].count(1) == 1  # what plain tokenising adds
    assert render_prompt(tokenizer, talk("q")).count(1) == 1


# Content parts.

PARTS = [{"type": "text", "text": "the cat"}, {"type": "text", "text": " sat"}]
IMAGE = {"type": "image_url", "image_url": {"url": "u"}}


@pytest.mark.parametrize("tags", [True, False])
def test_text_parts_are_rendered_as_their_text(tags: bool) -> None:
    tokenizer = tokenizer_with(tags=tags)
    plain, in_parts = talk("the cat sat", "on"), [{"role": "user", "content": PARTS}, *talk("", "on")[1:]]
    assert tokenizer.decode(list(render_prompt(tokenizer, in_parts[:1]))) == "<|user|>the cat sat<|end|><|assistant|>"
    assert rows(tokenizer, in_parts) == rows(tokenizer, plain)


def test_other_parts_are_refused(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": [*PARTS, IMAGE, {"type": "input_audio"}]}, *talk("", "on")[1:]]
    with pytest.raises(RenderError, match=r"^not text only: image_url, input_audio$"):
        render_prompt(tokenizer_with(), messages[:1])
    lines = [{"id": "i", "messages": messages}, {"messages": talk("q", "a"), "images": ["x.png"]}]
    good = {"id": "g", "messages": [{"role": "user", "content": PARTS}, *talk("", "on")[1:]]}
    found, rejects = read(write(tmp_path / "c.jsonl", *lines, good))
    assert [row.id for row in found] == ["g"] and rejects.counts == {"not text only": 2}


def test_an_answer_reads_as_it_was_written() -> None:
    """Some tokenizers join " ." to "." when they decode."""
    tokenizer: Any = tokenizer_with()
    tokenizer.clean_up_tokenization_spaces = True
    tokenizer.clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output = True
    assert tokenizer.decode(tokenizer("cat .")["input_ids"]) == "cat."
    assert decode_answer(tokenizer, [*tokenizer("the cat . don 't")["input_ids"], END]) == "the cat . don 't"


# Token ids of regenerated conversations.


def regenerated(*turns: tuple[list[int], list[int]], tokenizer: Any = None) -> dict[str, Any]:
    return {
        "id": "r",
        "messages": talk(*["text that no one tokenises"] * 2 * len(turns)),
        "turns": [{"prompt_token_ids": p, "output_token_ids": o, "finish_reason": "stop"} for p, o in turns],
        "generator": {"tokenizer_fingerprint": tokenizer_fingerprint(tokenizer or make_tokenizer())},
    }


def read(path: Path, max_length: int = 100, tokenizer: Any = None) -> tuple[list[TrainingRow], Rejects]:
    rejects = Rejects()
    return list(training_rows(path, tokenizer or make_tokenizer(), max_length, rejects)), rejects


def test_generated_tokens_are_used_as_they_are(tmp_path: Path) -> None:
    # 76, 77 would be tokenised otherwise; the second prompt continues the first turn, the third does not.
    history = [2, 9, END, 3, 76, 77, END]
    record = regenerated(([2, 9, END, 3], [76, 77, END]), ([*history, 2, 8, END, 3], [7, 7]), ([2, 5, 3], [6, END]))
    plain = {"id": "p", "messages": TWO_TURNS}
    found, rejects = read(write(tmp_path / "c.jsonl", record, plain, {"prompt": "no answer"}))
    assert [row.spans for row in found[:2]] == [[(4, 7), (11, 13)], [(3, 5)]]
    assert found[0].input_ids == [*history, 2, 8, END, 3, 7, 7]  # cut by length: no stop token is made up
    assert found[1].input_ids == [2, 5, 3, 6, END]
    assert [row.id for row in found] == ["r", "r", "p"] and found[2].spans == rows(tokenizer_with(), TWO_TURNS)[0].spans
    assert rejects.total == 1


def test_long_rows_are_left_out_and_counted(tmp_path: Path) -> None:
    path = write(tmp_path / "c.jsonl", *[regenerated(([2] * n, [9] * 5 + [END])) for n in (1, 4, 5, 30)])
    found, rejects = read(path, max_length=10)
    assert [len(row.input_ids) for row in found] == [7, 10]
    assert rejects.counts == {"longer than data.max_length": 2}


def test_empty_mask_rejects_one_and_stops_for_all(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{{ m.role }}{% if 'x' in m.content %}{% generation %}{{ m.content }}{% endgeneration %}"
        "{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    tokenizer = tokenizer_with(template)
    marked, empty = {"id": "m", "messages": talk("q", "x")}, {"id": "e", "messages": talk("q", "y")}
    found, rejects = read(write(tmp_path / "c.jsonl", marked, empty), tokenizer=tokenizer)
    assert [row.id for row in found] == ["m"] and rejects.counts == {"empty mask": 1}
    for nothing, reason in ((empty, r"usable training rows; 1 record rejected \(1 empty mask"), ("", "is empty")):
        with pytest.raises(UserError, match=reason):
            read(write(tmp_path / "c.jsonl", nothing), tokenizer=tokenizer)


def test_answers_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    other = make_tokenizer()
    other.add_tokens([AddedToken("<tool>")])
    path = write(tmp_path / "c.jsonl", regenerated(([2, 3], [9, END]), tokenizer=other))
    fingerprints = ".*".join(tokenizer_fingerprint(each)[:16] for each in (other, make_tokenizer()))
    with pytest.raises(UserError, match=rf"c\.jsonl:1: .*{fingerprints}"):
        read(path)


def test_fingerprint_tells_vocabulary_and_template_apart(tmp_path: Path) -> None:
    first = make_tokenizer()
    same = tokenizer_fingerprint(first)
    first(["a", "the cat sat"], padding=True, truncation=True, max_length=4)  # leaves its mark in the backend
    first.save_pretrained(tmp_path)
    make_target(num_layers=1).config.save_pretrained(tmp_path)
    assert tokenizer_fingerprint(first) == same == TargetFiles(TargetSection(model=str(tmp_path))).fingerprint
    assert tokenizer_fingerprint(tokenizer_with(LINES)) != same
    first.add_tokens([AddedToken("<tool>")])
    assert tokenizer_fingerprint(first) != same


def test_show_marks_what_is_supervised(tmp_path: Path, target_dir: Path, capsys: pytest.CaptureFixture) -> None:
    both = ({"id": "a", "messages": TWO_TURNS}, {"id": "b", "messages": talk("q", "a")})
    write(tmp_path / "run/conversations.jsonl", *both, "{")
    run_main(conversations, write_recipe(tmp_path, target_dir), "--show", "1")
    printed = capsys.readouterr().out
    assert "<|assistant|>[[sat\non  the mat<|end|>]]<|user|>" in printed
    assert printed.count("[[") == 2  # one row shown
    assert "2 rows of 2 conversations" in printed and "1 malformed JSON" in printed


EXAMPLES = pytest.mark.parametrize("examples", [25, pytest.param(1000, marks=EXHAUSTIVE)])
FIRST = {"id": "good", "messages": THOUGHTFUL}  # so that a file is no array, and never without a conversation


def kept(path: Path) -> list[dict[str, Any]]:
    """The rejects file; every line of it must be JSON."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n")[:-1]] if path.exists() else []


def check_every_line(content: bytes, used: list[int | None], rejected: list[int]) -> None:
    lines = content.removesuffix(b"\n").split(b"\n")
    blank = [n for n, line in enumerate(lines, start=1) if not line.removeprefix(b"\xef\xbb\xbf").strip()]
    assert Counter([*used, *rejected, *blank]) == Counter(range(1, len(lines) + 1))


@EXAMPLES
@pytest.mark.parametrize("template", [EVERYTHING, QWEN], ids=["everything", "qwen3"])
def test_every_line_is_accounted_for(tmp_path: Path, template: str, examples: int) -> None:
    tokenizer: Any = make_tokenizer()
    tokenizer.chat_template = template
    index = EvaluationIndex([Conversation("e", THOUGHTFUL)])
    path, array_path = tmp_path / "p.jsonl", tmp_path / "p.json"
    log_path, rejects_path = tmp_path / "log.jsonl", tmp_path / "rejects.jsonl"
    ends = Counter[str]()

    def fresh() -> Rejects:
        rejects_path.unlink(missing_ok=True)
        return Rejects(rejects_path)

    @for_all(examples, lines=st.lists(damaged_lines(), max_size=10), end=st.sampled_from([b"]", b"", b"]\n]", b",]"]))
    def check(lines: list[bytes], end: bytes) -> None:
        lines = [json.dumps(FIRST).encode(), *lines]
        # In an array the lines behind malformed JSON cannot be told apart; what was read before them is kept.
        array_path.write_bytes(b"[" + b",\n".join(lines) + end)
        rejects = fresh()
        first, *_ = read_conversations(str(array_path), rejects)
        assert first.id == "good" and len(kept(rejects_path)) == rejects.total

        content = b"\n".join(lines) + b"\n"
        path.write_bytes(content)

        rejects = fresh()
        conversations = list(read_conversations(str(path), rejects))
        entries = kept(rejects_path)
        assert len(entries) == rejects.total
        check_every_line(content, [c.line for c in conversations], [entry["line"] for entry in entries])
        assert all(entry["reason"] and entry["source"] == str(path) for entry in entries)
        ends.update(entry["reason"].split(":")[0] for entry in entries)
        ends["read"] += len(conversations)

        log_path.unlink(missing_ok=True)
        rejects, finished = fresh(), []
        with ConversationLog(log_path, {"tokenizer_fingerprint": "f"}) as log:
            asked = OpenConversations(conversations, tokenizer, 2000, rejects)
            for prompt in asked.prompts():
                assert prompt is not None
                record = asked.take(GeneratedAnswer(prompt[0], [9, 10, tokenizer.eos_token_id], "stop"))
                if record is not None:
                    log.append(record)
                    finished.append(record["id"])
        for conversation in conversations:
            asked_digest(conversation)
            index.find(conversation)
        unasked = [entry["record"]["id"] for entry in kept(rejects_path)]
        assert sorted([*finished, *unasked]) == sorted(conversation.id for conversation in conversations)
        assert asked.rejected == len(unasked) and "good" in finished
        assert [json.loads(line)["id"] for line in log_path.read_text(encoding="utf-8").split("\n")[:-1]] == finished

        seen: list[int | None] = []
        rows = list(training_rows(path, tokenizer, 10**9, fresh(), lambda conversation: seen.append(conversation.line)))
        check_every_line(content, seen, [entry["line"] for entry in kept(rejects_path)])
        assert len(rows) >= len(seen) >= 1
        assert all(min(row.input_ids) >= 0 and row.spans for row in rows)

    # The damage is neither harmless nor always fatal, and kinds are told apart.
    assert ends["read"] > examples and ends.total() - ends["read"] > examples and len(ends) > 5, ends


@EXAMPLES
def test_damaged_tables(tmp_path: Path, examples: int) -> None:
    path, good, ends = tmp_path / "p.parquet", {"id": "good", "prompt": "the cat"}, Counter[str]()

    @for_all(examples, record=damaged_records())
    def check(record: dict[str, Any]) -> None:
        try:
            columns = dict.fromkeys([*record, *good])
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist([columns | record, columns | good]), path)
        except (pyarrow.ArrowException, TypeError, ValueError, AttributeError, OverflowError):
            return  # Arrow holds no such record
        rejects = Rejects()
        found = list(read_conversations(str(path), rejects))
        assert found[-1].id == "good" and len(found) + rejects.total == 2
        ends.update(["rejected", "read"][: len(found)][-1:])

    assert min(ends["read"], ends["rejected"]) > 2, ends
