"""Trains a drafter as a recipe says: reads its inputs, builds drafter, target and loop, runs the loop, saves.

The scripts (`train/eagle3.py` and its neighbours) fix the kind of drafter; the recipe decides the rest.
The method is in `models` (the drafter) and `train.loss` (the unroll and its losses).
"""

import os
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import DistributedType, set_seed

from draftsmith.data_gen.states.store import length_of, taught_tokens, writing
from draftsmith.data_gen.states.stored_target import StoredTarget
from draftsmith.models.chat import prompt_date
from draftsmith.models.checkpoint import current_folder, provenance, save_drafter
from draftsmith.models.formats.exporting import check_export
from draftsmith.models.formats.named_drafters import with_start
from draftsmith.models.onednn_linear import blocked_head
from draftsmith.models.sizes import device_here
from draftsmith.models.target import Target, device_name
from draftsmith.models.target_files import TargetFiles, check_evaluation
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.launch import rank, world_size
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.files.reading import file_digest
from draftsmith.recipes.loader import dump_recipe
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.train import TrainSection
from draftsmith.train.loss.unroll import kernel_of
from draftsmith.train.measure.dry_run import row_flops
from draftsmith.train.measure.training_plan import print_plan
from draftsmith.train.run.accelerator import accelerator_of
from draftsmith.train.run.batches import computed_tokens
from draftsmith.train.run.checkpoints import digests_of, run_identity, step_of
from draftsmith.train.run.engine import Engine, trainee_of
from draftsmith.train.run.initial_drafter import merge_lora, new_drafter
from draftsmith.train.run.loop import RESUME, Loop
from draftsmith.train.run.processes import check_ranks_agree, failing_together
from draftsmith.train.run.run_log import check_trackers
from draftsmith.train.run.sharded_target import ShardedTarget, check_sharding, load_sharded
from draftsmith.train.run.state_sources import OnlineStates, StateSource, StoredStates, store_identity
from draftsmith.train.run.training_inputs import Inputs, read_inputs
from draftsmith.train.run.validation_replay import ValidationReplay, check_replay


def main(command: Command) -> bool:
    """Trains the recipe's drafter. Returns False if it is not finished: for --plan, and after SIGTERM."""
    recipe = with_start(command.recipe, command.plan)
    files = TargetFiles.read(recipe.target)
    if rank() == 0:
        device_name(recipe.target.device)  # which accelerate chooses: refuses what is none
    check_replay(recipe, files)
    check_sharding(recipe, files)
    check_trackers(recipe.train.trackers)
    check_export(recipe, files)
    if not command.plan:
        check_evaluation(recipe, files)
    if command.plan:
        print_plan(recipe, files, command.flops, command.processes or world_size())
        return False
    loop = build(recipe, files, command.profile)
    print_summary(loop)
    with ExitStack() as held:
        with failing_together():
            if loop.accelerator.is_main_process:
                held.enter_context(alone_in(Path(recipe.output_dir)))
        finished = loop.run()
        if finished:
            save(loop)
        loop.accelerator.end_training()
    return finished


def build(recipe: Recipe, files: TargetFiles, profile_steps: int | None) -> Loop:
    """Reads the recipe's inputs and loads the target, on all ranks. Raises UserError if something is missing or does
    not fit the recipe, or if the ranks do not read the same."""
    inputs = read_inputs(recipe, files)
    rows, validation_rows = inputs.rows, inputs.validation_rows
    _ = files.stop_ids  # raises for a target without one
    replay = ValidationReplay.of(recipe, files, validation_rows, inputs.vocab)
    if (best := recipe.train.keep_best) and (not validation_rows or (best == "replay_tau" and replay is None)):
        raise UserError(
            f"train.keep_best: {best}, but there are too few conversations to keep any for validation (a fifth at "
            "most); leave it out"
        )
    digests = digests_of(rows, validation_rows)

    set_seed(recipe.train.seed)
    accelerator = accelerator_of(recipe.train)
    if recipe.drafter.lora is not None and accelerator.distributed_type == DistributedType.DEEPSPEED:
        raise UserError(
            "drafter.lora: its few weights are not trained under ZeRO: leave DeepSpeed out of accelerate's config"
        )
    compared = {"train": recipe.train.model_dump(), "drafter": recipe.drafter.model_dump(exclude={"init_from"})}
    check_ranks_agree({**digests, "draft vocabulary": file_digest(recipe.draft_vocab_path), **compared})
    cores = os.cpu_count() or 1
    if accelerator.device.type == "cpu" and accelerator.num_processes == 1 and torch.get_num_threads() == 1 < cores:
        print(f"note: one thread on {cores} cores; accelerate launch --num_cpu_threads_per_process {cores} uses all")
    target, states = target_and_states(inputs, accelerator, recipe.train)
    target.head_product = blocked_head(target.head)
    shape = replace(inputs.shape, embedding_scale=target.embedding_scale)
    identity = files.identity_of(target)
    drafter = new_drafter(recipe.drafter, shape, inputs.vocab, target, identity).to(accelerator.device)
    computed = identity | {"dtype": str(target.dtype).removeprefix("torch.")}
    if day := prompt_date(files.tokenizer):
        computed["date"] = day
    stored = store_identity(inputs.store)
    check_ranks_agree({"target": computed, "data.states": stored})
    return Loop(
        recipe,
        inputs,
        Engine(accelerator, trainee_of(recipe.train, drafter), recipe.train),
        target,
        states,
        run_identity(recipe, files, drafter.config, computed, accelerator.num_processes, digests, stored),
        replay,
        peak_tokens_per_second(recipe, inputs, accelerator.device),
        profile_steps,
        identity | {"layout": files.layout(target.dtype)},
    )


