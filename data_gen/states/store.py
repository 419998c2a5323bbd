"""The target's hidden states on disk. The target runs once, and any number of drafters train on the store.

    manifest.json               what determines the states; size and sha256 of each file in target/
    target/                     the target's embeddings and head (`data_gen.states.stored_target`), config, tokenizer
    pictures/                   input embeddings of the rows' pictures, too
    written/                    rows from `draftsmith regenerate` that are in no shard yet (`WrittenRows`)
    shard-00000.json            size, sha256 and counts of a shard, and a digest of what determines its states
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

A ViSpec drafter reads no state in a picture's columns (`models.vispec`). Its store leaves these states out
(`picture_states: false` in the manifest) and serves ViSpec alone. Column 6 is the first behind the picture:

    position      0  1  2  3  4  5  6  7  8
    token         u  u  P  P  P  P  P  u  A
    captured      *                 *  *

Every file is written atomically (`recipes.files.atomic`), a shard's entry after the shard. So a shard with an entry is
whole, a kill costs only unfinished shards, and processes that share a capture need not know of each other.

Rows are sorted into shards by their keys, which are random, so a shard is a fair sample. Training shuffles shards, then
the rows of a few neighbouring shards (`train.run.state_sources`).

Shapes: N tokens, S captured states of width H, M teacher positions, R rows, T tokens of a row.
"""

import hashlib
import json
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.checkpoint import differences
from draftsmith.models.sizes import gigabytes
from draftsmith.models.target_columns import columns_of_picture
from draftsmith.recipes.errors import UserError, first_line
from draftsmith.recipes.files.atomic import atomic_path, atomic_write
from draftsmith.recipes.files.json_text import json_object
from draftsmith.recipes.files.reading import file_entry, file_problem

MANIFEST, KIND = "manifest.json", "hidden_states"
PLACE = ("model", "revision")  # of the target: it may be moved
ENTRY = ("file", "bytes", "sha256", "made_of", "rows", "tokens", "teacher_tokens", "nonfinite_rows")
KEY_BYTES = 16
OPEN_SHARDS = 16
REPAIR = "copy it again, or run `draftsmith capture --verify`, which rewrites damaged files"
WRITTEN = "written"  # folder of `WrittenRows`
Encoded = tuple[torch.Tensor, torch.Tensor | None]  # as `Encoding.encode` gives them


@dataclass(frozen=True)
class Encoding:
    """A dtype of stored states. `largest`: the value that a state's largest element is scaled to; None: unscaled."""

    dtype: torch.dtype
    largest: float | None = None

    def bytes_of(self, width: int) -> int:
        """Bytes of one state."""
        return width * self.dtype.itemsize + (0 if self.largest is None else 4)

    def encode(self, states: torch.Tensor) -> Encoded:
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
    """Positions with a last state that teaches some column, ascending. The first token has no column before it. Later
    steps reuse the teachers of step 0's other columns (`models.alignment`)."""
    return [position for start, end in spans for position in range(max(start, 1), end - 1)]


def taught_tokens(spans: Sequence[tuple[int, int]]) -> int:
    """Number of `teacher_positions`."""
    return sum(max(0, end - max(start, 1) - 1) for start, end in spans)


def rows_identity(keys: Iterable[bytes]) -> str:
    """Number and digest of a set of rows, in any order."""
    ordered = sorted(keys)
    return f"{len(ordered)} rows, sha256 {hashlib.sha256(b''.join(ordered)).hexdigest()}"


# Manifest and entries of shards.


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
            if fields["kind"] != KIND or not isinstance(fields["target_files"], dict):
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


def keys_in(directory: Path, manifest: StoreManifest) -> set[bytes]:
    """Of the rows in the shards that are there. Raises UserError for a shard that cannot be read."""
    found = set[bytes]()
    for number in manifest.shards:
        try:
            with safe_open(path := shard_path(directory, number), framework="pt") as shard:
                found |= {key.tobytes() for key in shard.get_tensor("key").numpy()}
        except (OSError, SafetensorError) as error:
            raise UserError(f"{path}: damaged: {first_line(error)}; {REPAIR}") from None
    return found


# Writing.

Parts = dict[str, torch.Tensor]  # the stored, encoded states of a row, by their names in a shard


