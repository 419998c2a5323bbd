"""A Hugging Face Hub on loopback: the requests that huggingface_hub makes to upload and download models, over HTTP.

    with HubServer() as hub:
        hub.add_user("me", "hf_secret")
        hub.faults.append(Fault("POST", "/commit/", 503))      # the next such request fails
        ...                                                    # HF_ENDPOINT=hub.url
        assert hub.repos["me/drafter"].commits("main")[-1].files.keys() == {...}

Repositories are branches of commits; a commit is a title and files. Weights (*.safetensors, *.bin) go through LFS:
batch, PUT to a storage address without the token, verify. Xet is not spoken, so clients run with HF_HUB_DISABLE_XET=1.
Status codes, headers and bodies are those of huggingface.co.
"""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

import yaml

LFS_NAMES = re.compile(r"\.(safetensors|bin)$")
ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n*.bin filter=lfs diff=lfs merge=lfs -text\n"
Files = dict[str, bytes]


@dataclass(frozen=True)
class Commit:
    title: str
    files: Files
    parent: str | None

    @property
    def oid(self) -> str:
        names = [f"{name} {hashlib.sha256(content).hexdigest()}" for name, content in sorted(self.files.items())]
        return hashlib.sha1(repr((self.title, names, self.parent)).encode()).hexdigest()


@dataclass
class Repo:
    private: bool
    branches: dict[str, list[Commit]]
    gated: bool = False

    def commits(self, branch: str = "main") -> list[Commit]:
        """Oldest first; the first one is the Hub's own, with .gitattributes."""
        return self.branches[branch]

    def at(self, revision: str) -> Commit | None:
        if revision in self.branches:
            return self.branches[revision][-1]
        return next((each for commits in self.branches.values() for each in commits if each.oid == revision), None)


@dataclass
class Fault:
    """What happens to the next `times` requests whose method and path match."""

    method: str
    path: str  # regular expression
    status: int | None  # None: the connection is cut
    times: int = 1
    error: str = "out of order"
    headers: dict[str, str] = field(default_factory=dict)
    after: bool = False  # the request is carried out, and its answer is lost or replaced
    sent: int = 0  # bytes of the body that leave before a cut
    meanwhile: Callable[[], object] | None = None  # happens just before; the request is then answered as usual


@dataclass(frozen=True)
class Asked:
    """A request that was made."""

    method: str
    path: str
    token: str | None
    body: bytes


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes
    headers: dict[str, str]


def _json(content: Any, status: int = 200, **headers: str) -> Answer:
    kept = {"Content-Type": "application/json", **{name.replace("_", "-"): value for name, value in headers.items()}}
    return Answer(status, json.dumps(content).encode(), kept)


def _error(status: int, message: str, code: str | None = None) -> Answer:
    named = {"X_Error_Code": code} if code else {}
    return _json({"error": message}, status, X_Error_Message=message, **named)


