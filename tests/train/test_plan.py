"""`--plan` against what runs really take: parameters, bytes alive, operations, steps, files on disk."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from draftsmith.models.alignment import columns_of
from draftsmith.models.drafters import drafter_shape, trainable_parameters
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.sizes import (
    Device,
    Meter,
    cache_bytes_per_token,
    checkpoint_bytes,
    drafter_bytes,
    gigabytes,
    target_size,
)
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.recipes.sections.train import TrainSection
from draftsmith.train import eagle3
from draftsmith.train.loss.unroll import TrainingTimeTest, teacher_of
from draftsmith.train.measure import dry_run as measuring
from draftsmith.train.measure import training_plan as planning
from draftsmith.train.measure.dry_run import CPU_FLASH_FLOPS, DryRun, PlannedRun, dry_run, planned_memory, row_flops
from tests.conftest import make_target
from tests.training_runs import metrics, run_main, train, write_recipe
from tests.training_runs import no_dry_run as no_dry_run
from tests.training_runs import recipe_path as recipe_path


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {"tie_word_embeddings": True}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ],
)
def test_target_size_is_the_models(family: str, settings: dict) -> None:
    model = make_target(family, **settings)
    size = target_size(model.config, TargetSection(model="", dtype="float32"))
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.weight_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert size.expert_parameters == experts
    tables = 320 * 32 * (1 if settings.get("tie_word_embeddings") else 2)
    chosen = {"gpt_oss": 2 / 4, "qwen3_moe": 2 / 8}.get(family, 0)
    assert size.active_parameters == size.parameters - tables - experts + int(experts * chosen)
    assert cache_bytes_per_token(model.config, size) == 2 * 7 * 2 * 8 * 4


# Memory and operations.

TARGET = Target(make_target(hidden_size=64, intermediate_size=128, head_dim=16, vocab_size=500))
SHAPE = Eagle3Config.for_target(TARGET.config, 500, TARGET.capture_layers, 300)
TOKENS, COLUMNS = 150, 100


def micro_batch(settings: TrainSection, rows: int) -> Callable[[], None]:
    """A real one, forward and backward, with one span of COLUMNS + 1 tokens at the end of each row."""
    drafter = Eagle3Drafter(SHAPE, DraftVocab(torch.arange(SHAPE.draft_vocab_size), SHAPE.vocab_size))
    trainee = TrainingTimeTest(drafter, settings.ttt_steps, settings.step_weight, settings.gradient_checkpointing)
    span = torch.zeros(rows, TOKENS, dtype=torch.long)
    span[:, TOKENS - COLUMNS - 1 :] = 1
    ids = torch.randint(SHAPE.draft_vocab_size, (rows, TOKENS))
    counted = columns_of(span, settings.ttt_steps)
    assert counted.index.shape[1] == COLUMNS

    def loss() -> torch.Tensor:
        captured = torch.randn(rows, TOKENS, 3 * SHAPE.hidden_size)
        last = torch.randn(rows, TOKENS, SHAPE.hidden_size)
        teacher = teacher_of(TARGET, last, ids, counted, drafter.vocab)
        with torch.autocast("cpu", torch.bfloat16, enabled=settings.mixed_precision == "bf16"):
            return trainee(captured, TARGET.inputs(ids, dtype=drafter.dtype), counted, teacher).loss

    return lambda: loss().backward()


@pytest.mark.parametrize(
    "changes",
    [
        {"mixed_precision": "bf16"},
        pytest.param({"ttt_steps": 5}, marks=pytest.mark.slow),
        pytest.param({"gradient_checkpointing": True}, marks=pytest.mark.slow),
    ],
)
def test_the_dry_run_counts_what_a_real_one_takes(changes: dict[str, Any]) -> None:
    """To the byte."""
    settings = TrainSection.model_validate({"ttt_steps": 3, "mixed_precision": "no"} | changes)
    planned = dry_run(settings, SHAPE, None, torch.float32, 3, TOKENS, COLUMNS).peak_bytes
    real = micro_batch(settings, 3)
    real()  # the kernel of attention was tried
    with Meter(lambda tensor: "") as meter:
        real()
    assert sum(planned.values()) == meter.peak_bytes


@pytest.mark.parametrize("checkpointing", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_operations_of_a_row_are_those_of_a_real_step(checkpointing: bool) -> None:
    """Of the unroll exactly, gradient checkpointing aside; of the target's layers without masked scores,
    and nearly, because the weights of norms count as products."""

    def flops_of(run: Callable[[], Any]) -> int:
        with FlopCounterMode(display=False, custom_mapping=CPU_FLASH_FLOPS) as counter:
            run()
        return counter.get_total_flops()

    settings = TrainSection(ttt_steps=3, gradient_checkpointing=checkpointing, mixed_precision="no")
    size = target_size(TARGET.config, TargetSection(model=""))
    unroll = row_flops(settings, SHAPE, TARGET.config, size, True, TOKENS, COLUMNS)
    step = micro_batch(settings.model_copy(update={"gradient_checkpointing": False}), 1)
    step()  # the first one of a process tries the kernels
    assert unroll == flops_of(step)
    whole = row_flops(settings, SHAPE, TARGET.config, size, False, TOKENS, COLUMNS)
    with sdpa_kernel(SDPBackend.MATH):
        layers = flops_of(lambda: TARGET.states(torch.ones(1, TOKENS, dtype=torch.long)))
    masked = 7 * 4 * TARGET.config.num_attention_heads * 16 * TOKENS * (TOKENS - 1) // 2
    assert whole - unroll == pytest.approx(layers - masked, rel=0.01)


def test_adamw_needs_one_more_copy_of_the_weights_on_a_gpu_alone(
    tmp_path: Path, target_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the optimiser's update is the widest moment: here nothing else takes memory."""
    monkeypatch.setattr(measuring, "dry_run", lambda *_, **__: DryRun({}, 0))
    recipe = load_recipe(write_recipe(tmp_path, target_dir), [f"data.states={tmp_path}"])
    files = TargetFiles(recipe.target)
    run = PlannedRun(recipe, files, SHAPE, files.size, [], [], Device("CPU", 10**12, "cpu"))
    there = replace(run, device=Device("GPU", 10**12, "cuda"))
    here, elsewhere = (planned_memory(each)[measuring.UPDATE] for each in (run, there))
    assert (here, elsewhere) == (4 * run.parameters, 8 * run.parameters)


