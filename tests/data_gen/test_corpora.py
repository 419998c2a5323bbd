"""Corpora of a ranking: how files and datasets are read, what is counted, what is rejected, what is kept."""

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.training_rows.rows import turns_of_messages
from draftsmith.data_gen.vocabulary import corpus_reader
from draftsmith.data_gen.vocabulary.corpus_reader import Tokeniser, items
from draftsmith.models.chat import tokenizer_fingerprint
from draftsmith.models.vocab import load_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.sections.data import RankingSource
from tests.conftest import VOCAB_SIZE, make_tokenizer
from tests.data_gen.ranking_cases import (
    Script,
    as_counter,
    counted,
    load_corpora,
    some_texts,
    token_counts,
    write_lines,
)
from tests.data_gen.ranking_cases import place as place
from tests.data_gen.ranking_cases import rank_by as rank_by
from tests.strategies import for_all
from tests.thinning import EXHAUSTIVE

# What is counted.


@pytest.mark.parametrize("most", [None, 1, 13, 50])
def test_every_form_of_file_counts_the_same(
    place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase, most: int | None
) -> None:
    """In one, two or forty files, packed or not, each file once on whatever ways it is found; up to max_documents."""
    texts = some_texts(40, 0)
    records = [{"text": text, "n": i} for i, text in enumerate(texts)]
    table = pyarrow.Table.from_pylist(records)
    in_bytes = pyarrow.table({"text": [text.encode() for text in texts]})
    for name in ("a.jsonl", "a.jsonl.gz"):
        write_lines(place / name, records)
    for name, part in {"split/0.jsonl": records[:13], "split/deeper/1.jsonl.gz": records[13:]}.items():
        write_lines(place / name, part)
    (place / "a.json").write_text(json.dumps(records, indent=1))
    write_lines(place / "folder/0.jsonl", records[:13])
    for name, part in {"a": in_bytes, "folder/a": table[13:], "hub/0": table[:15], "hub/1": table[15:]}.items():
        (place / name).parent.mkdir(exist_ok=True)
        pyarrow.parquet.write_table(part, place / f"{name}.parquet", row_group_size=7)
    for i, text in enumerate(texts):
        (place / f"t{i:02}.txt").write_text(text, encoding="utf-8")
        (place / f"t{i:02}.txt.gz").write_bytes(gzip.compress(text.encode()))
    (place / "split/link.jsonl").symlink_to("0.jsonl")
    names = ("a.jsonl", "a.jsonl.gz", "a.json", "split/**/**/*.jsonl*", "a.parquet", "folder", "t*.txt", "t*.gz")
    sources = [{"source": str(place / name), "max_documents": most} for name in names]
    sources += [{"source": f"hf:{place / 'hub'}:train", "max_documents": most}]
    printed, wanted = rank_by(sources), counted(texts[:most], tokenizer)
    for corpus, source in zip(load_corpora(token_counts(place)), sources, strict=True):
        assert as_counter(corpus.counts) == wanted, source
        assert corpus.documents == min(most or 40, 40) and corpus.rejected == 0
        told = f"{wanted.total():,} tokens in {corpus.documents} documents; no record rejected"
        assert f"{source['source']}: {told}" in printed
    counts, _ = load_token_counts(token_counts(place))
    ranked = sorted(wanted.items(), key=lambda item: (-item[1], item[0]))[:9]
    assert counts.argsort(descending=True, stable=True).tolist()[: len(ranked)] == [token for token, _ in ranked]


def read(source: Path) -> tuple[list[corpus_reader.Item], list[dict[str, Any]]]:
    """(items, rejects) of a source."""
    rejects = Rejects(source.parent / "rejects")
    found = list(items(RankingSource(source=str(source)), rejects))
    kept = [json.loads(line) for line in (source.parent / "rejects").open()] if rejects.total else []
    (source.parent / "rejects").unlink(missing_ok=True)
    return found, kept


PARTS = [b"a", b" ", b"\n", b"\r", "é".encode(), "☂".encode(), "𝄞".encode(), b"\x80", b"\xff", b"\xe2", b"\xf0\x9d"]


