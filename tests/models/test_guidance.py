"""Classifier-free guidance as the target's law, against transformers' own."""

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Emu3ForConditionalGeneration
from transformers.generation.logits_process import UnbatchedClassifierFreeGuidanceLogitsProcessor

from draftsmith.eval.decoding.policies import Chain, Eagle2, PolicyProposer, TreePolicy
from draftsmith.models.alignment import Documents
from draftsmith.models.causal_lm import CausalLMDrafting
from draftsmith.models.image_tokens import unconditional_ids
from draftsmith.models.sampling import GREEDY
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.target import GuidanceSection, TargetSection
from tests.decoding import decode_batch
from tests.image_cases import VOCABULARY, make_image_target

NULL, IMAGE = VOCABULARY["<null>"], VOCABULARY["<image>"]
PROMPTS = [[1, 5, 6, 8, IMAGE], [1, 7, IMAGE], [1, 5, 5, 9, 8, IMAGE]]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_target(tmp_path_factory.mktemp("image_target"))


def section(place: Path, scale: float) -> TargetSection:
    return TargetSection(model=str(place), dtype="float32", guidance=GuidanceSection(scale=scale))


def without_words(ids: list[int]) -> list[int]:
    return [NULL if 5 <= token < 10 else token for token in ids]


@cache
@torch.no_grad()
def generated(place: Path, scale: float) -> list[list[int]]:
    """transformers' greedy answers of 16 tokens with its own guidance, which keeps a second cache."""
    model: Any = Emu3ForConditionalGeneration.from_pretrained(place, dtype=torch.float32).eval()
    settings = {"do_sample": False, "max_new_tokens": 16, "eos_token_id": 2, "pad_token_id": 0}
    answers = []
    for prompt in PROMPTS:
        ids, unconditional = torch.tensor([prompt]), torch.tensor([without_words(prompt)])
        guide = UnbatchedClassifierFreeGuidanceLogitsProcessor(scale, model, unconditional)  # type: ignore[arg-type]
        out = model.generate(ids, attention_mask=torch.ones_like(ids), logits_processor=[guide], **settings)
        answers.append(out[0, len(prompt) :].tolist())
    return answers


@pytest.mark.parametrize(
    ("scale", "policy"),
    [(0.0, None), (3.0, Chain(3)), (3.0, Eagle2(nodes=8, draft_calls=3, top_k=3))],
    ids=["plain", "chain", "tree"],
)
def test_greedy_answers_are_those_of_generate(place: Path, scale: float, policy: TreePolicy | None) -> None:
    target = TargetFiles(section(place, scale)).load((0, 1, 2))
    # Its own law without guidance drafts for it: sometimes right.
    unguided = CausalLMDrafting(Target(target.model, (0,)))
    proposer = None if policy is None else PolicyProposer(unguided, policy)
    answers = decode_batch(target, proposer, PROMPTS, {2}, 16, GREEDY)
    expected = generated(place, scale)
    assert [answer.token_ids for answer in answers] == expected
    assert policy is None or sum(sum(answer.accepted_per_round) for answer in answers) > 0
    assert any(prompt != expected[0] for prompt in expected[1:]) or scale == 0
    assert expected != generated(place, 1.0)


def test_training_s_states_are_those_of_decoding(place: Path) -> None:
    """Also where documents share a row, and for the final state, which EAGLE-1 reads."""
    target = TargetFiles(section(place, 2.5)).load((1, 4))
    ids = torch.tensor([[*PROMPTS[0], 12, 13, 14, 15, 16], [*PROMPTS[2], 20, 21, 22, 23]], device=target.device)
    states = target.states(ids)
    for row in range(2):
        logits, captured = target.session((1, 4)).prefill([ids[row].tolist()])
        torch.testing.assert_close(captured, states.captured[row : row + 1], rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(logits[0], target.logits(states.last[row, -1]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(states.captured[..., target.hidden_size :], states.last)
    torch.testing.assert_close(target.captured_states(ids, (1, 4)), states.captured)
    torch.testing.assert_close(target.captured_states(ids, (1,)), states.captured[..., : target.hidden_size])
    packed = target.states(
        ids.reshape(1, -1),
        documents=Documents(torch.arange(10, device=ids.device).repeat(2)[None], ((0, 0, 10), (0, 10, 10))),
    )
    torch.testing.assert_close(packed.last.reshape(2, 10, -1), states.last, rtol=1e-4, atol=1e-4)


def test_words_alone_give_way_to_the_null_token(place: Path) -> None:
    files = TargetFiles(section(place, 2.0))
    files.tokenizer.add_special_tokens({"extra_special_tokens": ["<beyond the model>"]})
    ids = unconditional_ids(files.section, files.tokenizer, files.config).tolist()
    assert ids == without_words(list(range(len(VOCABULARY))))


def test_a_missing_null_token_is_refused(place: Path) -> None:
    guided = GuidanceSection(scale=2.0, null="<nothing>")
    with pytest.raises(UserError, match=r"target.guidance.null: .* has no token '<nothing>'"):
        _ = TargetFiles(TargetSection(model=str(place), guidance=guided)).tokenizer
