"""`--plan` against what runs really take: parameters, bytes alive, operations, steps, files on disk."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, GPT2Config

from draftsmith.data_gen import capture, regenerate
from draftsmith.data_gen.answers import prompt_sizes
from draftsmith.eval import acceptance
from draftsmith.models.alignment import columns_of
from draftsmith.models.chat import render_prompt
from draftsmith.models.costs import (
    BUCKET,
    Device,
    Meter,
    TrainingStates,
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
from draftsmith.models.prompt import Prompt
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.prompts.reader import Rejects, read_conversations
from draftsmith.recipes.schema import TargetSection, TrainSection
from draftsmith.train import eagle3
from draftsmith.train.loss.unroll import TrainingTimeTest, teacher_of
from draftsmith.train.measure.dry_run import LAYER, LOGITS, unroll_peak
from draftsmith.train.measure.memory import RESERVE, Memory, memory_of
from draftsmith.train.measure.plan import last_logged, plan_lines
from draftsmith.train.measure.planned_run import DataSize, PlannedRun, counted_data, expected_data
from draftsmith.train.run.schedule import Schedule
from draftsmith.train.run.settings import trainee_of
from tests.conftest import make_target, make_tokenizer
from tests.tiny_vision import FAMILIES, make_vision_target
from tests.training_runs import no_dry_run as no_dry_run
from tests.training_runs import run_main, train, write_conversations

GPU = Device("NVIDIA H100 80GB HBM3", 85_000_000_000, is_cpu=False)


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
    """What --plan prints: text by label; problems under CANNOT WORK."""
    capsys.readouterr()
    run_main(eagle3, path, *overrides, "--plan")
    printed: dict[str, str] = {}
    for text in capsys.readouterr().out.splitlines():
        label = "CANNOT WORK" if text.startswith("CANNOT WORK") else text[:14].strip()
        printed[label] = printed.get(label, "") + text.removeprefix("CANNOT WORK:") + "\n"
    return printed


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


def cost_of(shape: Eagle3Config, section: TrainSection, bf16: bool, *sizes: int, device: str = "cpu") -> dict[str, int]:
    """The dry run's result for rows, tokens and columns in these numbers."""
    return unroll_peak(shape, None, torch.float32, partial(trainee_of, section), False, bf16, *sizes, device=device)


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
    settings, shape = TrainSection.model_validate({"ttt_steps": 3} | changes), shape_of()
    planned = cost_of(shape, settings, bf16, rows, tokens, columns)
    real = micro_batch(shape, settings, bf16, rows, tokens, columns)
    real()  # the kernel of attention was tried
    with Meter(lambda tensor: "") as meter:
        real()
    assert sum(planned.values()) == meter.peak_bytes


def test_the_dry_run_names_the_parts() -> None:
    """What the MLPs of three steps keep for the backward pass; and logits, of which a long row has no more alive."""
    shape = shape_of(draft_vocab=300)
    short, long = (
        cost_of(shape, TrainSection(ttt_steps=3), False, 2, tokens, tokens - 50) for tokens in (8_000, 16_000)
    )
    assert short[LAYER] >= 3 * 2 * 7950 * 2 * shape.intermediate_size * 4
    assert long[LAYER] > 1.9 * short[LAYER]
    assert 0 < long[LOGITS] < 1.5 * short[LOGITS]


def test_a_device_with_longer_products_has_more_logits_alive() -> None:
    """As its head's pass has it: chunks of 2^27 in place of 2^21, here all 300 * 3 * 7,950 at once."""
    cost = partial(cost_of, shape_of(draft_vocab=300), TrainSection(ttt_steps=3), False, 1)
    here, there = (cost(8000, 7950, device=device)[LOGITS] for device in ("cpu", "cuda"))
    assert there >= 300 * 3 * 7949 * 4 > here


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
    planned = cost_of(shape, settings, False, 4, 400, 300)
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


