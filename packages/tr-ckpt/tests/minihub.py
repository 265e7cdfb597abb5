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
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

LARGE_FILES = ("*.safetensors", "*.bin", "*.pt")
TOKEN = "hf_SECRETsecretSECRET"
READ_TOKEN = "hf_READERreaderREADER"  # of the same user, and may not write


@dataclass(frozen=True)
class Blob:
    """A file's content; `sha256` is set for what was uploaded as a large file, and the content is absent with Xet."""

    content: bytes
    sha256: str | None = None
    xet_bytes: int | None = None

    @property
    def size(self) -> int:
        return len(self.content) if self.xet_bytes is None else self.xet_bytes

    @property
    def oid(self) -> str:
        data = self.content
        if self.sha256:
            data = f"version https://git-lfs.github.com/spec/v1\noid sha256:{self.sha256}\nsize {self.size}\n".encode()
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
        xet_folder: where clients with Xet keep large files, on their own; None serves those without.
    """

    def __init__(self) -> None:
        self.xet_folder: Path | None = None
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

    def fail(
        self,
        method: str,
        path: str,
        *,
        status: int = 500,
        times: int = 1,
        headers: dict[str, str] | None = None,
        drop: str | None = None,
    ) -> None:
        """Make the next `times` requests that match fail, with `status` or by dropping the connection.

        `drop` says when: `before` the request was read, once it was read and nothing done `after`, when it was done
        and only the answer is missing (`unanswered`), or in the middle of the `answer`.
        """
        fault = {"method": method, "path": path, "status": status, "times": times, "headers": headers, "drop": drop}
        self._faults.append(fault)

    def heal(self) -> None:
        """Take back all faults that are still to come."""
        self._faults.clear()

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

    def tree(self, repo_id: str, commit: str) -> dict[str, Blob]:
        """Return the files of a commit, without what the Hub itself puts there."""
        found = self.repositories[repo_id].commits[commit].tree
        return {path: blob for path, blob in found.items() if path != ".gitattributes"}

    def history(self, repo_id: str, branch: str = "main") -> list[Commit]:
        """Return the commits of a branch, oldest first."""
        repository, found = self.repositories[repo_id], []
        oid: str | None = repository.branches[branch]
        while oid is not None:
            found.append(repository.commits[oid])
            oid = repository.commits[oid].parent
        return found[::-1]

    def replace(self, repo_id: str, path: str, content: bytes | None, branch: str = "main") -> None:
        """Commit another content of a file, or its removal, as somebody else."""
        repository = self.repositories[repo_id]
        tree = dict(repository.commits[repository.branches[branch]].tree)
        tree.pop(path, None)
        if content is not None:
            is_large = any(fnmatch.fnmatch(path, pattern) for pattern in LARGE_FILES)
            tree[path] = Blob(content, hashlib.sha256(content).hexdigest() if is_large else None)
        repository.commit(branch, f"Somebody else's change of {path}", tree)

    def xet_hash(self, sha256: str) -> str:
        """Return the Xet hash of a large file, from what the client wrote beside it."""
        assert self.xet_folder is not None
        for shard in self.xet_folder.glob("xet/xorbs/shards/*.mdb"):
            for held, xet in read_shard(shard.read_bytes()):
                if held == sha256:
                    return xet
        raise AnswerError(404, f"{sha256} was not uploaded")

    def titles(self, repo_id: str, branch: str = "main") -> list[str]:
        """Return the commits' messages, oldest first."""
        return [commit.title for commit in self.history(repo_id, branch)]


