"""A loaded target with its drafters and draft models, each loaded once."""

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
from torch import nn

from draftsmith.models.causal_lm import of_draft_model
from draftsmith.models.checkpoint import load_drafter, provenance, read_drafter_config
from draftsmith.models.drafter_base import Drafter
from draftsmith.models.onednn_linear import block_linears, blocked_head, head_product
from draftsmith.models.sizes import hardware
from draftsmith.models.target import Target
from draftsmith.models.target_attention import attend_grouped
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.target import QuantizationSection, TargetSection


def drafting_dtype(target: Target) -> torch.dtype | None:
    """The precision that a drafter's weights are rounded to: on a GPU the target's, as in serving engines.

    None: they stay as they were trained. On a CPU bfloat16 is not always the faster one (LOG.md).
    """
    return None if target.device.type == "cpu" else target.dtype


class LoadedModels:
    """A target, and what drafts for it."""

    def __init__(self, files: TargetFiles):
        self.files = files
        _ = files.tokenizer  # before weights are loaded
        # Decoding captures the layers that each proposer reads. The target's own list is for training.
        self.target = files.load(capture_layers=(0,))
        block_linears(self.target.layers)
        self.target.head_product = blocked_head(self.target.head)
        attend_grouped(self.target.decoder)
        self.drafters: dict[Path, Drafter] = {}  # by directory
        self.others: dict[str, LoadedModels] = {}  # in other precisions, and draft models, by their section
        self.neighbours: dict[tuple[str, int], torch.Tensor] = {}  # LANTERN's tables, by their source and number

    def in_precision(self, precision: QuantizationSection | None) -> "LoadedModels":
        """The same target in this precision, loaded once; None: this one."""
        return self if precision is None else self._beside(self.files.section.quantized(precision))

    def draft_model(self, section: TargetSection) -> "LoadedModels":
        """A causal LM that drafts for the target, and its own drafters. UserErrors name draft_model's keys."""
        try:
            return self._beside(section)
        except UserError as error:
            raise UserError(of_draft_model(error)) from error

    def _beside(self, section: TargetSection) -> "LoadedModels":
        """Another model with the target's tokenizer, loaded once."""
        key = section.model_dump_json()
        if key not in self.others:
            self.others[key] = LoadedModels(TargetFiles(section, large=self.files))
        return self.others[key]

    @property
    def identity(self) -> dict[str, Any]:
        """`TargetFiles.identity_of`, which drafters and recorded answers must match."""
        return self.files.identity_of(self.target)

    def made(self, files: dict[str, Path] | None = None) -> dict[str, Any]:
        """How numbers of this target were made: device, precision, versions, date, and the digests of `files`."""
        now = datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
        return {
            "device": str(self.target.device),
            "dtype": str(self.target.dtype).removeprefix("torch."),
            "made": provenance(files or {}) | {"date": now, "hardware": hardware(self.target.device)},
        }

    def drafter(self, directory: Path) -> Drafter:
        """A drafter of the target."""
        if directory not in self.drafters:
            shape, _ = read_drafter_config(directory)
            drafter = load_drafter(directory, self.target, self.identity, shape.capture_layers)
            if (dtype := drafting_dtype(self.target)) is not None:
                drafter.round_weights(dtype)
            for layer in drafter.draft_layers:
                block_linears(layer)
            if isinstance(head := getattr(drafter, "lm_head", None), nn.Linear):  # EAGLE-1 has the target's
                # On a CPU the layout is a second copy; the weight itself stays for FR-Spec's cuts.
                drafter.head_product = head_product(head.weight)
            self.drafters[directory] = drafter
        return self.drafters[directory]
