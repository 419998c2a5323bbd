"""A target that is named by a Hub id: asked for once, and what is said where it cannot be had."""

from typing import Any

import datasets
import pytest
from datasets import config as datasets_config
from huggingface_hub import constants
from huggingface_hub.errors import RevisionNotFoundError

from draftsmith.models.chat import load_tokenizer
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files import hub
from draftsmith.recipes.prompts.reader import Rejects, read_conversations
from draftsmith.recipes.schema import TargetSection


class Hub:
    """Answers in the Hub's place."""

    def __init__(self, error: type[Exception] | None):
        self.error, self.asked = error, 0

    def dataset_info(self, name: str, **_: Any) -> None:
        self.model_info(name)

    def model_info(self, model: str, **_: Any) -> None:
        self.asked += 1
        if self.error is not None:
            error = self.error.__new__(self.error)  # the Hub's own want a reply of the HTTP library
            error.args = ("no route\nand a page",)
            raise error


@pytest.fixture
def answering(monkeypatch: pytest.MonkeyPatch) -> Any:
    def answer(error: type[Exception] | None, cached: bool = False) -> Hub:
        hub.check_model.cache_clear()
        found, place = Hub(error), "/a/config.json" if cached else None
        monkeypatch.setattr("huggingface_hub.HfApi", lambda: found)
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_, **__: place)
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets_config, "HF_HUB_OFFLINE", False)
        return found

    yield answer
    hub.check_model.cache_clear()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConnectionError, "cannot be reached .ConnectionError: no route.; name a folder, or try again"),
        (RevisionNotFoundError, "no revision 'v9' of it"),
    ],
)
def test_a_model_that_is_nowhere_is_told_after_one_question(
    answering: Any, error: type[Exception], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = answering(error)
    with pytest.raises(UserError, match=rf"^target\.model: 'nothere' is not a folder in .*, and .*{said}"):
        load_tokenizer(TargetSection(model="nothere", revision="v9"))
    assert asked.asked == 1
    assert capsys.readouterr().err == "'nothere' is not a folder here; asking the Hugging Face Hub\n"


def test_a_cached_model_needs_no_hub(answering: Any, capsys: pytest.CaptureFixture[str]) -> None:
    asked = answering(ConnectionError, cached=True)
    hub.check_model("org/model", None)
    assert constants.HF_HUB_OFFLINE and "its cached files are taken" in capsys.readouterr().err
    hub.check_model("org/model", None)
    assert asked.asked == 1
    asked = answering(None, cached=True)
    hub.check_model("org/model", None)
    assert not constants.HF_HUB_OFFLINE and capsys.readouterr().err == ""


def test_the_hub_is_not_asked_in_vain(answering: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = answering(None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(UserError, match="not in the Hub's cache, and HF_HUB_OFFLINE forbids"):
        hub.check_model("org/model", None)
    assert asked.asked == 0


@pytest.mark.parametrize("source", ["hf:org/name:train", "mt_bench"])
def test_datasets_without_a_network_end_at_once(
    source: str, answering: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.check_dataset.cache_clear()
    answering(ConnectionError)
    asked: list[bool] = []

    def load(*_: Any, **__: Any) -> Any:
        asked.append(datasets_config.HF_HUB_OFFLINE)
        raise ConnectionError("Couldn't reach it")

    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"datasets cannot .*Couldn't reach it"):
        list(read_conversations(source, Rejects()))
    assert asked == [True] and "the Hub cannot be reached" in capsys.readouterr().err
    hub.check_dataset.cache_clear()
