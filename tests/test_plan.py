"""`--plan` against what runs really take: parameters, bytes alive, operations, steps, files on disk."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig

from draftsmith.data_gen import capture, regenerate
from draftsmith.data_gen.answers import regeneration
from draftsmith.eval import acceptance
from draftsmith.models.alignment import columns_of
from draftsmith.models.costs import (
    Device,
    Meter,
    cache_bytes_per_token,
    checkpoint_bytes,
    drafter_bytes,
    duration,
    gigabytes,
    target_forward_bytes,
    target_size,
    torch_dtype,
)
from draftsmith.models.drafters import drafter_shape, trainable_parameters
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.schema import TargetSection, TrainSection
from draftsmith.train import eagle3
from draftsmith.train.attention.kernels import BLOCKS, FLASH_CPU
from draftsmith.train.loss.unroll import TrainingTimeTest, teacher_of
from draftsmith.train.measure import plan as planning
from draftsmith.train.measure.dry_run import CPU_FLASH_FLOPS, LAYER, LOGITS, dry_run, row_flops
from draftsmith.train.measure.plan import last_logged
from tests.conftest import make_target, make_tokenizer
from tests.tiny_vision import FAMILIES, make_vision_target
from tests.training_runs import no_dry_run as no_dry_run
from tests.training_runs import run_main, train, write_conversations

GPU = Device("NVIDIA H100 80GB HBM3", 85_000_000_000, is_cpu=False)
UNKNOWN_GPU = Device("NVIDIA Other", 85_000_000_000, is_cpu=False)


def recipe_file(folder: Path, **changes: Any) -> Path:
    """A small recipe whose sections are updated by `changes`; its target is made beside it."""
    if not (folder / "target").exists():
        make_target().save_pretrained(folder / "target")
        make_tokenizer().save_pretrained(folder / "target")
    sections: dict[str, Any] = {
        "output_dir": str(folder / "run"),
        "target": {"model": str(folder / "target"), "dtype": "float32", "device": "cpu"},
        "drafter": {"vocab_size": 160},
        "train": {"batch_size": 4, "ttt_steps": 3, "mixed_precision": "no", "validation_conversations": 4},
    }
    for name, section in changes.items():
        sections[name] = sections.get(name, {}) | section
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(sections))
    return path


def plan(path: Path, capsys: pytest.CaptureFixture[str], *overrides: str) -> dict[str, str]:
    """What --plan prints: text by label."""
    capsys.readouterr()
    run_main(eagle3, path, *overrides, "--plan")
    return labelled(capsys.readouterr().out)


def labelled(said: str) -> dict[str, str]:
    printed: dict[str, str] = {}
    for text in said.splitlines():
        printed[text[:14].strip()] = printed.get(text[:14].strip(), "") + text + "\n"
    return printed


def refused(capsys: pytest.CaptureFixture[str], script: Any, *arguments: Any) -> tuple[str, str]:
    """(the problems of a plan, what it prints before)."""
    capsys.readouterr()
    with pytest.raises(UserError) as error:
        run_main(script, *arguments, "--plan")
    return str(error.value), capsys.readouterr().out


# Parameters and the target's size.


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("llama", {}),
        ("llama", {"tie_word_embeddings": True}),
        ("qwen3", {}),
        ("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("qwen3_moe", {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}),
    ],
)
def test_target_size_is_the_models(family: str, settings: dict) -> None:
    model = make_target(family, **settings)
    size = target_size(model.config, TargetSection(model="", dtype="float32"))
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.weight_bytes == sum(p.numel() * p.element_size() for p in model.parameters())
    assert size.head_parameters == model.get_output_embeddings().weight.numel()
    experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    assert size.expert_parameters == experts
    tables = 320 * 32 * (1 if settings.get("tie_word_embeddings") else 2)
    chosen = {"gpt_oss": 2 / 4, "qwen3_moe": 2 / 8}.get(family, 0)
    assert size.active_parameters == size.parameters - tables - experts + int(experts * chosen)
    assert cache_bytes_per_token(model.config, size) == 2 * 7 * 2 * 8 * 4


@pytest.mark.parametrize("family", FAMILIES)
def test_the_vision_part_is_not_read_for_each_token(family: str) -> None:
    model = make_vision_target(family)
    size = target_size(model.config, TargetSection(model="", dtype="float32"))
    assert size.parameters == sum(p.numel() for p in model.parameters())
    assert size.active_parameters == sum(size.layer_parameters) + model.config.text_config.hidden_size  # the last norm


def test_dtype_of_a_target_comes_from_the_recipe_then_the_config() -> None:
    config = AutoConfig.for_model("llama", dtype="bfloat16")
    assert torch_dtype(config, "auto") is torch.bfloat16
    assert torch_dtype(config, "float16") is torch.float16
    assert torch_dtype(AutoConfig.for_model("llama"), "auto") is torch.float32


def test_quantised_checkpoints_are_counted_as_they_are_loaded() -> None:
    """This machine has no kernels for MXFP4: transformers dequantises. Others stay in few bits."""
    config = make_target("gpt_oss", num_local_experts=4).config
    plain = target_size(config, TargetSection(model="", dtype="bfloat16"))
    config.quantization_config = {"quant_method": "mxfp4"}
    mxfp4 = target_size(config, TargetSection(model="", dtype="bfloat16"))
    if not torch.cuda.is_available():
        assert mxfp4.weight_bytes == plain.weight_bytes and "dequantised" in mxfp4.weight_basis
    config.quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    gptq = target_size(config, TargetSection(model="", dtype="bfloat16"))
    assert plain.weight_bytes / 4 < gptq.weight_bytes < plain.weight_bytes
    assert gptq.parameters == plain.parameters and "assumed" in gptq.weight_basis


def shape_of(hidden: int = 64, vocab: int = 500, draft_vocab: int = 300) -> Eagle3Config:
    return Eagle3Config(
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=hidden // 4,
        vocab_size=vocab,
        draft_vocab_size=draft_vocab,
        capture_layers=(2, 3, 4),
        rms_norm_eps=1e-6,
        max_position_embeddings=1024,
    )


def drafter_of(shape: Eagle3Config) -> Eagle3Drafter:
    vocab = DraftVocab(torch.arange(shape.draft_vocab_size), shape.vocab_size)
    return Eagle3Drafter(shape, vocab)


# Memory and operations.


class SmallTarget:
    """Head and embeddings alone."""

    def __init__(self, shape: Eagle3Config):
        self.head = torch.nn.Linear(shape.hidden_size, shape.vocab_size, bias=False).requires_grad_(False)
        self.config = None
        self.embedding_table, self.embedding_scale = torch.randn(shape.vocab_size, shape.hidden_size), 1.0

    logits, embed, inputs = Target.logits, Target.embed, Target.inputs


def micro_batch(
    shape: Eagle3Config, settings: TrainSection, bf16: bool, rows: int, tokens: int, columns: int
) -> Callable[[], None]:
    """A real one, forward and backward, with one span of `columns` + 1 tokens at the end of each row."""
    drafter, target = drafter_of(shape), SmallTarget(shape)
    trainee = TrainingTimeTest(drafter, settings.ttt_steps, settings.step_weight, settings.gradient_checkpointing)
    span = torch.zeros(rows, tokens, dtype=torch.long)
    span[:, tokens - columns - 1 :] = 1
    ids = torch.randint(shape.draft_vocab_size, (rows, tokens))
    counted = columns_of(span, settings.ttt_steps)
    assert counted.index.shape[1] == columns

    def loss() -> torch.Tensor:
        captured = torch.randn(rows, tokens, 3 * shape.hidden_size)
        last = torch.randn(rows, tokens, shape.hidden_size)
        teacher = teacher_of(target, last, ids, counted, drafter.vocab)  # type: ignore[arg-type]
        with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            inputs = target.inputs(ids, dtype=drafter.dtype)  # type: ignore[misc]
            return trainee(captured, inputs, counted, teacher).loss

    return lambda: loss().backward()


def cost_of(section: TrainSection, shape: Eagle3Config, rows: int, tokens: int, columns: int) -> dict[str, int]:
    """The dry run's bytes."""
    return dry_run(section, shape, None, torch.float32, rows, tokens, columns).peak_bytes


