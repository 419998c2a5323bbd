"""Targets with drafters that are right often enough for acceptance to be put to the test, made in seconds.

Random drafters accept nothing, and a loop that never accepts hides most of its defects.
"""

from functools import cache
from typing import Any

import torch

from draftsmith.models.alignment import columns_of
from draftsmith.models.eagle3 import Eagle3Config, Eagle3Drafter
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.train.unroll import TrainingTimeTest, teacher_of
from tests.conftest import make_target

PROMPTS = ([11, 12, 13], [21, 22, 23, 24, 25, 26, 27, 28, 29], [7], [5, 6, 5, 6, 5, 6, 5])


def greedy(target: Target, prompt: list[int], length: int) -> list[int]:
    """transformers' own greedy decoding, that never stops."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, eos_token_id=None
    )
    return out[0, len(prompt) :].tolist()


def taught(
    target: Target, vocab: DraftVocab, prompts: tuple[list[int], ...] = PROMPTS, length: int = 40, steps: int = 120
) -> Eagle3Drafter:
    """An EAGLE-3 drafter that learnt some of the target's greedy answers to these prompts almost by heart."""
    torch.manual_seed(3)
    shape = Eagle3Config.for_target(target.config, target.vocab_size, target.capture_layers, vocab.size)
    drafter = Eagle3Drafter(shape, vocab, target.embedding_table)
    rows = [[*prompt, *greedy(target, prompt, length)] for prompt in prompts]
    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    span = torch.zeros_like(ids)
    for b, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
        span[b, len(prompt) : len(row)] = 1
    states, columns = target.states(ids), columns_of(span, 4)
    teacher = teacher_of(target, states.last, ids, columns, vocab)
    trainee = TrainingTimeTest(drafter, 4, 1.0)
    optimizer = torch.optim.AdamW([p for p in drafter.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        sums = trainee(states.captured, ids, columns, teacher)
        (sums.loss / sums.columns.clamp(min=1)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return drafter.requires_grad_(False)


@cache
def pair_of(family: str, draft_tokens: int | None = None, **overrides: Any) -> tuple[Target, Eagle3Drafter]:
    """A target with a taught drafter, of the target's whole vocabulary or of `draft_tokens` tokens that it says."""
    target = Target(make_target(family, **overrides))
    if draft_tokens is None:
        return target, taught(target, DraftVocab.full(target.vocab_size))
    said = torch.tensor([token for prompt in PROMPTS for token in greedy(target, prompt, 40)]).unique()
    others = torch.arange(target.vocab_size)[~torch.isin(torch.arange(target.vocab_size), said)]
    ids = torch.cat((said, others))[:draft_tokens].sort().values
    return target, taught(target, DraftVocab(ids, target.vocab_size))


def blurred_copy(family: str, noise: float = 0.02, **overrides: Any) -> Target:
    """The target of that family again, its weights disturbed: a small causal LM that often agrees with it."""
    model = make_target(family, **overrides)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn_like(parameter)
    return Target(model)
