"""A loaded target with its drafters and draft models, each loaded once."""

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch

from draftsmith.models.blocked import block_linears
from draftsmith.models.causal_lm import load_draft_model
from draftsmith.models.checkpoint import load_drafter, provenance, read_drafter_config
from draftsmith.models.costs import hardware
from draftsmith.models.drafter_base import Drafter
from draftsmith.models.quantize import precision_name
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
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
        self.drafters: dict[tuple[Path, str | None], Drafter] = {}  # by directory and a hierarchy's small model
        self.draft_models: dict[str, tuple[TargetFiles, Target]] = {}  # by their section
        self.precisions: dict[str | None, LoadedModels] = {}
        self.neighbours: dict[tuple[str, int], torch.Tensor] = {}  # LANTERN's tables, by their source and number

    def in_precision(self, precision: QuantizationSection | None) -> "LoadedModels":
        """The same target in this precision, loaded once; None: this one."""
        if precision is None:
            return self
        name = precision_name(precision)
        if name not in self.precisions:
            self.precisions[name] = LoadedModels(TargetFiles(self.files.section.quantized(precision)))
        return self.precisions[name]

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

    def drafter(self, directory: Path, small: TargetSection | None = None) -> Drafter:
        """A drafter of the target; of `small`, a hierarchy's small model, where that is given."""
        key = directory, small and small.model_dump_json()
        if key not in self.drafters:
            files, model = (self.files, self.target) if small is None else self._small(small)
            shape, _ = read_drafter_config(directory)
            self.drafters[key] = load_drafter(directory, model, files.identity_of(model), shape.capture_layers)
            if (dtype := drafting_dtype(model)) is not None:
                self.drafters[key].round_weights(dtype)
            for layer in self.drafters[key].draft_layers:  # head and fusion read their weights in other ways, too
                block_linears(layer)
        return self.drafters[key]

    def draft_model(self, section: TargetSection) -> Target:
        return self._small(section)[1]

    def draft_model_identity(self, section: TargetSection) -> dict[str, Any]:
        files, model = self._small(section)
        return files.identity_of(model)

    def _small(self, section: TargetSection) -> tuple[TargetFiles, Target]:
        key = section.model_dump_json()
        if key not in self.draft_models:
            files = TargetFiles(section, large=self.files)
            small = load_draft_model(files)
            block_linears(small.layers)
            self.draft_models[key] = files, small
        return self.draft_models[key]
