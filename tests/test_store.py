"""The hidden-state store: what is in it, that training from it is training with the target, and that nothing is torn.

The slow test kills capture 200 times, half of the times by the clock and half at a drawn write, rename or fsync.
"""

import contextlib
import functools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, ClassVar

import psutil
import pytest
import torch
import yaml
from safetensors import safe_open
from torch.distributed import HashStore  # type: ignore[attr-defined]

from draftsmith.data_gen import capture as script
from draftsmith.data_gen.rows.training_rows import TrainingRow, usable_rows
from draftsmith.data_gen.states import capturing
from draftsmith.data_gen.states.capture_processes import Team
from draftsmith.data_gen.states.capturing import Job, estimated_bytes, layers_of
from draftsmith.data_gen.states.store import ENCODINGS, Manifest, ShardBuffer, Store, key_of, teacher_positions
from draftsmith.data_gen.states.stored_target import StoredTarget, check_head
from draftsmith.eval.decoding.policies import policy_of
from draftsmith.models.alignment import columns_of
from draftsmith.models.chat import load_config, load_tokenizer, tokenizer_fingerprint
from draftsmith.models.drafters import drafter_config
from draftsmith.models.target import Target, load_causal_lm
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.command import progress
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe, TreeSection
from draftsmith.train import eagle, eagle3, poss
from draftsmith.train.loss.unroll import TrainingTimeTest, UnrollSums, teacher_of
from draftsmith.train.run.batches import BatchOrder, MicroBatch, collate
from draftsmith.train.run.initial_drafter import new_drafter
from draftsmith.train.run.settings import trainee_of as trainee_of_section
from draftsmith.train.run.state_sources import (
    BATCHES_AHEAD,
    OnlineStates,
    ShardOrder,
    StateSource,
    StoredStates,
    numbers_of_rank,
)
from draftsmith.train.run.validation_replay import ValidationReplay, answers_of, in_numbers
from tests.conftest import make_target, make_tokenizer
from tests.crash import CAN_FORK, CrashLab, Ending, Fault
from tests.drafter_cases import assert_same_gradients, gradients
from tests.ranks import run_ranks
from tests.test_crashes import cut, kill_until_it_ends, told
from tests.training_runs import SIX_STEPS, metrics, run_main, to_train

ROOT = Path(__file__).parent.parent
CAPTURE = "draftsmith.data_gen.capture"
KILLS = 200
CONVERSATIONS = 40
SHARDS = 6  # that the rows of these fill
REPLAY = [
    "train.eval_replay=3",
    "train.save_every_steps=6",
    "eval.tree={nodes: 60, draft_calls: 1, top_k: 59}",
]  # so wide that chance hits

# What the recipe's drafter is, by the script that trains it.
KINDS: dict[str, list[str]] = {
    "eagle3": [],
    "eagle": ["drafter={kind: eagle}", "train.ttt_steps=3", "train.top_k_loss=1.0"],  # HASS
    "poss": ["drafter={kind: poss, positions_per_specialist: 1, specialists: 3}", "train.ttt_steps=4"],
    "poss over eagle3": [
        "drafter={kind: poss, base: eagle3, vocab_size: 160, positions_per_specialist: 2, specialists: 2}",
        "train.ttt_steps=4",
    ],
}


@pytest.fixture(scope="module")
def recipe_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe with its target, conversations and draft vocabulary; the store's rows fill several shards."""
    folder = tmp_path_factory.mktemp("store")
    make_target().save_pretrained(folder / "target")
    make_tokenizer().save_pretrained(folder / "target")
    sections = {
        "output_dir": str(to_train(folder / "run", CONVERSATIONS)),
        "target": {"model": str(folder / "target"), "dtype": "float32", "device": "cpu"},
        "data": {"capture": {"dtype": "float32", "shard_megabytes": 0.1, "batch_tokens": 100}},
        "drafter": {"vocab_size": 160},
        "train": SIX_STEPS,
    }
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


@pytest.fixture(scope="module")
def stores(recipe_path: Path) -> Callable[[str], Path]:
    """What capture writes in float32 for the recipe with a drafter of this kind."""

    @functools.cache
    def captured(kind: str) -> Path:
        directory = recipe_path.parent / f"states of {kind}"
        capture(recipe_path, *KINDS[kind], f"data.states={directory}")
        return directory

    return captured


@pytest.fixture(scope="module")
def store(stores: Callable[[str], Path]) -> Path:
    return stores("eagle3")


@pytest.fixture
def copy(store: Path, tmp_path: Path) -> Path:
    """A store to damage."""
    shutil.copytree(store, tmp_path / "copy")
    return tmp_path / "copy"


def capture(recipe_path: Path, *arguments: str) -> None:
    run_main(script, recipe_path, *arguments)


def rows_of(recipe: Recipe) -> list[TrainingRow]:
    return usable_rows(recipe, load_tokenizer(recipe.target), Rejects())


def target_of(recipe: Recipe) -> Target:
    model = load_causal_lm(recipe.target)
    return Target(model, layers_of(recipe, model.config))


def files_of(directory: Path) -> dict[str, bytes]:
    return {
        path.relative_to(directory).as_posix(): path.read_bytes()
        for path in directory.rglob("*")
        if path.is_file() and path.name != ".lock"
    }


def names_in(path: Path) -> set[str]:
    with safe_open(path, "pt") as file:
        return set(file.keys())


# What is stored.


