"""A Hub on loopback: what its client asks for when it makes, fills, lists and fetches models."""

import base64
import hashlib
import json
import re
import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

TOKEN = "hf_" + "loopbackloopbackloopback"


@dataclass
class Commit:
    """A state of a repository: contents by path; which of them are kept apart as large files."""

    oid: str
    files: dict[str, bytes]
    large: set[str]


@dataclass
class Repo:
    """Its commits, the newest last."""

    private: bool
    commits: list[Commit]

    def at(self, revision: str) -> Commit | None:
        """By id, or the newest of `main`."""
        if revision == "main":
            return self.commits[-1]
        return next((one for one in self.commits if one.oid == revision), None)


@dataclass
class Trouble:
    """What goes wrong, so many times, with requests of this method whose path has that in it.

    `status`: an answer; None: the connection is cut, after so many bytes received or sent.
    """

    method: str
    part: str
    status: int | None
    times: int = 1
    after: int = 0


@dataclass
class Hub:
    """Repositories and large files by digest, and what was asked."""

    repos: dict[str, Repo] = field(default_factory=dict)
    large: dict[str, bytes] = field(default_factory=dict)
    troubles: list[Trouble] = field(default_factory=list)
    asked: list[tuple[str, str]] = field(default_factory=list)
    url: str = ""
    threshold: int = 1 << 20  # bytes from which on a file is large

    def commit(self, repo: Repo, files: dict[str, bytes], large: set[str]) -> Commit:
        """A new state."""
        said = json.dumps([len(repo.commits), sorted(files)]) + str(id(repo))
        made = Commit(hashlib.sha1(said.encode()).hexdigest(), files, large)
        repo.commits.append(made)
        return made

    def put(self, name: str, files: dict[str, bytes], *, private: bool = False) -> str:
        """A repository with these files; returns its commit."""
        repo = self.repos.setdefault(name, Repo(private, []))
        return self.commit(
            repo, files, {path for path in files if path.endswith("safetensors")}
        ).oid


