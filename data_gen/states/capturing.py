"""Writes the target's hidden states to disk, behind data_gen/capture.py."""

import json
import shutil
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from draftsmith.data_gen.states.capture_processes import Team
from draftsmith.data_gen.states.jobs import (
    Job,
    check_room,
    job_of,
    missing_shards,
    needs_target,
    plan_before_regeneration,
    plan_capture,
    refuse_others,
    rows_to_make,
    rows_written,
    store_so_far,
    store_summary,
    stored_identity,
)
from draftsmith.data_gen.states.store import ShardBuffer, StoreManifest, states_length
from draftsmith.data_gen.states.stored_pictures import PICTURES, save_pictures
from draftsmith.data_gen.states.stored_target import save_target
from draftsmith.data_gen.states.written import FOLDER, WrittenRows
from draftsmith.models.checkpoint import differences
from draftsmith.models.formats.exporting import check_export
from draftsmith.models.prompt import PlacedInsert
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.target_session import batches_by_length
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.plan import PlanLines
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.atomic import clear_partial_files
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import output_problem
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe

# Keys of `Team`. Published: numbers of the missing shards, the manifest's made_of, and each written shard's entry as
# written/1, written/2, ... Counted: shards taken, shards written, tokens that the target has read.
MISSING, MADE_OF, TAKEN, WRITTEN, TOKENS = "missing", "made_of", "taken", "written", "tokens"


def capture_with(team: Team, read_command: Callable[[], Command]) -> None:
    """Does this process's part.

    Args:
        read_command: parses the command line. Rank 0 calls it first, and a mistake is reported once.
    """
    with team.reporting_once():
        if not team.leads:
            follow(team, read_command)
            return
        try:
            lead(team, read_command())
        finally:
            if not team.is_published(MISSING):
                team.publish(MISSING, [])


def lead(team: Team, command: Command) -> None:
    """Rank 0: checks the folder, publishes the missing shards, and captures with the others."""
    recipe = command.recipe
    directory = recipe.states_dir
    if (problem := output_problem(directory, folder=True)) is not None:
        raise UserError(f"data.states: {problem}")
    check_export(recipe, TargetFiles(recipe.target))
    if not recipe.conversations_path.exists():  # planned before regeneration
        with PlanLines() as plan:
            plan_before_regeneration(plan, recipe)
        return
    rejects = Rejects(None if command.plan else recipe.training_rejects_path)
    job = job_of(recipe, rejects)
    if rejects.total:
        print(rejects.summary())
    with ExitStack() as held:
        if directory.exists() and not command.plan:
            held.enter_context(alone_in(directory))
        manifest, written = store_so_far(directory, job, command.verify), rows_written(directory, job)
        with PlanLines() as plan:
            plan_capture(plan, job, manifest, directory, written)
            check_room(job, manifest, directory, written)
        if command.plan:
            return
        if not directory.exists():
            manifest.make_folder(directory)
            held.enter_context(alone_in(directory))
        clear_leftovers(directory, manifest)
        if manifest.complete and manifest.files:
            if written is not None:
                written.drop(but=())
            print(f"all is captured: {store_summary(manifest)}")
            return
        missing = missing_shards(job, manifest)
        # Without the target, the others have nothing to do.
        team.publish(MISSING, missing if needs_target(job, manifest, directory, written) else [])
        capture(job, missing, directory, team, manifest, written)
    print(f"{directory}: {store_summary(manifest)}")


def complete(recipe: Recipe, target: Target | None = None) -> None:
    """Makes the store from the rows that regeneration has written, if it has written all.

    Args:
        target: reads the rows' pictures; None: only a store without pictures is made.
    """
    directory = recipe.states_dir
    if recipe.data.states is None or not (directory / FOLDER).exists():
        return
    with alone_in(directory):
        written = WrittenRows(directory)
        if len(written):
            _complete(recipe, directory, target)
        elif (manifest := StoreManifest.read(directory)) is not None and manifest.complete:
            written.drop(but=())  # a kill left its folder


def _complete(recipe: Recipe, directory: Path, target: Target | None) -> None:
    job = job_of(recipe, Rejects())
    manifest, written = store_so_far(directory, job, verify=False), rows_written(directory, job)
    if written is None:
        return
    left = [row for row in rows_to_make(job, manifest) if row not in written]
    clear_leftovers(directory, manifest)
    if left or (target is None and needs_target(job, manifest, directory, written)):
        print(
            f"{directory}: the states of {len(job.rows) - len(left):,} of {len(job.rows):,} rows are stored; "
            "`draftsmith capture` adds the rest"
        )
        return
    check_room(job, manifest, directory, written)
    capture(job, missing_shards(job, manifest), directory, Team(), manifest, written, target)
    written.drop(but=())
    print(f"{directory}: {store_summary(manifest)}")


def follow(team: Team, read_command: Callable[[], Command]) -> None:
    """Any other rank: starts after rank 0 has published the missing shards."""
    missing: list[int] = team.receive(MISSING)
    if team.rank >= len(missing):
        return  # there is no shard left for this rank
    logging.disable_progress_bar()  # transformers': rank 0 shows its own
    recipe = read_command().recipe
    job = job_of(recipe, Rejects())
    capture(job, missing, recipe.states_dir, team, written=rows_written(recipe.states_dir, job))


# Capturing.


def clear_leftovers(directory: Path, manifest: StoreManifest) -> None:
    """Removes files that a kill left half-written or half-deleted."""
    clear_partial_files(directory)
    clear_partial_files(directory / PICTURES)
    if manifest.files:  # else `save_target` writes it again and clears up
        for leftover in (directory / "target.partial", directory / "target.replaced"):
            shutil.rmtree(leftover, ignore_errors=True)