def write_shard(
    directory: Path, number: int, rows: Sequence[TrainingRow], parts: Sequence[Parts], made_of: str
) -> list[str]:
    """Writes shard `number`, then its entry. Returns the ids of rows with NaN or inf among their states.

    Args:
        parts: of each row.
        made_of: the manifest's `digest`.
    """
    starts, last_starts = (
        torch.tensor(list(accumulate(counts, initial=0)))
        for counts in ((len(each["captured"]) for each in parts), (taught_tokens(row.spans) for row in rows))
    )
    tensors = {name: torch.cat([each[name] for each in parts]) for name in parts[0]}
    tensors["key"] = torch.tensor([list(key_of(row)) for row in rows], dtype=torch.uint8)
    path = shard_path(directory, number)
    with atomic_path(path) as partial:
        save_file(tensors | {"starts": starts, "last_starts": last_starts}, partial)
    finite = [  # fp8 has no inf; its scale shows it
        all(bool(part.isfinite().all()) for name, part in each.items() if f"{name}_scale" not in each) for each in parts
    ]
    broken = [row.id for row, whole in zip(rows, finite, strict=True) if not whole]
    entry = {
        "file": path.name,
        **file_entry(path),
        "made_of": made_of,
        "rows": len(rows),
        "tokens": int(starts[-1]),
        "teacher_tokens": int(last_starts[-1]),
        "nonfinite_rows": len(broken),
    }
    atomic_write(entry_path(directory, number), json.dumps(entry) + "\n")
    return broken


