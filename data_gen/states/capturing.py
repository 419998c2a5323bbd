"""Writes the target's hidden states to disk, behind data_gen/capture.py."""

import json
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch.nn.utils.rnn import pad_sequence
from transformers.utils import logging

from draftsmith.data_gen.rows.training_rows import TrainingRow, usable_rows
from draftsmith.data_gen.states.capture_processes import Team
from draftsmith.data_gen.states.shards import file_problem
from draftsmith.data_gen.states.store import (
    ENCODINGS,
    RowShape,
    ShardBuffer,
    StoreManifest,
    key_of,
    length_of,
    rows_identity,
    stored_tokens,
    taught_tokens,
)
from draftsmith.data_gen.states.stored_pictures import (
    PICTURES,
    drop_damaged,
    inserts_of,
    picture_bytes,
    save_pictures,
)
from draftsmith.data_gen.states.stored_target import (
    head_bytes,
    logit_settings,
    save_config_and_tokenizer,
    save_target,
    target_is_whole,
)
from draftsmith.eval.decoding.target_facts import bounded_rows, longest_row
from draftsmith.models.chat import load_config, load_tokenizer, tokenizer_fingerprint
from draftsmith.models.checkpoint import config_identity, differences, target_identity
from draftsmith.models.costs import gigabytes, torch_dtype
from draftsmith.models.formats.exporting import check_export
from draftsmith.models.guidance import loaded_target
from draftsmith.models.prompt import PlacedInsert
from draftsmith.models.quantize import target_changes
from draftsmith.models.target import Target, checked_capture_layers
from draftsmith.models.target_session import batches_by_length
from draftsmith.recipes.command.cli import Command
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.atomic import clear_partial_files
from draftsmith.recipes.files.lock import alone_in
from draftsmith.recipes.loader import output_problem
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe

MANIFEST_BYTES_A_SHARD = 450
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
    check_export(recipe)
    if not recipe.conversations_path.exists():  # planned before regeneration
        for text in early_plan_lines(recipe, directory):
            print(text)
        return
    rejects = Rejects(None if command.plan else recipe.training_rejects_path)
    job = job_of(recipe, rejects)
    if rejects.total:
        print(rejects.summary())
    with ExitStack() as held:
        if directory.exists() and not command.plan:
            held.enter_context(alone_in(directory))
        manifest = store_so_far(directory, job, command.verify)
        for text in capture_plan_lines(job, manifest, directory):
            print(text)
        if command.plan:
            return
        check_room(job, manifest, directory)
        if not directory.exists():
            manifest.make_folder(directory)
            held.enter_context(alone_in(directory))
        clear_leftovers(directory, manifest)
        if manifest.complete and manifest.files:
            print(f"all is captured: {store_summary(manifest)}")
            return
        missing = missing_shards(job, manifest)
        team.publish(MISSING, missing)
        capture(job, missing, directory, team, manifest)
    print(f"{directory}: {store_summary(manifest)}")


def follow(team: Team, read_command: Callable[[], Command]) -> None:
    """Any other rank: starts after rank 0 has published the missing shards."""
    missing: list[int] = team.receive(MISSING)
    if team.rank >= len(missing):
        return  # there is no shard left for this rank
    logging.disable_progress_bar()  # transformers': rank 0 shows its own
    recipe = read_command().recipe
    capture(job_of(recipe, Rejects()), missing, recipe.states_dir, team)


@dataclass(frozen=True)
class Job:
    """The store that the recipe asks for.

    Args:
        shards: the rows of each shard.
        made_of: the manifest's made_of as far as it is known before the target is loaded.
    """

    recipe: Recipe
    fingerprint: str
    layers: tuple[int, ...]
    shape: RowShape
    shards: list[list[TrainingRow]]
    made_of: dict[str, Any]

    @classmethod
    def of(cls, recipe: Recipe, rows: Sequence[TrainingRow], fingerprint: str) -> "Job":
        section, settings = recipe.target, recipe.data.capture
        config = load_config(section).get_text_config(decoder=True)
        layers = layers_of(recipe, config)
        has_last = layers[-1] != config.num_hidden_layers
        pictures = recipe.drafter.reads_picture_states
        shape = RowShape(len(layers), config.hidden_size, ENCODINGS[settings.dtype], has_last, pictures)
        target = config_identity(config, section.model, section.revision, fingerprint, target_changes(section))
        made_of = {
            "target": target | logit_settings(config),
            "capture_layers": list(layers),
            "dtype": settings.dtype,
            "picture_states": pictures,
            "rows": rows_identity({key_of(row) for row in rows}),
            # These change the last bits of a state, or the shard of a row.
            "computed_in": str(torch_dtype(config, section.dtype)).removeprefix("torch."),
            "shard_megabytes": settings.shard_megabytes,
            "batch_tokens": settings.batch_tokens,
        }
        shards = shape.shards(rows, settings.shard_megabytes * 1e6)
        return cls(recipe, fingerprint, layers, shape, shards, made_of)

    @property
    def rows(self) -> list[TrainingRow]:
        """Distinct rows."""
        return [row for shard in self.shards for row in shard]

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the target's dtype."""
        return torch_dtype(load_config(self.recipe.target), self.recipe.target.dtype).itemsize

    @property
    def bytes_of_target(self) -> int:
        """Size of target/: head, embeddings, config and tokenizer."""
        section = self.recipe.target
        config = load_config(section)
        size = head_bytes(config.get_text_config(decoder=True), torch_dtype(config, section.dtype).itemsize)
        with tempfile.TemporaryDirectory() as folder:
            save_config_and_tokenizer(section, Path(folder))
            return size + sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def job_of(recipe: Recipe, rejects: Rejects) -> Job:
    tokenizer = load_tokenizer(recipe.target)
    return Job.of(recipe, usable_rows(recipe, tokenizer, rejects), tokenizer_fingerprint(tokenizer))


