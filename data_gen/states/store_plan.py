"""The store that a recipe asks for: its states, its rows and shards, their sizes, and what of them is there."""

import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.data_gen.states.manifest import StoreManifest, file_problem
from draftsmith.data_gen.states.store import (
    ENCODINGS,
    RowShape,
    key_of,
    length_of,
    rows_identity,
    stored_tokens,
    taught_tokens,
)
from draftsmith.data_gen.states.stored_pictures import drop_damaged, inserts_of, picture_bytes
from draftsmith.data_gen.states.stored_target import head_bytes, logit_settings, target_is_whole
from draftsmith.data_gen.states.written import WrittenRows
from draftsmith.data_gen.training_rows.rows import TrainingRow, usable_rows
from draftsmith.models.context_limits import bounded_rows, longest_row
from draftsmith.models.costs import free_bytes, gigabytes
from draftsmith.models.drafters import states_read
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.inputs import made_by
from draftsmith.recipes.command.launch import rank, world_size
from draftsmith.recipes.command.plan import PlanLines, plural
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.rejects import Rejects
from draftsmith.recipes.schema import Recipe

MANIFEST_BYTES_A_SHARD = 450


@dataclass(frozen=True)
class WantedStates:
    """The states that the recipe asks for, of whichever rows. Fields as of `StorePlan`."""

    layers: tuple[int, ...]
    shape: RowShape
    made_of: dict[str, Any]

    @classmethod
    def of(cls, recipe: Recipe, files: TargetFiles) -> "WantedStates":
        config, dtype = files.text_config, recipe.data.capture.dtype
        layers, pictures = states_read(recipe.drafter, config.num_hidden_layers), recipe.drafter.reads_picture_states
        has_last = layers[-1] != config.num_hidden_layers
        shape = RowShape(len(layers), config.hidden_size, ENCODINGS[dtype], has_last, pictures)
        made_of = {
            "target": files.identity | logit_settings(config),
            "capture_layers": list(layers),
            "dtype": dtype,
            "picture_states": pictures,
            "computed_in": str(files.dtype).removeprefix("torch."),
        }
        return cls(layers, shape, made_of)

    def bytes_of(self, tokens: float, taught: float) -> float:
        """Size of rows with so many tokens in all, and so many of answers."""
        a_state = self.shape.encoding.bytes_of(self.shape.hidden_size)
        return a_state * (self.shape.states * tokens + (taught if self.shape.has_last else 0))

    def made_with(self, files: TargetFiles, target: Target) -> dict[str, Any]:
        """`made_of` with what only the weights tell."""
        return self.made_of | {"target": self.made_of["target"] | stored_identity(files, target)}


def stored_identity(files: TargetFiles, target: Target) -> dict[str, Any]:
    return files.identity_of(target) | {"embedding_scale": target.embedding_scale}


@dataclass(frozen=True)
class StorePlan:
    """The store that the recipe asks for.

    Args:
        shards: the rows of each shard.
        made_of: the manifest's made_of as far as it is known before the target is loaded.
    """

    recipe: Recipe
    files: TargetFiles
    layers: tuple[int, ...]
    shape: RowShape
    shards: list[list[TrainingRow]]
    made_of: dict[str, Any]

    @classmethod
    def of(cls, recipe: Recipe, rows: Sequence[TrainingRow], files: TargetFiles) -> "StorePlan":
        settings, asked = recipe.data.capture, WantedStates.of(recipe, files)
        made_of = asked.made_of | {
            "rows": rows_identity({key_of(row) for row in rows}),
            # These change the last bits of a state, or the shard of a row.
            "shard_megabytes": settings.shard_megabytes,
            "batch_tokens": settings.batch_tokens,
        }
        shards = asked.shape.shards(rows, settings.shard_megabytes * 1e6)
        return cls(recipe, files, asked.layers, asked.shape, shards, made_of)

    @property
    def rows(self) -> list[TrainingRow]:
        """Distinct rows."""
        return [row for shard in self.shards for row in shard]

    @property
    def itemsize(self) -> int:
        """Bytes of a number in the target's dtype."""
        return self.files.dtype.itemsize

    @property
    def bytes_of_target(self) -> int:
        """Size of target/: head, embeddings, config and tokenizer."""
        size = head_bytes(self.files.text_config, self.itemsize)
        with tempfile.TemporaryDirectory() as folder:
            self.files.save_without_weights(Path(folder))
            return size + sum(path.stat().st_size for path in Path(folder).rglob("*") if path.is_file())


def plan_store(recipe: Recipe, files: TargetFiles, rejects: Rejects) -> StorePlan:
    return StorePlan.of(recipe, usable_rows(recipe, files, rejects), files)


def store_so_far(directory: Path, wanted: StorePlan, verify: bool) -> StoreManifest:
    """The folder's manifest without damaged shards, or a new one. Raises UserError if its settings differ.

    Each process of a capture reads only its own shards to verify them.
    """
    manifest = StoreManifest.read(directory)
    if manifest is None:
        return StoreManifest(wanted.made_of, len(wanted.shards))
    manifest.refuse_if_other(wanted.made_of, directory)
    for number, entry in list(manifest.shards.items()):
        own = is_own(number)
        problems = [file_problem(directory / entry["file"], entry, verify and own)]
        problems += drop_damaged(wanted.shards[number], directory, verify) if own else []
        for problem in filter(None, problems):
            if own:
                print(f"note: {problem}; captured again")
            manifest.shards.pop(number, None)
    if not target_is_whole(directory, manifest, verify and rank() == 0):
        manifest.files = {}
    return manifest


