"""Drafters and targets from the Hub, exports that go there, and what is said where it cannot be had.

A `FakeHub` stands in the place of huggingface.co's client, with that client's own cache.
"""

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import datasets
import httpx
import huggingface_hub
import pytest
import torch
import transformers.utils.hub
from datasets import config as datasets_config
from huggingface_hub import CommitOperationAdd, constants
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from draftsmith.models.checkpoint import provenance
from draftsmith.models.formats import hub_push as on_hub
from draftsmith.models.formats.exporting import FILES, Source, target_embeddings
from draftsmith.models.formats.folder import read_folder
from draftsmith.models.target import tensor_digest
from draftsmith.models.target_files import TargetFiles
from draftsmith.recipes.errors import UserError
from draftsmith.recipes.files.hub_fetch import check_dataset, check_model
from draftsmith.recipes.prompts.prompt_reader import Rejects, read_conversations
from draftsmith.recipes.sections.target import TargetSection
from tests.evaluation_cases import save_untrained
from tests.export_cases import save_target, target_of
from tests.models.test_export import Call
from tests.models.test_export import call as call

CARD = b"---\nlicense: mit\n---\n"
Files = dict[str, bytes]


def refused(status: int, words: str = "", kind: type[HfHubHTTPError] = HfHubHTTPError) -> HfHubHTTPError:
    """The client's error for such an answer."""
    response: Any = httpx.Response(status, request=httpx.Request("GET", FakeHub.endpoint))
    return kind(words, response=response, server_message=words or None)


class Repo:
    """Branches of commits, oldest first: (title, files)."""

    def __init__(self, private: bool = False) -> None:
        self.private = private
        self.branches: dict[str, list[tuple[str, Files]]] = {"main": [("initial commit", {})]}

    def commits(self, branch: str = "main") -> list[tuple[str, Files]]:
        return self.branches[branch]

    def commit(self, title: str, files: Files) -> None:
        """Adds files to those that are there."""
        self.commits().append((title, self.commits()[-1][1] | files))

    def oid(self, branch: str = "main") -> str:
        return f"{branch}-{len(self.branches[branch]) - 1}"

    def at(self, revision: str) -> tuple[str, Files]:
        """(name, files) of a branch's last commit, or of one that is named."""
        if revision in self.branches:
            return self.oid(revision), self.commits(revision)[-1][1]
        branch, _, number = revision.rpartition("-")
        if branch not in self.branches:
            raise refused(404, kind=RevisionNotFoundError)
        return revision, self.commits(branch)[int(number)][1]