def read_shard(data: bytes) -> Iterator[tuple[str, str]]:
    """Yield SHA-256 and Xet hash of each file in one of Xet's shards: a header and records of 48 bytes each."""

    def merkle(raw: bytes) -> str:  # written as four little-endian 64-bit words
        return "".join(f"{word:016x}" for word in struct.unpack("<4Q", raw))

    place = 48
    while place + 48 <= len(data) and data[place : place + 32] != b"\xff" * 32:
        flags, entries = struct.unpack("<II", data[place + 32 : place + 40])
        xet = merkle(data[place : place + 32])
        place += 48 * (1 + entries * (2 if flags & 1 << 31 else 1))
        if flags & 1 << 30:
            yield merkle(data[place : place + 32]), xet
            place += 48


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
        fault = self.hub.fault_for(self.command, split.path)
        self.drop = fault.get("drop") if fault else None
        if self.drop == "before":
            self.close_connection = True
            return
        # Read whole before any answer, or the next request of a kept-alive connection starts in the middle of it.
        self.body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        self.hub.log.append((self.command, split.path))
        try:
            if self._injected(fault):
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
        if self.drop == "after":
            self.close_connection = True
            return True
        if self.drop is not None:
            return False
        self.reply(
            fault["status"],
            {"error": "injected fault"},
            {"X-Error-Message": "injected fault"} | (fault["headers"] or {}),
        )
        return True

    def _authorise(self, path: str) -> None:
        given = self.headers.get("Authorization")
        if given not in (None, f"Bearer {TOKEN}", f"Bearer {READ_TOKEN}"):
            raise AnswerError(401, "Invalid credentials in Authorization header")
        self.is_known = given is not None
        if self.command == "POST" and not self.is_known:
            raise AnswerError(401, "Invalid username or password.")
        if self.command == "POST" and given != f"Bearer {TOKEN}":
            raise AnswerError(403, "This token may not write")

    def _route(self, path: str) -> None:
        for method, pattern, function in ROUTES:
            match = re.fullmatch(pattern, path)
            if match and (self.command == method or (self.command, method) == ("HEAD", "GET")):
                function(self, **{name: unquote(value or "") for name, value in match.groupdict().items()})
                return
        raise AnswerError(404, f"no route for {self.command} {path}")

    def reply(self, status: int, payload: Any = None, headers: dict[str, str] | None = None) -> None:
        content = payload if isinstance(payload, bytes) else json.dumps(payload).encode()
        if self.drop == "unanswered":
            self.close_connection = True
            return
        self.send_response(status)
        for name, value in ({"Content-Type": "application/json"} | (headers or {})).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.drop == "answer":
            content, self.close_connection = content[: len(content) // 2], True
        if self.command != "HEAD":
            self.wfile.write(content)

    def repository(self, repo_id: str) -> Repository:
        found = self.hub.repositories.get(repo_id)
        if found is None or (found.private and not self.is_known):
            raise AnswerError(404, "Repository not found", "RepoNotFound")
        return found

    def commit_of(self, repository: Repository, revision: str) -> Commit:
        oid = repository.branches.get(revision, revision)
        if oid not in repository.commits:
            raise AnswerError(404, f"Invalid rev id: {revision}", "RevisionNotFound")
        return repository.commits[oid]

    def harnesses(self) -> None:
        self.reply(200, {"standardEnvVars": [], "harnesses": {}})

    def whoami(self) -> None:
        if not self.is_known:
            raise AnswerError(401, "Invalid username or password.")
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
        told |= {"downloads": 0, "likes": 0}  # which older clients ask for
        self.reply(200, told, {"X-Repo-Commit": commit.oid})

    def tree(self, repo_id: str, revision: str) -> None:
        commit = self.commit_of(self.repository(repo_id), revision)
        entries = []
        for path, blob in sorted(commit.tree.items()):
            entry = {"type": "file", "path": path, "size": blob.size, "oid": blob.oid}
            if blob.sha256:
                entry["lfs"] = {"oid": blob.sha256, "size": blob.size, "pointerSize": 130}
                if blob.xet_bytes is not None:
                    entry["xetHash"] = self.hub.xet_hash(blob.sha256)
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
                entry["actions"] = {
                    "upload": {"href": f"{self.hub.endpoint}/_upload/{asked['oid']}"},
                    "verify": {"href": f"{self.hub.endpoint}/_verify/{asked['oid']}"},
                }
            objects.append(entry)
        self.reply(200, {"transfer": "basic", "objects": objects})

    def put(self, oid: str) -> None:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise AnswerError(400, "checksum mismatch")
        self.hub.uploads[oid] = self.body
        self.reply(200, {})

    def verify(self, oid: str) -> None:
        if len(self.hub.uploads[oid]) != json.loads(self.body)["size"]:
            raise AnswerError(400, "size mismatch")
        self.reply(200, {})

    def xet_token(self, repo_id: str, revision: str) -> None:
        self.commit_of(self.repository(repo_id), revision)
        if self.hub.xet_folder is None:
            raise AnswerError(404, "Xet is not served here")
        address, expires = f"local://{self.hub.xet_folder}", int(time.time()) + 3600
        told = {"casUrl": address, "accessToken": "xet", "exp": expires}
        names = {"X-Xet-Cas-Url": address, "X-Xet-Access-Token": "xet", "X-Xet-Token-Expiration": str(expires)}
        self.reply(200, told, names)

    def commits(self, repo_id: str, revision: str) -> None:
        repository, listed = self.repository(repo_id), []
        commit: Commit | None = self.commit_of(repository, revision)
        while commit is not None:
            entry = {"id": commit.oid, "title": commit.title, "message": "", "date": "2026-01-01T00:00:00.000Z"}
            listed.append(entry | {"authors": [{"user": "ci"}]})
            commit = repository.commits.get(commit.parent or "")
        self.reply(200, listed)

    def commit(self, repo_id: str, branch: str) -> None:
        repository = self.repository(repo_id)
        header, *operations = (json.loads(line) for line in self.body.splitlines())
        with self.hub.lock:
            head = self.commit_of(repository, branch)
            if header["value"].get("parentCommit", head.oid) != head.oid:
                raise AnswerError(412, "A commit has happened since. Please refresh and try again.")
            tree = dict(head.tree)
            for operation in operations:
                self._apply(operation["key"], operation["value"], tree)
            made = repository.commit(branch, header["value"]["summary"], tree)
        url = f"{self.hub.endpoint}/{repo_id}/commit/{made.oid}"
        self.reply(200, {"success": True, "commitOid": made.oid, "commitUrl": url})

    def _apply(self, key: str, value: dict[str, Any], tree: dict[str, Blob]) -> None:
        if key == "file":
            tree[value["path"]] = Blob(base64.b64decode(value["content"]))
        elif key == "lfsFile":
            content = self.hub.uploads.get(value["oid"], b"")
            if not content and self.hub.xet_folder is None:
                raise AnswerError(400, f"LFS pointer pointed to a file that does not exist: {value['oid']}")
            tree[value["path"]] = Blob(content, value["oid"], None if content else value["size"])
        elif key == "deletedFile":
            del tree[value["path"]]
        else:
            raise AnswerError(400, f"unknown operation {key}")

    def resolve(self, repo_id: str, revision: str, path: str) -> None:
        commit = self.commit_of(self.repository(repo_id), revision)
        if path not in commit.tree:
            raise AnswerError(404, "Entry not found", "EntryNotFound")
        blob = commit.tree[path]
        headers = {"X-Repo-Commit": commit.oid, "ETag": f'"{blob.sha256 or blob.oid}"', "Accept-Ranges": "bytes"}
        if blob.xet_bytes is not None:
            place = f"{self.hub.endpoint}/api/models/{repo_id}/xet-read-token/{commit.oid}"
            headers |= {"X-Xet-Hash": self.hub.xet_hash(blob.sha256 or ""), "Link": f'<{place}>; rel="xet-auth"'}
        wanted = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        if wanted is None:
            self.reply(200, blob.content, headers)
            return
        start, end = int(wanted[1]), len(blob.content)
        self.reply(206, blob.content[start:], headers | {"Content-Range": f"bytes {start}-{end - 1}/{end}"})


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
    ("POST", r"/_verify/(?P<oid>[0-9a-f]{64})", _Handler.verify),
    ("GET", _API + r"/xet-(?:read|write)-token/(?P<revision>[^/]+)", _Handler.xet_token),
    ("GET", _API + r"/commits/(?P<revision>[^/]+)", _Handler.commits),
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
