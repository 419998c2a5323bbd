"""The draft vocabulary and the script that chooses it."""

import json
import random
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
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
from tests.evaluation_cases import write_lines
from tests.thinning import effort
from tests.training_runs import run_main, write_recipe


def frequent_vocab(counts: torch.Tensor, size: int, must_have: Sequence[int] = ()) -> DraftVocab:
    return cut_vocab(DraftVocab.full(len(counts)), counts, size, must_have, "drafter.vocab_size")


@pytest.mark.parametrize("size", [1, 7, 20])
def test_round_trip(size: int) -> None:
    drawn = torch.randperm(20, generator=torch.Generator().manual_seed(0))[:size]
    vocab = DraftVocab(drawn.sort().values, 20)
    ids = vocab.target_ids.tolist()
    assert [i + offset for i, offset in enumerate(vocab.d2t.tolist())] == ids
    assert [i for i, inside in enumerate(vocab.t2d.tolist()) if inside] == ids
    draft = torch.arange(size).view(1, -1)
    assert torch.equal(vocab.to_draft(vocab.to_target(draft)), draft)
    expected = [ids.index(token) if token in ids else -1 for token in range(20)]
    assert vocab.to_draft(torch.arange(20)).tolist() == expected
    assert vocab.is_full == (size == 20)
    assert DraftVocab.from_d2t(vocab.d2t, vocab.t2d).same_as(vocab)


def test_what_is_no_draft_vocabulary_is_refused(tmp_path: Path) -> None:
    vocab, path = DraftVocab(torch.tensor([5, 9, 10]), 12), tmp_path / "v.safetensors"
    # Ids in the place of offsets are the mistake that other exporters make.
    for d2t in (vocab.d2t[:2], torch.tensor([5, 7, 8]), vocab.target_ids, torch.tensor(3), vocab.d2t.double()):
        with pytest.raises(UserError, match=r"^draft vocabulary: d2t and t2d .* (whole numbers|d2t holds offsets)"):
            DraftVocab.from_d2t(d2t, vocab.t2d)
    with pytest.raises(UserError, match=r"no such draft vocabulary; .*rank-vocab"):
        DraftVocab.load(path)
    save_file({"d2t": torch.zeros(3, dtype=torch.int64)}, path)
    with pytest.raises(UserError, match="not a draft vocabulary"):
        DraftVocab.load(path)


def test_the_lowest_ids_fill_up_what_was_not_counted() -> None:
    counts = torch.tensor([0, 4, 0, 2, 0, 0])
    for size, ids in {3: [1, 3, 5], 4: [0, 1, 3, 5], 5: [0, 1, 2, 3, 5]}.items():
        vocab = frequent_vocab(counts, size, must_have=[5])
        assert vocab.target_ids.tolist() == ids
        said = fill_text(vocab, counts, must_have=[5])
        assert said is None if size == 3 else said is not None and f"only 3 of {size} draft tokens were cou" in said
    assert fill_text(DraftVocab.full(6), counts, must_have=[]) is None  # nothing to choose


def test_sizes_that_cannot_be_are_refused() -> None:
    counts, own = torch.tensor([0, 4, 0, 2, 0, 1]), DraftVocab(torch.tensor([1, 3, 4, 5]), 6)
    for size, must_have, message in (
        (5, [4], r"^eval\.tree\.vocab_size: 5 is more than the 4 tokens of the drafter's"),
        (1, [2, 4, 5], r"no room for the 2 stop and template tokens \[4, 5\]"),
    ):
        with pytest.raises(UserError, match=message):
            cut_vocab(own, counts, size, must_have)
    with pytest.raises(UserError, match="of 5 tokens, the drafter's target has 6"):
        cut_vocab(own, counts[:5], 2, [4])
    with pytest.raises(UserError, match=r"^drafter\.vocab_size: 7 is more than the 6 tokens of the target's"):
        frequent_vocab(counts, 7)
    assert cut_vocab(own, counts, 2, [2, 4, 5]).target_ids.tolist() == [4, 5]
    assert frequent_vocab(counts, 3, must_have=[5, 6, -1]).target_ids.tolist() == [1, 3, 5]  # the target has no row 6
    assert frequent_vocab(counts, 6).is_full  # nothing to choose, however little was seen


