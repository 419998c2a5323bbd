"""The decoding loop as tests ask for it, one answer, several, or a queue, by a target and a proposer; corpora and
routers of SAM-Decoding."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from draftsmith.data_gen.answers.generators import Asked, GeneratedAnswer, GenerationSettings, Writer
from draftsmith.eval.decoding import decode as loop
from draftsmith.eval.decoding.accept import acceptance_of
from draftsmith.eval.decoding.decode import Generation, TargetVerifier
from draftsmith.eval.decoding.sam import SamProposer, SamRouter
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.sampling import GREEDY, Draws, Sampling
from draftsmith.models.suffix_automaton import StaticAutomaton, corpus_tokens
from draftsmith.models.target import Target

CPU = torch.device("cpu")


def decode(
    target: Target,
    proposer: Proposer | None,
    prompt: Sequence[int],
    stop_ids: Collection[int],
    max_new_tokens: int,
    sampling: Sampling = GREEDY,
    draws: Draws | None = None,
) -> Generation:
    rows = None if draws is None else [draws]
    return decode_batch(target, proposer, [prompt], stop_ids, max_new_tokens, sampling, rows)[0]


def decode_batch(
    target: Target,
    proposer: Proposer | None,
    prompts: Sequence[Sequence[int]],
    stop_ids: Collection[int],
    max_new_tokens: int | Sequence[int],
    sampling: Sampling = GREEDY,
    draws: Sequence[Draws] | None = None,
) -> list[Generation]:
    verifier = TargetVerifier(target, proposer, acceptance_of(sampling))
    with torch.inference_mode():
        return loop.decode(verifier, proposer, prompts, stop_ids, max_new_tokens, draws)


def write_answers(
    model: Any, prompts: Iterator[Asked | None], settings: GenerationSettings
) -> Iterator[GeneratedAnswer]:
    """As data_gen/regenerate.py does without a drafter."""
    return Writer(Target(model, capture_layers=(0,)), settings)(prompts)


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
