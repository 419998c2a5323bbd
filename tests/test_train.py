"""train/eagle3.py as users run it: resume, accumulation, checkpointing, refusals. On the tiny target, in seconds."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file

from draftsmith.data_gen.rows.training_rows import TrainingRow
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.recorded.answers import RecordedAnswer
from draftsmith.eval.recorded.replay import replay
from draftsmith.models.chat import tokenizer_fingerprint
from draftsmith.models.checkpoint import load_drafter, target_identity
from draftsmith.models.costs import TargetSize, TrainingStates
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.target import Target, default_capture_layers, load_causal_lm
from draftsmith.models.vocab import DraftVocab, save_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.reader import Rejects
from draftsmith.recipes.schema import TargetSection
from draftsmith.train import eagle3
from draftsmith.train.measure.clock import CLOCK_KEYS
from draftsmith.train.measure.dry_run import UnrollCost
from draftsmith.train.measure.plan import HOW_TO_LOWER, memory_of
from draftsmith.train.measure.plan import REPLAY as REPLAYED
from draftsmith.train.run import trainer
from draftsmith.train.run.batches import BatchOrder, collate
from draftsmith.train.run.loop import Loop
from tests.conftest import make_target, make_tokenizer

ROOT = Path(__file__).parent.parent


def write_conversations(path: Path, count: int, seed: int = 0) -> None:
    """Regenerated conversations with their token ids: every second one has two turns."""
    chance = random.Random(seed)
    lines = []
    for i in range(count):
        turns, history = [], []
        for _ in range(1 + i % 2):
            prompt = [*history, 2, *(chance.randrange(5, 320) for _ in range(chance.randint(3, 9))), 4, 3]
            answer = [*(chance.randrange(5, 320) for _ in range(chance.randint(4, 14))), 4]
            turns.append({"prompt_token_ids": prompt, "output_token_ids": answer, "finish_reason": "stop"})
            history = prompt + answer
        messages = [{"role": role, "content": "x"} for _ in turns for role in ("user", "assistant")]
        lines.append(json.dumps({"id": f"c{i}", "messages": messages, "turns": turns}))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


def to_train(output: Path, conversations: int = 24) -> Path:
    """An output_dir that holds what training reads."""
    write_conversations(output / "conversations.jsonl", conversations)
    DraftVocab(torch.arange(0, 320, 2), 320).save(output / "draft_vocab.safetensors")
    return output


SIX_STEPS = {
    "max_steps": 6,
    "batch_size": 4,
    "learning_rate": 0.003,
    "save_every_steps": 3,
    "log_every_steps": 1,
    "validate_every_steps": 3,
    "validation_conversations": 4,
    "ttt_steps": 3,
    "mixed_precision": "no",
}


@pytest.fixture
def recipe_path(tmp_path: Path, target_dir: Path) -> Path:
    """A recipe of six steps with its conversations and draft vocabulary in place."""
    recipe = {
        "output_dir": str(to_train(tmp_path / "run")),
        "target": {"model": str(target_dir), "dtype": "float32", "device": "cpu"},
        "drafter": {"vocab_size": 160},
        "train": SIX_STEPS,
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe))
    return path


def run_main(module: Any, recipe_path: Path, *arguments: str) -> None:
    """Runs a script in this process."""
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    argv, sys.argv = sys.argv, ["script.py", str(recipe_path), *arguments]
    try:
        module.main()
    finally:
        sys.argv = argv


def train(recipe_path: Path, *overrides: str) -> Path:
    """Runs eagle3.py in this process; returns its output_dir."""
    run_main(eagle3, recipe_path, *overrides)
    return Path(load_recipe(recipe_path, [each for each in overrides if not each.startswith("--")]).output_dir)


def metrics(output: Path) -> list[dict]:
    """metrics.jsonl without what a clock decides."""
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k not in CLOCK_KEYS} for line in lines]


def test_a_run_writes_what_it_promises(recipe_path: Path) -> None:
    output = train(recipe_path)
    lines = metrics(output)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert {"step", "loss", "grad_norm", "accuracy", "lr", "simulated_tau"} <= lines[0].keys()
    assert len(lines[0]["accuracy"]) == 3
    assert {"validation_loss", "validation_accuracy", "validation_simulated_tau"} <= lines[2].keys()
    assert all(
        set(CLOCK_KEYS) - {"mfu"} <= json.loads(line).keys()
        for line in (output / "metrics.jsonl").read_text().splitlines()
    )
    assert {p.name for p in (output / "drafter").iterdir()} == {
        "config.json",
        "model.safetensors",
        "recipe.yaml",
        "provenance.json",
    }
    provenance = json.loads((output / "drafter/provenance.json").read_text())
    assert provenance["versions"]["torch"] and provenance["data"]["conversations"]["sha256"]
    tensors = load_file(output / "drafter/model.safetensors")
    assert torch.equal(DraftVocab.from_d2t(tensors["d2t"], tensors["t2d"]).target_ids, torch.arange(0, 320, 2))
    assert "embed_tokens" not in tensors


def test_training_learns(recipe_path: Path) -> None:
    """All conversations in every step: the drafter comes to agree with the target on them."""
    overrides = ["train.max_steps=60", "train.validation_conversations=0", "train.learning_rate=0.02"]
    lines = metrics(train(recipe_path, *overrides, "train.batch_size=24", "train.save_every_steps=60"))
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert lines[0]["simulated_tau"] < 1.1
    assert lines[-1]["simulated_tau"] > 1.4


@pytest.mark.parametrize("log_every", [1, 2])  # 2 does not divide the checkpoint's step: half a window is resumed
def test_resumed_equals_uninterrupted_bit_for_bit(recipe_path: Path, tmp_path: Path, log_every: int) -> None:
    logging = f"train.log_every_steps={log_every}"
    whole = train(recipe_path, logging, "train.validate_every_steps=6")
    resumed = tmp_path / "resumed"
    for name in ("conversations.jsonl", "draft_vocab.safetensors", "metrics.jsonl"):
        resumed.mkdir(exist_ok=True)
        shutil.copy(whole / name, resumed / name)
    shutil.copytree(whole / "checkpoints/step-00000003", resumed / "checkpoints/step-00000003")
    train(recipe_path, logging, "train.validate_every_steps=6", f"output_dir={resumed}")
    assert metrics(resumed) == metrics(whole)  # the lines behind the checkpoint were dropped and written again
    mine, expected = (load_file(d / "drafter/model.safetensors") for d in (resumed, whole))
    assert mine.keys() == expected.keys()
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


@pytest.mark.slow
def test_killed_at_any_moment_it_goes_on(recipe_path: Path, tmp_path: Path) -> None:
    """kill -9 in the middle of a real process, twice, then run to the end: the uninterrupted run's metrics."""
    overrides = ["train.max_steps=30", "train.save_every_steps=5"]
    whole = train(recipe_path, *overrides)
    killed = tmp_path / "killed"
    killed.mkdir()
    for name in ("conversations.jsonl", "draft_vocab.safetensors"):
        shutil.copy(whole / name, killed / name)
    command = [sys.executable, "train/eagle3.py", str(recipe_path), *overrides, f"output_dir={killed}"]
    # Bit for bit needs the same number of threads: sums are split by it.
    environment = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}
    for wanted in (7, 18):
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stderr=subprocess.DEVNULL)
        deadline = time.monotonic() + 120
        while not ((killed / "metrics.jsonl").exists() and len(metrics_text(killed)) >= wanted):
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.02)
        process.send_signal(signal.SIGKILL)
        process.wait()
    subprocess.run(command, cwd=ROOT, env=environment, check=True)
    assert metrics(killed) == metrics(whole)


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


