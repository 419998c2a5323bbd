"""Exports that go to the Hub."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.models.formats import hub_push as on_hub
from draftsmith.models.formats.exporting import FILES
from draftsmith.models.formats.folder import read_folder
from tests.models.hub_cases import CARD, FakeHub, files_of, refused
from tests.models.hub_cases import checkpoint as checkpoint
from tests.models.hub_cases import hub as hub
from tests.models.test_export_script import Call
from tests.models.test_export_script import call as call

EXPORTED = b"---\ntags:\n- draftsmith\n---\n"
LLAMA = json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}).encode()
Export = Callable[..., str]


@pytest.fixture
def export(checkpoint: Path, tmp_path: Path, call: Call) -> Export:
    """Exports to `tmp_path / "out"` by the script; returns all that it printed."""

    def run(*options: str, to: str = "me/drafter", code: int = 0) -> str:
        own = ["--to", "vllm", "--out", str(tmp_path / "out"), "--push-to-hub", to]
        return call(str(checkpoint), *own, *options, code=code)

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
    said = export(code=2)
    assert "this repository is public; pass --public" in said and "was not uploaded" in said
    hub.add_repo("me/hidden", {"README.md": CARD}, private=True)
    assert "note: me/hidden is private and stays so" in export("--public", to="me/hidden")
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
        ("create_repo", refused(429, "slow", headers={"Retry-After": "30"}), "too many requests .*; wait 30 s"),
        ("create_repo", refused(401, "no"), "wants a token"),
        ("model_info", refused(500, "out"), "out of order .500: out.; wait"),
        ("create_commit", refused(403, "the token hf_Secret may not"), "forbids it to this.*the token <token> may"),
        ("create_commit", refused(409, "in progress"), "somebody else .409: in progress."),
        ("create_commit", ConnectionError("cut"), "the upload broke off .ConnectionError: cut"),
    ],
)
def test_after_a_fault_the_same_command_again_completes_the_push(
    method: str,
    error: Exception,
    said: str,
    hub: FakeHub,
    export: Export,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_Secret")
    hub.refuses[method] = error
    printed = export(code=2)
    assert "hf_Secret" not in printed
    assert re.search(rf"error: {re.escape(hub.endpoint)}/me/drafter: .*{said}", printed), printed
    assert f"{tmp_path}/out is complete; the same command again uploads what is missing" in printed
    read_folder(tmp_path / "out")
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
