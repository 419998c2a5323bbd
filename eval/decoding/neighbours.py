"""LANTERN's table of neighbours: for each token the k nearest ones, by exact search, computed once and kept.

Near are vectors with a small Euclidean distance: rows of the target's own codebook, rows of a codebook in a file, or
input embeddings. Tokens without a vector have no neighbours and are nobody's.

Shapes: V tokens of the target, C vectors, d their width, k neighbours.
"""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from draftsmith.models.image_tokens import ImageTokens, code_tokens, writes_images
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import load_tensors
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_path
from draftsmith.recipes.sections.eval import AcceptanceSection

DISTANCES_AT_ONCE = 2**26  # 256 MB


def check_neighbours(section: AcceptanceSection, target: TargetFiles) -> None:
    """Raises UserError, before weights are loaded, if the target has no codebook, or the file is not of its
    vocabulary."""
    if section.neighbours == "codebook":
        if not writes_images(target.config):
            raise UserError(
                f"eval.acceptance.neighbours: {target.section.model} has no codebook of its own: it writes text, or "
                "codes of a model that is not in its checkpoint. Name a safetensors file with codebook and token_ids, "
                "or embedding"
            )
        code_tokens(target.config)
    elif section.neighbours != "embedding":
        read_codebook(Path(section.neighbours), target.text_config.vocab_size)


def warning(section: AcceptanceSection, target: TargetFiles) -> str | None:
    """A sentence about a target that seems to write text. A file's tokens are taken for codes."""
    if section.neighbours != "embedding" or writes_images(target.config):
        return None
    return (
        f"{section.rule} with {target.section.model}, which writes text: tokens give way to those with near "
        "embeddings, which need not mean the same"
    )


def read_codebook(path: Path, vocab_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """([C, d] vectors, [C] their tokens) of a file for a target with `vocab_size` tokens, or UserError."""
    where = f"eval.acceptance.neighbours: {path}"
    if not path.is_file():
        raise UserError(f"{where} is no file; write codebook, embedding, or the path of a safetensors file")
    tensors, _ = load_tensors(path, "codebook")
    codebook, ids = (tensors.get(name, torch.empty(0)) for name in ("codebook", "token_ids"))
    if codebook.dim() != 2 or ids.shape != codebook.shape[:1] or not codebook.isfinite().all():
        raise UserError(f"{where} needs codebook [C, d], finite numbers, and token_ids [C]")
    if ids.is_floating_point() or len(ids) < 2 or len(ids.unique()) < len(ids):
        raise UserError(f"{where}: token_ids are not two or more different whole numbers")
    ids = ids.long()  # torch computes little with unsigned ones
    if int(ids.min()) < 0 or int(ids.max()) >= vocab_size:
        raise UserError(
            f"{where}: a codebook for tokens {int(ids.min()):,} to {int(ids.max()):,}, but the target has "
            f"{vocab_size:,}; it is another model's"
        )
    return codebook.float(), ids


def neighbours_of(target: Target, section: AcceptanceSection, kept_in: Path | None = None) -> torch.Tensor:
    """[V, k] the tokens nearest to each, nearest first; -1 behind the last. k is at most C - 1.

    Args:
        kept_in: folder of tables; None: nothing is read or kept.
    """
    images = ImageTokens.of(target.model)
    if section.neighbours == "embedding":
        vectors, ids = target.embedding_table, torch.arange(target.vocab_size)
    elif section.neighbours == "codebook" and images is not None:
        vectors, ids = images.codebook, torch.tensor(images.token_ids)
    else:
        vectors, ids = read_codebook(Path(section.neighbours), target.vocab_size)
    # Kept on disk as int32: a table of 150,000 tokens and 1,000 neighbours has 600 MB.
    k = min(section.k, len(ids) - 1)
    content = hashlib.sha256(vectors.detach().float().cpu().numpy().tobytes() + ids.numpy().tobytes()).hexdigest()
    name = f"neighbours-{content[:16]}-{target.vocab_size}-{k}.safetensors"
    path = None if kept_in is None else kept_in / name
    if path is not None and path.exists():
        try:
            return load_file(path)["neighbours"].to(target.device)
        except (SafetensorError, KeyError):
            pass  # cut short: it is computed again
    table_Vk = torch.full((target.vocab_size, k), -1, dtype=torch.int32)
    table_Vk[ids] = ids[nearest(vectors.detach(), k).cpu()].int()
    if path is not None:
        with atomic_path(path) as partial:
            save_file({"neighbours": table_Vk}, partial)
    return table_Vk.to(target.device)


def nearest(vectors_Cd: torch.Tensor, k: int) -> torch.Tensor:
    """[C, k] the nearest other vectors, nearest first."""
    # Far from the origin, distances computed by a matrix product lose their digits.
    vectors_Cd = vectors_Cd.float() - vectors_Cd.float().mean(0)
    blocks = torch.arange(len(vectors_Cd), device=vectors_Cd.device).split(max(1, DISTANCES_AT_ONCE // len(vectors_Cd)))
    found = []
    for block in Bar(blocks, desc="neighbours", unit="block", disable=len(blocks) == 1):
        distances = torch.cdist(vectors_Cd[block], vectors_Cd)
        distances[torch.arange(len(block), device=block.device), block] = torch.inf
        found.append(distances.topk(k, largest=False).indices)
    return torch.cat(found)
