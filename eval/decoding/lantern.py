"""LANTERN and LANTERN++: relaxed acceptance for targets that write images (arXiv 2410.03355, 2502.06352).

Codes of an image are interchangeable: the target's law is flat, and a drafted code that it would rarely draw has close
neighbours that it might draw as well. So a drafted token x may stand for its neighbours. With p the target's law,
N1, N2, ... the k tokens nearest to x, and a budget,

    A  = N1 ... Nj    the longest beginning of them with p(N1) + ... + p(Nj) within the budget
    p~(x) = p(x) + p(A)

           p   x  N1  N2 | N3 ...            a neighbour too likely for the budget ends A, even if later ones fit
               `-- p~ --'

the token is accepted as if x had probability p~(x). LANTERN's budget is delta. LANTERN++'s is (lambda - 1) p(x): p~(x)
is at most lambda p(x).

The output is not the target's. Each decision tells how much it moved (`Accepted.moved`), the total variation between
the law that the token was drawn from and p.

Chosen by rank   children x1, x2, ... of a node take their mass one after the other, each from what the earlier ones
(q = 1)          left; a rejection removes x and exactly A. The budget delta is shared among the children, so the
                 total variation of every token is at most delta, and that of n tokens at most n delta.
Drawn            m = min(q, p~) is the mass with which x is drawn and accepted; where it exceeds p, the excess is scaled
                 down to delta in sum. x is accepted with probability m(x) / q(x). A rejection leaves
                 norm(max(p - m, 0)) of p and norm(q without x) of q for the next sibling, and p for the bonus. Siblings
                 share delta. `moved` adds each excess with the chance that its turn came; over all draws its mean is at
                 least the total variation, and for one child equal to it.
Greedy           p is the law at temperature 1. x is right iff it is the likeliest token, or p~(x) reaches that token's
                 probability; `moved` is p(A) where that decided.

The bonus behind a whole path is the target's own. Deviations: the published code gives every sibling the whole budget
and, after a rejection, removes all k neighbours; then nothing bounds the total variation.

The k tokens nearest to each are found by exact search, once, and kept in a file. Near are vectors with a small
Euclidean distance: rows of the target's own codebook, rows of a codebook in a file, or input embeddings. Tokens without
a vector have no neighbours and are nobody's.

Shapes: B trees, N nodes, V tokens, k neighbours, A = depth of the deepest node + 1, M entries at hand; C vectors of
width d.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch.nn import functional

from draftsmith.eval.decoding.accept import (
    Accepted,
    acceptance_of,
    accepted_path,
    deepest,
    events,
    first_accepted,
    turns,
)
from draftsmith.models.draft_tree import DraftTree
from draftsmith.models.image_tokens import ImageTokens, code_tokens, writes_images
from draftsmith.models.sampling import Draws, Sampling, drawn_tokens
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import load_tensors
from draftsmith.recipes.command.progress import Bar
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.atomic import atomic_path
from draftsmith.recipes.sections.eval import AcceptanceSection

DISTANCES_AT_ONCE = 2**26  # 256 MB
AT_ONCE = 2**24  # neighbours gathered at a time: 128 MB of float64
FIRST = 8  # neighbours of a drawn token that are looked at first; few tokens need more


@dataclass(frozen=True)
class Relaxation:
    """How far accepted tokens may lie from the target's law. Exactly one of `delta` and `factor` is given.

    Args:
        neighbours_Vk: tokens by distance, nearest first; -1 behind the last of each.
        delta: LANTERN's bound of the total variation of a token, in [0, 1].
        factor: LANTERN++'s lambda, 1 or more.
    """

    neighbours_Vk: torch.Tensor
    delta: float | None = None
    factor: float | None = None

    def budgets(self, p_M: torch.Tensor, spent_M: torch.Tensor | float = 0.0) -> torch.Tensor:
        """[M] mass that may be moved onto tokens of probability p_M, after `spent_M` onto earlier siblings."""
        if self.delta is not None:
            return torch.as_tensor(self.delta - spent_M, device=p_M.device).expand_as(p_M)
        assert self.factor is not None
        return (self.factor - 1) * p_M

    def borrowed(
        self, mass_Mk: torch.Tensor, known_Mk: torch.Tensor, budgets_M: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """([M] p(A), [M, k] which neighbours are A), of all neighbours' probabilities and which of them there are."""
        within = known_Mk & (mass_Mk.cumsum(-1) <= budgets_M[:, None])
        return (mass_Mk * within).sum(-1), within


