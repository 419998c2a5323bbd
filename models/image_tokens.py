"""Targets that write images: the codes among their tokens, and the pictures that these make.

Emu3's family (arXiv 2409.18869) has one vocabulary for words and images. Some of its tokens are codes of a VQ
autoencoder, which lies in the same checkpoint:

    config.vocabulary_map    "<|visual token 000007|>": 131       code 7 is token 131
    model.vqmodel            codes [h, w] -> pixels, and the codebook [C, d]

An answer's codes are a picture, row by row:

    7 3 3 | 1 7 7 | 2 2 2     rows that end in the end-of-line token, or a square if there is none
"""

import io
from collections.abc import Sequence
from math import isqrt
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.picture_parts import store_picture
from draftsmith.recipes.sections.target import TargetSection


def writes_images(config: Any) -> bool:
    """Whether a model with this config writes codes of an autoencoder inside its checkpoint."""
    return hasattr(config, "vq_config") and isinstance(getattr(config, "vocabulary_map", None), dict)


def code_tokens(config: Any) -> list[int]:
    """The token of each code."""
    names = sorted(name for name in config.vocabulary_map if name.startswith("<|visual token"))  # padded with zeros
    return [config.vocabulary_map[name] for name in names]


def unconditional_ids(section: TargetSection, tokenizer: PreTrainedTokenizerBase, config: Any) -> torch.Tensor:
    """[V] for target.guidance, the token of the unconditional text in the place of each token: the null token for
    words, itself for special tokens and those in the vocabulary_map.

    Raises UserError if the target writes no images, or has no such null token.
    """
    assert section.guidance is not None
    if not writes_images(config):
        raise UserError(
            f"target.guidance: {section.model} writes text; guidance is for targets that write images by a caption"
        )
    null, vocab_size = section.guidance.null, config.get_text_config(decoder=True).vocab_size
    found: int = tokenizer.get_vocab().get(null, vocab_size)  # type: ignore[assignment]
    if found >= vocab_size:
        raise UserError(
            f"target.guidance.null: {section.model} has no token {null!r}; name the one that it was trained with"
        )
    ids = torch.full((vocab_size,), found)
    kept = torch.tensor([*tokenizer.all_special_ids, *config.vocabulary_map.values()])
    kept = kept[kept < vocab_size]  # tokenizers may have more tokens than the model
    ids[kept] = kept
    return ids


class ImageTokens:
    """The image part of a loaded model for which `writes_images` holds."""

    def __init__(self, model: Any):
        self.autoencoder = model.base_model.vqmodel
        self.token_ids = code_tokens(model.config)
        self.end_of_line: int | None = model.config.vocabulary_map.get("<|extra_200|>")  # Emu3's
        self._code = {token: code for code, token in enumerate(self.token_ids)}

    @staticmethod
    def of(model: Any) -> "ImageTokens | None":
        """None: a model that writes no images."""
        return ImageTokens(model) if writes_images(model.config) else None

    @property
    def codebook(self) -> torch.Tensor:
        """[C, d]"""
        return self.autoencoder.quantize.embedding.weight

    def codes(self, answer: Sequence[int]) -> list[list[int]] | None:
        """The rows of an answer's picture; None: its codes are no whole picture."""
        lines: list[list[int]] = [[]]
        for token in answer:
            if token in self._code:
                lines[-1].append(self._code[token])
            elif token == self.end_of_line:
                lines.append([])
        lines = [line for line in lines if line]
        if len(lines) == 1:
            [line] = lines
            side = isqrt(len(line))
            lines = [line[i : i + side] for i in range(0, len(line), side)] if side**2 == len(line) else []
        return lines if len(set(map(len, lines))) == 1 else None

    def stored(self, answer: Sequence[int], folder: Path) -> dict[str, str]:
        """Writes the answer's picture into `folder`. Returns its `path` and `sha256`; nothing if there is none."""
        picture = self.picture(answer)
        if picture is None:
            return {}
        file = io.BytesIO()
        picture.save(file, "PNG")
        path = Path(store_picture(file.getvalue(), folder))
        return {"path": str(path), "sha256": path.stem}

    @torch.inference_mode()
    def picture(self, answer: Sequence[int]) -> Image.Image | None:
        """The picture that an answer's tokens make; None: no whole one."""
        rows = self.codes(answer)
        if rows is None:
            return None
        codes = torch.tensor(rows, device=self.codebook.device)[None]  # [1, h, w]
        pixels = self.autoencoder.decode(codes).float().flatten(0, -4)[0]  # [3, H, W] in -1 to 1
        levels = ((pixels.clamp(-1, 1) + 1) * 127.5).round().byte()
        return Image.fromarray(levels.permute(1, 2, 0).cpu().numpy())
