"""Feature noise (EAGLE-1, arXiv 2401.15077, section 3.2): the drafter will read features that it drafted itself, so it
learns from features that are not quite the target's.

Shapes: B rows, T tokens, F captured states.
"""

import hashlib
from collections.abc import Sequence

import torch

from draftsmith.models.alignment import Documents

REFERENCE_TOKENS = 512


def add_noise(
    captured_BTF: torch.Tensor,
    width: float,
    lengths: Sequence[int],
    draws: Sequence[str],
    documents: Documents | None = None,
) -> torch.Tensor:
    """captured + (u - 1/2) * width * 512 / length of the training row, u uniform on [0, 1).

    Every training row has random numbers of its own, so that neither padding nor the company of other rows, beside it
    or in its row, changes them, and a resumed run draws the same ones.

    Args:
        lengths: tokens of each training row, without padding, which stays as it is.
        draws: names the random numbers of each, for example by seed, epoch and row.
        documents: where each stands; None: the i-th at the beginning of row i.
    """
    places = documents.places if documents is not None else [(i, 0, length) for i, length in enumerate(lengths)]
    noisy = captured_BTF.float() if captured_BTF.dtype != torch.float64 else captured_BTF
    noisy = noisy.clone()
    for (row, start, length), draw in zip(places, draws, strict=True):
        seed = int.from_bytes(hashlib.sha256(draw.encode()).digest()[:7], "big")
        generator = torch.Generator(device=captured_BTF.device).manual_seed(seed)
        u = torch.rand(length, captured_BTF.shape[2], generator=generator, device=captured_BTF.device)
        noisy[row, start : start + length] += (u - 0.5) * (width * REFERENCE_TOKENS / length)
    return noisy.to(captured_BTF.dtype)
