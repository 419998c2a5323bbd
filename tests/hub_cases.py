"""A Hub on loopback in the place of huggingface.co, and a drafter to upload."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from datasets import config as datasets_config
from huggingface_hub import constants

from draftsmith.models.checkpoint import provenance
from tests.compare_cases import save_untrained
from tests.hub_server import HubServer

TOKEN = "hf_ThisIsASecretThatNobodyMaySee"
READER = "hf_AnotherSecretThatMayOnlyRead"
CARD = b"---\nlicense: mit\n---\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub where `me` may write with the token that the environment holds.

    huggingface_hub reads the other variables when it is imported, so its constants are set in their place;
    `test_hub_push.test_the_environment_alone` starts a process with the variables.
    """
    with HubServer() as server:
        server.users = {TOKEN: ("me", True), READER: ("reader", False)}
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "token"))
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(datasets_config, "HF_HUB_OFFLINE", False)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield server


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    folder = save_untrained(tmp_path_factory.mktemp("run") / "drafter", target_dir)
    (folder / "provenance.json").write_text(json.dumps(provenance({})))
    return folder
