"""What a resumed run must share with the run that wrote its checkpoint."""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from draftsmith.data_gen.training_rows.rows import TrainingRow
from draftsmith.models.checkpoint import current_folder
from draftsmith.models.context_limits import longest_row
from draftsmith.models.drafter_base import DrafterConfig
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.files.digest import file_digest
from draftsmith.recipes.schema import Recipe

# Keys of the train section that may change when a run is resumed: they change neither the steps nor their order.
# Instead of gradient_accumulation_steps "micro-batches a step" is compared.
MAY_CHANGE = {
    "max_steps", "epochs", "save_every_steps", "keep_checkpoints", "log_every_steps", "validate_every_steps",
    "eval_replay", "keep_best", "trackers", "gradient_checkpointing", "gradient_accumulation_steps",
    "zero_stage", "offload_optimizer", "shard_target", "max_skipped_steps", "packing",
}  # fmt: skip


def rows_digest(rows: Sequence[TrainingRow]) -> str:
    """Identifies rows and their order: their number, and the sha256 of their ids, lengths and inserts."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(json.dumps([row.id, len(row.input_ids)]).encode() + row.prompt.inserts_digest + b"\n")
    return f"{len(rows)} rows, sha256 {digest.hexdigest()}"


def digests_of(rows: Sequence[TrainingRow], validation_rows: Sequence[TrainingRow]) -> dict[str, str]:
    return {"training rows": rows_digest(rows), "validation rows": rows_digest(validation_rows)}


def run_identity(
    recipe: Recipe,
    files: TargetFiles,
    drafter: DrafterConfig,
    target: dict[str, Any],
    processes: int,
    digests: dict[str, str],
    states: dict[str, Any] | None,
) -> dict[str, Any]:
    """Data, order, settings, drafter and target of a run.

    Args:
        digests: of the rows that are left after all checks. The contents of eval.prompts decide which these are, and
            may have changed since the checkpoint.
        states: of `store_identity`.
    """
    start = recipe.drafter.init_from
    settings = {f"train.{key}": value for key, value in recipe.train.model_dump().items() if key not in MAY_CHANGE}
    return {
        "target": {key: value for key, value in target.items() if key not in ("model", "revision")},
        "drafter": drafter.to_dict(),
        "drafter.init_head": recipe.drafter.init_head,
        "drafter.init_from": None if start is None else file_digest(current_folder(Path(start)) / "model.safetensors"),
        "drafter.lora": None if recipe.drafter.lora is None else recipe.drafter.lora.model_dump(),
        "draft_vocab_sha256": file_digest(recipe.draft_vocab_path),
        "conversations_sha256": file_digest(recipe.conversations_path),
        "data.states": states,
        "data.max_length": longest_row(recipe, files),
        "left out for asking what is asked in": recipe.eval.prompts if recipe.data.contamination == "remove" else None,
        "micro-batches a step": processes * recipe.train.gradient_accumulation_steps,
    } | (digests | settings)