def metrics_text(output: Path) -> list[str]:
    return (output / "metrics.jsonl").read_text().splitlines()


def test_accumulation_and_checkpointing_follow_one_trajectory(recipe_path: Path, tmp_path: Path) -> None:
    """24 rows a step in one micro-batch, in three, and with recomputation: the same losses and gradient norms."""
    runs = {
        "whole": ["train.batch_size=24"],
        "split": ["train.batch_size=8", "train.gradient_accumulation_steps=3"],
        "recomputed": ["train.batch_size=24", "train.gradient_checkpointing=true"],
    }
    lines = {}
    for name, overrides in runs.items():
        output = tmp_path / name
        shutil.copytree(recipe_path.parent / "run", output)
        everything = [*overrides, "train.validation_conversations=0", "train.max_steps=3", f"output_dir={output}"]
        lines[name] = metrics(train(recipe_path, *everything))
    for name in ("split", "recomputed"):
        for mine, whole in zip(lines[name], lines["whole"], strict=True):
            assert mine["loss"] == pytest.approx(whole["loss"], rel=1e-5)
            assert mine["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
            assert mine["accuracy"] == whole["accuracy"]


def test_every_row_is_read_once_an_epoch_and_in_the_same_order() -> None:
    lengths = [random.Random(1).randint(1, 50) for _ in range(103)]
    order = BatchOrder(lengths, batch_size=4, seed=3)
    for epoch in (1, 0):
        numbers = range(epoch * order.batches_per_epoch, (epoch + 1) * order.batches_per_epoch)
        assert sorted(row for n in numbers for row in order.rows(n)) == list(range(103))
    again = BatchOrder(lengths, batch_size=4, seed=3)
    assert [again.rows(n) for n in (40, 3, 29)] == [order.rows(n) for n in (40, 3, 29)]
    assert [order.rows(n) for n in range(26)] != [order.rows(n) for n in range(26, 52)]


def test_collate_numbers_spans_and_cuts_the_tail() -> None:
    rows = [
        TrainingRow("a", [9, 9, 1, 2, 9, 3, 9, 9], [i in (2, 3, 5) for i in range(8)], [(2, 4), (5, 6)]),
        TrainingRow("b", [9, 4, 5], [False, True, True], [(1, 3)]),
    ]
    batch = collate(rows)
    assert batch.ids.tolist() == [[9, 9, 1, 2, 9, 3], [9, 4, 5, 0, 0, 0]]
    assert batch.span.tolist() == [[0, 0, 1, 1, 0, 2], [0, 1, 1, 0, 0, 0]]


def test_changed_vocabulary_or_data_under_a_checkpoint_is_refused(recipe_path: Path) -> None:
    output = train(recipe_path, "train.max_steps=3")
    with pytest.raises(UserError, match=r"train\.resume is never"):
        train(recipe_path, "train.resume=never")
    write_conversations(output / "conversations.jsonl", 24, seed=9)
    with pytest.raises(UserError, match="conversations_sha256"):
        train(recipe_path)
    write_conversations(output / "conversations.jsonl", 24)
    DraftVocab(torch.arange(1, 320, 2), 320).save(output / "draft_vocab.safetensors")
    with pytest.raises(UserError, match="draft_vocab_sha256"):
        train(recipe_path)


def test_changed_settings_under_a_checkpoint_are_refused(recipe_path: Path) -> None:
    """Else the drafter's recipe.yaml would say what was not done."""
    train(recipe_path)
    with pytest.raises(UserError, match=r"train\.learning_rate: the checkpoint has 0\.003, this run has 0\.1"):
        train(recipe_path, "train.learning_rate=0.1")
    with pytest.raises(UserError, match=r"beyond the 2 steps of this recipe"):
        train(recipe_path, "train.max_steps=2")
    assert len(metrics(train(recipe_path, "train.max_steps=8"))) == 8  # a longer run goes on


def test_a_checkpoint_without_a_key_is_gone_on_with_unless_the_key_says_something(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of an older version, which knew fewer keys."""
    with monkeypatch.context() as older:
        older.setattr(trainer, "MAY_CHANGE", {*trainer.MAY_CHANGE, "rank_loss"})
        train(recipe_path)
    with pytest.raises(UserError, match=r"train\.rank_loss: the checkpoint has None, this run has 0\.5"):
        train(recipe_path, "train.max_steps=8", "train.rank_loss=0.5")
    assert len(metrics(train(recipe_path, "train.max_steps=8"))) == 8


def test_weights_that_are_lost_are_never_saved(recipe_path: Path) -> None:
    """The learning rate destroys the weights between two logged steps; what was saved stays finite."""
    with pytest.raises(UserError, match="not a finite number"):
        train(recipe_path, "train.learning_rate=1e30", "train.save_every_steps=2", "train.log_every_steps=5")
    for saved in (recipe_path.parent / "run/checkpoints").glob("step-*/*.safetensors"):
        assert all(torch.isfinite(tensor).all() for tensor in load_file(saved).values())


def test_what_does_not_fit_is_told_before_the_target_is_loaded(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("the target was loaded")

    monkeypatch.setattr(trainer, "load_causal_lm", loaded)
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
    with pytest.raises(UserError, match=r"draft_vocab\.safetensors does not exist; data_gen/rank_vocab\.py"):
        train(recipe_path)
    (output / "conversations.jsonl").unlink()
    with pytest.raises(UserError, match=r"conversations\.jsonl does not exist; data_gen/regenerate\.py"):
        train(recipe_path)


def test_a_drafter_for_another_target_is_refused(recipe_path: Path, target_dir: Path, tmp_path: Path) -> None:
    drafter = train(recipe_path, "train.max_steps=1") / "drafter"
    tokenizer = make_tokenizer()
    target = Target(load_causal_lm(TargetSection(model=str(target_dir))))
    identity = target_identity(target, str(target_dir), None, tokenizer_fingerprint(tokenizer))
    assert load_drafter(drafter, target, identity).vocab.size == 160

    other = Target(make_target(seed=1))
    with pytest.raises(UserError, match="embedding_digest: the drafter was trained for"):
        load_drafter(drafter, other, target_identity(other, "other", None, tokenizer_fingerprint(tokenizer)))
    wider = Target(make_target(vocab_size=352))
    with pytest.raises(UserError, match="vocab_size: the drafter was trained for 320, this target has 352"):
        load_drafter(drafter, wider, target_identity(wider, "other", None, tokenizer_fingerprint(tokenizer)))
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


@pytest.mark.parametrize("layers", [[1, 1, 2], [3, 2, 1], [0, 8], [-1, 2], []])
def test_colliding_capture_layers_are_refused(layers: list[int]) -> None:
    with pytest.raises(UserError, match="ascending and distinct"):
        Target(make_target(), layers)


def test_default_capture_layers() -> None:
    """L=32 -> 2, 16, 29; 28 -> 2, 14, 25; below 7 layers they would collide."""
    assert [default_capture_layers(n) for n in (32, 28, 7)] == [(2, 16, 29), (2, 14, 25), (2, 3, 4)]
    with pytest.raises(UserError, match="collides for a target of 6 layers"):
        default_capture_layers(6)


def test_captured_states_are_hidden_states() -> None:
    """In `hidden_states` numbering, as transformers counts them: state i is the input of layer i."""
    model = make_target()
    ids = torch.tensor([[5, 6, 7, 8]])
    expected = model.get_decoder()(input_ids=ids, output_hidden_states=True)
    states = Target(model, [0, 3, 6]).states(ids)
    torch.testing.assert_close(states.captured, torch.cat([expected.hidden_states[i] for i in (0, 3, 6)], dim=-1))
    torch.testing.assert_close(states.last, expected.last_hidden_state)


REPLAY = ("train.eval_replay=3", "eval.tree.nodes=10", "eval.tree.draft_calls=3", "eval.tree.top_k=4")


def test_replay_at_every_checkpoint_is_replay_of_what_is_saved(recipe_path: Path, target_dir: Path) -> None:
    """Along the turns of the first three validation conversations, in full; and training does not notice."""
    output = train(recipe_path, *REPLAY, "train.log_every_steps=4", "train.learning_rate=0.02")
    lines = metrics(output)
    assert [line["step"] for line in lines if "replay_tau" in line] == [3, 6]  # step 3 is a checkpoint, not a log step
    assert [line["step"] for line in lines] == [3, 4, 6]

    section, tokenizer = TargetSection(model=str(target_dir), dtype="float32"), make_tokenizer()
    target = Target(load_causal_lm(section))
    identity = target_identity(target, str(target_dir), None, tokenizer_fingerprint(tokenizer))
    drafter = load_drafter(output / "drafter", target, identity)
    recipe = load_recipe(recipe_path, REPLAY)
    _, validation = trainer.read_rows(recipe, tokenizer, Rejects())
    ids = list(dict.fromkeys(row.id for row in validation))[:3]
    assert len(ids) == 3
    answers = [
        RecordedAnswer(turn["prompt_token_ids"], turn["output_token_ids"])
        for record in map(json.loads, (output / "conversations.jsonl").read_text().splitlines())
        if record["id"] in ids
        for turn in record["turns"]
    ]
    proposer = PolicyProposer(FeatureDrafting(drafter), policy_of(recipe.eval.tree))
    rounds = [replay(target, proposer, [answer], 1)[0] for answer in answers]
    tokens = sum(len(answer.tokens) - 1 for answer in answers)
    assert lines[-1]["replay_tau"] == pytest.approx(tokens / sum(g.rounds for g in rounds), abs=1e-4)
    first = [g.accepted_per_round[i] > 0 for g in rounds for i in range(g.rounds)]
    cut_at_once = sum(g.last_round_cut and g.accepted_per_round[-1] == 0 for g in rounds)
    assert cut_at_once == 0
    shares = lines[-1]["replay_accepted_by_position"]
    assert (shares[0] if shares else 0) == pytest.approx(sum(first) / len(first), abs=1e-4)

    without = recipe_path.parent / "without"
    shutil.copytree(output, without, ignore=shutil.ignore_patterns("checkpoints", "drafter", "metrics.jsonl"))
    train(recipe_path, "train.log_every_steps=4", "train.learning_rate=0.02", f"output_dir={without}")
    mine, expected = (load_file(d / "drafter/model.safetensors") for d in (output, without))
    assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_a_run_with_replay_resumes_bit_for_bit(recipe_path: Path, tmp_path: Path) -> None:
    whole = train(recipe_path, *REPLAY)
    resumed = tmp_path / "resumed"
    resumed.mkdir()
    for name in ("conversations.jsonl", "draft_vocab.safetensors", "metrics.jsonl"):
        shutil.copy(whole / name, resumed / name)
    shutil.copytree(whole / "checkpoints/step-00000003", resumed / "checkpoints/step-00000003")
    train(recipe_path, *REPLAY, f"output_dir={resumed}")
    assert metrics(resumed) == metrics(whole)
    assert_same_tensors(resumed / "checkpoints/step-00000006", whole / "checkpoints/step-00000006")


def assert_same_tensors(mine: Path, expected: Path) -> None:
    """Of two checkpoints, which hold nothing pickled and no random state: all that is drawn is drawn by name."""
    names = {path.name for path in expected.iterdir()}
    assert names == {"manifest.json", "trainer_state.json", "model.safetensors", "optimizer.safetensors"}
    for name in ("model.safetensors", "optimizer.safetensors"):
        found, wanted = load_file(mine / name), load_file(expected / name)
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)


class Killed(BaseException):
    """What nothing in the loop catches, as a kill."""


@pytest.mark.parametrize("at", [3, 6])
def test_a_kill_between_checkpoint_and_replay_loses_neither(
    recipe_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: int
) -> None:
    """The checkpoint comes first; each line stands once, with its replay, wherever the run was killed."""
    replayed, log = Loop.replayed, Loop._log
    whole = train(recipe_path, *REPLAY)
    for moment in ("replay", "log"):
        killed = tmp_path / moment
        killed.mkdir()
        for name in ("conversations.jsonl", "draft_vocab.safetensors"):
            shutil.copy(whole / name, killed / name)
        with monkeypatch.context() as patched:

            def kill(killed: Path = killed) -> None:
                if (killed / f"checkpoints/step-0000000{at}").exists():
                    raise Killed

            def replayed_or_killed(self: Loop) -> dict:
                kill()
                return replayed(self)

            def half_logged(self: Loop, line: dict, killed: Path = killed) -> None:
                if line["step"] == at:
                    with (killed / "metrics.jsonl").open("a") as file:
                        file.write(json.dumps(line)[:20])
                    kill()
                log(self, line)

            patched.setattr(Loop, *(("replayed", replayed_or_killed) if moment == "replay" else ("_log", half_logged)))
            with pytest.raises(Killed):
                train(recipe_path, *REPLAY, f"output_dir={killed}")
        assert (killed / f"checkpoints/step-0000000{at}").exists()
        assert (killed / "metrics.jsonl").read_text().count("\n") == at - 1
        assert not (killed / "drafter").exists()
        for _ in range(2):  # a run that is complete writes no line again
            train(recipe_path, *REPLAY, f"output_dir={killed}")
            assert metrics(killed) == metrics(whole)
        mine, expected = (load_file(d / "drafter/model.safetensors") for d in (killed, whole))
        assert all(torch.equal(mine[name], expected[name]) for name in expected)


def test_a_line_that_waits_for_a_replay_is_logged_without_one_if_it_is_switched_off(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way out where the replay itself is what ends the run."""
    with monkeypatch.context() as patched:
        patched.setattr(Loop, "replayed", lambda _: (_ for _ in ()).throw(torch.OutOfMemoryError("too much")))
        with pytest.raises(torch.OutOfMemoryError):
            train(recipe_path, *REPLAY)
    lines = metrics(train(recipe_path, "train.eval_replay=0"))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert not any("replay_tau" in line for line in lines)


def test_sigterm_does_not_wait_for_a_replay(recipe_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes in the step whose checkpoint a replay would follow: the next start catches up on that."""
    expected = metrics(train(recipe_path, *REPLAY))
    output = recipe_path.parent / "stopped"
    shutil.copytree(
        recipe_path.parent / "run",
        output,
        ignore=shutil.ignore_patterns("checkpoints", "drafter", "metrics.jsonl"),
    )
    step = Loop._step
    with monkeypatch.context() as patched:

        def step_and_stop(self: Loop, number: int) -> tuple[float, float, bool]:
            if number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return step(self, number)

        patched.setattr(Loop, "_step", step_and_stop)
        patched.setattr(Loop, "replayed", lambda _: pytest.fail("it waited"))
        train(recipe_path, *REPLAY, f"output_dir={output}")
    assert [line["step"] for line in metrics(output)] == [1, 2]
    train(recipe_path, *REPLAY, f"output_dir={output}")
    assert metrics(output) == expected


def test_replay_drafts_from_a_cut_vocabulary(recipe_path: Path) -> None:
    output = recipe_path.parent / "run"
    counts = torch.zeros(320, dtype=torch.long)
    counts[torch.arange(0, 320, 2)] = torch.arange(160).flip(0) + 1
    save_token_counts(output / "token_counts.safetensors", counts, tokenizer_fingerprint(make_tokenizer()), [4])
    train(recipe_path, *REPLAY, "eval.tree.vocab_size=7")
    with pytest.raises(UserError, match=r"eval\.tree\.vocab_size: 200 is more than the 160 tokens"):
        train(recipe_path, *REPLAY, "eval.tree.vocab_size=200")


def test_what_cannot_be_replayed_in_training_is_told_at_once(
    recipe_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trainer, "load_causal_lm", lambda *_: pytest.fail("the target was loaded"))
    chain = "eval.tree={policy: chain, draw: sampled}"
    for overrides, message in (
        (("train.validation_conversations=0",), "train.validation_conversations is 0"),
        (("eval.tree={policy: auto}",), "policy auto goes by speeds"),
        (("eval.tree={nodes: 600, top_k: 30}",), r"eval_replay: eval\.tree: 600 nodes, .* a target of 512 positions"),
        (("eval.tree={policy: svip, draft_calls: 512}",), "513 nodes, 512 draft calls deep, in a target of 512"),
        ((chain, "eval.temperature=1"), "draw: sampled cannot be replayed"),
        (("eval.tree.vocab_size=9",), r"token_counts\.safetensors, which does not exist"),
    ):
        for plan in ((), ("--plan",)):
            with pytest.raises(UserError, match=message):
                train(recipe_path, "train.eval_replay=2", *overrides, *plan)


def test_the_plan_tells_of_replay_and_its_memory(recipe_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(recipe_path, "--plan")
    assert "replay_tau" not in capsys.readouterr().out
    train(recipe_path, *REPLAY, "--plan")
    said = capsys.readouterr().out
    assert "3 validation conversations at every checkpoint, eval.tree eagle2: replay_tau in metrics.jsonl" in said


def test_memory_of_replay_counts_where_it_is_the_widest_moment() -> None:
    size = TargetSize(1000, 0, 1000, 100, 4000.0, "exact", torch.float32, eager_attention=False)
    unroll = UnrollCost(100, {"layer": 100}, 1)
    states = TrainingStates.of(10)
    small, large = (memory_of(size, unroll, 50, False, states, True, replay_bytes=count) for count in (99.0, 9000.0))
    assert REPLAYED not in small.parts and large.parts[REPLAYED] == 9000
    assert large.total > small.total
    assert large.largest == REPLAYED and "eval.replay_batch_size" in HOW_TO_LOWER[REPLAYED]


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
        return replace(sums, loss=sums.loss * float("nan")) if 2 in rows else sums

    monkeypatch.setattr(Loop, "_validated", poisoned)
    line = metrics(train(recipe_path, "train.max_steps=1"))[0]
    assert "its loss is not finite" in capsys.readouterr().out and line["validation_left_out"] == 1
    assert alone == list(range(len(alone))) and len(alone) > 2
    assert 0 < line["validation_loss"] != clean["validation_loss"] and "validation_left_out" not in clean
