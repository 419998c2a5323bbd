"""The target's hidden states on disk. The target runs once, and any number of drafters train on the store.

    manifest.json               target, rows and dtype of the store (`data_gen.states.manifest`)
    target/                     the target's embeddings and head (`data_gen.states.stored_target`), config, tokenizer
    pictures/                   input embeddings of the rows' pictures (`data_gen.states.stored_pictures`)
    written/                    rows from `draftsmith regenerate` that are in no shard yet (`data_gen.states.written`)
    shard-00000.json            size, sha256 and counts of a shard
    shard-00000.safetensors     rows, one after another:
        captured        [N, S, H]   the states that the drafter reads, of all tokens that it reads
        captured_scale  [N, S]      float32, only for fp8: a state is values * scale
        last            [M, H]      the last states of teacher positions. `last` and `last_scale` are absent if the
        last_scale      [M]         drafter reads the last state, because `captured` holds it then
        starts          [R + 1]     the captured states of row r are starts[r] to starts[r + 1]
        last_starts     [R + 1]     its last states
        key             [R, 16]     `key_of` each row: of its tokens, spans and inserts, which are not stored

Tokens behind a row's last span are not stored, because training never reads them (`train.run.batches.collate`). Neither
is the state of that span's last token: no counted column reads it, and decoding never computes it. Teachers follow
`models.alignment`: column t has the target's distribution at t + 1, and counts if x[t+1] and x[t+2] lie in one span. So
a span (s, e) needs the last states of s to e - 2:

    position      0  1  2  3  4  5  6  7  8  9 10
    token         u  u  u  >  A  B  C  D  .  u  u          span (4, 9)
    captured      *  *  *  *  *  *  *  *
    last                      *  *  *  *

A ViSpec drafter reads no state in a picture's columns: it has none there, or compressed tokens (`models.vispec`). A
store for ViSpec leaves these states out (`picture_states: false` in the manifest) and serves ViSpec alone; any other
store serves every drafter. Column 6 is the first behind the picture:

    position      0  1  2  3  4  5  6  7  8
    token         u  u  P  P  P  P  P  u  A
    captured      *                 *  *

Rows are sorted into shards by their keys, which are random. A shard is therefore a fair sample, and training shuffles
shards, then the rows of a few neighbouring shards (`train.run.state_sources`).

Shapes: N tokens, S captured states of width H, M teacher positions, R rows, T tokens of a row.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from draftsmith.data_gen.states.manifest import StoreManifest, entry_path, file_problem, shard_path
from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.target_columns import columns_of_picture
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.atomic import atomic_path, atomic_write
from draftsmith.recipes.files.digest import file_digest

T = TypeVar("T")
KEY_BYTES = 16
HEADER_BYTES = 600  # of a shard's safetensors header, about


# Encoding of a state.


@dataclass(frozen=True)
class Encoding:
    """A dtype of stored states. `largest`: the value that a state's largest element is scaled to; None: unscaled."""

    dtype: torch.dtype
    largest: float | None = None

    def bytes_of(self, width: int) -> int:
        """Bytes of one state."""
        return width * self.dtype.itemsize + (0 if self.largest is None else 4)

    def encode(self, states: torch.Tensor) -> "Encoded":
        """States [..., H] as (values [..., H], scales [...] or None). NaN and inf stay visible after decoding."""
        if self.largest is None:
            return states.to(self.dtype), None
        exact = states.float()
        scale = exact.abs().amax(-1) / self.largest
        return (exact / torch.where(scale > 0, scale, 1.0)[..., None]).to(self.dtype), scale

    def decode(self, values: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        return values.to(dtype) if scales is None else (values.float() * scales[..., None]).to(dtype)


ENCODINGS = {
    "bfloat16": Encoding(torch.bfloat16),
    "float32": Encoding(torch.float32),
    "fp8": Encoding(torch.float8_e4m3fn, 448.0),
}


# Rows.


def key_of(row: TrainingRow) -> bytes:
    """Digest of a row's id, spans, tokens and inserts."""
    place = json.dumps([row.id, row.spans]).encode()
    content = array("i", row.input_ids).tobytes() + row.prompt.inserts_digest
    return hashlib.blake2b(place + content, digest_size=KEY_BYTES).digest()


def length_of(row: TrainingRow) -> int:
    """Number of tokens that training reads: nothing behind the last span counts, so nothing there is computed."""
    return max(end for _, end in row.spans)


def states_length(row: TrainingRow) -> int:
    """Number of tokens whose states anything reads: all of `length_of` but the last."""
    return length_of(row) - 1


def columns_of_pictures(row: TrainingRow) -> list[range]:
    """The columns of each picture. One inside an answer is left out: its states may teach."""
    found = []
    for each in row.inserts:
        inside = any(start < each.first + each.length and each.first < stop for start, stop in row.spans)
        if each.first < length_of(row) and not inside:
            found.append(range(*columns_of_picture(each.first, each.length, most=0)[:2]))
    return found


def stored_positions(row: TrainingRow, picture_states: bool) -> torch.Tensor:
    """[n] positions with stored states, ascending."""
    stored = torch.ones(states_length(row), dtype=torch.bool)
    for columns in [] if picture_states else columns_of_pictures(row):
        stored[columns.start : columns.stop] = False
    return stored.nonzero().flatten()


def stored_tokens(row: TrainingRow, picture_states: bool) -> int:
    """Number of `stored_positions`."""
    return states_length(row) - (0 if picture_states else sum(map(len, columns_of_pictures(row))))


def teacher_positions(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Positions with a last state that teaches some column, ascending. The first token has no column before it.

    Later steps reuse the teachers of step 0's other columns (`models.alignment`), so K does not matter.
    """
    return [position for start, end in spans for position in range(max(start, 1), end - 1)]


def taught_tokens(spans: Sequence[tuple[int, int]]) -> int:
    """Number of `teacher_positions`."""
    return sum(max(0, end - max(start, 1) - 1) for start, end in spans)


def rows_identity(keys: Iterable[bytes]) -> str:
    """Number and digest of a set of rows, in any order."""
    ordered = sorted(keys)
    return f"{len(ordered)} rows, sha256 {hashlib.sha256(b''.join(ordered)).hexdigest()}"


# Sizes.


@dataclass(frozen=True)
class RowShape:
    """Determines the bytes of a row.

    Attributes:
        states: S, captured states of a token.
        has_last: the teacher's last states are stored separately.
        picture_states: whether states of pictures are stored.
    """

    states: int
    hidden_size: int
    encoding: Encoding
    has_last: bool
    picture_states: bool

    def bytes_of(self, row: TrainingRow) -> int:
        state, length = self.encoding.bytes_of(self.hidden_size), stored_tokens(row, self.picture_states)
        taught = taught_tokens(row.spans) if self.has_last else 0
        return state * (self.states * length + taught) + 16 + KEY_BYTES

    def shards(self, rows: Sequence[TrainingRow], shard_bytes: float) -> list[list[TrainingRow]]:
        """Divides distinct rows, in the order of their keys, into shards of about the same size."""
        distinct = {key_of(row): row for row in rows}
        sizes = {key: self.bytes_of(row) for key, row in distinct.items()}
        shards: list[list[TrainingRow]] = [[]]
        filled = 0
        for key in sorted(distinct):
            if shards[-1] and filled + sizes[key] > shard_bytes:
                shards.append([])
                filled = 0
            shards[-1].append(distinct[key])
            filled += sizes[key]
        return shards

    def stored(self, row: TrainingRow, states_Tx: torch.Tensor) -> torch.Tensor:
        """Of states of all `states_length` tokens, or their scales, those of `stored_positions`."""
        if stored_tokens(row, self.picture_states) == len(states_Tx):
            return states_Tx
        return states_Tx[stored_positions(row, self.picture_states).to(states_Tx.device)]

    def taught(self, row: TrainingRow, states_Tx: torch.Tensor) -> torch.Tensor:
        """Those of `teacher_positions`."""
        return states_Tx[torch.tensor(teacher_positions(row.spans), device=states_Tx.device, dtype=torch.long)]

    def bytes_of_shard(self, rows: Sequence[TrainingRow]) -> int:
        return HEADER_BYTES + sum(map(self.bytes_of, rows))


# Writing.

Encoded = tuple[torch.Tensor, torch.Tensor | None]  # as `Encoding.encode` gives them


class ShardBuffer:
    """A shard in memory, in its format on disk."""

    def __init__(self, shape: RowShape, rows: Sequence[TrainingRow]):
        self.shape, self.rows = shape, rows
        tokens_of = (stored_tokens(row, shape.picture_states) for row in rows)
        self.starts = list(accumulate(tokens_of, initial=0))
        self.taught_starts = list(accumulate((taught_tokens(row.spans) for row in rows), initial=0))
        tokens, taught = self.starts[-1], self.taught_starts[-1]
        dtype, width = shape.encoding.dtype, shape.hidden_size
        self.tensors = {"captured": torch.empty(tokens, shape.states, width, dtype=dtype)}
        if shape.has_last:
            self.tensors["last"] = torch.empty(taught, width, dtype=dtype)
        if shape.encoding.largest is not None:
            self.tensors["captured_scale"] = torch.empty(tokens, shape.states)
            if shape.has_last:
                self.tensors["last_scale"] = torch.empty(taught)
        self.nonfinite: set[int] = set()

    def put(self, index: int, captured_TF: torch.Tensor, last_TH: torch.Tensor) -> None:
        """Stores the states of row `index`.

        Args:
            captured_TF, last_TH: one for each of its `states_length` tokens.
        """
        row, shape = self.rows[index], self.shape
        captured_TSH = captured_TF.unflatten(-1, (shape.states, shape.hidden_size))
        parts = {"captured": shape.stored(row, captured_TSH)} | (
            {"last": shape.taught(row, last_TH)} if shape.has_last else {}
        )
        encoded = {name: shape.encoding.encode(states) for name, states in parts.items()}
        scales = {f"{name}_scale": scale for name, (_, scale) in encoded.items() if scale is not None}
        self.place(index, {name: values for name, (values, _) in encoded.items()} | scales)

    def place(self, index: int, encoded: dict[str, torch.Tensor]) -> None:
        """Stores the encoded states of row `index`, by their names in the shard."""
        for name, tensor in encoded.items():
            part = tensor.cpu()
            starts = self.taught_starts if name.startswith("last") else self.starts
            self.tensors[name][starts[index] : starts[index + 1]] = part
            scale = encoded.get(f"{name}_scale", part)  # fp8 has no inf; its scale shows it
            if not bool(scale.isfinite().all()):
                self.nonfinite.add(index)

    def write(self, directory: Path, number: int, made_of: str) -> None:
        """Writes shard `number`, then its entry.

        Args:
            made_of: the manifest's `digest`.
        """
        keys = b"".join(map(key_of, self.rows))
        tensors = self.tensors | {
            "starts": torch.tensor(self.starts),
            "last_starts": torch.tensor(self.taught_starts),
            "key": torch.frombuffer(bytearray(keys), dtype=torch.uint8).view(-1, KEY_BYTES),
        }
        path = shard_path(directory, number)
        with atomic_path(path) as partial:
            save_file(tensors, partial)
        entry = {
            "file": path.name,
            "bytes": path.stat().st_size,
            "sha256": file_digest(path),
            "made_of": made_of,
            "keys_sha256": hashlib.sha256(keys).hexdigest(),
            "rows": len(self.rows),
            "tokens": self.starts[-1],
            "teacher_tokens": self.taught_starts[-1],
            "nonfinite_rows": len(self.nonfinite),
        }
        atomic_write(entry_path(directory, number), json.dumps(entry) + "\n")


# Reading.


@dataclass(frozen=True)
class RowStates:
    """The stored, encoded states of a row.

    Attributes:
        captured: [n, S, H], of `stored_positions`; captured_scale: [n, S] or None.
        last: [m, H], of `teacher_positions`; None if `captured` holds it. last_scale: [m] or None.
    """

    captured: torch.Tensor
    captured_scale: torch.Tensor | None
    last: torch.Tensor | None
    last_scale: torch.Tensor | None

    def to(self, device: torch.device) -> "RowStates":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "RowStates":
        """In pinned memory, which is copied to a GPU while it computes."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "RowStates":
        parts = (self.captured, self.captured_scale, self.last, self.last_scale)
        captured, *others = (None if part is None else change(part) for part in parts)
        assert captured is not None
        return RowStates(captured, *others)


class Store:
    """A complete store, opened for reading, by one thread at a time.

    Raises UserError if there is no store, if it is unfinished, or for all files that are missing or of another size.
    """

    def __init__(self, directory: Path):
        self.directory = directory
        manifest = StoreManifest.read(directory)
        if manifest is None:
            raise UserError(f"data.states: no hidden states in {directory}; run `draftsmith capture` first")
        if not manifest.complete:
            raise UserError(
                f"data.states: {directory} has {len(manifest.shards):,} of {manifest.of:,} shards; run "
                "`draftsmith capture` again"
            )
        self.manifest = manifest
        files = [(directory / "target" / name, entry) for name, entry in manifest.files.items()]
        files += [(directory / shard["file"], shard) for shard in manifest.shards.values()]
        if problems := [problem for path, entry in files if (problem := file_problem(path, entry))]:
            raise UserError([f"{problem}; {REPAIR}" for problem in problems])
        self.encoding = ENCODINGS[manifest.made_of["dtype"]]
        self.capture_layers: tuple[int, ...] = tuple(manifest.made_of["capture_layers"])
        self.picture_states: bool = manifest.made_of["picture_states"]
        self._verified: set[int] = set()
        self._opened = lru_cache(OPEN_SHARDS)(self._open)  # a process may not open many files
        self._starts = lru_cache(None)(self._read_starts)
        self._places = dict(self._read_keys())  # key -> (shard, row in it)

    def _read_keys(self) -> Iterator[tuple[bytes, tuple[int, int]]]:
        for number, entry in self.manifest.shards.items():
            keys = self._from_shard(number, lambda shard: shard.get_tensor("key")).numpy().tobytes()
            if hashlib.sha256(keys).hexdigest() != entry["keys_sha256"]:
                raise self._damaged(number, "its rows are not those that were written")
            for row in range(len(keys) // KEY_BYTES):
                yield keys[row * KEY_BYTES : (row + 1) * KEY_BYTES], (number, row)

    def summary(self) -> str:
        made_of, manifest = self.manifest.made_of, self.manifest
        return (
            f"states {list(self.capture_layers)} in {made_of['dtype']} are read from {self.directory}: "
            f"{manifest.total('tokens'):,} tokens of {manifest.total('rows'):,} rows; the target does not run"
        )

    def missing(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        """The rows that are not stored."""
        return [row for row in rows if key_of(row) not in self._places]

    def shard_of(self, row: TrainingRow) -> int:
        """The number of the shard that holds the row's states."""
        return self._places[key_of(row)][0]

    def read(self, row: TrainingRow) -> RowStates:
        """The stored states of a row. Raises UserError if its shard was altered."""
        number, index = self._places[key_of(row)]
        if number not in self._verified:
            entry = self.manifest.shards[number]
            if problem := file_problem(self.directory / entry["file"], entry, digest=True):
                raise UserError(f"{problem}; {REPAIR}")
            self._verified.add(number)
        return self._from_shard(number, lambda shard: self._read(shard, number, index))

    def _read(self, shard: Any, number: int, index: int) -> RowStates:
        starts, last_starts = self._starts(number)
        names = set(shard.keys())

        def part(name: str, starts: Sequence[int]) -> torch.Tensor | None:
            return shard.get_slice(name)[starts[index] : starts[index + 1]] if name in names else None

        captured = part("captured", starts)
        assert captured is not None
        last, last_scale = part("last", last_starts), part("last_scale", last_starts)
        return RowStates(captured, part("captured_scale", starts), last, last_scale)

    def _read_starts(self, number: int) -> tuple[list[int], list[int]]:
        shard = self._opened(number)
        return shard.get_tensor("starts").tolist(), shard.get_tensor("last_starts").tolist()

    def _open(self, number: int) -> Any:
        return safe_open(self.directory / self.manifest.shards[number]["file"], framework="pt")

    def _from_shard(self, number: int, read: Callable[[Any], T]) -> T:
        """Applies `read` to the opened shard."""
        try:
            return read(self._opened(number))
        except (OSError, SafetensorError) as error:
            raise self._damaged(number, first_line(error)) from None

    def _damaged(self, number: int, problem: str) -> UserError:
        path = self.directory / self.manifest.shards[number]["file"]
        return UserError(f"{path}: damaged: {problem}; {REPAIR}")


OPEN_SHARDS = 16
REPAIR = "copy it again, or run `draftsmith capture --verify`, which rewrites damaged files"
