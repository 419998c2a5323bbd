"""Training scripts as users run them, on the tiny target, in seconds: what a run writes, resumes, keeps and refuses;
replay at checkpoints, trackers, a profile, LoRA."""

import gzip
import json
import re
import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from draftsmith.data_gen import conversations, rank_vocab
from draftsmith.data_gen.states.store import taught_tokens
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.replay.recorded_answers import RecordedAnswer
from draftsmith.eval.replay.replay import replay
from draftsmith.models.checkpoint import load_drafter, read_drafter
from draftsmith.models.drafters import drafting_of
from draftsmith.models.target import Target, default_capture_layers
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.files.reading import file_digest
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.sections.drafter import LoraSection
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.recipes.sections.train import TrainSection
from draftsmith.train import eagle3
from draftsmith.train.measure.metrics_line import THROUGHPUT_KEYS, Tally, ThroughputMeter
from draftsmith.train.run import training_inputs
from draftsmith.train.run.checkpoints import list_checkpoints, run_identity, step_of
from draftsmith.train.run.engine import Engine
from draftsmith.train.run.initial_drafter import add_lora, merge_lora
from draftsmith.train.run.likeliest_tokens import LikeliestTokens
from draftsmith.train.run.loop import Loop
from draftsmith.train.run.schedule import Schedule
from draftsmith.train.run.validation_replay import answers_of
from tests.conftest import files_of, make_target, make_tokenizer
from tests.crash_states import flip
from tests.export_cases import distributions, drafter_named, target_of
from tests.store_cases import capture, rows_of
from tests.training_runs import done_path as done_path
from tests.training_runs import fresh_accelerator, metrics, run_main, to_train, train, write_conversations
from tests.training_runs import recipe_path as recipe_path


def weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / "model.safetensors")


def test_a_run_writes_what_it_promises(six_steps: Path) -> None:
    output = six_steps / "run"
    lines = metrics(output)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6] and len(lines[0]["accuracy"]) == 3
    assert {"validation_loss", "validation_accuracy", "validation_simulated_tau"} <= lines[2].keys()
    whole = json.loads((output / "metrics.jsonl").read_text().splitlines()[0])
    assert {*THROUGHPUT_KEYS, "loss", "grad_norm", "lr", "simulated_tau"} - {"mfu"} <= whole.keys()
    files = {"config.json", "model.safetensors", "recipe.yaml", "provenance.json"}
    assert {path.name for path in (output / "drafter").iterdir()} == files
    layout = json.loads((output / "drafter/config.json").read_text())["target"]["layout"]
    assert (layout["model_type"], layout["embeddings"], layout["tied"]) == ("llama", "model.embed_tokens.weight", False)
    provenance = json.loads((output / "drafter/provenance.json").read_text())
    assert provenance["versions"]["torch"] and provenance["data"]["conversations"]["sha256"]
    tensors = weights(output / "drafter")
    assert torch.equal(DraftVocab.from_d2t(tensors["d2t"], tensors["t2d"]).target_ids, torch.arange(0, 320, 2))
    assert "embed_tokens" not in tensors


