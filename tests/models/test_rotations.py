"""Rotary embeddings: scalings that change with the length, and rotations of a part of each head.

Tiny random weights in float32.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from draftsmith.eval.decoding.policies import Eagle2, PolicyProposer
from draftsmith.eval.decoding.prompt_lookup import PromptLookup
from draftsmith.models.alignment import columns_of
from draftsmith.models.causal_lm import CausalLMDrafting
from draftsmith.models.eagle3 import Eagle3Config
from draftsmith.models.families import usable_positions
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.formats.eagle_format import eagle_config, read_config
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.train.loss.unroll import TrainingTimeTest, teacher_of
from tests.conftest import make_config, make_target
from tests.decoding import decode, decode_batch
from tests.models.test_targets import FAMILIES, some_tokens
from tests.pairs import greedy, untaught
from tests.thinning import a_few

LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": [1.0, 1.1, 1.2, 1.3],
    "long_factor": [1.0, 2.0, 4.0, 8.0],
    "original_max_position_embeddings": 32,
}
SAME_FACTORS = LONGROPE | {"short_factor": LONGROPE["long_factor"]}


@pytest.mark.parametrize(
    ("family", "settings", "usable"),
    [
        ("llama", {"rope_parameters": LONGROPE}, 32),
        ("phi3", {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64}, 64),  # as Phi-3 is published
        ("llama", {"rope_parameters": SAME_FACTORS}, 512),
        ("phimoe", {"rope_parameters": SAME_FACTORS | {"short_mscale": 1.0, "long_mscale": 1.2}}, 32),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}}, 512),
        ("gemma3_text", {}, 512),
    ],
)
def test_usable_positions_end_where_the_rotation_changes(family: str, settings: dict[str, Any], usable: int) -> None:
    assert usable_positions(make_config(family, max_position_embeddings=512, **settings)) == usable


BASE = {"rope_theta": 5000.0}
YARN = BASE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
ROTATIONS: dict[str, dict[str, Any]] = {
    **{name: BASE | {"rope_type": name, "factor": 4.0} for name in ("linear", "dynamic")},
    "default": BASE | {"rope_type": "default"},
    "yarn": YARN,
    "yarn, as gpt-oss and DeepSeek": YARN | {"truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5},
    "longrope": BASE | LONGROPE,
    "llama3": BASE
    | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    | {"original_max_position_embeddings": 64},
}
HALF = {"partial_rotary_factor": 0.5}
TARGETS: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"llama, {name}": ("llama", {"rope_parameters": rope}) for name, rope in ROTATIONS.items()},
    **{
        f"glm4_moe, half {name}": (
            "glm4_moe",
            FAMILIES["deepseek_v3"][1] | {"head_dim": 8, "rope_parameters": rope | HALF} | {"first_k_dense_replace": 1},
        )
        for name, rope in ROTATIONS.items()
        if name in ("dynamic", "yarn")
    },
    "phi3, part longrope": (  # Phi-4-mini
        "phi3",
        {
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 32,
            "rope_parameters": LONGROPE | {"short_factor": [1.0] * 3, "long_factor": [1.0, 2.0, 4.0]},
        },
    ),
    "gpt_neox, a quarter": ("gpt_neox", {"rope_parameters": ROTATIONS["default"] | {"partial_rotary_factor": 0.25}}),
    "gemma4": FAMILIES["gemma4"],  # proportional
    "gpt2": FAMILIES["gpt2"],
}


@pytest.mark.parametrize(
    "name",
    a_few(TARGETS, "llama, default", "llama, yarn", "glm4_moe, half dynamic", "phi3, part longrope", "gemma4"),
)
def test_a_drafter_is_trained_drafts_and_is_exported_whatever_rotation_its_target_has(name: str) -> None:
    family, settings = TARGETS[name]
    target = Target(make_target(family, **settings))
    drafter = untaught("eagle3", target)
    ids = torch.tensor([some_tokens(12, 1)])
    states, columns = target.states(ids, drafter.config.capture_layers), columns_of(torch.ones_like(ids), 3)
    teacher = teacher_of(target, states.last, ids, columns, drafter.vocab)
    TrainingTimeTest(drafter, 3, 1.0)(states.captured, target.inputs(ids), columns, teacher).loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in drafter.parameters())
    drafting = PolicyProposer(FeatureDrafting(drafter), Eagle2(nodes=8, draft_calls=3, top_k=3))
    prompt = some_tokens(5, 2)
    assert decode(target, drafting, prompt, {-1}, 8).token_ids == greedy(target, prompt, 8)

    rope, scalings = drafter.config.rope_parameters, ("linear", "yarn", "llama3", "DeepSeek")
    assert (rope["rope_type"] != "default") == (name.split(" ")[-1] in scalings)
    config = eagle_config(drafter.config, "", torch.float32)
    for spelling in ("rope_parameters", "rope_scaling"):  # of transformers 5, and of 4
        told = {key: value for key, value in config.items() if key != spelling}
        tensors: dict[str, Any] = dict.fromkeys(("d2t", "lm_head.weight", "norm.weight"))
        assert read_config(told, target.config, tensors).rope_parameters == rope


@torch.no_grad()
def test_up_to_where_longrope_changes_nothing_depends_on_neighbours_or_drafts() -> None:
    """The longest of 32 tokens, trees that would reach beyond, and other rows beside them: each as by itself."""
    target = Target(make_target(rope_parameters=LONGROPE))
    rows = [some_tokens(count, count) for count in (32, 20, 7)]
    together = target.states(torch.tensor([row + [0] * (32 - len(row)) for row in rows])).last
    for row, states in zip(rows, together, strict=True):
        torch.testing.assert_close(states[: len(row)], target.states(torch.tensor([row])).last[0], rtol=1e-4, atol=1e-4)
    changed = target.states(torch.tensor([rows[0] + [7]])).last[0, :32]  # a token more, and none is as it was
    assert (changed - together[0]).norm() > 0.1 * together[0].norm()

    prompts, budgets = [row[:n] for row, n in zip(rows, (24, 20, 4), strict=True)], [8, 12, 28]
    expected = [greedy(target, prompt, budget) for prompt, budget in zip(prompts, budgets, strict=True)]
    tree = Eagle2(nodes=12, draft_calls=5, top_k=4)
    drafter = PolicyProposer(FeatureDrafting(untaught("eagle3", target)), tree)
    small = PolicyProposer(CausalLMDrafting(Target(make_target(rope_parameters=LONGROPE, seed=1))), tree)
    for proposer in (None, PromptLookup(6, target.device), drafter, small):
        answers = decode_batch(target, proposer, prompts, {-1}, budgets)
        assert [answer.token_ids for answer in answers] == expected
    with pytest.raises(ValueError, match="24 prompt tokens and 9 new ones exceed the target's 32 positions"):
        decode_batch(target, None, prompts[:1], {-1}, 9)


def test_a_target_with_a_rotation_that_cannot_be_is_refused_from_its_config(tmp_path: Path) -> None:
    for rope, reason in (
        (LONGROPE | {"original_max_position_embeddings": None}, "original_max_position_embeddings None"),
        (YARN | {"factor": "x"}, "factor 'x' .* not a number above 0"),
        (ROTATIONS["linear"] | {"factor": None}, "null for factor"),
        (BASE | {"rope_type": "banana"}, "cannot build a llama .*'banana'"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(make_config().to_dict() | {"rope_parameters": rope}))
        files = TargetFiles(TargetSection(model=str(tmp_path)))
        with pytest.raises(UserError, match=reason):
            Eagle3Config.for_target(files.config, 320, (1, 2, 3), 320)
            _ = files.size


def test_a_drafter_takes_the_rotation_of_full_attention() -> None:
    bases = {"full_attention": 7000.0, "sliding_attention": 90.0}
    rope = {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()}
    config = make_config("gemma3_text", rope_parameters=rope)
    assert Eagle3Config.for_target(config, 320, (1, 2, 3), 320).rope_parameters["rope_theta"] == 7000.0