@pytest.mark.parametrize("examples", [100, pytest.param(2000, marks=EXHAUSTIVE)])
def test_any_bytes_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, examples: int) -> None:
    path = tmp_path / "text.txt"

    @for_all(examples, size=st.sampled_from([1, 2, 5, 9, 99]), parts=st.lists(st.sampled_from(PARTS), max_size=40))
    def check(size: int, parts: list[bytes]) -> None:
        whole = b"".join(parts)
        monkeypatch.setattr(corpus_reader, "PIECE_CHARACTERS", size)
        path.write_bytes(whole)
        found, rejected = read(path)
        texts = [item.record["text"] for item in found]
        assert all(0 < len(text) <= size for text in texts)
        assert [item.opens for item in found] == [number == 0 for number in range(len(found))]
        # Lines that are not UTF-8 are rejected (of long ones the piece that is not), all others are read.
        lines = whole.split(b"\n")
        bad = {number for number, line in enumerate(lines, start=1) if not is_utf8(line)}
        assert {reject["line"] for reject in rejected} == bad
        good = b"".join(line for number, line in enumerate(lines, start=1) if number not in bad)
        if size == 99 or not bad:
            assert "".join("".join(texts).split()) == "".join(good.decode().split())
        for item in found:
            assert item.record["text"].split("\n")[0].encode() in lines[item.line - 1]


def is_utf8(content: bytes) -> bool:
    return content.decode(errors="ignore").encode() == content


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_a_damaged_packed_file_is_read_up_to_the_damage(tmp_path: Path, ending: str) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in some_texts(6000, 21)).encode()
    half = lines.index(b"\n", len(lines) // 2) + 1
    packed = gzip.compress(lines[:half]) + b"\0" * 9 + gzip.compress(lines[half:])
    unfinished = zlib.compressobj(wbits=31)
    good = unfinished.compress(lines + b'{"text": "the') + unfinished.flush(zlib.Z_FULL_FLUSH)
    path, buffer = tmp_path / f"a.{ending}.gz", 1 << 17  # what gzip may have unpacked when it meets the damage
    write_lines(tmp_path / f"b.{ending}.gz", [{"text": "behind"}])
    for content, lost, damaged in (
        (packed + b"\0" * 5000, 0, False),
        (good, 0, True),
        (good + b"\xff" * 9000, buffer, True),
        (packed[:-6] + bytes([packed[-6] ^ 1]) + packed[-5:], buffer, True),
        (packed + b"more", 0, True),
    ):
        path.write_bytes(content)
        found, rejected = read(tmp_path / "*.gz")
        assert "behind" in found[-1].record["text"] and found[-1].line == 1
        texts = [item.record["text"] for item in found[:-1]]
        text = "".join(texts if ending == "txt" else [json.dumps({"text": text}) + "\n" for text in texts])
        assert lines.startswith(text.encode()) and len(text) >= len(lines) - lost
        # A record that the damage tears is no bad record of its own.
        assert [reject["reason"].split(":")[0] for reject in rejected] == ["damaged file"] * damaged
        assert not damaged or rejected[0]["line"] == 1 + text.count("\n")


def test_conversations_count_what_the_assistant_writes(
    place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase
) -> None:
    said = some_texts(6, 2)
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(said)]
    sharegpt = [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(said)]
    answer = Counter(token for turn in turns_of_messages(tokenizer, messages) for token in turn.output)
    assert answer == counted(said[1::2], tokenizer) + Counter({4: 3})  # the stop tokens are written, too
    turn = {"prompt_token_ids": [2, 60, 4, 3], "output_token_ids": [70, 71, 70, 4], "finish_reason": "stop"}
    regenerated = {"id": "r", "messages": messages, "turns": [turn]}
    own = regenerated | {"generator": {"tokenizer_fingerprint": tokenizer_fingerprint(tokenizer)}}
    foreign = regenerated | {"generator": {"tokenizer_fingerprint": "cd" * 32}}
    for name, record, wanted in [
        ("messages", {"messages": messages, "text": "not this"}, answer),
        ("sharegpt", {"conversations": sharegpt}, answer),
        ("own", own, Counter({70: 2, 71: 1, 4: 1})),
        ("foreign", foreign, answer),
        ("alpaca", {"instruction": said[0], "output": said[1]}, counted([said[1]], tokenizer) + Counter({4: 1})),
    ]:
        rank_by([{"source": str(write_lines(place / f"{name}.jsonl", [record]))}])
        assert as_counter(load_token_counts(token_counts(place))[0]) == wanted, name
    path = write_lines(place / "both.jsonl", [{"messages": messages, "story": said[0]}, {"messages": messages}])
    rank_by([{"source": str(path), "text_field": "story"}])
    assert as_counter(load_token_counts(token_counts(place))[0]) == counted([said[0]], tokenizer) + answer


