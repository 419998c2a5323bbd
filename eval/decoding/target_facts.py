"""What is known about a target before its weights are loaded."""

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from draftsmith.models.chat import load_config, load_generation_config, load_tokenizer, stop_ids, tokenizer_fingerprint
from draftsmith.models.checkpoint import config_identity
from draftsmith.models.quantize import target_changes
from draftsmith.recipes.schema import TargetSection


@dataclass(frozen=True)
class TargetFacts:
    """The config and the tokenizer of a target."""

    section: TargetSection
    config: Any  # its text config
    tokenizer: PreTrainedTokenizerBase
    fingerprint: str  # of the tokenizer

    @classmethod
    def read(cls, section: TargetSection) -> "TargetFacts":
        """Raises UserError if there is no such target."""
        config, tokenizer = load_config(section).get_text_config(decoder=True), load_tokenizer(section)
        return cls(section, config, tokenizer, tokenizer_fingerprint(tokenizer))

    @property
    def positions(self) -> int:
        return self.config.max_position_embeddings

    @property
    def stop_ids(self) -> list[int]:
        return sorted(stop_ids(self.tokenizer, load_generation_config(self.section)))

    @property
    def identity(self) -> dict[str, Any]:
        """`checkpoint.config_identity`."""
        section = self.section
        return config_identity(self.config, section.model, section.revision, self.fingerprint, target_changes(section))