def peak_tokens_per_second(recipe: Recipe, inputs: Inputs, device: torch.device) -> float | None:
    """Tokens a second that one device would train at its peak, by the operations of a row of mean length. None for
    devices whose peak is not known, and for ViSpec, where pictures cost something else."""
    peak = device_here(str(device)).peak_flops
    if peak is None or inputs.shape.reads_pictures:
        return None
    rows, files = inputs.rows, inputs.files
    tokens = max(1, sum(map(length_of, rows)) // len(rows))
    columns = sum(taught_tokens(row.spans) for row in rows) // len(rows)
    reads_states = inputs.store is not None
    flops = row_flops(recipe.train, inputs.shape, files.text_config, files.size, reads_states, tokens, columns)
    return peak * tokens / flops


def target_and_states(inputs: Inputs, accelerator: Accelerator, section: TrainSection) -> tuple[Target, StateSource]:
    """The target, whole, sharded or only its head from a store, and the source of its states."""
    layers = inputs.shape.capture_layers
    if inputs.store is not None:
        stored = StoredTarget(inputs.store, inputs.files.text_config, accelerator.device)
        every_row = [*inputs.rows, *inputs.validation_rows]
        return stored, StoredStates(inputs.store, every_row, accelerator.device, stored.dtype)
    if section.shard_target and accelerator.num_processes > 1:
        target: Target = ShardedTarget(load_sharded(inputs.files), layers)
    else:
        target = inputs.files.load(layers, str(accelerator.device))
    if section.packing:
        # Here, because all processes of a sharded target must try together, and they first pack at different times.
        target.try_documents()
    return target, OnlineStates(target)


def print_summary(loop: Loop) -> None:
    """Prints what will be trained, on what; rank 0 does."""
    inputs, target, trainee, say = loop.inputs, loop.target, loop.engine.alone, loop.accelerator.print
    drafter, packing = trainee.drafter, loop.section.packing
    trainable = sum(p.numel() for p in drafter.parameters() if p.requires_grad)
    products = torch.bfloat16 if loop.engine.bf16 else drafter.dtype
    kernel = kernel_of(drafter.config, loop.accelerator.device, products)
    no_padding = sum(map(length_of, inputs.rows)) / computed_tokens(loop.order, inputs.rows, packing)
    say(
        f"{trainable / 1e6:.2f} M trainable parameters, draft vocabulary {drafter.vocab.size} of {target.vocab_size}, "
        f"target states {list(target.capture_layers)}, {len(inputs.rows)} rows, {len(inputs.validation_rows)} kept for "
        f"validation, attention by {kernel.name}\n"
        f"{no_padding:.1%} of the tokens that the target reads are no padding "
        f"({'packed' if packing else 'padded'} micro-batches, first epoch)"
    )
    if inputs.store is not None:
        say(inputs.store.summary())
    if isinstance(target, ShardedTarget):
        say(target.sharding_text())


def save(loop: Loop) -> None:
    """Writes the finished drafter, or the best checkpoint's if train.keep_best asks for it. All ranks call it."""
    recipe = loop.recipe
    with loop.engine.whole() as trained:
        if not loop.accelerator.is_main_process:
            return
        data = {"conversations": recipe.conversations_path, "draft_vocab": recipe.draft_vocab_path}
        if recipe.drafter.init_from is not None:
            data["init_from"] = current_folder(Path(recipe.drafter.init_from)) / "model.safetensors"
        made_by, chosen = provenance(data), ""
        if (best := loop.best()) is not None:
            checkpoint, tau = best
            loop.engine.load_weights(checkpoint, trained)
            made_by["checkpoint"] = {"step": step_of(checkpoint), str(recipe.train.keep_best): tau}
            chosen = f", of step {step_of(checkpoint):,}, which has the best {recipe.train.keep_best}: {tau:.2f}"
        merge_lora(trained.drafter)
        with writing(recipe.drafter_dir, RESUME):
            save_drafter(recipe.drafter_dir, trained.drafter, loop.target_identity, dump_recipe(recipe), made_by)
        print(f"drafter: {recipe.drafter_dir}{chosen}")