def test_a_config_without_the_mlp_s_width_counts_as_four_times_its_hidden_size() -> None:
    config = GPT2Config(n_embd=64, n_layer=7, n_head=4, vocab_size=300)
    size = target_size(config, TargetSection(model=""))
    planned = target_forward_bytes(config, size, 2, 200, 3)
    config.intermediate_size = 256
    assert planned == target_forward_bytes(config, size, 2, 200, 3)


def test_memory_takes_the_widest_moment() -> None:
    size = target_size(make_target().config, TargetSection(model="", dtype="float32"))
    unroll = {LAYER: 1000}

    def memory(parameters: int, target_pass: float, accumulates: bool = False, processes: int = 1) -> Memory:
        states = TrainingStates.of(parameters, processes)
        return memory_of(size, unroll, target_pass, accumulates, states, on_cpu=False)

    wide_unroll = memory(10, 5.0)
    assert wide_unroll.parts[LAYER] == 1000
    wide_pass = memory(10, 5000.0)
    assert LAYER not in wide_pass.parts and wide_pass.total > wide_unroll.total
    wide_update = memory(10_000, 5.0)
    assert LAYER not in wide_update.parts
    several = memory(10, 5.0, accumulates=True, processes=2)
    extra = 2 * 4 * 10  # gradients of earlier micro-batches, and DDP's buckets
    assert several.total - several.parts[RESERVE] == pytest.approx(
        wide_unroll.total - wide_unroll.parts[RESERVE] + extra
    )


def test_zero_shares_out_what_its_stage_says() -> None:
    one, moments = 4 * 1000, 8 * 1000
    assert TrainingStates.of(1000) == TrainingStates(one, moments, one)
    assert TrainingStates.of(1000, 4) == TrainingStates(one, moments, one, one)
    stages = [TrainingStates.of(1000, 4, stage) for stage in (1, 2, 3)]
    assert [s.adamw_moments for s in stages] == [moments // 4] * 3
    assert [s.gradients for s in stages] == [one, one // 4, one // 4]
    assert [s.weights for s in stages] == [
        one + one // 4,
        one + one // 4,
        2 * one // 4,
    ]  # the pieces to be updated, too
    assert [s.gathered for s in stages] == [0, 0, one]
    offloaded = TrainingStates.of(1000, 4, 3, offloaded=True)
    assert (offloaded.weights, offloaded.adamw_moments) == (one // 4, 0)
    assert TrainingStates.of(4 * BUCKET, 4, 2).buckets == 2 * 4 * BUCKET


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
    assert "CANNOT WORK" not in printed

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
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"turns": [f"the cat {i}", "and?"]}) + "\n" for i in range(30)))
    data = {"prompts": str(prompts), "max_length": 100, "generator": {"max_new_tokens": 20}}
    path = recipe_file(tmp_path, data=data)
    printed = plan(path, capsys)
    assert "[regenerate writes it]" in printed["conversations"]
    assert "at most 52, 8 more for validation" in printed["rows"] and "assumed" in printed["rows"]
    assert "at most" in printed["tokens"] and "at most" in printed["time"]
    hub = plan(path, capsys, "data.prompts=hf:org/name")  # not looked up
    assert "not known" in hub["rows"] and "steps" not in hub
    bounded = plan(path, capsys, "data.prompts=hf:org/name", "data.max_prompts=1000")
    assert "about 1,000" in bounded["rows"] and "about 100,000" in bounded["tokens"]
    assert "assumed: data.max_prompts rows" in bounded["rows"] and "about" in bounded["steps"]
    with pytest.raises(UserError, match=r"run `draftsmith regenerate` first"):
        plan(path, capsys, "data.prompts=null")