def capture(
    job: Job,
    missing: Sequence[int],
    directory: Path,
    team: Team,
    manifest: StoreManifest | None = None,
    written: WrittenRows | None = None,
    target: Target | None = None,
) -> None:
    """Makes missing shards until all are taken.

    Raises UserError if the existing shards or rank 0 have another target, or if the disk is full.

    Args:
        missing: the same for all processes.
        manifest: given to rank 0, which also writes target/ and waits for all shards.
        written: rows for which the target need not run.
        target: if it is loaded already.
    """
    ledger = None
    if target is None and (manifest is None or needs_target(job, manifest, directory, written)):
        target = target_of(job, team)
    if target is not None:
        identity = stored_identity(job.files, target)
    else:
        assert written is not None and written.manifest is not None
        identity = written.manifest.made_of["target"]
    made_of = job.made_of | {"target": job.made_of["target"] | identity}
    try:
        if manifest is None:
            check_same(team, made_of)
        else:
            if manifest.shards:
                manifest.refuse_if(manifest.other_than(made_of), directory, "from another target")
            if written is not None and written.manifest is not None:
                refuse_others(written.manifest, {"target": made_of["target"]}, directory)
            manifest.made_of = made_of
            team.publish(MADE_OF, made_of)
            if not manifest.files:
                if target is not None:
                    manifest.files = save_target(job.files, target, directory)
                elif written is not None and written.manifest is not None:
                    manifest.files = written.manifest.files
                manifest.write(directory)
            tokens = sum(states_length(row) for number in missing for row in job.shards[number])
            ledger = Ledger(directory, manifest, team, tokens, job, written)
        make_shards(job, missing, target, directory, team, ledger, written)
        if ledger is not None:
            team.wait(ledger.update)
    except (OSError, SafetensorError) as error:
        whole = len(job.shards) - len(missing) + team.count(WRITTEN)
        raise UserError(
            f"{directory}: cannot be written ({first_line(error)}): make room if the disk is full, then "
            f"start again; {whole:,} of {len(job.shards):,} shards are whole and stay"
        ) from error
    finally:
        if ledger is not None:
            ledger.bar.close()
    if ledger is not None and ledger.nonfinite:
        rows = ledger.nonfinite
        print(f"note: NaN or inf among the states of {len(rows)} rows, the first: {rows[:5]}")


def target_of(job: Job, team: Team) -> Target:
    return job.files.load(job.layers, team.take_device(job.recipe.target.device))


def check_same(team: Team, made_of: dict[str, Any]) -> None:
    """Raises UserError if this process would write other states than rank 0."""
    if different := [
        f"{key}: rank 0 has {theirs!r}, rank {team.rank} has {mine!r}"
        for key, theirs, mine in differences(team.receive(MADE_OF), json.loads(json.dumps(made_of)))
    ]:
        raise UserError(
            f"the processes do not capture the same ({'; '.join(different)}); do all of them see the same "
            "conversations and the same target?"
        )


class Ledger:
    """Rank 0's record of all processes: manifest and progress bar.

    Attributes:
        nonfinite: ids of this run's rows with NaN or inf among their states.
    """

    def __init__(
        self,
        directory: Path,
        manifest: StoreManifest,
        team: Team,
        tokens: int,
        job: Job,
        written: WrittenRows | None = None,
    ):
        self.directory, self.manifest, self.team, self.job, self.written = directory, manifest, team, job, written
        self.entered = 0  # shards of this run in the manifest
        self.nonfinite: list[str] = []
        self.bar = Bar(total=tokens, desc="capture", unit="token", unit_scale=True)

    def update(self) -> bool:
        """Enters newly written shards. Returns whether none is missing."""
        self.bar.update(self.team.count(TOKENS) - self.bar.n)
        before = self.entered
        while self.team.is_published(f"{WRITTEN}/{self.entered + 1}"):
            self.entered += 1
            number, entry, nonfinite = self.team.receive(f"{WRITTEN}/{self.entered}")
            self.manifest.shards[number] = entry
            self.nonfinite += nonfinite
        if self.entered > before:
            self.manifest.write(self.directory)
            if self.written is not None:
                self.written.drop(but=rows_to_make(self.job, self.manifest))
        return self.manifest.complete


def make_shards(
    job: Job,
    missing: Sequence[int],
    target: Target | None,
    directory: Path,
    team: Team,
    ledger: Ledger | None,
    written: WrittenRows | None,
) -> None:
    """Takes, writes and publishes shards, one at a time."""
    while (taken := team.count(TAKEN, 1)) <= len(missing):
        number = missing[taken - 1]
        shard, left = ShardBuffer(job.shape, job.shards[number]), list[int]()
        for index, row in enumerate(shard.rows):
            states = None if written is None else written.get(row)
            if states is None:
                left.append(index)
            else:
                shard.place(index, states)
                team.count(TOKENS, states_length(row))
        lengths = [states_length(shard.rows[index]) for index in left]
        for batch in batches_by_length(lengths, job.recipe.data.capture.batch_tokens):
            if target is None:  # the written states are damaged
                target = target_of(job, team)
            fill(shard, [left[i] for i in batch], target)
            team.count(TOKENS, sum(lengths[i] for i in batch))
            if ledger is not None:
                ledger.update()
        if target is not None:
            save_pictures(shard.rows, target, directory, team.rank)  # first: a shard in the manifest has its pictures
        entry = shard.write(directory, number)
        nonfinite = [shard.rows[index].id for index in sorted(shard.nonfinite)]
        team.publish(f"{WRITTEN}/{team.count(WRITTEN, 1)}", (number, entry, nonfinite))
        if ledger is not None:
            ledger.update()


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
