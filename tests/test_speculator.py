"""The Python API: a target and a drafter by their places, answers by `answer`."""

import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from draftsmith.eval.decoding.speculator import Speculator
from draftsmith.models import loaded_models
from draftsmith.models.chat import decode_answer, render_prompt
from draftsmith.models.sampling import Sampling
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.vocab import save_token_counts
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.schema import TargetSection, TreeSection
from tests.compare_cases import save_untrained
from tests.conftest import VOCAB_SIZE
from tests.decoding import decode

MESSAGES = [{"role": "user", "content": "the cat"}]


DEMO = Path(__file__).parents[1] / "recipes/demo_target"


@pytest.fixture(scope="module")
def drafter_dir(target_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_untrained(tmp_path_factory.mktemp("run") / "drafter", target_dir)


def test_an_answer_is_the_target_s_own(target_dir: Path, drafter_dir: Path) -> None:
    speculator = Speculator.load(str(target_dir), drafter_dir)
    answer = speculator.answer(MESSAGES, max_new_tokens=40)
    prompt = render_prompt(speculator.tokenizer, MESSAGES)
    plain = decode(speculator.target, None, prompt, speculator.stop_ids, 40)
    assert answer.generation.token_ids == plain.token_ids
    assert answer.text == decode_answer(speculator.tokenizer, plain.token_ids)
    assert answer.tau is not None
    assert answer.tau >= 1
    assert speculator.answer("the cat", max_new_tokens=40).text == answer.text


def test_a_gpu_s_drafter_has_the_target_s_precision(
    target_dir: Path, drafter_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_gpu = SimpleNamespace(device=torch.device("cuda"), dtype=torch.bfloat16)
    assert loaded_models.drafting_dtype(cast(Any, on_gpu)) is torch.bfloat16
    plain = Speculator.load(str(target_dir), drafter_dir)
    monkeypatch.setattr(loaded_models, "drafting_dtype", lambda target: torch.bfloat16)
    rounded = Speculator.load(str(target_dir), drafter_dir)
    texts = {each.answer(MESSAGES, max_new_tokens=40).text for each in (plain, rounded)}
    (before,), (after,) = (each.models.drafters.values() for each in (plain, rounded))
    assert len(texts) == 1 and (before.dtype, after.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(after.rotary.inv_freq, before.rotary.inv_freq)


def test_a_tree_may_cut_the_vocabulary(target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    fingerprint = Speculator.load(str(target_dir), drafter_dir).models.files.fingerprint
    save_token_counts(tmp_path / "counts.safetensors", torch.arange(VOCAB_SIZE), fingerprint, [4])
    speculator = Speculator.load(str(target_dir), drafter_dir, tmp_path / "counts.safetensors")
    whole, cut = TreeSection(nodes=16), TreeSection(nodes=16, vocab_size=9)
    one, other = (speculator.answer(MESSAGES, max_new_tokens=40, tree=tree).generation for tree in (whole, cut))
    assert one.token_ids == other.token_ids and one.accepted_per_round != other.accepted_per_round


def test_sampled_answers_follow_their_seed(target_dir: Path, drafter_dir: Path) -> None:
    speculator = Speculator.load(TargetSection(model=str(target_dir), dtype="float32"), drafter_dir)
    sampling, tree = Sampling(1.0, top_p=0.9), TreeSection(policy="chain", nodes=4, draw="sampled")

    def drawn(seed: int) -> list[int]:
        return speculator.answer(MESSAGES, 30, sampling, seed, tree).generation.token_ids

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)


PAGE = (DEMO.parents[1] / "docs" / "decoding.md").read_text()


def test_the_page_s_example_runs_and_is_token_identical(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """With a target whose weights are bfloat16 on disk, as the demo's are."""
    shutil.copytree(target_dir, tmp_path / "target")
    model = TargetFiles(TargetSection(model=str(target_dir), dtype="bfloat16")).load_model()
    model.save_pretrained(tmp_path / "target")
    assert not Speculator.load(str(tmp_path / "target"), drafter_dir).token_identical
    code = PAGE.partition("```python\n")[2].partition("```")[0]
    code = code.replace("200", "40")  # first, since the folders that follow may hold a 200 too
    places = {'"recipes/demo_target"': repr(str(tmp_path / "target")), '"runs/demo/drafter"': repr(str(drafter_dir))}
    for written, here in places.items():
        assert code.count(written) == 1
        code = code.replace(written, here)
    names: dict[str, Any] = {}
    exec(compile(code, "example", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) >= 2
    assert names["speculator"].token_identical


def test_the_page_s_target_answers_in_its_own_precision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The shipped target, named and loaded as there: by its path from the root, and without a dtype."""
    monkeypatch.chdir(DEMO.parents[1])
    assert (DEMO / "model.safetensors").exists()
    drafter = save_untrained(tmp_path / "drafter", Path("recipes/demo_target"))
    speculator = Speculator.load("recipes/demo_target", drafter)
    assert speculator.target.dtype == torch.bfloat16
    answer = speculator.answer("Write the function `dedent(text)` of `textwrap`.", max_new_tokens=8)
    assert 1 <= len(answer.generation.token_ids) <= 8
    assert answer.text == decode_answer(speculator.tokenizer, answer.generation.token_ids)


def test_a_tree_that_cannot_be_drafted_is_said_before_it_is(target_dir: Path, drafter_dir: Path) -> None:
    speculator = Speculator.load(str(target_dir), drafter_dir)
    for tree, message in (
        (TreeSection(policy="auto"), r"tree\.policy: auto measures this machine .* `draftsmith plan`"),
        (TreeSection(nodes=700, top_k=100), r"tree: 700 nodes, .* in a target of 512 positions; set nodes and"),
        (TreeSection(policy="chain", nodes=600), "tree: 600 nodes, 599 draft calls deep, in a target of 512 pos"),
        (TreeSection(vocab_size=9), "tree.vocab_size: give Speculator.load the token_counts.safetensors"),
    ):
        with pytest.raises(UserError, match=message):
            speculator.proposer(tree)
        with pytest.raises(UserError, match=message):
            speculator.answer(MESSAGES, max_new_tokens=4, tree=tree)
    speculator.proposer(TreeSection(nodes=512, top_k=100))


def test_what_cannot_be_asked_or_loaded_is_said(target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no drafter here"):
        Speculator.load(str(target_dir), tmp_path)
    speculator = Speculator.load(str(target_dir), drafter_dir)
    with pytest.raises(UserError, match="exceed the target's 512 positions"):
        speculator.answer(MESSAGES, max_new_tokens=600)
    with pytest.raises(UserError, match="cannot be asked"):
        speculator.answer([{"role": "user", "content": [{"type": "image"}]}])


def test_arguments_of_another_kind_are_said(target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    counts = tmp_path / "counts.safetensors"

    def refused(message: str, call: Callable[..., Any], *arguments: Any, **named: Any) -> None:
        with pytest.raises(UserError, match=message) as raised:
            call(*arguments, **named)
        assert len(raised.value.problems) == 1 and "eval." not in str(raised.value)

    refused(f"{counts}: no such token counts", Speculator.load, str(target_dir), drafter_dir, counts)
    save_token_counts(counts, torch.arange(VOCAB_SIZE), "another's", [4])
    refused(f"token_counts: {counts} was counted with a", Speculator.load, str(target_dir), drafter_dir, counts)
    refused("target: {'model': 'x'} cannot be used; give a name", Speculator.load, {"model": "x"}, drafter_dir)
    for drafter in (None, 3, [drafter_dir]):
        refused("drafter: .* give a directory that training wrote", Speculator.load, str(target_dir), drafter)
    for counted in (5, False):
        refused(f"token_counts: {counted} cannot", Speculator.load, str(target_dir), drafter_dir, counted)
    speculator = Speculator.load(str(target_dir), drafter_dir)
    save_token_counts(counts, torch.arange(VOCAB_SIZE), speculator.models.files.fingerprint, [4])
    speculator = Speculator.load(str(target_dir), drafter_dir, counts)
    refused("tree.vocab_size: ", speculator.answer, MESSAGES, tree=TreeSection(vocab_size=100_000))
    for most in (2.5, 0, True, None):
        refused(f"max_new_tokens: {most} .* a whole number of 1 or more", speculator.answer, MESSAGES, most)
    for seed in (2.5, None, "a", True):
        refused(f"seed: {seed!r} cannot be used; give a whole number", speculator.answer, MESSAGES, 4, seed=seed)
    for question in (
        None,
        5,
        b"x",
        [],
        ["x"],
        [None],
        MESSAGES[0],
        [{"content": "x"}],
        [{"role": "User", "content": "x"}],
    ):
        refused("question: .* is neither a text nor a list of messages", speculator.answer, question, 4)
    refused("ends with a question", speculator.answer, [*MESSAGES, {"role": "assistant", "content": "x"}], 4)
    for sampling in (0.7, {"temperature": 0.7}, None):
        refused(f"sampling: {sampling} cannot be used; give Sampling", speculator.answer, MESSAGES, 4, sampling)
    for tree in ({}, {"policy": "chain"}, "chain"):
        refused(f"tree: {tree!r} cannot be used; give TreeSection", speculator.answer, MESSAGES, 4, tree=tree)
