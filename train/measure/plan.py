"""What a training run would take, said before anything large is loaded: `--plan` of the training scripts.

Every line ends with where its number comes from: exact (arithmetic over the recipe and the config), counted (in the
files), measured (on this machine, now or by this run so far), assumed (the assumption named). "at most" is a bound,
"about" is none.

The unroll is run dry (`train.measure.dry_run`). What no dry run can show is left to arithmetic in `models.costs`: the
target's own pass, the optimiser, and what the process itself takes.
"""

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from draftsmith.data_gen.answers.prompt_sizes import planned, sampled
from draftsmith.data_gen.rows.training_rows import TrainingRow
from draftsmith.eval.recorded.replay import pass_tokens, replay_bytes
from draftsmith.models.costs import (
    PEAK_FLOPS_PER_SECOND,
    Device,
    TargetSize,
    TrainingStates,
    checkpoint_bytes,
    drafter_bytes,
    duration,
    gigabytes,
    matmul_flops_per_second,
    target_forward_bytes,
    target_forward_flops,
)
from draftsmith.models.drafters import trainable_parameters
from draftsmith.models.feature_drafter import DrafterConfig
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.prompts.reader import Rejects, read_training_prompts
from draftsmith.recipes.schema import CHAINS, Recipe, TrainSection
from draftsmith.train.measure.dry_run import (
    LAYER,
    LOGITS,
    WEIGHT_SHAPED,
    UnrollCost,
    unroll_cost,
)
from draftsmith.train.run.batches import BatchOrder
from draftsmith.train.run.loop import total_steps

# Share of a device's matrix-product rate that training reaches; what is missing goes to memory and launches.
GPU_UTILISATION = 0.3
CPU_UTILISATION = 0.5
# What CUDA itself takes on a device.
CUDA_CONTEXT_BYTES = 500_000_000
# Freed memory that an allocator keeps beside what is alive, as a share of a micro-batch's tensors. Batches differ in
# length, and glibc's malloc keeps the pieces: 0.4 on the demo, by docs/training.md.
CPU_RESERVE = 1.5
GPU_RESERVE = 0.15

TARGET_WEIGHTS = "the target's weights"
TARGET_PASS = "the target's pass"
UPDATE = "the optimiser's update"
KEPT = "the drafter's weights and AdamW's moments"
RESERVE = "freed memory that the allocator keeps"
REPLAY = "replaying validation answers"
PROCESS = "Python and libraries, or CUDA"

HOW_TO_LOWER = {
    LOGITS: "drafter.vocab_size",
    WEIGHT_SHAPED: "drafter.intermediate_size, drafter.vocab_size",
    LAYER: "train.gradient_checkpointing=true, train.batch_size (and accumulate), data.max_length, train.ttt_steps",
    TARGET_WEIGHTS: "target.dtype=bfloat16, train.shard_target (more processes), a quantised checkpoint, data.states",
    TARGET_PASS: "train.batch_size (and accumulate), data.max_length",
    UPDATE: "drafter.intermediate_size, drafter.vocab_size",
    KEPT: "train.zero_stage, drafter.intermediate_size, drafter.vocab_size",
    REPLAY: "eval.replay_batch_size, train.eval_replay, eval.tree",
}


# The data of a run: counted in its file, or bounded by its prompts.


@dataclass(frozen=True)
class DataSize:
    """Sizes of the training data. `basis` says how they were found: counted, upper bounds, or about right."""

    rows: int | None  # None: not known
    validation_rows: int
    tokens: int | None
    supervised: int | None
    longest_tokens: int  # of one row, up to its last supervised token
    longest_columns: int  # counted columns of one row
    mean_padded_tokens: float  # of a row in its micro-batch
    mean_columns: float
    basis: str
    counted: bool
    bounded: bool = True  # where not counted: upper bounds
    distinct_supervised: int | None = None
    validation_answers: int = 0  # where counted
    prompts_without_room: float = 0.0  # share of the prompts that leave no token to an answer

    @property
    def bound(self) -> str:
        return "" if self.counted else "at most " if self.bounded else "about "


