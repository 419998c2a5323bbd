"""train/eagle3.py as users run it: resume, accumulation, checkpointing, refusals. On the tiny target, in seconds."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from accelerate import Accelerator
from safetensors.torch import load_file

from draftsmith.data_gen import conversations, rank_vocab
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.checkpoint import load_drafter
from draftsmith.models.target import Target, default_capture_layers
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.recipes.sections.train import TrainSection
from draftsmith.train import eagle3
from draftsmith.train.measure.metrics_line import THROUGHPUT_KEYS, Tally
from draftsmith.train.run import training_inputs
from draftsmith.train.run.checkpoints import run_identity
from draftsmith.train.run.engine import Engine
from draftsmith.train.run.loop import Loop
from draftsmith.train.run.schedule import Schedule
from tests.conftest import CHAT_TEMPLATE, files_of, make_target, make_tokenizer
from tests.training_runs import done_path as done_path
from tests.training_runs import fresh_accelerator, metrics, run_main, train, write_conversations
from tests.training_runs import recipe_path as recipe_path


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
    tensors = load_file(output / "drafter/model.safetensors")
    assert torch.equal(DraftVocab.from_d2t(tensors["d2t"], tensors["t2d"]).target_ids, torch.arange(0, 320, 2))
    assert "embed_tokens" not in tensors


def test_damaged_metrics_and_stray_files_do_not_stop_a_resumed_run(
    done_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
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


def test_the_logged_loss_is_that_of_a_column() -> None:
    tally, alone = Tally.empty(2, torch.device("cpu")), SimpleNamespace(reduce=lambda tensor, how: tensor)
    for sums, values in ((tally.loss, 6), (tally.columns, 3), (tally.reached, [3, 1]), (tally.correct, [3, 0])):
        sums += torch.tensor(values)
    line = tally.over_ranks(alone)  # type: ignore[arg-type]
    assert (line["loss"], line["accuracy"], line["simulated_tau"]) == (2, [1, 0], 2)


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


def test_a_longer_run_goes_on_with_the_learning_rate_of_its_own_length(
    done_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = metrics(train(done_path, "train.max_steps=8"))
    assert "decay over 8 steps: 0.00044, after 0.0002 in step 6" in capsys.readouterr().out
    assert [f"{line['lr']:.2g}" for line in lines[5:7]] == ["0.0002", "0.00044"] and len(lines) == 8
    train(done_path, "train.max_steps=8")
    assert "its learning rate" not in capsys.readouterr().out


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
    (drafter / "config.json").write_text((drafter / "config.json").read_text().replace("capture_layers", "x"))
    for folder, named in ((drafter.parent, "no drafter here"), (drafter, r"config\.json: damaged")):
        with pytest.raises(UserError, match=named):
            load_drafter(folder, target, identity)


def test_capture_layers() -> None:
    """L=32 -> 2, 16, 29; 28 -> 2, 14, 25; below 7 layers they would collide."""
    assert [default_capture_layers(n) for n in (32, 28, 7)] == [(2, 16, 29), (2, 14, 25), (2, 3, 4)]
    for layers in ([1, 1, 2], [3, 2, 1], [0, 8], [-1, 2], []):
        with pytest.raises(UserError, match="ascending and distinct"):
            Target(make_target(), layers)


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
    """Beyond them, a rotation ends in states that the target was never trained to have, and longrope's in others for
    the whole micro-batch. Every command that reads rows leaves the longer ones out, and says so."""
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


def test_a_run_goes_on_with_prompts_of_its_own_date_alone(recipe_path: Path, tmp_path: Path) -> None:
    """Conversations with answers of their own are rendered anew in every run."""
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%F') }}" + CHAT_TEMPLATE)
    dated = f"target.chat_template={tmp_path / 'dated.jinja'}"
    output = train(recipe_path, dated, "target.date=2025-07-25", "train.max_steps=1")
    with pytest.raises(UserError, match=r"target\.date: the checkpoint has '2025-07-25', this run has '2025-07-26'"):
        train(recipe_path, dated, "target.date=2025-07-26", "train.max_steps=2")
    assert not (output / "prompt_date.txt").exists()  # the recipe says it