@pytest.mark.parametrize("name", ENCODINGS)
def test_states_come_back_as_near_as_their_dtype_allows(name: str) -> None:
    """Each element against arithmetic on it alone."""
    encoding = ENCODINGS[name]
    states = (
        torch.randn(5, 3, 64, generator=torch.Generator().manual_seed(0)) * torch.tensor([1e-3, 1.0, 300.0])[:, None]
    )
    states[4, 2] = 0
    decoded = encoding.decode(*encoding.encode(states), torch.float32)
    largest = states.abs().amax(-1, keepdim=True)
    allowed = {
        "float32": torch.zeros_like(states),
        "bfloat16": states.abs() * 2**-8,  # half a step of 8 bits of precision, at most
        "int8": largest / 127 / 2 * 1.001 + 0 * states,  # half a step; float32 rounds the scale
        "fp8": states.abs() * 2**-4 * 1.001 + largest / 448 * 2**-10,  # half a step of 4 bits; of subnormals 2^-9
    }[name]
    assert bool(((decoded - states).abs() <= allowed).all())
    assert encoding.bytes_of(64) == {"float32": 256, "bfloat16": 128, "int8": 68, "fp8": 68}[name]


@pytest.mark.parametrize("name", ENCODINGS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_does_not_become_so(name: str, bad: float) -> None:
    states = torch.randn(2, 8)
    states[1, 3] = bad
    decoded = ENCODINGS[name].decode(*ENCODINGS[name].encode(states), torch.float32)
    assert bool(decoded[0].isfinite().all()) and not bool(decoded[1].isfinite().all())


def test_teacher_positions_are_those_that_columns_look_at() -> None:
    chance = random.Random(0)
    for _ in range(200):
        edges = sorted(chance.sample(range(25), 2 * chance.randint(1, 4)))
        spans = list(zip(edges[::2], edges[1::2], strict=True))
        span = torch.zeros(1, 25, dtype=torch.long)
        for number, (start, end) in enumerate(spans, start=1):
            span[0, start:end] = number
        columns = columns_of(span, steps=3)
        expected = {
            int(t) + 1 + k for k in range(3) for t in columns.index[0][columns.counted(k)[0]]
        }  # every teacher of every step
        assert teacher_positions(spans) == sorted(expected)


def test_a_store_holds_what_the_target_says_of_each_row_alone(recipe_path: Path, store: Path) -> None:
    recipe = load_recipe(recipe_path)
    target, rows, opened = target_of(recipe), rows_of(recipe), Store(store)
    assert len({opened.shard_of(row) for row in rows}) == SHARDS == opened.manifest.of_shards
    for row in rows:
        # Beside other rows, in padded batches: float32 sums in another order, of states as large as 30.
        stored, states = opened.read(row), target.states(torch.tensor([row.input_ids]))
        length = max(end for _, end in row.spans)
        torch.testing.assert_close(stored.captured.flatten(1), states.captured[0, :length], rtol=1e-4, atol=1e-4)
        assert stored.last is not None and stored.captured.shape == (length, 3, 32)
        torch.testing.assert_close(stored.last, states.last[0, teacher_positions(row.spans)], rtol=1e-4, atol=1e-4)
    with safe_open(store / "shard-00000.safetensors", "pt") as shard:
        first = next(row for row in rows if key_of(row) == shard.get_tensor("key")[0].numpy().tobytes())
        assert shard.get_tensor("ids")[: len(first.input_ids)].tolist() == first.input_ids
        assert [span[1:] for span in shard.get_tensor("spans").tolist() if span[0] == 0] == [
            list(s) for s in first.spans
        ]
    assert opened.manifest.total("rows") == len(rows)
    assert opened.manifest.total("tokens") == sum(len(row.input_ids) for row in rows)


def test_rows_with_states_that_are_not_finite_are_named_and_kept(
    recipe_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    model = make_target()
    bad = rows_of(load_recipe(recipe_path))[0]
    token = bad.input_ids[5]
    with torch.no_grad():
        model.get_input_embeddings().weight[token] = float("nan")
    shutil.copytree(recipe_path.parent / "target", tmp_path / "target")
    model.save_pretrained(tmp_path / "target")
    arguments = [f"target.model={tmp_path / 'target'}", f"data.states={tmp_path / 'states'}", "data.capture.dtype=int8"]
    capture(recipe_path, *arguments)
    rows = rows_of(load_recipe(recipe_path))
    broken = [row for row in rows if token in row.input_ids]
    opened, printed = Store(tmp_path / "states"), capsys.readouterr().out
    assert opened.manifest.total("nonfinite_rows") == len(broken) and bad in broken
    assert f"states that are not finite numbers in {len(broken)} rows" in printed
    for row in rows:
        stored = opened.read(row)
        decoded = opened.encoding.decode(stored.captured, stored.captured_scale, torch.float32)
        assert bool(decoded.isfinite().all()) == (token not in row.input_ids)


# Training from a store.


def sums_of(source: StateSource, target: Target, trainee: TrainingTimeTest, batch: MicroBatch) -> UnrollSums:
    columns = columns_of(batch.span, trainee.steps)
    captured, last = source.of(batch)
    teacher = teacher_of(target, last, batch.ids, columns, trainee.drafter.vocab)
    sums = trainee(captured, batch.ids, columns, teacher, batch.documents)
    sums.loss.backward()
    return sums


def trainee_of(recipe: Recipe, target: Target) -> TrainingTimeTest:
    torch.manual_seed(3)
    shape = drafter_config(recipe.drafter, target.config, target.capture_layers)
    full = DraftVocab.full(320)
    vocab = DraftVocab(torch.arange(0, 320, 2), 320) if recipe.drafter.vocab_size else full
    return trainee_of_section(recipe.train, new_drafter(recipe.drafter, shape, vocab, target, {}))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", KINDS)
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


@pytest.mark.parametrize("kind", KINDS)
def test_replay_along_stored_states_is_replay_with_the_target(
    recipe_path: Path, stores: Callable[[str], Path], kind: str
) -> None:
    """Round by round. The drafter is untrained, but a tree this wide holds many of the tokens."""
    recipe = load_recipe(recipe_path, KINDS[kind])
    target, rows = target_of(recipe), rows_of(recipe)
    opened = Store(stores(kind))
    stand_in = StoredTarget(opened, target.config)
    stored = StoredStates(opened, rows, torch.device("cpu"), stand_in.dtype)
    drafter = trainee_of(recipe, target).drafter.eval()
    wide = policy_of(TreeSection(policy="eagle2", nodes=60, draft_calls=2, top_k=50))
    replay = ValidationReplay(answers_of(rows, 12), wide, batch_size=10)
    online = replay.share(target, drafter, 0, 1, OnlineStates(target))
    offline = [each for rank in range(2) for each in replay.share(stand_in, drafter, rank, 2, stored)]
    rounds = {(tuple(g.prompt_token_ids), *g.token_ids): g.accepted_per_round for g in online}
    assert len(rounds) == len(online) == len(offline) == 18  # every second conversation has two turns
    assert sum(map(sum, rounds.values())) > 15
    assert {(tuple(g.prompt_token_ids), *g.token_ids): g.accepted_per_round for g in offline} == rounds
    assert in_numbers(offline)["replay_tau"] == in_numbers(online)["replay_tau"]


def test_a_stored_target_is_the_target_as_far_as_training_asks(recipe_path: Path, store: Path) -> None:
    target = target_of(load_recipe(recipe_path))
    stored = StoredTarget(Store(store), target.config)
    assert torch.equal(stored.embedding_table, target.embedding_table)
    assert torch.equal(stored.head_weight, target.head_weight)
    states = torch.randn(3, 32)
    assert torch.equal(stored.logits(states), target.logits(states))
    for name in ("vocab_size", "hidden_size", "num_layers", "capture_layers", "embedding_scale", "dtype", "device"):
        assert getattr(stored, name) == getattr(target, name), name
    with pytest.raises(UserError, match=r"is not here, only its head and embeddings: leave data\.states out"):
        stored.states(torch.zeros(1, 3, dtype=torch.long))


@pytest.mark.parametrize(
    "family, settings",
    {
        "llama": {"tie_word_embeddings": True},
        "gemma2": {"final_logit_softcapping": 5.0, "tie_word_embeddings": True},
        "phi": {},
    }.items(),
)
def test_heads_of_other_families(recipe_path: Path, tmp_path: Path, family: str, settings: dict[str, Any]) -> None:
    """Tied, soft-capped with scaled embeddings, with a bias."""
    model = make_target(family, **settings)
    if getattr(model.get_output_embeddings(), "bias", None) is not None:
        torch.nn.init.normal_(model.get_output_embeddings().bias)
    model.save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    capture(recipe_path, f"target.model={tmp_path / 'target'}", f"data.states={tmp_path / 'states'}")
    recipe = load_recipe(recipe_path, [f"target.model={tmp_path / 'target'}"])
    target = target_of(recipe)
    stored = StoredTarget(Store(tmp_path / "states"), target.config)
    states = torch.randn(3, 32)
    assert torch.equal(stored.logits(states), target.logits(states))
    assert stored.embedding_scale == target.embedding_scale
    assert (
        names_in(tmp_path / "states/target/head.safetensors")
        == {"embedding"} | {"llama": set(), "gemma2": set(), "phi": {"head", "bias"}}[family]
    )


def test_a_head_that_is_more_than_its_weight_is_refused(recipe_path: Path) -> None:
    target = target_of(load_recipe(recipe_path))

    def doubled(module: Any, inputs: Any, output: Any) -> Any:
        return 2 * output

    target.head.register_forward_hook(doubled)
    with pytest.raises(UserError, match="more than a matrix"):
        check_head(target)


@pytest.mark.parametrize("kind, module", {"eagle3": eagle3, "eagle": eagle, "poss": poss}.items())
def test_runs_from_a_store_log_what_runs_with_the_target_log(
    recipe_path: Path, stores: Callable[[str], Path], tmp_path: Path, kind: str, module: Any
) -> None:
    """The store fits in a window, so that both read in one order; the last run has no target but the store's."""
    states, runs = stores(kind), {}
    for name, more in {
        "online": [],
        "offline": [f"data.states={states}"],
        "alone": [f"data.states={states}", f"target.model={states / 'target'}"],
    }.items():
        output = to_train(tmp_path / name, CONVERSATIONS)
        if kind != "eagle3":
            DraftVocab.full(320).save(output / "draft_vocab.safetensors")
        run_main(module, recipe_path, *KINDS[kind], *REPLAY, "train.max_steps=3", f"output_dir={output}", *more)
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


def test_a_killed_run_from_a_store_goes_on_bit_for_bit(recipe_path: Path, store: Path, tmp_path: Path) -> None:
    from_store = f"data.states={store}"
    accumulating = ["train.gradient_accumulation_steps=2"]  # an epoch ends within the fifth step
    whole = to_train(tmp_path / "whole", CONVERSATIONS)
    run_main(eagle3, recipe_path, *accumulating, from_store, f"output_dir={whole}")
    parts = to_train(tmp_path / "parts", CONVERSATIONS)
    run_main(eagle3, recipe_path, *accumulating, from_store, f"output_dir={parts}")
    for each in sorted((parts / "checkpoints").iterdir())[1:]:
        shutil.rmtree(each)
    run_main(eagle3, recipe_path, *accumulating, from_store, f"output_dir={parts}")
    assert metrics(parts) == metrics(whole)
    with pytest.raises(UserError, match=r"data\.states: the checkpoint has \{.*this run has None"):
        run_main(eagle3, recipe_path, *accumulating, f"output_dir={parts}")


@pytest.mark.slow
def test_two_processes_share_a_store(recipe_path: Path, store: Path, tmp_path: Path) -> None:
    outputs = []
    for ranks, name in ((1, "one"), (2, "two")):
        outputs.append(to_train(tmp_path / name, CONVERSATIONS))
        each = [f"train.gradient_accumulation_steps={2 // ranks}", f"output_dir={outputs[-1]}", f"data.states={store}"]
        run_ranks(ranks, str(ROOT / "train/eagle3.py"), [str(recipe_path), *REPLAY, *each])
    for mine, its in zip(*map(metrics, outputs), strict=True):
        assert mine["loss"] == pytest.approx(its["loss"], rel=1e-4)
        assert mine["grad_norm"] == pytest.approx(its["grad_norm"], rel=1e-3)
        assert mine.get("replay_tau") == its.get("replay_tau")
    assert "replay_tau" in metrics(outputs[0])[-1]


# The order in which a store is read.


def test_an_epoch_reads_every_row_once_and_few_shards_at_a_time() -> None:
    chance = random.Random(0)
    lengths = [chance.randint(10, 400) for _ in range(4001)]
    shard_of = [chance.randrange(100) for _ in lengths]
    order, same, other = (ShardOrder(lengths, 4, seed, shard_of, window_shards=4) for seed in (0, 0, 1))
    epochs = [[order.rows(e * order.batches_per_epoch + n) for n in range(order.batches_per_epoch)] for e in range(2)]
    for epoch in epochs:
        assert sorted(row for batch in epoch for row in batch) == list(range(len(lengths)))
        assert sorted(map(len, epoch))[:2] == [1, 4]  # one micro-batch is smaller
        for start in range(0, len(epoch) - 32, 32):
            shards = {shard_of[row] for batch in epoch[start : start + 32] for row in batch}
            assert len(shards) <= 2 * 4  # of a hundred: a pool has fewer rows than a window
        padded = sum(len(batch) * max(lengths[row] for row in batch) for batch in epoch)
        assert sum(lengths) / padded > 0.9
    assert epochs[0] != epochs[1]
    assert [same.rows(n) for n in range(order.batches_per_epoch)] == epochs[0]
    assert [other.rows(n) for n in range(order.batches_per_epoch)] != epochs[0]


def test_a_store_of_few_shards_is_read_in_the_order_of_training_with_the_target() -> None:
    lengths = [10 + 7 * i % 31 for i in range(101)]
    plain, by_shards = BatchOrder(lengths, 4, 5), ShardOrder(lengths, 4, 5, [i % 8 for i in range(101)])
    assert [plain.rows(n) for n in range(60)] == [by_shards.rows(n) for n in range(60)]


def test_ranks_take_turns_as_the_loop_has_it() -> None:
    for ranks, each in ((1, 1), (1, 3), (2, 1), (3, 2)):
        for rank in range(ranks):
            numbers = [(step * ranks + rank) * each + i for step in range(5) for i in range(each)]  # `Loop._step`
            for at, number in enumerate(numbers):
                first = at - at % each
                coming = numbers_of_rank(number, ranks, each)
                assert [next(coming) for _ in numbers[first:]] == numbers[first:]


def test_reading_ahead_gives_the_same_and_keeps_little(recipe_path: Path, store: Path) -> None:
    rows, opened = rows_of(load_recipe(recipe_path)), Store(store)
    cpu = torch.device("cpu")
    ahead, plain = StoredStates(opened, rows, cpu, torch.float32), StoredStates(Store(store), rows, cpu, torch.float32)
    trained = [len(row.input_ids) for row in rows[:30]]
    order, in_order = ahead.ordered(BatchOrder(trained, 2, 0), 2, 2), BatchOrder(trained, 2, 0)
    most, served = 0, 0
    for step in range(12):  # rank 1 of 2, two micro-batches a step: beyond the end of an epoch
        numbers = [(step * 2 + 1) * 2 + i for i in range(2)]
        for number in numbers:
            order.rows(number)
        for number in numbers:
            chosen = in_order.rows(number)
            batch = collate([rows[i] for i in chosen], False, chosen)
            served += sum(row in ahead.begun for row in batch.rows)
            mine, its = ahead.of(batch), plain.of(batch)
            assert all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))
            most = max(most, len(ahead.begun))
        validation = collate(rows[30:32], False, [30, 31])
        assert torch.equal(ahead.of(validation)[0], plain.of(validation)[0])
        assert not {30, 31} & ahead.begun.keys()
        begun, read = dict(ahead.begun), [(rows[30], 5), (rows[step], 7), (rows[30], 9)]  # as replay does
        of_rows = [plain.of(collate([rows[i]], False, [i]))[0][0] for i in (30, step)]
        assert torch.equal(ahead.captured(read), torch.cat([of_rows[0][:5], of_rows[1][:7], of_rows[0][:9]]))
        assert ahead.begun == begun
    assert 2 < most <= 2 * (2 + BATCHES_AHEAD)
    assert served >= 30  # most micro-batches were under way when they were asked for
    assert not plain.begun