def git_oid(content: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class HubServer:
    """The server and all that it holds; a test reads and changes it directly.

    Args:
        part_bytes: LFS files above this are uploaded in parts; None: in one.
    """

    def __init__(self, part_bytes: int | None = None) -> None:
        self.part_bytes = part_bytes
        self.repos: dict[str, Repo] = {}
        self.users: dict[str, tuple[str, bool]] = {}  # token -> (name, may write)
        self.stored: Files = {}  # LFS content by sha256
        self.parts: dict[tuple[str, int], bytes] = {}
        self.asked: list[Asked] = []
        self.faults: list[Fault] = []
        self.lock = threading.RLock()
        handler = type("Handler", (_Handler,), {"hub": self})
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self.http.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.http.shutdown()
        self.http.server_close()

    def add_user(self, name: str, token: str, may_write: bool = True) -> None:
        self.users[token] = (name, may_write)

    def add_repo(self, name: str, files: Files, private: bool = False, gated: bool = False) -> Repo:
        """A repository with one commit of its own, or with none if there are no files."""
        start = Commit("initial commit", {".gitattributes": ATTRIBUTES}, None)
        repo = self.repos[name] = Repo(private, {"main": [start]}, gated)
        if files:
            self._commit(repo, "main", "Upload files", files)
        return repo

    def counted(self, method: str, path: str) -> int:
        """Requests of a method whose path matches."""
        return sum(each.method == method and re.search(path, each.path) is not None for each in self.asked)

    def _commit(self, repo: Repo, branch: str, title: str, changed: Mapping[str, bytes | None]) -> Commit:
        last = repo.branches[branch][-1]
        files = {**last.files, **changed}
        kept = {name: content for name, content in files.items() if content is not None}
        repo.branches[branch].append(Commit(title, kept, last.oid))
        return repo.branches[branch][-1]

    # Requests.

    def answer(self, asked: Asked, query: str) -> Answer:
        routes: list[tuple[str, str, Callable[..., Answer]]] = [
            ("POST", r"/api/repos/create", self._create),
            ("POST", r"/api/validate-yaml", self._validate),
            ("GET", r"/api/models/([^/]+/[^/]+)", self._info),
            ("GET", r"/api/models/([^/]+/[^/]+)/revision/([^/]+)", self._info),
            ("GET", r"/api/models/([^/]+/[^/]+)/tree/([^/]+)", self._tree),
            ("POST", r"/api/models/([^/]+/[^/]+)/branch/([^/]+)", self._branch),
            ("POST", r"/api/models/([^/]+/[^/]+)/preupload/([^/]+)", self._preupload),
            ("POST", r"/api/models/([^/]+/[^/]+)/commit/([^/]+)", self._post_commit),
            ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/objects/batch", self._batch),
            ("POST", r"/([^/]+/[^/]+)\.git/info/lfs/verify", self._verify),
            ("PUT", r"/storage/([0-9a-f]{64})(?:/([0-9]+))?", self._put),
            ("POST", r"/storage/([0-9a-f]{64})/complete", self._complete),
            ("GET|HEAD", r"/([^/]+/[^/]+)/resolve/([^/]+)/(.+)", self._resolve),
        ]
        for methods, path, route in routes:
            match = re.fullmatch(path, asked.path)
            if match and asked.method in methods.split("|"):
                return route(asked, *(unquote(each) for each in match.groups() if each is not None))
        return _error(404, f"no such page: {asked.method} {asked.path}?{query}")

    def _user(self, asked: Asked) -> str | None:
        return self.users[asked.token][0] if asked.token in self.users else None

    def _wrong_token(self, asked: Asked) -> Answer | None:
        wrong = asked.token is not None and asked.token not in self.users
        return _error(401, "Invalid credentials in Authorization header") if wrong else None

    def _refused(self, asked: Asked, name: str, write: bool = False, content: bool = False) -> Answer | None:
        """The answer to somebody who may not do that; None: he may."""
        repo, user = self.repos.get(name), self._user(asked)
        owner = name.split("/")[0]
        if wrong := self._wrong_token(asked):
            return wrong
        if repo is None or (repo.private and user != owner):
            if user is None:  # the Hub does not tell strangers what exists
                # The Hub sends no code; its client takes such a 401 for a missing repository, but on https alone.
                return _error(401, "Invalid username or password.", "RepoNotFound")
            return _error(404, "Repository not found", "RepoNotFound")
        if content and repo.gated and user != owner:
            words = (
                f"Access to model {name} is restricted. You must have access to it and be authenticated to access it."
            )
            return _error(401 if user is None else 403, words, "GatedRepo")
        return self._read_only(asked, owner) if write else None

    def _read_only(self, asked: Asked, owner: str) -> Answer | None:
        if self._user(asked) is None:
            return _error(401, "Invalid username or password.")
        user, may_write = self.users[asked.token or ""]
        if user != owner or not may_write:
            return _error(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')
        return None

    def _create(self, asked: Asked) -> Answer:
        wanted = json.loads(asked.body)
        owner = wanted["organization"]
        if no := self._wrong_token(asked) or self._read_only(asked, owner):
            return no
        name = f"{owner}/{wanted['name']}"
        place = {"url": f"{self.url}/{name}", "name": name, "id": "0"}
        if name in self.repos:
            return _json({"error": "You already created this model repo", **place}, 409)
        self.add_repo(name, {}, private=wanted.get("visibility") == "private" or wanted.get("private") is True)
        return _json(place)

    def _validate(self, asked: Asked) -> Answer:
        """Front matter as the Hub checks it, as far as cards here have such keys."""
        match = re.match(r"---\n(.*?)\n---\n", json.loads(asked.body)["content"], re.DOTALL)
        if match is None:
            return _json({"errors": [], "warnings": [{"message": "empty or missing yaml metadata in repo card"}]})
        keys, wrong = yaml.safe_load(match[1]), []
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", keys.get("base_model", "x")):
            wrong.append('"base_model" with value is not valid. Use a model id from https://hf.co/models.')
        if not re.fullmatch(r"[a-z0-9.-]+", keys.get("license", "mit")):
            wrong.append('"license" must be one of the known licences')
        if not all(isinstance(tag, str) for tag in keys.get("tags", [])):
            wrong.append('"tags" must be an array of strings')
        return _json({"errors": [{"message": each} for each in wrong], "warnings": []}, 400 if wrong else 200)

    def _info(self, asked: Asked, name: str, revision: str = "main") -> Answer:
        if no := self._refused(asked, name):
            return no
        repo = self.repos[name]
        commit = repo.at(revision)
        if commit is None:
            return _error(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        siblings = [
            {"rfilename": each["path"], "size": each["size"], "blobId": each["oid"], "lfs": each.get("lfs")}
            for each in _entries(commit)
        ]
        about = {
            "_id": "0",
            "id": name,
            "modelId": name,
            "private": repo.private,
            "tags": [],
            "downloads": 0,
            "likes": 0,
        }
        return _json({**about, "gated": "auto" if repo.gated else False, "sha": commit.oid, "siblings": siblings})

    def _tree(self, asked: Asked, name: str, revision: str) -> Answer:
        if no := self._refused(asked, name):
            return no
        commit = self.repos[name].at(revision)
        return _error(404, "Invalid rev id", "RevisionNotFound") if commit is None else _json(_entries(commit))

    def _branch(self, asked: Asked, name: str, branch: str) -> Answer:
        if no := self._refused(asked, name, write=True):
            return no
        repo = self.repos[name]
        if branch in repo.branches:
            return _error(409, "Reference already exists")
        repo.branches[branch] = list(repo.branches["main"])
        return _json({})

    def _preupload(self, asked: Asked, name: str, branch: str) -> Answer:
        if no := self._refused(asked, name, write=True):
            return no
        if branch not in self.repos[name].branches:
            return _error(404, f"Invalid rev id: {branch}", "RevisionNotFound")
        there = self.repos[name].branches[branch][-1].files
        files = []
        for each in json.loads(asked.body)["files"]:
            is_lfs = LFS_NAMES.search(each["path"]) is not None
            found = {"path": each["path"], "uploadMode": "lfs" if is_lfs else "regular", "shouldIgnore": False}
            if each["path"] in there:
                found["oid"] = (sha256 if is_lfs else git_oid)(there[each["path"]])
            files.append(found)
        return _json({"files": files})

    def _post_commit(self, asked: Asked, name: str, branch: str) -> Answer:
        if no := self._refused(asked, name, write=True):
            return no
        repo = self.repos[name]
        header, *lines = (json.loads(line) for line in asked.body.splitlines())
        if header["value"].get("parentCommit") not in (None, repo.branches[branch][-1].oid):
            return _error(412, "A commit has happened since. Please refresh and try again.")
        changed: dict[str, bytes | None] = {}
        for line in lines:
            value = line["value"]
            if line["key"] == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.stored:
                    return _error(400, f"LFS pointer pointed to a file that does not exist: {value['path']}")
                changed[value["path"]] = self.stored[value["oid"]]
            else:
                assert line["key"] == "deletedFile", line
                changed[value["path"]] = None
        made = self._commit(repo, branch, header["value"]["summary"], changed)
        return _json({"success": True, "commitOid": made.oid, "commitUrl": f"{self.url}/{name}/commit/{made.oid}"})

    def _batch(self, asked: Asked, name: str) -> Answer:
        if no := self._refused(asked, name, write=True):
            return no
        objects = []
        for each in json.loads(asked.body)["objects"]:
            entry = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.stored:
                upload: dict[str, Any] = {"href": f"{self.url}/storage/{each['oid']}"}
                if self.part_bytes is not None and each["size"] > self.part_bytes:
                    count = -(-each["size"] // self.part_bytes)
                    urls = {str(i + 1): f"{upload['href']}/{i + 1}" for i in range(count)}
                    upload = {
                        "href": f"{upload['href']}/complete",
                        "header": {"chunk_size": str(self.part_bytes), **urls},
                    }
                verify = {"href": f"{self.url}/{name}.git/info/lfs/verify"}
                entry["actions"] = {"upload": upload, "verify": verify}
            objects.append(entry)
        return _json({"transfer": "basic", "objects": objects})

    def _put(self, asked: Asked, oid: str, part: str | None = None) -> Answer:
        if part is not None:
            self.parts[oid, int(part)] = asked.body
            return Answer(200, b"", {"ETag": f'"{git_oid(asked.body)}"'})
        if sha256(asked.body) != oid:
            return _error(400, "The provided 'x-amz-content-sha256' header does not match what was computed.")
        self.stored[oid] = asked.body
        return Answer(200, b"", {})

    def _complete(self, asked: Asked, oid: str) -> Answer:
        parts = [self.parts[oid, each["partNumber"]] for each in json.loads(asked.body)["parts"]]
        return self._put(Asked("PUT", "", None, b"".join(parts)), oid)

    def _verify(self, asked: Asked, name: str) -> Answer:
        wanted = json.loads(asked.body)
        whole = len(self.stored.get(wanted["oid"], b"")) == wanted["size"]
        return self._refused(asked, name, write=True) or (_json({}) if whole else _error(404, "no such object"))

    def _resolve(self, asked: Asked, name: str, revision: str, path: str) -> Answer:
        if no := self._refused(asked, name, content=True):
            return no
        commit = self.repos[name].at(revision)
        if commit is None:
            return _error(404, "Invalid rev id", "RevisionNotFound")
        if path not in commit.files:
            return _error(404, "Entry not found", "EntryNotFound")
        content = commit.files[path]
        etag = sha256(content) if LFS_NAMES.search(path) else git_oid(content)
        return Answer(200, content, {"X-Repo-Commit": commit.oid, "ETag": f'"{etag}"', "Accept-Ranges": "bytes"})


def _entries(commit: Commit) -> list[dict[str, Any]]:
    """The files of a commit as the tree page lists them."""
    entries = []
    for path, content in sorted(commit.files.items()):
        entry: dict[str, Any] = {"type": "file", "path": path, "size": len(content), "oid": git_oid(content)}
        if LFS_NAMES.search(path):
            entry["lfs"] = {"oid": sha256(content), "sha256": sha256(content), "size": len(content), "pointerSize": 134}
        entries.append(entry)
    return entries


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: HubServer

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        path = urlsplit(path).path
        body = self._body()
        token = self.headers.get("Authorization", "").removeprefix("Bearer ") or None
        asked = Asked(self.command, path, token, body)
        with self.hub.lock:
            self.hub.asked.append(asked)
            fault = self._fault(asked)
            if fault is not None and fault.meanwhile is not None:
                fault.meanwhile()
                fault = None
            answer = None if fault and not fault.after else self.hub.answer(asked, query)
        if fault is not None:
            if fault.status is None:
                return self._cut(answer, fault.sent)
            answer = _error(fault.status, fault.error)
            answer.headers.update(fault.headers)
        assert answer is not None
        self._send(answer)

    do_POST = do_PUT = do_HEAD = do_GET

    def _body(self) -> bytes:
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        body = b""
        while size := int(self.rfile.readline(), 16):
            body += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return body

    def _fault(self, asked: Asked) -> Fault | None:
        for fault in self.hub.faults:
            if fault.times > 0 and fault.method == asked.method and re.search(fault.path, asked.path):
                fault.times -= 1
                return fault
        return None

    def _send(self, answer: Answer, sent: int | None = None) -> None:
        status, body = answer.status, answer.body
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        headers = dict(answer.headers)
        if wanted and status == 200:
            status, start = 206, int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(body) - 1}/{len(body)}"
            body = body[start:]
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[:sent])

    def _cut(self, answer: Answer | None, sent: int) -> None:
        if answer is not None and sent:
            self._send(answer, sent)
            self.wfile.flush()
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def log_message(self, format: str, *args: Any) -> None:
        pass
