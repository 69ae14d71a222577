"""The command `batch`: run a file of requests in OpenAI's batch format, on a server that it starts or a running one.

Results are appended as they complete; a run that was interrupted continues where it stopped.
"""

from __future__ import annotations

import argparse
import contextlib
import http.client
import json
import os
import queue
import random
import socket
import ssl
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, cast
from urllib.parse import urlsplit

from engine.errors import ConfigError
from server.cli.batch_results import Index, InputLine, Results, is_same_file, read_input
from server.cli.parser import Parser, whole_number

CONCURRENCY = 256  # of each replica
MAX_CONCURRENCY = 4096
READ_SECONDS = 3600.0  # of one response: long outputs, behind a long queue
CONNECT_SECONDS = 10.0
RETRY_STATUSES = (408, 429, 502, 503, 504)
GIVE_UP_SECONDS = 300.0  # how long a line is tried on a server that refuses it or can't be reached
MAX_PAUSE_SECONDS = 30.0
OWN_SETTINGS = ("host", "port", "root_path", "api_key_file", "allow_unauthenticated")  # of the server that it starts
PROGRESS_SECONDS = 10.0  # between lines of progress, without a terminal


def add_arguments(parser: Parser) -> None:
    """Add the arguments, and the flags of the server that is started without --url."""
    from server.cli.flags import add_serving_flags

    parser.add_argument("input", metavar="IN.jsonl", help="requests: custom_id, method, url and body, one a line")
    parser.add_argument("output", metavar="OUT.jsonl", help="results; an interrupted run is continued")
    parser.add_argument("--url", help="a running server, with its key in OPENAI_API_KEY (default: start one)")
    parser.add_argument(
        "--concurrency", type=whole_number(1, MAX_CONCURRENCY), metavar="N",
        help=f"maximum number of requests at a time (default: {CONCURRENCY} for each replica)",
    )  # fmt: skip
    add_serving_flags(parser, leave_out=OWN_SETTINGS)


def run(args: argparse.Namespace) -> int:
    """Run the lines that are not done. Return 0 if every line has a result, even if that is an error."""
    if is_same_file(args.input, args.output):
        raise ConfigError(f"{args.output} is the input: give another file for the results")
    config = None if args.url else _server_config(args)
    if args.url:
        _require_url(args)
    index = Index()
    total = _read_index(args.input, index)
    results = Results(args.output)
    try:
        failed = results.read_done(index)
        batch = _Batch(args.input, results, index, total, failed)
        if batch.left:
            with _server(args, config) as (url, key, is_alive):
                batch.run(url, key, min(_concurrency(args, config), batch.left), is_alive)
    except KeyboardInterrupt:
        print("\nstopped; run the same command to continue", file=sys.stderr)
        raise
    finally:
        results.close()
        index.close()
    print(f"{total} lines: {total - batch.failed} succeeded, {batch.failed} with an error; results in {args.output}")
    return 0


def _read_index(path: str, index: Index) -> int:
    """Add every line of the input to the index and return their number. Raises ConfigError for a repeated custom_id."""
    total = 0
    for line in read_input(path):
        earlier = index.add(line)
        if earlier is not None:
            raise ConfigError(
                f"{path} line {line.number}: line {earlier} has the custom_id {line.custom_id!r} too; make it unique"
            )
        total += 1
    return total


@contextlib.contextmanager
def _server(args: argparse.Namespace, config: Any) -> Iterator[tuple[str, str, Callable[[], bool]]]:
    """Yield (URL, key, whether the server lives) of the running server, or of one that is started for the batch."""
    if args.url:
        yield args.url, os.environ.get("OPENAI_API_KEY", ""), lambda: True
        return
    from server.cli.local_server import local_server

    with local_server(config) as server:
        yield server.url, server.key, lambda: server.process.exit_code is None


def _concurrency(args: argparse.Namespace, config: Any) -> int:
    """Return the number of requests at a time: as given, or so many for each replica that the batch may start."""
    if args.concurrency is not None:
        return int(args.concurrency)
    replicas = 1 if config is None else config.max_replicas or config.replicas or 1
    return min(CONCURRENCY * replicas, MAX_CONCURRENCY)


def _server_config(args: argparse.Namespace) -> Any:
    from server.cli.flags import server_config

    if "ENCORE_LOG_LEVEL" not in os.environ and not hasattr(args, "log_level"):
        args.log_level = "warning"  # else a log line per request
    return server_config(args)


