"""The draft vocabulary and the script that chooses it."""

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

from draftsmith.data_gen import rank_vocab
from draftsmith.models.chat import tokenizer_fingerprint
from draftsmith.models.vocab import (
    DraftVocab,
    cut_by_file,
    cut_head_rows,
    cut_vocab,
    fill_text,
    load_metadata,
    load_token_counts,
    save_token_counts,
)
from draftsmith.recipes.errors import UserError
from tests import reference
from tests.conftest import VOCAB_SIZE, make_tokenizer


def frequent_vocab(counts: torch.Tensor, size: int, must_have: Sequence[int] = ()) -> DraftVocab:
    return cut_vocab(DraftVocab.full(len(counts)), counts, size, must_have, "drafter.vocab_size")


def some_vocab(size: int = 7, vocab_size: int = 20, seed: int = 0) -> DraftVocab:
    ids = torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:size]
    return DraftVocab(ids.sort().values, vocab_size)


# The mapping.


@pytest.mark.parametrize("size", [1, 7, 19, 20])
def test_round_trip(size: int) -> None:
    vocab = some_vocab(size)
    ids = vocab.target_ids.tolist()
    assert [i + offset for i, offset in enumerate(vocab.d2t.tolist())] == ids
    assert [i for i, inside in enumerate(vocab.t2d.tolist()) if inside] == ids
    draft = torch.arange(size).view(1, -1)
    assert torch.equal(vocab.to_draft(vocab.to_target(draft)), draft)
    expected = [ids.index(token) if token in ids else -1 for token in range(20)]
    assert vocab.to_draft(torch.arange(20)).tolist() == expected
    assert vocab.is_full == (size == 20)
    assert DraftVocab.from_d2t(vocab.d2t, vocab.t2d).same_as(vocab)


@pytest.mark.parametrize("ids", [[3, 3], [4, 2], [-1, 2], [2, 20], []])
def test_wrong_ids_are_refused(ids: list[int]) -> None:
    with pytest.raises(ValueError, match="target_ids"):
        DraftVocab(torch.tensor(ids, dtype=torch.int64), 20)


def test_from_d2t_prints_both_sides() -> None:
    vocab = DraftVocab(torch.tensor([5, 9, 10]), 12)
    with pytest.raises(UserError, match=r"d2t has 2 draft tokens, t2d marks 3"):
        DraftVocab.from_d2t(vocab.d2t[:2], vocab.t2d)
    with pytest.raises(UserError, match=r"token 1 is target token 8 by d2t and 9 by t2d \(1 of 3 differ\)"):
        DraftVocab.from_d2t(torch.tensor([5, 7, 8]), vocab.t2d)
    # Ids in place of offsets: the mistake that other exporters make.
    with pytest.raises(UserError, match=r"target ids 5 to 12, t2d covers 0 to 11; d2t holds offsets"):
        DraftVocab.from_d2t(vocab.target_ids, vocab.t2d)
    for odd in (torch.tensor(3), vocab.d2t[None], vocab.d2t.double()):
        with pytest.raises(UserError, match=r"^f: d2t is torch\.\w+ of shape .*, not a vector of whole numbers"):
            DraftVocab.from_d2t(odd, vocab.t2d, where="f")


def test_load_refuses_what_is_no_draft_vocabulary(tmp_path: Path) -> None:
    path = tmp_path / "v.safetensors"
    with pytest.raises(UserError, match=r"no such draft vocabulary; run `draftsmith rank-vocab`"):
        DraftVocab.load(path)
    path.write_bytes(b"")
    with pytest.raises(UserError, match="not a readable safetensors file"):
        DraftVocab.load(path)
    save_file({"d2t": torch.zeros(3, dtype=torch.int64)}, path)
    with pytest.raises(UserError, match="no t2d in it"):
        DraftVocab.load(path)


# Ranking.


