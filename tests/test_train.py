"""train/eagle3.py as users run it: resume, accumulation, checkpointing, refusals. On the tiny target, in seconds."""

import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from draftsmith.data_gen import capture, conversations, rank_vocab, regenerate
from draftsmith.models.checkpoint import load_drafter
from draftsmith.models.target import Target, default_capture_layers
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import TargetSection
from draftsmith.train import eagle3
from draftsmith.train.measure.metrics_line import THROUGHPUT_KEYS
from draftsmith.train.run.batches import BatchOrder
from draftsmith.train.run.loop import Loop
from tests.conftest import CHAT_TEMPLATE, files_of, make_target, make_tokenizer
from tests.training_runs import metrics, run_main, train, write_conversations
from tests.training_runs import recipe_path as recipe_path


def test_a_run_writes_what_it_promises(recipe_path: Path) -> None:
    output = train(recipe_path)
    lines = metrics(output)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {"step", "loss", "grad_norm", "accuracy", "lr", "simulated_tau"} <= lines[0].keys()
    assert len(lines[0]["accuracy"]) == 3
    assert {"validation_loss", "validation_accuracy", "validation_simulated_tau"} <= lines[2].keys()
    assert all(
        set(THROUGHPUT_KEYS) - {"mfu"} <= json.loads(line).keys()
        for line in (output / "metrics.jsonl").read_text().splitlines()
    )
    assert {p.name for p in (output / "drafter").iterdir()} == {
        "config.json",
        "model.safetensors",
        "recipe.yaml",
        "provenance.json",
    }
    layout = json.loads((output / "drafter/config.json").read_text())["target"]["layout"]
    assert (layout["model_type"], layout["embeddings"], layout["tied"]) == ("llama", "model.embed_tokens.weight", False)
    provenance = json.loads((output / "drafter/provenance.json").read_text())
    assert provenance["versions"]["torch"] and provenance["data"]["conversations"]["sha256"]
    tensors = load_file(output / "drafter/model.safetensors")
    assert torch.equal(DraftVocab.from_d2t(tensors["d2t"], tensors["t2d"]).target_ids, torch.arange(0, 320, 2))
    assert "embed_tokens" not in tensors


