"""Exports that go to the Hub and drafters that come from it, against a Hub on loopback."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from datasets import config as datasets_config
from huggingface_hub import constants

from draftsmith.models import export as script
from draftsmith.models.checkpoint import provenance
from draftsmith.models.formats import hub as on_hub
from draftsmith.models.formats.exporting import FILES, Source
from draftsmith.models.formats.folder import read_folder
from draftsmith.recipes.command import cli
from draftsmith.recipes.errors import UserError
from tests.compare_cases import save_untrained
from tests.hub_server import ATTRIBUTES, Fault, HubServer

TOKEN = "hf_ThisIsASecretThatNobodyMaySee"
READER = "hf_AnotherSecretThatMayOnlyRead"
CARD = b"---\nlicense: mit\n---\n"


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[HubServer]:
    """A Hub where `me` may write with the token that the environment holds.

    huggingface_hub reads the other variables when it is imported, so its constants are set in their place;
    `test_the_environment_alone` starts processes with the variables.
    """
    with HubServer() as server:
        server.add_user("me", TOKEN)
        server.add_user("reader", READER, may_write=False)
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


@pytest.fixture
def export(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Exports to `tmp_path / "out"` by the script; returns its exit code and all that it printed."""

    def run(*options: str, to: str = "me/drafter") -> tuple[int, str]:
        own = ["--to", "vllm", "--out", str(tmp_path / "out"), "--push-to-hub", to]
        monkeypatch.setattr(sys, "argv", ["export", str(checkpoint), *own, *options])
        code = 0
        try:
            cli.run(script.main)
        except SystemExit as end:
            code = int(end.code or 0)
        printed = capsys.readouterr()
        return code, printed.out + printed.err

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name in FILES}


# Pushing.


