"""Folders of shards and a manifest: the format of hidden states.

    manifest.json               settings, and each shard's sha256 and counts
    shard-00000.safetensors     ...

Every file is written atomically (`recipes.files.atomic`), and files that the manifest does not name are ignored. So a
kill costs only the unfinished shards.
"""

import json
import re
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from typing_extensions import Self

from draftsmith.models.checkpoint import differences
from draftsmith.recipes.errors import UserError, quoted
from draftsmith.recipes.files.atomic import atomic_path, atomic_write
from draftsmith.recipes.files.digest import file_digest
from draftsmith.recipes.files.json_text import parse_json

MANIFEST = "manifest.json"
SHARD_NAME = re.compile(r"shard-(\d{5,})\.safetensors")


@dataclass
class Manifest:
    """A folder's manifest. The content of the shards is a subclass's.

    Args:
        made_of: everything that determines the shards.
        of: number of shards, or of answers, of the complete folder; OF is its key in the file.
        shards: by number, each with its file, sha256 and COUNTS.
    """

    made_of: dict[str, Any]
    of: int
    shards: dict[int, dict[str, Any]] = field(default_factory=dict)

    KIND: ClassVar[str]
    OF: ClassVar[str]
    COUNTS: ClassVar[tuple[str, ...]]
    KEY: ClassVar[str]  # of the recipe: names the folder
    COMMAND: ClassVar[str]  # writes such folders
    VERB: ClassVar[str]  # what the script does
    DONE: ClassVar[str]  # what it has done

    def total(self, name: str) -> int:
        """Sum over the shards of one of COUNTS."""
        return sum(shard[name] for shard in self.shards.values())

    def write(self, directory: Path) -> None:
        fields = {
            "kind": self.KIND,
            self.OF: self.of,
            **{name: self.total(name) for name in self.COUNTS},
            **self._facts(),
            "made_of": self.made_of,
            "shards": [self.shards[number] for number in sorted(self.shards)],
        }
        atomic_write(directory / MANIFEST, json.dumps(fields, indent=2) + "\n")

    def _facts(self) -> dict[str, Any]:
        """What a subclass adds to the file."""
        raise NotImplementedError

    @classmethod
    def read(cls, directory: Path) -> Self | None:
        """None if there is no manifest yet. Raises UserError for a damaged manifest or another kind of file."""
        path = directory / MANIFEST
        try:
            fields = parse_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"{path}: {error}; delete the folder and {cls.VERB} again") from None
        if not isinstance(fields, dict) or fields.get("kind") != cls.KIND:
            what = cls.KIND.replace("_", " ")
            raise UserError(
                f"{path}: not a manifest of {what} (kind: {cls.KIND}); `draftsmith {cls.COMMAND}` writes one"
            )
        try:
            check_counts("manifest", fields, (cls.OF,))
            manifest = cls(fields["made_of"], fields[cls.OF])
            for shard in fields["shards"]:
                named = SHARD_NAME.fullmatch(shard["file"])
                if named is None or (number := int(named[1])) in manifest.shards:
                    raise ValueError(f"{quoted(shard['file'])} is no file of it")
                if type(shard["sha256"]) is not str:
                    raise ValueError(f"{shard['file']} has no sha256")
                check_counts(shard["file"], shard, cls.COUNTS)
                manifest.shards[number] = shard
            manifest._check(fields)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{error} is missing" if isinstance(error, KeyError) else error
            raise UserError(f"{path}: damaged: {problem}; delete the folder and {cls.VERB} again") from None
        return manifest

    def _check(self, fields: dict[str, Any]) -> None:
        """Reads `_facts` from the file. Raises KeyError, TypeError or ValueError for values that are never written."""
        raise NotImplementedError

    def differences(self, wanted: dict[str, Any], but: Collection[str] = ()) -> list[str]:
        """Differences between `made_of` and what is asked for, both sides named, without the keys in `but`."""
        return [
            f"{key}: {theirs!r} there, {mine!r} now"
            for key, theirs, mine in differences(self.made_of, json.loads(json.dumps(wanted)))
            if key not in but
        ]

    def refuse_if(self, different: list[str], directory: Path, other: str = "with other settings") -> None:
        """Raises UserError if there are differences."""
        if different:
            raise UserError(
                f"{directory}: {self.KIND.replace('_', ' ')} {self.DONE} {other} ({'; '.join(different)}); name "
                f"another {self.KEY}, or delete that folder"
            )

    @classmethod
    def make_folder(cls, directory: Path) -> None:
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"{cls.KEY}: {directory} cannot be made: {error.strerror}; name another folder") from None


def write_shard(
    directory: Path, number: int, tensors: dict[str, torch.Tensor], facts: dict[str, Any]
) -> dict[str, Any]:
    """Writes shard `number` and returns its manifest entry, which holds `facts`."""
    path = directory / f"shard-{number:05d}.safetensors"
    with atomic_path(path) as partial:
        save_file(tensors, partial)
    return {"file": path.name, "bytes": path.stat().st_size, "sha256": file_digest(path), **facts}


def file_problem(path: Path, entry: dict[str, Any], digest: bool = False) -> str | None:
    """What is wrong with a written file, or None. Compares its size and, with `digest`, its sha256."""
    try:
        size = path.stat().st_size
        if size != entry.get("bytes", size):
            return f"{path}: damaged: {size:,} bytes instead of {entry['bytes']:,}"
        if digest and file_digest(path) != entry["sha256"]:
            return f"{path}: damaged: not what was written (its sha256 differs)"
    except OSError as error:
        return f"{path}: {error.strerror.lower() if error.strerror else error}"
    return None


def check_counts(name: str, fields: dict[str, Any], keys: Iterable[str]) -> None:
    """Raises ValueError unless each value is a whole number of 0 or more."""
    for key in keys:
        if type(fields[key]) is not int or fields[key] < 0:
            raise ValueError(f"{name}: {key}: {quoted(fields[key])} must be a whole number, 0 or more")