class FakeHub:
    """HfApi, and the functions that download. Whoever asks may read what is not private.

    Attributes:
        refuses: errors by the name of a method, each raised once.
        downloaded: names of the files.
    """

    endpoint = "https://hub.test"

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.refuses: dict[str, Exception] = {}
        self.asked, self.downloaded = 0, list[str]()

    def add_repo(self, name: str, files: Files, private: bool = False) -> Repo:
        self.repos[name] = Repo(private)
        self.repos[name].commit("Upload files", files)
        return self.repos[name]

    def _repo(self, name: str, method: str) -> Repo:
        self.asked += 1
        if constants.HF_HUB_OFFLINE:
            raise OfflineModeIsEnabled("offline mode is enabled")
        if method in self.refuses:
            raise self.refuses.pop(method)
        if name not in self.repos:
            raise refused(404, kind=RepositoryNotFoundError)
        return self.repos[name]

    # HfApi's.

    def create_repo(self, repo_id: str, private: bool, exist_ok: bool) -> None:
        self.repos.setdefault(repo_id, Repo(private))
        self._repo(repo_id, "create_repo")

    def create_branch(self, repo_id: str, branch: str, exist_ok: bool) -> None:
        repo = self._repo(repo_id, "create_branch")
        repo.branches.setdefault(branch, list(repo.commits()))

    def model_info(self, repo_id: str, revision: str | None = None, **_: Any) -> Any:
        huggingface_hub.utils.validate_repo_id(repo_id)
        repo = self._repo(repo_id, "model_info")
        oid, files = repo.at(revision or "main")
        siblings = [SimpleNamespace(rfilename=name, size=len(content)) for name, content in files.items()]
        return SimpleNamespace(sha=oid, private=repo.private, siblings=siblings)

    def dataset_info(self, name: str, **_: Any) -> None:
        self._repo(name, "dataset_info")

    def create_commit(
        self, repo_id: str, operations: Sequence[Any], commit_message: str, revision: str | None, parent_commit: str
    ) -> Any:
        repo, branch = self._repo(repo_id, "create_commit"), revision or "main"
        oid, files = repo.at(branch)
        if oid != parent_commit:
            raise refused(412, "A commit has happened since.")
        new = dict(files)
        for each in operations:
            if isinstance(each, CommitOperationAdd):
                new[each.path_in_repo] = Path(str(each.path_or_fileobj)).read_bytes()
            else:
                del new[each.path_in_repo]
        if new != files:
            repo.branches[branch].append((commit_message, new))
        return SimpleNamespace(oid=repo.oid(branch))

    def hf_hub_download(self, repo_id: str, filename: str, revision: str | None = None, **_: Any) -> str:
        return str(self.snapshot_download(repo_id, revision, [filename]) / filename)

    def snapshot_download(self, repo_id: str, revision: str | None = None, allow_patterns: Sequence[str] = ()) -> Path:
        """Into the layout of the client's cache."""
        repo = self._repo(repo_id, "model_info")
        oid, files = repo.at(revision or "main")
        place = Path(constants.HF_HUB_CACHE, "models--" + repo_id.replace("/", "--"))
        snapshot = place / "snapshots" / oid
        for folder in (snapshot, place / "refs", place / "blobs"):
            folder.mkdir(parents=True, exist_ok=True)
        (place / "refs" / (revision or "main")).write_text(oid)
        for name in allow_patterns:
            if name not in files:
                raise refused(404, kind=huggingface_hub.errors.EntryNotFoundError)
            if name in self.refuses:
                raise self.refuses.pop(name)
            if not (snapshot / name).exists():
                blob = place / "blobs" / f"{oid}-{name}"
                blob.write_bytes(files[name])
                (snapshot / name).symlink_to(blob)
                self.downloaded.append(name)
        return snapshot


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> FakeHub:
    hub, from_cache = FakeHub(), huggingface_hub.snapshot_download

    def download(repo_id: str, local_files_only: bool = False, **options: Any) -> Any:
        """The client itself looks into the cache."""
        if local_files_only:
            return from_cache(repo_id, local_files_only=True, **options)
        return hub.snapshot_download(repo_id, **options)

    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    for module in (huggingface_hub, transformers.utils.hub):
        monkeypatch.setattr(module, "hf_hub_download", hub.hf_hub_download)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets_config, "HF_HUB_OFFLINE", False)
    return hub


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory, target_dir: Path) -> Path:
    folder = save_untrained(tmp_path_factory.mktemp("run") / "drafter", target_dir)
    (folder / "provenance.json").write_text(json.dumps(provenance({})))
    return folder


def files_of(folder: Path) -> Files:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.is_file()}


# Fetching.

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
        ({"config.json": b"{}"}, "no config.json with"),
        (pickled, "a pickle: .* --allow-bin reads it"),
        (SMALL | {"recipe.yaml": b"0"}, "no drafter is that large"),
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
        ("me/offline", "HF_HUB_OFFLINE forbids"),
        ("me/far", "the Hub cannot be reached .ConnectionError"),
    ],
)
def test_a_drafter_that_cannot_be_had(hub: FakeHub, monkeypatch: pytest.MonkeyPatch, name: str, said: str) -> None:
    hub.add_repo("me/drafter", SMALL)
    if name in ("me/far", "me/gated"):
        hub.refuses["model_info"] = ConnectionError() if name == "me/far" else refused(403, kind=GatedRepoError)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", name == "me/offline")
    name, _, revision = name.partition("@")
    with pytest.raises(UserError, match=rf"^'{name}' is no folder in {re.escape(os.getcwd())}, and .*{said}"):
        on_hub.fetch_drafter(name, revision or None)


def test_without_the_hub_cached_files_are_taken(hub: FakeHub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.add_repo("me/drafter", SMALL)
    folder = on_hub.fetch_drafter("me/drafter")
    hub.refuses["model_info"] = refused(503)
    for noted in (True, False):  # who is offline knows it
        assert on_hub.fetch_drafter("me/drafter") == folder and constants.HF_HUB_OFFLINE
        assert ("its cached files are taken" in capsys.readouterr().err) is noted


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
    check_model("org/model", None)  # it is cached, and needs no Hub
    assert constants.HF_HUB_OFFLINE and "its cached files are taken" in capsys.readouterr().err


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


# Uploading.

EXPORTED = b"---\ntags:\n- draftsmith\n---\n"
LLAMA = json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}).encode()
Export = Callable[..., str]


