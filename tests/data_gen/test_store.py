"""The hidden-state store: capture of it, what is in it, that training from it is training with the target."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors import safe_open

from draftsmith.data_gen.states import capturing
from draftsmith.data_gen.states import store as stores_module
from draftsmith.data_gen.states.capturing import Capture
from draftsmith.data_gen.states.store import (
    ENCODINGS,
    Store,
    StoreManifest,
    entry_path,
    key_of,
    teacher_positions,
)
from draftsmith.data_gen.states.stored_target import StoredTarget, check_head
from draftsmith.models.alignment import columns_of
from draftsmith.models.drafters import drafter_shape
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.files.reading import file_problem
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.train import TrainSection
from draftsmith.train.loss.unroll import TrainingTimeTest, UnrollSums, teacher_of
from draftsmith.train.run import state_sources
from draftsmith.train.run.batches import BatchOrder, MicroBatch, collate
from draftsmith.train.run.engine import trainee_of as trainee_of_section
from draftsmith.train.run.initial_drafter import new_drafter
from draftsmith.train.run.schedule import BATCHES_AHEAD, Schedule
from draftsmith.train.run.state_sources import OnlineStates, ShardOrder, StateSource, StoredStates
from tests.conftest import make_target, make_tokenizer
from tests.crash_states import EVERY, cut, flip, full_disk, restore, state_of, watched
from tests.drafter_cases import assert_same_gradients, gradients
from tests.store_cases import CONVERSATIONS, KINDS, SHARDS, capture, refusals, rows_of, target_of
from tests.store_cases import copy as copy
from tests.store_cases import recipe_path as recipe_path
from tests.store_cases import store as store
from tests.store_cases import stores as stores
from tests.thinning import a_few
from tests.training_runs import metrics, to_train, train

# So wide that chance hits.
REPLAY = ["train.eval_replay=3", "train.save_every_steps=6", "eval.tree={nodes: 60, draft_calls: 1, top_k: 59}"]


def names_in(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        return set(file.keys())


# What is stored.


@pytest.mark.parametrize("name", ENCODINGS)
def test_states_come_back_as_near_as_their_dtype_allows(name: str) -> None:
    """Each element against arithmetic on it alone; what is not finite does not become so."""
    encoding = ENCODINGS[name]
    states = torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0))
    states *= torch.tensor([1e-3, 1.0, 300.0])[:, None]
    states[4, 2] = 0
    decoded = encoding.decode(*encoding.encode(states), torch.float32)
    largest = states.abs().amax(-1, keepdim=True)
    allowed = {
        "float32": torch.zeros_like(states),
        "bfloat16": states.abs() * 2**-8,  # half a step of 8 bits of precision, at most
        "fp8": states.abs() * 2**-4 * 1.001 + largest / 448 * 2**-10,  # half a step of 4 bits; of subnormals 2^-9
    }[name]
    assert bool(((decoded - states).abs() <= allowed).all())
    assert encoding.bytes_of(64) == {"float32": 256, "bfloat16": 128, "fp8": 68}[name]
    states[0, :, 3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    finite = encoding.decode(*encoding.encode(states), torch.float32).isfinite().all(-1)
    assert finite.all(-1).tolist() == [False, True, True, True, True] and not finite[0].any()


def test_teacher_positions_are_those_that_columns_look_at() -> None:
    chance = random.Random(0)
    for _ in range(200):
        edges = sorted(chance.sample(range(25), 2 * chance.randint(1, 4)))
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        span = torch.zeros(1, 25, dtype=torch.long)
        for number, (start, end) in enumerate(spans, start=1):
            span[0, start:end] = number
        columns = columns_of(span, steps=3)
        teachers = {int(t) + 1 + k for k in range(3) for t in columns.index[0][columns.counted(k)[0]]}
        assert teacher_positions(spans) == sorted(teachers)


def test_a_store_holds_what_the_target_says_of_each_row_alone(recipe_path: Path, store: Path) -> None:
    recipe = load_recipe(recipe_path)
    target, rows, opened = target_of(recipe), rows_of(recipe), Store(store)
    assert len({opened.shard_of(row) for row in rows}) == SHARDS == opened.manifest.of
    for row in rows:
        # Beside other rows, in padded batches: float32 sums in another order, of states as large as 30.
        stored, states = opened.read(row), target.states(torch.tensor([row.input_ids]))
        length = max(end for _, end in row.spans) - 1  # nothing reads the last token's state
        torch.testing.assert_close(stored.captured.flatten(1), states.captured[0, :length], rtol=1e-4, atol=1e-4)
        assert stored.last is not None and stored.captured.shape == (length, 3, 32)
        torch.testing.assert_close(stored.last, states.last[0, teacher_positions(row.spans)], rtol=1e-4, atol=1e-4)
    with safe_open(store / "shard-00000.safetensors", "pt") as shard:
        first = next(row for row in rows if key_of(row) == shard.get_tensor("key")[0].numpy().tobytes())
        assert shard.get_tensor("starts")[:2].tolist() == [0, max(end for _, end in first.spans) - 1]
        assert shard.get_tensor("last_starts")[:2].tolist() == [0, len(teacher_positions(first.spans))]
    assert opened.manifest.total("rows") == len(rows)


def test_rows_with_states_that_are_not_finite_are_named_and_kept(
    recipe_path: Path, target_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model, rows = make_target(), rows_of(load_recipe(recipe_path))
    token = rows[0].input_ids[5]
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = float("nan")
    shutil.copytree(target_dir, tmp_path / "target")
    model.save_pretrained(tmp_path / "target")
    states = f"data.states={tmp_path / 'states'}"
    capture(recipe_path, f"target.model={tmp_path / 'target'}", states, "data.capture.dtype=fp8")
    opened, broken = Store(tmp_path / "states"), [row for row in rows if token in row.input_ids]
    assert opened.manifest.total("nonfinite_rows") == len(broken) > 0
    assert f"NaN or inf among the states of {len(broken)} rows" in capsys.readouterr().out
    for row in rows:
        stored = opened.read(row)
        decoded = opened.encoding.decode(stored.captured, stored.captured_scale, torch.float32)
        assert bool(decoded.isfinite().all()) == (row not in broken)


# Training from a store.


def sums_of(source: StateSource, target: Target, trainee: TrainingTimeTest, batch: MicroBatch) -> UnrollSums:
    columns = columns_of(batch.span, trainee.steps)
    captured, last = source.of(batch)
    teacher = teacher_of(target, last, batch.ids, columns, trainee.drafter.vocab)
    inputs = target.inputs(batch.ids, batch.position, dtype=trainee.drafter.dtype)
    sums = trainee(captured, inputs, columns, teacher, batch.documents)
    sums.loss.backward()
    return sums


def trainee_of(recipe: Recipe, target: Target) -> TrainingTimeTest:
    torch.manual_seed(3)
    shape = drafter_shape(recipe.drafter, target.config)
    full = DraftVocab.full(320)
    vocab = DraftVocab(torch.arange(0, 320, 2), 320) if recipe.drafter.vocab_size else full
    return trainee_of_section(recipe.train, new_drafter(recipe.drafter, shape, vocab, target, {}))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", a_few(KINDS, "eagle3", "poss"))
def test_the_same_batches_give_the_same_losses_and_gradients_as_with_the_target(
    recipe_path: Path, stores: Callable[[str], Path], kind: str, packed: bool
) -> None:
    """To what float32 makes of the target's products in batches of another shape."""
    recipe = load_recipe(recipe_path, KINDS[kind])
    target, rows = target_of(recipe), rows_of(recipe)
    opened = Store(stores(kind))
    assert ("last" in names_in(stores(kind) / "shard-00000.safetensors")) == ("eagle3" in kind)
    stand_in = StoredTarget(opened, target.config)
    stored = StoredStates(opened, rows, torch.device("cpu"), stand_in.dtype)
    one, other = trainee_of(recipe, target), trainee_of(recipe, stand_in)
    for numbers in ([3, 0, 11], [20], [5, 6, 7, 8]):
        batch = collate([rows[i] for i in numbers], packed, numbers)
        online, offline = sums_of(OnlineStates(target), target, one, batch), sums_of(stored, stand_in, other, batch)
        assert online.loss.item() > 1
        torch.testing.assert_close(offline.loss, online.loss, rtol=2e-5, atol=0)
        assert torch.equal(offline.reached, online.reached) and torch.equal(offline.correct, online.correct)
        assert_same_gradients(gradients(other.drafter), gradients(one.drafter), tolerance=1e-4)


