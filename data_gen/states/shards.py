"""Folders of shards and a manifest: the format of hidden states and of labelled trees.

    manifest.json               settings, and each shard's sha256 and counts
    shard-00000.safetensors     ...

Every file is written atomically (`recipes.files.atomic`), and files that the manifest does not name are ignored. So a
kill costs only the unfinished shards.
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
    """The content of a folder's shards.

    Args:
        script: writes such folders.
        verb: names what the script does, in messages.
    """

    name: str
    script: str
    verb: str

    def write(self, directory: Path, words: dict[str, Any]) -> None:
        """Writes the manifest."""
        atomic_write(directory / MANIFEST, json.dumps({"kind": self.name} | words, indent=2) + "\n")

    def read(self, directory: Path, parse: Callable[[dict[str, Any]], T]) -> T | None:
        """The parsed manifest, or None without one. Raises UserError for a damaged one or another kind of file.

        Args:
            parse: raises KeyError, TypeError, ValueError or AttributeError for values that `write` never writes.
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
    """Raises ValueError unless each value is a whole number of 0 or more."""
    for key in keys:
        if type(words[key]) is not int or words[key] < 0:
            raise ValueError(f"{name}: {key}: {short(words[key])} must be a whole number, 0 or more")