def layers_of(recipe: Recipe, config: Any) -> tuple[int, ...]:
    """Layers that the recipe's drafter reads. EAGLE-1 reads the last state, behind the final norm."""
    if recipe.drafter.extends == "eagle":
        return (config.num_hidden_layers,)
    return checked_capture_layers(recipe.drafter.capture_layers, config.num_hidden_layers)


def store_so_far(directory: Path, job: Job, verify: bool) -> StoreManifest:
    """The folder's manifest without damaged shards, or a new one. Raises UserError if its settings differ."""
    manifest = StoreManifest.read(directory)
    if manifest is None:
        return StoreManifest(job.made_of, len(job.shards))
    # Parts of the target's identity are known only from the weights.
    target = manifest.made_of["target"] | job.made_of["target"]
    manifest.refuse_if(manifest.other_than(manifest.made_of | job.made_of | {"target": target}), directory)
    for number, entry in list(manifest.shards.items()):
        if problem := file_problem(directory / entry["file"], entry, verify):
            print(f"note: {problem}; captured again")
            del manifest.shards[number]
    for number in list(manifest.shards):
        for problem in drop_damaged(job.shards[number], directory, verify):
            print(f"note: {problem}; captured again")
            manifest.shards.pop(number, None)
    if not target_is_whole(directory, manifest, verify):
        manifest.files = {}
    return manifest


def clear_leftovers(directory: Path, manifest: StoreManifest) -> None:
    """Removes files that a kill left half-written or half-deleted."""
    clear_partial_files(directory)
    clear_partial_files(directory / PICTURES)
    if manifest.files:  # else `save_target` writes it again and clears up
        for leftover in (directory / "target.partial", directory / "target.replaced"):
            shutil.rmtree(leftover, ignore_errors=True)


def missing_shards(job: Job, manifest: StoreManifest) -> list[int]:
    return [number for number in range(len(job.shards)) if number not in manifest.shards]


# Sizes.


def estimated_bytes(job: Job) -> int:
    """Size of the whole store: shards, target/ and manifest."""
    shards = sum(map(job.shape.bytes_of_shard, job.shards))
    pictures = sum(each.length for each in inserts_of(job.rows).values()) * job.shape.hidden_size * job.itemsize
    return shards + pictures + job.bytes_of_target + MANIFEST_BYTES_A_SHARD * (2 + len(job.shards))


def early_plan_lines(recipe: Recipe, directory: Path) -> Iterator[str]:
    config = load_config(recipe.target).get_text_config(decoder=True)
    layers = layers_of(recipe, config)
    states = len({*layers, config.num_hidden_layers})  # the last one teaches
    a_token = states * ENCODINGS[recipe.data.capture.dtype].bytes_of(config.hidden_size)
    longest, most = longest_row(recipe), recipe.data.max_prompts
    if note := bounded_rows(recipe):
        yield note
    yield f"rows           of {recipe.conversations_path}, which is not there yet"
    yield f"states         {sorted({*layers, config.num_hidden_layers})}, in {recipe.data.capture.dtype}"
    yield f"a token        at most {a_token:,} bytes of states"
    rows = 1000 if most is None else most
    yield f"disk           {gigabytes(rows * longest * a_token)} of states for {rows:,} rows of {longest:,} tokens"
    yield f"writes         {directory}"


def capture_plan_lines(job: Job, manifest: StoreManifest, directory: Path) -> Iterator[str]:
    rows, shape = job.rows, job.shape
    read = sum(map(length_of, rows))
    tokens = sum(stored_tokens(row, shape.picture_states) for row in rows)
    taught = sum(taught_tokens(row.spans) for row in rows)
    a_token = shape.encoding.bytes_of(shape.hidden_size) * (shape.states + (taught / tokens if shape.has_last else 0))
    last = f"the last one of {taught:,} ({taught / tokens:.0%})" if shape.has_last else "which also teaches"
    of = "every token" if tokens == read else f"{tokens:,} tokens that a vispec drafter reads"
    yield f"rows           {len(rows):,}, {read:,} tokens, of training and validation"
    yield f"states         {list(job.layers)} of {of}, {last}, in {job.recipe.data.capture.dtype}"
    if pictures := inserts_of(rows):
        of_pictures = sum(each.length for each in pictures.values())
        yield f"pictures       input embeddings of {len(pictures):,}, {of_pictures:,} tokens, each stored once"
    yield f"a token        {a_token:,.0f} bytes of states"
    count = len(job.shards)
    yield (
        f"disk           {gigabytes(estimated_bytes(job))} in {count:,} shard{'s' * (count > 1)}, "
        f"{gigabytes(free_bytes(directory))} are free there"
    )
    if manifest.shards:
        yield f"done           {store_summary(manifest)}"
    yield f"writes         {directory}"


