"""Every kind of drafter as users meet it: trained by its script, saved, loaded, cut, compared. On the tiny target.

How they learn is tests/train/test_unroll.py's matter, how they draft tests/eval/test_lossless.py's.
"""

import json
import shutil
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional

from draftsmith.models.checkpoint import read_drafter, shape_of_run
from draftsmith.models.drafters import drafter_shape
from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import DraftVocab
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.loader import load_recipe
from draftsmith.recipes.sections.drafter import DrafterSection
from draftsmith.recipes.sections.target import TargetSection
from draftsmith.train.run.initial_drafter import new_drafter, start_from
from draftsmith.train.run.training_inputs import check_start_of_recipe
from tests.conftest import make_target
from tests.export_cases import distributions, loaded, target_of, trained
from tests.pairs import KINDS, untaught
from tests.thinning import a_few
from tests.training_runs import SIX_STEPS, metrics, to_train, train, write_recipe


@pytest.fixture
def recipe_of(tmp_path: Path, target_dir: Path) -> Callable[[str], Path]:
    """Writes the recipe of a kind, its conversations and its draft vocabulary."""

    def recipe_of(kind: str) -> Path:
        drafter, own = KINDS[kind]
        folder = tmp_path / kind.replace(" ", "-").replace(".", "-")
        to_train(folder / "run")
        if "eagle3" in kind:  # has a head of its own
            drafter = {"vocab_size": 160, **drafter}
        else:
            DraftVocab.full(320).save(folder / "run/draft_vocab.safetensors")
        train = SIX_STEPS | {"ttt_steps": 1, "feature_noise": 0.1, "clip": "value"} | own
        return write_recipe(folder, target_dir, drafter=drafter, train=train)

    return recipe_of


@cache
def tiny() -> Target:
    """That of `target_dir`, with EAGLE-3's own choice of layers."""
    return Target(target_of().model)


# Training.


@pytest.mark.parametrize("kind", a_few(KINDS, "poss over eagle3"))
def test_resumed_equals_uninterrupted_bit_for_bit(kind: str, recipe_of: Any, tmp_path: Path) -> None:
    """Noise included: it hangs on the rows, not on how often random numbers were drawn. And replay at checkpoints."""
    path = recipe_of(kind)
    replay = ("train.eval_replay=2", "eval.tree={nodes: 10, draft_calls: 3, top_k: 4}")
    whole = train(path, *replay)
    lines = metrics(whole)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if "replay_tau" in line] == [3, 6]
    assert len({line["loss"] for line in lines}) == 6
    steps = load_recipe(path).train.ttt_steps
    assert len(lines[0]["accuracy"]) == len(lines[2]["validation_accuracy"]) == steps

    resumed = shutil.copytree(whole, tmp_path / "resumed")
    for name in ("drafter", "checkpoints/step-00000006"):
        shutil.rmtree(resumed / name)
    train(path, *replay, f"output_dir={resumed}")
    assert metrics(resumed) == lines
    one, other = (load_file(each / "drafter/model.safetensors") for each in (resumed, whole))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# What a run starts from.


@torch.no_grad()
def test_a_head_may_start_as_the_target_s() -> None:
    model = make_target("llama")
    torch.nn.init.normal_(model.model.norm.weight)
    target, kept = Target(model, (2, 3, 4)), DraftVocab(torch.tensor([3, 5, 8, 200]), 320)
    section = DrafterSection.model_validate({"kind": "eagle3", "vocab_size": 4, "init_head": "target"})
    shape = drafter_shape(section, target.config)
    drafter = new_drafter(section, shape, kept, target, {})
    states = torch.randn(6, 32)
    expected = functional.linear(functional.rms_norm(states, (32,)), model.lm_head.weight)
    torch.testing.assert_close(drafter.head(None)(states), expected[:, kept.target_ids], atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(("single", "specialists"), [("eagle", "poss"), ("eagle3", "poss over eagle3")])
@torch.no_grad()
def test_every_specialist_starts_from_the_single_layer(
    single: str, specialists: str, target_dir: Path, tmp_path: Path
) -> None:
    """At its first position a fresh PosS drafts as the single drafter does; at the later ones, too."""
    target, drafter = tiny(), untaught(specialists, tiny())
    source = trained(tmp_path / "single", target_dir, untaught(single, tiny()))
    before = loaded(tmp_path / "single")
    assert not torch.equal(distributions(drafter, target), distributions(before, target))
    start_from(tmp_path / "single", drafter, source.target)
    assert torch.equal(distributions(drafter, target), distributions(before, target))
    drafter.stacks[0][0].mlp.down_proj.weight.zero_()
    assert drafter.stacks[1][0].mlp.down_proj.weight.abs().max() > 0  # copies, not one tensor for all


def test_a_start_that_does_not_fit_is_told_before_the_target_is_loaded(
    recipe_of: Any, target_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TargetFiles, "load", lambda *_: pytest.fail("the target was loaded"))
    trained(tmp_path / "words", target_dir, untaught("eagle3", tiny(), DraftVocab(torch.arange(1, 320, 2), 320)))
    trained(tmp_path / "wide", target_dir, untaught("eagle", target_of(vocab_size=330)), vocab_size=330)
    for kind, start, message in (
        ("poss over eagle3", "words", "has another draft vocabulary"),
        ("eagle", "words", "kind eagle3, the recipe asks for eagle"),
        ("eagle", "wide", "vocab_size: the drafter was trained for 330, this target has 320"),
    ):
        recipe = load_recipe(recipe_of(kind), [f"drafter.init_from={tmp_path / start}"])
        files, vocab = TargetFiles(recipe.target), DraftVocab.load(recipe.draft_vocab_path)
        with pytest.raises(UserError, match=rf"drafter\.init_from: .*{message}"):
            check_start_of_recipe(recipe, files, shape_of_run(recipe, files), vocab)


# Checkpoints.


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_drafter_drafts_the_same(kind: str, target_dir: Path, tmp_path: Path) -> None:
    target, drafter, written = tiny(), untaught(kind, tiny()).requires_grad_(False), set()
    for _ in range(4):  # equal weights, equal digests
        trained(tmp_path / "drafter", target_dir, drafter)
        written.add((tmp_path / "drafter/model.safetensors").read_bytes())
    assert len(written) == 1
    again = loaded(tmp_path / "drafter")
    assert type(again) is type(drafter) and again.config == drafter.config
    assert torch.equal(distributions(again, target), distributions(drafter, target))
    alone = read_drafter(tmp_path / "drafter")  # without the target, as exports do
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in alone.state_dict().items())
    frozen = {"head_weight", "head_bias"}  # the target's
    assert not frozen & load_file(tmp_path / "drafter/model.safetensors").keys()