def test_rank_equals_sorting_by_hand() -> None:
    chance = random.Random(0)
    for _ in range(50):
        counts = [chance.choice([0, 0, 1, 2, 2, 5]) for _ in range(30)]
        must_have = chance.sample(range(30), 3)
        seen = sorted((i for i in range(30) if i not in must_have), key=lambda i: (-counts[i], i))
        size = chance.randint(3, 30)
        expected = sorted(must_have + seen[: size - 3])
        assert frequent_vocab(torch.tensor(counts), size, must_have).target_ids.tolist() == expected


def test_the_lowest_ids_fill_up_what_was_not_counted() -> None:
    counts = torch.tensor([0, 4, 0, 2, 0, 0])
    for size, ids in {3: [1, 3, 5], 4: [0, 1, 3, 5], 5: [0, 1, 2, 3, 5]}.items():
        vocab = frequent_vocab(counts, size, must_have=[5])
        assert vocab.target_ids.tolist() == ids
        said = fill_text(vocab, counts, must_have=[5])
        assert said is None if size == 3 else said is not None and f"only 3 of {size} draft tokens were cou" in said
    assert fill_text(DraftVocab.full(6), counts, must_have=[]) is None  # nothing to choose


def test_rank_refuses_what_cannot_be() -> None:
    counts = torch.tensor([0, 4, 0, 2, 0, 0])
    with pytest.raises(
        UserError, match=r"^drafter\.vocab_size: 7 is more than the 6 tokens of the target's vocabulary"
    ):
        frequent_vocab(counts, 7)
    with pytest.raises(UserError, match="no room for the 2 stop and template tokens"):
        frequent_vocab(counts, 1, must_have=[4, 5])
    assert frequent_vocab(counts, 6).is_full  # nothing to choose, however little was seen


def test_stop_tokens_that_the_target_has_no_row_for_change_nothing() -> None:
    counts = torch.tensor([0, 4, 0, 2, 0, 0])
    assert frequent_vocab(counts, 3, must_have=[5, 6, -1]).target_ids.tolist() == [1, 3, 5]


# A cut for decoding (FR-Spec).


def random_case(chance: random.Random) -> tuple[DraftVocab, list[int], int, list[int]]:
    """(drafter's vocabulary, counts, size, stop tokens) over 30 tokens: many ties, many tokens that nobody saw."""
    ids = sorted(chance.sample(range(30), chance.randint(4, 30)))
    counts = [chance.choice([0, 0, 0, 1, 2, 2, 5]) for _ in range(30)]
    stops = chance.sample(range(30), 3)
    size = chance.randint(max(1, len(set(stops) & set(ids))), len(ids))
    return DraftVocab(torch.tensor(ids), 30), counts, size, stops


def test_cut_equals_its_slow_twin() -> None:
    for seed in range(200):
        vocab, counts, size, stops = random_case(random.Random(seed))
        ours = cut_vocab(vocab, torch.tensor(counts), size, stops)
        assert ours.target_ids.tolist() == reference.most_frequent(vocab.target_ids.tolist(), counts, size, stops)
        # What FR-Spec's script gets wrong: stop tokens twice, or cut off again, and lists longer than asked for.
        assert ours.size == size == len(set(ours.target_ids.tolist()))
        assert set(stops) & set(vocab.target_ids.tolist()) <= set(ours.target_ids.tolist())
        assert ours.target_vocab_size == 30


def test_rows_of_a_cut_select_its_tokens_rows_of_the_head() -> None:
    for seed in range(50):
        vocab, counts, size, stops = random_case(random.Random(seed))
        ours = cut_vocab(vocab, torch.tensor(counts), size, stops)
        rows = cut_head_rows(vocab, ours)
        assert rows.dtype == torch.int64 and rows.shape == (size,)
        names = [f"row of {token}" for token in vocab.target_ids.tolist()]  # a head whose rows tell whose they are
        assert [names[row] for row in rows] == [f"row of {token}" for token in ours.target_ids.tolist()]


def test_rows_of_what_is_no_cut_are_refused() -> None:
    vocab = DraftVocab(torch.tensor([5, 9, 10]), 12)
    for other in (DraftVocab(torch.tensor([5, 8]), 12), DraftVocab(torch.tensor([5, 9]), 11)):
        with pytest.raises(ValueError, match="not a cut of this draft vocabulary"):
            cut_head_rows(vocab, other)


