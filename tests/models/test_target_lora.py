"""The target's adapter: merged as peft applies it, refused where it does not fit, and part of the target's identity."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import IA3Config, LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from draftsmith.eval.replay.recorded_answers import check_answers_before_loading, read_answers
from draftsmith.models.checkpoint import check_identity
from draftsmith.models.target_files import TargetFiles
from draftsmith.models.target_lora import CONFIG, WEIGHTS, adapter_digest
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.sections.target import TargetSection
from tests.conftest import make_target
from tests.evaluation_cases import conversation, write_lines


def write_adapter(directory: Path, model: Any, **settings: Any) -> Path:
    """A LoRA with random matrices, as peft writes it."""
    torch.manual_seed(7)
    settings = {"r": 3, "lora_alpha": 24, "target_modules": ["q_proj", "down_proj"]} | settings
    adapted = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **settings))
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if "lora_" in name:
                weight.normal_(std=0.1)
    adapted.save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter"), make_target())


def section_of(target_dir: Path, adapter: Path | None) -> TargetSection:
    return TargetSection(model=str(target_dir), dtype="float32", device="cpu", adapter=adapter and str(adapter))


def test_answers_are_those_that_peft_generates(target_dir: Path, adapter: Path) -> None:
    plain: Any = AutoModelForCausalLM.from_pretrained(target_dir, dtype=torch.float32)
    theirs: Any = PeftModel.from_pretrained(plain, str(adapter)).eval()
    ours = TargetFiles(section_of(target_dir, adapter)).load_model()
    assert type(ours) is type(plain) and not any(p.requires_grad for p in ours.parameters())
    prompt = torch.arange(20, 32)[None]
    settings: dict[str, Any] = {"attention_mask": torch.ones_like(prompt), "do_sample": False, "max_new_tokens": 40}
    with torch.no_grad():
        torch.testing.assert_close(ours(prompt).logits, theirs(prompt).logits, atol=1e-4, rtol=1e-4)
        expected = theirs.generate(input_ids=prompt, **settings)
        assert torch.equal(ours.generate(input_ids=prompt, **settings), expected)
        without = TargetFiles(section_of(target_dir, None)).load_model().generate(input_ids=prompt, **settings)
    assert not torch.equal(without, expected)


def changed(adapter: Path, directory: Path, change: Callable[[dict[str, torch.Tensor], str], Any]) -> Path:
    """A copy of the adapter; `change` gets its tensors and the first one's name."""
    shutil.copytree(adapter, directory)
    tensors = load_file(directory / WEIGHTS)
    change(tensors, next(iter(tensors)))
    save_file(tensors, directory / WEIGHTS)
    return directory


def without_numbers(tensors: dict[str, torch.Tensor], name: str) -> None:
    tensors[name][0, 0] = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors, name: tensors.pop(name), "does not fit .*: 1 tensors are missing"),
        (lambda tensors, name: tensors.update({name: tensors[name][:, :-1].contiguous()}), "size mismatch"),
        (without_numbers, "cannot be merged"),
        (
            lambda tensors, name: tensors.update({name.replace("layers.0", "layers.7"): tensors[name].clone()}),
            "1 tensors have no place in it, .*layers.7",
        ),
    ],
)
def test_a_wrong_adapter_is_one_message(
    change: Callable[..., Any], message: str, target_dir: Path, adapter: Path, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=f"^target.adapter: .*{message}"):
        TargetFiles(section_of(target_dir, changed(adapter, tmp_path / "changed", change))).load_model()


def test_what_is_no_adapter_is_refused(target_dir: Path, adapter: Path, tmp_path: Path) -> None:
    for name in ("pickled", "json"):
        shutil.copytree(adapter, tmp_path / name)
    (tmp_path / "pickled" / WEIGHTS).rename(tmp_path / "pickled/adapter_model.bin")
    (tmp_path / "json" / CONFIG).write_text("{")
    settings = IA3Config(task_type="CAUSAL_LM", target_modules=["k_proj"], feedforward_modules=[])
    get_peft_model(make_target(), settings).save_pretrained(str(tmp_path / "ia3"))
    tied = make_target(tie_word_embeddings=True)
    tied.save_pretrained(tmp_path / "tied")
    write_adapter(tmp_path / "head", tied, target_modules=["lm_head"])
    for target, name, message in (
        (target_dir, "pickled", "adapter_model.bin is pickled"),
        (target_dir, "json", "adapter_config.json: damaged"),
        (target_dir, "ia3", "is of type 'IA3'; only LORA"),
        (target_dir, "nothing", "is not a folder with adapter_config"),
        (tmp_path / "tied", "head", "embeddings or the head, which are one table"),
    ):
        with pytest.raises(UserError, match=f"^target.adapter: .*{message}"):
            TargetFiles(section_of(target, tmp_path / name)).load_model()


def test_the_adapter_is_part_of_the_target_s_identity(target_dir: Path, adapter: Path, tmp_path: Path) -> None:
    plain, adapted = (TargetFiles.read(section_of(target_dir, each)) for each in (None, adapter))
    other = changed(adapter, tmp_path / "other", without_numbers)
    shutil.copytree(adapter, tmp_path / "louder")
    settings = json.loads((adapter / CONFIG).read_text())
    (tmp_path / "louder" / CONFIG).write_text(json.dumps(settings | {"lora_alpha": 99}))
    folders = (None, adapter, other, tmp_path / "louder")
    digests = [adapter_digest(section_of(target_dir, each)) for each in folders]
    assert digests[0] is None and len(set(digests)) == len(folders)
    for mine, theirs in ((plain, adapted), (adapted, plain)):
        written_by = {key: value for key, value in theirs.identity.items() if value is not None}
        recording = read_answers(write_lines(tmp_path / "c.jsonl", conversation(0, **written_by)))
        check_answers_before_loading(recording, theirs)
        with pytest.raises(UserError, match=r"c\.jsonl:1: recorded from another target: adapter"):
            check_answers_before_loading(recording, mine)
        check_identity(tmp_path, theirs.identity, mine.identity)  # a drafter can be measured with both
