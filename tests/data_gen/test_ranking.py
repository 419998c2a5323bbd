"""Rankings by corpora: how they are read, counted and blended, what is chosen, what users get wrong."""

import gzip
import json
import random
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import datasets
import pyarrow
import pyarrow.parquet
import pytest
import torch
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerBase

from draftsmith.data_gen import rank_vocab
from draftsmith.data_gen.training_rows.rows import turns_of_messages
from draftsmith.data_gen.vocabulary import corpus_reader
from draftsmith.data_gen.vocabulary.corpus_reader import Tokeniser, items
from draftsmith.models.chat import tokenizer_fingerprint
from draftsmith.models.vocab import (
    BLEND_SCALE,
    CorpusCounts,
    DraftVocab,
    always_inside,
    blend,
    cut_vocab,
    load_tensors,
    load_token_counts,
)
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.sections.data import RankingSource
from tests import reference
from tests.conftest import VOCAB_SIZE, make_tokenizer
from tests.evaluation_cases import write_lines
from tests.strategies import for_all
from tests.thinning import EXHAUSTIVE
from tests.training_runs import run_main, write_recipe

WORDS = ["the", "cat", "sat", "on", "mat;", "dogs", "ran,", "rain", "fell\nafter", "", "noon", "für", "3.5", "Ü", "☂"]
TEMPLATE = [1, 2, 3, 4]  # system, user, assistant, end: what the tests' chat template writes


def some_texts(count: int, seed: int) -> list[str]:
    chance = random.Random(seed)
    return ["A " + " ".join(chance.choices(WORDS, k=chance.randint(1, 30))) for _ in range(count)]