@pytest.mark.parametrize(
    ("rows", "tokens", "columns", "changes", "bf16"),
    [
        (2, 60, 40, {}, False),
        (3, 150, 100, {"ttt_steps": 5}, False),
        (3, 150, 100, {}, True),
        (3, 150, 100, {"gradient_checkpointing": True}, False),
    ],
)
def test_the_dry_run_counts_what_a_real_one_takes(
    rows: int, tokens: int, columns: int, changes: dict, bf16: bool
) -> None:
    """To the byte."""
    changes = {"ttt_steps": 3, "mixed_precision": "bf16" if bf16 else "no"} | changes
    settings, shape = TrainSection.model_validate(changes), shape_of()
    planned = cost_of(settings, shape, rows, tokens, columns)
    real = micro_batch(shape, settings, bf16, rows, tokens, columns)
    real()  # the kernel of attention was tried
    with Meter(lambda tensor: "") as meter:
        real()
    assert sum(planned.values()) == meter.peak_bytes


def test_the_dry_run_names_the_parts() -> None:
    """What the MLPs of three steps keep for the backward pass; and logits, of which a long row has no more alive."""
    shape, settings = shape_of(draft_vocab=300), TrainSection(ttt_steps=3)
    short, long = (cost_of(settings, shape, 2, tokens, tokens - 50) for tokens in (8_000, 16_000))
    assert short[LAYER] >= 3 * 2 * 7950 * 2 * shape.intermediate_size * 4
    assert long[LAYER] > 1.9 * short[LAYER]
    assert 0 < long[LOGITS] < 1.5 * short[LOGITS]