class Handler(BaseHTTPRequestHandler):
    """One request."""

    protocol_version = "HTTP/1.1"
    server: "Server"

    def log_message(self, *args: Any) -> None:
        """Quiet."""

    def do_GET(self) -> None:
        """Lists and files."""
        self.take(b"")

    do_HEAD = do_GET

    def do_POST(self) -> None:
        """Everything that changes something."""
        self.take(None)

    do_PUT = do_POST

    @property
    def hub(self) -> Hub:
        """The state."""
        return self.server.hub

    def take(self, body: bytes | None) -> None:
        """Trouble first, then the answer."""
        path = unquote(urlsplit(self.path).path)
        self.hub.asked.append((self.command, path))
        trouble = self.trouble(path)
        if trouble is not None and trouble.status is None and self.command == "PUT":
            self.rfile.read(trouble.after)
            return self.cut()
        if body is None:
            body = self.read_body()
        if trouble is not None and trouble.status is not None:
            return self.reply(trouble.status, {"error": "trouble"})
        self.cut_after = None if trouble is None else trouble.after
        for method, pattern, action in ROUTES:
            found = re.fullmatch(pattern, path)
            if found and self.command in method:
                return action(self, *found.groups(), body)
        self.reply(404, {"error": f"no {path}"})

    def trouble(self, path: str) -> Trouble | None:
        """The first that fits, used up."""
        for one in self.hub.troubles:
            if one.times > 0 and one.method == self.command and one.part in path:
                one.times -= 1
                return one
        return None

    def cut(self) -> None:
        """Close the connection in the middle."""
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def read_body(self) -> bytes:
        """With a length, or in chunks."""
        if "chunked" in self.headers.get("Transfer-Encoding", ""):
            parts = []
            while size := int(self.rfile.readline(), 16):
                parts.append(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
            return b"".join(parts)
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def reply(self, status: int, value: Any, **headers: str) -> None:
        """JSON."""
        self.send(
            status, json.dumps(value).encode(), {"Content-Type": "application/json", **headers}
        )

    def send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        """Bytes, or the first few of them."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        if "Content-Length" not in headers:
            self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command == "HEAD":
            return
        if getattr(self, "cut_after", None) is not None:
            self.wfile.write(data[: self.cut_after])
            self.wfile.flush()
            return self.cut()
        self.wfile.write(data)

    def known(self) -> bool:
        """Whether the right token was given."""
        return self.headers.get("Authorization") == f"Bearer {TOKEN}"

    def refused(self) -> bool:
        """Answers those who may not write."""
        if self.known():
            return False
        self.reply(401, {"error": "Invalid username or password."})
        return True

    def find(self, name: str) -> Repo | None:
        """A repository that the asker may see; answers where there is none."""
        repo = self.hub.repos.get(name)
        if repo is None or (repo.private and not self.known()):
            self.reply(
                404 if self.known() else 401,
                {"error": "Repository not found"},
                X_Error_Code="RepoNotFound",
            )
            return None
        return repo

    # --- what is asked ---

    def whoami(self, body: bytes) -> None:
        if not self.refused():
            self.reply(200, {"name": "me", "type": "user", "orgs": []})

    def create(self, body: bytes) -> None:
        if self.refused():
            return
        asked = json.loads(body)
        name = f"{asked.get('organization') or 'me'}/{asked['name']}"
        if name in self.hub.repos:
            return self.reply(
                409,
                {"error": "You already created this model repo", "url": f"{self.hub.url}/{name}"},
            )
        private = asked.get("private", asked.get("visibility") == "private")
        repo = self.hub.repos[name] = Repo(bool(private), [])
        self.hub.commit(repo, {".gitattributes": b"*.safetensors filter=lfs\n"}, set())
        self.reply(200, {"url": f"{self.hub.url}/{name}", "name": name, "id": name})

    def validate(self, body: bytes) -> None:
        text = json.loads(body)["content"]
        good = text.startswith("---\n") and "\n---\n" in text[4:]
        errors = [] if good else [{"message": "no metadata"}]
        self.reply(200 if good else 400, {"errors": errors, "warnings": []})

    def info(self, name: str, revision: str | None, body: bytes) -> None:
        repo = self.find(name)
        if repo is None:
            return
        commit = repo.at(revision or "main")
        if commit is None:
            return self.reply(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        self.reply(
            200,
            {
                "id": name,
                "modelId": name,
                "sha": commit.oid,
                "private": repo.private,
                "tags": [],
                "siblings": [{"rfilename": path} for path in commit.files],
            },
        )

    def tree(self, name: str, revision: str, body: bytes) -> None:
        repo = self.find(name)
        if repo is None:
            return
        commit = repo.at(revision)
        if commit is None:
            return self.reply(404, {"error": "Invalid rev id"}, X_Error_Code="RevisionNotFound")
        self.reply(200, [self.entry(commit, path) for path in commit.files])

    def entry(self, commit: Commit, path: str) -> dict[str, Any]:
        data = commit.files[path]
        found = {"type": "file", "path": path, "size": len(data), "oid": blob(data)}
        if path in commit.large:
            digest = hashlib.sha256(data).hexdigest()
            found["lfs"] = {"oid": digest, "size": len(data), "pointerSize": 130}
        return found

    def preupload(self, name: str, revision: str, body: bytes) -> None:
        if self.refused() or (repo := self.find(name)) is None:
            return
        files = []
        for one in json.loads(body)["files"]:
            large = one["size"] >= self.hub.threshold or one["path"].endswith(".safetensors")
            there = repo.commits[-1].files.get(one["path"])
            oid = None if there is None else blob(there)
            if there is not None and large:
                oid = hashlib.sha256(there).hexdigest()
            files.append(
                {
                    "path": one["path"],
                    "uploadMode": "lfs" if large else "regular",
                    "shouldIgnore": False,
                    "oid": oid,
                }
            )
        self.reply(200, {"files": files})

    def batch(self, name: str, body: bytes) -> None:
        if self.refused():
            return
        objects = []
        for one in json.loads(body)["objects"]:
            entry = dict(one)
            if one["oid"] not in self.hub.large:
                href = f"{self.hub.url}/store/{one['oid']}"
                entry["actions"] = {"upload": {"href": href, "header": {}}}
            objects.append(entry)
        self.reply(200, {"transfer": "basic", "objects": objects})

    def store(self, oid: str, body: bytes) -> None:
        if hashlib.sha256(body).hexdigest() != oid:
            return self.reply(400, {"error": "other content"})
        self.hub.large[oid] = body
        self.reply(200, {})

    def commit(self, name: str, revision: str, body: bytes) -> None:
        if self.refused() or (repo := self.find(name)) is None:
            return
        lines = [json.loads(line) for line in body.decode().splitlines() if line]
        newest = repo.commits[-1]
        parent = lines[0]["value"].get("parentCommit")
        if parent not in (None, newest.oid):
            return self.reply(412, {"error": "A commit has happened since. Please refresh."})
        files, large = dict(newest.files), set(newest.large)
        for line in lines[1:]:
            value = line["value"]
            if line["key"] == "file":
                files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                if value["oid"] not in self.hub.large:
                    return self.reply(400, {"error": f"no content for {value['path']}"})
                files[value["path"]] = self.hub.large[value["oid"]]
                large.add(value["path"])
        made = self.hub.commit(repo, files, large)
        self.reply(
            200,
            {
                "success": True,
                "commitOid": made.oid,
                "hookOutput": "",
                "commitUrl": f"{self.hub.url}/{name}/commit/{made.oid}",
            },
        )

    def resolve(self, name: str, revision: str, path: str, body: bytes) -> None:
        repo = self.find(name)
        if repo is None:
            return
        commit = repo.at(revision)
        if commit is None:
            return self.reply(404, {"error": "Invalid rev"}, X_Error_Code="RevisionNotFound")
        if path not in commit.files:
            return self.reply(
                404,
                {"error": "Entry not found"},
                X_Error_Code="EntryNotFound",
                X_Repo_Commit=commit.oid,
            )
        data = commit.files[path]
        tag = hashlib.sha256(data).hexdigest() if path in commit.large else blob(data)
        headers = {"ETag": f'"{tag}"', "X-Repo-Commit": commit.oid, "Accept-Ranges": "bytes"}
        asked = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if asked:
            start, end = int(asked[1]), int(asked[2] or len(data) - 1)
            headers["Content-Range"] = f"bytes {start}-{end}/{len(data)}"
            return self.send(206, data[start : end + 1], headers)
        self.send(200, data, headers | {"Content-Length": str(len(data))})


NAME = r"([\w.-]+/[\w.-]+)"
ROUTES: list[tuple[str, str, Callable[..., None]]] = [
    ("GET", r"/api/whoami-v2", Handler.whoami),
    ("POST", r"/api/repos/create", Handler.create),
    ("POST", r"/api/validate-yaml", Handler.validate),
    ("GET", rf"/api/models/{NAME}/tree/([^/]+)", Handler.tree),
    ("GET", rf"/api/models/{NAME}(?:/revision/([^/]+))?", Handler.info),
    ("POST", rf"/api/models/{NAME}/preupload/([^/]+)", Handler.preupload),
    ("POST", rf"/{NAME}\.git/info/lfs/objects/batch", Handler.batch),
    ("PUT", r"/store/(\w+)", Handler.store),
    ("POST", rf"/api/models/{NAME}/commit/([^/]+)", Handler.commit),
    ("GET HEAD", rf"/{NAME}/resolve/([^/]+)/(.+)", Handler.resolve),
]


def blob(data: bytes) -> str:
    """Git's name for it."""
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


class Server(ThreadingHTTPServer):
    """Serves a Hub from a thread of its own."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.hub = Hub(url=f"http://127.0.0.1:{self.server_address[1]}")
        threading.Thread(target=self.serve_forever, daemon=True).start()