def counted(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> Counter[int]:
    return Counter(token for text in texts for token in tokenizer.encode(text, add_special_tokens=False))


def as_counter(counts: torch.Tensor) -> Counter[int]:
    return Counter({token: count for token, count in enumerate(counts.tolist()) if count})


def corpora_of(place: Path) -> list[CorpusCounts]:
    """The corpora that the counts were blended from; empty for counts of the target's own answers alone."""
    tensors, metadata = load_tensors(token_counts(place), "token counts")
    return [
        CorpusCounts(
            *(facts["source"], tensors[f"counts_of_{i}"], facts["weight"], facts["documents"], facts["rejected"])
        )
        for i, facts in enumerate(json.loads(metadata.get("corpora", "[]")))
    ]


def token_counts(place: Path) -> Path:
    return place / "run" / "token_counts.safetensors"


def ranking_of(place: Path) -> torch.Tensor:
    return load_token_counts(token_counts(place))[0]


@pytest.fixture
def place(tmp_path: Path, target_dir: Path) -> Path:
    """A folder with a recipe of the tests' target; it has no conversations."""
    write_recipe(tmp_path, target_dir, drafter={}, train={})
    return tmp_path


Script = Callable[..., str]


@pytest.fixture
def rank_by(place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Script:
    """Calls rank_vocab with the sources that it is given, in this process; returns what it prints."""
    monkeypatch.setattr(corpus_reader, "BATCH_CHARACTERS", 600)
    monkeypatch.setattr(corpus_reader, "PIECE_CHARACTERS", 200)

    def call(sources: list[dict[str, Any]], *arguments: str) -> str:
        ranking = f"data.ranking={json.dumps({'sources': sources})}"
        run_main(rank_vocab, place / "recipe.yaml", ranking, *arguments)
        return capsys.readouterr().out

    return call


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
    files = {"a.jsonl": records, "a.jsonl.gz": records, "folder/0.jsonl": records[:13]}
    files |= {"split/0.jsonl": records[:13], "split/deeper/1.jsonl.gz": records[13:]}
    for name, part in files.items():
        write_lines(place / name, *part)
    (place / "a.json").write_text(json.dumps(records, indent=1))
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
    for corpus, source in zip(corpora_of(place), sources, strict=True):
        assert as_counter(corpus.counts) == wanted, source
        assert corpus.documents == min(most or 40, 40) and corpus.rejected == 0
        told = f"{wanted.total():,} tokens in {corpus.documents} documents; no record rejected"
        assert f"{source['source']}: {told}" in printed
    ranked = sorted(wanted, key=lambda token: (-wanted[token], token))[:9]
    assert ranking_of(place).argsort(descending=True, stable=True).tolist()[: len(ranked)] == ranked


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
        bad = {number for number, line in enumerate(lines, start=1) if line.decode(errors="ignore").encode() != line}
        assert {reject["line"] for reject in rejected} == bad
        good = b"".join(line for number, line in enumerate(lines, start=1) if number not in bad)
        if size == 99 or not bad:
            assert "".join("".join(texts).split()) == "".join(good.decode().split())
        for item in found:
            assert item.record["text"].split("\n")[0].encode() in lines[item.line - 1]


@pytest.mark.parametrize("ending", ["txt", "jsonl"])
def test_a_damaged_packed_file_is_read_up_to_the_damage(tmp_path: Path, ending: str) -> None:
    lines = "".join(json.dumps({"text": text}) + "\n" for text in some_texts(6000, 21)).encode()
    packed = gzip.compress(lines)
    write_lines(tmp_path / f"b.{ending}.gz", {"text": "behind"})
    for content, least in ((packed[:-9000], 1), (packed + b"more", len(lines))):
        (tmp_path / f"a.{ending}.gz").write_bytes(content)
        found, (damage,) = read(tmp_path / "*.gz")
        assert "behind" in found[-1].record["text"] and found[-1].line == 1
        texts = [item.record["text"] for item in found[:-1]]
        text = "".join(texts if ending == "txt" else [json.dumps({"text": text}) + "\n" for text in texts])
        assert lines.startswith(text.encode()) and len(text) >= least
        # A record that the damage tears is no bad record of its own.
        assert damage["reason"].startswith("damaged file:") and damage["line"] == 1 + text.count("\n")


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
        rank_by([{"source": str(write_lines(place / f"{name}.jsonl", record))}])
        assert as_counter(ranking_of(place)) == wanted, name
    path = write_lines(place / "both.jsonl", {"messages": messages, "story": said[0]}, {"messages": messages})
    rank_by([{"source": str(path), "text_field": "story"}])
    assert as_counter(ranking_of(place)) == counted([said[0]], tokenizer) + answer


def test_no_special_tokens_are_added_and_no_text_is_cut(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(  # type: ignore[assignment]
        single="<|pad|> $0", special_tokens=[("<|pad|>", 0)]
    )
    tokenizer.backend_tokenizer.enable_truncation(5)
    assert tokenizer.encode("cat")[0] == 0
    path = write_lines(tmp_path / "a.jsonl", {"text": "the cat " * 9})
    source = RankingSource(source=str(path))
    [(ids, _)] = Tokeniser(tokenizer, VOCAB_SIZE).documents(source, Rejects())
    assert Counter(ids) == counted(["the cat " * 9], make_tokenizer())


def test_bad_records_are_kept_and_stop_nothing(
    place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase
) -> None:
    good = some_texts(5, 3)
    bad: dict[str, Any] = {
        "malformed JSON": "{torn",
        "empty text": {"text": "  "},
        "wrong type: `text` must be text": {"text": 7},
        "no text": {"other": "x", "more": 1},
        "wrong type: a record must be a JSON object": "[1]",
        "not Unicode": {"text": "\ud800"},
        "no assistant turn": {"messages": [{"role": "user", "content": "alone"}]},
        "wrong type: `messages`": {"messages": "none"},
    }
    texts = [{"text": text} for text in good]
    a = write_lines(place / "a.jsonl", *texts[:3], *bad.values(), *texts[3:])
    b = place / "b.txt"
    b.write_bytes(b"\xef\xbb\xbfthe cat\nsat \xff on\nthe mat\n")
    for again in (False, True):
        printed = rank_by([{"source": str(a)}, {"source": str(b)}])
        assert printed.count("rejected (") == 2 and printed.count("counted before") == 2 * again
        corpora = corpora_of(place)
        assert as_counter(corpora[0].counts) == counted(good, tokenizer)
        assert as_counter(corpora[1].counts) == counted(["the cat\nthe mat\n"], tokenizer)
        assert [corpus.rejected for corpus in corpora] == [8, 1]
        kept = [file.read_text().splitlines() for file in (place / "run/ranking").glob("*.rejects.jsonl")]
        entries = sorted((json.loads(line) for lines in kept for line in lines), key=lambda entry: entry["source"])
        assert [entry["line"] for entry in entries] == [*range(4, 12), 2]
        assert all(e["reason"].startswith(reason) for e, reason in zip(entries, [*bad, "not UTF-8"], strict=True))


def test_what_changed_is_counted_anew(place: Path, rank_by: Script) -> None:
    a, b = write_lines(place / "a.jsonl", {"text": "the cat"}, "{torn"), place / "b.txt"
    b.write_text("the dog ran")
    sources = [{"source": str(a)}, {"source": str(b)}]
    assert "counted before" not in rank_by(sources)
    assert rank_by([{"source": str(b), "weight": 2.5}]).count("counted before") == 1  # weights and company are nothing
    write_lines(a, {"text": "the mat"})
    printed = rank_by(sources)
    assert f"{a}: counted before" not in printed and f"{b}: counted before" in printed
    corpus = corpora_of(place)[0]
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
    path = write_lines(place / "a.jsonl", {"text": "the cat"})
    sources = [{"source": str(path)}, {"source": "hf:org/texts:train"}]
    with pytest.raises((UserError, KeyboardInterrupt)):
        rank_by(sources)
    printed = rank_by(sources)
    assert f"{path}: counted before" in printed and "hf:org/texts:train: counted" not in printed
    dataset = corpora_of(place)[1]
    assert as_counter(dataset.counts) == counted(texts[1:], make_tokenizer())
    [kept] = (place / "run/ranking").glob("*.rejects.jsonl")
    assert (dataset.documents, len(kept.read_text().splitlines())) == (59, 1)  # not once for each try


def regenerated(*output: int) -> dict[str, Any]:
    """A line of answers."""
    turn = {"prompt_token_ids": [2, 60, 4, 3], "output_token_ids": [*output], "finish_reason": "stop"}
    return {"id": "c", "messages": [{"role": "user", "content": "x"}], "turns": [turn]}


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
    alone = torch.tensor([0, 0, 3])
    assert torch.equal(blend([(alone, 7.0)]), alone) and blend([(alone, 7.0)]) is not alone


# What is chosen.


def test_stop_and_template_tokens_are_inside_of_everything(place: Path, rank_by: Script) -> None:
    source = {"source": str(write_lines(place / "a.jsonl", *({"text": text} for text in some_texts(30, 10))))}
    rank_by([source], "drafter.vocab_size=12")
    vocab = DraftVocab.load(place / "run/draft_vocab.safetensors")
    counts, metadata = load_token_counts(token_counts(place))
    assert not counts[TEMPLATE].any()  # foreign text holds none of them
    assert vocab.size == 12 == len(set(vocab.target_ids.tolist())) and vocab.t2d[TEMPLATE].all()
    assert vocab.target_ids.tolist() == reference.most_frequent(list(range(VOCAB_SIZE)), counts.tolist(), 12, TEMPLATE)
    assert metadata["stop_ids"] == "[4]" and metadata["template_ids"] == "[1, 2, 3, 4]"
    # A cut while decoding takes them from the file.
    assert cut_vocab(DraftVocab.full(VOCAB_SIZE), counts, 12, always_inside(metadata)).same_as(vocab)


CALLING = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}<|assistant|>{% generation %}say: "
    "{% if message['tool_calls'] %}<|system|>{{ message['tool_calls'][0]['function']['name'] }}{% endif %}"
    "{{ message['content'] }}<|end|>{% endgeneration %}"
    "{%- else -%}<|user|>{{ message['content'] }}<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


def test_what_the_template_writes_into_answers_is_inside_of_a_ranking_by_answers(place: Path, rank_by: Script) -> None:
    (place / "calling.jinja").write_text(CALLING)
    calling = f"target.chat_template={place / 'calling.jinja'}"
    say = make_tokenizer().encode("say: ", add_special_tokens=False)
    wanted = sorted({1, 4, *say})  # here <|system|> opens a call; the marks of turns nobody has to draft
    rare = next(token for token in range(70, 200) if token not in wanted)
    write_lines(place / "run/conversations.jsonl", regenerated(*[rare] * 9, 4))
    rank_by([], calling, f"drafter.vocab_size={len(wanted) + 1}")
    vocab = DraftVocab.load(place / "run/draft_vocab.safetensors")
    assert vocab.target_ids.tolist() == sorted([*wanted, rare])
    counts, metadata = load_token_counts(token_counts(place))
    assert not counts[sorted({*wanted} - {4})].any() and always_inside(metadata) == set(wanted)
    assert metadata["stop_ids"] == "[4]" and 4 not in json.loads(metadata["template_ids"])
    with pytest.raises(UserError, match=rf"has no room for the {len(wanted)} stop and template tokens"):
        elsewhere = f"output_dir={place / 'new'}", f"data.conversations={place}/run/conversations.jsonl"
        rank_by([], calling, "drafter.vocab_size=2", *elsewhere)


def test_coverage_by_corpus_and_size(place: Path, rank_by: Script, tokenizer: PreTrainedTokenizerBase) -> None:
    texts = [some_texts(30, 11), ["zebra quiz box jam " * 20]]
    paths = [write_lines(place / f"{i}.jsonl", *({"text": text} for text in part)) for i, part in enumerate(texts)]
    write_lines(place / "run/conversations.jsonl", regenerated(70, 71, 70, 4))
    weights = [3.0, 0.5]
    sources = [{"source": str(path), "weight": weight} for path, weight in zip(paths, weights, strict=True)]
    printed = rank_by(sources)
    found = [counted(part, tokenizer) for part in texts]
    both = [[part[token] for token in range(VOCAB_SIZE)] for part in found]
    ranking = reference.blended_counts(both, weights, BLEND_SCALE)
    answers = Counter([70, 71, 70, 4])
    columns = [Counter(dict(enumerate(ranking))), *found, answers]  # answers: not counted in, but compared with
    header, *rows = [
        line.split() for line in printed.splitlines() if line.startswith("    tokens") or line.endswith("%")
    ]
    assert header[:2] == ["tokens", "blend"] and header[-1] == "answers" and len(header) == 5
    assert [row[0] for row in rows] == ["4", "8", "16", "32", "64", "128", "256", str(VOCAB_SIZE)]
    for size, *shares in rows:
        inside = reference.most_frequent(list(range(VOCAB_SIZE)), ranking, int(size), TEMPLATE)
        wanted = [sum(corpus[token] for token in inside) / corpus.total() for corpus in columns]
        assert shares == [f"{share:.2%}" for share in wanted]
    assert [corpus.weight for corpus in corpora_of(place)] == [3.0, 0.5, None]
    assert ranking_of(place).tolist() == ranking
    # As a source of the blend, the answers come in the recipe's order.
    rank_by([{"source": "answers", "weight": 1}, sources[0]])
    assert [corpus.source for corpus in corpora_of(place)] == ["answers", str(paths[0])]
    assert as_counter(corpora_of(place)[0].counts) == answers


def test_the_answers_alone_are_counted_as_without_a_ranking(place: Path, rank_by: Script) -> None:
    write_lines(place / "run/conversations.jsonl", regenerated(70, 71, 70, 4))
    rank_by([])
    plain, metadata = load_token_counts(token_counts(place))
    assert set(metadata) == {"tokenizer_fingerprint", "counted_tokens", "stop_ids"}
    assert not (place / "run/ranking").exists()
    rank_by([{"source": "answers", "weight": 0.25}])
    assert torch.equal(ranking_of(place), plain)