# Steps, files, problems: the script itself.


def test_plan_tells_the_steps_and_files_of_the_run(recipe_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = ("train.max_steps=null", "train.epochs=1.5", "train.save_every_steps=2", "train.keep_checkpoints=2")
    output, before = recipe_path.parent / "run", set(recipe_path.parent.rglob("*"))
    run_main(eagle3, recipe_path, *own, "--plan")
    printed = {text[:14].strip(): text for text in capsys.readouterr().out.splitlines()}
    assert set(recipe_path.parent.rglob("*")) == before  # a plan writes nothing
    train(recipe_path, *own)
    steps = metrics(output)[-1]["step"]
    assert printed["steps"].startswith(f"steps          {steps} of 4 rows on 1 process")
    parameters = trainable_parameters(drafter_shape(load_recipe(recipe_path).drafter, make_target().config))
    checkpoints = sorted((output / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    for checkpoint in checkpoints:
        used = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        assert 0 < used - checkpoint_bytes(parameters, 160, 320) < 50_000
    used = (output / "drafter/model.safetensors").stat().st_size
    assert 0 < used - drafter_bytes(parameters, 160, 320) < 3_000
    assert gigabytes(checkpoint_bytes(parameters, 160, 320)) in printed["disk"]


@pytest.mark.usefixtures("no_dry_run")
def test_a_plan_names_all_that_cannot_work_at_its_end(
    recipe_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    DraftVocab.full(320).save(recipe_path.parent / "run/draft_vocab.safetensors")
    monkeypatch.setattr(planning, "device_here", lambda _: Device("NVIDIA tiny", 1_000_000, "cuda"))
    with pytest.raises(UserError) as error:
        run_main(eagle3, recipe_path, "train.max_steps=null", "train.epochs=1", "train.warmup_steps=6", "--plan")
    for part in ("train.warmup_steps 6 is not shorter", "do not fit the 1.0 MB", "drafter.vocab_size asks for 160"):
        assert part in str(error.value)
    assert "to lower the largest part: " in capsys.readouterr().out
