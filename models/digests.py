"""Digests of weights: equal for every precision that a checkpoint is loaded in."""

import hashlib
from collections.abc import Iterable

import torch


def tensor_digest(tensor: torch.Tensor, rows: int = 4096) -> str:
    """sha256 over at most `rows` evenly spaced rows of a matrix, in bfloat16."""
    chosen = torch.linspace(0, len(tensor) - 1, min(rows, len(tensor)), dtype=torch.float64).round().long()
    values = tensor.detach()[chosen.to(tensor.device)].to(torch.bfloat16).cpu().contiguous()
    return hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest()


def combined_digest(tensors: Iterable[torch.Tensor]) -> str:
    """sha256 over `tensor_digest` of at most 64 rows of each."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor_digest(torch.atleast_1d(tensor), 64).encode())
    return found.hexdigest()
