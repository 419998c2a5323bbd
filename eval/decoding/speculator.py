"""A target with its drafter, ready to answer: the Python API. docs/decoding.md shows how to use it.

In float32 a greedy answer is the target's own, token for token, and a sampled one has the target's law
(`eval.decoding.decode`). In bfloat16 and float16 the law is that of the rounded logits, and a forward over a tree may
round differently from one over a single token, which can flip near ties. A target given by name alone is loaded in its
checkpoint's precision, often bfloat16; `Speculator.token_identical` tells whether answers are exact.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from numbers import Integral
from pathlib import Path
from typing import Any

import torch

from draftsmith.eval.decoding.contenders import Contender, check_size, loaded_proposer, rule_of
from draftsmith.eval.decoding.decode import Generation, TargetVerifier, decode
from draftsmith.eval.decoding.proposers import check_drafter
from draftsmith.eval.measurement.metrics import tau
from draftsmith.models.chat import Message, RenderError, decode_answer, render_prompt
from draftsmith.models.draft_tree import Proposer
from draftsmith.models.families import positions_text, usable_positions
from draftsmith.models.loaded_models import LoadedModels
from draftsmith.models.sampling import GREEDY, Sampling, SeededDraws
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import counts_of
from draftsmith.recipes.errors import UserError, quoted
from draftsmith.recipes.prompts.records import ROLES
from draftsmith.recipes.sections.eval import TreeSection
from draftsmith.recipes.sections.target import TargetSection


def _check_kind(name: str, value: object, kinds: type | tuple[type, ...], example: str) -> None:
    if not isinstance(value, kinds) or isinstance(value, bool):
        raise UserError(f"{name}: {quoted(value)} cannot be used; give {example}")


def _messages_of(question: object) -> list[Message]:
    """Raises UserError for what is no question, and for a conversation that ends with none."""
    if isinstance(question, str):
        return [{"role": "user", "content": question}]
    if (
        not isinstance(question, list)
        or not question
        or not all(isinstance(each, dict) and each.get("role") in ROLES for each in question)
        or question[-1]["role"] == "assistant"
    ):
        raise UserError(
            f"question: {quoted(question)} is neither a text nor a list of messages {{'role': ..., 'content': ...}} "
            f"that ends with a question; roles are {', '.join(ROLES)}"
        )
    return question


@contextmanager
def _keys_as_arguments() -> Iterator[None]:
    """Names arguments in the place of a recipe's keys in errors."""
    try:
        yield
    except UserError as error:
        raise UserError([problem.removeprefix("eval.") for problem in error.problems]) from None


@dataclass(frozen=True)
class Answer:
    """One answer and its decoding."""

    text: str
    generation: Generation  # token ids, rounds, seconds

    @property
    def tau(self) -> float | None:
        """Tokens per verification, the bonus token included; None if the first token ended the answer."""
        return tau([self.generation])


