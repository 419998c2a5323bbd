"""A target with its drafter, ready to answer: the Python API. docs/decoding.md shows how to use it.

In float32 a greedy answer is the target's own, token for token, and a sampled one has the target's law
(`eval.decoding.decode`). In bfloat16 and float16 the law is that of the rounded logits, and a forward over a tree may
round differently from one over a single token, which can flip near ties. A target given by name alone is loaded in its
checkpoint's precision, often bfloat16; `Speculator.token_identical` tells whether answers are exact.
"""

from dataclasses import dataclass, replace
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
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.prompts.records import ROLES
from draftsmith.recipes.sections.eval import TreeSection
from draftsmith.recipes.sections.target import TargetSection


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
        files, counts = TargetFiles.read(section), None if token_counts is None else Path(token_counts)
        check_drafter(files, Path(drafter))
        if counts is not None:
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
            UserError: policy auto, a tree that exceeds the target's positions, or tree.vocab_size without token counts
                or beyond the drafter's vocabulary.
        """
        if tree.policy == "auto":
            raise UserError(
                "tree.policy: auto measures this machine with a recipe's own answers: `draftsmith plan-tree` does it "
                "and prints the fastest; give that policy here"
            )
        if tree.vocab_size is not None and self.contender.token_counts is None:
            raise UserError(
                "tree.vocab_size: give Speculator.load the token_counts.safetensors that `draftsmith rank-vocab` wrote"
            )
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
            UserError: the chat template refuses the messages, they do not end with a question, prompt and answer exceed
                the target's positions, or `proposer` refuses the tree.
        """
        messages = [{"role": "user", "content": question}] if isinstance(question, str) else question
        roles = [message.get("role") for message in messages]
        if not {*roles} <= {*ROLES} or roles[-1:] in ([], ["assistant"]):
            raise UserError(f"question: roles are {roles}, not some of {', '.join(ROLES)} that end with a question")
        if max_new_tokens < 1:
            raise UserError(f"max_new_tokens: {max_new_tokens} must be 1 or more")
        proposer = self.proposer(TreeSection() if tree is None else tree, sampling)
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
            [generation] = decode(verifier, proposer, [prompt], self.stop_ids, max_new_tokens, [draws])
        return Answer(decode_answer(self.tokenizer, generation.token_ids), generation)