class LanternAcceptance:
    """Tokens that are, up to a relaxation, of the target's law, or its likeliest ones."""

    def __init__(self, sampling: Sampling, relaxation: Relaxation):
        self.sampling, self.relaxation = sampling, relaxation
        self.first = acceptance_of(sampling).first

    def accept(self, tree: DraftTree, logits_BNV: torch.Tensor, draws: Sequence[Draws] = ()) -> Accepted:
        if self.sampling.greedy:
            return self._greedy(tree, logits_BNV)
        p_BNV = self.sampling.probabilities(logits_BNV).double()
        if tree.drawn_from is None:
            tried = self._by_rank(tree, p_BNV)
        else:
            tried, copied_B = self._drawn(tree, p_BNV, tree.drawn_from.double()), _without_choice(tree, tree.drawn_from)
            if copied_B.any():
                pairs = zip(self._by_rank(tree, p_BNV), tried, strict=True)
                tried = tuple(torch.where(copied_B.view(-1, *[1] * (b.dim() - 1)), a, b) for a, b in pairs)
        chances_BN, rest_BNV, moved_BN = tried
        last = deepest(tree, first_accepted(tree, events(tree, chances_BN.clamp(max=1), draws)))
        each = torch.arange(tree.rows, device=last.device)
        rest_BV = rest_BNV[each, last]
        # If only rounding allowed a rejection, no mass is left.
        rest_BV = torch.where(rest_BV.sum(-1, keepdim=True) > 0, rest_BV, p_BNV[each, last])
        accepted = accepted_path(tree, last, drawn_tokens(rest_BV, draws))
        return replace(accepted, moved=moved_BN.gather(1, _path(tree, accepted)))

    def _near(self, tokens: torch.Tensor, first: int = 0, end: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """([..., k] neighbours first to end of tokens [...], 0 where there is none; [..., k] where there is one)."""
        near = self.relaxation.neighbours_Vk[:, first:end].to(tokens.device)[tokens].long()
        return near.clamp(min=0), near >= 0

    def _greedy(self, tree: DraftTree, logits_BNV: torch.Tensor) -> Accepted:
        p_BNV, best_BN = logits_BNV.double().softmax(-1), logits_BNV.argmax(-1)
        rows, nodes = tree.drafted.nonzero(as_tuple=True)
        parents, tokens = tree.parents[rows, nodes], tree.tokens[rows, nodes]
        near, known = self._near(tokens)
        own, mass = p_BNV[rows, parents, tokens], p_BNV[rows[:, None], parents[:, None], near]
        borrowed, _ = self.relaxation.borrowed(mass, known, self.relaxation.budgets(own))
        best = best_BN[rows, parents]
        is_best = tokens == best
        enough = (borrowed > 0) & (own + borrowed >= p_BNV[rows, parents, best])
        right, moved = torch.zeros_like(tree.tokens, dtype=torch.bool), torch.zeros_like(tree.tokens).double()
        right[rows, nodes] = is_best | enough
        moved[rows, nodes] = torch.where(is_best, 0.0, borrowed)
        last = deepest(tree, right)
        accepted = accepted_path(tree, last, best_BN.gather(1, last[:, None])[:, 0])
        # A node's own mass belongs to the decision at its parent, one place earlier on the path.
        path = _path(tree, accepted)
        decided = moved.gather(1, path)[:, 1:]
        within = torch.arange(decided.shape[1], device=decided.device) < accepted.length[:, None] - 1
        return replace(accepted, moved=functional.pad(decided * within, (0, 1)))

    def _by_rank(self, tree: DraftTree, p_BNV: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """([B, N] chance of each node once its earlier siblings are rejected, [B, N, V] what the law behind each node
        has left once its children are, [B, N] what is moved there)."""
        left_BNV = p_BNV.clone()  # of each node's law, what its children have not taken
        again = tree.repeated
        chances = torch.zeros_like(p_BNV[..., 0])
        spent, moved = torch.zeros_like(chances), torch.zeros_like(chances)  # at parents
        for rows, nodes in turns(tree):
            new = ~again[rows, nodes]
            rows, nodes = rows[new], nodes[new]
            parents, tokens = tree.parents[rows, nodes], tree.tokens[rows, nodes]
            near, known = self._near(tokens)
            own, mass = left_BNV[rows, parents, tokens], left_BNV[rows[:, None], parents[:, None], near]
            budgets = self.relaxation.budgets(own, spent[rows, parents])
            borrowed, within = self.relaxation.borrowed(mass, known, budgets)
            total = left_BNV[rows, parents].sum(-1)
            taken = own + borrowed
            chances[rows, nodes] = torch.where(total > 0, taken / total.clamp(min=torch.finfo(total.dtype).tiny), 0.0)
            spent[rows, parents] += borrowed
            # An earlier sibling may have taken this token's own mass as a neighbour's.
            moved[rows, parents] += (taken - p_BNV[rows, parents, tokens]).clamp(min=0)
            entry, place = within.nonzero(as_tuple=True)
            left_BNV[rows[entry], parents[entry], near[entry, place]] = 0
            left_BNV[rows, parents, tokens] = 0
        return chances, left_BNV, moved

    def _drawn(self, tree: DraftTree, p_BNV: torch.Tensor, q_BNV: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """As `_by_rank`."""
        left_BNV, from_BNV = p_BNV.clone(), q_BNV.clone()  # of p, what is not accepted; of q, what is not drawn
        chances = torch.zeros_like(p_BNV[..., 0])
        # At parents: the share of delta that is used up, what was moved, the chance that no child so far is accepted.
        spent, moved, all_rejected = torch.zeros_like(chances), torch.zeros_like(chances), torch.ones_like(chances)
        for rows, nodes in turns(tree):
            at, tokens = (rows, tree.parents[rows, nodes]), tree.tokens[rows, nodes]
            left_MV, from_MV = left_BNV[at], from_BNV[at]
            mass = left_MV.sum(-1, keepdim=True)
            from_MV *= mass / from_MV.sum(-1, keepdim=True)
            kept_MV, excess_M = self._kept(left_MV, from_MV, spent[at])
            wanted, kept = (each.gather(1, tokens[:, None])[:, 0] for each in (from_MV, kept_MV))
            chance = torch.where(wanted > 0, kept / wanted, 0.0)  # 0: no mass comes here
            chances[rows, nodes] = chance
            spent[at] += excess_M
            moved[at] += all_rejected[at] * (excess_M / mass[:, 0]).nan_to_num(0, 0, 0)
            all_rejected[at] *= (1 - chance).clamp(min=0)
            rest_MV = (left_MV - kept_MV).clamp(min=0)
            scale = (mass - kept_MV.sum(-1, keepdim=True)).clamp(min=0) / rest_MV.sum(-1, keepdim=True)
            left_BNV[at] = rest_MV * scale.nan_to_num(0, 0, 0)
            from_BNV[at] = from_BNV[at].scatter(1, tokens[:, None], 0)
        return chances, left_BNV, moved

    def _kept(self, p_MV: torch.Tensor, q_MV: torch.Tensor, spent_M: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """([M, V] m, the mass with which tokens are drawn and accepted, [M] how much of it exceeds p)."""
        m_MV = torch.minimum(p_MV, q_MV)
        # Only tokens that are drawn too often have a use for their neighbours.
        often = (q_MV > p_MV).nonzero()  # [., 2] row, token
        for at in often.split(max(1, AT_ONCE // FIRST)):
            place = tuple(at.T)
            more = self._borrowed(at, p_MV, q_MV[place], spent_M[at[:, 0]])
            m_MV[place] = torch.minimum(q_MV[place], p_MV[place] + more)
        excess_MV = (m_MV - p_MV).clamp(min=0)
        moved_M = excess_MV.sum(-1)
        if self.relaxation.delta is not None:
            budget_M = (self.relaxation.delta - spent_M).clamp(min=0)
            scale_M = (budget_M / moved_M.clamp(min=torch.finfo(moved_M.dtype).tiny)).clamp(max=1)
            m_MV = torch.minimum(m_MV, p_MV) + excess_MV * scale_M[:, None]
            moved_M = moved_M * scale_M
        return m_MV, moved_M

    def _borrowed(
        self, at_m2: torch.Tensor, p_MV: torch.Tensor, wanted_m: torch.Tensor, spent_m: torch.Tensor
    ) -> torch.Tensor:
        """[m] p(A) of tokens at (row, token), or as much of it as lifts them to `wanted_m`."""
        own_m = p_MV[tuple(at_m2.T)]
        budgets_m, borrowed_m = self.relaxation.budgets(own_m, spent_m), torch.zeros_like(own_m)
        still = torch.arange(len(at_m2), device=at_m2.device)  # which may take more
        for first in range(0, self.relaxation.neighbours_Vk.shape[1], FIRST):
            rows, tokens = at_m2[still].T
            near, known = self._near(tokens, first, first + FIRST)
            more, within = self.relaxation.borrowed(p_MV[rows[:, None], near], known, (budgets_m - borrowed_m)[still])
            borrowed_m[still] += more
            still = still[within.all(-1) & (own_m + borrowed_m < wanted_m)[still]]
            if not len(still):
                break
        return borrowed_m


def _without_choice(tree: DraftTree, q_BNV: torch.Tensor) -> torch.Tensor:
    """[B] whether every token is the only one that could be drawn: a copy beside a drafter, tried as it is alone."""
    each = torch.arange(tree.rows, device=q_BNV.device)[:, None]
    return (~tree.drafted | (q_BNV[each, tree.parents.clamp(min=0), tree.tokens] == 1)).all(1)


def _path(tree: DraftTree, accepted: Accepted) -> torch.Tensor:
    """[B, A] nodes of the paths."""
    if accepted.path is not None:
        return accepted.path
    return torch.arange(tree.nodes, device=accepted.length.device).expand(tree.rows, -1)


# The table of neighbours.


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
