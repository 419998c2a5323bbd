"""Corpora of a ranking: how files and datasets are read, what is counted, what is rejected, what is kept."""

import gzip
import json
import random
import zlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
import yaml
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen.training_rows.rows import turns_of_messages
from draftsmith.data_gen.vocabulary import reader as corpus_reader
from draftsmith.data_gen.vocabulary.counts import Tokeniser, counts_path
from draftsmith.data_gen.vocabulary.reader import files_of, items
from draftsmith.models.chat import tokenizer_fingerprint
from draftsmith.models.vocab import load_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import RankingSource
from tests.conftest import VOCAB_SIZE, make_tokenizer
from tests.ranking_cases import (
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
    (place / "a.json").write_text(json.dumps(records, indent=1))
    write_lines(place / "folder/0.jsonl", records[:13])
    pyarrow.parquet.write_table(table.slice(13), place / "folder/a.parquet")
    names = ("a.jsonl", "a.jsonl.gz", "a.json", "split/**/*.jsonl*", "a.parquet", "folder", "texts*.txt", "texts*.gz")
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


def read(source: Path) -> tuple[list[corpus_reader.Item], list[dict[str, Any]]]:
    """(items, rejects) of a source."""
    rejects = Rejects(source.parent / "rejects")
    found = list(items(RankingSource(source=str(source)), rejects))
    kept = [json.loads(line) for line in (source.parent / "rejects").open()] if rejects.total else []
    (source.parent / "rejects").unlink(missing_ok=True)
    return found, kept


def test_any_bytes_in_pieces_of_any_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chance, path = random.Random(20), tmp_path / "text.txt"
    parts = [b"a", b" ", b"\n", b"\r", "é".encode(), "☂".encode(), "𝄞".encode(), b"\x80", b"\xff", b"\xe2", b"\xf0\x9d"]
    cases = [(65536, b"\x80"), (65536, b"a" * 65535 + b"\n" + b"\x80"), (1, b"\x80" * 3)]
    for _ in range(600):
        kinds = chance.sample(parts, chance.randint(1, 4))
        cases.append((chance.choice([1, 2, 5, 9, 99]), b"".join(chance.choices(kinds, k=chance.randint(1, 40)))))
    for size, whole in cases:
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
    try:
        content.decode()
    except UnicodeDecodeError:
        return False
    return True


def test_a_damaged_packed_file_is_read_up_to_the_damage(tmp_path: Path) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in some_texts(6000, 21)).encode()
    half = lines.index(b"\n", len(lines) // 2) + 1
    packed = gzip.compress(lines[:half]) + b"\0" * 9 + gzip.compress(lines[half:])
    unfinished = zlib.compressobj(wbits=31)
    good = unfinished.compress(lines + b'{"text": "the') + unfinished.flush(zlib.Z_FULL_FLUSH)
    wrong_sum = bytearray(packed)
    wrong_sum[-6] ^= 1
    buffer = 1 << 17  # what gzip may have unpacked when it meets the damage
    for ending in ("txt", "jsonl"):
        path = tmp_path / ending / f"a.{ending}.gz"
        write_lines(path.parent / f"b.{ending}.gz", [{"text": "behind"}])
        for content, lost, reason in [
            (packed + b"\0" * 5000, 0, None),
            (good, 0, "Compressed file ended before the end-of-stream marker was reached"),
            (good + b"\xff" * 9000, buffer, "invalid block type"),
            (bytes(wrong_sum), buffer, "CRC check failed"),
            (packed + b"more", 0, "Not a gzipped file"),
        ]:
            path.write_bytes(content)
            found, rejected = read(path.parent / "*.gz")
            assert "behind" in found[-1].record["text"] and found[-1].line == 1
            texts = [item.record["text"] for item in found[:-1]]
            text = "".join(texts if ending == "txt" else [json.dumps({"text": text}) + "\n" for text in texts])
            assert lines.startswith(text.encode()) and len(text) >= len(lines) - lost
            # A record that the damage tears is no bad record of its own.
            assert len(rejected) == (reason is not None)
            for reject in rejected:
                assert reject["reason"].startswith("damaged file: ") and str(reason) in reject["reason"]
                assert reject["line"] == 1 + text.count("\n")


def test_a_damaged_table_is_read_up_to_the_damage(
    place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase
) -> None:
    texts = some_texts(600, 23)
    path = place / "a.parquet"
    table = pyarrow.Table.from_pylist([{"text": text} for text in texts])
    pyarrow.parquet.write_table(table, path, row_group_size=256, use_dictionary=False, compression="snappy")
    whole = path.read_bytes()

    def damage(group: int) -> None:
        chunk = pyarrow.parquet.ParquetFile(path).metadata.row_group(group).column(0)
        start, size = chunk.data_page_offset, chunk.total_compressed_size
        path.write_bytes(whole[: start + size // 2] + b"\xff" * (size - size // 2) + whole[start + size :])

    damage(1)
    printed = rank_by([{"source": str(place / "*.parquet")}])
    corpus = load_corpora(token_counts(place))[0]
    assert as_counter(corpus.counts) == counted(texts[:256], tokenizer)
    assert (corpus.documents, corpus.rejected) == (256, 1)
    assert f"note: {path}:257: damaged file: {path}: cannot be read as parquet: Corrupt snappy" in printed
    # Nothing but damage is told before anything is counted.
    path.write_bytes(whole)
    damage(0)
    with pytest.raises(UserError, match=r"none of its first records .*a\.parquet:1: damaged file"):
        rank_by([{"source": str(path)}])


@pytest.mark.parametrize("hub", [False, True])
def test_columns_of_bytes_are_text_and_numbers_are_not(
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
    for value, kind in [(7, "a number"), (["x"], "a list"), (True, "true or false")]:
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
    assert (corpus.documents, corpus.rejected) == (1, 1)


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
    assert files_of(str(place / "a")) == [str(place / "a/link.txt")]  # of a folder, not of those in it


@pytest.mark.parametrize("ending", ["jsonl", "parquet", "txt", "hub"])
def test_a_limit_counts_documents(place: Path, rank_by: Script, ending: str) -> None:
    texts, table = some_texts(20, 1), pyarrow.table({"text": some_texts(20, 1)})
    source = str(place / f"*.{ending}")
    if ending == "hub":
        (place / "hub").mkdir()
        source = f"hf:{place / 'hub'}"
    for i in range(2):
        if ending in ("parquet", "hub"):
            folder = place if ending == "parquet" else place / "hub"
            pyarrow.parquet.write_table(table.slice(10 * i, 10), folder / f"train-{i}.parquet")
        elif ending == "jsonl":
            write_lines(place / f"{i}.jsonl", [{"text": text} for text in texts[10 * i : 10 * i + 10]])
    for i, text in enumerate(texts if ending == "txt" else []):
        (place / f"{i:02}.txt").write_text(text)
    for most in (1, 13, 50):
        rank_by([{"source": source, "max_documents": most}])
        corpus = load_corpora(token_counts(place))[0]
        assert as_counter(corpus.counts) == counted(texts[:most], make_tokenizer())
        assert corpus.documents == min(most, 20)


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
    path = write_lines(place / "a.jsonl", [{"text": "the cat " * 9}])
    tokeniser = Tokeniser(tokenizer, VOCAB_SIZE)
    [found] = tokeniser.documents(RankingSource(source=str(path)), Rejects(), "counting")
    wanted = counted(["the cat " * 9], make_tokenizer())
    assert Counter(found.ids) == wanted and wanted.total() > 5


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
        14: "not UTF-8",
    }.items():
        assert at["a.jsonl", line].startswith(reason)
    assert at["b.txt", 2] == "not UTF-8"
    assert any(name == "c.jsonl.gz" and reason.startswith("damaged file") for (name, _), reason in at.items())
    assert printed.count("rejected (") == 3
    again = rank_by([{"source": str(path)}, {"source": str(text)}, {"source": str(packed)}])
    assert again.count("counted before") == 3 and again.count("rejected (") == 3
    assert entries == [json.loads(line) for file in kept.values() for line in file.read_text().splitlines()]


def test_a_token_that_the_target_lacks_is_rejected(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "a.jsonl", [{"text": "cat"}, {"text": "cat 3"}])
    tokenizer = make_tokenizer()
    lacks = max(counted(["cat 3"], tokenizer))
    rejects = Rejects(tmp_path / "rejects")
    found = list(Tokeniser(tokenizer, lacks).documents(RankingSource(source=str(path)), rejects, "counting"))
    beyond = [text for text in ("cat", "cat 3") if max(counted([text], tokenizer)) >= lacks]
    assert [json.loads(line)["record"]["text"] for line in (tmp_path / "rejects").open()] == beyond
    assert len(found) + len(beyond) == 2


# Finished counts are kept.


def test_what_changed_is_counted_anew_with_a_word(place: Path, rank_by: Script) -> None:
    a, b = write_lines(place / "a.jsonl", [{"text": "the cat"}, "{torn\n"]), place / "b.txt"
    b.write_text("the dog ran")
    sources = [{"source": str(a)}, {"source": str(b)}]
    printed = rank_by(sources)
    assert "counted again" not in printed and "counted before" not in printed
    # Weights and company change nothing.
    assert rank_by([{"source": str(b), "weight": 2.5}]).count("counted before") == 1
    write_lines(a, [{"text": "the mat"}])
    printed = rank_by(sources)
    assert f"{a}: counted again: its files changed" in printed and f"{b}: counted before" in printed
    corpus = load_corpora(token_counts(place))[0]
    assert as_counter(corpus.counts) == counted(["the mat"], make_tokenizer()) and corpus.rejected == 0
    assert not list((place / "out/ranking").glob("*a-jsonl*.rejects.jsonl"))
    assert f"{a}: counted again: its max_documents changed" in rank_by([{"source": str(a), "max_documents": 1}])
    state = counts_path(place / "out/ranking", str(b))
    state.write_bytes(state.read_bytes()[:-7])
    assert f"{b}: counted again: {state} cannot be read" in rank_by([{"source": str(b)}])
    recipe = yaml.safe_load((place / "recipe.yaml").read_text())
    template = place / "other.jinja"
    template.write_text(make_tokenizer().get_chat_template() + " ")
    recipe["target"]["chat_template"] = str(template)
    (place / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    assert f"{b}: counted again: its tokenizer changed" in rank_by([{"source": str(b)}])


@pytest.mark.parametrize("end", [ConnectionError("the line is dead\nand more"), KeyboardInterrupt()])
def test_an_interrupted_count_starts_over_and_finished_ones_are_kept(
    place: Path, rank_by: Script, monkeypatch: pytest.MonkeyPatch, end: BaseException
) -> None:
    import datasets

    texts, broken = some_texts(60, 9), [True]

    def stream() -> Iterator[dict[str, Any]]:
        for i, text in enumerate(texts):
            if i == 41 and broken[0]:
                raise end
            yield {"text": text if i else 7}

    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: datasets.IterableDataset.from_generator(stream))
    path = write_lines(place / "a.jsonl", [{"text": "the cat"}])
    sources = [{"source": str(path)}, {"source": "hf:org/texts:train"}]
    told = r"hf:org/texts:train: .* ConnectionError: the line is dead \(behind row 41; "
    with pytest.raises((UserError, KeyboardInterrupt), match=told if isinstance(end, Exception) else None):
        rank_by(sources)
    broken[0] = False
    printed = rank_by(sources)
    assert f"{path}: counted before" in printed and "hf:org/texts:train: counted" not in printed
    dataset = load_corpora(token_counts(place))[1]
    assert as_counter(dataset.counts) == counted(texts[1:], make_tokenizer())
    assert (dataset.documents, dataset.rejected) == (59, 1)
    [kept] = (place / "out/ranking").glob("*.rejects.jsonl")
    assert len(kept.read_text().splitlines()) == 1  # not once for each try
