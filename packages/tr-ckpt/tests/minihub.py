"""A Hub on loopback: what huggingface_hub asks for to make a repository, upload folders and download them.

Models only, kept in memory; faults can be injected. `with MiniHub() as hub:` serves on a free port of 127.0.0.1.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import fnmatch
import hashlib
import json
import re
import secrets
import socket
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_FILES = ("*.safetensors", "*.bin", "*.pt")
TOKEN = "hf_SECRETsecretSECRET"


@dataclass(frozen=True)
class Blob:
    """A file's content; `sha256` is set for what was uploaded as a large file."""

    content: bytes
    sha256: str | None = None

    @property
    def oid(self) -> str:
        data = self.content
        if self.sha256:
            data = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {len(data)}\n".encode()
        return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@dataclass(frozen=True)
class Commit:
    oid: str
    title: str
    tree: dict[str, Blob]
    parent: str | None


@dataclass
class Repository:
    id: str
    private: bool
    commits: dict[str, Commit] = field(default_factory=dict)
    branches: dict[str, str] = field(default_factory=dict)

    def commit(self, branch: str, title: str, tree: dict[str, Blob]) -> Commit:
        # Random on purpose: the client keeps listings by commit for ever.
        made = Commit(secrets.token_hex(20), title, tree, self.branches.get(branch))
        self.commits[made.oid] = made
        self.branches[branch] = made.oid
        return made


class AnswerError(Exception):
    """An error to answer with; the client tells kinds apart by `code`."""

    def __init__(self, status: int, message: str, code: str = "", **extra: Any) -> None:
        super().__init__(message)
        self.status = status
        self.headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.payload = {"error": message, **extra}


class MiniHub:
    """The server and what it holds.

    Attributes:
        endpoint: its address.
        log: method and path of every request, in order.
    """

    def __init__(self) -> None:
        self.repositories: dict[str, Repository] = {}
        self.uploads: dict[str, bytes] = {}
        self.log: list[tuple[str, str]] = []
        self.lock = threading.RLock()
        self._faults: list[dict[str, Any]] = []
        self._sockets: set[socket.socket] = set()
        handler = type("Handler", (_Handler,), {"hub": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._server.daemon_threads = True
        self.endpoint = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> MiniHub:
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02})
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Go away as a server that crashed does; a second time does nothing."""
        if not self._thread.is_alive():
            return
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for open_socket in list(self._sockets):  # or a client's kept-alive connection goes on being served
            with contextlib.suppress(OSError):  # closed by the client meanwhile
                open_socket.shutdown(socket.SHUT_RDWR)

    def fail(self, method: str, path: str, *, status: int = 500, times: int = 1, drop: bool = False) -> None:
        """Make the next `times` requests that match fail, with `status` or by dropping the connection."""
        self._faults.append({"method": method, "path": path, "status": status, "times": times, "drop": drop})

    def hold(self, method: str, path: str) -> threading.Event:
        """Make the next request that matches wait until the event that is returned is set."""
        event = threading.Event()
        self._faults.append({"method": method, "path": path, "event": event, "times": 1})
        return event

    def fault_for(self, method: str, path: str) -> dict[str, Any] | None:
        with self.lock:
            for fault in self._faults:
                if fault["times"] and fault["method"] == method and re.search(fault["path"], path):
                    fault["times"] -= 1
                    return fault
        return None

    def files(self, repo_id: str, branch: str = "main") -> list[str]:
        """Return the paths on a branch, without what the Hub itself puts there."""
        repository = self.repositories[repo_id]
        return sorted(set(repository.commits[repository.branches[branch]].tree) - {".gitattributes"})

    def read(self, repo_id: str, path: str, branch: str = "main") -> bytes:
        repository = self.repositories[repo_id]
        return repository.commits[repository.branches[branch]].tree[path].content

    def titles(self, repo_id: str, branch: str = "main") -> list[str]:
        """Return the commits' messages, oldest first."""
        repository, found = self.repositories[repo_id], []
        oid = repository.branches[branch]
        while oid is not None:
            found.append(repository.commits[oid].title)
            oid = repository.commits[oid].parent
        return found[::-1]


