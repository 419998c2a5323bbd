"""The decoding loop as tests ask for it: one answer, several, or a queue, by a target and a proposer."""

from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch

from draftsmith.data_gen.answers.generators import Asked, GeneratedAnswer, GenerationSettings, Writer
from draftsmith.eval.decoding import decode as loop
from draftsmith.eval.decoding.accept import acceptance_of
from draftsmith.eval.decoding.decode import Generation, TargetVerifier
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.sampling import GREEDY, Draws, Sampling
from draftsmith.models.target import Target


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