def free_bytes(directory: Path) -> int:
    """Free bytes of the disk that holds or will hold `directory`."""
    there = next(each for each in (directory.absolute(), *directory.absolute().parents) if each.exists())
    return shutil.disk_usage(there).free


def check_room(job: Job, manifest: StoreManifest, directory: Path) -> None:
    """Raises UserError, before anything is written, if the missing files do not fit on the disk."""
    left = sum(job.shape.bytes_of_shard(job.shards[number]) for number in missing_shards(job, manifest))
    left += 0 if manifest.files else job.bytes_of_target
    left += picture_bytes(job.rows, job.shape.hidden_size, job.itemsize, directory)
    free = free_bytes(directory)
    if left > free:
        raise UserError(
            f"data.states: {gigabytes(left)} are still to be written to {directory}, and {gigabytes(free)} are free "
            "there: make room, name another folder, or take data.capture.dtype=int8 or a smaller data.max_length"
        )


def store_summary(manifest: StoreManifest) -> str:
    rows, tokens, size = (manifest.total(name) for name in ("rows", "tokens", "bytes"))
    shards = f"{len(manifest.shards):,} of {manifest.of:,} shards"
    text = f"{rows:,} rows, {tokens:,} tokens, {gigabytes(size)} in {shards}"
    if broken := manifest.total("nonfinite_rows"):
        text += f"; {broken:,} rows have NaN or inf among their states, and training will skip them"
    return text


# Capturing.


def capture(
    job: Job, missing: Sequence[int], directory: Path, team: Team, manifest: StoreManifest | None = None
) -> None:
    """Makes missing shards until all are taken.

    Raises UserError if the existing shards or rank 0 have another target, or if the disk is full.

    Args:
        missing: the same for all processes.
        manifest: given to rank 0, which also writes target/ and waits for all shards.
    """
    section = job.recipe.target
    target = loaded_target(section, job.layers, team.take_device(section.device))
    identity = target_identity(target, section.model, section.revision, job.fingerprint, target_changes(section))
    identity |= {"embedding_scale": target.embedding_scale}
    made_of = job.made_of | {"target": job.made_of["target"] | identity}
    ledger = None
    try:
        if manifest is None:
            check_same(team, made_of)
        else:
            if manifest.shards:
                manifest.refuse_if(manifest.other_than(made_of), directory, "from another target")
            manifest.made_of = made_of
            team.publish(MADE_OF, made_of)
            if not manifest.files:
                manifest.files = save_target(section, target, directory)
                manifest.write(directory)
            tokens = sum(length_of(row) for number in missing for row in job.shards[number])
            ledger = Ledger(directory, manifest, team, tokens)
        make_shards(job, missing, target, directory, team, ledger)
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

    def __init__(self, directory: Path, manifest: StoreManifest, team: Team, tokens: int):
        self.directory, self.manifest, self.team = directory, manifest, team
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
        return self.manifest.complete


def make_shards(
    job: Job, missing: Sequence[int], target: Target, directory: Path, team: Team, ledger: Ledger | None
) -> None:
    """Takes, writes and publishes shards, one at a time."""
    while (taken := team.count(TAKEN, 1)) <= len(missing):
        number = missing[taken - 1]
        shard = ShardBuffer(job.shape, job.shards[number])
        for batch in batches_by_length([*map(length_of, shard.rows)], job.recipe.data.capture.batch_tokens):
            fill(shard, batch, target)
            team.count(TOKENS, sum(length_of(shard.rows[index]) for index in batch))
            if ledger is not None:
                ledger.update()
        save_pictures(shard.rows, target, directory, team.rank)  # first: a shard in the manifest has its pictures
        entry = shard.write(directory, number)
        nonfinite = [shard.rows[index].id for index in sorted(shard.nonfinite)]
        team.publish(f"{WRITTEN}/{team.count(WRITTEN, 1)}", (number, entry, nonfinite))
        if ledger is not None:
            ledger.update()


def fill(shard: ShardBuffer, batch: Sequence[int], target: Target) -> None:
    """Runs the target over some rows of a shard and stores their states in it."""
    rows = [shard.rows[index] for index in batch]
    ids = pad_sequence([torch.tensor(row.input_ids[: length_of(row)]) for row in rows], batch_first=True)
    inserts = [
        PlacedInsert(i, each) for i, row in enumerate(rows) for each in row.inserts if each.first < length_of(row)
    ]
    states = target.states(ids.to(target.device), inserts=inserts)
    for i, (index, row) in enumerate(zip(batch, rows, strict=True)):
        shard.put(index, states.captured[i, : length_of(row)], states.last[i, : length_of(row)])
