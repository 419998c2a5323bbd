"""Writes the target's hidden states to disk, behind data_gen/capture.py.

Of several processes, each makes the shards whose number divided by the number of processes leaves its rank. They do
not talk to each other: rank 0 also checks the room on the disk and writes target/ and the manifest, and whoever
finds the store complete says so.
"""

import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from draftsmith.data_gen.states.manifest import StoreManifest, make_folder
from draftsmith.data_gen.states.store import ShardBuffer, states_length
from draftsmith.data_gen.states.store_plan import (
    StorePlan,
    check_room,
    is_own,
    missing_shards,
    needs_target,
    plan_before_regeneration,
    plan_capture,
    plan_store,
    rows_to_make,
    rows_written,
    store_so_far,
    store_summary,
    stored_identity,
)
from draftsmith.data_gen.states.stored_pictures import PICTURES, save_pictures
from draftsmith.data_gen.states.stored_target import save_target
from draftsmith.data_gen.states.written import FOLDER, WrittenRows
from draftsmith.models.formats.exporting import check_export
from draftsmith.models.prompt import PlacedInsert
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.target_session import batches_by_length
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.launch import local_rank, rank, world_size
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.atomic import clear_partial_files
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import output_problem
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe


def main(command: Command) -> None:
    recipe, leads = command.recipe, rank() == 0
    directory = recipe.states_dir
    if (problem := output_problem(directory, folder=True)) is not None:
        raise UserError(f"data.states: {problem}")
    files = TargetFiles(recipe.target)
    check_export(recipe, files)
    if command.plan and not leads:
        return
    if not recipe.conversations_path.exists():  # planned before regeneration
        with PlanLines() as plan:
            plan_before_regeneration(plan, recipe, files)
        return
    rejects = Rejects(recipe.training_rejects_path if leads and not command.plan else None)
    wanted = plan_store(recipe, files, rejects)
    existed = directory.exists()
    with ExitStack() as held:
        if leads and existed and not command.plan:
            held.enter_context(alone_in(directory))
        manifest, written = store_so_far(directory, wanted, command.verify), rows_written(directory, wanted)
        if leads:
            if rejects.total:
                print(rejects.summary())
            with PlanLines() as plan:
                plan_capture(plan, wanted, manifest, directory, written)
                check_room(wanted, manifest, directory, written)
        else:
            logging.disable_progress_bar()  # transformers': rank 0 shows its own
        if command.plan:
            return
        make_folder(directory)
        if leads and not existed:
            held.enter_context(alone_in(directory))
        if world_size() == 1:  # else another process may be writing
            clear_leftovers(directory)
        capture(wanted, directory, manifest, written)


def complete(recipe: Recipe, target: Target | None = None) -> None:
    """Makes the store from the rows that regeneration has written, if it has written all.

    Args:
        target: reads the rows' pictures; None: only a store without pictures is made.
    """
    directory = recipe.states_dir
    if recipe.data.states is None or not (directory / FOLDER).exists():
        return
    with alone_in(directory):
        store = StoreManifest.read(directory)
        if store is not None and store.complete:  # a kill left the folder
            shutil.rmtree(directory / FOLDER)
            return
        if not any((directory / FOLDER).glob("*.safetensors")):
            return
        wanted = plan_store(recipe, TargetFiles(recipe.target), Rejects())
        manifest, written = store_so_far(directory, wanted, verify=False), rows_written(directory, wanted)
        left = [row for row in rows_to_make(wanted, manifest) if written is None or row not in written]
        clear_leftovers(directory)
        if left or (target is None and needs_target(wanted, manifest, directory, written)):
            print(
                f"{directory}: the states of {len(wanted.rows) - len(left):,} of {len(wanted.rows):,} rows are stored; "
                "`draftsmith capture` adds the rest"
            )
            return
        check_room(wanted, manifest, directory, written)
        capture(wanted, directory, manifest, written, target)


# Capturing.


def clear_leftovers(directory: Path) -> None:
    """Removes files that a kill left half-written or half-deleted."""
    clear_partial_files(directory)
    clear_partial_files(directory / PICTURES)
    if (directory / "target").exists():  # else `save_target` makes it of these
        for leftover in (directory / "target.partial", directory / "target.replaced"):
            shutil.rmtree(leftover, ignore_errors=True)