def test_a_run_killed_before_its_last_checkpoint_goes_on_over_damaged_metrics_and_stray_files(
    done_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """TensorBoard shows every step once."""
    output = done_path.parent / "run"
    shutil.rmtree(output / "checkpoints/step-00000006")
    path = output / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines()[:3]
    broken = [b'{"step": \xff}', b'{"step": 1}}', b"[1]", b'{"loss": 1}', b'{"a": ' * 100_000]
    path.write_bytes(b"\n".join([first, *broken, *others, b'{"step": 4, "lo']))
    for suffix in ("partial", "old", "damaged"):
        (output / f"checkpoints/step-00000002.{suffix}").mkdir()
    train(done_path)
    assert [line["step"] for line in metrics(output)] == [1, 2, 3, 4, 5, 6]
    assert f"{path}: damaged lines dropped: 6, the first is line 2" in capsys.readouterr().out
    names = sorted(file.name for file in (output / "checkpoints").glob("step-*.*"))
    assert names == ["step-00000002.damaged"]  # leftovers go, what was set aside stays

    assert len(list((output / "tensorboard").iterdir())) == 2
    events = EventAccumulator(str(output / "tensorboard"), size_guidance={"scalars": 0})
    events.Reload()
    shown = {tag: {e.step: e.value for e in events.Scalars(tag)} for tag in events.Tags()["scalars"]}
    assert [len(events.Scalars(tag)) for tag in ("loss", "validation_loss", "tokens_per_second")] == [6, 2, 6]
    for line in metrics(output):
        for key in ("loss", "grad_norm", "lr", "simulated_tau", "skipped_steps"):
            assert shown[key][line["step"]] == pytest.approx(line[key]), key
        assert shown["accuracy/2"][line["step"]] == pytest.approx(line["accuracy"][2])


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [("linear", [0.5, 1, 1, 0.75, 0.5, 0.25, 0]), ("cosine", [0.5, 1, 1, 0.853553, 0.5, 0.146447, 0])],
)
def test_the_learning_rate_warms_up_from_its_first_step_and_decays_to_zero(
    schedule: Literal["linear", "cosine"], expected: list[float]
) -> None:
    section = TrainSection(learning_rate=1.0, warmup_steps=2, max_steps=6, schedule=schedule)
    rates = [Schedule(section, rows=99, ranks=1).learning_rate(step) for step in range(7)]
    assert rates == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(("clip", "expected"), [("norm", [0.3, 0.4]), ("value", [0.5, 0.5])])
def test_gradients_are_clipped(clip: Literal["norm", "value"], expected: list[float]) -> None:
    fresh_accelerator()
    model: Any = torch.nn.Linear(2, 1, bias=False)
    engine, taken = Engine(Accelerator(cpu=True), model, TrainSection(clip=clip, max_grad_norm=0.5)), []
    model.weight.grad = torch.tensor([[3.0, 4.0]])
    engine.optimizer = SimpleNamespace(
        param_groups=[{}], step=lambda: taken.extend(model.weight.grad[0].tolist()), zero_grad=model.zero_grad
    )
    assert engine.step(0.1).grad_norm == 5 and taken == pytest.approx(expected)