class Speculator:
    """A loaded target and its drafter."""

    def __init__(self, models: LoadedModels, directory: Path, token_counts: Path | None):
        self.models, self.directory = models, directory
        self.target, self.tokenizer, self.stop_ids = models.target, models.files.tokenizer, models.files.stop_ids
        self.drafter = models.drafter(directory)
        # `proposer` sets its tree.
        self.contender = Contender("", "drafter", TreeSection(), "tree", drafter=directory, token_counts=token_counts)

    @classmethod
    def load(
        cls, target: TargetSection | str | Path, drafter: str | Path, token_counts: str | Path | None = None
    ) -> "Speculator":
        """Loads both.

        Args:
            target: a hub id or a directory, loaded in its checkpoint's precision; or a recipe's section, which can set
                another precision (dtype="float32"), a device or a chat template.
            drafter: a directory that training wrote.
            token_counts: the file of `draftsmith rank-vocab` by which tree.vocab_size ranks tokens.

        Raises:
            UserError: one of them is missing, or drafter or counts were made for another target.
        """
        section = TargetSection(model=str(target)) if isinstance(target, (str, Path)) else target
        _check_kind("target", section, TargetSection, "a name, or TargetSection(model=...)")
        _check_kind("drafter", drafter, (str, Path), "a directory that training wrote")
        _check_kind("token_counts", token_counts, (str, Path, type(None)), "a file of `draftsmith rank-vocab`")
        files, counts = TargetFiles.read(section), None if token_counts is None else Path(token_counts)
        check_drafter(files, Path(drafter))
        if counts is not None:
            with _keys_as_arguments():
                counts_of(counts, files.fingerprint)
        return cls(LoadedModels(files), Path(drafter), counts)

    @property
    def token_identical(self) -> bool:
        """Whether greedy answers equal plain decoding's, token for token. Below float32, a forward over several tokens
        rounds differently from one over a single token."""
        return self.target.dtype in (torch.float32, torch.float64)

    def proposer(self, tree: TreeSection, sampling: Sampling = GREEDY) -> Proposer:
        """Drafts trees of this shape with the drafter, for answers drawn by `sampling`.

        Raises:
            UserError: an argument of another kind, policy auto, a tree that exceeds the target's positions, or
                tree.vocab_size without token counts or beyond the drafter's vocabulary.
        """
        _check_kind("tree", tree, TreeSection, 'TreeSection(policy="chain", nodes=5)')
        _check_kind("sampling", sampling, Sampling, "Sampling(temperature=0.7)")
        if tree.policy == "auto":
            raise UserError(
                "tree.policy: auto measures this machine with a recipe's own answers: `draftsmith plan` does it "
                "and prints the fastest; give that policy here"
            )
        if tree.vocab_size is not None and self.contender.token_counts is None:
            raise UserError(
                "tree.vocab_size: give Speculator.load the token_counts.safetensors that `draftsmith rank-vocab` wrote"
            )
        with _keys_as_arguments():
            check_size(tree, usable_positions(self.target.config))
            return loaded_proposer(self.models, replace(self.contender, tree=tree), sampling)

    def answer(
        self,
        question: str | list[Message],
        max_new_tokens: int = 512,
        sampling: Sampling = GREEDY,
        seed: int = 0,
        tree: TreeSection | None = None,
        tools: list[Any] | None = None,
    ) -> Answer:
        """The target's answer to a question, or to a conversation that ends with one.

        Args:
            question: one user turn, or messages as chat templates take them.
            tree: the shape of the draft trees; None: EAGLE-2's with 60 nodes.

        Raises:
            UserError: the chat template refuses the messages, max_new_tokens is no number of tokens, prompt and answer
                exceed the target's positions, or `proposer` refuses tree or sampling.
        """
        _check_kind("max_new_tokens", max_new_tokens, Integral, "a whole number of 1 or more")
        _check_kind("seed", seed, Integral, "a whole number")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: {max_new_tokens!r} must be a whole number of 1 or more")
        messages, proposer = _messages_of(question), self.proposer(TreeSection() if tree is None else tree, sampling)
        try:
            prompt = render_prompt(self.tokenizer, messages, tools)
        except RenderError as error:
            raise UserError(f"the messages cannot be asked: {error}") from error
        if len(prompt) + max_new_tokens > usable_positions(self.target.config):
            raise UserError(
                f"{len(prompt)} prompt tokens and {max_new_tokens} new ones exceed the target's "
                f"{positions_text(self.target.config)}"
            )
        draws = SeededDraws(seed, prompt.digest if prompt.inserts else tuple(prompt))
        verifier = TargetVerifier(self.target, proposer, rule_of(self.models, self.contender, sampling))
        with torch.inference_mode():
            [generation] = decode(verifier, proposer, [prompt], self.stop_ids, int(max_new_tokens), [draws])
        return Answer(decode_answer(self.tokenizer, generation.token_ids), generation)
