"""Writes the target's hidden states to disk, behind data_gen/capture.py.

Several processes share the shards (`is_own`) and do not talk to each other: rank 0 also checks the room on the disk and
writes target/ and the manifest, and whoever finds the store complete says so.
"""

import shutil
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from draftsmith.data_gen.states.store import (
    ENCODINGS,
    KEY_BYTES,
    WRITTEN,
    Encoded,
    Encoding,
    Parts,
    StoreManifest,
    WrittenRows,
    key_of,
    length_of,
    rows_identity,
    states_length,
    stored_positions,
    stored_tokens,
    taught_tokens,
    teacher_positions,
    write_shard,
    writing,
)
from draftsmith.data_gen.states.stored_target import (
    PICTURES,
    TARGET,
    drop_damaged,
    head_bytes,
    inserts_of,
    logit_settings,
    picture_bytes,
    save_pictures,
    save_target,
    target_is_whole,
)
from draftsmith.data_gen.training_rows.rows import TrainingRow, usable_rows
from draftsmith.models.drafters import states_read
from draftsmith.models.formats.exporting import check_export
from draftsmith.models.prompt import PlacedInsert
from draftsmith.models.sizes import free_bytes, gigabytes
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.target_session import batches_by_length
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.launch import local_rank, rank, world_size
from draftsmith.recipes.command.plan import PlanLines, plural
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.command.stages import made_by
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import clear_partial_files
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.files.reading import file_problem
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe


def main(command: Command) -> None:
    recipe, leads = command.recipe, rank() == 0
    directory = recipe.states_dir
    files = TargetFiles(recipe.target)
    check_export(recipe, files)
    if command.plan and not leads:
        return
    if not recipe.conversations_path.exists():  # planned before regeneration, whose plan bounds the states
        plan = PlanLines()
        plan.reads(made_by("regenerate", recipe))
        plan.line("disk", f"unknown until regenerate has run; {gigabytes(free_bytes(directory))} are free")
        plan.writes(directory)
        return
    rejects = Rejects(recipe.training_rejects_path if leads and not command.plan else None)
    with alone_in(directory) if leads and not command.plan else nullcontext():
        capture = Capture(recipe, files, rejects, command.verify)
        if leads:
            if rejects.total:
                print(rejects.summary())
            with PlanLines() as plan:
                capture.print_plan(plan)
                capture.check_room()
        else:
            logging.disable_progress_bar()  # transformers': rank 0 shows its own
        if command.plan:
            return
        directory.mkdir(parents=True, exist_ok=True)
        if world_size() == 1:  # else another process may be writing
            clear_leftovers(directory)
        capture.run()


def complete(recipe: Recipe, target: Target | None = None) -> None:
    """Makes the store from the rows that regeneration has written, if these are all."""
    directory = recipe.states_dir
    if recipe.data.states is None or not (directory / WRITTEN).exists():
        return
    with alone_in(directory):
        store = StoreManifest.read(directory)
        if store is not None and store.complete:  # a kill left the folder
            shutil.rmtree(directory / WRITTEN)
            return
        if not any((directory / WRITTEN).glob("*.safetensors")):
            return
        capture = Capture(recipe, TargetFiles(recipe.target), Rejects())
        clear_leftovers(directory)
        if left := [row for row in capture.rows_to_make if row not in capture.written]:
            total = len(capture.rows)
            print(
                f"{directory}: the states of {total - len(left):,} of {total:,} rows are stored; `draftsmith capture` "
                "adds the rest"
            )
            return
        capture.check_room()
        capture.run(target)


def clear_leftovers(directory: Path) -> None:
    """Removes files that a kill left half-written or half-deleted."""
    clear_partial_files(directory)
    clear_partial_files(directory / PICTURES)
    if (directory / TARGET).exists():  # else `save_target` makes it of these
        for leftover in (f"{TARGET}.partial", f"{TARGET}.replaced"):
            shutil.rmtree(directory / leftover, ignore_errors=True)