@pytest.mark.parametrize("max_length", [200, 4000])
def test_bounds_hold_where_every_turn_is_a_row(tmp_path: Path, max_length: int) -> None:
    """Eight conversations of twelve turns, as a template leads to that rewrites its history."""
    prompts = tmp_path / "prompts.jsonl"
    questions = [f"the cat sat on the mat {turn}" for turn in range(12)]
    prompts.write_text("".join(json.dumps({"turns": [f"{n}", *questions[1:]]}) + "\n" for n in range(8)))
    data = {"prompts": str(prompts), "max_length": max_length, "generator": {"max_new_tokens": 30}}
    recipe = load_recipe(recipe_file(tmp_path, data=data, train={"validation_conversations": 1}))
    tokenizer, answer = make_tokenizer(), " the cat" * 14
    output = tokenizer(answer)["input_ids"] + [4]
    assert len(output) <= 30
    rows = tokens = file_bytes = 0
    for conversation in list(read_conversations(str(prompts), Rejects()))[1:]:  # one is kept out
        history: list[dict[str, str]] = []
        for message in conversation.messages:
            history.append(message)
            ids = list(render_prompt(tokenizer, history))
            if len(ids) + len(output) > max_length:
                break
            rows, tokens = rows + 1, tokens + len(ids) + len(output)
            file_bytes += len(json.dumps([ids, output, answer]))
            history.append({"role": "assistant", "content": answer})
    planned = expected_data(recipe, tokenizer)
    assert planned.bounded and planned.rows and planned.tokens and planned.supervised
    assert rows <= planned.rows == 84 and tokens <= planned.tokens <= 84 * max_length
    assert planned.supervised >= rows * len(output) and planned.longest_tokens <= max_length
    sizes = [prompt_sizes.planned(tokenizer, c, 30, max_length) for c in read_conversations(str(prompts), Rejects())]
    assert file_bytes <= sum(size.file_bytes for size in sizes if size)


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
    printed = {}
    monkeypatch.setattr(datasets, "load_dataset", lambda *args, **kwargs: rows())
    for name, overrides in {
        "hub": [],
        "unknown": ["data.max_prompts=null"],
        "long": [f"data.prompts={prompts}", "data.max_length=16", "data.contamination=off"],
    }.items():
        run_main(regenerate, path, *overrides, "--plan")
        printed[name] = capsys.readouterr().out
    assert len(read) <= 2 * (prompt_sizes.HUB_SAMPLE + 1)
    assert "1,000 conversations, 2,000 answers" in printed["hub"] and "tokens         about" in printed["hub"]
    assert "at most" not in printed["hub"].split("memory")[0] and "CANNOT WORK" not in printed["hub"]
    assert "to do          unknown" in printed["unknown"] and "data.max_prompts" in printed["unknown"]
    assert "CANNOT WORK: no room for an answer" in printed["long"]


@pytest.mark.parametrize("script", [regenerate, acceptance])
def test_plans_name_what_answers_do_not_follow(script: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "the cat"}) + "\n")
    path = recipe_file(tmp_path, data={"prompts": str(prompts)}, eval={"prompts": str(prompts)})
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
    assert "run `draftsmith train`" in text and "memory" in text and "CANNOT WORK" not in text
    full = printed("eval.max_new_tokens=512", "--plan")
    assert "CANNOT WORK: eval.max_new_tokens 512 leaves no room for a prompt in the target's 512 positions" in full
    for arguments in ([], [f"eval.drafter={tmp_path / 'gone'}", "--plan"]):
        with pytest.raises(UserError, match=r"no drafter|drafter: .* does not exist; run `draftsmith train` first"):
            printed(*arguments)