def counted_data(
    rows: Sequence[TrainingRow], validation_rows: Sequence[TrainingRow], settings: TrainSection
) -> DataSize:
    """What is in the rows."""
    lengths = [max(end for _, end in row.spans) for row in rows]
    columns = [sum(max(0, end - start - 1) for start, end in row.spans) for row in rows]
    order = BatchOrder([len(row.input_ids) for row in rows], settings.batch_size, settings.seed)
    batches = [order.rows(number) for number in range(min(order.batches_per_epoch, 500))]
    padded = sum(
        sum(lengths[i] for i in batch) if settings.packing else len(batch) * max(lengths[i] for i in batch)
        for batch in batches
    )
    return DataSize(
        rows=len(rows),
        validation_rows=len(validation_rows),
        tokens=sum(len(row.input_ids) for row in rows),
        supervised=sum(end - start for row in rows for start, end in row.spans),
        longest_tokens=max(lengths),
        longest_columns=max(columns),
        mean_padded_tokens=padded / sum(map(len, batches)),
        mean_columns=sum(columns) / len(rows),
        basis="counted",
        counted=True,
        validation_answers=sum(len(row.spans) for row in validation_rows),
        distinct_supervised=len(
            {t for row in [*rows, *validation_rows] for start, end in row.spans for t in row.input_ids[start:end]}
        ),
    )


