"""Between pictures and the codes of the image demo's autoencoder (transformers' Emu3VQVAE)."""

from collections.abc import Sequence
from typing import Any

import numpy
import torch

from demos.digits import CELL, PIXELS

SIDE = PIXELS // CELL
CODES = SIDE * SIDE  # of a picture, row by row
BATCH = 250  # pictures at once


def pixel_tensor(pictures: numpy.ndarray) -> torch.Tensor:
    """[N, 3, PIXELS, PIXELS] in -1 to 1, of uint8 pictures [N, PIXELS, PIXELS, 3]."""
    return torch.from_numpy(pictures).permute(0, 3, 1, 2).float() / 127.5 - 1


@torch.no_grad()
def encoded(autoencoder: Any, pictures: numpy.ndarray) -> list[list[int]]:
    """[N, CODES] of uint8 pictures [N, PIXELS, PIXELS, 3]."""
    found = []
    for start in range(0, len(pictures), BATCH):
        pixels = pixel_tensor(pictures[start : start + BATCH])
        sizes = torch.full((len(pixels), 2), PIXELS)
        found += [codes.flatten().tolist() for codes in autoencoder.encode(pixels, sizes).image_tokens]
    return found


@torch.no_grad()
def decoded(autoencoder: Any, codes: Sequence[Sequence[int]]) -> numpy.ndarray:
    """uint8 pictures [N, PIXELS, PIXELS, 3] of codes [N, CODES]."""
    found = [numpy.zeros((0, PIXELS, PIXELS, 3), numpy.uint8)]
    for start in range(0, len(codes), BATCH):
        pixels = autoencoder.decode(torch.tensor(codes[start : start + BATCH]).view(-1, SIDE, SIDE))
        whole = ((pixels.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        found.append(whole.permute(0, 2, 3, 1).numpy())
    return numpy.concatenate(found)


def pictures_of_answers(autoencoder: Any, answers: Sequence[Sequence[int] | None]) -> list[numpy.ndarray | None]:
    """The picture of each answer's codes; None for one without."""
    pictures = iter(decoded(autoencoder, [codes for codes in answers if codes is not None]))
    return [None if codes is None else next(pictures) for codes in answers]
