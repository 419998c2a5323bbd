"""`--plan` of the training scripts: prints what a run would take, before anything large is loaded.

Every line ends with where its number comes from: exact (arithmetic over the recipe and the config), counted (in the
files), measured (on this machine, now or by this run so far), assumed (the assumption is named), dry run
(`train.measure.dry_run`). "at most" marks an upper bound; "about" is no bound.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from draftsmith.data_gen.rows.training_rows import TrainingRow
from draftsmith.data_gen.states.jobs import free_bytes
from draftsmith.data_gen.states.store import Store
from draftsmith.data_gen.states.stored_target import stored_bytes
from draftsmith.eval.decoding.target_facts import bounded_rows, longest_row
from draftsmith.models.chat import load_config, tokenizer_fingerprint
from draftsmith.models.checkpoint import shape_of_run
from draftsmith.models.costs import (
    checkpoint_bytes,
    device_here,
    drafter_bytes,
    duration,
    gigabytes,
    matmul_flops_per_second,
    shared_out,
    target_size,
)
from draftsmith.models.drafters import on_meta
from draftsmith.models.feature_drafter import DrafterConfig
from draftsmith.models.target import check_precision
from draftsmith.recipes.command.launch import rank
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.reader import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.train.measure.memory import (
    KEPT,
    PROCESS,
    REPLAY,
    RESERVE,
    TARGET_PASS,
    TARGET_WEIGHTS,
    how_to_lower,
    planned_memory,
)
from draftsmith.train.measure.planned_run import PlannedRun, counted_data, expected_data
from draftsmith.train.measure.step_flops import StepFlops
from draftsmith.train.run.checkpoints import damage, list_checkpoints, read_state
from draftsmith.train.run.inputs import check_start_of_recipe, read_rows, read_run_vocab
from draftsmith.train.run.metrics_log import MetricsLog
from draftsmith.train.run.run_identity import digests_of, run_identity
from draftsmith.train.run.schedule import Schedule
from draftsmith.train.run.settings import trainee_of, uses_bf16
from draftsmith.train.run.state_sources import store_identity, store_of

# Share of a device's matrix-product rate that training reaches; the rest goes to memory traffic and launches.
GPU_UTILISATION = 0.3
CPU_UTILISATION = 0.5


def print_plan(recipe: Recipe, tokenizer: Any, tera_flops_per_second: float | None, processes: int) -> None:
    """Plans from the files that exist: conversations and vocabulary, or else the prompts. Rank 0 prints.

    Raises:
        UserError: a file does not fit the recipe, or there is nothing to plan from.
    """
    if rank() > 0:
        return
    section, fingerprint = recipe.target, tokenizer_fingerprint(tokenizer)
    config = load_config(section)
    text_config = config.get_text_config()
    shape = shape_of_run(recipe, config)
    vocab_is_there = recipe.draft_vocab_path.exists()
    vocab = read_run_vocab(recipe, text_config.vocab_size, fingerprint) if vocab_is_there else None
    check_start_of_recipe(recipe, text_config, shape, vocab, fingerprint)
    refusals: tuple[str, ...] = ()
    if recipe.conversations_path.exists() or recipe.data.prompts is None:
        rejects = Rejects()
        rows, validation_rows = read_rows(recipe, tokenizer, rejects)
        store = store_of(recipe, text_config, shape.capture_layers, [*rows, *validation_rows], fingerprint)
        train = recipe.train
        data = counted_data(rows, validation_rows, train.batch_size, train.seed, train.packing)
        if vocab is not None:
            refusals = tuple(_resumption(recipe, shape, rows, validation_rows, store, processes))
        if rejects.total:
            print(rejects.summary())
    else:
        if note := bounded_rows(recipe):
            print(note)
        store, data = None, expected_data(recipe, tokenizer)
    check_precision(section)
    size = target_size(config, section)
    if store is not None:
        print(store.summary())
        size = replace(size, weight_bytes=stored_bytes(store), weight_basis="its head and embeddings, exact")
    if recipe.train.shard_target:
        size = shared_out(size, processes)
    run = PlannedRun(
        recipe,
        shape,
        text_config,
        size,
        data,
        vocab_is_there,
        uses_bf16(recipe.train),
        device_here(section.device),
        processes,
        tera_flops_per_second and tera_flops_per_second * 1e12,
        refusals,
    )
    for text in plan_lines(run):
        print(text)


def _resumption(
    recipe: Recipe,
    shape: DrafterConfig,
    rows: Sequence[TrainingRow],
    validation_rows: Sequence[TrainingRow],
    store: Store | None,
    processes: int,
) -> Iterator[str]:
    """Why training would not resume from the last checkpoint, as far as can be told without the target's weights.
    Prints how the learning rate would go on."""
    there = list_checkpoints(recipe.checkpoints_dir)
    if not there or damage(there[-1]) is not None:  # training sets damaged ones aside
        return
    digests = digests_of(rows, validation_rows)
    identity = run_identity(recipe, shape, {}, processes, digests, store_identity(store))
    try:
        state = read_state(there[-1], identity, unknown=("target", "drafter.embedding_scale"))
    except UserError as error:
        yield from error.problems
        return
    schedule = Schedule(recipe.train, len(rows), processes).resumed(state["step"], state["micro_batches"])
    if note := schedule.jump(state["step"], state["steps"]):
        print(note)


def plan_lines(run: PlannedRun) -> Iterator[str]:
    """The lines of the plan; what cannot work comes last."""
    recipe, section, data = run.recipe, run.recipe.train, run.data
    problems = [*run.refusals]
    yield line("conversations", f"{recipe.conversations_path}", "there" if data.counted else "regenerate writes it")
    yield from _row_lines(run)
    steps = None
    if data.rows is not None or section.max_steps is not None:
        steps = Schedule(section, data.rows or 1, run.processes).steps
        yield from _step_lines(run, steps)
        if section.warmup_steps >= steps:
            problems.append(
                f"train.warmup_steps {section.warmup_steps:,} is not shorter than the run of {steps:,} steps: the "
                "learning rate never reaches train.learning_rate"
            )
    yield from _parameter_lines(run)
    problems += _data_problems(run)

    memory = planned_memory(run)
    yield line("memory", f"{gigabytes(memory.total)} at most, on each device, largest batch", "dry run")
    basis = {TARGET_WEIGHTS: run.size.weight_basis, KEPT: "exact", RESERVE: "assumed"}
    basis |= {PROCESS: "measured now" if run.device.is_cpu else "assumed", TARGET_PASS: "assumed", REPLAY: "assumed"}
    for name, count in sorted(memory.parts.items(), key=lambda item: -item[1]):
        yield line("", f"{gigabytes(count):>8}  {name}", basis.get(name, "dry run"))
    if section.zero_stage:
        shared = plural(run.processes, "process", "es")
        text = f"with what ZeRO {section.zero_stage} shares out among {shared} counted so"
        yield line("", text, "assumed: DeepSpeed's buffers")
    yield line("", f"to lower the largest part: {how_to_lower(memory.largest, run.shape)}")
    sharded = section.shard_target and run.processes > 1
    if not run.device.is_cpu:
        count, place = run.size.weight_bytes, "per process"
        if sharded:  # rank 0 reads for all
            count, place = run.size.parameters * run.size.dtype.itemsize, "in the first process"
        yield line("host memory", f"{gigabytes(count)} {place} while the target is loaded", "exact")
    here = gigabytes(run.device.memory_bytes)
    yield line("device here", f"{run.device.name}, {here}", "measured")
    if memory.total > run.device.memory_bytes:
        problems.append(f"{gigabytes(memory.total)} do not fit the {here} of the device here ({run.device.name})")

    size = run.parameters, run.shape.draft_vocab_size, run.shape.vocab_size
    one, drafter = checkpoint_bytes(*size), drafter_bytes(*size)
    checkpoints = section.keep_checkpoints + (section.keep_best is not None)
    disk = (checkpoints + 1) * one + drafter
    kept = f"{plural(checkpoints, 'checkpoint')} of {gigabytes(one)} and one being written"
    yield line("disk", f"{gigabytes(disk)}: {kept}, drafter {gigabytes(drafter)}", "exact")
    free = free_bytes(Path(recipe.output_dir))
    if disk > free:
        problems.append(f"{gigabytes(disk)} do not fit the {gigabytes(free)} that are free for {recipe.output_dir}")
    if steps is not None:
        yield _time_line(run, steps)
    if section.eval_replay:
        count = plural(min(section.eval_replay, section.validation_conversations), "validation conversation")
        tree = recipe.eval.tree.policy
        text = f"{count} at every checkpoint, eval.tree {tree}: replay_tau in {recipe.metrics_path.name}"
        yield line("replay", text)
    if sharded:
        count = sum(run.size.layer_parameters) * run.size.dtype.itemsize * (run.processes - 1) / run.processes
        yield line("network", f"{gigabytes(count)} to each process in every pass of the target, not timed", "exact")
    yield line("writes", f"{recipe.checkpoints_dir}, {recipe.metrics_path}, {recipe.drafter_dir}")
    for problem in problems:
        yield f"CANNOT WORK: {problem}"


def _row_lines(run: PlannedRun) -> Iterator[str]:
    data = run.data
    if data.rows is None:
        yield line("rows", "not known: hub datasets are not read for a plan; set data.max_prompts")
        return
    yield line("rows", f"{data.bound}{data.rows:,}, {data.validation_rows:,} more for validation", data.basis)
    share = f" ({data.supervised / data.tokens:.0%})" if data.counted and data.tokens and data.supervised else ""
    supervised = f"{data.bound}{data.supervised:,} supervised{share}"
    yield line("tokens", f"{data.bound}{data.tokens:,}, {supervised}", data.basis.split(":")[0])


def _step_lines(run: PlannedRun, steps: int) -> Iterator[str]:
    section, data = run.recipe.train, run.data
    exact = data.counted or section.max_steps is not None
    processes = plural(run.processes, "process", "es")
    passes = f", {steps * rows_per_step(run) / data.rows:.2f} passes" if data.rows and data.counted else ""
    text = f"{'' if exact else data.bound}{steps:,} of {rows_per_step(run):,} rows on {processes}{passes}"
    yield line("steps", text, "exact" if exact else "assumed rows")
    yield line("warm-up", f"{section.warmup_steps:,} steps, {section.warmup_steps / steps:.1%} of the run", "exact")


def _parameter_lines(run: PlannedRun) -> Iterator[str]:
    shape, size = run.shape, run.size
    head = "the target's head"
    if shape.own_head:
        head = f"head of {shape.draft_vocab_size:,} tokens: {millions(shape.hidden_size * shape.draft_vocab_size)}"
    trained = f"{millions(run.parameters)} trained ({head})"
    yield line("parameters", f"{trained}, {millions(size.parameters)} frozen in the target", "exact")
    if size.expert_parameters:
        yield line("", f"of the target {millions(size.active_parameters)} are read for a token", "exact")
    data, ranked = run.data, shape.draft_vocab_size
    distinct = data.supervised if data.distinct_supervised is None else data.distinct_supervised
    by_answers = not (run.vocab_is_there or run.recipe.data.ranking.sources or run.recipe.drafter.init_from)
    if by_answers and distinct is not None and distinct < ranked < shape.vocab_size:
        text = f"{data.bound}{distinct:,} of {ranked:,} tokens are in the answers; rank-vocab adds the lowest other ids"
        yield line("draft vocab", text, data.basis.split(":")[0])


def _data_problems(run: PlannedRun) -> Iterator[str]:
    if run.data.prompts_without_room == 1:
        yield (
            f"no room for an answer: every sampled prompt takes all of the {longest_row(run.recipe):,} tokens of a row "
            "(data.max_length, or the target's positions where they are fewer); regenerate will reject them"
        )


def _time_line(run: PlannedRun, steps: int) -> str:
    """The time by this run's own speed where it has begun, else by operations and an assumed rate."""
    section, data = run.recipe.train, run.data
    done, rate = last_logged(run.recipe.metrics_path)
    if rate and data.counted and data.tokens and data.rows:
        seconds = (steps - done) * rows_per_step(run) * data.tokens / data.rows / rate
        text = f"{duration(max(0.0, seconds))} for {steps - done:,} steps"
        return line("time", text, f"measured: {rate:,.0f} tokens/s")
    rows = section.batch_size
    tokens, columns = round(data.mean_padded_tokens), round(data.mean_columns)
    needed = StepFlops(trainee_of(section, on_meta(run.shape)), run.target_config, run.size, run.reads_states)
    flops = (
        steps
        * section.gradient_accumulation_steps
        * needed.of_counts(
            tokens=rows * tokens,
            causal_keys=rows * tokens * (tokens + 1) / 2,
            pairs=[rows * columns] * section.ttt_steps,  # as if every column counted at every step
            keys=[rows * columns * (tokens - columns / 2 + step) for step in range(section.ttt_steps)],
        )
    )
    if run.flops_per_second is not None:
        reached, basis = run.flops_per_second, f"--flops {run.flops_per_second / 1e12:g}"
    elif run.device.is_cpu:
        dtype = torch.bfloat16 if run.bf16 else torch.float32
        measured = matmul_flops_per_second(min(2048, rows * columns), min(4096, run.target_config.hidden_size), dtype)
        reached = measured * CPU_UTILISATION
        basis = f"{CPU_UTILISATION:.0%} of the {measured / 1e9:,.0f} GFLOP/s measured here"
    elif run.device.peaks is not None:
        peak = run.device.peaks[0]
        reached, basis = peak * GPU_UTILISATION, f"{GPU_UTILISATION:.0%} of {peak / 1e12:,.0f} TFLOP/s"
    else:
        return line("time", f"{flops:.2e} operations per device; --flops says how many a second it reaches", "exact")
    text = f"{data.bound}{duration(flops / reached)}, {flops:.1e} operations per device"
    return line("time", text, f"assumed: {basis}")


def rows_per_step(run: PlannedRun) -> int:
    """Training rows of a full optimiser step, over all processes."""
    return run.recipe.train.batch_size * run.recipe.train.gradient_accumulation_steps * run.processes


def last_logged(metrics: Path) -> tuple[int, float | None]:
    """(steps done, tokens per second) of the last line of metrics.jsonl; (0, None) where there is none."""
    return max(MetricsLog(metrics).values("tokens_per_second").items(), default=(0, None))


def line(label: str, text: str, basis: str = "") -> str:
    return f"{label:<14} {text}" + (f"  [{basis}]" if basis else "")


def plural(count: int, noun: str, ending: str = "s") -> str:
    return f"{count:,} {noun}{ending if count != 1 else ''}"


def millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