@pytest.mark.parametrize(
    "family, settings, names",
    [
        ("llama", {}, {"embedding", "head"}),
        pytest.param("llama", {"tie_word_embeddings": True}, {"embedding"}, marks=pytest.mark.slow),
        pytest.param("gemma2", {"final_logit_softcapping": 5.0}, {"embedding", "head"}, marks=pytest.mark.slow),
        pytest.param("phi", {}, {"embedding", "head", "bias"}, marks=pytest.mark.slow),
    ],
)
def test_a_stored_target_is_the_target_as_far_as_training_asks(
    recipe_path: Path, tmp_path: Path, family: str, settings: dict[str, Any], names: set[str]
) -> None:
    """Also a tied head, a soft-capped one with scaled embeddings, and one with a bias."""
    model = make_target(family, **settings)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    model.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    capture(recipe_path, f"target.model={tmp_path / 'target'}", f"data.states={tmp_path / 'states'}")
    target = target_of(load_recipe(recipe_path, [f"target.model={tmp_path / 'target'}"]))
    stored = StoredTarget(Store(tmp_path / "states"), target.config)
    assert names_in(tmp_path / "states/target/head.safetensors") == names
    assert torch.equal(stored.embedding_table, target.embedding_table)
    states = torch.randn(3, 32)
    assert torch.equal(stored.logits(states), target.logits(states))
    for name in ("vocab_size", "hidden_size", "num_layers", "capture_layers", "embedding_scale", "dtype", "device"):
        assert getattr(stored, name) == getattr(target, name), name
    with pytest.raises(UserError, match=r"only its head and embeddings: leave data\.states out"):
        stored.states(torch.zeros(1, 3, dtype=torch.long))