def test_no_special_tokens_are_added_and_no_text_is_cut(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single="<|pad|> $0", special_tokens=[("<|pad|>", 0)]
    )
    tokenizer.backend_tokenizer.enable_truncation(5)
    assert tokenizer.encode("cat")[0] == 0
    path = write_lines(tmp_path / "a.jsonl", [{"text": "the cat " * 9}])
    source = RankingSource(source=str(path))
    [(ids, _)] = Tokeniser(tokenizer, VOCAB_SIZE).documents(source, Rejects())
    assert Counter(ids) == counted(["the cat " * 9], make_tokenizer())


def test_bad_records_are_kept_and_stop_nothing(
    place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase
) -> None:
    good = some_texts(5, 3)
    bad: dict[str, Any] = {
        "malformed JSON": "{torn\n",
        "empty text": {"text": "  "},
        "wrong type: `text` must be text": {"text": 7},
        "no text": {"other": "x", "more": 1},
        "wrong type: a record must be a JSON object": "[1]\n",
        "not Unicode": {"text": "\ud800"},
        "no assistant turn": {"messages": [{"role": "user", "content": "alone"}]},
        "wrong type: `messages`": {"messages": "none"},
    }
    texts = [{"text": text} for text in good]
    a = write_lines(place / "a.jsonl", [*texts[:3], *bad.values(), *texts[3:]])
    b = place / "b.txt"
    b.write_bytes(b"\xef\xbb\xbfthe cat\nsat \xff on\nthe mat\n")
    for again in (False, True):
        printed = rank_by([{"source": str(a)}, {"source": str(b)}])
        assert printed.count("rejected (") == 2 and printed.count("counted before") == 2 * again
        corpora = load_corpora(token_counts(place))
        assert as_counter(corpora[0].counts) == counted(good, tokenizer)
        assert as_counter(corpora[1].counts) == counted(["the cat\nthe mat\n"], tokenizer)
        assert [corpus.rejected for corpus in corpora] == [8, 1]
        kept = [file.read_text().splitlines() for file in (place / "out/ranking").glob("*.rejects.jsonl")]
        entries = sorted((json.loads(line) for lines in kept for line in lines), key=lambda entry: entry["source"])
        assert [entry["line"] for entry in entries] == [*range(4, 12), 2]
        assert all(e["reason"].startswith(reason) for e, reason in zip(entries, [*bad, "not UTF-8"], strict=True))


# Finished counts are kept.


def test_what_changed_is_counted_anew(place: Path, rank_by: Script) -> None:
    a, b = write_lines(place / "a.jsonl", [{"text": "the cat"}, "{torn\n"]), place / "b.txt"
    b.write_text("the dog ran")
    sources = [{"source": str(a)}, {"source": str(b)}]
    assert "counted before" not in rank_by(sources)
    assert rank_by([{"source": str(b), "weight": 2.5}]).count("counted before") == 1  # weights and company are nothing
    write_lines(a, [{"text": "the mat"}])
    printed = rank_by(sources)
    assert f"{a}: counted before" not in printed and f"{b}: counted before" in printed
    corpus = load_corpora(token_counts(place))[0]
    assert as_counter(corpus.counts) == counted(["the mat"], make_tokenizer()) and corpus.rejected == 0
    assert "counted before" not in rank_by([{"source": str(a), "max_documents": 1}])
    (place / "other.jinja").write_text(make_tokenizer().get_chat_template() + " ")
    assert "counted before" not in rank_by([{"source": str(b)}], f"target.chat_template={place / 'other.jinja'}")


@pytest.mark.parametrize("end", [ConnectionError("the line is dead\nand more"), KeyboardInterrupt()])
def test_an_interrupted_count_starts_over_and_finished_ones_are_kept(
    place: Path, rank_by: Script, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    texts, broken = some_texts(60, 9), [end]

    def stream() -> Iterator[dict[str, Any]]:
        for i, text in enumerate(texts):
            if i == 41 and broken:
                raise broken.pop()
            yield {"text": text if i else 7}

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(stream))
    path = write_lines(place / "a.jsonl", [{"text": "the cat"}])
    sources = [{"source": str(path)}, {"source": "hf:org/texts:train"}]
    with pytest.raises((UserError, KeyboardInterrupt)):
        rank_by(sources)
    printed = rank_by(sources)
    assert f"{path}: counted before" in printed and "hf:org/texts:train: counted" not in printed
    dataset = load_corpora(token_counts(place))[1]
    assert as_counter(dataset.counts) == counted(texts[1:], make_tokenizer())
    [kept] = (place / "out/ranking").glob("*.rejects.jsonl")
    assert (dataset.documents, len(kept.read_text().splitlines())) == (59, 1)  # not once for each try
