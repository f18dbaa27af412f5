"""A small Hugging Face hub on loopback: what huggingface_hub asks of one, and ways to be a bad one.

    with Hub() as hub:
        hub.add("org/repo", {"config.json": b"{}"})      # or a folder
        monkeypatch.setenv("HF_ENDPOINT", hub.url)

Files of 64 KiB and more, and all GGUF and safetensors, are served as LFS files, as the real hub
does. `requests` lists what was asked: (method, path, Range header). With `faults` set, a seeded
share of all answers is dropped, stalls until the client gives up, or ends halfway. With `redirects`
set, LFS files come from another host by a signed address, as from the real hub's CDN: `elsewhere`
lists what was asked there: (method, Range header, Authorization header).
"""

import hashlib
import json
import random
import secrets
import sys
import threading
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit


@dataclass
class Repo:
    """One repository with one commit; `served` replaces content on the wire, `tokens` makes it
    private.
    """

    files: dict[str, bytes]
    commit: str
    branch: str = "main"
    gated: bool = False
    token: str | None = None
    served: dict[str, bytes] = field(default_factory=dict)


class Faults:
    """What becomes of each answer: "drop", "stall" or "cut" of `share` of them, "" of the others."""

    def __init__(self, seed: int, share: float = 0.05) -> None:
        self.random, self.share = random.Random(seed), share
        self.happened: list[str] = []
        self.lock = threading.Lock()

    def next(self) -> str:
        with self.lock:
            if self.random.random() >= self.share:
                return ""
            self.happened.append(self.random.choice(["drop", "stall", "cut"]))
            return self.happened[-1]


class _Server(ThreadingHTTPServer):
    """A server to which a client that hangs up is everyday: no traceback on stderr, where tests
    look for ours.
    """

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exc_info()[1], ConnectionError):
            super().handle_error(request, client_address)


