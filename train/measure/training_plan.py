"""`--plan` of the training scripts: what a run would take, before anything large is loaded."""

from dataclasses import replace
from pathlib import Path

import torch

from draftsmith.data_gen.states.store import taught_tokens
from draftsmith.data_gen.states.stored_target import HEAD
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.checkpoint import shape_of_run
from draftsmith.models.sizes import (
    checkpoint_bytes,
    device_here,
    drafter_bytes,
    duration,
    free_bytes,
    gigabytes,
    matmul_flops_per_second,
    plan_memory,
    shared_out,
)
from draftsmith.models.target_files import TargetFiles, bounded_rows
from draftsmith.recipes.command.launch import rank
from draftsmith.recipes.command.plan import PlanLines, plural
from draftsmith.recipes.command.stages import made_by
from draftsmith.recipes.errors import collecting_problems
from draftsmith.recipes.prompts.prompt_reader import Rejects
from draftsmith.recipes.schema import Recipe
from draftsmith.train.measure.dry_run import HOW_TO_LOWER, TARGET_WEIGHTS, PlannedRun, planned_memory, row_flops
from draftsmith.train.run.batches import BatchOrder, computed_tokens
from draftsmith.train.run.checkpoints import damage, digests_of, list_checkpoints, read_state, run_identity
from draftsmith.train.run.engine import uses_bf16
from draftsmith.train.run.run_log import MetricsLog
from draftsmith.train.run.schedule import Schedule
from draftsmith.train.run.state_sources import store_identity, store_of
from draftsmith.train.run.training_inputs import check_start_of_recipe, read_rows, read_run_vocab

# Share of a device's matrix-product rate that training reaches; the rest goes to memory traffic and launches.
GPU_UTILISATION = 0.3
CPU_UTILISATION = 0.5


def print_plan(recipe: Recipe, files: TargetFiles, tera_flops_per_second: float | None, processes: int) -> None:
    """Rank 0 plans from the files that are there. Raises UserError with everything that cannot work.
    `tera_flops_per_second` is what one device reaches; None: assumed."""
    if rank() > 0:
        return
    with PlanLines() as plan:
        run = _read(plan, recipe, files, processes)
        _plan_steps(plan, run, tera_flops_per_second)
        _plan_memory(plan, run)
        _plan_disk(plan, run)
        plan.writes(recipe.checkpoints_dir, recipe.metrics_path, recipe.drafter_dir)


def _read(plan: PlanLines, recipe: Recipe, files: TargetFiles, processes: int) -> PlannedRun:
    """Checks the files that are there as a run does, as far as that is known without the target's weights."""
    shape = shape_of_run(recipe, files)
    states = [made_by("capture", recipe)] * (recipe.data.states is not None)
    plan.reads(made_by("regenerate", recipe), made_by("rank-vocab", recipe), *states)
    vocab, store, rejects = None, None, Rejects()
    rows, validation_rows = list[TrainingRow](), list[TrainingRow]()
    with collecting_problems(plan.problems):
        if recipe.draft_vocab_path.exists():
            vocab = read_run_vocab(recipe, files)
        check_start_of_recipe(recipe, files, shape, vocab)
    files.check_precision()
    size = files.size
    if recipe.conversations_path.exists() or recipe.data.prompts is None:
        rows, validation_rows = read_rows(recipe, files, rejects)
        if states and states[0][1].exists():
            store = store_of(recipe, files, shape.capture_layers, [*rows, *validation_rows])
    elif note := bounded_rows(recipe, files):
        print(note)
    if rejects.total:
        plan.line("rejected", rejects.summary())
    if store is not None:
        plan.line("states", store.summary())
        head = store.manifest.files[HEAD]["bytes"]
        size = replace(size, weight_bytes=head, weight_basis="its head and embeddings, exact")
    if recipe.train.shard_target:
        size = shared_out(size, processes)
    run = PlannedRun(recipe, files, shape, size, rows, validation_rows, device_here(recipe.target.device), processes)
    there = list_checkpoints(recipe.checkpoints_dir)
    if rows and vocab is not None and there and damage(there[-1]) is None:  # training sets damaged ones aside
        digests = digests_of(rows, validation_rows)
        identity = run_identity(recipe, files, shape, {}, processes, digests, store_identity(store))
        with collecting_problems(plan.problems):
            state = read_state(there[-1], identity, unknown=("target", "drafter.embedding_scale"))
            schedule = Schedule(recipe.train, len(rows), processes).resumed(state["step"], state["micro_batches"])
            if note := schedule.jump(state["step"], state["steps"]):
                print(note)
    return run


