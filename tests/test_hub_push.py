"""Exports that go to the Hub, against a Hub on loopback."""

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from draftsmith.models import export as script
from draftsmith.models.formats import hub as on_hub
from draftsmith.models.formats.exporting import FILES
from draftsmith.models.formats.folder import read_folder
from tests.hub_cases import CARD, TOKEN
from tests.hub_cases import checkpoint as checkpoint
from tests.hub_cases import hub as hub
from tests.hub_server import ATTRIBUTES, Fault, HubServer
from tests.test_export_script import call

EXPORTED = b"---\ntags:\n- draftsmith\n---\n"


@pytest.fixture
def export(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Exports to `tmp_path / "out"` by the script; returns its exit code and all that it printed."""

    def run(*options: str, to: str = "me/drafter") -> tuple[int, str]:
        own = ["--to", "vllm", "--out", str(tmp_path / "out"), "--push-to-hub", to]
        return call(monkeypatch, capsys, script.main, str(checkpoint), *own, *options)

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir() if file.name in FILES}


def test_a_push_is_one_private_commit_of_the_exports_own_files(
    hub: HubServer, export: Callable[..., tuple[int, str]], checkpoint: Path, tmp_path: Path
) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.env").write_text("SECRET=1")
    (tmp_path / "out/notes.txt").write_text("mine")
    code, said = export()
    assert code == 0 and re.search(rf"(?m)^uploaded +{hub.url}/me/drafter$", said)
    repo = hub.repos["me/drafter"]
    assert repo.private and list(repo.branches) == ["main"]
    _, made = repo.commits()
    assert re.fullmatch(r"eagle3 drafter for [^\s/]+, by draftsmith \d+\.\d+\.\d+", made.title), made.title
    assert b"vllm serve /" not in made.files["README.md"]  # the target's own path is nobody's business
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
    (out / "README.md").write_bytes(EXPORTED)
    (out / "speculation_profile.json").write_text("{}")
    on_hub.push(out, "me/drafter", True, None, "Measured")
    posted = [json.loads(line) for line in hub.asked[-1].body.splitlines()]
    assert hub.asked[-1].path == "/api/models/me/drafter/commit/main"
    assert posted[0]["value"] == {"summary": "Measured", "description": "", "parentCommit": repo.commits()[1].oid}
    assert [each["value"]["path"] for each in posted[1:]] == ["README.md", "speculation_profile.json"]

    repo.commit("by hand", {"LICENSE": b"mine"})
    (out / "speculation_profile.json").unlink()  # an export without a measurement: the old numbers go, too
    on_hub.push(out, "me/drafter", True, None, "Not measured")
    last = repo.commits()[-1]
    assert last.title == "Not measured" and last.files == contents(out) | {
        ".gitattributes": ATTRIBUTES,
        "LICENSE": b"mine",
    }


def test_a_revision_is_a_branch_of_its_own(hub: HubServer, export: Callable[..., tuple[int, str]]) -> None:
    code, said = export("--revision", "v2/long")
    repo = hub.repos["me/drafter"]
    assert code == 0 and f"{hub.url}/me/drafter/tree/v2/long" in said
    assert len(repo.commits()) == 1 and len(repo.commits("v2/long")) == 2
    repo.commit("another model", {"config.json": LLAMA})
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


LLAMA = json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}).encode()


@pytest.mark.parametrize(
    ("files", "why"),
    [
        ({}, None),
        ({"README.md": EXPORTED, "config.json": LLAMA, "LICENSE": b"mine"}, None),
        ({"README.md": CARD, "config.json": LLAMA, "model.safetensors": b"0"}, "config.json, model.safetensors"),
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
        assert code == 2 and f"holds {why}, and no card of an export" in said
        assert repo.commits() == before and hub.counted("PUT", "") == 0


@pytest.mark.parametrize("name", ["drafter", "me/a/b", "me/", "me/dräfter"])
def test_a_name_that_the_hub_could_not_have(hub: HubServer, export: Callable[..., tuple[int, str]], name: str) -> None:
    code, said = export(to=name)
    assert code == 2 and f"error: --push-to-hub {name}: " in said and "wrote" not in said and hub.asked == []


STORAGE = "/storage/[0-9a-f]{64}$"


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        (Fault("POST", "/repos/create", 402, error="Pay"), "the Hub answers 402: Pay"),
        (Fault("POST", "/repos/create", 429, headers={"Retry-After": "30"}), "too many requests .*; wait 30 s"),
        (Fault("GET", "/api/models/", 500), "out of order"),
        (Fault("POST", "/preupload/", 403), "forbids it to this token"),
        (Fault("POST", "/preupload/", 401), "refuses the token"),
        (Fault("PUT", STORAGE, 403, error="Request has expired"), "403: Request has expired"),
        (Fault("POST", "/commit/", 409, error="in progress"), "somebody else .409: in progress."),
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
