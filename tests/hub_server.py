"""A local stand-in for the Hugging Face hub: the routes that huggingface_hub calls, for repositories in memory."""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from tests.support.waiting import PATIENCE

COMMIT = "a" * 40
Files = dict[str, bytes]


class Hub(ThreadingHTTPServer):
    """Repositories by name, and a log of the requests.

    - cut: file name -> number of bytes after which the next answer with that file breaks off.
    - stall: like `cut`, but the answer waits for `resume` instead of ending, so that a client can be killed meanwhile.
    """

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.repositories: dict[str, Files] = {}
        self.log: list[str] = []
        self.cut: dict[str, int] = {}
        self.stall: dict[str, int] = {}
        self.stalled, self.resume = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def add_folder(self, name: str, folder: Path) -> Files:
        """Add a repository with a folder's files; return the files, which may be changed."""
        self.repositories[name] = {
            str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()
        }
        return self.repositories[name]

    def downloads(self) -> list[str]:
        """Return the files that were sent, in order, each with its range."""
        return [line.removeprefix("GET ") for line in self.log if line.startswith("GET ")]


class _Handler(BaseHTTPRequestHandler):
    server: Hub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        if found := re.fullmatch(r"/api/models/([^/]+/[^/]+)/revision/(\w+)(\?.*)?", self.path):
            self._info(found[1])
        elif found := re.fullmatch(r"/([^/]+/[^/]+)/resolve/(\w+)/(.+)", self.path):
            self._file(found[1], found[3])
        else:
            self._send(404, b"{}")

    def _info(self, name: str) -> None:
        files = self.server.repositories.get(name)
        if files is None:
            return self._send(404, b"{}", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        siblings = [{"rfilename": file, "size": len(data)} for file, data in files.items()]
        self._send(200, json.dumps({"id": name, "sha": COMMIT, "siblings": siblings}).encode())

    def _file(self, name: str, file: str) -> None:
        files = self.server.repositories.get(name)
        if files is None:
            return self._send(404, b"", {"X-Error-Code": "RepoNotFound", "X-Error-Message": "Repository not found"})
        if file not in files:
            return self._send(404, b"", {"X-Error-Code": "EntryNotFound", "X-Error-Message": "Entry not found"})
        data = files[file]
        headers = {"ETag": f'"{hashlib.sha256(data).hexdigest()}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        first = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or "")
        start = int(first[1]) if first else 0
        if self.command == "GET":
            self.server.log.append(f"GET {file}" + (f" from {start}" if start else ""))
        if start:
            headers["Content-Range"] = f"bytes {start}-{len(data) - 1}/{len(data)}"
        self._send(206 if start else 200, data[start:], headers, file)

    def _send(self, status: int, body: bytes, headers: dict[str, str] | None = None, file: str = "") -> None:
        self.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **(headers or {})}.items():
            self.send_header(key, value)
        self.end_headers()
        if self.command == "HEAD":
            return
        for limits in (self.server.cut, self.server.stall):
            if file in limits:
                self.wfile.write(body[: limits.pop(file)])
                self.wfile.flush()
                self.close_connection = True
                if limits is self.server.stall:
                    self.server.stalled.set()
                    self.server.resume.wait(PATIENCE)
                return
        self.wfile.write(body)


@contextmanager
def running_hub() -> Iterator[Hub]:
    """Run a hub in a thread."""
    with Hub() as hub:
        thread = threading.Thread(target=hub.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield hub
        finally:
            hub.resume.set()
            hub.shutdown()
            thread.join()