@pytest.mark.usefixtures("no_dry_run")
def test_plan_says_plainly_what_cannot_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = recipe_file(tmp_path, train={"epochs": 5, "warmup_steps": 5})
    write_conversations(tmp_path / "run/conversations.jsonl", 4)
    lines = plan(path, capsys, "drafter.vocab_size=300")
    assert "train.warmup_steps 5 is not shorter than the run of 5 steps" in lines["CANNOT WORK"]
    assert "of 300 tokens are in the answers; rank-vocab adds the lowest other ids" in lines["draft vocab"]
    with pytest.raises(UserError, match=r"drafter\.vocab_size: 321 is more than the target's vocabulary of 320"):
        plan(path, capsys, "drafter.vocab_size=321")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "the cat sat on the mat " * 20}) + "\n")
    problems = plan(path, capsys, "output_dir=nowhere", f"data.prompts={prompts}", "data.max_length=16")["CANNOT WORK"]
    assert "no room" in problems


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
            r"by 5\.65685, and SGLang gives a drafter.*export\.to: .* exported to vllm, speculators",
        ),
        ("tensorrt-llm", "TensorRT-LLM embeds by the target's own module"),
    ):
        for plan in ([], ["--plan"]):
            with pytest.raises(UserError, match=rf"(?s)^export\.to: .*{why}"):
                run_main(command, path, f"export.to={to}", *plan)
    assert set(tmp_path.rglob("*")) == before


def lines_of(path: Path, data: DataSize, device: Device, **settings: Any) -> str:
    recipe = load_recipe(path)
    config = make_target().config
    size = target_size(config, TargetSection(model="", dtype="float32"))
    return "\n".join(
        plan_lines(
            PlannedRun(
                recipe, drafter_shape(recipe.drafter, config), config, size, data, True, False, device, **settings
            )
        )
    )


@pytest.mark.usefixtures("no_dry_run")
def test_plan_compares_with_the_device_and_names_what_to_lower(tmp_path: Path) -> None:
    path = recipe_file(tmp_path)
    rows = DataSize(100, 4, 5000, 3000, 60, 40, 50.0, 30.0, "counted", counted=True)
    text = lines_of(path, rows, Device("NVIDIA tiny", 1_000_000, is_cpu=False))
    assert "do not fit the 1.0 MB of the device here (NVIDIA tiny)" in text
    assert "to lower the largest part: " in text
    assert "operations per device; --flops says" in text  # a device whose rate nobody told
    assert "assumed: 30% of 989 TFLOP/s" in lines_of(path, rows, GPU)
    assert "assumed: --flops 2" in lines_of(path, rows, GPU, flops_per_second=2e12)
    assert "CANNOT WORK" not in lines_of(path, rows, GPU)
    four = lines_of(path, rows, GPU, processes=4)
    assert f"{Schedule(TrainSection(batch_size=4), 100, 4).steps} of 16 rows on 4 processes" in four


def test_counted_data_is_in_the_rows() -> None:
    from draftsmith.data_gen.rows.training_rows import Turn, rows_of

    rows = list(rows_of("a", [Turn(Prompt([1, 2, 3]), [4, 5, 6]), Turn(Prompt([1, 2, 3, 4, 5, 6, 7]), [8, 9])])) + list(
        rows_of("b", [Turn(Prompt([1]), [2, 3])])
    )
    data = counted_data(rows, [], batch_size=2, seed=0, packing=False)
    assert (data.rows, data.tokens, data.supervised) == (2, 12, 7)
    assert (data.longest_tokens, data.longest_columns) == (9, 3)
    assert data.mean_padded_tokens == 9  # both rows in one micro-batch
    assert data.distinct_supervised == 7


def test_last_logged_step_survives_a_torn_line(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert last_logged(metrics) == (0, None)
    metrics.write_text('{"step": 10, "tokens_per_second": 123}\n{"step": 20, "tok')
    assert last_logged(metrics) == (10, 123.0)


def test_sizes_and_times_in_words() -> None:
    assert [gigabytes(n) for n in (2.4e6, 12e6, 1.3e9, 142e9)] == ["2.4 MB", "12 MB", "1.3 GB", "142 GB"]
    assert [duration(s) for s in (5, 600, 7300, 2e5)] == ["5 seconds", "10.0 minutes", "2.0 hours", "2.3 days"]