def test_a_head_that_is_more_than_its_weight_is_refused(recipe_path: Path) -> None:
    target = target_of(load_recipe(recipe_path))
    target.head.register_forward_hook(lambda _, __, output: 2 * output)  # type: ignore[operator]
    with pytest.raises(UserError, match="more than a matrix"):
        check_head(target)


@pytest.mark.parametrize("kind", a_few(["eagle3", "eagle", "poss"], "eagle3"))
def test_runs_from_a_store_log_what_runs_with_the_target_log(
    recipe_path: Path, stores: Callable[[str], Path], tmp_path: Path, kind: str
) -> None:
    """The store fits in a window, so that both read in one order; the last run has no target but the store's."""
    runs, offline = {}, [f"data.states={stores(kind)}"]
    alone = [*offline, f"target.model={stores(kind) / 'target'}"]
    for name, more in {"online": [], "offline": offline, "alone": alone}.items():
        output = to_train(tmp_path / name, CONVERSATIONS)
        if kind != "eagle3":
            DraftVocab.full(320).save(output / "draft_vocab.safetensors")
        train(recipe_path, *KINDS[kind], *REPLAY, "train.max_steps=3", f"output_dir={output}", *more)
        runs[name] = metrics(output)
    assert runs["offline"] == runs["alone"]
    for mine, its in zip(runs["offline"], runs["online"], strict=True):
        assert mine.keys() == its.keys()
        for key in ("loss", "grad_norm", "validation_loss"):
            if key in its:
                assert mine[key] == pytest.approx(its[key], rel=1e-3), key
        assert mine["accuracy"] == pytest.approx(its["accuracy"], abs=0.02)
        assert mine.get("replay_tau") == its.get("replay_tau")
    assert [line["step"] for line in runs["offline"] if line.get("replay_tau", 0) > 1] == [3]


@pytest.mark.slow
def test_a_killed_run_from_a_store_goes_on_bit_for_bit(recipe_path: Path, store: Path, tmp_path: Path) -> None:
    accumulating = "train.gradient_accumulation_steps=2"  # an epoch ends within the fifth step
    outputs = [to_train(tmp_path / name, CONVERSATIONS) for name in ("whole", "parts")]
    for output in outputs:
        train(recipe_path, accumulating, f"data.states={store}", f"output_dir={output}")
    for each in sorted((outputs[1] / "checkpoints").iterdir())[1:]:
        shutil.rmtree(each)
    train(recipe_path, accumulating, f"data.states={store}", f"output_dir={outputs[1]}")
    assert metrics(outputs[1]) == metrics(outputs[0])
    with pytest.raises(UserError, match=r"data\.states: the checkpoint has \{.*this run has None"):
        train(recipe_path, accumulating, f"output_dir={outputs[1]}")


# The order in which a store is read.