@dataclass(frozen=True)
class WantedStates:
    layers: tuple[int, ...]  # the S captured ones
    hidden_size: int
    encoding: Encoding
    has_last: bool  # the teacher's last states are stored separately
    picture_states: bool  # whether states of pictures are stored
    made_of: dict[str, Any]  # the manifest's, as far as it is known before the target is loaded and rows are read

    @classmethod
    def of(cls, recipe: Recipe, files: TargetFiles) -> "WantedStates":
        config, dtype = files.text_config, recipe.data.capture.dtype
        layers, pictures = states_read(recipe.drafter, config.num_hidden_layers), recipe.drafter.reads_picture_states
        made_of = {
            "target": files.identity | logit_settings(config),
            "capture_layers": list(layers),
            "dtype": dtype,
            "picture_states": pictures,
            "computed_in": str(files.dtype).removeprefix("torch."),
        }
        has_last = layers[-1] != config.num_hidden_layers
        return cls(layers, config.hidden_size, ENCODINGS[dtype], has_last, pictures, made_of)

    def target_identity(self, files: TargetFiles, target: Target) -> dict[str, Any]:
        """`made_of["target"]` with what only the weights tell."""
        return self.made_of["target"] | files.identity_of(target) | {"embedding_scale": target.embedding_scale}

    def bytes_of(self, tokens: float, taught: float) -> float:
        """Size of the states of so many stored tokens, so many of which teach."""
        return self.encoding.bytes_of(self.hidden_size) * (len(self.layers) * tokens + self.has_last * taught)

    def bytes_of_rows(self, rows: Sequence[TrainingRow]) -> float:
        tokens = sum(stored_tokens(row, self.picture_states) for row in rows)
        return self.bytes_of(tokens, sum(taught_tokens(row.spans) for row in rows)) + len(rows) * (16 + KEY_BYTES)

    def shards(self, rows: Sequence[TrainingRow], shard_bytes: float) -> list[list[TrainingRow]]:
        """Divides distinct rows, in the order of their keys, into shards of about the same size."""
        distinct, shards, filled = {key_of(row): row for row in rows}, list[list[TrainingRow]](), 0.0
        for key in sorted(distinct):
            size = self.bytes_of_rows([distinct[key]])
            if not shards or filled + size > shard_bytes:
                shards.append([])
                filled = 0.0
            shards[-1].append(distinct[key])
            filled += size
        return shards

    def parts(self, row: TrainingRow, states: Encoded) -> Parts:
        """The states of a row by their names in a shard, in the host's memory.

        Args:
            states: of its first `states_length` tokens or more, [T, S, H]; with `has_last` [T, S + 1, H], the last
                states behind the captured ones.
        """
        parts: Parts = {}
        for name, part in zip(("", "_scale"), states, strict=True):
            if part is not None:
                stored, taught = stored_positions(row, self.picture_states), torch.tensor(teacher_positions(row.spans))
                parts[f"captured{name}"] = part[stored.to(part.device), : len(self.layers)].cpu()
                if self.has_last:
                    parts[f"last{name}"] = part[taught.long().to(part.device), len(self.layers)].cpu()
        return parts


