"""Targets with drafters that are right often enough for acceptance to be put to the test, made in seconds.

Random drafters accept nothing, and a loop that never accepts hides most of its defects.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from draftsmith.models.alignment import columns_of
from draftsmith.models.drafters import build_drafter, drafter_shape
from draftsmith.models.feature_drafter import FeatureDrafter
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.schema import Recipe
from draftsmith.train.loss.unroll import TrainingTimeTest, teacher_of
from draftsmith.train.run.engine import trainee_of
from tests.conftest import make_target
from tests.shared import built

PROMPTS = ([11, 12, 13], [21, 22, 23, 24, 25, 26, 27, 28, 29], [7], [5, 6, 5, 6, 5, 6, 5])

# The kinds of drafters, by a name for the tests: what a recipe says of drafter and training.
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "eagle3": ({}, {"ttt_steps": 4, "step_weight": 1.0}),
    "eagle3.1": ({"fc_norm": True, "norm_output": True, "num_layers": 2}, {"ttt_steps": 4, "step_weight": 1.0}),
    "eagle": ({"kind": "eagle"}, {"token_loss": 1.0}),
    "hass": ({"kind": "eagle"}, {"ttt_steps": 4, "token_loss": 1.0, "top_k_loss": 1.0}),
    "poss": ({"kind": "poss", "specialists": 2}, {"ttt_steps": 5, "token_loss": 1.0}),
    "poss over eagle3": (
        {"kind": "poss", "base": "eagle3", "positions_per_specialist": 1, "specialists": 3},
        {"ttt_steps": 4, "step_weight": 1.0},
    ),
}


def greedy(target: Target, prompt: Sequence[int], length: int, stop: int | None = None) -> list[int]:
    """transformers' own greedy decoding, which ends at `stop` or never."""
    ids = torch.tensor([prompt])
    out = target.model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=length, do_sample=False, eos_token_id=stop
    )
    return out[0, len(prompt) :].tolist()


def taught(
    target: Target, vocab: DraftVocab, prompts: Sequence[Sequence[int]] = PROMPTS, length: int = 40, steps: int = 120
) -> FeatureDrafter:
    """An EAGLE-3 drafter that learnt some of the target's greedy answers to these prompts almost by heart."""
    drafter = untaught("eagle3", target, vocab)
    _teach(TrainingTimeTest(drafter, 4, 1.0), target, prompts, length, steps)
    return drafter


def _teach(
    trainee: TrainingTimeTest, target: Target, prompts: Sequence[Sequence[int]], length: int, steps: int
) -> None:
    """The target's greedy answers, all of them in every step; the drafter's weights are frozen at the end. Of all
    workers of a test run, one teaches."""
    drafter = trainee.drafter
    weights = {name: p for name, p in drafter.named_parameters() if p.requires_grad}
    settings = {name: value for name, value in vars(trainee).items() if not name.startswith("_")}
    about = hashlib.sha256(repr((settings, prompts, length, steps)).encode())
    for tensor in (*target.model.state_dict().values(), *weights.values()):
        about.update(tensor.detach().contiguous().numpy().tobytes())

    @torch.enable_grad()  # whoever asks first may be a test of decoding
    def learn(path: Path) -> None:
        rows = [[*prompt, *greedy(target, prompt, length)] for prompt in prompts]
        longest = max(map(len, rows))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
        span = torch.zeros_like(ids)
        for b, (prompt, row) in enumerate(zip(prompts, rows, strict=True)):
            span[b, len(prompt) : len(row)] = 1
        states, columns = target.states(ids, drafter.config.capture_layers), columns_of(span, trainee.steps)
        teacher = teacher_of(target, states.last, ids, columns, drafter.vocab)
        optimizer = torch.optim.AdamW(weights.values(), lr=1e-2)
        for _ in range(steps):
            sums = trainee(states.captured, target.inputs(ids, dtype=drafter.dtype), columns, teacher)
            (sums.loss / sums.columns.clamp(min=1)).backward()
            optimizer.step()
            optimizer.zero_grad()
        save_file({name: p.detach().contiguous() for name, p in weights.items()}, path)

    taught = load_file(built(f"{about.hexdigest()}.safetensors", learn))
    with torch.no_grad():
        for name, parameter in weights.items():
            parameter.copy_(taught[name])
    drafter.requires_grad_(False)


def recipe_of_kind(kind: str, draft_tokens: int | None = None) -> Recipe:
    """A recipe for drafters of this kind of `KINDS`, with no more of the target than a name."""
    drafter, train = KINDS[kind]
    sections = {"target": {"model": "org/target"}, "drafter": drafter | {"vocab_size": draft_tokens}, "train": train}
    return Recipe.model_validate({"output_dir": "runs/nowhere", **sections})


def untaught(kind: str, target: Target, vocab: DraftVocab | None = None) -> FeatureDrafter:
    """A drafter of this kind with random weights; what EAGLE-3's read are the target's own capture layers."""
    vocab = vocab or DraftVocab.full(target.vocab_size)
    section = recipe_of_kind(kind, None if vocab.is_full else vocab.size).drafter
    section = section.model_copy(update={"capture_layers": list(target.capture_layers)})
    shape = replace(drafter_shape(section, target.config), embedding_scale=target.embedding_scale)
    torch.manual_seed(3)
    drafter = build_drafter(shape, vocab, target.frozen_head)
    assert isinstance(drafter, FeatureDrafter)
    return drafter


@cache
def _target(family: str, **overrides: Any) -> Target:
    return Target(make_target(family, **overrides))


@cache
def pair_of(
    family: str, draft_tokens: int | None, kind: str = "eagle3", **overrides: Any
) -> tuple[Target, FeatureDrafter]:
    """A target with a drafter of one of `KINDS`, taught by the kind's own losses; of the target's whole vocabulary or
    of `draft_tokens` tokens that it says."""
    target = _target(family, **overrides)
    drafter = untaught(kind, target, vocab_said(target, draft_tokens))
    trainee = trainee_of(recipe_of_kind(kind).train, drafter)
    _teach(trainee, target, PROMPTS, length=40, steps=120 if kind == "eagle3" else 60)
    return target, drafter


def vocab_said(target: Target, draft_tokens: int | None) -> DraftVocab:
    """The target's whole vocabulary, or `draft_tokens` tokens that it says."""
    if draft_tokens is None:
        return DraftVocab.full(target.vocab_size)
    said = torch.tensor([token for prompt in PROMPTS for token in greedy(target, prompt, 40)]).unique()
    others = torch.arange(target.vocab_size)[~torch.isin(torch.arange(target.vocab_size), said)]
    return DraftVocab(torch.cat((said, others))[:draft_tokens].sort().values, target.vocab_size)


def blurred_copy(family: str, noise: float = 0.02, **overrides: Any) -> Target:
    """The target of that family again, its weights disturbed: a small causal LM that often agrees with it."""
    model = make_target(family, **overrides)
    torch.manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += noise * parameter.std() * torch.randn_like(parameter)
    return Target(model)