@effort(100)
@given(
    ids=st.sets(st.integers(0, 29), min_size=4),
    counts=st.lists(st.sampled_from([0, 0, 0, 1, 2, 2, 5]), min_size=30, max_size=30),
    stops=st.sets(st.integers(0, 29), max_size=3),
    size=st.integers(1, 30),
)
def test_cut_equals_its_slow_twin(ids: set[int], counts: list[int], stops: set[int], size: int) -> None:
    """Many ties, and many tokens that nobody saw."""
    vocab = DraftVocab(torch.tensor(sorted(ids)), 30)
    size = min(max(size, len(stops & ids), 1), len(ids))
    ours = cut_vocab(vocab, torch.tensor(counts), size, stops)
    assert ours.target_ids.tolist() == reference.most_frequent(sorted(ids), counts, size, sorted(stops))
    # What FR-Spec's script gets wrong: stop tokens twice, or cut off again, and lists longer than asked for.
    assert ours.size == size == len(set(ours.target_ids.tolist()))
    assert stops & ids <= set(ours.target_ids.tolist())
    # A head whose rows tell whose they are.
    assert [sorted(ids)[row] for row in cut_head_rows(vocab, ours)] == ours.target_ids.tolist()
    for other in (DraftVocab(torch.tensor([7]), 31), DraftVocab.full(30)):
        if not other.same_as(vocab) and len(ids) < 30:
            with pytest.raises(ValueError, match="not a cut of this draft vocabulary"):
                cut_head_rows(vocab, other)


def test_equal_files_are_equal_bytes(tmp_path: Path) -> None:
    """Checkpoints and `draftsmith run` know their inputs by digests. safetensors draws the order of metadata anew."""
    path, about = tmp_path / "vocab.safetensors", {"covered_share": "0.5", "tokenizer": "né", "a": '["\\n"]', "b": "7"}
    DraftVocab.full(5).save(path, about)
    written = path.read_bytes()
    for _ in range(11):
        DraftVocab.full(5).save(path, about)
        assert path.read_bytes() == written
    assert DraftVocab.load(path).same_as(DraftVocab.full(5)) and load_metadata(path) == about


GOOD = {"tokenizer_fingerprint": "ab" * 32, "counted_tokens": "6", "stop_ids": "[4]"}


def test_damaged_token_counts_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "counts.safetensors"
    with pytest.raises(UserError, match=r"no such token counts; .*rank-vocab"):
        load_token_counts(path)
    for values in ([1.0, 2.0, 3.0], [5, -2, 3], [0, 0], [1, 2, 3]):
        save_file({"counts": torch.tensor(values)}, path, metadata=GOOD if values != [1, 2, 3] else None)
        with pytest.raises(UserError, match=r"counts\.safetensors: .* `draftsmith rank-vocab`"):
            load_token_counts(path)
    save_token_counts(path, torch.arange(6), "ab" * 32, {4})
    assert load_token_counts(path)[1] == GOOD | {"counted_tokens": "15"}
    assert cut_by_file(path, "ab" * 32, DraftVocab.full(6), 2, []).target_ids.tolist() == [4, 5]
    assert cut_by_file(path, "ab" * 32, DraftVocab.full(6), 2, [1]).target_ids.tolist() == [1, 4]  # the target's own
    with pytest.raises(UserError, match=r"eval\.token_counts: .* was counted .* abababab.* has cdcdcdcd"):
        cut_by_file(path, "cd" * 32, DraftVocab.full(6), 2, [])
    path.write_bytes(path.read_bytes()[:-8])
    with pytest.raises(UserError, match="not a readable safetensors file"):
        load_token_counts(path)