# Refusals.


def refusals(recipe_path: Path, *arguments: str) -> str:
    with pytest.raises(UserError) as raised:
        run_main(eagle3, recipe_path, *arguments)
    return "\n".join(raised.value.problems)


def test_a_store_for_something_else_is_refused_with_both_sides(recipe_path: Path, store: Path, tmp_path: Path) -> None:
    from_store = f"data.states={store}"
    said = refusals(recipe_path, from_store, "data.capture.dtype=int8", "drafter.capture_layers=[1, 2, 3]")
    assert "dtype: the store has 'float32', asked for is 'int8'" in said
    assert "capture_layers: the store has [2, 3, 4], asked for is [1, 2, 3]" in said

    other = tmp_path / "other"
    make_target(num_layers=8, final_logit_softcapping=1.0).save_pretrained(other)
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{# other #}" + str(tokenizer.chat_template)
    tokenizer.save_pretrained(other)
    lines = (recipe_path.parent / "run/conversations.jsonl").read_text().splitlines()
    words = [json.loads(line) for line in lines]
    words[4]["turns"][0]["output_token_ids"][0] ^= 1
    output = to_train(tmp_path / "run", CONVERSATIONS)
    (output / "conversations.jsonl").write_text("\n".join(map(json.dumps, words)) + "\n")
    said = refusals(recipe_path, from_store, f"target.model={other}", f"output_dir={output}")
    assert "target.num_layers: the store has 7, asked for is 8" in said
    assert "target.final_logit_softcapping: the store has None, asked for is 1.0" in said
    assert "target.tokenizer_fingerprint: the store has '" in said and "a fingerprint covers" in said
    assert "rows: the store has '40 rows, sha256 " not in said and "rows: the store has 40 rows, sha256 " in said
    assert "asked for are 40 rows, sha256 " in said and "1 of these are not in it, the first is 'c4'" in said

    with pytest.raises(UserError) as raised:
        capture(recipe_path, from_store, "data.capture.dtype=fp8", f"output_dir={output}")
    assert "dtype: the store has 'float32', asked for is 'fp8'" in str(raised.value)
    assert "rows: the store has '40 rows, sha256 " in str(raised.value)


def test_another_target_of_the_same_shape_is_not_mixed_in(recipe_path: Path, copy: Path, tmp_path: Path) -> None:
    shutil.copytree(recipe_path.parent / "target", tmp_path / "target")
    make_target(seed=1).save_pretrained(tmp_path / "target")
    (copy / "shard-00002.safetensors").unlink()
    with pytest.raises(UserError, match=r"states of another target \(target\.embedding_digest: the store has '"):
        capture(recipe_path, f"data.states={copy}", f"target.model={tmp_path / 'target'}")


def test_fewer_rows_than_are_stored_can_be_trained_on(recipe_path: Path, store: Path, tmp_path: Path) -> None:
    output = to_train(tmp_path / "run", CONVERSATIONS)
    lines = (output / "conversations.jsonl").read_text().splitlines()
    (output / "conversations.jsonl").write_text("\n".join(lines[:30]) + "\n")
    run_main(eagle3, recipe_path, f"data.states={store}", f"output_dir={output}")
    assert len(metrics(output)) == 6


def test_the_plan_of_training_counts_no_target(
    recipe_path: Path, store: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    run_main(
        eagle3, recipe_path, f"data.states={store}", f"output_dir={to_train(tmp_path / 'run', CONVERSATIONS)}", "--plan"
    )
    printed = capsys.readouterr().out
    assert f"states [2, 3, 4] in float32 are read from {store}: " in printed and "the target does not run" in printed
    assert "the target's weights  [its head and embeddings, exact]" in printed and "the target's pass" not in printed


def test_no_store_or_an_unfinished_one_is_told(recipe_path: Path, copy: Path, tmp_path: Path) -> None:
    nothing = refusals(recipe_path, f"data.states={tmp_path / 'nothing'}")
    assert "no hidden states in" in nothing and "data_gen/capture.py writes them" in nothing
    manifest = Manifest.read(copy)
    assert manifest is not None
    del manifest.shards[1]
    manifest.write(copy)
    assert f"has {SHARDS - 1} of {SHARDS} shards" in refusals(recipe_path, f"data.states={copy}")


# Damage.


def flip_a_state(path: Path) -> None:
    _flip(path, "captured")


def flip_a_key(path: Path) -> None:
    _flip(path, "key")


def _flip(path: Path, tensor: str) -> None:
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    words = json.loads(content[8 : 8 + length])
    content[8 + length + words.get(tensor, words.get("head"))["data_offsets"][0] + 5] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    "name, harm, problem",
    [
        ("shard-00003.safetensors", cut, "bytes instead of"),
        ("shard-00003.safetensors", Path.unlink, "no such file"),
        ("shard-00003.safetensors", flip_a_state, "its sha256 differs"),
        ("shard-00003.safetensors", flip_a_key, "its rows are not those that were written"),
        ("target/head.safetensors", cut, "bytes instead of"),
        ("target/head.safetensors", flip_a_key, "its sha256 differs"),
        ("target/tokenizer.json", Path.unlink, "no such file"),
    ],
)
def test_damaged_files_are_named_and_written_anew(
    recipe_path: Path, store: Path, copy: Path, tmp_path: Path, name: str, harm: Callable[[Path], None], problem: str
) -> None:
    output = to_train(tmp_path / "run", CONVERSATIONS)
    harm(copy / name)
    said = refusals(recipe_path, f"data.states={copy}", f"output_dir={output}", "train.max_steps=20")
    assert f"{copy / name}: " in said and problem in said and "data_gen/capture.py --verify" in said
    capture(recipe_path, f"data.states={copy}", "--verify")
    assert files_of(copy) == files_of(store)


@pytest.mark.parametrize(
    "change, problem",
    {
        "{": "malformed JSON",
        "[" * 100_000: "nested too deeply",
        "[]": "not a manifest of hidden states",
        '{"kind": "labelled_trees"}': "not a manifest of hidden states",
        '{"kind": "hidden_states", "of_shards": 3}': "damaged: 'shards' is missing",
        "shard": "damaged: '../x' is no file of it",
        "bytes": "bytes: -1 must be a whole number",
        "made_of": "damaged: made_of is",
        "of_shards": "damaged: manifest: of_shards: 'x' must be a whole number",
        "capture_layers": "damaged: capture_layers are 3, not a list",
    }.items(),
)
def test_a_damaged_manifest_is_told(copy: Path, change: str, problem: str) -> None:
    path = copy / "manifest.json"
    words = json.loads(path.read_text())
    if change == "shard":
        words["shards"][2]["file"] = "../x"
        problem = "damaged"
    elif change == "bytes":
        words["shards"][2]["bytes"] = -1
    elif change == "made_of":
        words["made_of"] = {}
    elif change == "of_shards":
        words |= {"of_shards": "x", "shards": []}
    elif change == "capture_layers":
        words["made_of"]["capture_layers"] = 3
    is_edited = change in words or change in ("shard", "bytes", "capture_layers")
    path.write_text(json.dumps(words) if is_edited else change)
    with pytest.raises(UserError, match=r"manifest\.json: ") as raised:
        Store(copy)
    assert problem in str(raised.value)


# Disk.


@pytest.mark.parametrize(
    "kind, dtype", [("eagle3", "bfloat16"), ("eagle3", "int8"), ("eagle", "float32"), ("poss", "fp8")]
)
def test_the_plan_says_within_two_percent_what_is_written(
    recipe_path: Path, tmp_path: Path, kind: str, dtype: str, capsys: pytest.CaptureFixture
) -> None:
    overrides = [*KINDS[kind], f"data.states={tmp_path / 'states'}", f"data.capture.dtype={dtype}"]
    recipe = load_recipe(recipe_path, overrides)
    job = Job.of(recipe, rows_of(recipe), tokenizer_fingerprint(load_tokenizer(recipe.target)))
    capture(recipe_path, *overrides, "--plan")
    assert not (tmp_path / "states").exists() and "bytes of states" in capsys.readouterr().out
    capture(recipe_path, *overrides)
    written = sum(len(content) for content in files_of(tmp_path / "states").values())
    assert estimated_bytes(job) == pytest.approx(written, rel=0.02)
    manifest = Manifest.read(tmp_path / "states")
    assert manifest is not None and manifest.complete


def test_a_disk_that_is_too_small_is_told_before_anything_is_written(
    recipe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=100_000)
    monkeypatch.setattr(capturing.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(UserError, match=r"MB are still to be written to .* and 0\.1 MB are free there: make room"):
        capture(recipe_path, f"data.states={tmp_path / 'states'}")
    assert not (tmp_path / "states").exists()


# Several processes.


def test_processes_share_the_shards_and_write_what_one_writes(
    recipe_path: Path, store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    """Rank 0 waits in its first shard until rank 1 has written two; threads stand for the processes."""
    words, one_at_a_time = HashStore(), threading.Lock()
    teams = [Team(rank, 2, rank, words) for rank in range(2)]
    written = {0: 0, 1: 0}
    by_thread: dict[int, Team] = {}

    def load(*arguments: Any) -> Any:
        with one_at_a_time:
            return load_causal_lm(*arguments)

    def fill(*arguments: Any) -> None:
        team = by_thread[threading.get_ident()]
        if team.leads:
            team.wait(lambda: written[1] >= 2)
        really_fill(*arguments)

    def write(shard: ShardBuffer, directory: Path, number: int) -> dict[str, Any]:
        written[by_thread[threading.get_ident()].rank] += 1
        return really_write(shard, directory, number)

    def process(team: Team) -> None:
        by_thread[threading.get_ident()] = team
        capturing.capture_with(team, script.read_command)

    really_fill, really_write = capturing.fill, ShardBuffer.write
    monkeypatch.setattr(progress, "SHOWN_AFTER_SECONDS", 0)
    monkeypatch.setattr(capturing, "load_causal_lm", load)
    monkeypatch.setattr(capturing, "fill", fill)
    monkeypatch.setattr(ShardBuffer, "write", write)
    monkeypatch.setattr(sys, "argv", ["capture.py", str(recipe_path), f"data.states={tmp_path / 'states'}"])
    with ThreadPoolExecutor(2) as pool:
        for each in [pool.submit(process, team) for team in reversed(teams)]:
            each.result(timeout=300)
    assert sum(written.values()) == SHARDS and min(written.values()) >= 1 and written[1] >= 2
    assert files_of(tmp_path / "states") == files_of(store)
    printed = capsys.readouterr()
    assert printed.out.count("writes  ") == printed.out.count(f"{SHARDS} of {SHARDS} shards") == 1
    tokens = Store(store).manifest.total("tokens")
    assert f"capture: {tokens / 1000:.2f}k tokens in" in printed.err  # the bar counts what both have read


def test_a_process_begins_when_rank_0_has_found_everything_in_order(
    recipe_path: Path, store: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(capturing, "load_causal_lm", lambda *_: pytest.fail("the target was loaded"))
    monkeypatch.setattr(sys, "argv", ["capture.py", str(recipe_path), f"data.states={store}"])
    words = HashStore()
    capturing.capture_with(Team(0, 2, 0, words), script.read_command)
    capturing.capture_with(Team(1, 2, 1, words), script.read_command)  # nothing is missing
    monkeypatch.setattr(sys, "argv", [*sys.argv, "data.capture.dtype=int8"])
    words = HashStore()
    with pytest.raises(SystemExit) as ended:
        capturing.capture_with(Team(0, 2, 0, words), script.read_command)
    assert ended.value.code == 2 and "captured otherwise" in capsys.readouterr().err
    words.delete_key("missing")
    with pytest.raises(SystemExit) as ended:  # silent: rank 0 has said why
        capturing.capture_with(Team(1, 2, 1, words), script.read_command)
    assert ended.value.code == 2 and not capsys.readouterr().err
    words = HashStore()
    with pytest.raises(SystemExit) as ended:
        monkeypatch.setattr(sys, "argv", ["capture.py", "--help"])
        capturing.capture_with(Team(0, 2, 0, words), script.read_command)
    assert ended.value.code == 0
    capturing.capture_with(Team(1, 2, 1, words), script.read_command)


def test_processes_that_capture_something_else_than_rank_0_say_so(recipe_path: Path, tmp_path: Path) -> None:
    recipe = load_recipe(recipe_path, [f"data.states={tmp_path}"])
    job = Job.of(recipe, rows_of(recipe)[1:], "another tokenizer")
    words = HashStore()
    Team(0, 2, 0, words).tell("made_of", Job.of(recipe, rows_of(recipe), "this tokenizer").made_of)
    with pytest.raises(UserError) as raised:
        capturing.check_same(Team(1, 2, 1, words), job.made_of)
    said = str(raised.value)
    assert "rows: rank 0 has '40 rows, sha256 " in said and "rank 1 has '39 rows, sha256 " in said
    assert "target.tokenizer_fingerprint: rank 0 has 'this tokenizer', rank 1 has 'another tokenizer'" in said


def test_of_several_that_fail_one_speaks(capsys: pytest.CaptureFixture) -> None:
    words = HashStore()
    for rank in (1, 0):
        with pytest.raises(SystemExit) as ended, Team(rank, 3, rank, words).speaking_once():
            raise UserError(f"the disk of rank {rank} is full")
        assert ended.value.code == 2
    with pytest.raises(SystemExit) as ended:
        Team(2, 3, 2, words).wait(lambda: False)
    assert ended.value.code == 2
    assert capsys.readouterr().err == "error: the disk of rank 1 is full\n"
    words = HashStore()
    with pytest.raises(ZeroDivisionError), Team(1, 2, 1, words).speaking_once():
        print(1 / 0)
    with pytest.raises(SystemExit):
        Team(0, 2, 0, words).wait(lambda: False)


def test_each_process_takes_a_device_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Cuda:
        taken: ClassVar[list[int]] = []
        device_count = staticmethod(lambda: 2)
        set_device = staticmethod(taken.append)

    words = HashStore()
    teams = [Team(rank, 6, rank % 3, words) for rank in range(6)]  # on two machines
    assert [team.take_device("cpu") for team in teams] == [None] * 6
    monkeypatch.setattr(torch, "get_device_module", lambda device: Cuda)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    assert [team.take_device("auto") for team in teams[:2]] == ["cuda:0", "cuda:1"] and Cuda.taken == [0, 1]
    assert teams[4].take_device("cuda") == "cuda:1" and teams[2].take_device("cuda:1") is None
    with pytest.raises(UserError, match=r"the machine of rank 5 has 2 of kind cuda for 3 processes or more; start 2"):
        teams[5].take_device("auto")
    assert Team().take_device("auto") is None  # load_causal_lm decides


def test_processes_without_a_place_to_meet_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(UserError, match=r"rank 1 of 2 does not find the others .* MASTER_ADDR .* start them with torc"):
        Team.of_environment()


def test_two_captures_do_not_write_into_one_folder(recipe_path: Path, copy: Path) -> None:
    (copy / "shard-00002.safetensors").unlink()
    left = files_of(copy)
    with alone_in(copy), pytest.raises(UserError, match="another run is writing there"):
        capture(recipe_path, f"data.states={copy}")
    assert files_of(copy) == left
    capture(recipe_path, f"data.states={copy}")
    assert len(files_of(copy)) == len(left) + 1


def started(ranks: int, *arguments: str) -> subprocess.Popen:
    """The launcher of so many processes of capture.py."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    return subprocess.Popen(
        [sys.executable, *launch, str(ROOT / "data_gen/capture.py"), *arguments],
        cwd=ROOT,
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )


@pytest.mark.slow
def test_two_processes_capture_what_one_does(recipe_path: Path, store: Path, tmp_path: Path) -> None:
    said = run_ranks(2, str(ROOT / "data_gen/capture.py"), [str(recipe_path), f"data.states={tmp_path / 'states'}"])
    assert files_of(tmp_path / "states") == files_of(store)
    assert said.count(f"{SHARDS} of {SHARDS} shards") == 1 and said.count("writes  ") == 1


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_one_of_two_processes_is_killed_and_three_go_on(recipe_path: Path, tmp_path: Path, killed: int) -> None:
    """By a launcher that ends the other one, too."""
    small = [str(recipe_path), "data.capture.shard_megabytes=0.02"]  # a row or two each
    directory, whole = tmp_path / "states", tmp_path / "whole"
    capture(recipe_path, *small[1:], f"data.states={whole}")
    launcher = started(2, *small, f"data.states={directory}")
    try:
        deadline = time.monotonic() + 300
        while (manifest := Manifest.read(directory)) is None or len(manifest.shards) < 3:
            assert launcher.poll() is None and time.monotonic() < deadline
            time.sleep(0.001)
        ranks = {each.environ()["RANK"]: each for each in psutil.Process(launcher.pid).children()}
        ranks[str(killed)].kill()
        assert launcher.wait(120) != 0
    finally:
        with contextlib.suppress(psutil.NoSuchProcess):
            for each in [*psutil.Process(launcher.pid).children(), launcher]:
                each.kill()
        launcher.wait()
    check_what_a_kill_left(directory)
    manifest = Manifest.read(directory)
    assert manifest is not None and 3 <= len(manifest.shards) < manifest.of_shards
    before = {said["file"]: (directory / said["file"]).stat().st_mtime_ns for said in manifest.shards.values()}
    run_ranks(3, str(ROOT / "data_gen/capture.py"), [*small, f"data.states={directory}"])
    assert all((directory / name).stat().st_mtime_ns == written for name, written in before.items())
    assert files_of(directory) == files_of(whole)


# Kills.


needs_fork = pytest.mark.skipif(not CAN_FORK, reason="kills forked processes")


@pytest.fixture(scope="module")
def lab() -> Iterator[CrashLab]:
    with CrashLab(["draftsmith.data_gen.states.capturing", "transformers.models.llama.modeling_llama"]) as lab:
        yield lab


@pytest.fixture(scope="module")
def whole(lab: CrashLab, recipe_path: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ending]:
    """(store, how it ended) of a capture that nothing interrupts."""
    directory = tmp_path_factory.mktemp("whole") / "states"
    ending = lab.run(CAPTURE, [str(recipe_path), f"data.states={directory}"], count_events=True)
    assert ending.status == 0, ending.output
    assert Store(directory).manifest.of_shards == SHARDS
    return directory, ending


def check_what_a_kill_left(directory: Path) -> None:
    """Whatever the manifest names is whole."""
    manifest = Manifest.read(directory)
    if manifest is not None:
        for said in manifest.shards.values():
            path = directory / said["file"]
            assert capturing.file_problem(path, said) is None and capturing.file_digest(path) == said["sha256"]


@needs_fork
def test_a_capture_that_was_killed_goes_on(
    lab: CrashLab, recipe_path: Path, whole: tuple[Path, Ending], tmp_path: Path
) -> None:
    """In the middle of renames and syncs of the target, of shards and of the manifest."""
    directory = tmp_path / "states"
    run = [str(recipe_path), f"data.states={directory}"]
    for fault in (Fault("mkdir", 2), Fault("rename", 1), Fault("fsync", 12), Fault("rename", 3), Fault("write", 9)):
        ending = lab.run(CAPTURE, run, fault=fault)
        assert ending.status == -signal.SIGKILL, ending.output
        check_what_a_kill_left(directory)
    # The target's folder is written anew, and another kill comes while it is replaced, and while what it replaced goes.
    for fault in (Fault("rename", 1), Fault("rename", 2), Fault("rename", 3), Fault("remove", 2)):
        (directory / "target/head.safetensors").unlink(missing_ok=True)
        ending = lab.run(CAPTURE, run, fault=fault)
        assert ending.status == -signal.SIGKILL, ending.output
    (directory / ".tmpA1b2C3").touch()  # as safetensors leaves it
    before = {path.name: path.stat().st_mtime_ns for path in directory.glob("shard-*.safetensors")}
    manifest = Manifest.read(directory)
    assert manifest is not None and 0 < len(manifest.shards) < SHARDS
    assert lab.run(CAPTURE, run).status == 0
    for said in manifest.shards.values():  # what was whole was not made again
        assert (directory / said["file"]).stat().st_mtime_ns == before[said["file"]]
    assert files_of(directory) == files_of(whole[0])
    ending = lab.run(CAPTURE, run)
    assert ending.status == 0 and "all is captured" in ending.output


@needs_fork
def test_a_disk_that_fills_up_is_one_message_and_what_was_written_is_whole(
    lab: CrashLab, recipe_path: Path, whole: tuple[Path, Ending], tmp_path: Path
) -> None:
    directory = tmp_path / "states"
    run = [str(recipe_path), f"data.states={directory}"]
    assert lab.run(CAPTURE, run, fault=Fault("rename", 4)).status == -signal.SIGKILL
    ending = lab.run(CAPTURE, run, file_limit=90_000)
    assert ending.status == 2 and "Traceback" not in ending.output
    assert f"error: {directory}: cannot be written (" in ending.output and "shards are whole" in ending.output
    check_what_a_kill_left(directory)
    assert not list(directory.glob("*.tmp"))
    assert lab.run(CAPTURE, run).status == 0
    assert files_of(directory) == files_of(whole[0])


@needs_fork
@pytest.mark.slow
def test_200_kills_of_capture_give_the_same_store(
    lab: CrashLab, recipe_path: Path, whole: tuple[Path, Ending], tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    expected, ending = whole
    chance, kills, runs, started = random.Random(0), Counter[str](), 0, time.monotonic()
    wanted = files_of(expected)
    while kills.total() < KILLS:
        directory = tmp_path / f"run{runs}"

        def run(directory: Path = directory, **how: Any) -> Ending:
            return lab.run(CAPTURE, [str(recipe_path), f"data.states={directory}"], **how)

        kills += kill_until_it_ends(run, chance, ending, 20, lambda d=directory: check_what_a_kill_left(d))
        runs += 1
        assert files_of(directory) == wanted
        shutil.rmtree(directory)
    told(capsys, "capture", runs, kills, started)


def test_the_words_of_a_config_are_the_target_s(recipe_path: Path, store: Path) -> None:
    recipe = load_recipe(recipe_path)
    made_of = Store(store).manifest.made_of
    assert made_of["target"]["model_type"] == load_config(recipe.target).model_type == "llama"
    assert made_of["target"]["tokenizer_fingerprint"] == tokenizer_fingerprint(load_tokenizer(recipe.target))