def _require_url(args: argparse.Namespace) -> None:
    """Check --url, and remove a /v1 at its end, which the lines' URLs have."""
    from server.cli.flags import given_settings

    if settings := given_settings(args):
        flag = "--" + settings[0].replace("_", "-")
        raise ConfigError(f"{flag} is for a server that the batch starts: leave it out, or leave --url out")
    parts = urlsplit(args.url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--url {args.url}: must be a server's address, such as http://127.0.0.1:8000")
    args.url = args.url.rstrip("/").removesuffix("/v1")


class ServerGone(Exception):
    """The server can't be reached, or refuses a line again and again. The run stops, and can be continued."""


class _Batch:
    """The lines of a batch that are not done, and the threads that run them."""

    def __init__(self, path: str, results: Results, index: Index, total: int, failed: int):
        self._path, self._results, self._index = path, results, index
        self.total, self.failed, self.done = total, failed, index.count_done()
        self._lines: queue.Queue[InputLine | None] = queue.Queue(maxsize=1)
        self._lock = threading.Lock()
        self._error: BaseException | None = None

    @property
    def left(self) -> int:
        return self.total - self.done

    def run(self, url: str, key: str, concurrency: int, is_alive: Callable[[], bool]) -> None:
        """Run the lines that are not done. Raises ConfigError if the server is gone or the file can't be written."""
        threads = [
            threading.Thread(target=self._work, args=(Connection(url, key), is_alive), daemon=True)
            for _ in range(concurrency)
        ]
        for thread in threads:
            thread.start()
        with _Progress(self) as progress:
            for line in read_input(self._path):
                if not self._index.is_done(line.custom_id):
                    self._put(line, progress)
            for _ in threads:
                self._put(None, progress)
            for thread in threads:
                while thread.is_alive() and self._error is None:
                    thread.join(0.2)
                    progress.show()
        if self._error is not None:
            raise ConfigError(
                f"stopped after {self.done} of {self.total} lines: {self._error}; run the same command to continue"
            ) from self._error

    def _put(self, line: InputLine | None, progress: _Progress) -> None:
        while self._error is None:
            progress.show()
            with contextlib.suppress(queue.Full):
                return self._lines.put(line, timeout=0.2)

    def _work(self, connection: Connection, is_alive: Callable[[], bool]) -> None:
        try:
            while self._error is None and (line := self._lines.get()) is not None:
                result = _answer(line, connection, lambda: self._error is None and is_alive())
                self._results.write(result)
                with self._lock:
                    self.done += 1
                    self.failed += result["error"] is not None
        except BaseException as error:
            self._error = error
        finally:
            connection.close()


def _answer(line: InputLine, connection: Connection, may_retry: Callable[[], bool]) -> dict[str, Any]:
    """Send one line and return its result. Raises ServerGone."""
    result = {"id": f"batch_req_{uuid.uuid4().hex}", "custom_id": line.custom_id, "response": None, "error": None}
    problem = _problem(line.values)
    if problem:
        return result | {"error": {"code": "invalid_request", "message": problem}}
    status, headers, text = _send(line, connection, may_retry)
    try:
        body = json.loads(text)
    except ValueError:
        return result | {
            "response": {"status_code": status, "request_id": _request_id(headers, None), "body": None},
            "error": {"code": "invalid_response", "message": f"status {status}: {text[:200].decode(errors='replace')}"},
        }
    response = {"status_code": status, "request_id": _request_id(headers, body), "body": body}
    return result | {"response": response, "error": None if status < 400 else _error_of(status, body)}


def _problem(values: dict[str, Any]) -> str | None:
    """Return what is wrong with a line, beside its custom_id."""
    method, url, body = values.get("method"), values.get("url"), values.get("body")
    if method != "POST":
        return f"method: must be 'POST', found {method!r}"
    if not isinstance(url, str) or not url.startswith("/v1/") or any(ord(one) <= 32 or ord(one) > 126 for one in url):
        return f"url: must be a path such as '/v1/chat/completions', found {url!r}"
    if not isinstance(body, dict):
        return f"body: must be an object with the request's fields, found {type(body).__name__}"
    for name in ("stream", "background"):
        if body.get(name):
            return f"body.{name}: a batch has whole responses only, found {body[name]!r}; leave it out"
    return None


def _send(
    line: InputLine, connection: Connection, may_retry: Callable[[], bool]
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Send a line until the server takes it. Raises ServerGone."""
    body = json.dumps(line.values["body"]).encode()
    end, pause = time.monotonic() + GIVE_UP_SECONDS, 0.5
    while True:
        wait = None
        try:
            status, headers, text = connection.post(line.values["url"], body)
            if status not in RETRY_STATUSES:
                return status, headers, text
            reason = f"status {status}: {text[:200].decode(errors='replace')}"
            wait = headers.get("Retry-After", "")
        except (OSError, http.client.HTTPException) as error:
            reason = f"{connection.url}: {error or type(error).__name__}"
        if not may_retry() or time.monotonic() > end:
            raise ServerGone(reason)
        time.sleep(min(float(wait), MAX_PAUSE_SECONDS) if wait and wait.isdecimal() else random.uniform(0.5, 1) * pause)
        pause = min(2 * pause, MAX_PAUSE_SECONDS)


def _request_id(headers: http.client.HTTPMessage, body: Any) -> str | None:
    return headers.get("X-Request-Id") or (body.get("id") if isinstance(body, dict) else None)


def _error_of(status: int, body: Any) -> dict[str, Any]:
    """Return code and message of an error response, as OpenAI's and vLLM's servers write them."""
    error = body.get("error", body) if isinstance(body, dict) else body
    if not isinstance(error, dict):
        error = {"message": str(error)}
    code = error.get("code") or error.get("type") or status
    return {"code": str(code), "message": str(error.get("message") or f"status {status}")}


class Connection:
    """A connection to the server, kept open from line to line."""

    def __init__(self, url: str, key: str):
        self.url, parts = url, urlsplit(url)
        self._prefix = parts.path
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        assert parts.hostname is not None
        if parts.scheme == "https":
            context = ssl.create_default_context()
            self._http: http.client.HTTPConnection = http.client.HTTPSConnection(
                parts.hostname, parts.port, timeout=CONNECT_SECONDS, context=context
            )
        else:
            self._http = http.client.HTTPConnection(parts.hostname, parts.port, timeout=CONNECT_SECONDS)

    def post(self, path: str, body: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        """Send a body and return status, headers and the response's body. Raises OSError or HTTPException.

        An idle connection that the server has closed is opened again, without counting as an error.
        """
        was_open = self._http.sock is not None
        try:
            return self._post(path, body)
        except (ConnectionError, http.client.BadStatusLine):
            self.close()
            if not was_open:
                raise
        except (OSError, http.client.HTTPException):
            self.close()
            raise
        try:
            return self._post(path, body)
        except (OSError, http.client.HTTPException):
            self.close()
            raise

    def _post(self, path: str, body: bytes) -> tuple[int, http.client.HTTPMessage, bytes]:
        if self._http.sock is None:
            self._http.connect()
            cast(socket.socket, self._http.sock).settimeout(READ_SECONDS)
        self._http.request("POST", self._prefix + path, body, self._headers)
        response = self._http.getresponse()
        return response.status, response.headers, response.read()

    def close(self) -> None:
        """Close the connection; the next request opens it again."""
        self._http.close()


class _Progress:
    """Progress on standard error: a bar on a terminal, else a line now and then."""

    def __init__(self, batch: _Batch):
        self._batch, self._bar = batch, None
        self._next = time.monotonic() + PROGRESS_SECONDS

    def __enter__(self) -> _Progress:
        if sys.stderr.isatty():
            from tqdm import tqdm

            self._bar = tqdm(total=self._batch.total, initial=self._batch.done, unit="line", desc="batch")
        elif self._batch.done:
            print(f"batch: {self._batch.done} of {self._batch.total} lines are done already", file=sys.stderr)
        return self

    def show(self) -> None:
        """Show how many lines are done, if the last time was long enough ago."""
        if self._bar is not None:
            self._bar.set_postfix(errors=self._batch.failed, refresh=False)
            self._bar.update(self._batch.done - self._bar.n)
        elif time.monotonic() >= self._next:
            self._next = time.monotonic() + PROGRESS_SECONDS
            errors = f", {self._batch.failed} with an error" if self._batch.failed else ""
            print(f"batch: {self._batch.done} of {self._batch.total} lines{errors}", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self.show()
            self._bar.close()
