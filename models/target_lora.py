"""The target's adapter (target.adapter): a LoRA of peft, merged into the target's weights when they are loaded.

    adapter_config.json          peft's settings: rank, scale, modules
    adapter_model.safetensors    the low-rank matrices

Everything behind the loading sees an ordinary model.
"""

import hashlib
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file

from draftsmith.recipes.errors import UserError, first_line, quoted
from draftsmith.recipes.files.json_text import parse_json
from draftsmith.recipes.files.reading import file_digest
from draftsmith.recipes.sections.target import TargetSection

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


def adapter_digest(section: TargetSection) -> str | None:
    """sha256 over the adapter's settings and weights, part of the target's identity; None: no adapter."""
    if section.adapter is None:
        return None
    folder = checked_folder(section.adapter)
    return hashlib.sha256("".join(file_digest(folder / name) for name in (CONFIG, WEIGHTS)).encode()).hexdigest()


def checked_folder(adapter: str) -> Path:
    """Raises UserError unless the folder holds a LoRA of peft in safetensors."""
    folder = Path(adapter)
    try:
        kind = parse_json((folder / CONFIG).read_bytes())["peft_type"]
    except OSError:
        raise UserError(
            f"target.adapter: {adapter!r} is not a folder with {CONFIG}, as peft's save_pretrained writes it; download "
            "an adapter of the Hub first: hf download USER/NAME --local-dir DIR"
        ) from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"target.adapter: {folder / CONFIG}: damaged: {first_line(error)}") from None
    if kind != "LORA":
        raise UserError(f"target.adapter: {adapter!r} is of type {quoted(kind)}; only LORA can be merged here")
    if not (folder / WEIGHTS).is_file():
        raise UserError(
            f"target.adapter: {adapter!r} has no {WEIGHTS}; adapter_model.bin is pickled, and reading it can run code. "
            "Save the adapter again with peft's save_pretrained"
        )
    return folder


def merged(model: Any, section: TargetSection) -> Any:
    """The causal LM with the section's adapter merged into its weights, in place; without one, unchanged. Raises
    UserError for an adapter that is damaged or another model's, or that changes one of two tied tables."""
    if section.adapter is None:
        return model
    from peft import LoraConfig, PeftModel, set_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer

    folder = checked_folder(section.adapter)
    try:
        config: Any = LoraConfig.from_pretrained(str(folder))
        config.inference_mode = True
        config.init_lora_weights = True  # others read or change the base's weights, which the file has already seen
        adapted = PeftModel(model, config)
        result: Any = set_peft_model_state_dict(adapted, load_file(folder / WEIGHTS))
    except (OSError, ValueError, RuntimeError, TypeError, ImportError, SafetensorError) as error:
        raise UserError(_wrong(section, first_line(error))) from error
    missing = [name for name in result.missing_keys if ".lora_" in name or ".modules_to_save." in name]
    for names, what in ((missing, "are missing"), (result.unexpected_keys, "have no place in it")):
        if names:
            raise UserError(_wrong(section, f"{len(names)} tensors {what}, the first is {names[0]}"))
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if any(isinstance(table, BaseTunerLayer) for table in (embedding, head)) and embedding.weight is head.weight:
        raise UserError(
            f"target.adapter: {section.adapter!r} changes the embeddings or the head, which are one table in "
            f"{section.model!r}: they cannot differ after merging. Train the adapter without them"
        )
    try:
        return adapted.merge_and_unload(safe_merge=True)
    except (ValueError, NotImplementedError) as error:
        raise UserError(f"target.adapter: {section.adapter!r} cannot be merged: {first_line(error)}") from error


def _wrong(section: TargetSection, reason: str) -> str:
    return f"target.adapter: {section.adapter!r} does not fit {section.model!r}: {reason}"