def test_a_push_is_one_private_commit_of_the_exports_own_files(
    hub: HubServer, export: Callable[..., tuple[int, str]], checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.env").write_text("SECRET=1")
    (tmp_path / "out/notes.txt").write_text("mine")
    code, said = export()
    assert code == 0 and f"uploaded    {hub.url}/me/drafter\n" in said
    repo = hub.repos["me/drafter"]
    assert repo.private and list(repo.branches) == ["main"]
    _, made = repo.commits()
    assert re.fullmatch(r"eagle3 drafter for \S+, by draftsmith \d+\.\d+\.\d+", made.title), made.title
    assert made.files == contents(tmp_path / "out") | {".gitattributes": ATTRIBUTES}
    assert {"config.json", "model.safetensors", "README.md"} < made.files.keys()
    assert (tmp_path / "out/notes.txt").read_text() == "mine"

    code, said = export()  # the same again: no commit, no upload
    assert code == 0 and "(the same files were there already)" in said
    assert len(repo.commits()) == 2 and hub.counted("PUT", "/storage/") == 1


def test_the_token_is_never_seen(hub: HubServer, export: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    """It goes to the Hub's own pages alone: not to the storage, not into output, files or commits."""
    _, said = export()
    hub.faults.append(Fault("POST", "/preupload/", 403, error=f"the token {TOKEN} may not do this"))
    (tmp_path / "out/README.md").write_text("changed")
    code, more = export()
    assert code == 2 and "the token <token> may not do this" in more
    assert TOKEN not in said + more
    written = [file for file in tmp_path.rglob("*") if file.is_file()]
    assert written and not any(TOKEN.encode() in file.read_bytes() for file in written)
    for commit in hub.repos["me/drafter"].commits():
        assert TOKEN not in commit.title and not any(TOKEN.encode() in each for each in commit.files.values())
    for asked in hub.asked:
        assert TOKEN.encode() not in asked.body and TOKEN not in asked.path
        assert asked.token == (None if asked.path.startswith("/storage/") else TOKEN), asked.path


def test_a_changed_folder_is_one_commit_of_what_changed(
    hub: HubServer, export: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    export()
    out, repo = tmp_path / "out", hub.repos["me/drafter"]
    (out / "README.md").write_text("# A card\n")
    (out / "speculation_profile.json").write_text("{}")
    on_hub.push(out, "me/drafter", True, None, "Measured")
    posted = [json.loads(line) for line in hub.asked[-1].body.splitlines()]
    assert hub.asked[-1].path == "/api/models/me/drafter/commit/main"
    assert posted[0]["value"] == {"summary": "Measured", "description": "", "parentCommit": repo.commits()[1].oid}
    assert [each["value"]["path"] for each in posted[1:]] == ["README.md", "speculation_profile.json"]

    hub._commit(repo, "main", "by hand", {"LICENSE": b"mine"})
    (out / "speculation_profile.json").unlink()  # an export without a measurement: the old numbers go, too
    on_hub.push(out, "me/drafter", True, None, "Not measured")
    last = repo.commits()[-1]
    assert last.title == "Not measured" and last.files == contents(out) | {
        ".gitattributes": ATTRIBUTES,
        "LICENSE": b"mine",
    }


def test_a_large_file_goes_in_parts(hub: HubServer, export: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    weights_bytes = 20_000
    hub.part_bytes = weights_bytes
    code, said = export()
    assert code == 0, said
    assert hub.counted("PUT", "/storage/") == -(-(tmp_path / "out/model.safetensors").stat().st_size // weights_bytes)
    assert (
        hub.repos["me/drafter"].commits()[-1].files["model.safetensors"]
        == (tmp_path / "out/model.safetensors").read_bytes()
    )


def test_a_revision_is_a_branch_of_its_own(hub: HubServer, export: Callable[..., tuple[int, str]]) -> None:
    code, said = export("--revision", "v2/long")
    repo = hub.repos["me/drafter"]
    assert code == 0 and f"{hub.url}/me/drafter/tree/v2/long" in said
    assert len(repo.commits()) == 1 and len(repo.commits("v2/long")) == 2
    hub._commit(repo, "main", "another model", {"config.json": json.dumps(LLAMA).encode()})
    code, said = export("--revision", "v2/long")
    assert code == 0 and "were there already" in said and len(repo.commits("v2/long")) == 2


def test_who_may_see_it(hub: HubServer, export: Callable[..., tuple[int, str]]) -> None:
    code, _ = export("--public")
    assert code == 0 and not hub.repos["me/drafter"].private
    code, said = export()
    assert code == 2 and "me/drafter: this repository is public; pass --public to upload to it" in said
    assert "was not uploaded" in said
    hub.add_repo("me/hidden", {}, private=True)
    code, said = export("--public", to="me/hidden")
    assert code == 0 and "note: me/hidden is private and stays so" in said and hub.repos["me/hidden"].private


LLAMA = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32, "attention_bias": False}
EAGLE = {"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 1, "bias": True}
SPECULATORS = {"architectures": ["Eagle3DraftModel"], "speculators_model_type": "eagle3"}


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, None),
        ({"README.md": CARD}, None),  # made on the website
        ({"config.json": json.dumps(EAGLE).encode()}, None),
        ({"config.json": json.dumps(SPECULATORS).encode(), "LICENSE": b"mine"}, None),
        ({"config.json": b'{"kind": "eagle3", "drafter": {}, "target": {}}'}, None),
        (
            {"config.json": json.dumps(LLAMA).encode(), "model.safetensors": b"0"},
            "a config.json that is not a drafter's",
        ),
        ({"config.json": b"{"}, "a config.json that cannot be read"),
        ({"config.json": b"[]"}, "a config.json that is not a drafter's"),
        ({"config.json": json.dumps(EAGLE).encode(), "model-1-of-2.safetensors": b"0"}, "model-1-of-2.safetensors"),
        ({"README.md": CARD, "train.jsonl": b"{}"}, "train.jsonl"),
    ],
)
def test_other_content_is_not_overwritten(
    hub: HubServer, export: Callable[..., tuple[int, str]], files: dict[str, bytes], why: str | None
) -> None:
    repo = hub.add_repo("me/drafter", files, private=True)
    before = repo.commits()[:]
    code, said = export()
    if why is None:
        assert code == 0 and len(repo.commits()) == len(before) + 1, said
    else:
        assert code == 2 and f"me/drafter: this repository holds {why}; name another one" in said
        assert repo.commits() == before and hub.counted("PUT", "") == 0


def test_every_export_is_known_as_a_drafters(checkpoint: Path) -> None:
    """A second push finds the first one's config.json."""
    from draftsmith.models.formats.exporting import able_engines, write

    source = Source.read(checkpoint)
    for engine in able_engines(source):
        folder = checkpoint.parent / engine.name
        folder.mkdir()
        write(source, engine, folder, None)
        assert on_hub.is_drafter(json.loads((folder / "config.json").read_text())), engine.name


@pytest.mark.parametrize("name", ["drafter", "me/a/b", "me/", "me/a--b", "me/dräfter"])
def test_a_name_that_the_hub_could_not_have(hub: HubServer, export: Callable[..., tuple[int, str]], name: str) -> None:
    code, said = export(to=name)
    assert code == 2 and f"error: --push-to-hub {name}: " in said and "wrote" not in said and hub.asked == []


STORAGE = "/storage/[0-9a-f]{64}$"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (
            Fault("POST", "/repos/create", 401, error="Invalid username"),
            "refuses the token .401: Invalid username.; run `hf",
        ),
        (Fault("POST", "/repos/create", 403, error="No rights"), "forbids it to this token .403: No rights."),
        (Fault("POST", "/repos/create", 409, error="renamed"), "somebody else .409: renamed."),
        (Fault("POST", "/repos/create", 402, error="Pay"), "the Hub answers 402: Pay"),
        (Fault("POST", "/repos/create", 429, headers={"Retry-After": "30"}), "too many requests .*; wait 30 s"),
        (Fault("POST", "/repos/create", None), "the upload broke off"),
        (Fault("GET", "/api/models/", 500), "out of order .500: out of order.; wait"),
        (Fault("POST", "/validate-yaml", 504), "out of order .504: out of order.; wait"),
        (Fault("POST", "/preupload/", 403), "forbids it to this token"),
        (Fault("POST", "/objects/batch", 403, error="LFS is full"), "403: LFS is full"),
        (Fault("PUT", STORAGE, 403, error="Request has expired"), "403: Request has expired"),
        (Fault("POST", "/lfs/verify", 404, error="no such object"), "the Hub answers 404: no such object"),
        (Fault("POST", "/commit/", 401, error="expired"), "refuses the token .401: expired."),
        (Fault("POST", "/commit/", 409, error="in progress"), "somebody else .409: in progress."),
        (Fault("POST", "/commit/", 429), "too many requests .*; wait a few minutes"),
        (Fault("POST", "/commit/", 503), "out of order .503"),
        (Fault("POST", "/commit/", None), "the upload broke off"),
        (Fault("POST", "/commit/", None, after=True), "the upload broke off"),  # the answer is lost
    ],
    ids=lambda value: f"{value.path} {value.status}{' after' * value.after}" if isinstance(value, Fault) else "",
)
def test_after_a_fault_the_same_command_again_completes_the_push(
    hub: HubServer, export: Callable[..., tuple[int, str]], tmp_path: Path, fault: Fault, said: str
) -> None:
    hub.faults.append(replace(fault))  # it counts down
    code, printed = export()
    assert code == 2 and "Traceback" not in printed
    assert re.search(rf"error: {re.escape(hub.url)}/me/drafter: .*{said}", printed), printed
    assert f"{tmp_path}/out is complete; the same command again uploads what is missing" in printed
    before = contents(tmp_path / "out")
    read_folder(tmp_path / "out")

    code, printed = export()
    assert code == 0, printed
    assert contents(tmp_path / "out") == before
    commits = hub.repos["me/drafter"].commits()
    assert len(commits) == 2 and commits[-1].files == before | {".gitattributes": ATTRIBUTES}
    stored_twice = hub.counted("PUT", STORAGE) - (fault.method == "PUT")
    assert stored_twice == 1


