"""LANTERN's table of neighbours: for each token the k nearest ones, by exact search, computed once and kept.

Near are vectors with a small Euclidean distance: rows of the target's own codebook, rows of a codebook in a file, or
input embeddings. Tokens without a vector have no neighbours and are nobody's.

Shapes: V tokens of the target, C vectors, d their width, k neighbours.
"""

import hashlib
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file

from draftsmith.models.image_tokens import ImageTokens, code_tokens, writes_images
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_path
from draftsmith.recipes.sections.eval import AcceptanceSection

DISTANCES_AT_ONCE = 2**26  # 256 MB


def check_neighbours(section: AcceptanceSection, target: TargetFiles) -> None:
    """Checks LANTERN's source of neighbours before weights are loaded.

    Raises:
        UserError: the target has no codebook, or the file is none of its vocabulary.
    """
    config = target.config
    if section.neighbours == "embedding":
        return
    if section.neighbours == "codebook":
        if not writes_images(config):
            raise UserError(
                f"eval.acceptance.neighbours: {target.section.model} has no codebook of its own: it writes text, or "
                "codes of a model that is not in its checkpoint. Name a safetensors file with codebook and token_ids, "
                "or embedding"
            )
        code_tokens(config)
        return
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
    """([C, d] vectors, [C] their tokens) of a file.

    Raises:
        UserError: no such file, or none for a target with `vocab_size` tokens.
    """
    where = f"eval.acceptance.neighbours: {path}"
    if not path.is_file():
        raise UserError(f"{where} is no file; write codebook, embedding, or the path of a safetensors file")
    try:
        with safe_open(path, framework="pt") as file:
            missing = {"codebook", "token_ids"} - set(file.keys())
            if missing:
                raise UserError(f"{where} has no tensor {min(missing)}; it needs codebook [C, d] and token_ids [C]")
            codebook, ids = file.get_tensor("codebook"), file.get_tensor("token_ids")
    except (OSError, SafetensorError) as error:
        raise UserError(f"{where} cannot be read as safetensors: {error}") from None
    if codebook.dim() != 2 or not codebook.numel() or ids.shape != codebook.shape[:1]:
        shapes = f"codebook {list(codebook.shape)} and token_ids {list(ids.shape)}"
        raise UserError(f"{where}: {shapes} are not [C, d] and [C]")
    if not codebook.is_floating_point() or not codebook.isfinite().all():
        raise UserError(f"{where}: codebook has entries that are no finite floating-point numbers")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool:
        raise UserError(f"{where}: token_ids are of type {str(ids.dtype).removeprefix('torch.')}, not whole numbers")
    ids = ids.long()  # torch computes little with unsigned ones
    if len(ids) < 2 or len(ids.unique()) < len(ids) or int(ids.min()) < 0:
        raise UserError(f"{where}: token_ids are not two or more different tokens")
    if int(ids.max()) >= vocab_size:
        raise UserError(
            f"{where}: a codebook for tokens up to {int(ids.max()):,}, but the target has {vocab_size:,}; it is "
            "another model's"
        )
    return codebook.float(), ids


def neighbours_of(target: Target, section: AcceptanceSection, kept_in: Path | None = None) -> torch.Tensor:
    """[V, k] the tokens nearest to each, nearest first; -1 behind the last. k is at most C - 1.

    Args:
        kept_in: folder of tables; None: nothing is read or kept.

    Raises:
        UserError: as `check_neighbours`.
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
