"""Writes answers with the target in this process, by the decoding loop of `eval.decoding`, with or without a drafter.

Answers arrive in the order in which they end. A finished answer gives its row to the next prompt. An answer does not
depend on its neighbours, up to the rounding of batched matrix products.

With a drafter (docs/prompts-and-answers.md) greedy answers stay the same token for token in float32. Sampled answers
differ but follow the same distribution, because verification draws more random numbers.
"""

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from draftsmith.data_gen.states.answer_states import AnswerStates
from draftsmith.eval.decoding.accept import acceptance_of
from draftsmith.eval.decoding.decode import Request, TargetVerifier, decode_stream
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.drafters import drafting_of
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.sampling import Sampling, SeededDraws
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import Recipe
from draftsmith.recipes.sections.eval import TreeSection

# Prompt tokens of one prefill, padding included. Bounds activations and padding. A CPU reads 1,024 at a time up to 1.8
# times as fast as 8,192, as long as their activations fit its cache (LOG.md, 2026-11-28).
PREFILL_TOKENS, PREFILL_TOKENS_ON_CPU = 8192, 1024
DRAFT_TOKENS = 3  # of data.generator.drafter, for each pass of the target

Asked = tuple[Hashable, Sequence[int]]  # key, prompt


class GeneratedAnswer(NamedTuple):
    """ "stop": the last token is a stop token. "length": the answer was cut at max_new_tokens or max_length."""

    key: Any
    token_ids: list[int]
    finish_reason: str
    retokenised: bool = False  # a server gave text; the ids come from the tokenizer


@dataclass(frozen=True)
class GenerationSettings:
    """How answers are drawn. Equal settings, prompts and drafters give equal answers, in any order and batch."""

    max_new_tokens: int  # tokens of an answer, stop token included
    max_length: int  # tokens of prompt and answer together
    stop_ids: tuple[int, ...]
    sampling: Sampling
    seed: int = 0
    batch_size: int = 32  # rows decoded side by side


def resolve_sampling(
    temperature: float | None, top_p: float | None, top_k: int | None, generation_config: GenerationConfig
) -> Sampling:
    """None is replaced by the target's generation config, else by temperature 1, top_p 1 and top_k off.

    Raises UserError if the result is out of range.
    """

    def first(*values: Any) -> Any:
        return next(value for value in values if value is not None)

    try:
        return Sampling(
            float(first(temperature, generation_config.temperature, 1.0)),
            float(first(top_p, generation_config.top_p, 1.0)),
            max(0, int(first(top_k, generation_config.top_k, 0))),  # some servers write -1 for off
        )
    except ValueError as error:
        name = str(error).partition(":")[0]
        raise UserError(
            f"target.model: its generation_config.json has {error}; set data.generator.{name} in the recipe"
        ) from error


class Writer:
    """Writes answers with a target, and with `proposer` if there is one.

    Attributes:
        tokens_received: tokens of all answers.
        drafted, rounds: tokens without each answer's first one, which comes from the prompt's pass, and their passes.
        states: takes the target's states of each answer before the answer is yielded; None: they are not kept.
    """

    load = ""  # beside the tokens per second of the progress bar

    def __init__(self, target: Target, settings: GenerationSettings, proposer: Proposer | None = None):
        self.target, self.settings, self.proposer = target, settings, proposer
        self.tokens_received = self.drafted = self.rounds = 0
        self.states: AnswerStates | None = None

    @classmethod
    def of(
        cls, recipe: Recipe, files: TargetFiles, settings: GenerationSettings, draft_tokens: int = DRAFT_TOKENS
    ) -> "Writer":
        """The recipe's target, with data.generator.drafter if there is one, which drafts chains of `draft_tokens`."""
        models, proposer = LoadedModels(files), None
        if recipe.data.generator.drafter is not None:
            drafter = models.drafter(Path(recipe.data.generator.drafter))
            chain = policy_of(TreeSection(policy="chain", nodes=1 + draft_tokens), settings.sampling)
            proposer = PolicyProposer(drafting_of(drafter), chain)
        return cls(models.target, settings, proposer)

    @torch.inference_mode()
    def __call__(self, prompts: Iterator[Asked | None]) -> Iterator[GeneratedAnswer]:
        """Yields each answer as soon as it ends.

        Args:
            prompts: (key, prompt shorter than settings.max_length). The key also seeds the answer's draws. None: no
                prompt is ready before another answer ends.
        """
        settings, states, session = self.settings, self.states, None
        open_prompts: dict[Hashable, Sequence[int]] = {}

        def request(asked: Asked | None) -> Request | None:
            if asked is None:
                return None
            key, prompt = asked
            open_prompts[key] = prompt
            budget = min(settings.max_new_tokens, settings.max_length - len(prompt))
            return Request(key, prompt, budget, None if settings.sampling.greedy else SeededDraws(settings.seed, key))

        prefill = PREFILL_TOKENS_ON_CPU if self.target.device.type == "cpu" else PREFILL_TOKENS
        verifier = TargetVerifier(self.target, self.proposer, acceptance_of(settings.sampling), prefill)
        if states is not None:
            session = states.session(self.target, verifier.session.capture)
            verifier.session = session
        requests = map(request, prompts)
        for key, answer in decode_stream(verifier, self.proposer, requests, settings.stop_ids, settings.batch_size):
            prompt = open_prompts.pop(key)
            if states is not None and session is not None:
                states.take(key, prompt, answer.token_ids, session.take(prompt))
            self.tokens_received += len(answer.token_ids)
            self.drafted += len(answer.token_ids) - 1
            self.rounds += answer.rounds
            yield GeneratedAnswer(
                key, answer.token_ids, "stop" if answer.token_ids[-1] in settings.stop_ids else "length"
            )

    def summary(self) -> list[str]:
        if self.proposer is None or not self.rounds:
            return []
        return [f"drafted: {self.drafted / self.rounds:.2f} tokens of an answer in each pass of the target"]
