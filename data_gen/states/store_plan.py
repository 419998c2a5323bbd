"""The states that a recipe asks for, whichever rows there are, and a shard of them in memory."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from draftsmith.data_gen.states.manifest import entry_path, shard_path
from draftsmith.data_gen.states.store import (
    ENCODINGS,
    KEY_BYTES,
    Encoded,
    Encoding,
    key_of,
    stored_positions,
    stored_tokens,
    taught_tokens,
    teacher_positions,
)
from draftsmith.data_gen.states.stored_target import logit_settings
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.drafters import states_read
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.files.atomic import atomic_path, atomic_write
from draftsmith.recipes.files.digest import file_digest
from draftsmith.recipes.schema import Recipe


@dataclass(frozen=True)
class WantedStates:
    """
    Attributes:
        layers: the S captured ones.
        has_last: the teacher's last states are stored separately.
        picture_states: whether states of pictures are stored.
        made_of: the manifest's, as far as it is known before the target is loaded and rows are read.
    """

    layers: tuple[int, ...]
    hidden_size: int
    encoding: Encoding
    has_last: bool
    picture_states: bool
    made_of: dict[str, Any]

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

    def parts(self, row: TrainingRow, states: Encoded) -> dict[str, torch.Tensor]:
        """The states of a row by their names in a shard, in the host's memory.

        Args:
            states: of its first `states_length` tokens or more, [T, S, H]; with `has_last` [T, S + 1, H], the last
                states behind the captured ones.
        """
        parts = dict[str, torch.Tensor]()
        for name, part in zip(("", "_scale"), states, strict=True):
            if part is not None:
                stored, taught = stored_positions(row, self.picture_states), torch.tensor(teacher_positions(row.spans))
                parts[f"captured{name}"] = part[stored.to(part.device), : len(self.layers)].cpu()
                if self.has_last:
                    parts[f"last{name}"] = part[taught.long().to(part.device), len(self.layers)].cpu()
        return parts


class Shard:
    """A shard to be filled row by row.

    Attributes:
        parts: of each row, what `WantedStates.parts` makes of its states.
    """

    def __init__(self, wanted: WantedStates, rows: Sequence[TrainingRow]):
        self.wanted, self.rows = wanted, rows
        self.parts = [dict[str, torch.Tensor]() for _ in rows]

    def put(self, index: int, captured_TF: torch.Tensor, last_TH: torch.Tensor) -> None:
        """Encodes the states of row `index`: of its `states_length` tokens."""
        states = captured_TF.unflatten(-1, (len(self.wanted.layers), -1))
        if self.wanted.has_last:
            states = torch.cat([states, last_TH[:, None]], dim=1)
        self.parts[index] = self.wanted.parts(self.rows[index], self.wanted.encoding.encode(states))

    @property
    def broken(self) -> list[str]:
        """Ids of rows with NaN or inf among their states. fp8 has no inf; its scale shows it."""
        return [
            row.id
            for row, parts in zip(self.rows, self.parts, strict=True)
            if not all(part.isfinite().all() for name, part in parts.items() if f"{name}_scale" not in parts)
        ]

    def write(self, directory: Path, number: int, made_of: str) -> None:
        """Writes shard `number`, then its entry.

        Args:
            made_of: the manifest's `digest`.
        """
        stored = (stored_tokens(row, self.wanted.picture_states) for row in self.rows)
        starts, last_starts = (
            torch.tensor(list(accumulate(counts, initial=0)))
            for counts in (stored, (taught_tokens(row.spans) for row in self.rows))
        )
        tensors = {name: torch.cat([parts[name] for parts in self.parts]) for name in self.parts[0]}
        tensors["key"] = torch.tensor([list(key_of(row)) for row in self.rows], dtype=torch.uint8)
        path = shard_path(directory, number)
        with atomic_path(path) as partial:
            save_file(tensors | {"starts": starts, "last_starts": last_starts}, partial)
        entry = {
            "file": path.name,
            "bytes": path.stat().st_size,
            "sha256": file_digest(path),
            "made_of": made_of,
            "rows": len(self.rows),
            "tokens": int(starts[-1]),
            "teacher_tokens": int(last_starts[-1]),
            "nonfinite_rows": len(self.broken),
        }
        atomic_write(entry_path(directory, number), json.dumps(entry) + "\n")