def test_cut_refuses_what_cannot_be() -> None:
    counts, own = torch.tensor([0, 4, 0, 2, 0, 1]), DraftVocab(torch.tensor([1, 3, 4, 5]), 6)
    with pytest.raises(UserError, match=r"^eval\.tree\.vocab_size: 5 is more than the 4 tokens of the drafter's"):
        cut_vocab(own, counts, 5, [4])
    with pytest.raises(
        UserError, match=r"^eval\.tree\.vocab_size: 1 has no room for the 2 stop and template tokens \[4, 5\]"
    ):
        cut_vocab(own, counts, 1, [2, 4, 5])
    assert cut_vocab(own, counts, 2, [2, 4, 5]).target_ids.tolist() == [4, 5]
    with pytest.raises(UserError, match=r"^eval\.tree\.vocab_size: .* of 5 tokens, the drafter's target has 6"):
        cut_vocab(own, counts[:5], 2, [4])


# Token counts on disk.


def test_equal_files_are_equal_bytes(tmp_path: Path) -> None:
    """Checkpoints and `draftsmith run` know their inputs by digests. safetensors draws the order of metadata anew."""
    about, written = (
        {"covered_share": "0.5", "counted_tokens": "7", "tokenizer_fingerprint": "né", "a": '["\\n"]'},
        set(),
    )
    for _ in range(12):
        DraftVocab.full(5).save(tmp_path / "vocab.safetensors", about)
        written.add((tmp_path / "vocab.safetensors").read_bytes())
    assert len(written) == 1
    assert DraftVocab.load(tmp_path / "vocab.safetensors").same_as(DraftVocab.full(5))
    assert load_metadata(tmp_path / "vocab.safetensors") == about


def test_token_counts_round_trip(tmp_path: Path) -> None:
    path, counts = tmp_path / "run" / "token_counts.safetensors", torch.tensor([3, 0, 5])
    save_token_counts(path, counts, "ab" * 32, {2, 1})
    loaded, metadata = load_token_counts(path)
    assert torch.equal(loaded, counts) and loaded.dtype == torch.int64
    assert metadata == {"tokenizer_fingerprint": "ab" * 32, "counted_tokens": "8", "stop_ids": "[1, 2]"}
    save_token_counts(path, counts + 1, "cd" * 32, [2])  # only a ranking: replaced
    assert load_token_counts(path)[0].tolist() == [4, 1, 6]
    assert [file.name for file in path.parent.iterdir()] == [path.name]


def test_a_kill_while_writing_leaves_the_old_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "token_counts.safetensors"
    save_token_counts(path, torch.tensor([3, 0, 5]), "ab" * 32, [2])
    whole = Path.write_bytes

    def torn(file: Path, content: bytes) -> None:
        whole(file, content[:20])
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_bytes", torn)
    with pytest.raises(KeyboardInterrupt):
        save_token_counts(path, torch.tensor([1, 1, 1]), "ab" * 32, [2])
    assert load_token_counts(path)[0].tolist() == [3, 0, 5]
    monkeypatch.undo()
    save_token_counts(path, torch.tensor([1, 1, 1]), "ab" * 32, [2])
    assert load_token_counts(path)[0].tolist() == [1, 1, 1]
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


GOOD = {"tokenizer_fingerprint": "ab" * 32, "counted_tokens": "6", "stop_ids": "[4]"}