class Capture:
    """The store that a recipe asks for, and what its folder holds. Raises UserError if it holds other states.

    Attributes:
        shards: the rows of each shard.
        made_of: the manifest's, as far as it is known before the target is loaded.
        manifest: the folder's, without damaged shards; a new one if it has none.
    """

    def __init__(self, recipe: Recipe, files: TargetFiles, rejects: Rejects, verify: bool = False):
        self.recipe, self.files, self.directory = recipe, files, recipe.states_dir
        self.wanted, settings = WantedStates.of(recipe, files), recipe.data.capture
        self.shards = self.wanted.shards(usable_rows(recipe, files, rejects), settings.shard_megabytes * 1e6)
        self.made_of = self.wanted.made_of | {
            "rows": rows_identity(map(key_of, self.rows)),
            # These change the last bits of a state, or the shard of a row.
            "shard_megabytes": settings.shard_megabytes,
            "batch_tokens": settings.batch_tokens,
        }
        self.manifest = self._whole_part(verify)
        self.written = WrittenRows(self.directory)
        if self.written.manifest is not None:
            self.written.manifest.refuse_if_other(self.wanted.made_of, self.directory)

    def _whole_part(self, verify: bool) -> StoreManifest:
        """`manifest`. Each process verifies its own shards."""
        manifest = StoreManifest.read(self.directory)
        if manifest is None:
            return StoreManifest(self.made_of, len(self.shards))
        manifest.refuse_if_other(self.made_of, self.directory)
        for number, entry in list(manifest.shards.items()):
            own = is_own(number)
            problems = [file_problem(self.directory / entry["file"], entry, verify and own)]
            problems += drop_damaged(self.shards[number], self.directory, verify) if own else []
            for problem in filter(None, problems):
                if own:
                    print(f"note: {problem}; captured again")
                manifest.shards.pop(number, None)
        if not target_is_whole(self.directory, manifest, verify and rank() == 0):
            manifest.files = {}
        return manifest

    @property
    def rows(self) -> list[TrainingRow]:
        """Distinct rows."""
        return [row for shard in self.shards for row in shard]

    @property
    def missing(self) -> list[int]:
        """Numbers of shards."""
        return [number for number in range(len(self.shards)) if number not in self.manifest.shards]

    @property
    def rows_to_make(self) -> list[TrainingRow]:
        """Those of missing shards."""
        return [row for number in self.missing for row in self.shards[number]]

    @property
    def needs_target(self) -> bool:
        """Whether the missing files cannot be made from written rows alone."""
        rows, written = self.rows_to_make, self.written
        return (
            written.manifest is None
            or not (self.manifest.files or target_is_whole(self.directory, written.manifest, verify=False))
            or any(row not in written for row in rows)
            or picture_bytes(rows, self.files, self.directory) > 0
        )

    # What it takes.

    def print_plan(self, plan: PlanLines) -> None:
        rows, wanted = self.rows, self.wanted
        tokens = sum(stored_tokens(row, wanted.picture_states) for row in rows)
        taught = sum(taught_tokens(row.spans) for row in rows)
        last = f"the last of {taught:,} ({taught / tokens:.0%})" if wanted.has_last else "which also teaches"
        plan.reads(made_by("regenerate", self.recipe))
        plan.line("rows", f"{len(rows):,}, {sum(map(length_of, rows)):,} tokens, of training and validation", "counted")
        plan.line("states", f"{list(wanted.layers)} of {tokens:,} tokens, {last}, in {wanted.made_of['dtype']}")
        if pictures := inserts_of(rows).values():
            of_pictures = sum(each.length for each in pictures)
            plan.line("pictures", f"input embeddings of {len(pictures):,}, {of_pictures:,} tokens, each stored once")
        size, free = gigabytes(self.bytes_left), gigabytes(free_bytes(self.directory))
        text = f"{size} to be written, {plural(len(self.shards), 'shard')} in all; {free} are free"
        plan.line("disk", text, "exact but for headers and the tokenizer")
        if self.manifest.shards:
            plan.line("done", self.manifest.summary())
        if self.written.manifest is not None and (left := self.rows_to_make):
            there = sum(row in self.written for row in left)
            text = f"{there:,} of {len(left):,} rows with their answers"
            plan.line("written", text + "; the target runs for the others" * (there < len(left)))
        plan.writes(self.directory)

    @property
    def bytes_left(self) -> float:
        """What the missing files take, without their headers, config and tokenizer."""
        sizes = [self.wanted.bytes_of_rows(self.shards[number]) for number in self.missing]
        left = sum(sizes)
        if sizes:  # what is written makes room, shard by shard
            left = max(max(sizes), left - self.written.bytes)
        left += 0 if self.manifest.files else head_bytes(self.files)
        return left + picture_bytes(self.rows, self.files, self.directory)

    def check_room(self) -> None:
        """Raises UserError, before anything is written, if the missing files do not fit on the disk."""
        if self.bytes_left > (free := free_bytes(self.directory)):
            raise UserError(
                f"data.states: {gigabytes(self.bytes_left)} are still to be written to {self.directory}, and "
                f"{gigabytes(free)} are free there: make room, name another folder, or take data.capture.dtype=fp8 "
                "or a smaller data.max_length"
            )

    # Capturing.

    def run(self, target: Target | None = None) -> None:
        """Makes this process's missing shards; then, if the store is complete, says so.

        Raises UserError if the existing shards have another target, or if the disk is full.
        """
        own, directory = [number for number in self.missing if is_own(number)], self.directory
        if own or (rank() == 0 and not self.manifest.files):
            with writing(directory, "start again: whole shards stay"):
                self._make(own, target)
        found = StoreManifest.read(directory)
        if found is not None and found.complete:
            shutil.rmtree(directory / WRITTEN, ignore_errors=True)  # another process may do so, too
            clear_leftovers(directory)
            print(f"{directory}: all is captured: {found.summary()}")

    def _make(self, numbers: Sequence[int], target: Target | None) -> None:
        manifest, written, directory = self.manifest, self.written, self.directory
        if target is None and self.needs_target:
            target = self._load_target()
        if target is not None:
            made_of = self.made_of | {"target": self.wanted.target_identity(self.files, target)}
        else:
            assert written.manifest is not None
            made_of = self.made_of | {"target": written.manifest.made_of["target"]}
        if manifest.files or manifest.shards:
            manifest.refuse_if_other(made_of, directory)
        if written.manifest is not None:
            written.manifest.refuse_if_other({"target": made_of["target"]}, directory)
        manifest.made_of = made_of
        if rank() == 0:
            if not manifest.files and target is not None:
                manifest.files = save_target(self.files, target, directory)
            elif not manifest.files and written.manifest is not None:
                manifest.files = written.manifest.files
            manifest.write(directory)
        broken = list[str]()
        tokens = sum(states_length(row) for number in numbers for row in self.shards[number])
        with Bar(total=tokens, desc="capture", unit="token", unit_scale=True, disable=rank() > 0) as bar:
            for number in numbers:
                rows = self.shards[number]
                parts = [written.get(row) for row in rows]
                left = [index for index, each in enumerate(parts) if not each]
                lengths = [states_length(rows[index]) for index in left]
                bar.update(sum(map(states_length, rows)) - sum(lengths))
                for batch in batches_by_length(lengths, self.recipe.data.capture.batch_tokens):
                    target = target or self._load_target()  # written states may be damaged
                    made = states_of([rows[left[i]] for i in batch], target, self.wanted)
                    for i, each in zip(batch, made, strict=True):
                        parts[left[i]] = each
                    bar.update(sum(lengths[i] for i in batch))
                if target is not None:
                    save_pictures(rows, target, directory)  # first: a shard with an entry has its pictures
                broken += write_shard(directory, number, rows, parts, manifest.digest)
                written.drop(rows)
        if broken:
            print(f"note: NaN or inf among the states of {len(broken)} rows, the first: {broken[:5]}")

    def _load_target(self) -> Target:
        return self.files.load(self.wanted.layers, device_of_rank(self.recipe.target.device))


def is_own(number: int) -> bool:
    """Whether this process makes shard `number`."""
    return number % world_size() == rank()


def states_of(rows: Sequence[TrainingRow], target: Target, wanted: WantedStates) -> Iterator[Parts]:
    """Runs the target over rows together and yields the states of each."""
    ids = pad_sequence([torch.tensor(row.input_ids[: states_length(row)]) for row in rows], batch_first=True)
    inserts = [
        PlacedInsert(i, each) for i, row in enumerate(rows) for each in row.inserts if each.first < states_length(row)
    ]
    states = target.states(ids.to(target.device), inserts=inserts)
    for row, captured_TF, last_TH in zip(rows, states.captured, states.last, strict=True):
        all_TSH = captured_TF.unflatten(-1, (len(wanted.layers), -1))
        if wanted.has_last:
            all_TSH = torch.cat([all_TSH, last_TH[:, None]], dim=1)
        yield wanted.parts(row, wanted.encoding.encode(all_TSH[: states_length(row)]))


def device_of_rank(wanted: str) -> str | None:
    """The device of this process's target, or None if `wanted`, which is target.device, decides. Raises UserError if
    this machine has fewer devices than processes."""
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