def test_a_share_of_the_conversations_is_kept_out_for_validation_with_all_their_rows(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [TrainingRow(f"c{i // 2}", [5, 6, 7], [(1, 3)]) for i in range(20)]
    monkeypatch.setattr(training_inputs, "usable_rows", lambda *_: rows)
    recipe = load_recipe(recipe_path)
    training, validation = training_inputs.read_rows(recipe, TargetFiles(recipe.target), Rejects())
    assert len({row.id for row in validation}) == 2 and len(validation) == 4 and len(training) == 16


def test_gradients_are_divided_by_the_columns_of_all_ranks(
    recipe_path: Path, six_steps: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As if another rank had as many columns, and no gradient."""
    monkeypatch.setattr(Accelerator, "reduce", lambda _, tensor, how: tensor * (2 if how == "sum" else 1))
    [line] = metrics(train(recipe_path, "train.max_steps=1"))
    alone = metrics(six_steps / "run")[0]
    assert line["grad_norm"] == pytest.approx(alone["grad_norm"] / 2, rel=1e-4)


@pytest.mark.parametrize("packing", ["false", "true"])
def test_the_target_s_whole_head_is_multiplied_once_a_row(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch, packing: str
) -> None:
    """Two epochs and four validations give the same numbers as if it always were."""
    states, logits, multiplied = f"data.states={recipe_path.parent / 'states'}", Target.logits, list[int]()
    capture(recipe_path, states)
    own = ["train.max_steps=10", f"train.packing={packing}", states]

    def counted(self: Target, last: torch.Tensor) -> torch.Tensor:
        multiplied.append(len(last) if len(last) > 1 else 0)  # single rows are trials of the target
        return logits(self, last)

    with monkeypatch.context() as patch:
        patch.setattr(LikeliestTokens, "of", lambda *_: None)
        expected = metrics(train(recipe_path, *own))
    shutil.rmtree(recipe_path.parent / "run")
    to_train(recipe_path.parent / "run")
    monkeypatch.setattr(Target, "logits", counted)
    for line, always in zip(metrics(train(recipe_path, *own)), expected, strict=True):
        assert {key: pytest.approx(value, rel=1e-5) for key, value in line.items()} == always
    assert sum(multiplied) == sum(taught_tokens(row.spans) for row in rows_of(load_recipe(recipe_path)))


def test_the_logged_loss_is_that_of_a_column() -> None:
    tally, alone = Tally.empty(2, torch.device("cpu")), SimpleNamespace(reduce=lambda tensor, how: tensor)
    for sums, values in ((tally.loss, 6), (tally.columns, 3), (tally.reached, [4, 2]), (tally.correct, [2, 1])):
        sums += torch.tensor(values)
    line = tally.over_ranks(alone)  # type: ignore[arg-type]
    assert (line["loss"], line["accuracy"], line["simulated_tau"]) == (2, [0.5, 0.5], 1 + 0.5 + 0.25)


def test_micro_batches_of_all_processes_make_a_step(recipe_path: Path) -> None:
    recipe, shape = load_recipe(recipe_path, ["train.gradient_accumulation_steps=3"]), SimpleNamespace(to_dict=dict)
    identity = run_identity(recipe, TargetFiles(recipe.target), shape, {}, 2, {}, None)  # type: ignore[arg-type]
    assert identity["micro-batches a step"] == 6


def test_changed_vocabulary_or_data_under_a_checkpoint_is_refused(done_path: Path) -> None:
    output = done_path.parent / "run"
    DraftVocab(torch.arange(1, 320, 2), 320).save(output / "draft_vocab.safetensors")
    write_conversations(output / "conversations.jsonl", 24, seed=9)
    with pytest.raises(UserError, match=r"draft_vocab_sha256: .* conversations_sha256: "):
        train(done_path)


def test_a_longer_run_goes_on_with_the_learning_rate_of_its_own_length(done_path: Path) -> None:
    lines = metrics(train(done_path, "train.max_steps=8"))
    assert [f"{line['lr']:.2g}" for line in lines[5:7]] == ["0.0002", "0.00044"] and len(lines) == 8


def test_weights_that_are_lost_are_never_saved(recipe_path: Path) -> None:
    """The learning rate destroys the weights between two logged steps; what was saved stays finite."""
    with pytest.raises(UserError, match="is NaN or inf, training has diverged"):
        train(recipe_path, "train.learning_rate=1e30", "train.save_every_steps=2", "train.log_every_steps=5")
    for saved in (recipe_path.parent / "run/checkpoints").glob("step-*/*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(saved).values())


def test_two_runs_never_write_into_one_folder(recipe_path: Path) -> None:
    output = recipe_path.parent / "run"
    with alone_in(output), pytest.raises(UserError, match="another run is writing there"):
        train(recipe_path)
    assert not (output / "checkpoints").exists() and not (output / "metrics.jsonl").exists()


def test_a_drafter_for_another_target_is_refused(done_path: Path, target_dir: Path) -> None:
    drafter, files = done_path.parent / "run/drafter", TargetFiles(TargetSection(model=str(target_dir)))
    target = files.load()
    identity = files.identity_of(target)
    assert load_drafter(drafter, target, identity).vocab.size == 160
    other, wide = Target(make_target(seed=1)), Target(make_target(vocab_size=352))
    for given, its, named in (
        (other, files_of(other).identity_of(other), "embedding_digest"),
        (wide, files_of(wide).identity_of(wide), "vocab_size: .* 320, .* has 352"),
        (target, identity | {"tokenizer_fingerprint": "x"}, "tokenizer_fingerprint"),
        (Target(target.model, [1, 3, 5]), identity, r"reads target states \[2, 3, 4\], this run captures \[1, 3, 5\]"),
    ):
        with pytest.raises(UserError, match=named):
            load_drafter(drafter, given, its)


def test_capture_layers() -> None:
    """L=32 -> 2, 16, 29; 28 -> 2, 14, 25; below 7 layers they would collide."""
    assert [default_capture_layers(n) for n in (32, 28, 7)] == [(2, 16, 29), (2, 14, 25), (2, 3, 4)]


def test_an_epoch_ends_where_its_rows_end(recipe_path: Path, tmp_path: Path) -> None:
    """21 rows: six micro-batches of four, the last of one row. Whatever a step has room for, nothing is read twice."""
    own, lines = ["train.max_steps=null", "train.epochs=1", "train.validation_conversations=3"], []
    for accumulated in (6, 16):  # one full step; one that is mostly empty
        output = shutil.copytree(tmp_path / "run", tmp_path / str(accumulated))
        own[3:] = [f"train.gradient_accumulation_steps={accumulated}", f"output_dir={output}"]
        lines += metrics(train(recipe_path, *own))
    full, roomy = lines
    assert roomy["loss"] == pytest.approx(full["loss"], rel=1e-6) and roomy["accuracy"] == full["accuracy"]
    assert roomy["grad_norm"] == pytest.approx(full["grad_norm"], rel=1e-5)


def test_a_run_by_epochs_that_is_made_longer_reads_on_where_it_ended(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Six micro-batches an epoch, four a step: the second step had room for two more than there were."""
    own = ["train.max_steps=null", "train.validation_conversations=3", "train.gradient_accumulation_steps=4"]
    read: list[int] = []
    draws = Loop._draws
    monkeypatch.setattr(Loop, "_draws", lambda self, number, rows: (read.append(number), draws(self, number, rows))[1])
    output = train(recipe_path, *own, "train.epochs=1")
    assert read == [0, 1, 2, 3, 4, 5, 5, 5]  # the last two count nothing
    for more in ([6, 7, 8, 9, 10, 11, 11, 11], []):
        read.clear()
        train(recipe_path, *own, "train.epochs=2")
        assert read == more
    assert [line["step"] for line in metrics(output)] == [1, 2, 3, 4]


def test_validation_rows_that_are_not_finite_are_named_and_left_out(
    recipe_path: Path, six_steps: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    forward, alone = Loop._forward, []

    def poisoned(self: Loop, trainee: Any, batch: Any, columns: Any, draws: Any = None) -> Any:
        sums, rows = forward(self, trainee, batch, columns, draws), [row - len(self.rows) for row in batch.rows]
        if draws is None and len(rows) == 1:
            alone.append(rows[0])
        return sums._replace(loss=sums.loss * float("nan")) if draws is None and 2 in rows else sums

    monkeypatch.setattr(Loop, "_forward", poisoned)
    line, clean = metrics(train(recipe_path, "train.max_steps=3"))[2], metrics(six_steps / "run")[2]
    assert "its loss is not finite" in capsys.readouterr().out and line["validation_left_out"] == 1
    assert alone == list(range(len(alone))) and len(alone) > 2
    assert 0 < line["validation_loss"] != clean["validation_loss"] and "validation_left_out" not in clean


LONGROPE = {"rope_type": "longrope", "original_max_position_embeddings": 24}
LONGROPE |= {"short_factor": [1.0] * 4, "long_factor": [4.0] * 4}


@pytest.mark.parametrize("positions", [{"max_position_embeddings": 24}, {"rope_parameters": LONGROPE}])
def test_no_row_is_longer_than_the_targets_positions(
    recipe_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], positions: dict[str, Any]
) -> None:
    """Every command that reads rows leaves the longer ones out, and says so."""
    make_target(**positions).save_pretrained(tmp_path / "short")
    make_tokenizer().save_pretrained(tmp_path / "short")
    apart = [f"data.conversations={tmp_path / 'run/conversations.jsonl'}", f"output_dir={tmp_path / 'apart'}"]
    counted = []
    for script, words in (
        (eagle3, ["train.max_steps=1"]),
        (rank_vocab, [*apart, "drafter.vocab_size=40"]),
        (conversations, ["--show=0"]),
    ):
        run_main(script, recipe_path, f"target.model={tmp_path / 'short'}", *words)
        said = capsys.readouterr().out
        counted += re.findall(r"(\d+) longer than data\.max_length", said)
        assert script is not eagle3 or "the target has 24 positions" in said
    rejected = (tmp_path / "run/conversations.training_rejects.jsonl").read_text().splitlines()
    assert set(map(int, counted)) == {len(rejected)} and len(counted) >= 2


# Replay at checkpoints.

REPLAY = ("train.eval_replay=3", "eval.tree.nodes=10", "eval.tree.draft_calls=3", "eval.tree.top_k=4")


def test_replay_at_every_checkpoint_is_replay_of_what_is_saved(recipe_path: Path) -> None:
    """Along the turns of the first three validation conversations, in full."""
    output = train(recipe_path, *REPLAY, "train.log_every_steps=4", "train.learning_rate=0.02")
    lines = metrics(output)
    assert [line["step"] for line in lines if "replay_tau" in line] == [3, 6]  # step 3 is a checkpoint, not a log step
    assert [line["step"] for line in lines] == [3, 4, 6]

    recipe = load_recipe(recipe_path, REPLAY)
    files = TargetFiles(recipe.target)
    target = files.load()
    drafter = load_drafter(output / "drafter", target, files.identity_of(target))
    _, validation = training_inputs.read_rows(recipe, files, Rejects())
    ids = list(dict.fromkeys(row.id for row in validation))[:3]
    answers = [
        RecordedAnswer(turn["prompt_token_ids"], turn["output_token_ids"])
        for record in map(json.loads, (output / "conversations.jsonl").read_text().splitlines())
        if record["id"] in ids
        for turn in record["turns"]
    ]
    proposer = PolicyProposer(drafting_of(drafter), policy_of(recipe.eval.tree))
    rounds = [replay(target, proposer, [answer], 1)[0] for answer in answers]
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    assert lines[-1]["replay_tau"] == pytest.approx(tokens / sum(g.rounds for g in rounds), abs=1e-4)
    first = [g.accepted_per_round[i] > 0 for g in rounds for i in range(g.rounds)]
    assert not any(g.last_round_cut and g.accepted_per_round[-1] == 0 for g in rounds)
    [share, *_] = lines[-1]["replay_accepted_by_position"] or [0]
    assert share == pytest.approx(sum(first) / len(first), abs=1e-4)


def test_replay_takes_so_many_conversations_with_all_their_rows() -> None:
    rows = [TrainingRow(id_, [1, 2, 3, 4], [(2, 4)]) for id_ in ("a", "a", "b", "c")]
    assert [answer.conversation_id for answer, _ in answers_of(rows, 2)] == ["a", "a", "b"]


TAUS = {1: 1.2, 2: 1.9, 3: 1.9, 4: 1.5, 5: 1.1, 6: 1.7, 7: 1.6, 8: 2.0}  # of equals the later step counts


def drafter_is_of(output: Path, step: int) -> bool:
    drafter, saved = weights(output / "drafter"), weights(output / f"checkpoints/step-{step:08d}")
    return all(torch.equal(drafter[name.removeprefix("drafter.")], tensor) for name, tensor in saved.items())


def test_the_best_checkpoint_is_kept_and_its_drafter_saved(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def replayed(self: Loop) -> dict[str, Any]:
        return {"replay_tau": TAUS[max(self.metrics.values("lr"), default=0) + 1]}

    def kept_steps() -> list[int]:
        return [step_of(path) for path in list_checkpoints(output / "checkpoints")]

    monkeypatch.setattr(Loop, "replayed", replayed)
    own = ("train.keep_best=replay_tau", "train.eval_replay=2", "train.save_every_steps=1", "train.keep_checkpoints=1")
    output = train(recipe_path, *own)
    assert kept_steps() == [3, 6]
    assert drafter_is_of(output, 3) and not drafter_is_of(output, 6)
    assert "drafter, of step 3, which has the best replay_tau: 1.90" in capsys.readouterr().out
    made_by = json.loads((output / "drafter/provenance.json").read_text())
    assert made_by["checkpoint"] == {"step": 3, "replay_tau": 1.9}

    # A damaged one does not cost the best of the others.
    flip(output / "checkpoints/step-00000003/model.safetensors")
    train(recipe_path, *own, "train.max_steps=7")
    assert kept_steps() == [6, 7] and drafter_is_of(output, 6)
    # Longer, the last one is the best, and nothing else needs to stay.
    train(recipe_path, *own, "train.max_steps=8")
    assert kept_steps() == [8] and drafter_is_of(output, 8)


def test_training_does_not_notice_replay_and_a_run_that_ends_before_one_is_done_makes_up_for_it(
    recipe_path: Path, six_steps: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed in the replay of step 2; SIGTERM in steps 4 and 6, the last one. No step is done twice."""
    own = (*REPLAY, "train.keep_best=replay_tau", "train.save_every_steps=2", "train.keep_checkpoints=1")
    whole = train(recipe_path, *own, f"output_dir={shutil.copytree(tmp_path / 'run', tmp_path / 'whole')}")
    for line, without in zip(metrics(whole), metrics(six_steps / "run"), strict=True):
        assert (line["loss"], line["grad_norm"]) == (without["loss"], without["grad_norm"])
    replayed, step, output = Loop.replayed, Loop._step, tmp_path / "run"
    done, replays = list[int](), list[int]()

    def replayed_but_once(self: Loop) -> dict[str, Any]:
        replays.append(done[-1])
        if len(replays) == 1:
            raise SystemExit
        return replayed(self)

    def step_with_sigterm(self: Loop, number: int) -> tuple[float, float, bool]:
        done.append(number + 1)
        return *step(self, number)[:2], number + 1 in (4, 6)

    monkeypatch.setattr(Loop, "replayed", replayed_but_once)
    monkeypatch.setattr(Loop, "_step", step_with_sigterm)
    with pytest.raises(SystemExit):
        train(recipe_path, *own)
    for last in (2, 4, 6):
        assert step_of(list_checkpoints(output / "checkpoints")[-1]) == last
        assert last not in [line["step"] for line in metrics(output)] and not (output / "drafter").exists()
        train(recipe_path, *own)
    assert done == [1, 2, 3, 4, 5, 6] and replays == [2, 2, 4, 6]
    assert metrics(output) == metrics(whole) and "replay_tau" in metrics(output)[-1]
    kept, wanted = ({path.name for path in (run / "checkpoints").iterdir()} for run in (output, whole))
    assert kept == wanted
    assert file_digest(output / "drafter/model.safetensors") == file_digest(whole / "drafter/model.safetensors")


# A profile, and the meter of throughput.


@pytest.mark.slow
def test_a_profile_shows_the_parts_of_a_step_and_changes_nothing(
    recipe_path: Path, six_steps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = train(recipe_path, "--profile=2", "train.validate_every_steps=6")
    for mine, its in zip(metrics(output), metrics(six_steps / "run"), strict=True):
        assert (mine["loss"], mine["grad_norm"]) == (its["loss"], its["grad_norm"])
    trace = output / "profile/rank0.trace.json.gz"
    assert f"profile: {trace}, from step 3 on" in capsys.readouterr().out
    with gzip.open(trace) as file:
        names = Counter(event.get("name") for event in json.load(file)["traceEvents"] if event.get("ph") == "X")
    for part in ("rows", "target", "teacher", "unroll and loss", "backward", "optimizer"):
        assert names[part] == 2, part
    assert "aten::" in trace.with_name("rank0.txt").read_text()


def test_the_meter_measures_what_came_since_it_was_started(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0.0, 10.0, 12.0])
    monkeypatch.setattr("time.perf_counter", lambda: next(now))
    meter = ThroughputMeter(torch.device("cpu"), peak_tokens_per_second=200.0)
    meter.start({"tokens": 100.0, "columns": 50.0})
    meter.steps = 2
    told = meter.read({"tokens": 300.0, "columns": 60.0}, steps_left=10)
    assert (told["tokens_per_second"], told["columns_per_second"], told["mfu"]) == (100, 5, 0.5)
    assert told["eta_seconds"] == 10
    monkeypatch.undo()
    assert "mfu" not in ThroughputMeter(torch.device("cpu")).read({"tokens": 1.0, "columns": 1.0}, 1)


# LoRA of the drafter.


def test_only_the_low_rank_matrices_learn_and_the_run_resumes(recipe_path: Path, six_steps: Path) -> None:
    start = six_steps / "run/drafter"
    settings = (f"drafter.init_from={start}", "drafter.lora={r: 2, alpha: 4}", "train.learning_rate=0.05")
    run = train(recipe_path, *settings)
    before, after = weights(start), weights(run / "drafter")
    assert before.keys() == after.keys()
    for name, weight in before.items():
        change = after[name].double() - weight.double()
        assert bool(change.any()) == (weight.dim() == 2), name  # all matrices are linear layers
        if weight.dim() == 2:
            values = torch.linalg.svdvals(change)
            assert values[2] < 1e-4 * values[0], name  # of rank 2

    checkpoint = weights(run / "checkpoints/step-00000006")
    assert all(name.endswith((".a", ".b")) for name in checkpoint)
    read_drafter(run / "drafter")  # an ordinary one

    straight = metrics(run)
    shutil.rmtree(run / "drafter")
    shutil.rmtree(run / "checkpoints/step-00000006")
    train(recipe_path, *settings)
    again = weights(run / "drafter")
    assert all(torch.equal(again[name], tensor) for name, tensor in after.items()) and metrics(run) == straight


@pytest.mark.parametrize("kind", ["eagle3", "eagle", "poss"])
@torch.no_grad()
def test_merging_changes_no_logits(kind: str) -> None:
    drafter, target = drafter_named(kind), target_of()
    states = {name: tensor.clone() for name, tensor in drafter.state_dict().items()}
    said = distributions(drafter, target)
    add_lora(drafter, LoraSection(r=3, alpha=6.0, modules=None))
    low_rank = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    linear = [name for name, module in drafter.named_modules() if isinstance(module, torch.nn.Linear)]
    assert sorted(low_rank) == sorted(f"{name}.parametrizations.weight.0.{each}" for name in linear for each in "ab")
    assert torch.equal(distributions(drafter, target), said)
    for parameter in low_rank.values():
        parameter += 0.1 * torch.randn_like(parameter)
    unmerged = distributions(drafter, target)
    assert not torch.equal(unmerged, said)
    merge_lora(drafter)
    assert torch.equal(distributions(drafter, target), unmerged)
    for name in linear:
        b, a = (low_rank[f"{name}.parametrizations.weight.0.{each}"] for each in "ba")
        states[f"{name}.weight"] += 6.0 / 3 * b @ a
    torch.testing.assert_close(dict(drafter.state_dict()), states)