def test_an_epoch_reads_every_row_once_and_few_shards_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_sources, "WINDOW_SHARDS", 4)
    chance = random.Random(0)
    lengths = [chance.randint(10, 400) for _ in range(4001)]
    shard_of = [chance.randrange(100) for _ in lengths]

    def epoch(number: int, seed: int = 0) -> list[list[int]]:
        order = ShardOrder(lengths, 4, seed, shard_of)
        return [order.rows(number * order.batches_per_epoch + n) for n in range(order.batches_per_epoch)]

    for found in (epoch(0), epoch(1)):
        assert sorted(row for batch in found for row in batch) == list(range(len(lengths)))
        assert sorted(map(len, found))[:2] == [1, 4]  # one micro-batch is smaller
        for start in range(0, len(found) - 32, 32):
            shards = {shard_of[row] for batch in found[start : start + 32] for row in batch}
            assert len(shards) <= 2 * 4  # of a hundred: a pool has fewer rows than a window
            widths = [max(lengths[row] for row in batch) for batch in found[start : start + 32]]
            assert widths not in (sorted(widths), sorted(widths, reverse=True))  # cut by length, then shuffled
        padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in found)
        assert sum(lengths) / padded > 0.9
    assert epoch(0) == epoch(0) and epoch(0) not in (epoch(1), epoch(0, seed=1))
    # A store of few shards is read in the order of training with the target.
    plain, by_shards = BatchOrder(lengths[:101], 4, 5), ShardOrder(lengths[:101], 4, 5, [i % 4 for i in range(101)])
    assert [plain.rows(n) for n in range(60)] == [by_shards.rows(n) for n in range(60)]


def test_the_next_micro_batches_of_a_rank_come_ahead_of_their_steps() -> None:
    for ranks, each in ((1, 1), (1, 3), (2, 1), (3, 2), (1, 5)):
        schedule = Schedule(TrainSection(batch_size=2, gradient_accumulation_steps=each, max_steps=12), 30, ranks)
        for rank in range(ranks):
            numbers = [(step * ranks + rank) * each + i for step in range(12) for i in range(each)]
            for step in range(12):
                coming, left = schedule.ahead(step, rank), numbers[(step + 1) * each :]
                assert coming == left[: len(coming)] and len(coming) >= min(BATCHES_AHEAD, len(left))


def test_reading_ahead_gives_the_same_and_keeps_little(recipe_path: Path, store: Path) -> None:
    rows, opened = rows_of(load_recipe(recipe_path)), Store(store)
    cpu = torch.device("cpu")
    ahead, plain = StoredStates(opened, rows, cpu, torch.float32), StoredStates(Store(store), rows, cpu, torch.float32)
    trained = [len(row.input_ids) for row in rows[:30]]
    order = ahead.ordered(BatchOrder(trained, 2, 0))
    schedule = Schedule(TrainSection(batch_size=2, gradient_accumulation_steps=2, max_steps=12), 30, ranks=2)
    most = 0
    for step in range(12):  # rank 1 of 2, two micro-batches a step: beyond the end of an epoch
        numbers = [number for number, _ in schedule.numbers(step, 1)]
        ahead.expect([row for number in (*numbers, *schedule.ahead(step, 1)) for row in order.rows(number)])
        for number in numbers:
            chosen = order.rows(number)
            batch = collate([rows[i] for i in chosen], False, chosen)
            mine, its = ahead.of(batch), plain.of(batch)
            assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
            most = max(most, len(ahead.begun))
        validation = collate(rows[30:32], False, [30, 31])
        assert torch.equal(ahead.of(validation)[0], plain.of(validation)[0])
        read = [(rows[30], 5), (rows[step], 7), (rows[30], 9)]  # as replay does
        of_rows = [plain.of(collate([rows[i]], False, [i]))[0][0] for i in (30, step)]
        assert torch.equal(ahead.captured(read), torch.cat([of_rows[0][:5], of_rows[1][:7], of_rows[0][:9]]))
    assert 2 < most <= 2 * (2 + BATCHES_AHEAD)


def test_a_store_for_something_else_is_refused_with_both_sides(recipe_path: Path, store: Path, tmp_path: Path) -> None:
    from_store = f"data.states={store}"
    said = refusals(recipe_path, from_store, "data.capture.dtype=fp8", "drafter.capture_layers=[1, 2, 3]")
    assert "dtype: 'float32' there, 'fp8' now" in said
    assert "capture_layers: [2, 3, 4] there, [1, 2, 3] now" in said
    other, output = tmp_path / "other", to_train(tmp_path / "run", CONVERSATIONS)
    make_target(num_layers=8).save_pretrained(other)
    make_tokenizer("{# other #}").save_pretrained(other)
    conversations = [json.loads(line) for line in (output / "conversations.jsonl").read_text().splitlines()]
    conversations[4]["turns"][0]["output_token_ids"][0] ^= 1
    (output / "conversations.jsonl").write_text("\n".join(map(json.dumps, conversations)) + "\n")
    said = refusals(recipe_path, from_store, f"target.model={other}", f"output_dir={output}")
    assert "target.num_layers: 7 there, 8 now" in said
    assert "target.tokenizer_fingerprint: '" in said and "a fingerprint covers" in said
    assert "1 of these are not in it, the first is 'c4'" in said
    with pytest.raises(UserError, match="rows: '40 rows, sha256 "):
        capture(recipe_path, from_store, f"output_dir={output}")
    # Fewer rows than are stored can be trained on.
    (output / "conversations.jsonl").write_text("\n".join(map(json.dumps, conversations[5:35])) + "\n")
    train(recipe_path, from_store, f"output_dir={output}", "train.max_steps=1")


