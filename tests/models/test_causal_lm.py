"""A small causal LM as a drafter. What it says round after round is in tests/eval/test_rounds.py."""

from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.eval.decoding.policies import Chain, PolicyProposer
from draftsmith.models.causal_lm import CausalLMDrafting, load_draft_model
from draftsmith.models.draft_tree import Committed
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import make_target
from tests.decoding import decode_batch


def small_lm(family: str = "llama", **overrides: Any) -> Target:
    return Target(make_target(family, 2, 11, **overrides), capture_layers=(0,))


def test_drafted_tokens_that_were_accepted_are_not_read_again() -> None:
    lm, fed = small_lm(), list[int]()
    lm.decoder.register_forward_pre_hook(
        lambda _module, _args, inputs: fed.append(inputs["input_ids"].shape[1]), with_kwargs=True
    )
    drafting, text = CausalLMDrafting(lm), [7, 8, 9]
    drafting.set_rows([], 1)
    for accepted in (2, 0, 3):
        drafting.observe(Committed(lm, [text], None, []))
        for depth, token in enumerate((20, 21, 22), start=1):
            drafting.expand(torch.tensor([[depth - 1]]), torch.tensor([[token]]), depth)
        text = [*text, *(20, 21, 22)[:accepted], 30]
    assert fed == [3, 1, 1, 1, *[1] * 4, *[1] * 4]  # the prompt; afterwards each round's root alone


def test_learned_positions_end_and_drafting_does_not_fall_over_their_edge() -> None:
    """The target's answer fills its 32 positions; the small LM has as many, and drafts beyond them."""
    target, small = Target(make_target(max_position_embeddings=32)), small_lm("gpt2", max_position_embeddings=32)
    prompts = [[7, 8, 9], [10, 11, 12, 13, 14]]
    for proposer in (PolicyProposer(CausalLMDrafting(small), Chain(6)), None):
        answers = decode_batch(target, proposer, prompts, {-1}, 27)
        assert [len(prompt + out.token_ids) for prompt, out in zip(prompts, answers, strict=True)] == [30, 32]


def test_loading_takes_any_number_of_layers(tmp_path: Path) -> None:
    """EAGLE-3's default capture layers, which small models are too shallow for, are not asked for."""
    make_target(num_layers=1).save_pretrained(tmp_path)
    small = load_draft_model(TargetFiles(TargetSection(model=str(tmp_path), dtype="float32", device="cpu")))
    assert small.num_layers == 1 and small.vocab_size == 320
    with pytest.raises(UserError, match=r"^draft_model\.model"):
        load_draft_model(TargetFiles(TargetSection(model=str(tmp_path / "nothing"))))
