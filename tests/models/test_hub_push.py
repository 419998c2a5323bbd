"""Exports that go to the Hub."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from draftsmith.models import export as script
from draftsmith.models.formats import hub as on_hub
from draftsmith.models.formats.exporting import FILES
from draftsmith.models.formats.folder import read_folder
from tests.models.hub_cases import CARD, FakeHub, files_of, refused
from tests.models.hub_cases import checkpoint as checkpoint
from tests.models.hub_cases import hub as hub
from tests.models.test_export_script import call

EXPORTED = b"---\ntags:\n- draftsmith\n---\n"
LLAMA = json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 32}).encode()
Export = Callable[..., tuple[int, str]]


@pytest.fixture
def export(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Export:
    """Exports to `tmp_path / "out"` by the script; returns its exit code and all that it printed."""

    def run(*options: str, to: str = "me/drafter") -> tuple[int, str]:
        own = ["--to", "vllm", "--out", str(tmp_path / "out"), "--push-to-hub", to]
        return call(monkeypatch, capsys, script.main, str(checkpoint), *own, *options)

    return run


def contents(folder: Path) -> dict[str, bytes]:
    return {name: content for name, content in files_of(folder).items() if name in FILES}


def test_a_push_is_one_private_commit_of_the_exports_own_files(hub: FakeHub, export: Export, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/.env").write_text("SECRET=1")
    code, said = export()
    assert code == 0 and re.search(rf"(?m)^uploaded +{hub.endpoint}/me/drafter$", said)
    repo = hub.repos["me/drafter"]
    _, (title, files) = repo.commits()
    assert repo.private and re.fullmatch(r"eagle3 drafter for [^\s/]+, by draftsmith \d+\.\d+\.\d+", title), title
    assert b"vllm serve /" not in files["README.md"]  # the target's own path is nobody's business
    assert files == contents(tmp_path / "out") and {"config.json", "model.safetensors", "README.md"} == files.keys()
    code, said = export()  # the same again
    assert code == 0 and "(the same files were there already)" in said and len(repo.commits()) == 2


def test_a_changed_folder_is_one_commit_of_what_changed(hub: FakeHub, export: Export, tmp_path: Path) -> None:
    export()
    out, repo = tmp_path / "out", hub.repos["me/drafter"]
    (out / "README.md").write_bytes(EXPORTED)
    (out / "speculation_profile.json").write_text("{}")
    on_hub.push(out, "me/drafter", True, None, "Measured")
    repo.commit("by hand", {"LICENSE": b"mine"})
    (out / "speculation_profile.json").unlink()  # an export without a measurement: the old numbers go, too
    on_hub.push(out, "me/drafter", True, None, "Not measured")
    assert [title for title, _ in repo.commits()[2:]] == ["Measured", "by hand", "Not measured"]
    assert repo.commits()[-1][1] == contents(out) | {"LICENSE": b"mine"}


def test_a_revision_is_a_branch_of_its_own(hub: FakeHub, export: Export) -> None:
    code, said = export("--revision", "v2/long")
    repo = hub.repos["me/drafter"]
    assert code == 0 and f"{hub.endpoint}/me/drafter/tree/v2/long" in said
    assert len(repo.commits()) == 1 and len(repo.commits("v2/long")) == 2


def test_who_may_see_it(hub: FakeHub, export: Export) -> None:
    code, _ = export("--public")
    assert code == 0 and not hub.repos["me/drafter"].private
    code, said = export()
    assert code == 2 and "this repository is public; pass --public" in said and "was not uploaded" in said
    hub.add_repo("me/hidden", {"README.md": CARD}, private=True)
    code, said = export("--public", to="me/hidden")
    assert code == 0 and "note: me/hidden is private and stays so" in said and hub.repos["me/hidden"].private


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
    code, said = export()
    assert (code, len(repo.commits())) == ((0, 3) if why is None else (2, 2))
    assert why is None or f"this repository holds {why}, and no card of an export; name another" in said


@pytest.mark.parametrize(
    ("method", "error", "said"),
    [
        ("create_repo", refused(429, "slow", headers={"Retry-After": "30"}), "too many requests .*; wait 30 s"),
        ("create_repo", refused(401, "no"), "wants a token"),
        ("model_info", refused(500, "out"), "out of order .500: out.; wait"),
        (
            "create_commit",
            refused(403, "the token hf_Secret may not"),
            "forbids it to this token.*the token <token> may",
        ),
        ("create_commit", refused(409, "in progress"), "somebody else .409: in progress."),
        ("create_commit", ConnectionError("cut"), "the upload broke off .ConnectionError: cut"),
    ],
)
def test_after_a_fault_the_same_command_again_completes_the_push(
    hub: FakeHub,
    export: Export,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    method: str,
    error: Exception,
    said: str,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_Secret")
    hub.refuses[method] = error
    code, printed = export()
    assert code == 2 and "Traceback" not in printed and "hf_Secret" not in printed
    assert re.search(rf"error: {re.escape(hub.endpoint)}/me/drafter: .*{said}", printed), printed
    assert f"{tmp_path}/out is complete; the same command again uploads what is missing" in printed
    read_folder(tmp_path / "out")
    code, printed = export()
    assert code == 0 and len(hub.repos["me/drafter"].commits()) == 2, printed


def test_a_commit_of_somebody_else_is_not_built_upon_unseen(
    hub: FakeHub, export: Export, monkeypatch: pytest.MonkeyPatch
) -> None:
    repo, create_commit = hub.add_repo("me/drafter", {"README.md": CARD}, private=True), hub.create_commit
    meanwhile = [lambda: repo.commit("x", {"x.txt": b""})]
    monkeypatch.setattr(
        hub,
        "create_commit",
        lambda *given, **named: ([each() for each in meanwhile], create_commit(*given, **named))[1],
    )
    for said in ("somebody else (412: A commit has happened since.", "this repository holds x.txt"):
        code, printed = export()
        assert code == 2 and said in printed
    assert [title for title, _ in repo.commits()] == ["initial commit", "Upload files", "x"]