# Damage.


@pytest.mark.parametrize(
    "name, harm, problem",
    [
        ("shard-00003.safetensors", cut, "bytes instead of"),
        ("shard-00003.safetensors", flip, "its sha256 differs"),
        ("target/head.safetensors", flip, "its sha256 differs"),
        ("target/tokenizer.json", Path.unlink, "no such file"),
    ],
)
def test_damaged_files_are_named_and_written_anew(
    recipe_path: Path, store: Path, copy: Path, tmp_path: Path, name: str, harm: Callable[[Path], None], problem: str
) -> None:
    output = to_train(tmp_path / "run", CONVERSATIONS)
    harm(copy / name)
    said = refusals(recipe_path, f"data.states={copy}", f"output_dir={output}", "train.max_steps=20")
    assert f"{copy / name}: " in said and problem in said and "draftsmith capture --verify" in said
    capture(recipe_path, f"data.states={copy}", "--verify")
    assert state_of(copy) == state_of(store)


def test_a_store_made_anew_is_not_read_on(recipe_path: Path, copy: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stores_module, "OPEN_SHARDS", 1)
    store, rows = Store(copy), rows_of(load_recipe(recipe_path))
    assert len([store.read(row) for row in rows]) == CONVERSATIONS
    for path in copy.glob("shard-*.safetensors"):
        shutil.copy2(path, copy / "again")
        (copy / "again").replace(path)
    with pytest.raises(UserError, match="replaced since this run began to read it"):
        for row in rows:
            store.read(row)


@pytest.mark.parametrize("content", ["{", "[]", '{"kind": "c2t"}'])
def test_a_damaged_manifest_is_told(copy: Path, content: str) -> None:
    (copy / "manifest.json").write_text(content)
    with pytest.raises(UserError, match=r"manifest\.json: "):
        Store(copy)


@pytest.mark.parametrize("kind, dtype", [("eagle3", "fp8"), pytest.param("eagle", "float32", marks=pytest.mark.slow)])
def test_the_plan_says_within_two_percent_what_is_written(
    recipe_path: Path, tmp_path: Path, kind: str, dtype: str, capsys: pytest.CaptureFixture
) -> None:
    """Headers of files, config and tokenizer aside."""
    overrides = [*KINDS[kind], f"data.states={tmp_path / 'states'}", f"data.capture.dtype={dtype}"]
    capture(recipe_path, *overrides, "--plan")
    assert not (tmp_path / "states").exists() and "are free" in capsys.readouterr().out
    expected = capture_of(recipe_path, *overrides).bytes_left
    capture(recipe_path, *overrides)
    written = sum(path.stat().st_size for path in (tmp_path / "states").rglob("*.safetensors"))
    assert expected == pytest.approx(written, rel=0.02)
    assert Store(tmp_path / "states").manifest.complete


def capture_of(recipe_path: Path, *overrides: str) -> Capture:
    recipe = load_recipe(recipe_path, overrides)
    return Capture(recipe, TargetFiles(recipe.target), Rejects())