def write_conversations(folder: Path, outputs: list[list[int]]) -> None:
    turns = (
        {"prompt_token_ids": [2, 300 + i % 9, 4, 3], "output_token_ids": output, "finish_reason": "stop"}
        for i, output in enumerate(outputs)
    )
    asked = [{"role": "user", "content": "x"}]
    lines = ({"id": f"c{i}", "messages": asked, "turns": [turn]} for i, turn in enumerate(turns))
    write_lines(folder / "conversations.jsonl", *lines)


def test_the_script_counts_what_training_reads(
    tmp_path: Path, target_dir: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Hand-made conversations of 12 and 40 tokens, of which the long ones are no training rows."""
    chance, out = random.Random(1), tmp_path / "run"
    recipe = write_recipe(tmp_path, target_dir, data={"max_length": 20}, drafter={})
    lengths = [35 if i % 5 == 0 else 7 for i in range(30)]
    outputs = [[*(int(chance.paretovariate(0.6)) % 200 + 5 for _ in range(length)), 9] for length in lengths]
    write_conversations(out, outputs)
    run_main(rank_vocab, recipe, "drafter.vocab_size=12")
    printed, fingerprint = capsys.readouterr().out, tokenizer_fingerprint(make_tokenizer())
    counts = Counter(token for output in outputs if len(output) < 17 for token in output)
    best = sorted(counts.keys() - {9}, key=lambda token: (-counts[token], token))
    expected = sorted([4, *(best[:10]), 9])  # the tokenizer's stop token 4 was never seen; 9 is frequent
    path, total = out / "draft_vocab.safetensors", counts.total()
    vocab, metadata = DraftVocab.load(path), load_metadata(path)
    assert vocab.target_ids.tolist() == expected and vocab.target_vocab_size == VOCAB_SIZE
    covered = sum(counts[token] for token in expected) / total
    assert f"{total:,} tokens in 24 conversations; 6 records rejected" in printed and f"{covered:.2%}" in printed
    assert metadata["counted_tokens"] == str(total) and metadata["tokenizer_fingerprint"] == fingerprint
    assert float(metadata["covered_share"]) == pytest.approx(covered, abs=1e-6)
    rejects = out / "conversations.training_rejects.jsonl"
    assert [json.loads(line)["line"] for line in rejects.read_text().splitlines()] == [1, 6, 11, 16, 21, 26]
    shown = dict(line.split() for line in printed.splitlines() if line.endswith("%"))
    by_count = sorted(counts.values(), reverse=True)  # the stop token, never seen, takes a place
    assert shown["32"] == f"{sum(by_count[:31]) / total:.2%}" and shown[str(VOCAB_SIZE)] == "100.00%"
    # What decoding cuts by: counts of the whole vocabulary, and of them what was chosen for training.
    counts_path = out / "token_counts.safetensors"
    found, metadata = load_token_counts(counts_path)
    assert {token: count for token, count in enumerate(found.tolist()) if count} == counts
    assert metadata == {"tokenizer_fingerprint": fingerprint, "counted_tokens": str(total), "stop_ids": "[4]"}
    assert cut_by_file(counts_path, fingerprint, DraftVocab.full(VOCAB_SIZE), 12, [4]).same_as(vocab)
    write_conversations(out, [*outputs, outputs[1]])
    run_main(rank_vocab, recipe)
    assert load_token_counts(counts_path)[0].sum() - found.sum() == len(outputs[1])
    assert len(rejects.read_text().splitlines()) == 6  # none twice
    assert DraftVocab.load(path).same_as(DraftVocab.full(VOCAB_SIZE))
    # Under a drafter a mapping never changes.
    run_main(rank_vocab, recipe, "drafter.vocab_size=14")
    before = path.read_bytes()
    (out / "checkpoints/step_4").mkdir(parents=True)
    with pytest.raises(UserError, match=r"holds 14 draft tokens .* give 12 of 320, 12 of them .*checkpoints"):
        run_main(rank_vocab, recipe, "drafter.vocab_size=12")
    run_main(rank_vocab, recipe, "drafter.vocab_size=14")
    assert path.read_bytes() == before
