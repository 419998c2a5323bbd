"""A store's manifest, and the entries of its shards.

Every file is written atomically (`recipes.files.atomic`), a shard's entry after the shard. So a shard with an entry is
whole, a kill costs only unfinished shards, and processes that share a capture need not know of each other.
"""

import hashlib
import json
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from draftsmith.models.checkpoint import differences
from draftsmith.models.costs import gigabytes
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.digest import file_digest
from draftsmith.recipes.files.json_text import json_object

MANIFEST, KIND = "manifest.json", "hidden_states"
PLACE = ("model", "revision")  # of the target: it may be moved
ENTRY = ("file", "bytes", "sha256", "made_of", "rows", "tokens", "teacher_tokens", "nonfinite_rows")


@dataclass
class StoreManifest:
    made_of: dict[str, Any]  # everything that determines the shards
    of: int  # shards of the complete store
    files: dict[str, dict[str, Any]] = field(default_factory=dict)  # size and sha256 of each file in target/
    shards: dict[int, dict[str, Any]] = field(default_factory=dict)  # entries by number

    @property
    def complete(self) -> bool:
        return len(self.shards) == self.of

    def total(self, name: str) -> int:
        """Sum over the shards of a number in their entries."""
        return sum(shard[name] for shard in self.shards.values())

    def summary(self) -> str:
        rows, tokens, size = (self.total(name) for name in ("rows", "tokens", "bytes"))
        text = f"{rows:,} rows, {tokens:,} tokens, {gigabytes(size)} in {len(self.shards):,} of {self.of:,} shards"
        if broken := self.total("nonfinite_rows"):
            text += f"; {broken:,} rows have NaN or inf among their states, and training will skip them"
        return text

    def write(self, directory: Path) -> None:
        """Writes the manifest without the entries."""
        fields = {"kind": KIND, "of_shards": self.of, "made_of": self.made_of, "target_files": self.files}
        atomic_write(directory / MANIFEST, json.dumps(fields, indent=2) + "\n")

    @classmethod
    def read(cls, directory: Path) -> "StoreManifest | None":
        """The manifest with its entries, or None. Raises UserError for damage or shards of other states."""
        path = directory / MANIFEST
        try:
            fields = json_object(path.read_bytes(), "kind", "of_shards", "made_of", "target_files")
            if fields["kind"] != KIND:
                raise ValueError("another kind of file")
        except FileNotFoundError:
            return None
        except ValueError as error:
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