@pytest.mark.parametrize("status", [None, 500], ids=["cut", "500"])
def test_the_storage_is_tried_again_at_once(
    hub: HubServer, export: Callable[..., tuple[int, str]], status: int | None
) -> None:
    hub.faults.append(Fault("PUT", STORAGE, status))
    code, _ = export()
    assert code == 0 and hub.counted("PUT", STORAGE) == 2 and len(hub.repos["me/drafter"].commits()) == 2


def test_a_commit_of_somebody_else_is_not_built_upon_unseen(
    hub: HubServer, export: Callable[..., tuple[int, str]]
) -> None:
    repo = hub.add_repo("me/drafter", {}, private=True)
    other = Fault("POST", "/preupload/", 0, meanwhile=lambda: hub._commit(repo, "main", "x", {"x.txt": b""}))
    hub.faults.append(other)
    code, said = export()
    assert code == 2 and "somebody else (412: A commit has happened since." in said
    assert [commit.title for commit in repo.commits()] == ["initial commit", "x"]
    code, said = export()
    assert code == 2 and "this repository holds x.txt" in said


def test_tokens_that_may_not(
    hub: HubServer, export: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", READER)
    code, said = export()
    assert code == 2 and "forbids it to this token (403: You don't have the rights" in said
    monkeypatch.setenv("HF_TOKEN", "hf_unknown")
    code, said = export()
    assert code == 2 and "refuses the token (401: Invalid credentials" in said and "hf_unknown" not in said
    monkeypatch.delenv("HF_TOKEN")
    code, said = export()
    assert code == 2 and "wants a token (401: Invalid username or password.); run `hf auth login`, or set HF_T" in said
    assert hub.repos == {}


def test_a_card_that_the_hub_refuses(hub: HubServer, export: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    export()
    (tmp_path / "out/README.md").write_text("---\nbase_model: /my/own/model\n---\n")
    with pytest.raises(UserError, match=r'the Hub answers 400: "base_model" with value is not valid'):
        on_hub.push(tmp_path / "out", "me/drafter", True, None, "x")
    assert len(hub.repos["me/drafter"].commits()) == 2


def test_offline(hub: HubServer, export: Callable[..., tuple[int, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    code, said = export()
    assert code == 2 and "offline mode is enabled" in said and hub.asked == []


# Fetching.


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
    folder = on_hub.fetch("me/drafter")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == ours
    assert Source.read(folder).shape == Source.read(checkpoint).shape
    downloads = hub.counted("GET", "/resolve/")
    assert downloads == sum(len(content) > 0 for content in ours.values())
    assert on_hub.fetch("me/drafter") == folder and hub.counted("GET", "/resolve/") == downloads


def test_shards_and_revisions(hub: HubServer) -> None:
    repo = hub.add_repo("me/drafter", {"config.json": b"{}", "model.safetensors": b"old"})
    first = repo.commits()[-1].oid
    shards = {"model.safetensors.index.json": b"{}", "model-1-of-2.safetensors": b"1", "model-2-of-2.safetensors": b"2"}
    hub._commit(repo, "main", "shards", {"model.safetensors": None, **shards})
    assert {file.name for file in on_hub.fetch("me/drafter").iterdir()} == {"config.json", *shards}
    assert (on_hub.fetch("me/drafter", first) / "model.safetensors").read_bytes() == b"old"


def test_a_pickle_is_fetched_on_request_alone(hub: HubServer) -> None:
    hub.add_repo("me/drafter", {"config.json": b"{}", "pytorch_model.bin": b"0"})
    with pytest.raises(UserError, match=r"no config.json with safetensors .* a pickle: .* --allow-bin reads it"):
        on_hub.fetch("me/drafter")
    assert hub.counted("GET", "/resolve/") == 0
    assert (on_hub.fetch("me/drafter", allow_bin=True) / "pytorch_model.bin").read_bytes() == b"0"


@pytest.mark.parametrize("files", [{}, {"config.json": b"{}"}, {"model.safetensors": b"0"}, {"d/config.json": b"{}"}])
def test_a_repository_without_a_drafter(hub: HubServer, files: dict[str, bytes]) -> None:
    hub.add_repo("me/drafter", files)
    with pytest.raises(UserError, match=r"^me/drafter: this repository of the Hub has no config.json with safetensors"):
        on_hub.fetch("me/drafter")


def test_sizes_are_told_before_the_download(
    hub: HubServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.add_repo("me/drafter", {"config.json": b"{}", "model.safetensors": b"0" * 6_000_000})
    monkeypatch.setattr(on_hub, "MOST_BYTES", 5_000_000)
    with pytest.raises(UserError, match=r"^me/drafter: 0 GB, and no drafter is that large; is it a target\?"):
        on_hub.fetch("me/drafter")
    assert hub.counted("GET", "/resolve/") == 0
    monkeypatch.setattr(on_hub, "MOST_BYTES", 10**9)
    monkeypatch.setattr(on_hub, "TOLD_BYTES", 5_000_000)
    on_hub.fetch("me/drafter")
    assert "me/drafter: 0.0 GB to download from the Hugging Face Hub\n" in capsys.readouterr().err
    on_hub.fetch("me/drafter")
    assert "to download" not in capsys.readouterr().err


def nobody(hub: HubServer, patch: pytest.MonkeyPatch) -> None:
    patch.delenv("HF_TOKEN")


def stranger(hub: HubServer, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_TOKEN", READER)


def unknown(hub: HubServer, patch: pytest.MonkeyPatch) -> None:
    patch.setenv("HF_TOKEN", "hf_unknown")


def offline(hub: HubServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(constants, "HF_HUB_OFFLINE", True)


def unreachable(hub: HubServer, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(constants, "ENDPOINT", "http://127.0.0.1:1")


def overloaded(hub: HubServer, patch: pytest.MonkeyPatch) -> None:
    hub.faults.append(Fault("GET", "/api/", 503, times=9))


def cut(hub: HubServer, patch: pytest.MonkeyPatch) -> None:
    hub.faults.append(Fault("GET", "/api/", None, times=9))


def nothing(hub: HubServer, patch: pytest.MonkeyPatch) -> None:
    pass


@pytest.mark.parametrize(
    ("change", "name", "said"),
    [
        (nothing, "me/nothere", "the Hub has no model of this name that you may read; check the spelling"),
        (nobody, "me/private", "the Hub has no model of this name that you may read; .* or run `hf auth login` for a"),
        (stranger, "me/private", "the Hub has no model of this name that you may read"),
        (unknown, "me/drafter", "the Hub refuses the token .401: Invalid credentials.*; run `hf auth login`"),
        (nobody, "me/gated", "the Hub asks you to accept its licence first"),
        (stranger, "me/gated", "the Hub asks you to accept its licence first"),
        (nothing, "me/drafter@v9", "the Hub has no revision 'v9' of it"),
        (offline, "me/drafter", "not in the Hub's cache, and HF_HUB_OFFLINE forbids asking the Hub"),
        (unreachable, "me/drafter", "the Hub cannot be reached .ConnectError: .*; name a folder, or try again"),
        (cut, "me/drafter", "the Hub cannot be reached .RemoteProtocolError"),
        (overloaded, "me/drafter", "the Hub is out of order .503: out of order.; wait a few minutes"),
        (nothing, "me/a--b", "no name that a model of the Hub could have"),
    ],
)
def test_a_drafter_that_cannot_be_had(
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    change: Callable[[HubServer, pytest.MonkeyPatch], None],
    name: str,
    said: str,
) -> None:
    files = {"config.json": b"{}", "model.safetensors": b"0"}
    hub.add_repo("me/drafter", files)
    hub.add_repo("me/private", files, private=True)
    hub.add_repo("me/gated", files, gated=True)
    change(hub, monkeypatch)
    name, _, revision = name.partition("@")
    with pytest.raises(UserError, match=rf"^'{name}' is no folder in {re.escape(os.getcwd())}, and {said}") as told:
        on_hub.fetch(name, revision or None)
    assert "hf_unknown" not in str(told.value)


@pytest.mark.parametrize("change", [offline, unreachable, overloaded])
@pytest.mark.parametrize("revision", [None, "main", "commit"])
def test_without_the_hub_cached_files_are_taken(
    hub: HubServer,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    change: Callable[[HubServer, pytest.MonkeyPatch], None],
    revision: str | None,
) -> None:
    repo = hub.add_repo("me/drafter", {"config.json": b"{}", "model.safetensors": b"0", "README.md": CARD})
    revision = repo.commits()[-1].oid if revision == "commit" else revision
    folder = on_hub.fetch("me/drafter", revision)
    change(hub, monkeypatch)
    capsys.readouterr()
    assert on_hub.fetch("me/drafter", revision) == folder
    assert constants.HF_HUB_OFFLINE
    told = "note: the Hub does not serve 'me/drafter'; its cached files are taken\n"
    assert capsys.readouterr().err == ("" if change is offline else told)  # who is offline knows it


def test_a_download_that_breaks_off_is_continued(hub: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = os.urandom(3_000_000)
    hub.add_repo("me/drafter", {"config.json": b"{}", "model.safetensors": weights})
    hub.faults.append(Fault("GET", "/resolve/.*/model.safetensors", None, after=True, sent=1_000_000))
    hub.faults.append(Fault("GET", "/resolve/.*/model.safetensors", 503))
    with pytest.raises(UserError, match=r"^me/drafter: the download broke off: .*503.*; try again, which continues it"):
        on_hub.fetch("me/drafter")
    offline(hub, monkeypatch)
    with pytest.raises(UserError, match="not in the Hub's cache"):  # half a download is none
        on_hub.fetch("me/drafter")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    assert (on_hub.fetch("me/drafter") / "model.safetensors").read_bytes() == weights


def test_weights_that_repositories_share_are_read(hub: HubServer, checkpoint: Path, tmp_path: Path) -> None:
    """With Xet the cache's blob is a link to the content of all repositories."""
    hub.add_repo("me/drafter", drafter_files(checkpoint))
    folder = on_hub.fetch("me/drafter")
    blob = (folder / "model.safetensors").resolve()
    shared = tmp_path / "cache/blobs/ab" / ("ab" * 32)
    shared.parent.mkdir(parents=True)
    blob.rename(shared)
    blob.symlink_to(os.path.relpath(shared, blob.parent))
    assert read_folder(folder).tensor("fc.weight").isfinite().all()
    outside = tmp_path / "outside.safetensors"
    shared.rename(outside)
    blob.unlink()
    blob.symlink_to(outside)
    with pytest.raises(UserError, match="a link that leads out of the folder"):
        read_folder(folder)


def test_the_environment_alone(hub: HubServer, checkpoint: Path, tmp_path: Path) -> None:
    """As users set it: HF_ENDPOINT and HF_HUB_DISABLE_XET, and a token that `hf auth login` has saved."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
    environment |= {"HF_ENDPOINT": hub.url, "HF_HUB_DISABLE_XET": "1", "HF_HOME": str(tmp_path / "home")}
    (tmp_path / "home").mkdir()
    (tmp_path / "home/token").write_text(TOKEN)
    arguments = [str(checkpoint), "--to", "vllm", "--out", str(tmp_path / "out"), "--push-to-hub", "me/drafter"]
    program = f"""
import sys
from draftsmith.recipes.command.cli import run
from draftsmith.models import export
from draftsmith.models.formats import hub
sys.argv = {["export", *arguments]!r}
run(export.main)
folder = hub.fetch("me/drafter")
assert (folder / "model.safetensors").read_bytes() == open({str(tmp_path / "out/model.safetensors")!r}, "rb").read()
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"uploaded    {hub.url}/me/drafter" in done.stdout
    assert re.search(r"model\.safetensors: 100%", done.stderr), done.stderr  # the client's own bar
    assert TOKEN not in done.stdout + done.stderr
    assert hub.repos["me/drafter"].commits()[-1].files.keys() == {*contents(tmp_path / "out"), ".gitattributes"}
