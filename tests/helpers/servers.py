"""A web server on this machine that serves a folder, with range requests and as a data set on a Hub."""

import http.server
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REVISION = "a" * 40


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    folder: Path
    dropped: list[bool]  # for each of the next responses with file contents, whether it breaks off in the middle

    def log_message(self, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if re.fullmatch(r"/api/datasets/me/data(/revision/.*)?", path):
            self._json({"id": "me/data", "sha": REVISION, "siblings": [], "private": False, "tags": []})
        elif tree := re.fullmatch(r"/api/datasets/me/data/tree/[^/]+(?:/(.*))?", path):
            self._tree(tree[1] or "", "recursive=true" in self.path)
        elif (file := re.fullmatch(r"(?:/datasets/me/data/resolve/[^/]+)?/(.*)", path)) and self._is_file(file[1]):
            self._file((self.folder / file[1]).read_bytes())
        else:
            unknown = path.startswith("/api/datasets/") and not path.startswith("/api/datasets/me/data")
            self._json({"error": "none"}, 404, {"X-Error-Code": "RepoNotFound" if unknown else "EntryNotFound"})

    def do_POST(self) -> None:
        """Answers which of the requested paths exist."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self._json(
            [self._entry(self.folder / path) for path in asked.get("paths", []) if (self.folder / path).exists()]
        )

    def _is_file(self, name: str) -> bool:
        return (self.folder / name).is_file()

    def _entry(self, path: Path) -> dict[str, Any]:
        kind = {"type": "directory"} if path.is_dir() else {"type": "file", "size": path.stat().st_size}
        return {"oid": "b" * 40, "path": path.relative_to(self.folder).as_posix(), **kind}

    def _tree(self, name: str, recursive: bool) -> None:
        if not (self.folder / name).is_dir():
            return self._json({"error": "not found"}, 404, {"X-Error-Code": "EntryNotFound"})
        below = (self.folder / name).glob("**/*" if recursive else "*")
        return self._json([self._entry(path) for path in sorted(below)])

    def _file(self, data: bytes) -> None:
        headers = {"Accept-Ranges": "bytes", "ETag": '"1"', "X-Repo-Commit": REVISION}
        status = 200
        if wanted := re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", "")):
            first, last = int(wanted[1]), min(int(wanted[2] or len(data)), len(data) - 1)
            headers["Content-Range"] = f"bytes {first}-{last}/{len(data)}"
            data, status = data[first : last + 1], 206
        self._send(status, data, headers)

    def _json(self, answer: Any, status: int = 200, headers: dict[str, str] | None = None) -> None:
        self._send(status, json.dumps(answer).encode(), {"Content-Type": "application/json", **(headers or {})})

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            breaks_off = status in (200, 206) and "ETag" in headers and self.dropped and self.dropped.pop(0)
            self.wfile.write(data[: len(data) // 2] if breaks_off else data)
            self.close_connection = self.close_connection or bool(breaks_off)


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, list[bool]]]:
    """The address, and a list to fill: for each of the next responses with file contents, whether it breaks off."""
    dropped: list[bool] = []
    handler = type("Handler", (_Handler,), {"folder": folder, "dropped": dropped})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", dropped
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
