"""Quantised targets: arithmetic, kernels, token identity of fake ones, refusals before weights are read."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from draftsmith.eval.decoding.contenders import contenders_of
from draftsmith.eval.decoding.policies import PolicyProposer, policy_of
from draftsmith.eval.measurement import evaluation
from draftsmith.eval.report_page import result_files
from draftsmith.models import quantize
from draftsmith.models.feature_drafter import FeatureDrafting
from draftsmith.models.quantize import (
    CAST_ROWS,
    Int4Linear,
    Int8Linear,
    check_quantization,
    fake_quantized,
    quantize_layers,
)
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.eval import TreeSection
from draftsmith.recipes.sections.target import QuantizationSection, TargetSection
from tests import reference
from tests.conftest import make_target
from tests.decoding import decode_batch
from tests.evaluation_cases import place as place
from tests.export_cases import assert_told_apart, save_target
from tests.pairs import PROMPTS, greedy, taught, vocab_said

# What groups of 32 and both kernels divide.
WIDE: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
INT8, INT4 = QuantizationSection(bits=8), QuantizationSection(group_size=32)
FAKE = QuantizationSection(group_size=32, fake=True)


@pytest.fixture(scope="module")
def wide_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_target(tmp_path_factory.mktemp("wide"), **WIDE)


def section_of(directory: Path, **settings: Any) -> TargetSection:
    return TargetSection.model_validate({"model": str(directory), "device": "cpu"} | settings)


@pytest.mark.parametrize("precision", [INT8, INT4], ids=["int8", "int4"])
def test_weights_are_quantised_as_by_the_slow_twin(precision: QuantizationSection) -> None:
    torch.manual_seed(0)
    weight = torch.randn(5, 64)
    weight[1] = 0.0
    weight[2, :32] = 3.0  # a group without a range
    weight[3, 7] = 40.0  # an outlier
    size = 64 if precision.bits == 8 else precision.group_size
    groups = weight.unflatten(-1, (-1, size)).tolist()
    expected = [[value for group in row for value in reference.quantised(group, precision.bits)] for row in groups]
    assert torch.equal(fake_quantized(weight, precision), torch.tensor(expected))
    assert fake_quantized(weight.double(), precision).dtype == torch.float64


@pytest.mark.parametrize("precision", [INT8, INT4], ids=["int8", "int4"])
def test_kernels_multiply_by_the_weights_that_the_codes_stand_for(precision: QuantizationSection) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(96, 32)
    layer = Int8Linear(linear) if precision.bits == 8 else Int4Linear(linear, precision.group_size)
    weight = fake_quantized(linear.weight.data, precision)
    for rows in (1, 3, CAST_ROWS - 1, CAST_ROWS, 40):
        states = torch.randn(2, rows, 96)[:, ::2].bfloat16()  # not contiguous
        expected = functional.linear(states.float(), weight, linear.bias)
        got = layer(states)
        assert got.shape == expected.shape and got.dtype == torch.bfloat16
        assert (got.float() - expected).abs().max() < 0.01 * expected.abs().max()  # bfloat16 has 8 bits


def test_only_the_decoder_s_linear_layers_are_quantised_and_the_plan_counts_their_bytes(wide_dir: Path) -> None:
    plain: Any = TargetFiles(section_of(wide_dir, dtype="bfloat16")).load_model()
    for precision, kind in (("int8", Int8Linear), (INT4, Int4Linear), (FAKE, nn.Linear)):
        section = section_of(wide_dir, quantization=precision)
        model: Any = TargetFiles(section).load_model()
        assert model.dtype == (torch.float32 if kind is nn.Linear else torch.bfloat16)  # `auto`, resolved
        layer = model.model.layers[3]
        assert isinstance(layer.mlp.down_proj, kind) and isinstance(layer.self_attn.q_proj, kind)
        for theirs, mine in ((plain.lm_head, model.lm_head), (plain.model.embed_tokens, model.model.embed_tokens)):
            assert type(theirs) is type(mine) and torch.equal(theirs.weight, mine.weight.bfloat16())
        assert not torch.equal(plain(torch.tensor([[5, 6, 7]])).logits, model(torch.tensor([[5, 6, 7]])).logits)
        held = [*model.parameters(), *(b for name, b in model.named_buffers() if "inv_freq" not in name)]
        size = TargetFiles(section).size
        assert size.weight_bytes == sum(tensor.nbytes for tensor in held) and "exact" in size.weight_basis


@pytest.mark.slow
def test_a_drafter_of_the_float_target_drafts_for_the_quantised_one_token_by_token() -> None:
    """In float64 the fake-quantised model's greedy tokens are certain, and they are not the float model's."""
    plain = Target(make_target(**WIDE))
    drafter = taught(plain, vocab_said(plain, None), steps=25)
    model = make_target(**WIDE)
    quantize_layers(model.model.layers, QuantizationSection(bits=8, fake=True))
    target = Target(model.double())
    expected = [greedy(target, prompt, 24) for prompt in PROMPTS]
    assert expected != [greedy(plain, prompt, 24) for prompt in PROMPTS]
    tree = policy_of(TreeSection(nodes=14, draft_calls=4, top_k=4))
    with torch.no_grad():
        answers = decode_batch(target, PolicyProposer(FeatureDrafting(drafter), tree), PROMPTS, {-1}, 24)
    assert [answer.token_ids for answer in answers] == expected
    assert sum(sum(answer.accepted_per_round) for answer in answers) > 10


def test_the_precision_is_part_of_the_target_s_identity(wide_dir: Path, tmp_path: Path) -> None:
    plain, quantised = (
        TargetFiles.read(section_of(wide_dir, **settings)) for settings in ({}, {"quantization": "int4"})
    )
    assert quantised.identity["quantization"] == "int4, groups of 64"
    fake = TargetFiles(section_of(wide_dir, quantization=FAKE))
    assert fake.changes["quantization"] == "fake int4, groups of 32"
    assert {key for key in plain.identity if plain.identity[key] != quantised.identity[key]} == {"quantization"}
    assert_told_apart(tmp_path, plain, quantised, "quantization")


def test_what_cannot_be_quantised_is_refused_before_weights_are_read(
    wide_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(wide_dir, tmp_path, dirs_exist_ok=True)
    config, gpt2 = json.loads((tmp_path / "config.json").read_text()), make_target("gpt2").config.to_dict()
    monkeypatch.setattr(TargetFiles, "read_model", lambda *_: pytest.fail("weights were read"))
    for precision, written, message in (
        ({"group_size": 128}, config, "128 does not divide the 64 inputs of .*group_size"),
        ("int8", config | {"intermediate_size": 40}, "reads 16 inputs at a time, and .*down_proj has 40"),
        (INT4, config | {"num_key_value_heads": 1, "head_dim": 8}, "packs 16 outputs .*k_proj has 8"),
        ("int8", config | {"quantization_config": {"quant_method": "gptq"}}, r"quantised already \(gptq\)"),
        ("int8", gpt2, "gpt2 hold no linear layers"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(written))
        with pytest.raises(UserError, match=message):
            TargetFiles(section_of(tmp_path, quantization=precision)).load_model()


def test_a_machine_without_kernels_is_told_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    config, layers = SimpleNamespace(model_type="llama"), nn.ModuleList([nn.Sequential(nn.Linear(64, 64))])

    def refused(message: str, device: str = "cpu") -> None:
        quantize._check_kernel.cache_clear()
        with pytest.raises(UserError, match=message):
            check_quantization(INT4, config, layers, device)

    refused("needs kernels for cuda:1.*GPTQ", "cuda:1")
    check_quantization(FAKE, config, layers, "cuda:1")
    monkeypatch.setattr(Int4Linear, "product", lambda self, rows: rows.new_zeros(len(rows), self.out_features))
    refused("gives wrong products on this machine")
    monkeypatch.setattr(Int4Linear, "product", lambda self, rows: torch.ops.aten.no_such_kernel(rows))
    refused("has no kernel for this machine")
    quantize._check_kernel.cache_clear()


@pytest.mark.slow
def test_rows_of_another_precision_have_their_own_plain_decoding(place: Path, tmp_path: Path) -> None:
    """From the recipe to the numbers."""
    chain = {"policy": "chain", "nodes": 4}
    rivals: list[dict[str, Any]] = [
        {"name": "eagle3, int8 target", "quantization": "int8", "tree": chain},
        {"name": "eagle3, fake target", "quantization": {"bits": 8, "fake": True}, "tree": chain},
    ]
    settings = [f"eval.out={tmp_path}", "eval.max_prompts=3", "eval.batch_size=2", f"eval.also={json.dumps(rivals)}"]
    settings += ["target.device=cpu"]  # where the kernels are
    recipe = load_recipe(str(place / "recipe.yaml"), settings)
    evaluation.evaluate_by_decoding(recipe, contenders_of(recipe), plan=False)
    acceptance = result_files.read_acceptance(tmp_path / "acceptance.json")
    rows = acceptance["contenders"]
    int8, fake = "plain decoding, int8 target", "plain decoding, fake int8 target"
    assert list(rows)[:3] == ["plain decoding", int8, fake]
    assert [rows[name]["tau"] for name in (int8, fake)] == [1, 1]
    own = {"eagle3, int8 target": int8, "eagle3, fake target": fake}
    lines = [json.loads(line) for line in (tmp_path / "generations.jsonl").read_text().splitlines()]
    answers = {name: [line["token_ids"] for line in lines if line["contender"] == name] for name in rows}
    assert answers[fake] != answers["plain decoding"]  # or nothing would tell their baselines apart
    for name, plain in own.items():
        same = [mine == theirs for mine, theirs in zip(answers[name], answers[plain], strict=True)]
        assert rows[name]["matching_share"] == round(sum(same) / len(same), 4)
        assert rows[name]["matches_target"] is all(same)
        assert all(same) or name == "eagle3, int8 target"  # float32 is exact, int8 kernels need not be
    assert [rows[name].get("quantization") for name in own] == ["int8", "fake int8"]