def flops_of(run: Callable[[], Any]) -> int:
    with FlopCounterMode(display=False, custom_mapping=CPU_FLASH_FLOPS) as counter:
        run()
    return counter.get_total_flops()


def test_operations_of_the_cpu_s_kernel_are_those_of_plain_products() -> None:
    """Torch counts the plain ones. Causal calls count half of a square, a backward pass four of five products: it
    computes scores again."""
    query, keys, values = torch.randn(1, 4, 40, 16), torch.randn(1, 2, 40, 16), torch.randn(1, 2, 40, 16)
    out, lse = BLOCKS.forward(query, keys, values, False)
    for causal, share in ((False, 1), (True, 2)):
        given = query, keys, values, causal
        plain = flops_of(lambda g=given: BLOCKS.forward(*g[:3], False))
        assert share * flops_of(lambda g=given: FLASH_CPU.forward(*g)) == plain
        given = query, query, keys, values, out, lse, causal
        plain = flops_of(lambda g=given: BLOCKS.backward(*g[:6], False))
        assert 5 * share * flops_of(lambda g=given: FLASH_CPU.backward(*g)) == 4 * plain


@pytest.mark.parametrize("checkpointing", [False, True])
def test_operations_of_a_row_are_those_of_a_real_step(checkpointing: bool) -> None:
    """Of the unroll exactly, gradient checkpointing aside; of the target's layers without masked scores,
    and nearly, because the weights of norms count as products."""
    tokens, columns, shape = 150, 100, shape_of()
    settings = TrainSection(ttt_steps=3, gradient_checkpointing=checkpointing, mixed_precision="no")
    target = Target(make_target(hidden_size=64, intermediate_size=160, head_dim=16))
    size = target_size(target.config, TargetSection(model=""))
    unroll = row_flops(settings, shape, target.config, size, True, tokens, columns)
    plain = settings.model_copy(update={"gradient_checkpointing": False})
    step = micro_batch(shape, plain, False, 1, tokens, columns)
    step()  # the first one of a process tries the kernels
    assert unroll == flops_of(step)
    whole = row_flops(settings, shape, target.config, size, False, tokens, columns)
    with sdpa_kernel(SDPBackend.MATH):
        layers = flops_of(lambda: target.states(torch.ones(1, tokens, dtype=torch.long)))
    masked = 7 * 4 * target.config.num_attention_heads * 16 * tokens * (tokens - 1) // 2
    assert whole - unroll == pytest.approx(layers - masked, rel=0.01)


# The kernel's high-water mark of this address space: what getrusage tells begins at the parent's size.
REAL_MEMORY = """
from pathlib import Path
from draftsmith.recipes.schema import TrainSection
from tests.test_plan import MEASURED, micro_batch, shape_of
peak = lambda: int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024
settings, shape = TrainSection(ttt_steps=3), shape_of(*MEASURED)
micro_batch(shape, settings, False, 1, 20, 10)()  # libraries and kernels are there
real = micro_batch(shape, settings, False, 4, 400, 300)
before = peak()
for _ in range(2):
    real()
print(peak() - before)
"""
MEASURED = (128, 2000, 1000)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="asks Linux")
def test_planned_memory_is_what_the_operating_system_counts() -> None:
    """Peak of resident memory of a process of its own: about what is alive, and at most as much again, which is what
    malloc keeps and the plan counts as its reserve."""
    root = Path(__file__).parents[1]
    environment = os.environ | {"PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", REAL_MEMORY]
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True)
    settings, shape = TrainSection(ttt_steps=3), shape_of(*MEASURED)
    planned = cost_of(settings, shape, 4, 400, 300)
    assert 0.9 < int(done.stdout) / sum(planned.values()) < 2


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_target_pass_is_near_what_a_real_one_takes(family: str) -> None:
    """An assumption, so a wide band: never less than 0.8 of what is alive, never more than twice."""
    model = make_target(family, hidden_size=64, intermediate_size=160, head_dim=16)
    target, ids = Target(model), torch.zeros(2, 200, dtype=torch.long)
    with Meter(lambda tensor: "") as meter:
        target.states(ids)
    planned = target_forward_bytes(model.config, target_size(model.config, TargetSection(model="")), 2, 200, 3)
    assert 0.8 < planned / meter.peak_bytes < 2


