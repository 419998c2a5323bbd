"""A Hugging Face Hub on loopback: the requests that huggingface_hub makes to upload and download models, over HTTP.

    with HubServer() as hub:
        hub.users["hf_secret"] = ("me", True)
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
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from werkzeug import Request, Response
from werkzeug.exceptions import HTTPException
from werkzeug.routing import Map, Rule

from tests.loopback import Loopback, cut

ATTRIBUTES = b"*.safetensors filter=lfs diff=lfs merge=lfs -text\n*.bin filter=lfs diff=lfs merge=lfs -text\n"
Files = dict[str, bytes]


@dataclass(frozen=True)
class Commit:
    title: str
    files: Files
    parent: str | None

    @property
    def oid(self) -> str:
        names = [f"{name} {sha256(content)}" for name, content in sorted(self.files.items())]
        return hashlib.sha1(repr((self.title, names, self.parent)).encode()).hexdigest()


@dataclass
class Repo:
    private: bool
    branches: dict[str, list[Commit]]
    gated: bool = False

    def commits(self, branch: str = "main") -> list[Commit]:
        """Oldest first; the first one is the Hub's own, with .gitattributes."""
        return self.branches[branch]

    def at(self, revision: str) -> Commit:
        if revision in self.branches:
            return self.branches[revision][-1]
        for commit in (each for commits in self.branches.values() for each in commits):
            if commit.oid == revision:
                return commit
        raise Refused(404, f"Invalid rev id: {revision}", "RevisionNotFound")

    def commit(self, title: str, changed: Mapping[str, bytes | None], branch: str = "main") -> Commit:
        """Adds a commit. Args: changed: new content of files; None: they go."""
        last = self.branches[branch][-1]
        files = {name: content for name, content in {**last.files, **changed}.items() if content is not None}
        self.branches[branch].append(Commit(title, files, last.oid))
        return self.branches[branch][-1]


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


@dataclass(frozen=True)
class Asked:
    """A request that was made."""

    method: str
    path: str
    token: str | None
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class Refused(Exception):
    """An answer with an error status; `code`: the Hub's name of the error."""

    def __init__(self, status: int, message: str, code: str | None = None, **more: Any):
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.answer = answer({"error": message, **more}, status, headers)