@contextmanager
def writing(place: Path, remedy: str = "run the same command again") -> Iterator[None]:
    """Turns the errors of a full disk into a UserError."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        said = f"{place}: cannot be written ({first_line(error)}): make room, if the disk is full, and {remedy}"
        raise UserError(said) from error


class WrittenRows:
    """Rows whose states were stored while their answers were written: written/manifest.json, written/<key>.safetensors.
    When further answers are written, those of the store join them.

    A row's shard is known only when all answers are, because keys are digests of the answers. A row's file goes when
    its shard is written: a store takes its own space on disk and little more. `draftsmith capture` runs the target for
    rows whose file is missing or damaged.

    Attributes:
        manifest: of the folder; None: regeneration has stored nothing.
    """

    def __init__(self, store: Path):
        self.folder = store / WRITTEN
        self.manifest = StoreManifest.read(self.folder)

    @property
    def bytes(self) -> int:
        return sum(path.stat().st_size for path in self.folder.glob("*.safetensors"))

    def __contains__(self, row: TrainingRow) -> bool:
        return self._path(key_of(row).hex()).exists()

    def add(self, row: TrainingRow, parts: Parts) -> None:
        """Writes a row, once. Raises UserError if the disk is full."""
        self._save(self._path(key_of(row).hex()), parts)

    def get(self, row: TrainingRow) -> Parts:
        """Empty if the row is not here, or damaged."""
        try:
            return load_file(self._path(key_of(row).hex()))
        except (OSError, SafetensorError):
            return {}

    def drop(self, rows: Iterable[TrainingRow]) -> None:
        for row in rows:
            self._path(key_of(row).hex()).unlink(missing_ok=True)

    def take_apart(self, store: StoreManifest) -> None:
        """Moves a store's rows here, shard by shard, so that rows of further answers can join them. A kill loses none:
        the store has its other shards. Damaged shards are dropped. Raises UserError if the disk is full."""
        directory = self.folder.parent
        for number, entry in store.shards.items():
            if problem := file_problem(path := shard_path(directory, number), entry, digest=True):
                print(f"note: {problem}; its rows are to be captured again")
            else:
                shard = load_file(path)
                keys, starts, last_starts = (shard.pop(name) for name in ("key", "starts", "last_starts"))
                for row, key in enumerate(keys.numpy()):
                    ranges = {"captured": starts[row : row + 2].tolist(), "last": last_starts[row : row + 2].tolist()}
                    parts = {name: each[slice(*ranges[name.split("_")[0]])] for name, each in shard.items()}
                    self._save(self._path(key.tobytes().hex()), parts)
            entry_path(directory, number).unlink()
            path.unlink(missing_ok=True)
        (directory / MANIFEST).unlink()

    def _save(self, path: Path, parts: Parts) -> None:
        if not path.exists():
            with writing(path), atomic_path(path) as partial:
                save_file({name: each.contiguous() for name, each in parts.items()}, partial)

    def _path(self, key: str) -> Path:
        return self.folder / f"{key}.safetensors"


# Reading.


class RowStates(NamedTuple):
    """The stored, encoded states of a row."""

    captured: torch.Tensor  # [n, S, H], of `stored_positions`
    captured_scale: torch.Tensor | None  # [n, S]
    last: torch.Tensor | None  # [m, H], of `teacher_positions`; None if `captured` holds it
    last_scale: torch.Tensor | None  # [m]

    def to(self, device: torch.device) -> "RowStates":
        return self._each(lambda tensor: tensor.to(device, non_blocking=True))

    def pinned(self) -> "RowStates":
        """In pinned memory, which is copied to a GPU while it computes."""
        return self._each(torch.Tensor.pin_memory)

    def _each(self, change: Callable[[torch.Tensor], torch.Tensor]) -> "RowStates":
        return RowStates(*(None if part is None else change(part) for part in self))  # type: ignore[arg-type]


class Store:
    """A complete store, opened for reading, by one thread at a time.

    Raises UserError if there is none, or for all files that are missing or of another size.
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
        self._files: dict[int, tuple[int, int]] = {}  # inode and time of each shard when it was first opened
        self._opened = lru_cache(OPEN_SHARDS)(self._open)  # a process may not open many files
        self._places: dict[bytes, tuple[int, int]] = {}  # key -> (shard, row in it)
        for number in manifest.shards:
            with self._shard(number) as (shard, _, _):
                keys = shard.get_tensor("key").numpy()
            self._places |= {key.tobytes(): (number, row) for row, key in enumerate(keys)}

    def summary(self) -> str:
        made_of, manifest = self.manifest.made_of, self.manifest
        return (
            f"states {list(self.capture_layers)} in {made_of['dtype']} are read from {self.directory}: "
            f"{manifest.total('tokens'):,} tokens of {manifest.total('rows'):,} rows; the target does not run"
        )

    def missing(self, rows: Sequence[TrainingRow]) -> list[TrainingRow]:
        return [row for row in rows if key_of(row) not in self._places]

    def shard_of(self, row: TrainingRow) -> int:
        """The number of a stored row's shard."""
        return self._places[key_of(row)][0]

    def read(self, row: TrainingRow) -> RowStates:
        """The stored states of a row. Raises UserError if its shard was altered."""
        number, index = self._places[key_of(row)]
        if number not in self._verified:
            if problem := file_problem(self._path(number), self.manifest.shards[number], digest=True):
                raise UserError(f"{problem}; {REPAIR}")
            self._verified.add(number)
        with self._shard(number) as (shard, starts, last_starts):

            def part(name: str, starts: Sequence[int]) -> Any:
                return shard.get_slice(name)[starts[index] : starts[index + 1]] if name in shard.keys() else None  # noqa: SIM118

            captured, last = part("captured", starts), part("last", last_starts)
            return RowStates(captured, part("captured_scale", starts), last, part("last_scale", last_starts))

    def _open(self, number: int) -> tuple[Any, list[int], list[int]]:
        """(file, starts, last_starts) of a shard. Raises UserError if the store was made anew meanwhile."""
        path = self._path(number)
        file = path.stat()
        if self._files.setdefault(number, (file.st_ino, file.st_mtime_ns)) != (file.st_ino, file.st_mtime_ns):
            raise UserError(f"{path}: replaced since this run began to read it; start the run again")
        shard: Any = safe_open(path, framework="pt")
        return shard, shard.get_tensor("starts").tolist(), shard.get_tensor("last_starts").tolist()

    @contextmanager
    def _shard(self, number: int) -> Iterator[tuple[Any, list[int], list[int]]]:
        """What `_open` gives. Raises UserError for errors of the block."""
        try:
            yield self._opened(number)
        except (OSError, SafetensorError) as error:
            raise UserError(f"{self._path(number)}: damaged: {first_line(error)}; {REPAIR}") from None

    def _path(self, number: int) -> Path:
        return self.directory / self.manifest.shards[number]["file"]