@pytest.mark.parametrize(
    ("tensors", "changed", "message"),
    [
        ({"count": torch.tensor([1, 2, 3])}, {}, "no counts in it"),
        ({"counts": torch.tensor([1, 2, 3])}, None, "no counted_tokens and no stop_ids and no tokenizer_fingerprint"),
        ({"counts": torch.tensor([1.0, 2.0, 3.0])}, {}, r"not an int64 vector .*torch\.float32 of shape \(3,\)"),
        ({"counts": torch.tensor([[1, 2, 3]])}, {}, r"of shape \(1, 3\)"),
        ({"counts": torch.tensor([], dtype=torch.int64)}, {"counted_tokens": "0"}, r"of shape \(0,\)"),
        ({"counts": torch.tensor([5, -2, 3])}, {}, "values below 0"),
        ({"counts": torch.tensor([0, 0])}, {"counted_tokens": "0"}, "zeros alone"),
    ],
)
def test_damaged_token_counts_are_refused(
    tmp_path: Path, tensors: dict[str, torch.Tensor], changed: dict[str, str] | None, message: str
) -> None:
    path = tmp_path / "counts.safetensors"
    save_file({"counts": torch.tensor([1, 2, 3])}, path, metadata=GOOD)
    load_token_counts(path)
    save_file(tensors, path, metadata=None if changed is None else GOOD | changed)
    with pytest.raises(UserError, match=message) as caught:
        load_token_counts(path)
    assert str(path) in str(caught.value) and "draftsmith rank-vocab" in str(caught.value)


def test_files_that_are_no_token_counts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "counts.safetensors"
    with pytest.raises(UserError, match=r"no such token counts; `draftsmith rank-vocab` writes"):
        load_token_counts(path)
    save_file({"counts": torch.arange(100)}, path, metadata=GOOD)
    whole = path.read_bytes()
    for damaged in (b"", whole[:5], whole[:-8], b"not tensors at all"):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="not a readable safetensors file"):
            load_token_counts(path)
    with pytest.raises(UserError, match="not a readable safetensors file: it is a folder"):
        load_token_counts(tmp_path)
    some_vocab().save(path)
    with pytest.raises(UserError, match="no counts in it"):
        load_token_counts(path)


def test_counts_of_another_tokenizer_are_refused_with_both_sides(tmp_path: Path) -> None:
    save_token_counts(tmp_path / "counts", torch.arange(6), "ab" * 32, [])
    assert cut_by_file(tmp_path / "counts", "ab" * 32, DraftVocab.full(6), 2, []).target_ids.tolist() == [4, 5]
    with pytest.raises(UserError, match=r"eval\.token_counts: .*counts was .* abababababab.* has cdcdcdcdcdcd"):
        cut_by_file(tmp_path / "counts", "cd" * 32, DraftVocab.full(6), 2, [])


# The script.


@pytest.fixture
def run_script(tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture):
    """Calls rank_vocab on hand-made conversations of 12 and 40 tokens; returns what it prints."""
    chance = random.Random(1)
    lines = []
    for i in range(30):
        output = [int(chance.paretovariate(0.6)) % 200 + 5 for _ in range(35 if i % 5 == 0 else 7)]
        turn = {"prompt_token_ids": [2, 300 + i % 9, 4, 3], "output_token_ids": [*output, 9], "finish_reason": "stop"}
        lines.append({"id": f"c{i}", "messages": [{"role": "user", "content": "x"}], "turns": [turn]})
    out = tmp_path / "out"
    out.mkdir()
    (out / "conversations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    recipe = {"output_dir": str(out), "target": {"model": str(target_dir)}, "data": {"max_length": 20}}
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))

    def call(*arguments: str) -> str:
        monkeypatch.setattr(sys, "argv", ["rank_vocab.py", str(tmp_path / "recipe.yaml"), *arguments])
        rank_vocab.main()
        return capsys.readouterr().out

    call.out = out  # type: ignore[attr-defined]
    call.lines = lines  # type: ignore[attr-defined]
    return call


