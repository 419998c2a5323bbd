"""A drafter whose log-probabilities are scripted, path by path, and checks of the trees that grow on it."""

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch

from draftsmith.models.c2t import C2tClassifier, C2tConfig
from draftsmith.models.draft_tree import Committed, DraftTree
from draftsmith.models.vocab import DraftVocab

VOCAB = 12
Nodes = tuple[int, ...]  # draft tokens from below the root to a node


class Table:
    """Log-probabilities after each path, the same however often and in whatever order they are asked for.

    Args:
        sharpness: standard deviations of the logits, one drawn for each path; 0 makes all tokens equally likely.
    """

    def __init__(self, seed: int, vocab_size: int = VOCAB, sharpness: Sequence[float] = (0.5, 3.0, 6.0)) -> None:
        self.seed, self.vocab_size, self.sharpness = seed, vocab_size, sharpness
        self.known: dict[Nodes, torch.Tensor] = {}

    def made(self, path: Nodes) -> torch.Tensor:
        chance = random.Random(f"{self.seed} {path}")
        width = chance.choice(self.sharpness)
        return torch.tensor([chance.gauss(0, 1) * width for _ in range(self.vocab_size)]).log_softmax(-1)

    def row(self, path: Nodes) -> torch.Tensor:
        if path not in self.known:
            self.known[path] = self.made(path)
        return self.known[path]

    def __call__(self, path: Nodes) -> list[float]:
        return self.row(path).tolist()


class Scripted:
    """A `Drafting` that reads its log-probabilities off tables, one for each row; draft token i is target token 2i + 1.

    The roots are even tokens.
    """

    capture_layers: tuple[int, ...] = (1, 2)

    def __init__(self, tables: Sequence[Table]) -> None:
        size = tables[0].vocab_size
        self.tables, self.calls = list(tables), 0
        self.vocab = DraftVocab(torch.arange(size) * 2 + 1, size * 2 + 2)

    def set_rows(self, kept: Sequence[int], new: int = 0) -> None: ...

    def passes(self, levels: int) -> int:
        return levels

    def rollback(self, lengths: Sequence[int]) -> None:
        raise AssertionError("nothing is rolled back here")

    def observe(self, committed: Committed) -> None: ...

    def root_log_probs(self) -> torch.Tensor:
        self.slots: list[list[Nodes]] = [[()] for _ in self.tables]
        self.calls += 1
        return torch.stack([table.row(()) for table in self.tables])

    def expand(self, parent_slots: torch.Tensor, tokens: torch.Tensor, depth: int) -> torch.Tensor:
        self.calls += 1
        assert parent_slots.shape == tokens.shape == (len(self.tables), tokens.shape[1])
        drafted = self.vocab.to_draft(tokens)
        assert (drafted >= 0).all()
        rows = []
        for table, slots, parents, ids in zip(
            self.tables, self.slots, parent_slots.tolist(), drafted.tolist(), strict=True
        ):
            paths = [(*slots[parent], token) for parent, token in zip(parents, ids, strict=True)]
            assert all(len(path) == depth for path in paths)
            slots.extend(paths)
            rows.append(torch.stack([table.row(path) for path in paths]))
        return torch.stack(rows)


def roots(rows: int) -> torch.Tensor:
    return torch.arange(rows) * 2


def paths_of(tree: DraftTree, row: int) -> list[Nodes]:
    """The draft tokens that lead to each node of a tree; whatever must hold for every tree is checked."""
    size = tree.nodes if tree.sizes is None else int(tree.sizes[row])
    tokens, parents = tree.tokens[row].tolist(), tree.parents[row].tolist()
    assert tokens[0] == 2 * row
    assert parents[0] == -1
    paths: list[Nodes] = [()]
    for i in range(1, tree.nodes):
        assert 0 <= parents[i] < i  # on padding, too
        assert tokens[i] % 2 == 1 or i >= size
        if i < size:
            paths.append((*paths[parents[i]], tokens[i] // 2))
    depths = [len(path) for path in paths]
    assert depths == sorted(depths)  # shallower nodes first
    assert max(depths) <= tree.depth
    assert len(set(paths)) == size  # unique siblings
    assert tree.depths[row, :size].tolist() == depths
    return paths


def linear_classifier(p: float, h: float, d: float, bias: float) -> C2tClassifier:
    """C = sigmoid(p P + h H + d depth + bias + relu(P - 0.3)): the first three units pass the features through."""
    classifier = C2tClassifier(C2tConfig()).requires_grad_(False)
    for parameter in classifier.parameters():
        parameter.zero_()
    classifier.hidden.weight[:3] = torch.eye(3)
    classifier.hidden.weight[3, 0], classifier.hidden.bias[3] = 1.0, -0.3
    classifier.output.weight[0, :4] = torch.tensor([p, h, d, 1.0])
    classifier.output.bias[0] = bias
    return classifier


def unasked_target(positions: int) -> Any:
    """Stands in for a target of so many positions, for proposers that read no embeddings."""
    return SimpleNamespace(device=torch.device("cpu"), config=SimpleNamespace(max_position_embeddings=positions))
