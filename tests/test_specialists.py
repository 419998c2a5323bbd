"""Position specialists: where their gradients end, and the single drafter with as many parameters."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from draftsmith.models.drafters import build_drafter, drafter_shape, padded, trainable_parameters
from draftsmith.models.target import Target
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import DrafterSection
from tests.conftest import make_target
from tests.thinning import pairwise


@pytest.mark.parametrize(
    ("kind", "num_layers", "specialists", "bias"), pairwise(["eagle", "eagle3"], [1, 2], [2, 4, 7], [False, True])
)
def test_a_single_drafter_with_as_many_parameters(kind: Any, num_layers: int, specialists: int, bias: bool) -> None:
    """Equal to half a row of the MLP of each layer; a row has a weight in gate, up and down for each hidden unit."""
    config = make_target().config
    alone = DrafterSection(kind=kind, num_layers=num_layers, match_specialists=specialists, attention_bias=bias)
    beside = DrafterSection(kind="poss", base=kind, specialists=specialists, attention_bias=bias)
    matched = drafter_shape(alone, config)
    difference = trainable_parameters(matched) - trainable_parameters(drafter_shape(beside, config))
    assert abs(difference) <= 3 * config.hidden_size * num_layers / 2
    narrow = drafter_shape(alone.model_copy(update={"match_specialists": None}), config)
    assert replace(matched, intermediate_size=narrow.intermediate_size) == narrow


def test_more_layers_than_specialists_have_narrower_mlps_or_are_refused() -> None:
    section, config = DrafterSection(kind="eagle", num_layers=3, match_specialists=2), make_target().config
    matched = drafter_shape(section, config)
    assert matched.intermediate_size < config.intermediate_size
    beside = drafter_shape(DrafterSection(kind="poss", specialists=2), config)
    assert abs(trainable_parameters(matched) - trainable_parameters(beside)) <= 3 * config.hidden_size * 3 / 2
    with pytest.raises(UserError, match=r"drafter.match_specialists: 2 .* 9 layers"):
        drafter_shape(section.model_copy(update={"num_layers": 9}), config)


@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_a_wider_mlp_begins_as_the_narrow_one(kind: str) -> None:
    """The matched baseline may start where the specialists do: from a trained layer, whose outputs it then has."""
    target = Target(make_target())
    narrow_section, wide_section = DrafterSection(kind=kind), DrafterSection(kind=kind, match_specialists=3)  # type: ignore[arg-type]
    vocab = DraftVocab.full(target.vocab_size)
    torch.manual_seed(0)
    narrow, wide = (
        build_drafter(drafter_shape(section, target.config), vocab, target.frozen_head)
        for section in (narrow_section, wide_section)
    )
    random_rows = wide.stacks[0][0].mlp.gate_proj.weight.detach().clone()
    wide.load_state_dict(padded(narrow.state_dict(), wide))
    width = narrow.config.intermediate_size
    assert wide.config.intermediate_size > width
    x = torch.randn(2, 3, target.hidden_size)
    torch.testing.assert_close(wide.stacks[0][0].mlp(x), narrow.stacks[0][0].mlp(x))
    # What is new is not dead: its rows are random, and down learns to use them.
    assert torch.equal(wide.stacks[0][0].mlp.gate_proj.weight[width:], random_rows[width:])
    wide.stacks[0][0].mlp(x).square().sum().backward()
    gradient = wide.stacks[0][0].mlp.down_proj.weight.grad
    assert gradient is not None and gradient[:, width:].abs().min() > 0
