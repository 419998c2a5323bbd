"""A Hub in the place of huggingface.co's client, with that client's own cache, and a drafter to upload."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import huggingface_hub
import pytest
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
from tests.compare_cases import save_untrained

CARD = b"---\nlicense: mit\n---\n"
Files = dict[str, bytes]


def refused(
    status: int, words: str = "", kind: type[HfHubHTTPError] = HfHubHTTPError, headers: dict[str, str] | None = None
) -> HfHubHTTPError:
    """The client's error for such an answer."""
    response: Any = httpx.Response(status, headers=headers, request=httpx.Request("GET", FakeHub.endpoint))
    return kind(words, response=response, server_message=words or None)


class Repo:
    """Branches of commits, oldest first: (title, files)."""

    def __init__(self, private: bool = False, gated: bool = False) -> None:
        self.private, self.gated = private, gated
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

    def add_repo(self, name: str, files: Files, private: bool = False, gated: bool = False) -> Repo:
        self.repos[name] = Repo(private, gated)
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
        if repo.gated:
            raise refused(403, kind=GatedRepoError)
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