def answer(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(json.dumps(content), status, headers, mimetype="application/json")


def oid_of(name: str, content: bytes) -> str:
    """As LFS or git name it."""
    return sha256(content) if is_lfs(name) else hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def is_lfs(name: str) -> bool:
    return name.endswith((".safetensors", ".bin"))


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


class HubServer(Loopback):
    """The server and all that it holds; a test reads and changes it directly."""

    def __init__(self) -> None:
        super().__init__()
        self.repos: dict[str, Repo] = {}
        self.users: dict[str, tuple[str, bool]] = {}  # token -> (name, may write)
        self.stored: Files = {}  # LFS content by sha256
        self.asked: list[Asked] = []
        self.faults: list[Fault] = []
        routes: list[tuple[str, str, Callable[..., Response]]] = [
            ("POST", "/api/repos/create", self._create),
            ("POST", "/api/validate-yaml", self._validate),
            ("GET", "/api/models/<owner>/<repo>", self._info),
            ("GET", "/api/models/<owner>/<repo>/revision/<path:revision>", self._info),
            ("GET", "/api/models/<owner>/<repo>/tree/<path:revision>", self._tree),
            ("POST", "/api/models/<owner>/<repo>/branch/<path:branch>", self._branch),
            ("POST", "/api/models/<owner>/<repo>/preupload/<path:branch>", self._preupload),
            ("POST", "/api/models/<owner>/<repo>/commit/<path:branch>", self._post_commit),
            ("POST", "/<owner>/<repo>.git/info/lfs/objects/batch", self._batch),
            ("POST", "/<owner>/<repo>.git/info/lfs/verify", self._verify),
            ("PUT", "/storage/<oid>", self._put),
            ("GET", "/<owner>/<repo>/resolve/<revision>/<path:path>", self._resolve),
        ]
        self.routes = Map([Rule(path, methods=[method], endpoint=route) for method, path, route in routes])

    def add_repo(self, name: str, files: Files, private: bool = False, gated: bool = False) -> Repo:
        """A repository with one commit of its own, or with none if there are no files."""
        start = Commit("initial commit", {".gitattributes": ATTRIBUTES}, None)
        repo = self.repos[name] = Repo(private, {"main": [start]}, gated)
        if files:
            repo.commit("Upload files", files)
        return repo

    def counted(self, method: str, path: str) -> int:
        """Requests of a method whose path matches."""
        return sum(each.method == method and re.search(path, each.path) is not None for each in self.asked)

    # Requests.

    def answer(self, request: Request) -> Response:
        token = request.headers.get("Authorization", "").removeprefix("Bearer ") or None
        asked = Asked(request.method, request.path, token, request.get_data())
        with self.lock:
            self.asked.append(asked)
            matching = (
                f for f in self.faults if f.times and f.method == asked.method and re.search(f.path, asked.path)
            )
            fault = next(matching, None)
            if fault is not None:
                fault.times -= 1
            reply = answer({}) if fault and not fault.after else self._reply(asked, request)
        if fault is not None and fault.status is not None:
            reply = Refused(fault.status, fault.error).answer
            reply.headers.update(fault.headers)
        elif fault is not None:
            reply = cut(request, reply, fault.sent)
        return reply.make_conditional(request, accept_ranges=True, complete_length=reply.content_length)

    def _reply(self, asked: Asked, request: Request) -> Response:
        try:
            route, values = self.routes.bind_to_environ(request.environ).match()
            return route(asked, **values)
        except Refused as error:
            return error.answer
        except HTTPException:
            return Refused(404, f"no such page: {asked.method} {asked.path}").answer

    def _user(self, asked: Asked) -> str | None:
        if asked.token is not None and asked.token not in self.users:
            raise Refused(401, "Invalid credentials in Authorization header")
        return None if asked.token is None else self.users[asked.token][0]

    def _repo(self, asked: Asked, owner: str, name: str) -> Repo:
        """The repository, for somebody who may see it, and write to it if that is asked."""
        repo, user = self.repos.get(f"{owner}/{name}"), self._user(asked)
        if repo is None or (repo.private and user != owner):
            if user is None:  # the Hub does not tell strangers what exists
                # The Hub sends no code; its client takes such a 401 for a missing repository, but on https alone.
                raise Refused(401, "Invalid username or password.", "RepoNotFound")
            raise Refused(404, "Repository not found", "RepoNotFound")
        if asked.method == "POST":
            self._check_writer(asked, owner)
        return repo

    def _check_writer(self, asked: Asked, owner: str) -> None:
        if self._user(asked) is None:
            raise Refused(401, "Invalid username or password.")
        if self.users[asked.token or ""] != (owner, True):
            raise Refused(403, f'You don\'t have the rights to create a model under the namespace "{owner}"')

    def _create(self, asked: Asked) -> Response:
        owner = asked.json["organization"]
        self._check_writer(asked, owner)
        name = f"{owner}/{asked.json['name']}"
        place = {"url": f"{self.url}/{name}", "name": name, "id": "0"}
        if name in self.repos:
            raise Refused(409, "You already created this model repo", **place)
        self.add_repo(name, {}, private=asked.json.get("visibility") == "private" or asked.json.get("private") is True)
        return answer(place)

    def _validate(self, asked: Asked) -> Response:
        return answer({"errors": [], "warnings": []})

    def _info(self, asked: Asked, owner: str, repo: str, revision: str = "main") -> Response:
        found = self._repo(asked, owner, repo)
        commit = found.at(revision)
        siblings = [{"rfilename": each["path"], "blobId": each["oid"], **each} for each in _entries(commit)]
        about = {"_id": "0", "id": f"{owner}/{repo}", "private": found.private, "gated": found.gated and "auto"}
        return answer({**about, "tags": [], "downloads": 0, "likes": 0, "sha": commit.oid, "siblings": siblings})

    def _tree(self, asked: Asked, owner: str, repo: str, revision: str) -> Response:
        return answer(_entries(self._repo(asked, owner, repo).at(revision)))

    def _branch(self, asked: Asked, owner: str, repo: str, branch: str) -> Response:
        found = self._repo(asked, owner, repo)
        if branch in found.branches:
            raise Refused(409, "Reference already exists")
        found.branches[branch] = list(found.branches["main"])
        return answer({})

    def _preupload(self, asked: Asked, owner: str, repo: str, branch: str) -> Response:
        there, files = self._repo(asked, owner, repo).at(branch).files, []
        for path in (each["path"] for each in asked.json["files"]):
            found = {"path": path, "uploadMode": "lfs" if is_lfs(path) else "regular", "shouldIgnore": False}
            files.append(found | ({"oid": oid_of(path, there[path])} if path in there else {}))
        return answer({"files": files})

    def _post_commit(self, asked: Asked, owner: str, repo: str, branch: str) -> Response:
        found = self._repo(asked, owner, repo)
        header, *lines = (json.loads(line) for line in asked.body.splitlines())
        if header["value"].get("parentCommit") not in (None, found.at(branch).oid):
            raise Refused(412, "A commit has happened since. Please refresh and try again.")
        changed: dict[str, bytes | None] = {}
        for key, value in ((line["key"], line["value"]) for line in lines):
            if key == "file":
                changed[value["path"]] = base64.b64decode(value["content"])
            elif key == "lfsFile":
                changed[value["path"]] = self.stored[value["oid"]]
            else:
                assert key == "deletedFile", key
                changed[value["path"]] = None
        made = found.commit(header["value"]["summary"], changed, branch)
        where = f"{self.url}/{owner}/{repo}/commit/{made.oid}"
        return answer({"success": True, "commitOid": made.oid, "commitUrl": where})

    def _batch(self, asked: Asked, owner: str, repo: str) -> Response:
        self._repo(asked, owner, repo)
        objects = []
        for each in asked.json["objects"]:
            entry = {"oid": each["oid"], "size": each["size"]}
            if each["oid"] not in self.stored:
                upload = {"href": f"{self.url}/storage/{each['oid']}"}
                verify = {"href": f"{self.url}/{owner}/{repo}.git/info/lfs/verify"}
                entry["actions"] = {"upload": upload, "verify": verify}
            objects.append(entry)
        return answer({"transfer": "basic", "objects": objects})

    def _put(self, asked: Asked, oid: str) -> Response:
        if sha256(asked.body) != oid:
            raise Refused(400, "The provided 'x-amz-content-sha256' header does not match what was computed.")
        self.stored[oid] = asked.body
        return Response()

    def _verify(self, asked: Asked, owner: str, repo: str) -> Response:
        self._repo(asked, owner, repo)
        if len(self.stored.get(asked.json["oid"], b"")) != asked.json["size"]:
            raise Refused(404, "no such object")
        return answer({})

    def _resolve(self, asked: Asked, owner: str, repo: str, revision: str, path: str) -> Response:
        found, user = self._repo(asked, owner, repo), self._user(asked)
        if found.gated and user != owner:
            words = f"Access to model {owner}/{repo} is restricted. You must have access to it and be authenticated."
            raise Refused(401 if user is None else 403, words, "GatedRepo")
        commit = found.at(revision)
        if path not in commit.files:
            raise Refused(404, "Entry not found", "EntryNotFound")
        content = commit.files[path]
        return Response(content, headers={"X-Repo-Commit": commit.oid, "ETag": f'"{oid_of(path, content)}"'})


def _entries(commit: Commit) -> list[dict[str, Any]]:
    """The files of a commit as the tree page lists them."""
    entries = []
    for path, content in sorted(commit.files.items()):
        lfs = {"oid": sha256(content), "sha256": sha256(content), "size": len(content), "pointerSize": 134}
        entry = {"type": "file", "path": path, "size": len(content), "oid": oid_of(path, content)}
        entries.append(entry | ({"lfs": lfs} if is_lfs(path) else {}))
    return entries
