"""Drafters that come from the Hub, against a Hub on loopback."""

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import constants

from draftsmith.models.digests import tensor_digest
from draftsmith.models.formats import hub as on_hub
from draftsmith.models.formats.exporting import Source, target_embeddings
from draftsmith.recipes.errors import UserError
from tests.export_cases import save_target, target_of
from tests.hub_cases import CARD, READER
from tests.hub_cases import checkpoint as checkpoint
from tests.hub_cases import hub as hub
from tests.hub_server import Fault, HubServer


def drafter_files(checkpoint: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in checkpoint.iterdir()}


def test_a_drafter_is_fetched_without_the_rest(hub: HubServer, checkpoint: Path) -> None:
    ours = drafter_files(checkpoint)
    more = {
        "optimizer.pt": b"0",
        "README.md": CARD,
        "old/model.safetensors": b"0",
        "run.py": b"",
        "x.safetensors": b"0",
    }
    hub.add_repo("me/drafter", ours | more | {"pytorch_model.bin": b"0", "model.safetensors.index.json": b"{}"})
    folder = on_hub.fetch_drafter("me/drafter")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == ours
    assert Source.read(folder).shape == Source.read(checkpoint).shape
    downloads = hub.counted("GET", "/resolve/")
    assert downloads == sum(len(content) > 0 for content in ours.values())
    assert on_hub.fetch_drafter("me/drafter") == folder and hub.counted("GET", "/resolve/") == downloads


def test_shards_and_revisions(hub: HubServer) -> None:
    repo = hub.add_repo("me/drafter", {"config.json": b"{}", "model.safetensors": b"old"})
    first = repo.commits()[-1].oid
    shards = {"model.safetensors.index.json": b"{}", "model-1-of-2.safetensors": b"1", "model-2-of-2.safetensors": b"2"}
    repo.commit("shards", {"model.safetensors": None, **shards})
    assert {file.name for file in on_hub.fetch_drafter("me/drafter").iterdir()} == {"config.json", *shards}
    assert (on_hub.fetch_drafter("me/drafter", first) / "model.safetensors").read_bytes() == b"old"


def test_a_pickle_is_fetched_on_request_alone(hub: HubServer) -> None:
    hub.add_repo("me/drafter", {"config.json": b"{}", "pytorch_model.bin": b"0"})
    with pytest.raises(UserError, match=r"no config.json with safetensors .* a pickle: .* --allow-bin reads it"):
        on_hub.fetch_drafter("me/drafter")
    assert hub.counted("GET", "/resolve/") == 0
    assert (on_hub.fetch_drafter("me/drafter", allow_bin=True) / "pytorch_model.bin").read_bytes() == b"0"


@pytest.mark.parametrize("files", [{}, {"config.json": b"{}"}, {"model.safetensors": b"0"}, {"d/config.json": b"{}"}])
def test_a_repository_without_a_drafter(hub: HubServer, files: dict[str, bytes]) -> None:
    hub.add_repo("me/drafter", files)
    with pytest.raises(UserError, match=r"^me/drafter: this repository of the Hub has no config.json with safetensors"):
        on_hub.fetch_drafter("me/drafter")


def test_a_target_is_not_downloaded(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.add_repo("me/drafter", {"config.json": b"{}", "model.safetensors": b"0" * 6_000_000})
    monkeypatch.setattr(on_hub, "MOST_BYTES", 5_000_000)
    with pytest.raises(UserError, match=r"^me/drafter: 0 GB, and no drafter is that large; is it a target\?"):
        on_hub.fetch_drafter("me/drafter")
    assert hub.counted("GET", "/resolve/") == 0


def offline(hub: HubServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(constants, "HF_HUB_OFFLINE", True)


def unreachable(hub: HubServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")


def overloaded(hub: HubServer, patch: pytest.MonkeyPatch) -> None:
    hub.faults.append(Fault("GET", "/api/", 503, times=9))


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        (None, "me/nothere", "the Hub has no model of this name that you may read"),
        ("", "me/private", "or run `hf auth login`"),
        ("hf_unknown", "me/drafter", "the Hub refuses the token .401"),
        (READER, "me/gated", "the Hub asks you to accept its licence first"),
        (None, "me/drafter@v9", "the Hub has no revision 'v9' of it"),
        (offline, "me/drafter", "HF_HUB_OFFLINE forbids asking the Hub"),
        (unreachable, "me/drafter", "the Hub cannot be reached"),
        (overloaded, "me/drafter", "the Hub is out of order .503"),
        (None, "me/a--b", "no name that a model of the Hub could have"),
    ],
)
def test_a_drafter_that_cannot_be_had(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, change: Any, name: str, said: str
) -> None:
    for repo, more in (("drafter", {}), ("private", {"private": True}), ("gated", {"gated": True})):
        hub.add_repo(f"me/{repo}", {"config.json": b"{}", "model.safetensors": b"0"}, **more)
    if callable(change):
        change(hub, monkeypatch)
    elif change is not None:
        monkeypatch.setenv("HF_TOKEN", change)
    name, _, revision = name.partition("@")
    with pytest.raises(UserError, match=rf"^'{name}' is no folder in {re.escape(os.getcwd())}, and .*{said}") as told:
        on_hub.fetch_drafter(name, revision or None)
    assert "hf_unknown" not in str(told.value)


@pytest.mark.parametrize(("change", "revision"), [(offline, None), (unreachable, "main"), (overloaded, "commit")])
def test_without_the_hub_cached_files_are_taken(
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[HubServer, pytest.MonkeyPatch], None],
    revision: str | None,
) -> None:
    repo = hub.add_repo("me/drafter", {"config.json": b"{}", "model.safetensors": b"0", "README.md": CARD})
    revision = repo.commits()[-1].oid if revision == "commit" else revision
    folder = on_hub.fetch_drafter("me/drafter", revision)
    change(hub, monkeypatch)
    capsys.readouterr()
    assert on_hub.fetch_drafter("me/drafter", revision) == folder
    assert constants.HF_HUB_OFFLINE
    told = "note: the Hub does not serve 'me/drafter'; its cached files are taken\n"
    assert capsys.readouterr().err == ("" if change is offline else told)  # who is offline knows it


def test_a_download_that_breaks_off_is_continued(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = os.urandom(3_000_000)
    hub.add_repo("me/drafter", {"config.json": b"{}", "model.safetensors": weights})
    hub.faults.append(Fault("GET", "/resolve/.*/model.safetensors", None, after=True, sent=1_000_000))
    hub.faults.append(Fault("GET", "/resolve/.*/model.safetensors", 503))
    with pytest.raises(UserError, match=r"^me/drafter: the download broke off: .*503.*; try again, which continues it"):
        on_hub.fetch_drafter("me/drafter")
    offline(hub, monkeypatch)
    with pytest.raises(UserError, match="not in the Hub's cache"):  # half a download is none
        on_hub.fetch_drafter("me/drafter")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert (on_hub.fetch_drafter("me/drafter") / "model.safetensors").read_bytes() == weights


def test_the_embeddings_of_a_sharded_target_come_alone(hub: HubServer, tmp_path: Path) -> None:
    folder = save_target(tmp_path / "target", sharded=True)
    hub.add_repo("org/target", {path.name: path.read_bytes() for path in folder.iterdir()})
    table = target_of().embedding_table
    found = target_embeddings({"model": "org/target", "embedding_digest": tensor_digest(table)})
    assert torch.equal(found, table)
    assert len(list(folder.glob("*.safetensors"))) > 2 and hub.counted("GET", r"/resolve/.*\.safetensors$") == 1
