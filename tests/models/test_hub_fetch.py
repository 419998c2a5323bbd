"""What comes from the Hub, and what is said where it cannot be had."""

import json
import os
import re
from pathlib import Path
from typing import Any

import datasets
import pytest
import torch
from datasets import config as datasets_config
from huggingface_hub import constants

from draftsmith.models.formats import hub_push as on_hub
from draftsmith.models.formats.exporting import Source, target_embeddings
from draftsmith.models.formats.folder import read_folder
from draftsmith.models.target import tensor_digest
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.hub_fetch import check_dataset, check_model
from draftsmith.recipes.prompts.prompt_reader import Rejects, read_conversations
from draftsmith.recipes.sections.target import TargetSection
from tests.export_cases import save_target, target_of
from tests.models.hub_cases import FakeHub, files_of, refused
from tests.models.hub_cases import checkpoint as checkpoint
from tests.models.hub_cases import hub as hub

SMALL = {"config.json": b"{}", "model.safetensors": b"0"}


def test_a_drafter_is_fetched_without_the_rest(hub: FakeHub, checkpoint: Path) -> None:
    ours, rest = files_of(checkpoint), ["optimizer.pt", "README.md", "old/model.safetensors", "run.py", "x.safetensors"]
    rest += ["pytorch_model.bin", "model.safetensors.index.json"]
    hub.add_repo("me/drafter", ours | dict.fromkeys(rest, b"0"))
    folder = on_hub.fetch_drafter("me/drafter")
    assert files_of(folder) == ours and Source.read(folder).shape == Source.read(checkpoint).shape
    assert sorted(hub.downloaded) == sorted(ours)
    assert on_hub.fetch_drafter("me/drafter") == folder and len(hub.downloaded) == len(ours)