def rows_written(directory: Path, wanted: StorePlan) -> WrittenRows | None:
    """The rows that regeneration has stored, or None. Raises UserError if they are of other states."""
    written = WrittenRows(directory)
    if written.manifest is None:
        return None
    written.manifest.refuse_if_other(
        {key: wanted.made_of[key] for key in written.manifest.made_of if key != "rows"}, directory
    )
    return written


def is_own(number: int) -> bool:
    """Whether this process of a capture writes shard `number`."""
    return number % world_size() == rank()


def missing_shards(wanted: StorePlan, manifest: StoreManifest) -> list[int]:
    return [number for number in range(len(wanted.shards)) if number not in manifest.shards]


def rows_to_make(wanted: StorePlan, manifest: StoreManifest) -> list[TrainingRow]:
    """The rows of missing shards."""
    return [row for number in missing_shards(wanted, manifest) for row in wanted.shards[number]]


def needs_target(wanted: StorePlan, manifest: StoreManifest, directory: Path, written: WrittenRows | None) -> bool:
    """Whether files are missing that cannot be made from written rows alone."""
    rows = rows_to_make(wanted, manifest)
    return (not manifest.files or bool(rows)) and (
        written is None
        or written.manifest is None
        or not (manifest.files or target_is_whole(directory, written.manifest, verify=False))
        or any(row not in written for row in rows)
        or picture_bytes(rows, wanted.shape.hidden_size, wanted.itemsize, directory) > 0
    )


# Sizes.


def estimated_bytes(wanted: StorePlan) -> int:
    """Size of the whole store: shards, target/ and manifest."""
    shards = sum(map(wanted.shape.bytes_of_shard, wanted.shards))
    pictures = (
        sum(each.length for each in inserts_of(wanted.rows).values()) * wanted.shape.hidden_size * wanted.itemsize
    )
    return shards + pictures + wanted.bytes_of_target + MANIFEST_BYTES_A_SHARD * (2 + len(wanted.shards))


def plan_before_regeneration(plan: PlanLines, recipe: Recipe, files: TargetFiles) -> None:
    if note := bounded_rows(recipe, files):
        print(note)
    longest, asked = longest_row(recipe, files), WantedStates.of(recipe, files)
    plan.reads(made_by("regenerate", recipe))
    plan.line("rows", "unknown until regenerate has run")
    plan.line("states", f"{list(asked.layers)}{' and the last' * asked.shape.has_last}, {recipe.data.capture.dtype}")
    rows, free = recipe.data.max_prompts or 1, gigabytes(free_bytes(recipe.states_dir))
    most = gigabytes(rows * asked.bytes_of(longest, longest))
    plan.line("disk", f"at most {most} for {plural(rows, 'row')} of {longest:,} tokens; {free} are free", "exact")
    plan.writes(recipe.states_dir)


def plan_capture(
    plan: PlanLines, wanted: StorePlan, manifest: StoreManifest, directory: Path, written: WrittenRows | None
) -> None:
    rows, shape = wanted.rows, wanted.shape
    tokens = sum(stored_tokens(row, shape.picture_states) for row in rows)
    taught = sum(taught_tokens(row.spans) for row in rows)
    last = f"the last of {taught:,} ({taught / tokens:.0%})" if shape.has_last else "which also teaches"
    plan.reads(made_by("regenerate", wanted.recipe))
    plan.line("rows", f"{len(rows):,}, {sum(map(length_of, rows)):,} tokens, of training and validation", "counted")
    plan.line("states", f"{list(wanted.layers)} of {tokens:,} tokens, {last}, in {wanted.recipe.data.capture.dtype}")
    if pictures := inserts_of(rows):
        of_pictures = sum(each.length for each in pictures.values())
        plan.line("pictures", f"input embeddings of {len(pictures):,}, {of_pictures:,} tokens, each stored once")
    size, free = gigabytes(estimated_bytes(wanted)), gigabytes(free_bytes(directory))
    plan.line("disk", f"{size} in {plural(len(wanted.shards), 'shard')}; {free} are free", "exact but for file headers")
    if manifest.shards:
        plan.line("done", store_summary(manifest))
    if written is not None and (left := rows_to_make(wanted, manifest)):
        there = sum(row in written for row in left)
        text = f"{there:,} of {len(left):,} rows with their answers"
        plan.line("written", text + "; the target runs for the others" * (there < len(left)))
    plan.writes(directory)


def check_room(wanted: StorePlan, manifest: StoreManifest, directory: Path, written: WrittenRows | None = None) -> None:
    """Raises UserError, before anything is written, if the missing files do not fit on the disk."""
    sizes = [wanted.shape.bytes_of_shard(wanted.shards[number]) for number in missing_shards(wanted, manifest)]
    left = sum(sizes)
    if written is not None and sizes:  # what is written makes room, shard by shard
        left = max(max(sizes), left - written.bytes)
    left += 0 if manifest.files else wanted.bytes_of_target
    left += picture_bytes(wanted.rows, wanted.shape.hidden_size, wanted.itemsize, directory)
    free = free_bytes(directory)
    if left > free:
        raise UserError(
            f"data.states: {gigabytes(left)} are still to be written to {directory}, and {gigabytes(free)} are free "
            "there: make room, name another folder, or take data.capture.dtype=fp8 or a smaller data.max_length"
        )


def store_summary(manifest: StoreManifest) -> str:
    rows, tokens, size = (manifest.total(name) for name in ("rows", "tokens", "bytes"))
    shards = f"{len(manifest.shards):,} of {manifest.of:,} shards"
    text = f"{rows:,} rows, {tokens:,} tokens, {gigabytes(size)} in {shards}"
    if broken := manifest.total("nonfinite_rows"):
        text += f"; {broken:,} rows have NaN or inf among their states, and training will skip them"
    return text
