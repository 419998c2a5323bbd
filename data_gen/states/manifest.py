"""A store's manifest, and the entries of its shards.

    manifest.json       what determines the states, the number of shards, size and sha256 of each file in target/
    shard-00000.json    size, sha256 and counts of shard-00000.safetensors, and a digest of what determines its states

Every file is written atomically (`recipes.files.atomic`), a shard's entry after the shard. So a shard with an entry is
whole, a kill costs only unfinished shards, and processes that share a capture need not know of each other: each
writes entries of its own.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.models.checkpoint import differences
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.digest import file_digest
from draftsmith.recipes.files.json_text import json_object

MANIFEST, KIND = "manifest.json", "hidden_states"
MADE_OF = {"target", "capture_layers", "dtype", "picture_states", "rows"}  # keys of `StoreManifest.made_of`
PLACE = ("model", "revision")  # of the target: it may be moved
ENTRY = ("file", "bytes", "sha256", "made_of", "keys_sha256", "rows", "tokens", "teacher_tokens", "nonfinite_rows")


@dataclass
class StoreManifest:
    """
    Args:
        made_of: everything that determines the shards.
        of: number of shards of the complete store.
        files: size and sha256 of each file in target/.
        shards: entries by number, with the keys ENTRY.
    """

    made_of: dict[str, Any]
    of: int
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    shards: dict[int, dict[str, Any]] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        return len(self.shards) == self.of

    def total(self, name: str) -> int:
        """Sum over the shards of "rows", "tokens", "teacher_tokens", "nonfinite_rows" or "bytes"."""
        return sum(shard[name] for shard in self.shards.values())

    def write(self, directory: Path) -> None:
        """Writes the manifest without the entries."""
        fields = {"kind": KIND, "of_shards": self.of, "made_of": self.made_of, "target_files": self.files}
        atomic_write(directory / MANIFEST, json.dumps(fields, indent=2) + "\n")

    @classmethod
    def read(cls, directory: Path) -> "StoreManifest | None":
        """The manifest with the entries that are there, or None if there is no manifest yet.

        Raises UserError for a damaged manifest, another kind of file, or shards of other states.
        """
        path = directory / MANIFEST
        try:
            fields = json_object(path.read_bytes(), "kind", "of_shards", "made_of", "target_files")
            known = fields["kind"] == KIND and isinstance(fields["target_files"], dict)
            if not known or not fields["made_of"].keys() >= MADE_OF:
                raise ValueError("another kind of file")
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        except (ValueError, AttributeError) as error:
            raise UserError(
                f"{path}: not a manifest of hidden states ({error}); delete the folder and capture again"
            ) from None
        manifest = cls(fields["made_of"], fields["of_shards"], fields["target_files"])
        manifest.look(directory)
        for entry in manifest.shards.values():
            if entry["made_of"] != manifest.digest:
                raise UserError(
                    f"{directory / entry['file']}: its states differ from the manifest's in target, rows or settings: "
                    "did all processes see the same conversations and the same target? Delete the folder and capture "
                    "again"
                )
        return manifest

    def look(self, directory: Path) -> None:
        """Reads the entries that are there now. A damaged one counts as missing, and its shard is made again."""
        self.shards = {}
        for number in range(self.of):
            with suppress(FileNotFoundError, ValueError):
                self.shards[number] = json_object(entry_path(directory, number).read_bytes(), *ENTRY)

    @property
    def digest(self) -> str:
        """sha256 of `made_of`, without the target's place."""
        target = {key: value for key, value in self.made_of["target"].items() if key not in PLACE}
        return hashlib.sha256(json.dumps(self.made_of | {"target": target}, sort_keys=True).encode()).hexdigest()

    def other_than(self, wanted: dict[str, Any]) -> list[str]:
        """Differences from what is asked for, both sides named. `wanted` may lack what only the weights tell."""
        asked = self.made_of | wanted
        asked["target"] = self.made_of["target"] | asked["target"]
        return [
            f"{key}: {theirs!r} there, {mine!r} now"
            for key, theirs, mine in differences(self.made_of, json.loads(json.dumps(asked)))
            if key not in [f"target.{name}" for name in PLACE]
        ]

    def refuse_if_other(self, wanted: dict[str, Any], directory: Path) -> None:
        """Raises UserError if the states are not those that are asked for."""
        if different := self.other_than(wanted):
            raise UserError(
                f"{directory}: hidden states captured with other settings ({'; '.join(different)}); name another "
                "data.states, or delete that folder"
            )


def make_folder(directory: Path) -> None:
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"data.states: {directory} cannot be made: {error.strerror}; name another folder") from None


def shard_path(directory: Path, number: int) -> Path:
    return directory / f"shard-{number:05d}.safetensors"


def entry_path(directory: Path, number: int) -> Path:
    return shard_path(directory, number).with_suffix(".json")


def file_problem(path: Path, entry: dict[str, Any], digest: bool = False) -> str | None:
    """What is wrong with a written file, or None. Compares its size and, with `digest`, its sha256."""
    try:
        if (size := path.stat().st_size) != entry["bytes"]:
            return f"{path}: damaged: {size:,} bytes instead of {entry['bytes']:,}"
        if digest and file_digest(path) != entry["sha256"]:
            return f"{path}: damaged: not what was written (its sha256 differs)"
    except OSError as error:
        return f"{path}: {error.strerror.lower() if error.strerror else error}"
    return None
