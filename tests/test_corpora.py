"""Corpora of a ranking: how files and datasets are read, what is counted, what is rejected."""

import datetime
import decimal
import gzip
import json
import random
import re
import zlib
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.corpus import counts as corpus_counts
from draftsmith.data_gen.corpus import reader as corpus_reader
from draftsmith.data_gen.corpus.counts import TextCounter
from draftsmith.data_gen.corpus.reader import corpus_of
from draftsmith.data_gen.rows.training_rows import turns_of_messages
from draftsmith.models.chat import tokenizer_fingerprint
from draftsmith.models.vocab import load_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import RankingSource
from tests.conftest import VOCAB_SIZE, make_tokenizer
from tests.ranking_cases import (
    WORDS,
    Script,
    as_counter,
    counted,
    load_corpora,
    some_texts,
    token_counts,
    write_lines,
)
from tests.ranking_cases import place as place
from tests.ranking_cases import rank_by as rank_by

# What is counted.


def test_every_form_of_file_counts_the_same(place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = some_texts(40, 0)
    records = [{"text": text, "n": i} for i, text in enumerate(texts)]
    write_lines(place / "a.jsonl", records)
    write_lines(place / "a.jsonl.gz", records)
    write_lines(place / "split/0.jsonl", records[:13])
    write_lines(place / "split/deeper/1.jsonl.gz", records[13:])
    table = pyarrow.Table.from_pylist(records)
    pyarrow.parquet.write_table(table, place / "a.parquet", row_group_size=7)
    (place / "hub/data").mkdir(parents=True)
    for i in range(3):
        pyarrow.parquet.write_table(table.slice(i * 15, 15), place / f"hub/data/train-0000{i}-of-00003.parquet")
    for i, text in enumerate(texts):
        (place / f"texts{i:02}.txt").write_text(text, encoding="utf-8")
        (place / f"texts{i:02}.txt.gz").write_bytes(gzip.compress(text.encode()))
    wanted = counted(texts, tokenizer)
    names = ("a.jsonl", "a.jsonl.gz", "split/**/*.jsonl*", "a.parquet", "texts*.txt", "texts*.txt.gz")
    sources = [{"source": str(place / name)} for name in names] + [{"source": f"hf:{place / 'hub'}:train"}]
    printed = rank_by(sources)
    for corpus, source in zip(load_corpora(token_counts(place)), sources, strict=True):
        assert as_counter(corpus.counts) == wanted, source
        assert corpus.documents == 40 and corpus.rejected == 0
        assert f"{source['source']}: {wanted.total():,} tokens in 40 documents; no record rejected" in printed
    counts, _ = load_token_counts(token_counts(place))
    assert counts.argsort(descending=True, stable=True).tolist()[:20] == [
        token for token, _ in sorted(wanted.items(), key=lambda item: (-item[1], item[0]))[:20]
    ]


def test_any_bytes_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, path = random.Random(20), tmp_path / "text.txt"
    parts = [b"a", b" ", b"\n", b"\r", "é".encode(), "☂".encode(), "𝄞".encode(), b"\x80", b"\xff", b"\xe2", b"\xf0\x9d"]
    cases = [(65536, b"\x80"), (65536, b"a" * 65535 + b"\n" + b"\x80"), (1, b"\x80" * 3)]
    for _ in range(600):
        kinds = chance.sample(parts, chance.randint(1, 4))
        cases.append((chance.randint(1, 9), b"".join(chance.choices(kinds, k=chance.randint(1, 40)))))
    for size, whole in cases:
        monkeypatch.setattr(corpus_reader, "PIECE_BYTES", size)
        path.write_bytes(whole)
        corpus = corpus_of(RankingSource(source=str(path)))
        items, positions = [], []
        for item in corpus.items({}):
            items.append(item)
            positions.append(corpus.position())
        assert b"".join(item.content for item in items) == whole
        assert all(0 < len(item.content) <= size for item in items)
        at = chance.randrange(len(items))
        assert list(corpus_of(corpus.section).items(positions[at])) == items[at + 1 :]
        if size >= 4 and is_utf8(whole):  # no character is longer
            assert all(is_utf8(item.content) for item in items)
        for item in items:  # a line that is no UTF-8 is rejected, every other one read
            rejects: list[Any] = []
            read = dict(corpus_counts._decoded(item._replace(opens=False), rejects))
            lines = {item.line + i: line for i, line in enumerate(item.content.split(b"\n"))}
            bad = {number for number, line in lines.items() if not is_utf8(line)}
            assert [reject[1] for reject in rejects] == sorted(bad)
            if bad:
                wanted = {number: line.decode() for number, line in lines.items() if line and number not in bad}
                assert {number: text.removesuffix("\n") for number, text in read.items() if text != "\n"} == wanted


def is_utf8(content: bytes) -> bool:
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_a_damaged_packed_file_is_read_up_to_the_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_reader, "PIECE_BYTES", 7000)
    words = " ".join(random.Random(21).choices(WORDS, k=100_000)).encode()
    packed = gzip.compress(words[:90_000]) + b"\0" * 9 + gzip.compress(words[90_000:])
    unfinished = zlib.compressobj(wbits=31)
    good = unfinished.compress(words) + unfinished.flush(zlib.Z_FULL_FLUSH)
    wrong_sum = bytearray(packed)
    wrong_sum[-6] ^= 1
    path = tmp_path / "a.txt.gz"
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(b"behind"))
    buffer = 1 << 17  # what gzip may have unpacked when it meets the damage
    for content, lost, reason in [
        (packed + b"\0" * 5000, 0, None),
        (good, 0, "Compressed file ended before the end-of-stream marker was reached"),
        (good + b"\xff" * 9000, buffer, "invalid block type"),
        (bytes(wrong_sum), buffer, "CRC check failed"),
        (packed + b"more", 0, "Not a gzipped file"),
    ]:
        path.write_bytes(content)
        corpus = corpus_of(RankingSource(source=str(tmp_path / "*.gz")))
        items, positions = [], []
        for item in corpus.items({}):
            items.append(item)
            positions.append(corpus.position())
        assert items[-1].content == b"behind"
        bad = [item for item in items if item.kind == "bad"]
        assert len(bad) == (reason is not None)
        assert all(str(reason) in item.content and not item.opens for item in bad)
        text = b"".join(item.content for item in items[:-1] if item.kind != "bad")
        assert words.startswith(text) and len(text) >= len(words) - lost
        assert all(item.line == 1 + text.count(b"\n") for item in bad)
        for at in (0, len(items) // 2, len(items) - 2):
            assert list(corpus_of(corpus.section).items(positions[at])) == items[at + 1 :]
    # A record that the damage tears is no bad record of its own.
    lines = "".join(json.dumps({"text": text}) + "\n" for text in some_texts(20, 22)).encode()
    torn = tmp_path / "c.jsonl.gz"
    unfinished = zlib.compressobj(wbits=31)
    torn.write_bytes(unfinished.compress(lines + b'{"text": "the') + unfinished.flush(zlib.Z_SYNC_FLUSH))
    kinds = [item.kind for item in corpus_of(RankingSource(source=str(torn))).items({})]
    assert kinds == ["line"] * 20 + ["bad"]


def test_a_damaged_table_loses_the_damaged_rows_alone(
    place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = some_texts(60, 23)
    path = place / "a.parquet"
    table = pyarrow.Table.from_pylist([{"text": text} for text in texts])
    pyarrow.parquet.write_table(table, path, row_group_size=20, use_dictionary=False, compression="snappy")
    chunk = pyarrow.parquet.ParquetFile(path).metadata.row_group(0).column(0)
    content = bytearray(path.read_bytes())
    start, size = chunk.data_page_offset, chunk.total_compressed_size
    content[start + size // 2 : start + size] = b"\xff" * (size - size // 2)
    path.write_bytes(content)
    printed = rank_by([{"source": str(path)}])
    corpus = load_corpora(token_counts(place))[0]
    assert as_counter(corpus.counts) == counted(texts[20:], tokenizer)
    assert (corpus.documents, corpus.rejected) == (40, 1) and "1 damaged file" in printed
    kept = json.loads(next((place / "out/ranking").glob("*.rejects.jsonl")).read_text())
    assert kept["line"] == 1 and re.search(r"damaged file: .*Corrupt snappy.*; rows 1 to 20 are lost", kept["reason"])
    # Nothing but damage is told before anything is counted, with what to do.
    pyarrow.parquet.write_table(table, path, use_dictionary=False, compression="snappy")
    content = bytearray(path.read_bytes())
    content[start + size // 2 : start + size] = b"\xff" * (size - size // 2)
    path.write_bytes(content)
    with pytest.raises(UserError, match=r"none of its first records .*a\.parquet:1: damaged .*fetch it again"):
        rank_by([{"source": str(path)}])


@pytest.mark.parametrize("hub", [False, True])
def test_columns_of_bytes_are_text_and_dates_and_numbers_are_not(
    place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase, hub: bool
) -> None:
    path = place / "hub/train.parquet"
    path.parent.mkdir()
    source = f"hf:{path.parent}" if hub else str(path)

    def rank_column(values: list[Any]) -> None:
        pyarrow.parquet.write_table(pyarrow.table({"text": values}), path)
        rank_by([{"source": source}])

    texts = some_texts(5, 24)
    rank_column([*(text.encode() for text in texts), b"caf\xe9", b"", None])
    corpus = load_corpora(token_counts(place))[0]
    assert as_counter(corpus.counts) == counted(texts, tokenizer) and corpus.rejected == 3
    reasons = [json.loads(line)["reason"] for file in (place / "out/ranking").glob("*.jsonl") for line in file.open()]
    assert reasons[0] == "not UTF-8: 4 bytes in `text`" and reasons[1] == "empty text"
    for value, kind in [
        (datetime.date(2026, 1, 1), "date"),
        (datetime.timedelta(1), "timedelta"),
        (decimal.Decimal("1.5"), "Decimal"),
        (7, "a number"),
        (["x"], "a list"),
    ]:
        with pytest.raises(UserError, match=f"wrong type: `text` must be text, this is {kind}"):
            rank_column([value])


def test_texts_of_conversations_may_be_bytes_but_no_pictures(
    place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase
) -> None:
    path = place / "a.parquet"
    rows = [[(b"user", b"x"), (b"assistant", said)] for said in ("the café".encode(), b"caf\xe9")]
    messages = [[{"role": role.decode(), "content": content} for role, content in row] for row in rows]
    pyarrow.parquet.write_table(pyarrow.table({"messages": messages}), path)
    rank_by([{"source": str(path)}])
    corpus = load_corpora(token_counts(place))[0]
    assert as_counter(corpus.counts) == counted(["the café"], tokenizer) + Counter({4: 1})
    assert (corpus.documents, corpus.rejected) == (2, 1)


def test_a_file_counts_once_on_whatever_ways_it_is_found(
    place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase
) -> None:
    for name in ("a/x.txt", "a/b/y.txt", "a/b/c/z.txt"):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(f"the cat sat {name}")
    (place / "a/link.txt").symlink_to("x.txt")
    wanted = counted([f"the cat sat {name}" for name in ("a/x.txt", "a/b/y.txt", "a/b/c/z.txt")], tokenizer)
    deep = {"source": f"{place}/a/**/**/*.txt"}
    rank_by([deep])
    corpus = load_corpora(token_counts(place))[0]
    assert as_counter(corpus.counts) == wanted and corpus.documents == 3


@pytest.mark.parametrize("ending", ["jsonl", "jsonl.gz", "parquet", "txt", "hub"])
def test_a_corpus_goes_on_from_every_chunk(place: Path, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    monkeypatch.setattr(corpus_reader, "CHUNK_CHARACTERS", 300)
    monkeypatch.setattr(corpus_reader, "PIECE_BYTES", 90)
    monkeypatch.setattr(corpus_reader, "ROWS_AT_ONCE", 4)
    records = [{"text": text} for text in some_texts(40, 1)]
    source = str(place / f"*.{ending}")
    for i in range(3):
        part = records[i * 15 : i * 15 + 15]
        if ending in ("parquet", "hub"):
            name = place / (f"{i}.parquet" if ending == "parquet" else f"hub/train-{i}.parquet")
            name.parent.mkdir(exist_ok=True)
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(part), name, row_group_size=6)
        elif ending == "txt":
            (place / f"{i}.txt").write_text("\n".join(record["text"] for record in part))
        else:
            write_lines(place / f"{i}.{ending}", [*part, "\n", "  \n"])
    section = RankingSource(source=f"hf:{place / 'hub'}" if ending == "hub" else source, max_documents=37)
    if ending == "txt":
        section = RankingSource(source=source, max_documents=2)
    batches = list(corpus_of(section).chunks({}, 0))
    assert len(batches) > 5 and sum(batch.documents for batch in batches) == section.max_documents
    whole = [item.content for batch in batches for item in batch.items]
    if ending != "txt":
        contents = [json.loads(content) if isinstance(content, bytes) else {"text": content} for content in whole]
        assert contents == records[:37]
    documents = 0
    for i, batch in enumerate(batches):
        documents += batch.documents
        position = json.loads(json.dumps(batch.position))
        rest = [item.content for after in corpus_of(section).chunks(position, documents) for item in after.items]
        assert rest == [item.content for after in batches[i + 1 :] for item in after.items]


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


def test_no_special_tokens_are_added(place: Path, rank_by: Script, target_dir: Path) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single="<|pad|> $0", special_tokens=[("<|pad|>", 0)]
    )
    tokenizer.backend_tokenizer.enable_truncation(5)
    assert tokenizer.encode("cat")[0] == 0
    items = list(
        corpus_of(RankingSource(source=str(write_lines(place / "a.jsonl", [{"text": "the cat " * 9}])))).items({})
    )
    found = TextCounter(tokenizer, VOCAB_SIZE).count(items, "text")
    wanted = counted(["the cat " * 9], make_tokenizer())
    assert dict(zip(found.token_ids.tolist(), found.times.tolist(), strict=True)) == wanted and wanted.total() > 5


def test_bad_records_are_kept_and_stop_nothing(
    place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase
) -> None:
    good = some_texts(5, 3)
    lines = [
        *({"text": text} for text in good[:3]),
        "{torn\n",
        {"text": "  "},
        {"text": 7},
        {"other": "x", "more": 1},
        "[1]\n",
        {"text": "\ud800"},
        {"messages": [{"role": "user", "content": "alone"}]},
        {"messages": "none"},
        *({"text": text} for text in good[3:]),
    ]
    path = write_lines(place / "a.jsonl", lines)
    path.write_bytes(path.read_bytes() + b'{"text": "\xff"}\n')
    text = place / "b.txt"
    text.write_bytes(b"\xef\xbb\xbfthe cat\nsat \xff on\nthe mat\n")
    packed = place / "c.jsonl.gz"
    whole = gzip.compress("".join(json.dumps({"text": t}) + "\n" for t in some_texts(300, 4)).encode())
    packed.write_bytes(whole[: len(whole) * 2 // 3])
    printed = rank_by([{"source": str(path)}, {"source": str(text)}, {"source": str(packed)}])
    corpora = load_corpora(token_counts(place))
    assert as_counter(corpora[0].counts) == counted(good, tokenizer)
    assert as_counter(corpora[1].counts) == counted(["the cat\n", "the mat\n"], tokenizer)
    assert [corpus.rejected for corpus in corpora] == [9, 1, 1] and corpora[2].tokens > 100
    kept = {file.name: file for file in (place / "out/ranking").glob("*.rejects.jsonl")}
    assert len(kept) == 3
    entries = [json.loads(line) for file in kept.values() for line in file.read_text().splitlines()]
    at = {(Path(entry["source"]).name, entry["line"]): entry["reason"] for entry in entries}
    for line, reason in {
        4: "malformed JSON",
        5: "empty text",
        6: "wrong type: `text` must be text",
        7: "no text: no field `text` and no conversation among other, more",
        8: "wrong type: a record must be a JSON object, this is a list",
        9: "not Unicode",
        10: "no assistant turn",
        11: "wrong type",
        14: "not UTF-8: byte 11",
    }.items():
        assert at["a.jsonl", line].startswith(reason)
    assert at["b.txt", 2] == "not UTF-8: byte 5"
    assert any(name == "c.jsonl.gz" and reason.startswith("damaged file") for (name, _), reason in at.items())
    assert printed.count("rejected (") == 3
    again = rank_by([{"source": str(path)}, {"source": str(text)}, {"source": str(packed)}])
    assert again.count("counted before") == 3 and again.count("rejected (") == 3
    assert entries == [json.loads(line) for file in kept.values() for line in file.read_text().splitlines()]


def test_a_token_that_the_target_lacks_is_rejected(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "cat"}, {"text": "cat 3"}])
    tokenizer = make_tokenizer()
    lacks = max(counted(["cat 3"], tokenizer))
    found = TextCounter(tokenizer, lacks).count(list(corpus_of(RankingSource(source=str(path))).items({})), "text")
    assert [reject[3] for reject in found.rejects] == [
        text for text in ("cat", "cat 3") if max(counted([text], tokenizer)) >= lacks
    ]