def expected_data(recipe: Recipe, tokenizer: Any) -> DataSize:
    """What the prompts allow, where regenerate has not run yet: upper bounds where all of them are rendered.

    Of many, a sample is rendered. Hub datasets are not read: of them only data.max_prompts is known, and every
    conversation is taken to be one row, as long as data.max_length allows.
    """
    names = [recipe.data.prompts] if isinstance(recipe.data.prompts, str) else list(recipe.data.prompts or [])
    limit, longest = recipe.data.max_prompts, recipe.data.max_length
    if any(name.startswith("hf:") for name in names):
        tokens = None if limit is None else limit * longest
        return DataSize(
            rows=limit,
            validation_rows=min(recipe.train.validation_conversations, (limit or 0) // 5),
            tokens=tokens,
            supervised=tokens,
            longest_tokens=longest,
            longest_columns=longest,
            mean_padded_tokens=longest,
            mean_columns=longest,
            basis="assumed: data.max_prompts rows of data.max_length tokens, all supervised; a template that rewrites "
            "its history makes a row of every turn",
            counted=False,
            bounded=False,
        )
    conversations = list(read_training_prompts(recipe.data, Rejects(), limit))
    sample = sampled(conversations)
    answer = recipe.data.generator.max_new_tokens
    sizes = [size for c in sample if (size := planned(tokenizer, c, answer, longest)) is not None]
    kept_out = min(recipe.train.validation_conversations, len(conversations) // 5)
    scale = len(conversations) / max(1, len(sample))
    left_out = int(kept_out / scale)

    def total(counts: Iterable[int]) -> int:
        """Of the training conversations: those kept out are taken to be the smallest."""
        return int(sum(sorted(counts)[left_out:]) * scale)

    rows = sum(size.rows for size in sizes)
    tokens, columns = sum(size.tokens for size in sizes), sum(sum(size.answers) for size in sizes)
    everything = len(sample) == len(conversations)
    largest = max(
        (min(longest, p + a) for size in sizes for p, a in zip(size.prompts, size.answers, strict=True)), default=1
    )
    most_columns = min(longest, max((sum(size.answers) for size in sizes), default=1))
    mean_prompt = sum(sum(size.prompts) for size in sizes) / max(1, rows)
    return DataSize(
        rows=max(1, total(size.rows for size in sizes)),
        validation_rows=int(sum(sorted((size.rows for size in sizes), reverse=True)[:left_out]) * scale),
        tokens=total(size.tokens for size in sizes),
        supervised=total(sum(size.answers) for size in sizes),
        longest_tokens=largest if everything else longest,
        longest_columns=most_columns if everything else longest,
        mean_padded_tokens=max(1.0, tokens / max(1, rows)),
        mean_columns=max(1.0, columns / max(1, rows)),
        basis=f"assumed: {len(conversations):,} conversations, a row for each turn, prompts of "
        f"{mean_prompt:.0f} tokens with the history{'' if everything else ' (sampled)'}, "
        f"answers of max_new_tokens {answer}",
        counted=False,
        bounded=everything,
        prompts_without_room=sum(size.first_prompt >= longest for size in sizes) / max(1, len(sizes)),
    )


# Memory.


@dataclass(frozen=True)
class Memory:
    """Peak memory of one process on its device, in bytes, by part. Parts are alive at the same moment."""

    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    @property
    def largest(self) -> str:
        return max((name for name in self.parts if name in HOW_TO_LOWER), key=self.parts.__getitem__)


def _how_to_lower(part: str, shape: DrafterConfig) -> str:
    """The keys that make this part smaller, of those that such a drafter has."""
    keys = HOW_TO_LOWER[part].split(", ")
    if not shape.own_head:
        keys = [key for key in keys if key != "drafter.vocab_size"]
    if shape.kind == "poss" and "drafter.intermediate_size" in keys:
        keys.append("drafter.specialists")
    return ", ".join(keys)


def memory_of(
    size: TargetSize,
    unroll: UnrollCost,
    target_pass_bytes: float,
    accumulates: bool,
    states: TrainingStates,
    on_cpu: bool,
    replay_bytes: float = 0,
) -> Memory:
    """Peak memory: what is always there, and the widest of four moments.

    Gradients of earlier micro-batches, and what processes send each other, are alive beside each moment. On a GPU AdamW
    works on all parameters that it has at once and needs one more copy.
    """
    always: dict[str, float] = {TARGET_WEIGHTS: size.weight_bytes, KEPT: states.weights + states.adamw_moments}
    kept = states.gradients * accumulates + states.buckets
    update = states.gradients + (0 if on_cpu else states.adamw_moments // 2)
    used = unroll.peak_by_kind.get(WEIGHT_SHAPED, 0) + kept + states.gathered
    moments: list[Mapping[str, float]] = [
        {TARGET_PASS: target_pass_bytes, WEIGHT_SHAPED: kept},
        unroll.peak_by_kind | {WEIGHT_SHAPED: used},
        {UPDATE: update, WEIGHT_SHAPED: states.buckets},
        {REPLAY: replay_bytes, WEIGHT_SHAPED: states.buckets + states.gathered},
    ]
    widest = max(moments, key=lambda moment: sum(moment.values()))
    process, reserve = (resident_bytes(), CPU_RESERVE) if on_cpu else (CUDA_CONTEXT_BYTES, GPU_RESERVE)
    own = {PROCESS: process, RESERVE: reserve * sum(widest.values())}
    return Memory(always | {name: count for name, count in widest.items() if count} | own)


def resident_bytes() -> int:
    """Memory that this process holds now."""
    return psutil.Process().memory_info().rss


# The plan.


def training_plan(
    recipe: Recipe,
    shape: DrafterConfig,
    target_config: Any,
    size: TargetSize,
    data: DataSize,
    vocab_is_there: bool,
    bf16: bool,
    device: Device,
    processes: int = 1,
    flops_per_second: float | None = None,
) -> Iterator[str]:
    """The lines of the plan, the things that cannot work last.

    Args:
        target_config: the target's text config.
        flops_per_second: what one device reaches, where the user says so.
    """
    settings, problems = recipe.train, []
    parameters = trainable_parameters(shape)
    head = "the target's head"
    if shape.own_head:
        head = f"head of {shape.draft_vocab_size:,} tokens: {millions(shape.hidden_size * shape.draft_vocab_size)}"
    per_step = settings.batch_size * settings.gradient_accumulation_steps * processes

    yield line("conversations", f"{recipe.conversations_path}", "there" if data.counted else "regenerate writes it")
    if data.rows is None:
        yield line("rows", "not known: hub datasets are not read for a plan; set data.max_prompts", "")
    else:
        yield line("rows", f"{data.bound}{data.rows:,}, {data.validation_rows:,} more for validation", data.basis)
        share = f", {data.bound}{data.supervised:,} supervised" + (
            f" ({data.supervised / data.tokens:.0%})" if data.counted and data.tokens and data.supervised else ""
        )
        yield line("tokens", f"{data.bound}{data.tokens:,}{share}", data.basis.split(":")[0])
    steps = None
    if data.rows is not None or settings.max_steps is not None:
        steps = total_steps(settings, data.rows or 1, processes)
        exact = "exact" if data.counted or settings.max_steps else "assumed rows"
        bound = data.bound if exact != "exact" else ""
        passes = f", {steps * per_step / data.rows:.2f} passes" if data.rows and data.counted else ""
        yield line(
            "steps", f"{bound}{steps:,} of {per_step:,} rows on {plural(processes, 'process', 'es')}{passes}", exact
        )
        yield line(
            "warm-up", f"{settings.warmup_steps:,} steps, {settings.warmup_steps / steps:.1%} of the run", "exact"
        )
        if settings.warmup_steps >= steps:
            problems.append(
                f"train.warmup_steps {settings.warmup_steps:,} is not shorter than the run of {steps:,} steps: the "
                "learning rate never reaches train.learning_rate"
            )
    yield line(
        "parameters",
        f"{millions(parameters)} trained ({head}), {millions(size.parameters)} frozen in the target",
        "exact",
    )
    if size.expert_parameters:
        yield line("", f"of the target {millions(size.active_parameters)} are read for a token", "exact")
    problems += _data_problems(recipe, shape, data, vocab_is_there)

    memory, unroll = _memory(recipe, shape, target_config, size, data, parameters, bf16, device, processes)
    yield line("memory", f"{gigabytes(memory.total)} at most, on each device, largest batch", "dry run")
    for name, count in sorted(memory.parts.items(), key=lambda item: -item[1]):
        basis = {TARGET_WEIGHTS: size.weight_basis, KEPT: "exact", RESERVE: "assumed"}
        basis |= {PROCESS: "measured now" if device.is_cpu else "assumed", TARGET_PASS: "assumed", REPLAY: "assumed"}
        yield line("", f"{gigabytes(count):>8}  {name}", basis.get(name, "dry run"))
    if settings.zero_stage:
        shared = (
            f"with what ZeRO {settings.zero_stage} shares out among {plural(processes, 'process', 'es')} counted so"
        )
        yield line("", shared, "assumed: DeepSpeed's buffers")
    yield line("", f"to lower the largest part: {_how_to_lower(memory.largest, shape)}", "")
    if not device.is_cpu:
        count, whose = size.weight_bytes, "per process"
        if settings.shard_target and processes > 1:  # rank 0 reads for all
            count, whose = size.parameters * size.dtype.itemsize, "in the first process"
        yield line("host memory", f"{gigabytes(count)} {whose} while the target is loaded", "exact")
    yield line("device here", f"{device.name}, {gigabytes(device.memory_bytes)}", "measured")
    if memory.total > device.memory_bytes:
        there = f"{gigabytes(device.memory_bytes)} of the device here ({device.name})"
        problems.append(f"{gigabytes(memory.total)} do not fit the {there}")

    one = checkpoint_bytes(parameters, shape.draft_vocab_size, shape.vocab_size)
    drafter = drafter_bytes(parameters, shape.draft_vocab_size, shape.vocab_size)
    checkpoints = settings.keep_checkpoints + (settings.keep_best is not None)
    disk = (checkpoints + 1) * one + drafter
    kept = f"{plural(checkpoints, 'checkpoint')} of {gigabytes(one)} and one being written"
    yield line("disk", f"{gigabytes(disk)}: {kept}, drafter {gigabytes(drafter)}", "exact")
    free = shutil.disk_usage(existing_parent(Path(recipe.output_dir))).free
    if disk > free:
        problems.append(f"{gigabytes(disk)} do not fit the {gigabytes(free)} that are free for {recipe.output_dir}")
    if steps is not None:
        yield from _time(
            recipe, target_config, size, data, unroll, steps, per_step, processes, device, flops_per_second, bf16
        )
    if settings.eval_replay:
        count = min(settings.eval_replay, settings.validation_conversations)
        yield line(
            "replay",
            f"{plural(count, 'validation conversation')} at every checkpoint, eval.tree {recipe.eval.tree.policy}: "
            f"replay_tau in {recipe.metrics_path.name}",
            "",
        )
    if settings.shard_target and processes > 1:
        count = sum(size.layer_parameters) * size.dtype.itemsize * (processes - 1) / processes
        yield line("network", f"{gigabytes(count)} to each process in every pass of the target, not timed", "exact")
    yield line("writes", f"{recipe.checkpoints_dir}, {recipe.metrics_path}, {recipe.drafter_dir}", "")
    for problem in problems:
        yield f"CANNOT WORK: {problem}"


def _data_problems(recipe: Recipe, shape: DrafterConfig, data: DataSize, vocab_is_there: bool) -> Iterator[str]:
    if data.prompts_without_room == 1:
        yield (
            f"no room for an answer: every sampled prompt takes all of data.max_length {recipe.data.max_length}; "
            "regenerate will reject them"
        )
    distinct, size = data.distinct_supervised, shape.draft_vocab_size
    if not vocab_is_there and distinct is not None and size < shape.vocab_size and distinct < size:
        yield (
            f"drafter.vocab_size {size:,} is more than the {distinct:,} distinct tokens that the rows supervise: "
            "rank_vocab will refuse it"
        )


def _memory(
    recipe: Recipe,
    shape: DrafterConfig,
    target_config: Any,
    size: TargetSize,
    data: DataSize,
    parameters: int,
    bf16: bool,
    device: Device,
    processes: int,
) -> tuple[Memory, UnrollCost]:
    rows = min(recipe.train.batch_size, data.rows or recipe.train.batch_size)
    unroll = unroll_cost(
        *(shape, target_config, size.dtype, recipe.train, bf16, rows, data.longest_tokens, data.longest_columns),
        device="cpu" if device.is_cpu else "cuda",
    )
    target_pass = target_forward_bytes(target_config, size, rows, data.longest_tokens, len(shape.capture_layers))
    if recipe.data.states is not None:  # read, and never computed
        target_pass = 0.0
    accumulates = recipe.train.gradient_accumulation_steps > 1
    replay = _replay_bytes(recipe, shape, target_config, size, data, device)
    offloaded = recipe.train.offload_optimizer and not device.is_cpu
    states = TrainingStates.of(parameters, processes, recipe.train.zero_stage, offloaded)
    return memory_of(size, unroll, target_pass, accumulates, states, device.is_cpu, replay), unroll


def _replay_bytes(
    recipe: Recipe, shape: DrafterConfig, target_config: Any, size: TargetSize, data: DataSize, device: Device
) -> float:
    """The widest batch of train.eval_replay, if all its answers were as long as the longest row."""
    if not recipe.train.eval_replay:
        return 0
    # Nobody knows how many turns a conversation has before they are counted; a batch holds no more than its size.
    rows, longest, tree = recipe.eval.replay_batch_size, data.longest_tokens, recipe.eval.tree
    if data.counted:
        rows = min(rows, data.validation_answers)
    width = len(shape.capture_layers)
    keys_values = 2 * shape.num_key_value_heads * shape.head_dim * 4 * shape.cached_layers
    states = width * shape.hidden_size * size.activation_bytes
    kept = replay_bytes(rows * longest, rows, longest, states, keys_values)
    tokens = max(longest, pass_tokens("cpu" if device.is_cpu else "cuda"))
    target_pass = 0 if recipe.data.states is not None else target_forward_bytes(target_config, size, 1, tokens, width)
    # Logits and probabilities of a call's nodes, in float32; the first call's prompt columns weigh no more.
    expanded = 1 if tree.policy in CHAINS else tree.width
    return kept + max(target_pass, 3 * 4 * rows * expanded * shape.draft_vocab_size)


def _time(
    recipe: Recipe,
    target_config: Any,
    size: TargetSize,
    data: DataSize,
    largest: UnrollCost,
    steps: int,
    per_step: int,
    processes: int,
    device: Device,
    flops_per_second: float | None,
    bf16: bool,
) -> Iterator[str]:
    """From this run's own speed where it has begun, else from operations and an assumed rate."""
    done, rate = last_logged(recipe.metrics_path)
    if rate and data.counted and data.tokens and data.rows:
        seconds = (steps - done) * per_step * data.tokens / data.rows / rate
        yield line(
            "time", f"{duration(max(0.0, seconds))} for {steps - done:,} steps", f"measured: {rate:,.0f} tokens/s"
        )
        return
    rows = recipe.train.batch_size
    tokens, columns = round(data.mean_padded_tokens), round(data.mean_columns)
    # Operations grow nearly in proportion to counted columns; the dry run was of the largest batch.
    unroll_flops = largest.flops * columns / max(1, min(data.longest_columns, data.longest_tokens))
    read = recipe.data.states is not None
    target_flops = target_forward_flops(target_config, size, rows, 0 if read else tokens, rows * columns)
    flops = (unroll_flops + target_flops) * recipe.train.gradient_accumulation_steps * steps
    if flops_per_second is not None:
        reached, basis = flops_per_second, f"assumed: --flops {flops_per_second / 1e12:g}"
    elif device.is_cpu:
        dtype = torch.bfloat16 if bf16 else torch.float32
        measured = matmul_flops_per_second(min(2048, rows * columns), min(4096, target_config.hidden_size), dtype)
        reached = measured * CPU_UTILISATION
        basis = f"assumed: {CPU_UTILISATION:.0%} of the {measured / 1e9:,.0f} GFLOP/s measured here"
    elif (peak := device.peak(PEAK_FLOPS_PER_SECOND)) is not None:
        reached = peak * GPU_UTILISATION
        basis = f"assumed: {GPU_UTILISATION:.0%} of {peak / 1e12:,.0f} TFLOP/s"
    else:
        yield line("time", f"{flops:.2e} operations per device; --flops says how many a second it reaches", "dry run")
        return
    yield line("time", f"{data.bound}{duration(flops / reached)}, {flops:.1e} operations per device", basis)


def last_logged(metrics: Path) -> tuple[int, float | None]:
    """(steps done, tokens a second) by the last line of metrics.jsonl; (0, None) where there is none."""
    lines = metrics.read_text().splitlines() if metrics.exists() else []
    for text in reversed(lines):
        try:
            record = parse_json(text)
            return int(record["step"]), float(record["tokens_per_second"])
        except (ValueError, KeyError, TypeError):
            continue  # a line torn by a kill
    return 0, None


def existing_parent(path: Path) -> Path:
    """The nearest folder on the way to `path` that is there."""
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def line(label: str, text: str, basis: str) -> str:
    return f"{label:<14} {text}" + (f"  [{basis}]" if basis else "")


def plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count:,} {noun}{ending if count != 1 else ''}"


def millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