# Steps, files, problems: the script itself.


def test_plan_tells_the_steps_and_files_of_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe_file(tmp_path, train={"epochs": 1.5, "save_every_steps": 2, "keep_checkpoints": 2, "warmup_steps": 2})
    output = tmp_path / "run"
    write_conversations(output / "conversations.jsonl", 24)
    DraftVocab(torch.arange(0, 320, 2), 320).save(output / "draft_vocab.safetensors")
    before = set(tmp_path.rglob("*"))
    printed = plan(path, capsys)
    assert set(tmp_path.rglob("*")) == before  # a plan writes nothing
    train(path)
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    steps = lines[-1]["step"]
    assert printed["steps"].startswith(f"steps          {steps} of 4 rows on 1 process")
    assert f"2 steps, {2 / steps:.1%} of the run" in printed["warm-up"]
    recipe = load_recipe(path)
    shape = drafter_shape(recipe.drafter, make_target().config)
    parameters = trainable_parameters(shape)
    checkpoints = sorted((output / "checkpoints").iterdir())
    assert len(checkpoints) == 2
    for checkpoint in checkpoints:
        used = sum(file.stat().st_size for file in checkpoint.rglob("*") if file.is_file())
        assert 0 < used - checkpoint_bytes(parameters, 160, 320) < 50_000
    used = (output / "drafter/model.safetensors").stat().st_size
    assert 0 < used - drafter_bytes(parameters, 160, 320) < 3_000
    assert gigabytes(checkpoint_bytes(parameters, 160, 320)) in printed["disk"]
    assert "measured: " in plan(path, capsys)["time"]  # now the run's own speed is known