def capture(
    wanted: StorePlan,
    directory: Path,
    manifest: StoreManifest,
    written: WrittenRows | None,
    target: Target | None = None,
) -> None:
    """Makes this process's missing shards; then, if the store is complete, says so.

    Raises UserError if the existing shards have another target, or if the disk is full.

    Args:
        written: rows for which the target need not run.
        target: if it is loaded already.
    """
    missing = [number for number in missing_shards(wanted, manifest) if is_own(number)]
    if missing or (rank() == 0 and not manifest.files):
        try:
            _make_missing(wanted, missing, directory, manifest, written, target)
        except (OSError, SafetensorError) as error:
            manifest.look(directory)
            raise UserError(
                f"{directory}: cannot be written ({first_line(error)}): make room if the disk is full, then "
                f"start again; {len(manifest.shards):,} of {manifest.of:,} shards are whole and stay"
            ) from error
    found = StoreManifest.read(directory)
    if found is not None and found.complete:
        shutil.rmtree(directory / FOLDER, ignore_errors=True)  # another process may do so, too
        clear_leftovers(directory)
        print(f"{directory}: all is captured: {store_summary(found)}")


def _make_missing(
    wanted: StorePlan,
    missing: Sequence[int],
    directory: Path,
    manifest: StoreManifest,
    written: WrittenRows | None,
    target: Target | None,
) -> None:
    if target is None and needs_target(wanted, manifest, directory, written):
        target = target_of(wanted)
    if target is not None:
        identity = stored_identity(wanted.files, target)
    else:
        assert written is not None and written.manifest is not None
        identity = written.manifest.made_of["target"]
    made_of = wanted.made_of | {"target": wanted.made_of["target"] | identity}
    if manifest.files or manifest.shards:
        manifest.refuse_if_other(made_of, directory)
    if written is not None and written.manifest is not None:
        written.manifest.refuse_if_other({"target": made_of["target"]}, directory)
    manifest.made_of = made_of
    if rank() == 0:
        if not manifest.files and target is not None:
            manifest.files = save_target(wanted.files, target, directory)
        elif not manifest.files and written is not None and written.manifest is not None:
            manifest.files = written.manifest.files
        manifest.write(directory)
    made_of_digest, nonfinite = manifest.digest, list[str]()
    tokens = sum(states_length(row) for number in missing for row in wanted.shards[number])
    with Bar(total=tokens, desc="capture", unit="token", unit_scale=True, disable=rank() > 0) as bar:
        for number in missing:
            shard, left = ShardBuffer(wanted.shape, wanted.shards[number]), list[int]()
            for index, row in enumerate(shard.rows):
                states = None if written is None else written.get(row)
                if states is None:
                    left.append(index)
                else:
                    shard.place(index, states)
                    bar.update(states_length(row))
            lengths = [states_length(shard.rows[index]) for index in left]
            for batch in batches_by_length(lengths, wanted.recipe.data.capture.batch_tokens):
                target = target or target_of(wanted)  # written states may be damaged
                fill(shard, [left[i] for i in batch], target)
                bar.update(sum(lengths[i] for i in batch))
            if target is not None:
                save_pictures(shard.rows, target, directory, rank())  # first: a shard with an entry has its pictures
            shard.write(directory, number, made_of_digest)
            nonfinite += [shard.rows[index].id for index in sorted(shard.nonfinite)]
            if written is not None:
                written.drop(shard.rows)
    if nonfinite:
        print(f"note: NaN or inf among the states of {len(nonfinite)} rows, the first: {nonfinite[:5]}")


def fill(shard: ShardBuffer, batch: Sequence[int], target: Target) -> None:
    """Runs the target over some rows of a shard and stores their states in it."""
    rows = [shard.rows[index] for index in batch]
    ids = pad_sequence([torch.tensor(row.input_ids[: states_length(row)]) for row in rows], batch_first=True)
    inserts = [
        PlacedInsert(i, each) for i, row in enumerate(rows) for each in row.inserts if each.first < states_length(row)
    ]
    states = target.states(ids.to(target.device), inserts=inserts)
    for i, (index, row) in enumerate(zip(batch, rows, strict=True)):
        shard.put(index, states.captured[i, : states_length(row)], states.last[i, : states_length(row)])


def target_of(wanted: StorePlan) -> Target:
    return wanted.files.load(wanted.layers, device_of_rank(wanted.recipe.target.device))


def device_of_rank(wanted: str) -> str | None:
    """The device of this process's target, or None if `wanted`, which is target.device, decides.

    Raises UserError if this machine has fewer devices than processes.
    """
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    given = torch.device((accelerator or "cpu") if wanted == "auto" else wanted)
    if world_size() == 1 or given.type == "cpu" or given.index is not None:
        return None
    if (count := torch.get_device_module(given).device_count()) <= local_rank():
        raise UserError(
            f"target.device: {wanted}: each process takes a device of its own, and the machine of rank {rank()} has "
            f"{count} of kind {given.type} for {local_rank() + 1} processes or more; start {count} there"
        )
    torch.get_device_module(given).set_device(local_rank())
    return f"{given.type}:{local_rank()}"
