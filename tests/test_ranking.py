"""Rankings by any corpus or blend: what is counted, how it is blended, and that no kill changes it."""

import datetime
import decimal
import gzip
import json
import os
import random
import re
import signal
import subprocess
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import torch
import yaml
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen import rank_vocab
from draftsmith.data_gen.corpus import counts as corpus_counts
from draftsmith.data_gen.corpus import reader as corpus_reader
from draftsmith.data_gen.corpus.counts import Processes, TextCounter
from draftsmith.data_gen.corpus.reader import corpus_of
from draftsmith.data_gen.corpus.template_tokens import template_tokens
from draftsmith.data_gen.rows.training_rows import turns_of_messages
from draftsmith.eval.decoding.contenders import _check_vocab, contender_of
from draftsmith.models.chat import load_tokenizer, tokenizer_fingerprint
from draftsmith.models.vocab import (
    BLEND_SCALE,
    CorpusCounts,
    DraftVocab,
    always_inside,
    blend,
    cut,
    load_corpora,
    load_token_counts,
    save_token_counts,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import ContenderSection, RankingSource, TargetSection, TreeSection
from tests import reference
from tests.conftest import VOCAB_SIZE, make_tokenizer
from tests.crash import CAN_FORK, ROOT, CrashLab, Fault

WORDS = ["the", "cat", "sat", "on", "mat;", "dogs", "ran,", "rain", "fell\nafter", "", "noon", "für", "3.5", "Ü", "☂"]
TEMPLATE = [1, 2, 3, 4]  # system, user, assistant, end: what the tests' chat template writes


def some_texts(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return ["A " + " ".join(chance.choices(WORDS, k=chance.randint(1, 30))) for _ in range(count)]


def counted(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Counter[int]:
    return Counter(token for text in texts for token in tokenizer.encode(text, add_special_tokens=False))


def as_counter(counts: torch.Tensor) -> Counter[int]:
    return Counter({token: count for token, count in enumerate(counts.tolist()) if count})


def write_lines(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(record if isinstance(record, str) else json.dumps(record) + "\n" for record in records)
    (gzip.open if path.suffix == ".gz" else open)(path, "wb").write(text.encode())  # type: ignore[operator]
    return path


@pytest.fixture
def place(tmp_path: Path, target_dir: Path) -> Path:
    """A folder with a recipe of the tests' target; it has no conversations."""
    recipe = {"output_dir": str(tmp_path / "out"), "target": {"model": str(target_dir)}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    return tmp_path


Script = Callable[..., str]


@pytest.fixture
def rank_by(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Script:
    """Calls rank_vocab with these sources, in this process; returns what it prints."""
    monkeypatch.setattr(corpus_reader, "CHUNK_CHARACTERS", 600)
    monkeypatch.setattr(corpus_reader, "PIECE_BYTES", 200)

    def call(sources: list[dict[str, Any]], *arguments: str) -> str:
        ranking = f"data.ranking={json.dumps({'sources': sources, 'workers': 1})}"
        monkeypatch.setattr(sys, "argv", ["rank_vocab.py", str(place / "recipe.yaml"), ranking, *arguments])
        rank_vocab.main()
        return capsys.readouterr().out

    return call


def token_counts(place: Path) -> Path:
    return place / "out" / "token_counts.safetensors"


# The blend.


def test_blend_equals_its_slow_twin() -> None:
    chance = random.Random(0)
    for _ in range(60):
        corpora = [[chance.choice([0, 0, 1, 3, 10**6, 10**12]) for _ in range(20)] for _ in range(chance.randint(2, 4))]
        for corpus in corpora:
            corpus[chance.randrange(20)] += 1
        weights = [chance.choice([1.0, 0.1, 2.5, 1e-9, 1e6]) for _ in corpora]
        ours = blend([(torch.tensor(c), w) for c, w in zip(corpora, weights, strict=True)])
        assert ours.dtype == torch.int64
        assert ours.tolist() == reference.blended_counts(corpora, weights, BLEND_SCALE)


def test_blend_keeps_order_and_every_token_that_was_seen() -> None:
    large, small = torch.tensor([10**12, 10**12 - 1, 1, 0, 0]), torch.tensor([0, 0, 0, 3, 0])
    counts = blend([(large, 1.0), (small, 1e-12)]).tolist()
    assert counts[0] > counts[1] > counts[3] >= counts[2] >= 1 and counts[4] == 0
    # Sizes do not matter, weights do: ten times the text at the same weight is the same ranking.
    assert torch.equal(blend([(large, 1.0), (small * 10, 3.0)]), blend([(large, 2.0), (small, 6.0)]))
    # One corpus keeps its counts, whatever its weight; and its own tensor.
    assert torch.equal(blend([(small, 7.0)]), small) and blend([(small, 7.0)]) is not small


def test_counts_of_a_blend_round_trip_and_old_files_are_read(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    parts = [
        CorpusCounts("a.txt", torch.tensor([5, 0, 1]), 0.5, documents=2, rejected=1),
        CorpusCounts("answers", torch.tensor([0, 2, 2]), None, documents=3),
    ]
    save_token_counts(path, blend([(parts[0].counts, 0.5)]), "ab" * 32, [2], [0, 2], parts)
    counts, metadata = load_token_counts(path)
    assert counts.tolist() == [5, 0, 1] and always_inside(metadata) == {0, 2}
    for ours, theirs in zip(load_corpora(path), parts, strict=True):
        assert torch.equal(ours.counts, theirs.counts) and ours.facts() == theirs.facts()
    save_token_counts(path, counts, "ab" * 32, [2])
    assert load_corpora(path) == [] and always_inside(load_token_counts(path)[1]) == {2}


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


def test_a_text_file_is_cut_into_pieces_that_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(corpus_reader, "PIECE_BYTES", 50)
    whole = ("é☂𝄞" * 40 + " " + "word " * 30 + "\n" + "line of text\n" * 20 + "\ufeffend").encode()
    path = tmp_path / "text.txt"
    path.write_bytes(whole)
    corpus = corpus_of(RankingSource(source=str(path)))
    pieces, places = [], []
    for item in corpus.items({}):
        pieces.append(item)
        places.append(corpus.position())
    assert b"".join(piece.content for piece in pieces) == whole
    assert [piece.opens for piece in pieces] == [True] + [False] * (len(pieces) - 1)
    assert all(len(piece.content) <= 50 and piece.content.decode() for piece in pieces)
    assert all(piece.line == 1 + whole[: whole.index(piece.content)].count(b"\n") for piece in pieces[:5])
    for i, position in enumerate(places):  # wherever a run goes on, it reads the same pieces
        assert list(corpus_of(corpus.section).items(position)) == pieces[i + 1 :]


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
    with pytest.raises(
        UserError, match=r"none of its first records can be used: .*a\.parquet:1: damaged .*fetch it anew"
    ):
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
    answer = Counter(token for _, ids in turns_of_messages(tokenizer, messages) for token in ids)
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


def test_no_special_tokens_are_added(place: Path, rank_by: Script, target_dir: Path, tmp_path: Path) -> None:
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


# Killed and gone on with.


def test_several_processes_count_what_one_counts(
    place: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpus_reader, "CHUNK_CHARACTERS", 300)
    monkeypatch.setattr(corpus_counts, "CHUNKS_BEFORE_PROCESSES", 2)
    path = write_lines(place / "a.jsonl", [*({"text": text} for text in some_texts(200, 5)), "{torn\n", {"text": ""}])
    section = TargetSection(model=str(target_dir))
    tokenizer = load_tokenizer(section)
    found = []
    for workers in (1, 2):
        corpus = corpus_of(RankingSource(source=str(path)))
        with Processes(section, TextCounter(tokenizer, VOCAB_SIZE), workers) as processes:
            folder = place / str(workers)
            found.append(corpus_counts.count_corpus(corpus, folder, "ab" * 32, processes))
            assert (processes._executor is not None) == (workers == 2)
    assert torch.equal(found[0].counts, found[1].counts) and found[0].facts() == found[1].facts()
    assert as_counter(found[0].counts) == counted(some_texts(200, 5), tokenizer) and found[0].rejected == 2


@pytest.fixture(scope="module")
def lab() -> Iterator[CrashLab]:
    with CrashLab(["tests.ranking_in_small_steps", "transformers.models.llama.modeling_llama"]) as lab:
        yield lab


def small_corpora(folder: Path) -> tuple[list[dict[str, Any]], Counter[int], int]:
    """(sources, what their pieces hold, how many records are bad): lines with bad ones between, and text files."""
    folder.mkdir(parents=True, exist_ok=True)
    texts = some_texts(60, 6)
    lines: list[Any] = [{"text": text} for text in texts[:40]]
    lines[10:10] = lines[25:25] = ["{torn\n", {"text": 1}]
    write_lines(folder / "a.jsonl", lines)
    for i in range(2):
        (folder / f"{i}.txt").write_text("\n".join(texts[40 + 10 * i : 50 + 10 * i]))
    pieces = [text for i in range(2) for text in lines_of_at_most_200_bytes(folder / f"{i}.txt")]
    sources = [{"source": str(folder / "a.jsonl")}, {"source": str(folder / "*.txt")}]
    return sources, counted([*texts[:40], *pieces], make_tokenizer()), 4


def lines_of_at_most_200_bytes(path: Path) -> list[str]:
    """Whole lines joined while they have room, as pieces of text files are cut."""
    pieces = [b""]
    for line in path.read_bytes().splitlines(keepends=True):
        assert len(line) <= 200
        if len(pieces[-1] + line) > 200:
            pieces.append(b"")
        pieces[-1] += line
    return [piece.decode() for piece in pieces]


@pytest.mark.skipif(not CAN_FORK, reason="kills forked processes")
def test_a_kill_at_any_moment_counts_nothing_twice_and_loses_nothing(place: Path, lab: CrashLab) -> None:
    sources, seen, bad = small_corpora(place / "texts")

    def arguments(out: str) -> list[str]:
        ranking = json.dumps({"sources": sources, "workers": 1})
        return [str(place / "recipe.yaml"), f"output_dir={place / out}", f"data.ranking={ranking}"]

    module = "tests.ranking_in_small_steps"
    whole = lab.run(module, arguments("whole"), count_events=True)
    assert whole.status == 0, whole.output

    def results(out: str) -> tuple[Any, ...]:
        path = place / out / "token_counts.safetensors"
        corpora = [(corpus.counts.tolist(), corpus.facts()) for corpus in load_corpora(path)]
        return (*(load_token_counts(path)[0].tolist(), load_token_counts(path)[1]), corpora)

    wanted = results("whole")
    assert sum((Counter(dict(enumerate(counts))) for counts, _ in wanted[2]), Counter()) == seen
    chance, killed = random.Random(7), 0
    faults = [Fault("rename", n) for n in range(1, whole.events["rename"] + 1, 3)]
    faults += [Fault("write", n, chance.random()) for n in range(1, whole.events["write"] + 1, 4)]
    for number, fault in enumerate(faults):
        out = f"killed{number}"
        ending = lab.run(module, arguments(out), fault=fault)
        assert ending.status == -signal.SIGKILL, ending.output
        killed += 1
        # Once more, early in what is left.
        lab.run(module, arguments(out), fault=Fault("rename", 2))
        ending = lab.run(module, arguments(out))
        assert ending.status == 0, ending.output
        assert results(out) == wanted, fault
        kept = [line for file in (place / out / "ranking").glob("*.rejects.jsonl") for line in file.open()]
        assert len(kept) == bad, fault
    assert killed == len(faults) >= 8


@pytest.mark.slow
def test_killed_with_its_processes_it_goes_on(place: Path, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = some_texts(3000, 8)
    path = write_lines(place / "a.jsonl", [{"text": text} for text in texts])
    ranking = json.dumps({"sources": [{"source": str(path)}], "workers": 2})
    command = [
        sys.executable,
        "-c",
        "from tests.ranking_in_small_steps import main; main()",
        str(place / "recipe.yaml"),
    ]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    run = subprocess.Popen(
        [*command, f"data.ranking={ranking}"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    state = corpus_counts.progress_path(place / "out/ranking", str(path))

    def documents() -> int:
        if not state.exists():
            return 0
        _, metadata = corpus_counts.read_tensors(state, "progress")
        return json.loads(metadata["progress"])["documents"]

    children: list[int] = []
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and run.poll() is None and documents() < 200:
        time.sleep(0.02)
    assert run.poll() is None, run.stdout.read() if run.stdout else ""
    children = descendants(run.pid)
    run.kill()
    run.wait()
    before = documents()
    assert 200 <= before < 3000
    while any(alive(child) for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(alive(child) for child in children)  # nobody is left behind
    alone = ranking.replace('"workers": 2', '"workers": 1')  # how many there are changes nothing
    again = subprocess.run(
        [*command, f"data.ranking={alone}"], cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    assert f"goes on behind {before:,} documents" in again.stdout
    assert as_counter(load_token_counts(token_counts(place))[0]) == counted(texts, tokenizer)


def descendants(pid: int) -> list[int]:
    """Where the system tells them."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *descendants(child)]
    return found


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_what_changed_is_counted_anew_with_a_word(place: Path, rank_by: Script, target_dir: Path) -> None:
    a, b = write_lines(place / "a.jsonl", [{"text": "the cat"}, "{torn\n"]), place / "b.txt"
    b.write_text("the dog ran")
    sources = [{"source": str(a)}, {"source": str(b)}]
    printed = rank_by(sources)
    assert "counted anew" not in printed and "counted before" not in printed
    # Weights and company change nothing.
    assert rank_by([{"source": str(b), "weight": 2.5}]).count("counted before") == 1
    write_lines(a, [{"text": "the mat"}])
    printed = rank_by(sources)
    assert f"{a}: counted anew: its files changed" in printed and f"{b}: counted before" in printed
    corpus = load_corpora(token_counts(place))[0]
    assert as_counter(corpus.counts) == counted(["the mat"], make_tokenizer()) and corpus.rejected == 0
    assert not list((place / "out/ranking").glob("*a-jsonl*.rejects.jsonl"))
    assert f"{a}: counted anew: its max_documents changed" in rank_by([{"source": str(a), "max_documents": 1}])
    state = corpus_counts.progress_path(place / "out/ranking", str(b))
    state.write_bytes(state.read_bytes()[:-7])
    assert f"{b}: counted anew: {state} cannot be read" in rank_by([{"source": str(b)}])
    recipe = yaml.safe_load((place / "recipe.yaml").read_text())
    template = place / "other.jinja"
    template.write_text(make_tokenizer().get_chat_template() + " ")
    recipe["target"]["chat_template"] = str(template)
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert f"{b}: counted anew: its tokenizer changed" in rank_by([{"source": str(b)}])


def test_a_dataset_that_breaks_off_goes_on(place: Path, rank_by: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    import datasets

    texts = some_texts(60, 9)
    broken = [True]

    def stream() -> Iterator[dict[str, str]]:
        for i, text in enumerate(texts):
            if i == 41 and broken[0]:
                raise ConnectionError("the line is dead\nand more")
            yield {"text": text}

    class Rows:
        def __iter__(self) -> Iterator[dict[str, str]]:
            return stream()

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: Rows())
    monkeypatch.setattr(corpus_reader, "CHUNK_CHARACTERS", 100)
    with pytest.raises(
        UserError, match=r"hf:org/texts:train: datasets cannot read on behind row 41: ConnectionError: the"
    ):
        rank_by([{"source": "hf:org/texts:train"}])
    broken[0] = False
    assert "goes on behind" in rank_by([{"source": "hf:org/texts:train"}])
    assert as_counter(load_token_counts(token_counts(place))[0]) == counted(texts, make_tokenizer())


# What is chosen.


def test_stop_and_template_tokens_are_inside_of_everything(place: Path, rank_by: Script, target_dir: Path) -> None:
    source = {"source": str(write_lines(place / "a.jsonl", [{"text": text} for text in some_texts(30, 10)]))}
    rank_by([source], "drafter.vocab_size=12")
    report = json.loads((place / "out/ranking_coverage.json").read_text())
    assert [entry["id"] for entry in report["always_inside"]] == TEMPLATE
    vocab = DraftVocab.load(place / "out/draft_vocab.safetensors")
    counts, metadata = load_token_counts(token_counts(place))
    assert not counts[TEMPLATE].any()  # foreign text holds none of them
    assert vocab.size == 12 == len(set(vocab.target_ids.tolist())) and vocab.t2d[TEMPLATE].all()
    assert vocab.target_ids.tolist() == reference.most_frequent(list(range(VOCAB_SIZE)), counts.tolist(), 12, TEMPLATE)
    assert metadata["stop_ids"] == "[4]" and metadata["template_ids"] == "[1, 2, 3, 4]"
    # A cut while decoding takes them from the file: told by a static tree whose rank 8 a cut of 8 does not have.
    recipe = load_recipe(place / "recipe.yaml")
    tree = TreeSection(vocab_size=4)
    contender = contender_of(recipe, ContenderSection(name="", tree=tree), "eval.tree")
    contender = type(contender)(**{**vars(contender), "drafter": None})
    fingerprint = tokenizer_fingerprint(make_tokenizer())
    _check_vocab(contender, VOCAB_SIZE, fingerprint, [4])
    less = type(contender)(**{**vars(contender), "tree": TreeSection(vocab_size=3)})
    with pytest.raises(UserError, match=r"3 has no room for the 4 stop tokens \[1, 2, 3, 4\] \(template tokens among"):
        _check_vocab(less, VOCAB_SIZE, fingerprint, [4])
    assert cut(DraftVocab.full(VOCAB_SIZE), counts, 12, always_inside(metadata)).same_as(vocab)


def test_validation_replay_cuts_by_the_file_too(place: Path, rank_by: Script) -> None:
    from draftsmith.train.run.validation_replay import cut_of

    rank_by([{"source": str(write_lines(place / "a.jsonl", [{"text": "the cat sat"}]))}])
    recipe = load_recipe(place / "recipe.yaml", ["eval.tree.vocab_size=5"])
    found = cut_of(recipe, DraftVocab.full(VOCAB_SIZE), tokenizer_fingerprint(make_tokenizer()), [4])
    assert found is not None and found.t2d[TEMPLATE].all() and found.size == 5


THINKING = (
    "{%- for message in messages -%}<|{{ message['role'] }}|>"
    "{%- if message['role'] == 'assistant' %}say: {% endif %}{{ message['content'] }}"
    "<|end|>\n{% endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def test_template_tokens_are_the_marks_and_what_stands_in_answers() -> None:
    tokenizer = make_tokenizer()
    assert template_tokens(tokenizer) == ((1, 2, 3, 4), (4,))
    tokenizer.chat_template = THINKING
    written = set(tokenizer.encode("say:", add_special_tokens=False))
    found, in_answers = map(set, template_tokens(tokenizer))
    assert {1, 2, 3, 4} | written <= found and found - written <= {1, 2, 3, 4, *tokenizer.encode(" ")}
    assert in_answers == found - {1, 2, 3}
    tokenizer.chat_template = "{{ raise_exception('never') }}"
    with pytest.raises(UserError, match=r"takes no conversation of a question and an answer: .*never"):
        template_tokens(tokenizer)


CALLING = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}<|assistant|>{% generation %}say: "
    "{% if message['tool_calls'] %}<|system|>{{ message['tool_calls'][0]['function']['name'] }}{% endif %}"
    "{{ message['content'] }}<|end|>{% endgeneration %}"
    "{%- else -%}<|user|>{{ message['content'] }}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def test_what_the_template_writes_into_answers_is_inside_of_a_ranking_by_answers(place: Path, rank_by: Script) -> None:
    template = place / "calling.jinja"
    template.write_text(CALLING)
    recipe = yaml.safe_load((place / "recipe.yaml").read_text())
    recipe["target"]["chat_template"] = str(template)
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    say = make_tokenizer().encode("say: ", add_special_tokens=False)
    wanted = sorted({1, 4, *say})  # here <|system|> opens a call; the marks of turns nobody has to draft
    rare = next(token for token in range(70, 200) if token not in wanted)
    turn = {"prompt_token_ids": [2, 60, 4, 3], "output_token_ids": [rare] * 9 + [4], "finish_reason": "stop"}
    line = {"id": "c", "messages": [{"role": "user", "content": "x"}], "turns": [turn]}
    write_lines(place / "out/conversations.jsonl", [line])
    rank_by([], f"drafter.vocab_size={len(wanted) + 1}")
    vocab = DraftVocab.load(place / "out/draft_vocab.safetensors")
    assert vocab.target_ids.tolist() == sorted([*wanted, rare])
    counts, metadata = load_token_counts(token_counts(place))
    assert not counts[sorted({*wanted} - {4})].any() and always_inside(metadata) == set(wanted)
    assert metadata["stop_ids"] == "[4]" and 4 not in json.loads(metadata["template_ids"])
    with pytest.raises(UserError, match=rf"has no room for the {len(wanted)} stop and template tokens"):
        rank_by(
            [],
            "drafter.vocab_size=2",
            f"output_dir={place / 'new'}",
            f"data.conversations={place}/out/conversations.jsonl",
        )


def test_answers_that_are_wanted_for_comparison_alone_block_nothing(place: Path, rank_by: Script) -> None:
    source = {"source": str(write_lines(place / "a.jsonl", [{"text": "the cat sat"}]))}
    turn = {"prompt_token_ids": [2, 60, 4, 3], "output_token_ids": [VOCAB_SIZE + 7, 4], "finish_reason": "stop"}
    beyond = json.dumps({"id": "c", "messages": [{"role": "user", "content": "x"}], "turns": [turn]})
    for content, words in [
        ("", "data.conversations: "),
        ("{torn\n", "holds no token to count|data.conversations: "),
        (beyond, f"token {VOCAB_SIZE + 7} is outside"),
    ]:
        (place / "out").mkdir(exist_ok=True)
        (place / "out/conversations.jsonl").write_text(content)
        printed = rank_by([source])
        assert re.search(rf"note: the coverage of the target's own answers is not told: .*({words})", printed), printed
        assert [corpus.source for corpus in load_corpora(token_counts(place))] == [source["source"]]
        with pytest.raises(UserError, match=rf"answers holds no token|{words}"):
            rank_by([source, {"source": "answers"}])


def test_coverage_by_corpus_and_size(place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [some_texts(30, 11), ["zebra quiz box jam " * 20]]
    paths = [write_lines(place / f"{i}.jsonl", [{"text": text} for text in part]) for i, part in enumerate(texts)]
    turn = {"prompt_token_ids": [2, 60, 4, 3], "output_token_ids": [70, 71, 70, 4], "finish_reason": "stop"}
    line = {"id": "c", "messages": [{"role": "user", "content": "x"}], "turns": [turn]}
    write_lines(place / "out/conversations.jsonl", [line])
    weights = [3.0, 0.5]
    sources = [{"source": str(path), "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    printed = rank_by(sources)
    report = json.loads((place / "out/ranking_coverage.json").read_text())
    found = [counted(part, tokenizer) for part in texts]
    both = [[part[token] for token in range(VOCAB_SIZE)] for part in found]
    ranking = reference.blended_counts(both, weights, BLEND_SCALE)
    assert report["sizes"] == [4, 8, 16, 32, 64, 128, 256, VOCAB_SIZE]
    answers = Counter([70, 71, 70, 4])
    columns = {"blend": Counter(dict(enumerate(ranking))), str(paths[0]): found[0], str(paths[1]): found[1]}
    columns["answers"] = answers  # not counted in, but compared with
    assert list(report["covered_share"]) == list(columns)
    for name, corpus in columns.items():
        for size, share in zip(report["sizes"], report["covered_share"][name], strict=True):
            inside = reference.most_frequent(list(range(VOCAB_SIZE)), ranking, size, TEMPLATE)
            assert share == pytest.approx(sum(corpus[token] for token in inside) / corpus.total(), abs=1e-6)
    rows = [row.split() for row in printed.splitlines() if row.endswith("%")]
    assert [row[0] for row in rows] == [f"{size:,}" for size in report["sizes"]]
    assert rows[3][1:] == [f"{share[3]:.2%}" for share in report["covered_share"].values()]
    assert [facts["weight"] for facts in report["corpora"]] == [3.0, 0.5, None]
    assert load_token_counts(token_counts(place))[0].tolist() == ranking
    # As a source of the blend, the answers come in the recipe's order.
    rank_by([{"source": "answers", "weight": 1}, sources[0]])
    assert [corpus.source for corpus in load_corpora(token_counts(place))] == ["answers", str(paths[0])]
    assert as_counter(load_corpora(token_counts(place))[0].counts) == answers


def test_the_answers_alone_are_counted_as_without_a_ranking(place: Path, rank_by: Script) -> None:
    turn = {"prompt_token_ids": [2, 60, 4, 3], "output_token_ids": [70, 71, 70, 4], "finish_reason": "stop"}
    line = {"id": "c", "messages": [{"role": "user", "content": "x"}], "turns": [turn]}
    write_lines(place / "out/conversations.jsonl", [line])
    rank_by([])
    plain, metadata = load_token_counts(token_counts(place))
    assert set(metadata) == {"tokenizer_fingerprint", "counted_tokens", "stop_ids"}
    assert not (place / "out/ranking_coverage.json").exists() and not (place / "out/ranking").exists()
    rank_by([{"source": "answers", "weight": 0.25}])
    assert torch.equal(load_token_counts(token_counts(place))[0], plain)


# What users get wrong.


def test_all_sources_that_are_wrong_are_told_at_once(place: Path, rank_by: Script) -> None:
    good = write_lines(place / "good.jsonl", [{"text": "the cat"}])
    nothing, blank = place / "nothing.txt", write_lines(place / "blank.jsonl", ["\n", "\n"])
    nothing.write_bytes(b"")
    nofield = write_lines(place / "nofield.jsonl", [{"body": "x", "n": 1}])
    table = place / "t.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"body": "x"}]), table)
    fake, array, binary = place / "fake.parquet", place / "array.json", place / "binary.bin"
    fake.write_bytes(b"no parquet")
    array.write_text("[]")
    binary.write_bytes(b"\0\1\2")
    (place / "out").mkdir()
    names = [
        *(good, place / "missing.txt", place / "none*.txt", place, nothing, blank, nofield, table, fake, array, binary),
        *(good, "answers", "hf:", f"hf:{place / 'no-such-dataset'}:train", "hf:org/name:train[:10]"),
    ]
    with pytest.raises(UserError) as caught:
        rank_by([{"source": str(name)} for name in names])
    told = caught.value.problems
    for number, words in [
        (1, "missing.txt: no such file"),
        (2, "none*.txt: no such file"),
        (3, "is a folder; name its files by a pattern"),
        (4, "nothing.txt: empty"),
        (5, "blank.jsonl: there is no record in it"),
        (
            6,
            "none of its first records can be used: .*nofield.jsonl:1: no text: no field `text` .* among body, n; name",
        ),
        (7, "no field `text` and no conversation among body; name the field"),
        (8, "fake.parquet:1: damaged file: cannot be read as parquet: .*; fetch it anew"),
        (9, "array.json: a .json array cannot be read piece by piece"),
        (10, "binary.bin:1: is no text"),
        (11, "good.jsonl stands there twice"),
        (13, "write hf:org/name"),
        (14, "datasets cannot load it"),
        (15, "parts of a split cannot be asked for"),
    ]:
        pattern = words if ".*" in words else re.escape(words)
        assert any(re.search(rf"sources\.{number}: .*{pattern}", problem) for problem in told), (number, told)
    assert any("answers: " in problem and "does not exist" in problem for problem in told)
    assert len(told) == 15 and not list((place / "out").iterdir())  # nothing was counted


def test_a_source_of_bad_records_alone_is_told(place: Path, rank_by: Script) -> None:
    a = write_lines(place / "a.jsonl", [{"messages": [{"role": "user", "content": "alone"}]}] * 3)
    with pytest.raises(UserError, match=r"a\.jsonl holds no token to count: 3 documents, 3 records rejected"):
        rank_by([{"source": str(a)}])
    assert not token_counts(place).exists()


def test_a_corpus_smaller_than_the_vocabulary_is_refused_by_its_name(place: Path, rank_by: Script) -> None:
    a = write_lines(place / "a.jsonl", [{"text": "the cat sat"}])
    seen = len(counted(["the cat sat"], make_tokenizer()))
    with pytest.raises(
        UserError,
        match=rf"100 draft tokens asked for, but .* only {seen + 4} distinct tokens in .*a\.jsonl .*count more text",
    ):
        rank_by([{"source": str(a)}], "drafter.vocab_size=100")
    with pytest.raises(UserError, match=r"3 has no room for the 4 stop and template tokens \[1, 2, 3, 4\]"):
        rank_by([{"source": str(a)}], "drafter.vocab_size=3")
    rank_by([{"source": str(a)}], f"drafter.vocab_size={seen + 4}")
    assert DraftVocab.load(place / "out/draft_vocab.safetensors").size == seen + 4


def test_plan_says_what_would_be_counted_and_writes_nothing(place: Path, rank_by: Script) -> None:
    a = write_lines(place / "a.jsonl", [{"text": "the cat sat"}])
    sources = [{"source": str(a), "weight": 2}, {"source": "hf:org/name:train", "max_documents": 5000}]
    printed = rank_by(sources, "--plan", "drafter.vocab_size=9")
    assert f"counts {a}; weight 2" in printed
    assert "counts hf:org/name:train, 5,000 documents at most; weight 1" in printed
    assert "writes 9 of 320 target tokens" in printed
    assert sorted(path.name for path in place.iterdir()) == ["a.jsonl", "recipe.yaml"]
    with pytest.raises(UserError, match="no such file"):
        rank_by([{"source": str(place / "gone.txt")}], "--plan")
