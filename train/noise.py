"""Feature noise (EAGLE-1, arXiv 2401.15077, section 3.2): the drafter will read features that it drafted itself, so it
learns from features that are not quite the target's.

Shapes: B rows, T tokens, F captured states.
"""

import hashlib
from collections.abc import Sequence

import torch

REFERENCE_TOKENS = 512


def add_noise(captured_BTF: torch.Tensor, width: float, lengths: Sequence[int], draws: Sequence[str]) -> torch.Tensor:
    """captured + (u - 1/2) * width * 512 / length of the row, u uniform on [0, 1).

    Every row has random numbers of its own, so that neither padding nor the company of other rows changes them, and a
    resumed run draws the same ones.

    Args:
        lengths: tokens of each row, without padding, which stays as it is.
        draws: names the random numbers of each row, for example by seed, epoch and row.
    """
    noisy = captured_BTF.float() if captured_BTF.dtype != torch.float64 else captured_BTF
    noisy = noisy.clone()
    for row, (length, draw) in enumerate(zip(lengths, draws, strict=True)):
        seed = int.from_bytes(hashlib.sha256(draw.encode()).digest()[:7], "big")
        generator = torch.Generator(device=captured_BTF.device).manual_seed(seed)
        u = torch.rand(length, captured_BTF.shape[2], generator=generator, device=captured_BTF.device)
        noisy[row, :length] += (u - 0.5) * (width * REFERENCE_TOKENS / length)
    return noisy.to(captured_BTF.dtype)