class Hub:
    """The server; switches may be set at any time."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[tuple[str, str, str | None]] = []
        self.cuts: list[
            int
        ] = []  # how many bytes of the next GETs to send before the connection breaks
        self.status: int | None = None  # every request fails with this
        self.ignore_range = False
        self.bad_tokens: set[str] = set()
        self.faults: Faults | None = None
        self.over = threading.Event()  # what stalls, stalls until then
        self.gate: threading.Event | None = None  # GETs of files wait here after their first bytes
        self.reached = threading.Event()
        self.redirects = False
        self.elsewhere: list[tuple[str, str | None, str | None]] = []
        self.signed: dict[str, tuple[Repo, str]] = {}  # addresses that were given out
        self.lasting = False  # whether they are good for more than one GET
        self.servers = [
            _Server(("127.0.0.1", 0), type(handler.__name__, (handler,), {"hub": self}))
            for handler in (_Handler, _Elsewhere)
        ]
        self.threads = [
            threading.Thread(
                target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True
            )
            for server in self.servers
        ]

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.servers[0].server_address[1]}"

    def sign(self, repo: Repo, name: str) -> str:
        """A new address of one file on the other host."""
        path = f"/blob/{secrets.token_hex(8)}"
        self.signed[path] = (repo, name)
        return f"http://localhost:{self.servers[1].server_address[1]}{path}"

    def __enter__(self) -> "Hub":
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        if self.gate:
            self.gate.set()
        for server, thread in zip(self.servers, self.threads, strict=True):
            server.shutdown()
            server.server_close()
            thread.join()

    def add(self, name: str, files: Mapping[str, bytes] | Path, **switches: Any) -> Repo:
        """Publish a repository; adding it again is a new commit."""
        if isinstance(files, Path):
            files = {
                p.relative_to(files).as_posix(): p.read_bytes()
                for p in sorted(files.rglob("*"))
                if p.is_file()
            }
        digest = hashlib.sha1(
            b"".join(k.encode() + hashlib.sha1(v).digest() for k, v in files.items())
        ).hexdigest()
        self.repos[name] = Repo(dict(files), digest, **switches)
        return self.repos[name]

    def gets(self, file: str) -> list[str | None]:
        """The Range headers of the GETs of one file."""
        return [
            asked
            for method, path, asked in self.requests
            if method == "GET" and path.endswith(f"/{file}")
        ]


def lfs(name: str, data: bytes) -> bool:
    return name.endswith((".gguf", ".safetensors")) or len(data) >= 65536


def oid(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@lru_cache(32)  # a bytes object keeps its hash
def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def etag(name: str, data: bytes) -> str:
    return sha256(data) if lfs(name, data) else oid(data)


class _Handler(BaseHTTPRequestHandler):
    hub: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        self.fault = self.hub.faults.next() if self.hub.faults else ""
        if self.fault == "drop" or (self.fault and self.command == "HEAD"):
            if self.fault == "stall":
                self.hub.over.wait()
            self.close_connection = True
            return
        self.answer()

    def answer(self) -> None:
        url = urlsplit(self.path)
        path = unquote(url.path)
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        if self.hub.status:
            self.fail(self.hub.status, "", "the hub is having a bad day")
            return
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        if token in self.hub.bad_tokens:
            self.fail(401, "", "Invalid credentials in Authorization header")
            return
        api = path.startswith("/api/models/")
        parts = path.removeprefix("/api/models/").lstrip("/").split("/")
        repo = self.hub.repos.get("/".join(parts[:2]))
        if repo is None or (repo.token and repo.token != token):
            self.fail(401 if not token else 404, "RepoNotFound", "Repository not found")
            return
        if repo.gated and not api:
            self.fail(403, "GatedRepo", "Access to this model is restricted")
            return
        revision = parts[3] if len(parts) > 3 else repo.branch
        if revision not in (repo.branch, repo.commit):
            self.fail(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        if api:
            self.info("/".join(parts[:2]), repo, "blobs" in parse_qs(url.query))
            return
        name = "/".join(parts[4:])
        if name not in repo.files:
            self.fail(404, "EntryNotFound", "Entry not found")
            return
        if self.hub.redirects and lfs(name, repo.files[name]):
            self.reply(302, b"", {**self.about(repo, name), "Location": self.hub.sign(repo, name)})
            return
        self.file(repo.served.get(name, repo.files[name]), self.about(repo, name))

    def info(self, name: str, repo: Repo, blobs: bool) -> None:
        siblings: list[dict[str, Any]] = []
        for file, data in repo.files.items():
            row: dict[str, Any] = {"rfilename": file}
            if blobs:
                row |= {
                    "size": len(data),
                    "blobId": oid(sha256(data).encode() if lfs(file, data) else data),
                }
            if blobs and lfs(file, data):
                row["lfs"] = {"sha256": sha256(data), "size": len(data), "pointerSize": 130}
            siblings.append(row)
        body = {
            "id": name,
            "modelId": name,
            "sha": repo.commit,
            "private": False,
            "tags": [],
            "siblings": siblings,
        }
        self.reply(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def about(self, repo: Repo, name: str) -> dict[str, str]:
        """What the hub says of a file beside its content."""
        tag = etag(name, repo.files[name])
        headers = {"X-Repo-Commit": repo.commit, "ETag": f'"{tag}"'}
        if lfs(name, repo.files[name]):
            headers |= {"X-Linked-Etag": f'"{tag}"', "X-Linked-Size": str(len(repo.files[name]))}
        return headers

    def file(self, data: bytes, headers: dict[str, str]) -> None:
        """The content, from where a Range header says."""
        headers |= {"Accept-Ranges": "bytes"}
        asked = None if self.hub.ignore_range else self.headers.get("Range")
        if not asked:
            self.reply(200, data, headers, breakable=True)
            return
        first, _, last = asked.removeprefix("bytes=").partition("-")
        start, end = int(first), min(int(last) + 1 if last else len(data), len(data))
        if start >= len(data):
            self.reply(416, b"", headers | {"Content-Range": f"bytes */{len(data)}"})
            return
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{len(data)}"
        self.reply(206, data[start:end], headers, breakable=True)

    def reply(
        self, status: int, body: bytes, headers: Mapping[str, str], breakable: bool = False
    ) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.fault:
            self.wfile.write(body[: len(body) // 2])
            if self.fault == "stall":
                self.wfile.flush()
                self.hub.over.wait()
            self.close_connection = True
            return
        if breakable and self.hub.gate:
            self.wfile.write(body[: len(body) // 2])
            self.hub.reached.set()
            self.hub.gate.wait(120)
            body = body[len(body) // 2 :]
        if breakable and self.hub.cuts:
            body = body[: self.hub.cuts.pop(0)]
            self.close_connection = True
        self.wfile.write(body)

    def fail(self, status: int, code: str, message: str) -> None:
        headers = {"X-Error-Message": message} | ({"X-Error-Code": code} if code else {})
        self.reply(status, b"", headers)


class _Elsewhere(_Handler):
    """The host that LFS files come from: it knows addresses and no repositories, and refuses a
    hub's token.
    """

    def answer(self) -> None:
        token = self.headers.get("Authorization")
        self.hub.elsewhere.append((self.command, self.headers.get("Range"), token))
        repo, name = self.hub.signed.get(self.path, (None, ""))
        if not self.hub.lasting:
            self.hub.signed.pop(self.path, None)
        if repo is None or token:
            self.fail(403 if repo is None else 400, "", "Signature mismatch")
            return
        self.file(repo.served.get(name, repo.files[name]), {"ETag": '"not-the-hubs"'})
