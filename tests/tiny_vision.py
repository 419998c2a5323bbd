"""Tiny vision-language targets with random weights, their processors and pictures: made in seconds, no network."""

from functools import cache
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from tests.conftest import SETTINGS, make_tokenizer

FAMILIES = ("llava", "llava_next", "qwen2_5_vl", "qwen3_vl")
WITH_AXES = ("qwen2_5_vl", "qwen3_vl")  # M-RoPE
BASIC_FAMILIES = ("llava", "qwen2_5_vl")  # for tests of commands, which see tokens and positions alone
PLACEHOLDER = 290  # the first token behind those of `make_tokenizer`
MARKS = ("<image>", "<|vision_start|>", "<|vision_end|>")  # 290, 291, 292
PATCH = 4  # pixels
PINPOINTS = [[16, 32], [32, 16], [32, 32]]  # of LLaVA-NeXT: pixels that its tiles of 16 x 16 cover
# All show lists of parts; LLaVA's drops contents that are strings, as the published one does.
PARTS = (
    "{%- for part in message['content'] -%}{%- if part['type'] == 'text' -%}{{ part['text'] }}"
    "{%- elif part['type'] == 'image' -%}PICTURE{%- endif -%}{%- endfor -%}"
)
TEMPLATE = (
    "{%- for message in messages -%}<|{{ message['role'] }}|>"
    "{%- if message['role'] == 'assistant' -%}{% generation %}CONTENT<|end|>{% endgeneration %}"
    "{%- else -%}CONTENT<|end|>{%- endif -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
LLAVA_TEMPLATE = TEMPLATE.replace("CONTENT", PARTS).replace("PICTURE", "<image>")
QWEN_TEMPLATE = TEMPLATE.replace(
    "CONTENT", "{%- if message['content'] is string -%}{{ message['content'] }}{%- else -%}" + PARTS + "{%- endif -%}"
).replace("PICTURE", "<|vision_start|><image><|vision_end|>")


def vision_config(family: str, num_layers: int = 7) -> Any:
    """A text part as `conftest.make_target` has it, and a tower of two layers."""
    text: dict[str, Any] = SETTINGS | {"num_hidden_layers": num_layers}
    del text["head_dim"], text["tie_word_embeddings"]
    special = {"image_token_id": PLACEHOLDER, "tie_word_embeddings": False, "eos_token_id": 4, "pad_token_id": 0}
    tower: dict[str, Any] = {"hidden_size": 16, "intermediate_size": 24, "patch_size": PATCH, "initializer_range": 0.3}
    if family not in WITH_AXES:
        tower |= {"model_type": "clip_vision_model", "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16}
        text |= {"model_type": "llama", "tie_word_embeddings": False}
        if family == "llava_next":
            special |= {"image_grid_pinpoints": PINPOINTS}
        return AutoConfig.for_model(family, text_config=text, vision_config=tower, **special)
    tower |= {"out_hidden_size": 32, "depth": 2, "num_heads": 2}
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]}
    if family == "qwen2_5_vl":
        tower |= {"window_size": 4 * PATCH, "fullatt_block_indexes": [1]}
        rope |= {"type": "mrope"}  # as published
    else:
        tower |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
        text |= {"head_dim": 8}
        rope |= {"mrope_section": [2, 1, 1], "mrope_interleaved": True}
    text |= {"rope_parameters": rope}
    special |= {"video_token_id": 1, "vision_start_token_id": PLACEHOLDER + 1, "vision_end_token_id": PLACEHOLDER + 2}
    return AutoConfig.for_model(family, text_config=text, vision_config=tower, **special)


@cache
def make_vision_target(family: str, seed: int = 0) -> Any:
    """A model of `FAMILIES` in float32. Towers are scaled so that pictures matter to the answers."""
    torch.manual_seed(seed)
    model: Any = AutoModelForImageTextToText.from_config(vision_config(family)).float().eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "language_model" not in name and "lm_head" not in name and weight.dim() > 1:
                weight.copy_(0.3 * torch.randn_like(weight))
    return model.requires_grad_(False)


def make_image_processor(family: str) -> Any:
    """LLaVA's makes 4 x 4 patches of every picture, LLaVA-NeXT's as many of each of up to five tiles, Qwen's up to 16
    tokens of 2 x 2 patches."""
    if family in WITH_AXES:
        size = {"shortest_edge": (2 * PATCH) ** 2, "longest_edge": 16 * (2 * PATCH) ** 2}
        return Qwen2VLImageProcessorPil(patch_size=PATCH, merge_size=2, temporal_patch_size=2, size=size)
    sizes: Any = {"size": {"shortest_edge": 16}, "crop_size": {"height": 16, "width": 16}}
    if family == "llava":
        return CLIPImageProcessorPil(**sizes)
    return LlavaNextImageProcessorPil(**sizes, image_grid_pinpoints=PINPOINTS)


def make_vision_tokenizer(family: str) -> PreTrainedTokenizerFast:
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": list(MARKS)})
    tokenizer.chat_template = QWEN_TEMPLATE if family in WITH_AXES else LLAVA_TEMPLATE
    return tokenizer


def save_vision_target(folder: Path, family: str) -> Path:
    """A folder as `target.model` of a recipe."""
    make_vision_target(family).save_pretrained(folder)
    make_image_processor(family).save_pretrained(folder)
    make_vision_tokenizer(family).save_pretrained(folder)
    return folder


def picture(width: int = 24, height: int = 16, seed: int = 0) -> Image.Image:
    """Coloured noise in large squares."""
    torch.manual_seed(seed)
    squares = torch.randint(0, 256, (3, 4, 3), dtype=torch.uint8).numpy()
    return Image.fromarray(squares).resize((width, height), Image.Resampling.NEAREST)


def asked(text: str, *pictures: Any) -> dict[str, Any]:
    """A user's message: pictures, then text."""
    shown = [{"type": "image", "image": each} for each in pictures]
    return {"role": "user", "content": [*shown, {"type": "text", "text": text}]}