def test_too_small_a_disk_is_told_at_once(recipe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that were written with their answers make room, but for the largest shard."""
    wanted = capture_of(recipe_path, f"data.states={tmp_path}")
    (tmp_path / "written").mkdir()
    (tmp_path / "written/a.safetensors").write_bytes(bytes(10**6))
    wanted.manifest.files = {"config.json": {}}
    largest = max(map(wanted.wanted.bytes_of_rows, wanted.shards))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    free = largest
    wanted.check_room()
    free = largest - 1
    with pytest.raises(UserError, match="make room"):
        wanted.check_room()
    with pytest.raises(UserError, match=r"MB are still to be written to .* free there: make room"):
        capture(recipe_path, f"data.states={tmp_path / 'states'}")
    assert not state_of(tmp_path / "states")


# Several processes.


def as_rank(monkeypatch: pytest.MonkeyPatch, rank: int, size: int) -> None:
    for name, value in (("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size)):
        monkeypatch.setenv(name, str(value))


def test_processes_share_the_shards_and_write_what_one_writes(
    recipe_path: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Whichever ends last says that all is captured."""
    for rank, last in ((2, False), (0, False), (1, True)):
        as_rank(monkeypatch, rank, 3)
        capture(recipe_path, f"data.states={tmp_path}")
        own = {f"shard-{number:05d}.safetensors" for number in range(rank, SHARDS, 3)}
        assert own <= state_of(tmp_path).keys()
        printed = capsys.readouterr().out
        assert (f"{SHARDS} of {SHARDS} shards" in printed) is last and ("writes  " in printed) is (rank == 0)
    assert state_of(tmp_path) == state_of(store)


def test_shards_of_something_else_are_not_mixed_in(recipe_path: Path, tmp_path: Path, copy: Path) -> None:
    """As a process writes them that sees other conversations, or another target, than rank 0."""
    entry = json.loads(entry_path(copy, 2).read_text())
    entry_path(copy, 2).write_text(json.dumps(entry | {"made_of": "else"}))
    for use in (lambda: Store(copy), lambda: capture(recipe_path, f"data.states={copy}")):
        with pytest.raises(UserError, match=r"shard-00002\.safetensors: its states differ from the manifest's"):
            use()


def test_each_process_takes_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        taken: ClassVar[list[int]] = []
        device_count = staticmethod(lambda: 2)
        set_device = staticmethod(taken.append)

    monkeypatch.setattr(torch, "get_device_module", lambda device: Cuda)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    as_rank(monkeypatch, 1, 3)
    assert capturing.device_of_rank("auto") == "cuda:1" and Cuda.taken == [1]
    as_rank(monkeypatch, 2, 3)
    with pytest.raises(UserError, match="has 2 of kind cuda for 3 processes"):
        capturing.device_of_rank("auto")


def test_two_captures_do_not_write_into_one_folder(recipe_path: Path, copy: Path) -> None:
    entry_path(copy, 2).unlink()
    left = state_of(copy)
    with alone_in(copy), pytest.raises(UserError, match="another run is writing there"):
        capture(recipe_path, f"data.states={copy}")
    assert state_of(copy) == left
    capture(recipe_path, f"data.states={copy}")
    assert len(state_of(copy)) == len(left) + 1


# Kills.


@pytest.mark.parametrize("every", EVERY)
def test_a_capture_that_was_killed_goes_on(recipe_path: Path, store: Path, tmp_path: Path, every: int) -> None:
    """What was whole is not made again. In the second half, the target's folder replaces a damaged one."""
    directory = tmp_path / "states"
    with watched(directory) as states:
        capture(recipe_path, f"data.states={directory}")
        (directory / "target/head.safetensors").unlink()
        capture(recipe_path, f"data.states={directory}")
    for state in states:
        check_what_a_kill_left(restore(state, directory))
    for state in states[::-every]:  # the last one holds the complete store
        restore(state, directory)
        for left in (".tmpA1b2C3", ".lock"):  # as safetensors and a killed process leave them
            (directory / left).touch()
        manifest = StoreManifest.read(directory)
        whole = [directory / said["file"] for said in manifest.shards.values()] if manifest else []
        before = {path: path.stat().st_mtime_ns for path in whole}
        capture(recipe_path, f"data.states={directory}")
        assert all(path.stat().st_mtime_ns == written for path, written in before.items())
        assert state_of(directory) == state_of(store)


def check_what_a_kill_left(directory: Path) -> None:
    """Whatever has an entry is whole."""
    manifest = StoreManifest.read(directory)
    for said in manifest.shards.values() if manifest else ():
        assert file_problem(directory / said["file"], said, digest=True) is None


def test_a_full_disk_is_one_message_and_leaves_whole_shards(recipe_path: Path, store: Path, tmp_path: Path) -> None:
    directory = tmp_path / "states"
    message = r"states: cannot be written .*whole shards stay"
    with pytest.raises(UserError, match=message), full_disk(90_000):  # the target's files are smaller
        capture(recipe_path, f"data.states={directory}")
    check_what_a_kill_left(directory)
    assert not list(directory.glob("*.partial"))
    capture(recipe_path, f"data.states={directory}")
    assert state_of(directory) == state_of(store)
