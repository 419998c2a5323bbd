"""C2T: a tiny classifier of drafted nodes that decides how a draft tree grows (arXiv 2502.13652, section 3).

    P   joint probability of a node: the product of draft probabilities along its path
    H   entropy, in nats, of the parent's distribution, from which the node was drawn; all siblings share it
    d   depth: the root's children have 0 (everywhere else here they have 1)

    [P, H, d] --Linear(3, h)--> ReLU --Linear(h, 1)--> sigmoid --> C, the chance that the target accepts the node

The features are independent of model and vocabulary. `node_features` makes them for decoding and training.
`eval.decoding.policies.C2T` grows trees by C.

A classifier's directory holds config.json and model.safetensors:

    kind              "c2t"
    hidden            h
    entropy_over      M, the number of likeliest tokens that H covers
    depth_convention  "root's children 0"
    negative_ratio    rejected rows per accepted one in training, which shifts the scale of C; null: unknown, or not
                      sub-sampled
    drafter           the drafter of its training nodes (`drafter_identity`); {}: unknown
    weights_sha256    of model.safetensors, to detect files of different classifiers

and files from training: recipe.yaml, provenance.json, metrics.jsonl.

Shapes: `...` any number of axes, K candidates, Vd draft vocabulary.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from draftsmith.models.checkpoint import FILES, LARGEST_NUMBER
from draftsmith.models.quantize import target_changes
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError, short
from draftsmith.recipes.files.atomic import atomic_folder, written
from draftsmith.recipes.files.digest import file_digest
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.schema import TargetSection

KIND = "c2t"
DEPTH_CONVENTION = "root's children 0"
FEATURES = 3  # P, H, d
CLASSIFIER_FILES = (*FILES, "metrics.jsonl")


def entropy(log_probs: torch.Tensor, over: int | None = None) -> torch.Tensor:
    """[...] entropy in nats of the distributions [..., Vd]; NaN where a distribution holds a NaN.

    Args:
        over: only this many likeliest tokens, without renormalising (section 3.2's M). None: all.
    """
    if over is not None and over < log_probs.shape[-1]:
        log_probs = log_probs.topk(over, sorted=False).values
    # The clamp makes 0 * log 0 = 0 and changes no other product: e^-1000 is 0 in every precision.
    return -(log_probs.exp() * log_probs.clamp(min=-1000)).sum(-1)


def node_features(values: torch.Tensor, log_probs: torch.Tensor, depth: int, entropy_over: int) -> torch.Tensor:
    """[..., K, 3]: P, H and d of K candidates each.

    Args:
        values: [..., K] log of the candidates' joint probability.
        log_probs: [..., Vd] their parents' distributions.
        depth: of the candidates, as in `models.draft_tree`: a root's children have 1.
        entropy_over: M.
    """
    spread = entropy(log_probs, entropy_over)[..., None].expand_as(values)
    return torch.stack((values.exp(), spread, torch.full_like(values, depth - 1)), dim=-1)


@dataclass(frozen=True)
class C2tConfig:
    """The variable part of config.json."""

    hidden: int = 48
    entropy_over: int = 1000
    negative_ratio: float | None = None
    drafter: dict[str, Any] = field(default_factory=dict)


class C2tClassifier(nn.Module):
    """3 -> h -> 1; 241 parameters with h = 48."""

    def __init__(self, config: C2tConfig):
        super().__init__()
        self.config = config
        self.hidden = nn.Linear(FEATURES, config.hidden)
        self.output = nn.Linear(config.hidden, 1)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        """[...] the logit of C for features [..., 3]."""
        return self.output(torch.relu(self.hidden(features)))[..., 0]

    @torch.no_grad()
    def confidence(self, features: torch.Tensor) -> torch.Tensor:
        """[...] C for features [..., 3] of any float type; NaN where a feature is."""
        return torch.sigmoid(self(features.to(self.output.weight.dtype)))

    def save(self, directory: str | Path, beside: Mapping[str, str] | None = None) -> None:
        """Writes the directory atomically, like `models.checkpoint`; other files in it are kept.

        Args:
            beside: further text files, by name.
        """
        tensors = {name: tensor.detach().float().cpu().contiguous() for name, tensor in self.state_dict().items()}
        with atomic_folder(Path(directory), {*CLASSIFIER_FILES, *(beside or {})}) as partial:
            save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
            fields = {
                "kind": KIND,
                "depth_convention": DEPTH_CONVENTION,
                **asdict(self.config),
                "weights_sha256": file_digest(partial / "model.safetensors"),
            }
            for name, text in {**(beside or {}), "config.json": json.dumps(fields, indent=2) + "\n"}.items():
                (partial / name).write_text(text, encoding="utf-8")

    @staticmethod
    def load(directory: str | Path) -> "C2tClassifier":
        """The classifier in `directory`, in evaluation mode on the CPU.

        Raises:
            UserError: none there, damaged, or another depth convention.
        """
        directory = written(Path(directory))
        config, digest = read_c2t_config(directory)
        weights = directory / "model.safetensors"
        try:
            tensors = load_file(weights)
        except (FileNotFoundError, SafetensorError) as error:
            raise UserError(
                f"{weights}: not a readable safetensors file ({error}); train the classifier again"
            ) from None
        with torch.device("meta"):
            classifier = C2tClassifier(config)
        wanted = {name: tuple(tensor.shape) for name, tensor in classifier.state_dict().items()}
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != wanted:
            raise UserError(
                f"{weights}: holds {_shapes(found)}, config.json (hidden: {config.hidden}) asks for {_shapes(wanted)}; "
                "copy both files of one classifier"
            )
        broken = [name for name, tensor in tensors.items() if not tensor.isfinite().all()]
        if broken:
            raise UserError(f"{weights}: {', '.join(sorted(broken))} is not finite; train the classifier again")
        if digest is not None and digest != file_digest(weights):
            raise UserError(f"{weights}: not the weights that config.json was written for; copy both files of one run")
        classifier.load_state_dict({name: tensor.float() for name, tensor in tensors.items()}, assign=True)
        return classifier.eval().requires_grad_(False)


def read_c2t_config(directory: str | Path) -> tuple[C2tConfig, str | None]:
    """(config, sha256 of its weights) from config.json alone.

    Raises:
        UserError: no classifier there, or an unsupported one.
    """
    path = written(Path(directory)) / "config.json"
    try:
        fields = parse_json(path.read_bytes())
    except FileNotFoundError:
        raise UserError(
            f"{directory}: no C2T classifier here (config.json is missing); run `draftsmith train-c2t` first"
        ) from None
    except OSError as error:
        raise UserError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    if not isinstance(fields, dict) or fields.get("kind") != KIND:
        raise UserError(f"{path}: not a C2T classifier (kind: {KIND})")
    convention = fields.get("depth_convention")
    if convention != DEPTH_CONVENTION:
        raise UserError(
            f"{path}: depth_convention is {short(convention)}, understood is {DEPTH_CONVENTION!r}: the classifier "
            "would read wrong depths"
        )
    problems = [
        f"{path}: {key}: {short(fields.get(key))} must be a whole number from 1 to {LARGEST_NUMBER:,}"
        for key in ("hidden", "entropy_over")
        if type(fields.get(key)) is not int or not 1 <= fields[key] <= LARGEST_NUMBER
    ]
    ratio = fields.get("negative_ratio")
    if ratio is not None and (type(ratio) not in (int, float) or not 0 < ratio <= LARGEST_NUMBER):
        problems.append(
            f"{path}: negative_ratio: {short(ratio)} must be a number above 0 and up to {LARGEST_NUMBER:,}, or null"
        )
    drafter = fields.get("drafter", {})
    if not isinstance(drafter, dict):
        problems.append(f"{path}: drafter: {short(drafter)} must be an object")
    if problems:
        raise UserError(problems)
    return C2tConfig(fields["hidden"], fields["entropy_over"], ratio, drafter), fields.get("weights_sha256")


def _shapes(shapes: dict[str, tuple[int, ...]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in sorted(shapes.items())) or "nothing"


# The identity of the drafter that a classifier was trained for.


def drafter_identity(
    directory: Path | None, draft_model: TargetSection | None, cut_to: DraftVocab | None, target: TargetSection
) -> dict[str, Any]:
    """A drafter's identity for its classifier. One of the first two arguments is given.

    Args:
        directory: a trained drafter's, identified by its weights.
        draft_model: a causal LM instead. A local folder is identified by its weights (`weights_digest`), a hub name by
            name and revision.
        cut_to: the vocabulary that eval.tree.vocab_size leaves (a cut changes every probability); None: all of it.
        target: part of a causal LM's identity, since one serves many targets.

    Raises:
        UserError: the drafter's files are missing.
    """
    if draft_model is not None:
        identity: dict[str, Any] = {"kind": "causal_lm", "model": draft_model.model, "revision": draft_model.revision}
        if Path(draft_model.model).is_dir():  # as transformers tells a folder from a name
            identity["weights_sha256"] = weights_digest(Path(draft_model.model))
        folder = Path(target.model)
        identity["target"] = weights_digest(folder) if folder.is_dir() else f"{target.model}@{target.revision}"
        changes = target_changes(draft_model) | {f"target_{key}": each for key, each in target_changes(target).items()}
        identity |= {key: change for key, change in changes.items() if change is not None}
    else:
        assert directory is not None
        weights = written(directory) / "model.safetensors"
        try:
            kind = parse_json((written(directory) / "config.json").read_bytes())["kind"]
            status = weights.stat()
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UserError(f"{directory}: no drafter here that could be read: {error}") from None
        digest = _digest(weights, status.st_mtime_ns, status.st_size)
        identity = {"kind": kind, "directory": str(directory), "weights_sha256": digest}
    if cut_to is None:
        return identity | {"vocab_size": None, "vocab_sha256": None}
    ids = cut_to.target_ids.sort().values.to("cpu", torch.int64)
    return identity | {"vocab_size": cut_to.size, "vocab_sha256": hashlib.sha256(ids.numpy().tobytes()).hexdigest()}


@lru_cache(maxsize=64)  # many contenders share one drafter
def _digest(path: Path, changed: int, size: int) -> str:
    return file_digest(path)


SAMPLED_BLOCKS, BLOCK_BYTES = 1024, 4096


def weights_digest(directory: Path) -> str:
    """sha256 over config.json and the weight files of a causal LM's folder: names, sizes, and 1,024 evenly spread
    blocks of 4 KiB from each file; files of up to 4 MiB are read whole.

    A sample suffices because training changes nearly all weights of a matrix. Copies with other shards or another
    precision count as different models.
    """
    weights = sorted(directory.glob("*.safetensors")) or sorted(directory.glob("*.bin"))
    try:
        facts = [(path, path.stat()) for path in (*directory.glob("config.json"), *weights)]
        return _sampled_digest(tuple((path, status.st_mtime_ns, status.st_size) for path, status in facts))
    except OSError as error:
        raise UserError(f"{directory}: its weights cannot be read: {error}") from None


@lru_cache(maxsize=64)
def _sampled_digest(files: tuple[tuple[Path, int, int], ...]) -> str:
    digest = hashlib.sha256()
    for path, _, size in files:
        digest.update(f"{path.name} {size}\n".encode())
        last = max(0, size - BLOCK_BYTES)
        blocks = min(SAMPLED_BLOCKS, -(-size // BLOCK_BYTES))
        with path.open("rb") as file:
            for i in range(blocks):
                file.seek(last * i // max(1, blocks - 1))
                digest.update(file.read(BLOCK_BYTES))
    return digest.hexdigest()


def differing_keys(there: dict[str, Any], here: dict[str, Any]) -> list[str]:
    """Common keys of `drafter_identity` in which two drafters differ. Locations count only without digests."""
    places = {"directory"}
    if "weights_sha256" in there and "weights_sha256" in here:
        places |= {"model", "revision"}
    return [key for key in here if key not in places and key in there and there[key] != here[key]]


def check_made_for(directory: str | Path, here: dict[str, Any]) -> None:
    """Raises UserError for a classifier of another drafter's nodes: its threshold would mean something else.

    Args:
        here: `drafter_identity` of the drafter in use.
    """
    known = read_c2t_config(directory)[0].drafter
    different = [f"{key}: {_short(known[key])} there, {_short(here[key])} here" for key in differing_keys(known, here)]
    if different:
        raise UserError(
            f"{directory}: a classifier for another drafter ({'; '.join(different)}). Label this one's trees "
            "(`draftsmith label-trees`) and calibrate the classifier on them (`draftsmith train-c2t` with "
            f"classifier.init_from={directory}), or train one"
        )


def _short(word: Any) -> str:
    return short(word[:16] if isinstance(word, str) and len(word) == 64 else word)