@pytest.mark.usefixtures("no_dry_run")
def test_plan_without_conversations_says_what_comes_first(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe_file(tmp_path, data={"prompts": "hf:org/name", "max_length": 100})  # not looked up
    printed = plan(path, capsys)
    assert "[`draftsmith regenerate` writes it]" in printed["reads"]
    assert "unknown until regenerate has run" in printed["rows, tokens"] and "unknown" in printed["steps, time"]
    assert "a batch of the longest possible rows" in printed["memory"] and "checkpoints of" in printed["disk"]
    assert "9 of 4 rows on 1 process" in plan(path, capsys, "train.max_steps=9", "train.warmup_steps=2")["steps"]
    with pytest.raises(UserError, match=r"run `draftsmith regenerate` first"):
        plan(path, capsys, "data.prompts=null")


def test_plan_of_regeneration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is read; of a hub dataset a sample, and eval.prompts not at all. Prompts without room are told."""
    import datasets

    read = []

    def rows() -> Iterator[dict[str, Any]]:
        for number in range(10**9):
            read.append(number)
            yield {"turns": [f"the cat {number}", "and?"]}

    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "the cat sat on the mat " * 20}) + "\n")
    data = {"prompts": "hf:org/name", "max_prompts": 1000, "contamination": "remove"}
    path = recipe_file(tmp_path, data=data, eval={"prompts": "mt_bench"})
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows())
    run_main(regenerate, path, "--plan")
    assert len(read) <= regeneration.HUB_SAMPLE + 1
    printed = labelled(capsys.readouterr().out)
    assert "1,000 conversations, 2,000 answers" in printed["to do"] and "at most" in printed["tokens"]
    small = f"data.prompts={prompts}", "data.max_length=16", "data.contamination=off"
    problems, said = refused(capsys, regenerate, path, *small)
    assert "no room for an answer" in problems and "writes" in said


@pytest.mark.parametrize("script", [regenerate, acceptance])
def test_plans_name_what_answers_do_not_follow(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "the cat"}) + "\n")
    evaluation = {"prompts": str(prompts), "max_new_tokens": 64}
    path = recipe_file(tmp_path, data={"prompts": str(prompts)}, eval=evaluation)
    make_tokenizer(roles={"eos_token": "<|pad|>"}).save_pretrained(tmp_path / "target")
    (tmp_path / "target/generation_config.json").write_text('{"eos_token_id": 0, "repetition_penalty": 1.05}')
    run_main(script, path, "--plan")
    said = capsys.readouterr().out
    assert "note: the chat template ends turns with '<|end|>'" in said
    assert "asks for repetition_penalty 1.05; it is not applied" in said


def test_plan_of_the_evaluation_before_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "the cat"}) + "\n")
    path = recipe_file(tmp_path, eval={"prompts": str(prompts), "max_new_tokens": 511})

    def printed(*overrides: str) -> str:
        run_main(acceptance, path, *overrides)
        return capsys.readouterr().out

    text = printed("--plan")
    assert "[`draftsmith train` writes it]" in text and "memory" in text
    problems, said = refused(capsys, acceptance, path, "eval.max_new_tokens=512")
    assert "eval.max_new_tokens 512 leaves no room for a prompt in the target's 512 positions" in problems
    assert "writes" in said
    for arguments in ([], [f"eval.drafter={tmp_path / 'gone'}", "--plan"]):
        with pytest.raises(UserError, match=r"no drafter|drafter: .* does not exist; run `draftsmith train` first"):
            printed(*arguments)


@pytest.mark.usefixtures("no_dry_run")
def test_a_plan_names_all_that_cannot_work_at_its_end(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe_file(tmp_path, train={"epochs": 5, "warmup_steps": 5})
    write_conversations(tmp_path / "run/conversations.jsonl", 4)
    DraftVocab.full(320).save(tmp_path / "run/draft_vocab.safetensors")
    monkeypatch.setattr(planning, "device_here", lambda _: Device("NVIDIA tiny", 1_000_000, is_cpu=False))
    problems, said = refused(capsys, eagle3, path)
    assert "train.warmup_steps 5 is not shorter than the run of 5 steps" in problems
    assert "do not fit the 1.0 MB of the device here (NVIDIA tiny)" in problems
    assert "it holds 320 draft tokens, drafter.vocab_size asks for 160" in problems
    assert "to lower the largest part: " in said and "writes" in said
    with pytest.raises(UserError, match=r"drafter\.vocab_size: 321 is more than the target's vocabulary of 320"):
        plan(path, capsys, "drafter.vocab_size=321")


@pytest.mark.usefixtures("no_dry_run")
def test_time_goes_by_the_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = recipe_file(tmp_path)
    write_conversations(tmp_path / "run/conversations.jsonl", 24)
    assert "[assumed: 50% of the" in plan(path, capsys)["time"]
    for device, wanted in ((GPU, "assumed: 30% of 989 TFLOP/s"), (UNKNOWN_GPU, "operations per device; --flops says")):
        monkeypatch.setattr(planning, "device_here", lambda _, device=device: device)
        assert wanted in plan(path, capsys)["time"]
    assert "assumed: --flops 2" in plan(path, capsys, "--flops=2")["time"]
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert "of 16 rows on 4 processes" in plan(path, capsys)["steps"]


@pytest.mark.parametrize("command", [regenerate, capture, eagle3])
def test_an_export_that_would_be_refused_is_told_before_anything_is_written(command: Any, tmp_path: Path) -> None:
    make_target("gemma2").save_pretrained(tmp_path / "target")
    make_tokenizer().save_pretrained(tmp_path / "target")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "the cat"}) + "\n")
    path = recipe_file(tmp_path, data={"prompts": str(prompts)}, drafter={"fc_norm": True, "norm_output": True})
    write_conversations(tmp_path / "run/conversations.jsonl", 4)
    DraftVocab(torch.arange(0, 320, 2), 320).save(tmp_path / "run/draft_vocab.safetensors")
    before = set(tmp_path.rglob("*"))
    for to, why in (
        (
            "sglang",
            r"SGLang gives a drafter the unscaled table.* by 5\.65685.*export\.to: .* exported to vllm, speculators",
        ),
        ("tensorrt-llm", "TensorRT-LLM embeds by the target's own module"),
    ):
        for plan in ([], ["--plan"]):
            with pytest.raises(UserError, match=rf"(?s)^export\.to: .*{why}"):
                run_main(command, path, f"export.to={to}", *plan)
    assert set(tmp_path.rglob("*")) == before


def test_last_logged_step_survives_a_torn_line(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert last_logged(metrics) == (0, None)
    metrics.write_text('{"step": 10, "tokens_per_second": 123}\n{"step": 20, "tok')
    assert last_logged(metrics) == (10, 123.0)


def test_sizes_and_times_in_words() -> None:
    assert [gigabytes(n) for n in (2.4e6, 12e6, 1.3e9, 142e9)] == ["2.4 MB", "12 MB", "1.3 GB", "142 GB"]
    assert [duration(s) for s in (5, 600, 7300, 2e5)] == ["5 seconds", "10.0 minutes", "2.0 hours", "2.3 days"]