def _plan_steps(plan: PlanLines, run: PlannedRun, tera_flops_per_second: float | None) -> None:
    section, rows, shape = run.recipe.train, run.rows, run.shape
    head = "the target's head"
    if shape.own_head:
        head = f"head of {shape.draft_vocab_size:,} tokens: {millions(shape.hidden_size * shape.draft_vocab_size)}"
    trained = f"{millions(run.parameters)} trained ({head}), {millions(run.size.parameters)} frozen in the target"
    plan.line("parameters", trained, "exact")
    if not rows:
        plan.line("steps, time", "unknown until regenerate has run")
        return
    plan.line("rows", f"{len(rows):,}, {len(run.validation_rows):,} more for validation", "counted")
    tokens = sum(len(row.input_ids) for row in rows)
    supervised = sum(end - start for row in rows for start, end in row.spans)
    plan.line("tokens", f"{tokens:,}, {supervised:,} supervised ({supervised / tokens:.0%})", "counted")
    schedule = Schedule(section, len(rows), run.processes)
    steps, per_step = schedule.steps, schedule.micro_batches_per_step * section.batch_size
    text = f"{steps:,} of {per_step:,} rows on {plural(run.processes, 'process', 'es')}"
    plan.line("steps", f"{text}, {steps * per_step / len(rows):.2f} passes", "exact")
    if section.warmup_steps >= steps:
        plan.problems.append(
            f"train.warmup_steps {section.warmup_steps:,} is not shorter than the run of {steps:,} steps: the "
            "learning rate never reaches train.learning_rate"
        )
    done, rate = max(MetricsLog(run.recipe.metrics_path).values("tokens_per_second").items(), default=(0, 0))
    if rate:
        seconds = max(0, steps - done) * per_step * tokens / len(rows) / rate
        plan.line("time", f"{duration(seconds)} for {steps - done:,} steps", f"measured: {rate:,.0f} tokens/s")
    else:
        plan.line("time", *_time(run, steps, tera_flops_per_second))


def _time(run: PlannedRun, steps: int, tera_flops_per_second: float | None) -> tuple[str, str]:
    """(the time, its basis) by operations and an assumed rate, for a run that has not begun."""
    section, rows = run.recipe.train, run.rows
    order = BatchOrder([len(row.input_ids) for row in rows], section.batch_size, section.seed)
    padded = computed_tokens(order, rows, section.packing) // len(rows)
    columns = sum(taught_tokens(row.spans) for row in rows) // len(rows)
    of_row = row_flops(section, run.shape, run.files.text_config, run.size, run.reads_states, padded, columns)
    read = steps * section.gradient_accumulation_steps * section.batch_size
    flops = float(read * of_row)
    if run.processes == 1 and run.reads_states and run.size.dtype == torch.float32:  # `train.run.likeliest_tokens`
        left_out = (run.shape.vocab_size - run.shape.draft_vocab_size) * run.shape.hidden_size
        flops -= 2 * left_out * columns * max(0, read - len(rows))
    if tera_flops_per_second is not None:
        reached, basis = tera_flops_per_second * 1e12, f"--flops {tera_flops_per_second:g}"
    elif run.device.type == "cpu":
        dtype = torch.bfloat16 if uses_bf16(section) else torch.float32
        most = min(2048, section.batch_size * max(1, columns)), min(4096, run.files.text_config.hidden_size)
        measured = matmul_flops_per_second(*most, dtype)
        reached = measured * CPU_UTILISATION
        basis = f"{CPU_UTILISATION:.0%} of the {measured / 1e9:,.0f} GFLOP/s measured here"
    elif (peak := run.device.peak_flops) is not None:
        reached, basis = peak * GPU_UTILISATION, f"{GPU_UTILISATION:.0%} of {peak / 1e12:,.0f} TFLOP/s"
    else:
        return f"{flops:.2e} operations per device; --flops says how many a second it reaches", "dry run"
    return f"{duration(flops / reached)}, {flops:.1e} operations per device", f"assumed: {basis}"


def _plan_memory(plan: PlanLines, run: PlannedRun) -> None:
    parts, section = planned_memory(run), run.recipe.train
    at_most = "the largest batch" if run.rows else "a batch of the longest possible rows"
    plan_memory(plan, sum(parts.values()), f"one process with {at_most}", run.device, "dry run")
    for name, count in sorted(parts.items(), key=lambda part: -part[1]):
        plan.line("", f"{gigabytes(count):>8}  {name}", run.size.weight_basis * (name == TARGET_WEIGHTS))
    largest = max(parts.keys() & HOW_TO_LOWER.keys(), key=parts.__getitem__)
    plan.line("", f"to lower the largest part: {HOW_TO_LOWER[largest]}")
    if section.shard_target and run.processes > 1:
        whole = gigabytes(run.size.parameters * run.size.dtype.itemsize)
        plan.line("host memory", f"{whole} in the first process, to load the target")


def _plan_disk(plan: PlanLines, run: PlannedRun) -> None:
    folder, size = Path(run.recipe.output_dir), (run.parameters, run.shape.draft_vocab_size, run.shape.vocab_size)
    one, drafter = checkpoint_bytes(*size), drafter_bytes(*size)
    checkpoints = run.recipe.train.keep_checkpoints + (run.recipe.train.keep_best is not None)
    disk, free = (checkpoints + 1) * one + drafter, free_bytes(folder)
    kept = f"{plural(checkpoints, 'checkpoint')} of {gigabytes(one)} and one being written"
    plan.line("disk", f"{gigabytes(disk)}: {kept}, drafter {gigabytes(drafter)}; {gigabytes(free)} are free", "exact")
    if disk > free:
        plan.problems.append(f"output_dir: {gigabytes(disk)} do not fit the {gigabytes(free)} that are free there")


def millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
