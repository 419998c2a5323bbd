"""Linear layers with rearranged weights give the products of those that they replace."""

import pytest
import torch
from torch import nn
from torch.nn import functional

from draftsmith.models import onednn_linear
from draftsmith.models.onednn_linear import BlockedLinear, able, block_linears, blocked_head, head_product
from draftsmith.models.target import Target
from tests.conftest import make_target
from tests.drafter_cases import VOCAB_SIZE, random_drafter
from tests.thinning import pairwise

needs_them = pytest.mark.skipif(not able(torch.float32), reason="needs torch's oneDNN operations")
PRECISIONS = [dtype for dtype in (torch.float32, torch.bfloat16) if able(dtype)]  # bfloat16 wants AVX-512


@needs_them
@pytest.mark.parametrize(
    ("shape", "bias", "dtype"),
    pairwise([(32, 48), (7, 5), (1, 3), (600, 500), (1025, 1024)], [False, True], PRECISIONS or [torch.float32]),
)
@torch.no_grad()
def test_products_are_those_of_the_layer(shape: tuple[int, int], bias: bool, dtype: torch.dtype) -> None:
    inputs, outputs = shape
    linear = nn.Linear(inputs, outputs, bias=bias).to(dtype)
    layer = BlockedLinear(linear.weight, linear.bias, head=bias)
    for rows in ((), (1,), (5,), (2, 17), (1, 60), (0,)):
        states = torch.randn(*rows, inputs).to(dtype)
        expected = functional.linear(states.double(), linear.weight.double(), linear.bias.double() if bias else None)
        atol, rtol = (1e-4, 1e-4) if dtype == torch.float32 else (0.03, 0.02)
        torch.testing.assert_close(layer(states).double(), expected, atol=atol, rtol=rtol)
    columns = torch.randn(inputs, 6).to(dtype).T  # not contiguous
    torch.testing.assert_close(layer(columns), layer(columns.contiguous()))


@needs_them
@torch.no_grad()
@pytest.mark.parametrize("intel", [False, True])
def test_one_row_has_a_weight_of_its_own_in_all_but_large_layers(intel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain decoding must not pay for the layout that makes verification fast."""
    monkeypatch.setattr(onednn_linear, "on_intel", lambda: intel)
    cases = [(8, torch.float32, True), (2**15 + 1, torch.float32, True), (2**17 + 1, torch.float32, False)]
    if torch.bfloat16 in PRECISIONS:
        cases.append((8, torch.bfloat16, False))
    for outputs, dtype, kept in cases:
        linear = nn.Linear(8, outputs).to(dtype)
        layer = BlockedLinear(linear.weight, linear.bias)
        if layer.single is not None:
            assert layer.single.is_mkldnn is (outputs > 2**15 and not intel)
        layer.blocked.zero_()
        states = torch.randn(1, 8).to(dtype)
        assert torch.allclose(layer(states), linear(states), atol=1e-5) is kept
        assert not torch.allclose(layer(states.expand(2, 8)), linear(states.expand(2, 8)), atol=1e-5)


@needs_them
@torch.no_grad()
@pytest.mark.parametrize("kind", ["eagle", "eagle3"])
def test_drafters_read_their_head_through_a_layout(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """EAGLE-1's is the target's. Fewer rows have a layout of their own."""
    target = Target(make_target(num_layers=7, vocab_size=VOCAB_SIZE))
    plain = random_drafter(target, kind, None, {}, None)
    target.head_product = blocked_head(target.head)
    drafter = random_drafter(target, kind, None, {}, None)
    if kind == "eagle3":
        drafter.head_product = head_product(drafter.get_parameter("lm_head.weight"))
    outputs, rows = torch.randn(2, 5, target.hidden_size), torch.tensor([3, 1, 4])
    torch.testing.assert_close(drafter.logits(outputs), plain.logits(outputs))
    with monkeypatch.context() as watched:  # nothing goes round the layouts
        watched.setattr(functional, "linear", None)
        few = drafter.head(rows)(outputs)
    torch.testing.assert_close(few, plain.logits(outputs)[..., rows])
    layout = drafter.get_submodule("head_product")
    layout.blocked = BlockedLinear(torch.zeros(VOCAB_SIZE, target.hidden_size), head=True).blocked
    assert not drafter.logits(outputs).any() and drafter.head(rows)(outputs).all()
    assert drafter.state_dict().keys() == plain.state_dict().keys()


@needs_them
def test_other_layers_and_precisions_stay() -> None:
    class Other(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return super().forward(input) + 1

    class Packed(torch.Tensor):
        """A weight of a quantised checkpoint, in a layer that stays nn.Linear."""

    inside, quantised = nn.ModuleDict({"inner": nn.Linear(4, 4)}), nn.Linear(4, 4)
    quantised.weight = nn.Parameter(torch.randn(4, 4).as_subclass(Packed))
    model = nn.Sequential(nn.Linear(4, 4), inside, Other(4, 4), nn.Linear(4, 4).double(), quantised)
    block_linears(model)
    assert [type(each) for each in model] == [BlockedLinear, nn.ModuleDict, Other, nn.Linear, nn.Linear]
    assert type(inside["inner"]) is BlockedLinear
    assert inside["inner"].weight.dtype == torch.float32  # routers of some families ask
