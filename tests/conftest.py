"""Tiny random-weight targets and a byte-level tokenizer: everything the tests need, made in seconds, no network."""

import copy
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedTokenizerFast

from draftsmith.models.target import Target
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.sections.target import TargetSection
from tests import shared

# Models this small are faster on one thread, and tests side by side do not wait for each other; children inherit it.
torch.set_num_threads(1)
os.environ.setdefault("OMP_NUM_THREADS", "1")

CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'assistant' -%}"
    "<|assistant|>{% generation %}{{ message['content'] }}<|end|>{% endgeneration %}"
    "{%- else -%}<|{{ message['role'] }}|>{{ message['content'] }}<|end|>{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)
VOCAB_SIZE = 320
SPECIAL = ("<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
PAD_AND_STOP = {"pad_token": "<|pad|>", "eos_token": "<|end|>"}


def make_tokenizer(
    template: str | None = CHAT_TEMPLATE, special: Sequence[str] = SPECIAL, roles: dict[str, str] = PAD_AND_STOP
) -> PreTrainedTokenizerFast:
    """Byte-level BPE of 320 tokens, the special ones first: ids 0-4 are pad, system, user, assistant, end."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=[*special],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(["the cat sat on the mat and the dog ran after the cat in the rain"] * 20, trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **roles)
    fast.chat_template = template  # type: ignore[assignment]
    return fast


SETTINGS = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 4,
}


def make_config(family: str = "llama", num_layers: int = 7, **overrides) -> Any:
    """The config of `make_target`."""
    # transformers completes dicts in place, which other tests share.
    return AutoConfig.for_model(family, **copy.deepcopy(SETTINGS | {"num_hidden_layers": num_layers} | overrides))


def make_target(family: str = "llama", num_layers: int = 7, seed: int = 0, **overrides) -> Any:
    """A random-weight causal LM in float32: hidden 32, 4 heads, 2 key/value heads, `num_layers` layers.

    Weights are larger than the families' default initialisation so that greedy answers vary instead of repeating.
    """
    config = make_config(family, num_layers, **overrides)
    torch.manual_seed(seed)
    return AutoModelForCausalLM.from_config(config).float().eval()


def files_of(target: Target, model: str = "somewhere") -> TargetFiles:
    """As if the target's files lay there, with the tests' tokenizer."""
    files = TargetFiles(TargetSection(model=model))
    vars(files).update(config=target.model.config, tokenizer=make_tokenizer())
    return files


@pytest.fixture(autouse=True)
def hub_stays_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a network `recipes.files.hub_fetch` goes offline, for the rest of a process; here, of a test."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", constants.HF_HUB_OFFLINE)


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Where xdist's workers share what they build, each worker's own folders beside it."""
    base = tmp_path_factory.getbasetemp()
    shared.folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.folder.mkdir(exist_ok=True)


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return make_tokenizer()


@pytest.fixture(scope="session")
def target_dir(shared_folder: None, tokenizer: PreTrainedTokenizerFast) -> Path:
    """A model directory (Llama, 7 layers) with tokenizer and chat template, as `target.model` of a recipe."""

    def build(directory: Path) -> None:
        make_target().save_pretrained(directory)
        tokenizer.save_pretrained(directory)

    return shared.built("target", build)


@pytest.fixture(scope="session")
def six_steps(target_dir: Path) -> Path:
    """A folder with run/, in which the six steps of `training_runs.write_recipe` are done. Tests copy it."""
    from tests.training_runs import train_six_steps  # what trains takes seconds to import

    return shared.built("six-steps", lambda folder: train_six_steps(folder, target_dir))