@pytest.fixture
def export(checkpoint: Path, tmp_path: Path, call: Call) -> Export:
    """Exports to `tmp_path / "out"` by the script; returns all that it printed, or what it refused (code 2)."""

    def run(*options: str, to: str = "me/drafter", code: int = 0) -> str:
        own = ["--to", "vllm", "--out", str(tmp_path / "out"), "--push-to-hub", to]
        try:
            said = call(str(checkpoint), *own, *options)
        except UserError as error:
            assert code == 2, error
            return str(error)
        assert code == 0, said
        return said

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in files_of(folder).items() if name in FILES}


def test_a_push_is_one_private_commit_of_what_changed(hub: FakeHub, export: Export, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / ".env").write_text("SECRET=1")
    assert re.search(rf"(?m)^uploaded +{hub.endpoint}/me/drafter$", export())
    repo = hub.repos["me/drafter"]
    _, (title, files) = repo.commits()
    assert repo.private and re.fullmatch(r"eagle3 drafter for [^\s/]+, by draftsmith \d+\.\d+\.\d+", title), title
    assert b"vllm serve /" not in files["README.md"]  # the target's own path is nobody's business
    assert files == contents(out) and {"config.json", "model.safetensors", "README.md"} == files.keys()
    assert "(the same files were there already)" in export() and len(repo.commits()) == 2
    (out / "README.md").write_bytes(EXPORTED)
    (out / "speculation_profile.json").write_text("{}")
    on_hub.push(out, "me/drafter", True, None, "Measured")
    repo.commit("by hand", {"LICENSE": b"mine"})
    (out / "speculation_profile.json").unlink()  # an export without a measurement: the old numbers go, too
    on_hub.push(out, "me/drafter", True, None, "Not measured")
    assert [title for title, _ in repo.commits()[2:]] == ["Measured", "by hand", "Not measured"]
    assert repo.commits()[-1][1] == contents(out) | {"LICENSE": b"mine"}


def test_branches_and_who_may_see_it(hub: FakeHub, export: Export) -> None:
    assert f"{hub.endpoint}/me/drafter/tree/v2/long" in export("--public", "--revision", "v2/long")
    repo = hub.repos["me/drafter"]
    assert len(repo.commits()) == 1 and len(repo.commits("v2/long")) == 2 and not repo.private
    assert "this repository is public; pass --public" in export(code=2)
    hub.add_repo("me/hidden", {"README.md": CARD}, private=True)
    export("--public", to="me/hidden")
    assert hub.repos["me/hidden"].private


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({"README.md": CARD}, None),  # made on the website
        ({"README.md": EXPORTED, "config.json": LLAMA, "LICENSE": b"mine"}, None),
        ({"README.md": CARD, "config.json": LLAMA, "model.safetensors": b"0"}, "config.json, model.safetensors"),
        ({"README.md": CARD, "train.jsonl": b"{}"}, "train.jsonl"),
    ],
)
def test_other_content_is_not_overwritten(hub: FakeHub, export: Export, files: dict[str, bytes], why: str) -> None:
    repo = hub.add_repo("me/drafter", files, private=True)
    said = export(code=0 if why is None else 2)
    assert len(repo.commits()) == (3 if why is None else 2)
    assert why is None or f"this repository holds {why}, and no card of an export; name another" in said


@pytest.mark.parametrize(
    ("method", "error", "said"),
    [
        ("create_repo", refused(401, "no"), "wants a token"),
        ("model_info", refused(500, "out"), "out of order .500: out.; wait"),
        ("create_commit", refused(403, "the token hf_Secret may not"), "forbids it to this.*the token <token> may"),
        ("create_commit", refused(409, "in progress"), "somebody else .409: in progress."),
        ("create_commit", ConnectionError("cut"), "the upload broke off .ConnectionError: cut"),
    ],
)
def test_after_a_fault_the_same_command_again_completes_the_push(
    method: str, error: Exception, said: str, hub: FakeHub, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_Secret")
    hub.refuses[method] = error
    printed = export(code=2)
    assert "hf_Secret" not in printed
    assert re.search(rf"{re.escape(hub.endpoint)}/me/drafter: .*{said}", printed), printed
    assert "/out is complete; the same command again uploads what is missing" in printed
    export()
    assert len(hub.repos["me/drafter"].commits()) == 2


def test_a_commit_of_somebody_else_is_not_built_upon_unseen(
    hub: FakeHub, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, create_commit = hub.add_repo("me/drafter", {"README.md": CARD}, private=True), hub.create_commit

    def another_first(*given: object, **named: object) -> object:
        repo.commit("x", {"x.txt": b""})
        return create_commit(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(hub, "create_commit", another_first)
    for said in ("somebody else (412: A commit has happened since.", "this repository holds x.txt"):
        assert said in export(code=2)
    assert [title for title, _ in repo.commits()] == ["initial commit", "Upload files", "x"]
