"""A double of the Hub on the loopback interface, for the real `huggingface_hub` client. Repositories live in memory.

Its user is "me". It answers the requests that the client makes to push a folder and to load a model.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
import transformers
from huggingface_hub import constants, hf_api


class Hub:
    """The state of the double.

    Attributes:
        endpoint: the value for ``HF_ENDPOINT``.
        commits: the commits of every (repository, revision), oldest first, each as its whole tree {path: bytes}. The
            names of data sets begin with "datasets/".
        bodies: the bodies of all requests.
        created: the bodies of the requests that created repositories.
        messages: the summaries of all commits, in order.
        shortened: paths of files of which the double sends one byte less than it announces.
        failures: the number of commits to refuse next, with status 403, which the client does not retry.
        takes_files: while it is not set, clients that have listed the files of a commit wait before they send them.
    """

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.commits: dict[tuple[str, str], list[dict[str, bytes]]] = {}
        self.bodies: list[bytes] = []
        self.created: list[dict[str, Any]] = []
        self.messages: list[str] = []
        self.shortened: set[str] = set()
        self.failures = 0
        self._lock = threading.Lock()  # one commit after the other
        self.takes_files = threading.Event()
        self.takes_files.set()

    def files(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        """The newest tree of a revision."""
        return self.commits.get((repository, revision), [{}])[-1]

    def tree(self, repository: str, revision: str) -> dict[str, bytes] | None:
        """The tree of a branch or of a commit's hash."""
        for (name, branch), trees in self.commits.items():
            if name == repository and branch == revision:
                return trees[-1]
            for tree in trees:
                if name == repository and sha_of(tree) == revision:
                    return tree
        return None


def sha_of(tree: dict[str, bytes]) -> str:
    digest = hashlib.sha1()
    for path in sorted(tree):
        digest.update(path.encode() + b"\0" + hashlib.sha1(tree[path]).digest())
    return digest.hexdigest()


@contextmanager
def hub_double() -> Iterator[Hub]:
    """A running double, whose threads end with the context."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    server.daemon_threads = True
    server.hub = Hub(f"http://127.0.0.1:{server.server_address[1]}")  # type: ignore[attr-defined]
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server.hub  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def hub_for_this_process(monkeypatch: pytest.MonkeyPatch, cache: Path) -> Iterator[Hub]:
    """A running double, to which the Hub client of this process talks; downloads go into ``cache``."""
    with hub_double() as hub:
        talk_to(hub.endpoint, monkeypatch)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
        yield hub


def talk_to(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the Hub client of this process talk to a double."""
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = endpoint + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    # Two clients remember the endpoint: that of huggingface_hub's functions and, from 5.10 on, that of transformers.
    monkeypatch.setattr(hf_api.api, "endpoint", endpoint)
    monkeypatch.setattr(transformers.utils.hub, "_hf_api", None, raising=False)


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    @property
    def hub(self) -> Hub:
        return self.server.hub  # type: ignore[attr-defined]

    def log_message(self, *args: Any) -> None:
        pass

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.hub.bodies.append(body)
        path = unquote(urlsplit(self.path).path)
        if path == "/api/repos/create":
            values = json.loads(body)
            self.hub.created.append(values)
            name = f"{values.get('organization') or 'me'}/{values['name']}"
            self.hub.commits.setdefault((name, "main"), [{}])
            return self._json({"url": f"{self.hub.endpoint}/{name}", "name": name})
        if path == "/api/validate-yaml":
            return self._json({"errors": [], "warnings": []})
        if match := re.fullmatch(r"/api/models/(.+)/branch/(.+)", path):
            if match.groups() in self.hub.commits:
                return self._json({"error": "the branch exists"}, 409)
            self.hub.commits[match.groups()] = [dict(self.hub.files(match[1]))]
            return self._json({})
        if re.fullmatch(r"/api/models/(.+)/preupload/(.+)", path):
            self.hub.takes_files.wait(60)
            files = [
                {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                for file in json.loads(body)["files"]
            ]
            return self._json({"files": files})
        if match := re.fullmatch(r"/api/models/(.+)/commit/([^/]+)", path):
            return self._commit(*match.groups(), body)
        return self._json({"error": f"unknown: {path}"}, 404)

    def _commit(self, repository: str, revision: str, body: bytes) -> None:
        with self.hub._lock:
            if self.hub.failures:
                self.hub.failures -= 1
                return self._json({"error": "the double was told to refuse"}, 403)
            if (repository, revision) not in self.hub.commits:
                return self._json({"error": f"no branch {revision}"}, 404)
            tree = dict(self.hub.files(repository, revision))
            for line in body.splitlines():
                operation = json.loads(line)
                value = operation["value"]
                if operation["key"] == "header":
                    self.hub.messages.append(value["summary"])
                elif operation["key"] == "file":
                    tree[value["path"]] = base64.b64decode(value["content"])
                elif operation["key"] in ("deletedFile", "deletedFolder"):
                    gone = value["path"]
                    tree = {path: data for path, data in tree.items() if not path.startswith(gone)}
            self.hub.commits[repository, revision].append(tree)
            return self._json({"commitUrl": f"{self.hub.endpoint}/{repository}/commit/x", "commitOid": sha_of(tree)})

    def do_HEAD(self) -> None:
        self._get(with_body=False)

    def do_GET(self) -> None:
        self._get(with_body=True)

    def _get(self, *, with_body: bool) -> None:
        path = unquote(urlsplit(self.path).path)
        path = re.sub(r"^/api/datasets/(?=[^/]+/[^/]+/)", "/api/models/datasets/", path)
        if match := re.fullmatch(r"/api/models/(.+)/tree/([^/]+)/?(.*)", path):
            tree, folder = self.hub.tree(match[1], match[2]), match[3]
            if tree is not None:
                inside = [p for p in sorted(tree) if p.startswith(folder)]
                return self._json([{"type": "file", "path": p, "size": len(tree[p]), "oid": "0" * 40} for p in inside])
        elif match := re.fullmatch(r"/api/models/((?:datasets/)?[^/]+/[^/]+)(?:/revision/(.+))?", path):
            tree = self.hub.tree(match[1], match[2] or "main")
            if tree is not None:
                siblings = [{"rfilename": p} for p in sorted(tree)]
                return self._json({"id": match[1], "modelId": match[1], "sha": sha_of(tree), "siblings": siblings})
        elif match := re.fullmatch(r"/((?:datasets/)?[^/]+/[^/]+)/resolve/([^/]+)/(.+)", path):
            tree = self.hub.tree(match[1], match[2])
            if tree is not None and match[3] in tree:
                data = tree[match[3]]
                headers = {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": sha_of(tree)}
                if with_body and match[3] in self.hub.shortened:
                    data = data[:-1]
                return self._send(data, 200, headers, with_body=with_body)
            missing = {"X-Error-Code": "EntryNotFound" if tree is not None else "RepoNotFound"}
            return self._send(b"", 404, missing, with_body=with_body)
        return self._send(b"{}", 404, {}, with_body=with_body)

    def _json(self, value: Any, status: int = 200) -> None:
        self._send(json.dumps(value).encode(), status, {"Content-Type": "application/json"}, with_body=True)

    def _send(self, data: bytes, status: int, headers: dict[str, str], *, with_body: bool) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if with_body:
            self.wfile.write(data)
