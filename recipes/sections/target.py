"""The section `target`: the model to draft for, its precision, and its prompts' form."""

import datetime
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, PrivateAttr, model_validator

from draftsmith.recipes.files.prompt_date import KeptDate, today
from draftsmith.recipes.sections.base import ImpossibleSettings, PositiveOrZero, Section, Text


def _date(value: Any) -> Any:
    """A day as text; YAML reads 2025-07-26 as a date."""
    if not isinstance(value, str | datetime.date):
        return value
    try:
        return datetime.date.fromisoformat(str(value)).isoformat()
    except ValueError:
        raise ValueError(f"expected a date, YYYY-MM-DD, got {str(value)!r}") from None


class QuantizationSection(Section):
    bits: Literal[8, 4] = 4
    """Bits per weight. 8: one scale per row. 4: a scale and a zero per group of inputs."""
    group_size: Literal[32, 64, 128] = 64
    """With 4 bits: inputs of a row that share scale and zero. Smaller groups are more exact and take more memory."""
    fake: bool = False
    """Keep the quantised weights in the target's own dtype: the precision's effect without its speed, on any device."""

    @model_validator(mode="after")
    def _possible(self) -> "QuantizationSection":
        if self.bits == 8 and "group_size" in self.changed_keys:
            raise ValueError("group_size: rows of 8 bits have one scale: leave it out, or set bits to 4")
        return self


PRECISIONS: dict[str, dict[str, Any]] = {"int8": {"bits": 8}, "int4": {"bits": 4}, "fake": {"bits": 4, "fake": True}}


def _precision(value: Any) -> Any:
    """The section that a precision's name stands for."""
    if not isinstance(value, str):
        return value
    if value not in PRECISIONS:
        raise ValueError(f"expected {', '.join(PRECISIONS)} or {{bits, group_size, fake}}, got {value!r}")
    return PRECISIONS[value]


Precision = Annotated[QuantizationSection | None, BeforeValidator(_precision)]


class GuidanceSection(Section):
    """Classifier-free guidance of a target that writes images from a caption (models/guidance.py)."""

    scale: PositiveOrZero
    """Logits are u + scale (c - u): c with the caption, u without it. 1 is no guidance."""
    null: Text = "<null>"
    """The token that replaces each token of the caption in the text without it, as in the target's training."""


class TargetSection(Section):
    model: str
    """The causal LM to draft for: a Hugging Face id, a directory, or a GGUF file (docs/prompts-and-answers.md)."""
    revision: str | None = None
    """Branch, tag or commit of a model on the Hub."""
    adapter: str | None = None
    """Folder with a peft LoRA (safetensors), merged into the target when it is loaded (docs/training.md)."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Precision of the target's weights; `auto`: as in its config. Exact equality with plain decoding needs float32."""
    quantization: Precision = None
    """Quantise the decoder's linear layers when the target is loaded: `int8`, `int4`, `fake` (int4's effect without its
    speed), or {bits, group_size, fake}. int8 and int4 are for CPUs and compute in bfloat16, which `dtype: auto` then
    means (docs/decoding.md). Not for checkpoints that are quantised already."""
    guidance: GuidanceSection | None = None
    """Classifier-free guidance, as part of the target's distribution."""
    device: str = "auto"
    """`auto`: the accelerator if there is one, else the CPU."""
    trust_remote_code: bool = False
    """Run Python code that ships with the model. Leave it off unless you have read that code."""
    chat_template: str | None = None
    """A file with a Jinja chat template, for a base model without one or to replace the tokenizer's own."""
    thinking: bool | None = None
    """The switch of chat templates (Qwen3's `enable_thinking`, DeepSeek-V3.1's `thinking`). None: their default."""
    template_args: dict[str, str | int | float | bool] = {}
    """Further variables of the chat template, for example {reasoning_effort: low} for gpt-oss."""
    date: Annotated[str, BeforeValidator(_date)] | None = None
    """The day (YYYY-MM-DD) that chat templates with `strftime_now` write (Llama 3.1, gpt-oss). None: that of the run
    whose conversations or states are read, or the day of the first prompt; <output_dir>/prompt_date.txt keeps it."""
    _kept_date: KeptDate | None = PrivateAttr(None)  # set by Recipe

    @model_validator(mode="after")
    def _in_the_kernels_dtype(self) -> "TargetSection":
        if self.quantization is None or self.quantization.fake:
            return self
        if self.dtype not in ("auto", "bfloat16"):
            why = f"{self.dtype}, but int8 and int4 targets compute in bfloat16: set that, or quantization: fake"
            raise ImpossibleSettings([f"dtype: {why}"])
        vars(self)["dtype"] = "bfloat16"  # the section is frozen from here on
        return self

    @property
    def day(self) -> datetime.date:
        """The day that a chat template writes."""
        if self.date is not None:
            return datetime.date.fromisoformat(self.date)
        return today() if self._kept_date is None else self._kept_date.read()

    def quantized(self, precision: QuantizationSection) -> "TargetSection":
        """The same target in this precision. Only a plain target can be quantised."""
        dtype = {} if precision.fake else {"dtype": "bfloat16"}
        return self.model_copy(update={"quantization": precision} | dtype)
