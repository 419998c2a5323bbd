"""Corpora and routers that tests of SAM-Decoding share."""

from collections.abc import Sequence

import numpy as np
import torch

from draftsmith.eval.decoding.sam import SamProposer, SamRouter
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.suffix_automaton import StaticAutomaton, corpus_tokens

CPU = torch.device("cpu")


def corpus_of(documents: Sequence[Sequence[int]], vocab_size: int) -> StaticAutomaton:
    tokens = corpus_tokens([np.array(document) for document in documents], vocab_size)
    return StaticAutomaton.of_documents(tokens, vocab_size)


def misleading(answers: Sequence[Sequence[int]], vocab_size: int) -> StaticAutomaton:
    """Parts of the answers: whole, ended in the middle by another token, and ended."""
    wrong = [[*answer[:12], (answer[12] + 1) % vocab_size, *answer[13:17]] for answer in answers]
    return corpus_of([*answers[::2], *wrong, *(answer[5:9] for answer in answers)], vocab_size)


def sam_alone(corpus: StaticAutomaton | None, nodes: int = 12, width: int = 3, alpha: float = 4.0) -> SamProposer:
    return SamProposer(CPU, nodes, alpha, corpus, width=width)


def beside(other: Proposer, corpus: StaticAutomaton | None, l_threshold: int, fuse: bool, nodes: int = 6) -> SamRouter:
    return SamRouter(SamProposer(CPU, nodes, None, corpus, l_bias=1, width=1), other, l_threshold, fuse)
