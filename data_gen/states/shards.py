"""Folders of shards beside a manifest: how hidden states and labelled trees are named, written whole, and read back.

    manifest.json               what the shards are, and of each its sha256 and counts
    shard-00000.safetensors     ...

Every file is whole or not there (`recipes.files.atomic`). What the manifest does not name does not count, so a kill at
any moment costs the shards that were in the making.
"""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from draftsmith.recipes.errors import UserError, short
from draftsmith.recipes.files.atomic import atomic_write
from draftsmith.recipes.files.json_text import parse_json

MANIFEST = "manifest.json"

T = TypeVar("T")


def make_folder(directory: Path, key: str) -> None:
    """Makes the folder that the recipe names under `key`. Raises UserError."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"{key}: {directory} cannot be made: {error.strerror}; name another folder") from None


def shard_name(number: int) -> str:
    return f"shard-{number:05d}.safetensors"


@dataclass(frozen=True)
class Kind:
    """What the shards of a folder hold, as its manifest says it.

    Args:
        script: which writes such folders.
        verb: what it does.
    """

    name: str
    script: str
    verb: str

    def write(self, directory: Path, words: dict[str, Any]) -> None:
        """Writes the manifest."""
        text = json.dumps({"kind": self.name} | words, indent=2) + "\n"
        atomic_write(directory / MANIFEST, text)

    def read(self, directory: Path, parse: Callable[[dict[str, Any]], T]) -> T | None:
        """What `parse` makes of the manifest; None where there is none yet.

        Args:
            parse: raises KeyError, TypeError, ValueError or AttributeError for what `write` cannot have been given.

        Raises:
            UserError: a manifest that is damaged, or another kind of file.
        """
        path = directory / MANIFEST
        try:
            words = parse_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise UserError(f"{path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise UserError(f"{path}: {error}; delete the folder and {self.verb} again") from None
        if not isinstance(words, dict) or words.get("kind") != self.name:
            what = self.name.replace("_", " ")
            raise UserError(f"{path}: not a manifest of {what} (kind: {self.name}); {self.script} writes one")
        try:
            return parse(words)
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{error} is missing" if isinstance(error, KeyError) else error
            raise UserError(f"{path}: damaged: {problem}; delete the folder and {self.verb} again") from None


def check_counts(name: str, words: dict[str, Any], keys: Iterable[str]) -> None:
    """Raises ValueError where one of them is no whole number of 0 or more."""
    for key in keys:
        if type(words[key]) is not int or words[key] < 0:
            raise ValueError(f"{name}: {key}: {short(words[key])} must be a whole number, 0 or more")
