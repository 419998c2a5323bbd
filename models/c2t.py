"""C2T: a tiny classifier of drafted nodes that decides how a draft tree grows (arXiv 2502.13652, section 3).

    P   joint probability of a node: the product of draft probabilities along its path
    H   entropy, in nats, of the parent's distribution, from which the node was drawn; all siblings share it
    d   depth: the root's children have 0 (everywhere else here they have 1)

    [P, H, d] --Linear(3, h)--> ReLU --Linear(h, 1)--> sigmoid --> C, the chance that the target accepts the node

The features are independent of model and vocabulary. `eval.decoding.policies.C2T` grows trees by C.

Shapes: `...` any number of axes, K candidates, Vd draft vocabulary.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from draftsmith.models.checkpoint import FILES, differences
from draftsmith.recipes.errors import UserError, first_line, quoted
from draftsmith.recipes.files.atomic import atomic_folder, current_folder
from draftsmith.recipes.sections.base import Size

FEATURES = 3  # P, H, d
ENTROPY_OVER = 1000  # the paper's M: number of likeliest tokens that H covers
CLASSIFIER_FILES = (*FILES, "metrics.jsonl")


def entropy(log_probs: torch.Tensor, over: int | None = None) -> torch.Tensor:
    """[...] entropy in nats of the distributions [..., Vd]; NaN where one holds a NaN. `over`: only of so many
    likeliest tokens, without renormalising (section 3.2's M)."""
    if over is not None and over < log_probs.shape[-1]:
        log_probs = log_probs.topk(over, sorted=False).values
    # The clamp makes 0 * log 0 = 0 and changes no other product: e^-1000 is 0 in every precision.
    return -(log_probs.exp() * log_probs.clamp(min=-1000)).sum(-1)


def node_features(values: torch.Tensor, log_probs: torch.Tensor, depth: int) -> torch.Tensor:
    """[..., K, 3]: P, H and d of candidates with joint log-probabilities [..., K], below parents with distributions
    [..., Vd], at a depth as in `models.draft_tree`: a root's children have 1."""
    spread = entropy(log_probs, ENTROPY_OVER)[..., None].expand_as(values)
    return torch.stack((values.exp(), spread, torch.full_like(values, depth - 1)), dim=-1)


class C2tConfig(BaseModel, frozen=True, extra="forbid", strict=True, use_attribute_docstrings=True):
    """config.json."""

    kind: Literal["c2t"] = "c2t"
    hidden: Size = 48
    """h."""
    drafter: dict[str, Any] = {}
    """The drafter of its training nodes (`contenders.loaded_identity`). {}: unknown."""


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
        """Writes the directory atomically, with further text files by name; other files in it are kept."""
        texts = {**(beside or {}), "config.json": self.config.model_dump_json(indent=2) + "\n"}
        tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in self.state_dict().items()}
        with atomic_folder(Path(directory), {*CLASSIFIER_FILES, *texts}) as partial:
            save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
            for name, text in texts.items():
                (partial / name).write_text(text, encoding="utf-8")

    @staticmethod
    def load(directory: str | Path) -> "C2tClassifier":
        """The classifier in `directory`, in evaluation mode on the CPU. Raises UserError: none there, or damaged."""
        config = read_c2t_config(directory)
        weights = current_folder(Path(directory)) / "model.safetensors"
        with torch.device("meta"):
            classifier = C2tClassifier(config)
        try:
            classifier.load_state_dict(load_file(weights), assign=True)
        except (OSError, SafetensorError, RuntimeError) as error:
            raise UserError(
                f"{weights}: not the weights that config.json (hidden: {config.hidden}) describes: "
                f"{first_line(error)}; copy both files of one classifier, or train it again"
            ) from None
        return classifier.eval().requires_grad_(False)


def read_c2t_config(directory: str | Path) -> C2tConfig:
    """A classifier's config.json. Raises UserError: no classifier there, or another kind of file."""
    path = current_folder(Path(directory)) / "config.json"
    try:
        return C2tConfig.model_validate_json(path.read_bytes())
    except OSError as error:
        why = f"{first_line(error)}; run `draftsmith train-c2t` first"
        raise UserError(f"{directory}: no C2T classifier here: {why}") from None
    except ValidationError as error:
        wrong = "; ".join(f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors())
        raise UserError(f"{path}: not a C2T classifier's: {wrong}; name another folder, or train it again") from None


def check_made_for(directory: str | Path, here: dict[str, Any]) -> None:
    """Raises UserError for a classifier of another drafter's nodes: its threshold would mean something else.

    Args:
        here: what is known of the drafter in use (`contenders.loaded_identity`); names of models may differ.
    """
    known = read_c2t_config(directory).drafter
    different = [
        f"{key}: {quoted(theirs, 18)} there, {quoted(mine, 18)} here"
        for key, theirs, mine in differences(known, here)
        if known and not key.endswith((".model", ".revision"))
    ]
    if different:
        raise UserError(
            f"{directory}: a classifier for another drafter ({'; '.join(different)}). Label this one's trees "
            "(`draftsmith label-trees`) and calibrate the classifier on them (`draftsmith train-c2t` with "
            f"classifier.init_from={directory}), or train one"
        )