def test_shards_and_revisions(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    repo = hub.add_repo("me/drafter", {"config.json": b"{}", "model.safetensors": b"old"})
    first = repo.oid()
    shards = {"model.safetensors.index.json": b"{}", "model-1-of-2.safetensors": b"1", "model-2-of-2.safetensors": b"2"}
    repo.branches["main"].append(("shards", {"config.json": b"{}", **shards}))
    assert files_of(on_hub.fetch_drafter("me/drafter")).keys() == {"config.json", *shards}
    older = on_hub.fetch_drafter("me/drafter", first)
    assert (older / "model.safetensors").read_bytes() == b"old"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert on_hub.fetch_drafter("me/drafter", first) == older  # from the cache, and no other


def test_what_is_no_drafter_is_not_downloaded(hub: FakeHub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(on_hub, "MOST_BYTES", 3)
    pickled = {"config.json": b"{}", "pytorch_model.bin": b"0"}
    for files, told in (
        ({"config.json": b"{}"}, "this repository of the Hub has no config.json with"),
        ({"model.safetensors": b"0"}, "this repository of the Hub has no config.json with"),
        (pickled, r"no config.json with safetensors .* a pickle: .* --allow-bin reads it"),
        (SMALL | {"recipe.yaml": b"0"}, r"0 GB, and no drafter is that large; is it a target\?"),
    ):
        hub.add_repo("me/drafter", files)
        with pytest.raises(UserError, match=f"^me/drafter: .*{told}"):
            on_hub.fetch_drafter("me/drafter")
    assert not hub.downloaded
    hub.add_repo("me/drafter", pickled)
    assert (on_hub.fetch_drafter("me/drafter", allow_bin=True) / "pytorch_model.bin").read_bytes() == b"0"


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("me/nothere", "the Hub has no model of this name that you may read"),
        ("me/gated", "the Hub asks you to accept its licence first"),
        ("me/drafter@v9", "the Hub has no revision 'v9' of it"),
        ("me/a--b", "no name that a model of the Hub could have"),
        ("me/overloaded", "the Hub is out of order"),
        ("me/offline", "HF_HUB_OFFLINE forbids"),
        ("me/far", "the Hub cannot be reached .ConnectionError"),
    ],
)
def test_a_drafter_that_cannot_be_had(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    hub.add_repo("me/drafter", SMALL)
    hub.add_repo("me/gated", SMALL, gated=True)
    faults = {"me/overloaded": refused(503), "me/far": ConnectionError()}
    if name in faults:
        hub.refuses["model_info"] = faults[name]
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", name == "me/offline")
    name, _, revision = name.partition("@")
    with pytest.raises(UserError, match=rf"^'{name}' is no folder in {re.escape(os.getcwd())}, and .*{said}"):
        on_hub.fetch_drafter(name, revision or None)


def test_without_the_hub_cached_files_are_taken(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add_repo("me/drafter", SMALL)
    folder = on_hub.fetch_drafter("me/drafter")
    hub.refuses["model_info"] = refused(503)
    for said in ("note: the Hub does not serve 'me/drafter'; its cached files are taken\n", ""):
        assert on_hub.fetch_drafter("me/drafter") == folder and constants.HF_HUB_OFFLINE
        assert capsys.readouterr().err == said  # who is offline knows it


def test_half_of_the_shards_are_no_cached_drafter(hub: FakeHub) -> None:
    shards = {f"model-{i}-of-2.safetensors": os.urandom(1000) for i in (1, 2)}
    index = json.dumps({"weight_map": {name[6]: name for name in shards}}).encode()
    hub.add_repo("me/drafter", {"config.json": b"{}", "model.safetensors.index.json": index, **shards})
    hub.refuses["model-2-of-2.safetensors"] = refused(503)
    with pytest.raises(UserError, match=r"^me/drafter: the download broke off: .*503.*; try again, which continues"):
        on_hub.fetch_drafter("me/drafter")
    assert hub.downloaded and on_hub.cached("me/drafter", None) is None
    assert on_hub.fetch_drafter("me/drafter") == on_hub.cached("me/drafter", None)
    assert len(hub.downloaded) == 4  # each once


def test_weights_that_repositories_share_are_read(hub: FakeHub, checkpoint: Path, tmp_path: Path) -> None:
    """With Xet the cache's blob is a link to the content of all repositories."""
    hub.add_repo("me/drafter", files_of(checkpoint))
    folder = on_hub.fetch_drafter("me/drafter")
    blob = (folder / "model.safetensors").resolve()
    shared, outside = tmp_path / "cache/blobs/ab" / ("ab" * 32), tmp_path / "outside.safetensors"
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert read_folder(folder).tensors["fc.weight"].isfinite().all()
    shared.rename(outside)
    blob.unlink()
    blob.symlink_to(outside)
    with pytest.raises(UserError, match="a link that leads out of the folder"):
        read_folder(folder)


def test_the_embeddings_of_a_sharded_target_come_alone(hub: FakeHub, tmp_path: Path) -> None:
    hub.add_repo("org/target", files_of(save_target(tmp_path / "target", sharded=True)))
    table = target_of().embedding_table
    layout = {"embeddings": "model.embed_tokens.weight"}
    identity = {"model": "org/target", "embedding_digest": tensor_digest(table), "layout": layout}
    found = target_embeddings(identity)
    assert torch.equal(found, table)
    assert sum(name.endswith(".safetensors") for name in hub.downloaded) == 1


def test_the_hub_is_asked_once_for_a_target(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    check_model.cache_clear()
    with pytest.raises(UserError, match=r"^target\.model: 'nothere' is not a folder in .*, and the Hub has no model"):
        _ = TargetFiles(TargetSection(model="nothere", revision="v9")).tokenizer
    assert hub.asked == 1 and "asking the Hugging Face Hub" in capsys.readouterr().err
    hub.add_repo("org/model", SMALL)
    hub.snapshot_download("org/model", None, ["config.json"])
    hub.refuses["model_info"] = ConnectionError()
    before = hub.asked
    for _ in range(2):  # it is cached, and needs no Hub
        check_model("org/model", None)
    assert constants.HF_HUB_OFFLINE and "its cached files are taken" in capsys.readouterr().err
    assert hub.asked == before + 1


def test_datasets_without_a_network_end_at_once(
    hub: FakeHub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked: list[bool] = []

    def load(*_: Any, **__: Any) -> Any:
        asked.append(datasets_config.HF_HUB_OFFLINE)
        raise ConnectionError("Couldn't reach it")

    check_dataset.cache_clear()
    hub.refuses["dataset_info"] = ConnectionError()
    monkeypatch.setattr(datasets, "load_dataset", load)
    with pytest.raises(UserError, match=r"datasets cannot .*Couldn't reach it"):
        list(read_conversations("hf:org/name:train", Rejects()))
    assert asked == [True] and "the Hub cannot be reached" in capsys.readouterr().err
    check_dataset.cache_clear()
