"""The demo's target is grown from a shallower one."""

import copy

import pytest
import torch
from transformers import LlamaForCausalLM

from demos.make_demo_target import grow, llama_config
from draftsmith.recipes.errors import UserError


def test_a_grown_target_computes_the_same_and_learns_with_all_layers() -> None:
    torch.manual_seed(0)
    shallow = LlamaForCausalLM(llama_config(40, layers=2, width=64, inner_width=96))
    deep = LlamaForCausalLM(llama_config(40, layers=6, width=64, inner_width=96))
    untouched = copy.deepcopy(deep)
    tokens_BT = torch.randint(40, (2, 9))
    assert not torch.allclose(deep(tokens_BT).logits, shallow(tokens_BT).logits, atol=1e-3)
    grow(deep, shallow)
    torch.testing.assert_close(deep(tokens_BT).logits, shallow(tokens_BT).logits)
    for name, weight in deep.named_parameters():
        assert "norm" in name or not torch.equal(weight, untouched.get_parameter(name)), name

    for layers, inner_width in ((4, 96), (2, 128)):
        with pytest.raises(UserError, match="of the same widths, and of a half"):
            grow(deep, LlamaForCausalLM(llama_config(40, layers, 64, inner_width)))
    deep(tokens_BT).logits.logsumexp(-1).sum().backward()
    for name, weight in deep.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            assert weight.grad is not None and weight.grad.norm() > 0, name