def test_damaged_metrics_and_stray_files_do_not_stop_a_resumed_run(
    recipe_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = train(recipe_path, "train.max_steps=3")
    path = output / "metrics.jsonl"
    first, *others = path.read_bytes().splitlines()
    broken = [b'{"step": \xff}', b'{"step": 1}}', b"[1]", b'{"loss": 1}', b'{"step": "1"}', b'{"a": ' * 100_000]
    path.write_bytes(b"\n".join([first, *broken, *others, b'{"step": 4, "lo']))
    for suffix in ("partial", "old", "damaged"):
        (output / f"checkpoints/step-00000002.{suffix}").write_text("no folder")
    train(recipe_path)
    assert [line["step"] for line in metrics(output)] == [1, 2, 3, 4, 5, 6]
    assert f"{path}: damaged lines dropped: 6, the first is line 2" in capsys.readouterr().out
    names = sorted(file.name for file in (output / "checkpoints").glob("step-*.*"))
    assert names == ["step-00000002.damaged"]  # leftovers go, what was set aside stays


def test_every_row_is_read_once_an_epoch_and_in_the_same_order() -> None:
    lengths = [random.Random(1).randint(1, 50) for _ in range(103)]
    order = BatchOrder(lengths, batch_size=4, seed=3)
    for epoch in (1, 0):
        numbers = range(epoch * order.batches_per_epoch, (epoch + 1) * order.batches_per_epoch)
        assert sorted(row for n in numbers for row in order.rows(n)) == list(range(103))
    again = BatchOrder(lengths, batch_size=4, seed=3)
    assert [again.rows(n) for n in (40, 3, 29)] == [order.rows(n) for n in (40, 3, 29)]
    assert [order.rows(n) for n in range(26)] != [order.rows(n) for n in range(26, 52)]


def test_changed_vocabulary_or_data_under_a_checkpoint_is_refused(recipe_path: Path) -> None:
    output = train(recipe_path, "train.max_steps=3")
    write_conversations(output / "conversations.jsonl", 24, seed=9)
    with pytest.raises(UserError, match="conversations_sha256"):
        train(recipe_path)
    write_conversations(output / "conversations.jsonl", 24)
    DraftVocab(torch.arange(1, 320, 2), 320).save(output / "draft_vocab.safetensors")
    with pytest.raises(UserError, match="draft_vocab_sha256"):
        train(recipe_path)


def test_changed_settings_under_a_checkpoint_are_refused(recipe_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Else the drafter's recipe.yaml would say what was not done. A plan says so before the target is loaded."""
    train(recipe_path)
    changed = r"train\.learning_rate: the checkpoint has 0\.003, this run has 0\.1"
    with pytest.raises(UserError, match=changed):
        train(recipe_path, "train.learning_rate=0.1")
    with pytest.raises(UserError, match=rf"belongs to another run \({changed}\)"):
        train(recipe_path, "train.learning_rate=0.1", "--plan")
    assert "writes" in capsys.readouterr().out  # the plan is whole
    train(recipe_path, "train.max_steps=8", "--plan")
    printed = capsys.readouterr().out
    jumps = "From step 7 on, its learning rate is that of a cosine decay over 8 steps: 0.00044, after 0.0002 in step 6"
    assert jumps in printed
    with pytest.raises(UserError, match=r"beyond the 2 steps of this recipe"):
        train(recipe_path, "train.max_steps=2")
    with pytest.raises(UserError, match=r"target\.dtype: the checkpoint has 'float32', this run has 'bfloat16'"):
        train(recipe_path, "target.dtype=bfloat16")
    train(recipe_path)
    assert "its learning rate" not in capsys.readouterr().out
    lines = metrics(train(recipe_path, "train.max_steps=8"))  # a longer run goes on
    assert jumps in capsys.readouterr().out
    assert [f"{line['lr']:.2g}" for line in lines[5:7]] == ["0.0002", "0.00044"] and len(lines) == 8


def test_a_device_that_is_not_there_is_refused(recipe_path: Path) -> None:
    with pytest.raises(UserError, match=r"target\.device: 'banana' cannot be used here .*; write auto, cpu"):
        TargetFiles(load_recipe(recipe_path, ["target.device=banana"]).target).load_model()


def test_weights_that_are_lost_are_never_saved(recipe_path: Path) -> None:
    """The learning rate destroys the weights between two logged steps; what was saved stays finite."""
    with pytest.raises(UserError, match="is NaN or inf, training has diverged"):
        train(recipe_path, "train.learning_rate=1e30", "train.save_every_steps=2", "train.log_every_steps=5")
    for saved in (recipe_path.parent / "run/checkpoints").glob("step-*/*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(saved).values())


def test_what_does_not_fit_is_told_before_the_target_is_loaded(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(TargetFiles, "load", loaded)
    for override, message in {
        "drafter.vocab_size=77": "holds 160 draft tokens, drafter.vocab_size asks for 77",
        "drafter.capture_layers=[1,1,2]": "must be ascending and distinct",
        "drafter.num_attention_heads=3": "3 query heads cannot share 2 key/value heads",
    }.items():
        with pytest.raises(UserError, match=message):
            train(recipe_path, override)
    path = recipe_path.parent / "run/draft_vocab.safetensors"
    DraftVocab(torch.arange(160), 352).save(path)
    with pytest.raises(UserError, match="for a target of 352 tokens, this one has 320"):
        train(recipe_path)
    DraftVocab(torch.arange(160), 320).save(path, {"tokenizer_fingerprint": "another"})
    with pytest.raises(UserError, match="its tokenizer has fingerprint another"):
        train(recipe_path)


def test_two_runs_never_write_into_one_folder(recipe_path: Path) -> None:
    output = Path(load_recipe(recipe_path).output_dir)
    with alone_in(output), pytest.raises(UserError, match="another run is writing there"):
        train(recipe_path)
    assert not (output / "checkpoints").exists() and not (output / "metrics.jsonl").exists()
    train(recipe_path, "train.max_steps=1", "train.warmup_steps=0")


def test_missing_inputs_are_named(recipe_path: Path) -> None:
    output = recipe_path.parent / "run"
    (output / "draft_vocab.safetensors").unlink()
    with pytest.raises(UserError, match=r"draft_vocab\.safetensors does not exist; run `draftsmith rank-vocab`"):
        train(recipe_path)
    (output / "conversations.jsonl").unlink()
    with pytest.raises(UserError, match=r"conversations\.jsonl does not exist; run `draftsmith regenerate`"):
        train(recipe_path)


def test_a_drafter_for_another_target_is_refused(recipe_path: Path, target_dir: Path, tmp_path: Path) -> None:
    drafter = train(recipe_path, "train.max_steps=1") / "drafter"
    files = TargetFiles(TargetSection(model=str(target_dir)))
    target = files.load()
    identity = files.identity_of(target)
    assert load_drafter(drafter, target, identity).vocab.size == 160

    other = Target(make_target(seed=1))
    with pytest.raises(UserError, match="embedding_digest: the drafter was trained for"):
        load_drafter(drafter, other, files_of(other).identity_of(other))
    wider = Target(make_target(vocab_size=352))
    with pytest.raises(UserError, match="vocab_size: the drafter was trained for 320, this target has 352"):
        load_drafter(drafter, wider, files_of(wider).identity_of(wider))
    with pytest.raises(UserError, match="tokenizer_fingerprint"):
        load_drafter(drafter, target, identity | {"tokenizer_fingerprint": "x"})
    captured = Target(target.model, [1, 3, 5])
    with pytest.raises(UserError, match=r"reads target states \[2, 3, 4\], this run captures \[1, 3, 5\]"):
        load_drafter(drafter, captured, identity)
    with pytest.raises(UserError, match="no drafter here"):
        load_drafter(tmp_path, target, identity)
    config = json.loads((drafter / "config.json").read_text())
    del config["drafter"]["capture_layers"]
    (drafter / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match=r"config\.json: damaged"):
        load_drafter(drafter, target, identity)


def test_colliding_capture_layers_are_refused() -> None:
    for layers in ([1, 1, 2], [3, 2, 1], [0, 8], [-1, 2], []):
        with pytest.raises(UserError, match="ascending and distinct"):
            Target(make_target(), layers)


def test_default_capture_layers() -> None:
    """L=32 -> 2, 16, 29; 28 -> 2, 14, 25; below 7 layers they would collide."""
    assert [default_capture_layers(n) for n in (32, 28, 7)] == [(2, 16, 29), (2, 14, 25), (2, 3, 4)]
    with pytest.raises(UserError, match="a target of 6 layers is too shallow for the default"):
        default_capture_layers(6)


def test_an_epoch_ends_where_its_rows_end(recipe_path: Path, tmp_path: Path) -> None:
    """21 rows: six micro-batches of four, the last of one row. Whatever a step has room for, nothing is read twice."""
    own = ["train.max_steps=null", "train.epochs=1", "train.validation_conversations=3", "train.batch_size=4"]
    lines: dict[int, list[dict]] = {}
    for accumulated in (4, 6, 16):  # two steps, the second half full; one; one that is mostly empty
        output = tmp_path / str(accumulated)
        shutil.copytree(tmp_path / "run", output)
        accumulation = f"train.gradient_accumulation_steps={accumulated}"
        lines[accumulated] = metrics(train(recipe_path, *own, accumulation, f"output_dir={output}"))
    assert [len(lines[accumulated]) for accumulated in (4, 6, 16)] == [2, 1, 1]
    full, roomy = lines[6][0], lines[16][0]
    assert roomy["loss"] == pytest.approx(full["loss"], rel=1e-6)
    assert roomy["grad_norm"] == pytest.approx(full["grad_norm"], rel=1e-5)
    assert roomy["accuracy"] == full["accuracy"]
    assert lines[4][0]["grad_norm"] != pytest.approx(full["grad_norm"], rel=1e-3)


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
    read.clear()
    train(recipe_path, *own, "train.epochs=2")
    assert read == [6, 7, 8, 9, 10, 11, 11, 11]
    assert [line["step"] for line in metrics(output)] == [1, 2, 3, 4]
    train(recipe_path, *own, "train.epochs=2")  # nothing is left to do
    assert len(read) == 8


def test_validation_rows_that_are_not_finite_are_named_and_left_out(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clean = metrics(train(recipe_path, "train.max_steps=1"))[0]
    shutil.rmtree(recipe_path.parent / "run/checkpoints")
    validated, alone = Loop._validated, []

    def poisoned(self: Loop, trainee: Any, rows: Any) -> Any:
        sums = validated(self, trainee, rows)
        if len(rows) == 1:
            alone.append(rows[0])
        return sums._replace(loss=sums.loss * float("nan")) if 2 in rows else sums

    monkeypatch.setattr(Loop, "_validated", poisoned)
    line = metrics(train(recipe_path, "train.max_steps=1"))[0]
    assert "its loss is not finite" in capsys.readouterr().out and line["validation_left_out"] == 1
    assert alone == list(range(len(alone))) and len(alone) > 2
    assert 0 < line["validation_loss"] != clean["validation_loss"] and "validation_left_out" not in clean


LONGROPE = {
    "rope_type": "longrope",
    "original_max_position_embeddings": 24,
    "short_factor": [1.0] * 4,
    "long_factor": [4.0] * 4,
}


@pytest.mark.parametrize(
    ("family", "positions", "reason"),
    [
        ("llama", {"max_position_embeddings": 24}, ""),
        ("gpt2", {"max_position_embeddings": 24, "n_positions": 24}, ""),
        ("llama", {"rope_parameters": LONGROPE}, " (behind them its longrope rotation changes for all tokens)"),
    ],
)
def test_no_row_is_longer_than_the_targets_positions(
    recipe_path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    family: str,
    positions: dict[str, Any],
    reason: str,
) -> None:
    """Beyond them, learnt positions end in an IndexError, a rotation in states that the target was never trained to
    have, and longrope's in others for the whole micro-batch. Every command that reads or plans rows leaves the longer
    ones out, and says so."""
    make_target(family, **positions).save_pretrained(tmp_path / "short")
    make_tokenizer().save_pretrained(tmp_path / "short")
    short = ["--plan", f"target.model={tmp_path / 'short'}"]
    note = f"note: data.max_length is 2,048, and the target has 24 positions{reason}: no row is longer than 24 tokens\n"
    output = train(recipe_path, *short[1:], "train.max_steps=1")
    assert note in capsys.readouterr().out
    rejected = (output / "conversations.training_rejects.jsonl").read_text().splitlines()
    assert all("longer than data.max_length" in json.loads(line)["reason"] for line in rejected) and rejected
    apart = [f"data.conversations={output / 'conversations.jsonl'}", f"output_dir={tmp_path / 'apart'}"]
    run_main(rank_vocab, recipe_path, short[1], *apart, "drafter.vocab_size=40")
    run_main(conversations, recipe_path, short[1], "--show=0")
    counted, shown = re.findall(r"(\d+) longer than data\.max_length", capsys.readouterr().out)
    assert int(counted) == int(shown) == len(rejected)
    (output / "conversations.jsonl").unlink()
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": "the cat"}) + "\n")
    for script in (regenerate, capture, eagle3):
        run_main(script, recipe_path, *short, f"data.prompts={tmp_path / 'prompts.jsonl'}")
        printed = capsys.readouterr().out
        assert note in printed and "2048" not in printed.replace(note, "")


def test_a_run_goes_on_with_prompts_of_its_own_date_alone(recipe_path: Path, tmp_path: Path) -> None:
    """Conversations with answers of their own are rendered anew in every run."""
    (tmp_path / "dated.jinja").write_text("{{ strftime_now('%F') }}" + CHAT_TEMPLATE)
    dated = f"target.chat_template={tmp_path / 'dated.jinja'}"
    output = train(recipe_path, dated, "target.date=2025-07-25", "train.max_steps=1")
    with pytest.raises(UserError, match=r"target\.date: the checkpoint has '2025-07-25', this run has '2025-07-26'"):
        train(recipe_path, dated, "target.date=2025-07-26", "train.max_steps=2")
    assert not (output / "prompt_date.txt").exists()  # the recipe says it