@pytest.mark.parametrize(
    ("kind", "known", "change", "message"),
    [
        ("poss", True, {"positions_per_specialist": 1}, "positions_per_specialist is 1, the weights were written with"),
        ("eagle3.1", True, {"norm_output": False}, "norm_output is False, the weights were written with True"),
        ("poss", False, {"specialists": 3}, r"describes poss-2, .*: specialists\.2\.\S+ is missing; .* and \d+ more"),
        ("poss", False, {"intermediate_size": 40}, r"is \[32, 48\], not \[32, 40\]"),
        # A module of this size would take minutes.
        ("eagle3", False, {"num_layers": 1_000_000}, r"1,000,000 layers, .*; its weights are 15 tensors"),
        ("eagle3", False, {"num_key_value_heads": 0}, "num_key_value_heads: 0 is less than 1"),
        ("eagle3", False, {"hidden_act": "/etc/passwd"}, "hidden_act is '/etc/passwd'"),
    ],
)
def test_an_edited_config_is_refused(
    kind: str, known: bool, change: Any, message: str, target_dir: Path, tmp_path: Path
) -> None:
    """Also where the tensors would fit. Files of other tools say nothing of their config (`known`)."""
    directory = tmp_path / "drafter"
    trained(directory, target_dir, untaught(kind, tiny()))
    if not known:
        save_file(load_file(directory / "model.safetensors"), directory / "model.safetensors")
        assert read_drafter(directory).config.kind == kind.removesuffix(".1")
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"drafter": config["drafter"] | change}))
    with pytest.raises(UserError, match=message):
        read_drafter(directory)


# The target's head, cut (FR-Spec).

HEADS: dict[str, dict[str, Any]] = {
    **{"llama": {}, "cohere": {"logit_scale": 0.25}, "phi": {}},  # phi's head has a bias
    "gemma2": {"final_logit_softcapping": 3.0, "sliding_window": 8},
    "granite": {"embedding_multiplier": 3.0, "logits_scaling": 8.0},
}
CUT = [*product(HEADS, ("eagle", "poss")), ("llama", "eagle3")]


@pytest.mark.parametrize(("family", "kind"), a_few(CUT, ("phi", "eagle"), ("cohere", "poss"), ("llama", "eagle3")))
@torch.no_grad()
def test_a_cut_head_is_the_log_softmax_over_its_rows(family: str, kind: str) -> None:
    model = make_target(family, **HEADS[family])
    if family == "phi":
        torch.nn.init.normal_(model.lm_head.bias, std=2.0)
    target = Target(model)
    drafter = untaught(kind, target)
    kept = DraftVocab(torch.randperm(320, generator=torch.Generator().manual_seed(1))[:40].sort().values, 320)
    whole = distributions(drafter, target)
    torch.testing.assert_close(distributions(drafter, target, kept), whole[:, kept.target_ids].log_softmax(-1))
    if kind == "eagle3":
        return
    # What the target itself would say of these features.
    features = torch.randn(3, 32)
    torch.testing.assert_close(drafter.logits(features), target.logits(features))
    torch.testing.assert_close(
        functional.softmax(drafter.head(kept.target_ids)(features), -1),
        functional.softmax(target.logits(features)[:, kept.target_ids], -1),
    )


# What a checkpoint says of its target.


@pytest.mark.parametrize(("family", "tied"), [("llama", False), ("gpt2", True), ("gemma", True)])
def test_a_target_s_layout_names_tensors_of_its_checkpoint(family: str, tied: bool, tmp_path: Path) -> None:
    model = make_target(family, tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    found = TargetFiles(TargetSection(model=str(tmp_path))).layout(torch.bfloat16)
    assert (found["architectures"], found["dtype"], found["tied"]) == ([type(model).__name__], "bfloat16", tied)
    assert found["model_type"] == model.config.model_type
    tensors = load_file(tmp_path / "model.safetensors")
    assert torch.equal(tensors[found["embeddings"]], model.get_input_embeddings().weight)
    assert (found["head"] in tensors) != tied
    assert torch.equal(model.state_dict()[found["head"]], model.get_output_embeddings().weight)