def test_script_counts_what_training_reads(run_script) -> None:
    printed = run_script("drafter.vocab_size=12")
    kept = [
        line["turns"][0]["output_token_ids"]
        for line in run_script.lines
        if len(line["turns"][0]["output_token_ids"]) < 17
    ]
    assert len(kept) == 24  # rows beyond max_length are not counted
    counts = Counter(token for output in kept for token in output)
    best = sorted(counts, key=lambda token: (-counts[token], token))
    best.remove(9)
    expected = sorted([4, *(best[:10]), 9])  # the tokenizer's stop token 4 was never seen; 9 is frequent
    path = run_script.out / "draft_vocab.safetensors"
    vocab = DraftVocab.load(path)
    assert vocab.target_ids.tolist() == expected and vocab.target_vocab_size == VOCAB_SIZE
    total, covered = counts.total(), sum(counts[token] for token in expected)
    assert f"answers: {total:,} tokens in 24 conversations; 6 records rejected" in printed
    assert "6 longer than data.max_length" in printed
    rejects = run_script.out / "conversations.training_rejects.jsonl"
    assert str(rejects) in printed
    entries = [json.loads(line) for line in rejects.read_text().splitlines()]
    long = [(number, line) for number, line in enumerate(run_script.lines, start=1) if (number - 1) % 5 == 0]
    assert [(entry["line"], entry["record"]) for entry in entries] == long
    run_script("drafter.vocab_size=12")
    assert len(rejects.read_text().splitlines()) == 6  # none twice
    assert f"{covered / total:.2%} of answers covered" in printed
    metadata = load_metadata(path)
    assert metadata["counted_tokens"] == str(total)
    assert float(metadata["covered_share"]) == pytest.approx(covered / total, abs=1e-6)
    assert len(metadata["tokenizer_fingerprint"]) == 64


def test_script_writes_what_decoding_cuts_by(run_script) -> None:
    printed = run_script("drafter.vocab_size=12")
    outputs = [line["turns"][0]["output_token_ids"] for line in run_script.lines]
    expected = Counter(token for output in outputs if len(output) < 17 for token in output)
    path = run_script.out / "token_counts.safetensors"
    counts, metadata = load_token_counts(path)
    assert {token: count for token, count in enumerate(counts.tolist()) if count} == expected
    assert len(counts) == VOCAB_SIZE
    fingerprint = tokenizer_fingerprint(make_tokenizer())
    total = expected.total()
    assert metadata == {"tokenizer_fingerprint": fingerprint, "counted_tokens": str(total), "stop_ids": "[4]"}
    # The table: the share that the most frequent tokens cover, the stop token always among them (it was never seen).
    shown = dict(line.split() for line in printed.splitlines() if line.endswith("%"))
    by_count = sorted(expected.values(), reverse=True)
    wanted = {size: sum(by_count[: size - 1]) / total for size in (4, 8, 16, 32, 64, 128, 256)} | {VOCAB_SIZE: 1.0}
    assert shown == {str(size): f"{share:.2%}" for size, share in wanted.items()}
    # A drafter of the run, cut for decoding: what was chosen for training is the cut of the whole at that size.
    trained = DraftVocab.load(run_script.out / "draft_vocab.safetensors")
    assert cut_by_file(path, fingerprint, DraftVocab.full(VOCAB_SIZE), 12, [4]).same_as(trained)
    before = counts
    run_script.lines.append(run_script.lines[1])
    (run_script.out / "conversations.jsonl").write_text("".join(json.dumps(line) + "\n" for line in run_script.lines))
    run_script("drafter.vocab_size=12")
    again = load_token_counts(path)[0]
    assert again.sum() - before.sum() == len(run_script.lines[1]["turns"][0]["output_token_ids"])


def test_script_never_changes_a_mapping_under_a_drafter(run_script) -> None:
    assert "written" in run_script("drafter.vocab_size=12")
    assert "unchanged" in run_script("drafter.vocab_size=12")
    assert "replaced" in run_script("drafter.vocab_size=14")
    path = run_script.out / "draft_vocab.safetensors"
    before = path.read_bytes()
    checkpoint = run_script.out / "checkpoints" / "step_4"
    checkpoint.mkdir(parents=True)
    with pytest.raises(UserError, match=r"holds 14 draft tokens .* give 12 of 320, 12 of them .*checkpoints"):
        run_script("drafter.vocab_size=12")
    assert path.read_bytes() == before
    assert "unchanged" in run_script("drafter.vocab_size=14")


def test_script_without_a_size_takes_the_whole_vocabulary(run_script) -> None:
    printed = run_script()
    assert "whole vocabulary" in printed and "100.00% of answers covered" in printed
    assert DraftVocab.load(run_script.out / "draft_vocab.safetensors").same_as(DraftVocab.full(VOCAB_SIZE))