class _Handler(BaseHTTPRequestHandler):
    hub: MiniHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def handle(self) -> None:
        self.hub._sockets.add(self.connection)
        try:
            super().handle()
        except ConnectionError:
            pass  # the client has gone
        finally:
            self.hub._sockets.discard(self.connection)

    def respond(self) -> None:
        split = urlsplit(self.path)
        self.query = {name: values[-1] for name, values in parse_qs(split.query).items()}
        # Read whole before any answer, or the next request of a kept-alive connection starts in the middle of it.
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.log.append((self.command, split.path))
        try:
            if self._injected(self.hub.fault_for(self.command, split.path)):
                return
            self._authorise(split.path)
            self._route(split.path)
        except AnswerError as answer:
            self.reply(answer.status, answer.payload, answer.headers)

    def _injected(self, fault: dict[str, Any] | None) -> bool:
        if fault is None:
            return False
        if "event" in fault:
            fault["event"].wait(30)
            return False
        if fault["drop"]:
            self.close_connection = True
            return True
        raise AnswerError(fault["status"], "injected fault")

    def _authorise(self, path: str) -> None:
        given = self.headers.get("Authorization")
        if given is not None and given != f"Bearer {TOKEN}":
            raise AnswerError(401, "Invalid credentials in Authorization header")
        if given is None and self.command == "POST":
            raise AnswerError(401, "Invalid username or password.")

    def _route(self, path: str) -> None:
        for method, pattern, function in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and (self.command == method or (self.command, method) == ("HEAD", "GET")):
                function(self, **{name: unquote(value or "") for name, value in match.groupdict().items()})
                return
        raise AnswerError(404, f"no route for {self.command} {path}")

    def reply(self, status: int, payload: Any = None, headers: dict[str, str] | None = None) -> None:
        content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def repository(self, repo_id: str) -> Repository:
        if repo_id not in self.hub.repositories:
            raise AnswerError(404, "Repository not found", "RepoNotFound")
        return self.hub.repositories[repo_id]

    def commit_of(self, repository: Repository, revision: str) -> Commit:
        oid = repository.branches.get(revision, revision)
        if oid not in repository.commits:
            raise AnswerError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repository.commits[oid]

    def harnesses(self) -> None:
        self.reply(200, {"standardEnvVars": [], "harnesses": {}})

    def whoami(self) -> None:
        access = {"type": "access_token", "accessToken": {"displayName": "ci", "role": "write"}}
        self.reply(200, {"type": "user", "name": "ci", "orgs": [], "auth": access})

    def validate_yaml(self) -> None:
        self.reply(200, {"errors": [], "warnings": []})

    def create(self) -> None:
        asked = json.loads(self.body)
        repo_id = f"{asked.get('organization') or 'ci'}/{asked['name']}"
        url = f"{self.hub.endpoint}/{repo_id}"
        with self.hub.lock:
            if repo_id in self.hub.repositories:
                raise AnswerError(409, "You already created this model repo", url=url)
            private = asked.get("visibility") == "private" or bool(asked.get("private"))
            repository = self.hub.repositories[repo_id] = Repository(repo_id, private)
            repository.commit("main", "initial commit", {".gitattributes": Blob(b"*.safetensors filter=lfs\n")})
        self.reply(200, {"url": url})

    def create_branch(self, repo_id: str, name: str) -> None:
        repository = self.repository(repo_id)
        if name in repository.branches:
            raise AnswerError(409, "Reference already exists")
        repository.branches[name] = repository.branches["main"]
        self.reply(200, {})

    def info(self, repo_id: str, revision: str = "main") -> None:
        commit = self.commit_of(self.repository(repo_id), revision)
        now = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.000Z")
        files = [{"rfilename": path} for path in sorted(commit.tree)]
        told = {"id": repo_id, "sha": commit.oid, "private": False, "tags": [], "lastModified": now, "siblings": files}
        self.reply(200, told, {"X-Repo-Commit": commit.oid})

    def tree(self, repo_id: str, revision: str) -> None:
        commit = self.commit_of(self.repository(repo_id), revision)
        entries = []
        for path, blob in sorted(commit.tree.items()):
            entry = {"type": "file", "path": path, "size": len(blob.content), "oid": blob.oid}
            if blob.sha256:
                entry["lfs"] = {"oid": blob.sha256, "size": len(blob.content), "pointerSize": 130}
            entries.append(entry)
        self.reply(200, entries)

    def preupload(self, repo_id: str, revision: str) -> None:
        tree = self.commit_of(self.repository(repo_id), revision).tree
        told = []
        for asked in json.loads(self.body)["files"]:
            # The client commits empty files as regular ones whatever it is told.
            large = asked["size"] > 0 and any(fnmatch.fnmatch(asked["path"], pattern) for pattern in LARGE_FILES)
            entry = {"path": asked["path"], "uploadMode": "lfs" if large else "regular", "shouldIgnore": False}
            held = tree.get(asked["path"])
            if held is not None and bool(held.sha256) == large:
                entry["oid"] = held.sha256 or held.oid
            told.append(entry)
        self.reply(200, {"files": told})

    def batch(self, repo_id: str) -> None:
        objects = []
        for asked in json.loads(self.body)["objects"]:
            entry = {"oid": asked["oid"], "size": asked["size"]}
            if asked["oid"] not in self.hub.uploads:
                entry["actions"] = {"upload": {"href": f"{self.hub.endpoint}/_upload/{asked['oid']}"}}
            objects.append(entry)
        self.reply(200, {"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise AnswerError(400, "checksum mismatch")
        self.hub.uploads[oid] = self.body
        self.reply(200, {})

    def commit(self, repo_id: str, branch: str) -> None:
        repository = self.repository(repo_id)
        header, *operations = (json.loads(line) for line in self.body.splitlines())
        with self.hub.lock:
            tree = dict(self.commit_of(repository, branch).tree)
            for operation in operations:
                self._apply(operation["key"], operation["value"], tree)
            made = repository.commit(branch, header["value"]["summary"], tree)
        url = f"{self.hub.endpoint}/{repo_id}/commit/{made.oid}"
        self.reply(200, {"success": True, "commitOid": made.oid, "commitUrl": url})

    def _apply(self, key: str, value: dict[str, Any], tree: dict[str, Blob]) -> None:
        if key == "file":
            tree[value["path"]] = Blob(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            tree[value["path"]] = Blob(self.hub.uploads[value["oid"]], value["oid"])
        elif key == "deletedFile":
            del tree[value["path"]]
        else:
            raise AnswerError(400, f"unknown operation {key}")

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        commit = self.commit_of(self.repository(repo_id), revision)
        if path not in commit.tree:
            raise AnswerError(404, "Entry not found", "EntryNotFound")
        blob = commit.tree[path]
        self.reply(200, blob.content, {"X-Repo-Commit": commit.oid, "ETag": f'"{blob.sha256 or blob.oid}"'})


for _method in ("GET", "HEAD", "POST", "PUT"):
    setattr(_Handler, f"do_{_method}", _Handler.respond)

_API = r"/api/models/(?P<repo_id>[^/]+/[^/]+)"
ROUTES = (
    ("GET", r"/api/agent-harnesses", _Handler.harnesses),
    ("GET", r"/api/whoami-v2", _Handler.whoami),
    ("POST", r"/api/validate-yaml", _Handler.validate_yaml),
    ("POST", r"/api/repos/create", _Handler.create),
    ("POST", _API + r"/branch/(?P<name>[^/]+)", _Handler.create_branch),
    ("GET", _API, _Handler.info),
    ("GET", _API + r"/revision/(?P<revision>[^/]+)", _Handler.info),
    ("GET", _API + r"/tree/(?P<revision>[^/]+)(?:/.*)?", _Handler.tree),
    ("POST", _API + r"/preupload/(?P<revision>[^/]+)", _Handler.preupload),
    ("POST", r"/(?P<repo_id>[^/]+/[^/]+)\.git/info/lfs/objects/batch", _Handler.batch),
    ("PUT", r"/_upload/(?P<oid>[0-9a-f]{64})", _Handler.put),
    ("POST", _API + r"/commit/(?P<branch>[^/]+)", _Handler.commit),
    ("GET", r"/(?P<repo_id>[^/]+/[^/]+)/resolve/(?P<revision>[^/]+)/(?P<path>.+)", _Handler.resolve),
)


def wait_until(condition: Any, seconds: float = 30) -> None:
    """Return once `condition()` holds.

    Raises:
        TimeoutError: it did not within `seconds`.
    """
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError("the condition did not come to hold")
        time.sleep(0.01)
