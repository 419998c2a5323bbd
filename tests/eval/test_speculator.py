"""The Python API: a target and a drafter by their places, answers by `answer`."""

import shutil
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
from draftsmith.recipes.sections.eval import TreeSection
from draftsmith.recipes.sections.target import TargetSection
from tests.compare_cases import save_untrained
from tests.conftest import VOCAB_SIZE
from tests.decoding import decode

MESSAGES = [{"role": "user", "content": "the cat"}]


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
    assert answer.tau is not None and answer.tau >= 1
    assert speculator.answer("the cat", max_new_tokens=40).text == answer.text

    sampling, tree = Sampling(1.0, top_p=0.9), TreeSection(policy="chain", nodes=4, draw="sampled")
    drawn = [speculator.answer(MESSAGES, 30, sampling, seed, tree).generation.token_ids for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]

    speculator.proposer(TreeSection(nodes=512, top_k=100))  # trees and answers may fill all positions
    prompt = render_prompt(speculator.tokenizer, [{"role": "user", "content": "x" * 500}])
    speculator.answer("x" * 500, 512 - len(prompt))


@pytest.mark.slow
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


def test_the_page_s_example_runs_and_is_token_identical(
    target_dir: Path, drafter_dir: Path, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    """With a target whose weights are bfloat16 on disk, as the demo's are."""
    shutil.copytree(target_dir, tmp_path / "target")
    model = TargetFiles(TargetSection(model=str(target_dir), dtype="bfloat16")).load_model()
    model.save_pretrained(tmp_path / "target")
    assert not Speculator.load(str(tmp_path / "target"), drafter_dir).token_identical
    page = (Path(__file__).parents[2] / "docs/decoding.md").read_text()
    code = page.partition("```python\n")[2].partition("```")[0]
    code = code.replace("200", "40")  # first, since the folders that follow may hold a 200 too
    places = {'"recipes/demo_target"': repr(str(tmp_path / "target")), '"runs/demo/drafter"': repr(str(drafter_dir))}
    for written, here in places.items():
        assert code.count(written) == 1
        code = code.replace(written, here)
    names: dict[str, Any] = {}
    exec(compile(code, "example", "exec"), names)
    assert len(capsys.readouterr().out.splitlines()) >= 2
    assert names["speculator"].token_identical


ASSISTANT = {"role": "assistant", "content": "x"}
NO_QUESTION = "question: .* end with a question"
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("auto .* `draftsmith plan-tree`", {"tree": TreeSection(policy="auto")}),
    ("700 nodes, .* 512 positions", {"tree": TreeSection(nodes=700, top_k=100)}),
    ("599 draft calls deep", {"tree": TreeSection(policy="chain", nodes=600)}),
    ("tree.vocab_size: .* token_counts", {"tree": TreeSection(vocab_size=9)}),
    ("max_new_tokens: ", {"max_new_tokens": 0}),
    ("512 positions", {"max_new_tokens": 600}),
    ("cannot be asked", {"question": [{"role": "user", "content": [{"type": "image"}]}]}),
    *((NO_QUESTION, {"question": q}) for q in ([], [ASSISTANT | {"role": "User"}], [*MESSAGES, ASSISTANT])),
]


def test_what_cannot_be_asked_is_said(target_dir: Path, drafter_dir: Path) -> None:
    speculator = Speculator.load(str(target_dir), drafter_dir)
    for message, arguments in REFUSED:
        with pytest.raises(UserError, match=message):
            speculator.answer(**{"question": MESSAGES, "max_new_tokens": 4} | arguments)


def test_what_cannot_be_loaded_is_said(target_dir: Path, drafter_dir: Path, tmp_path: Path) -> None:
    target, foreign = str(target_dir), tmp_path / "counts.safetensors"
    save_token_counts(foreign, torch.arange(VOCAB_SIZE), "another's", [4])
    for message, arguments in (
        ("no drafter here", (target, tmp_path)),
        ("no such token counts", (target, drafter_dir, tmp_path / "none")),
        ("token_counts: .* was counted with a", (target, drafter_dir, foreign)),
    ):
        with pytest.raises(UserError, match=message):
            Speculator.load(*cast(Any, arguments))
