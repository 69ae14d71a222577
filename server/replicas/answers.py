"""One answer from the answers of several replicas: JSON of admin routes, metrics, and the end of a broken stream."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.types import Scope

from server.http.errors import OLLAMA_PREFIX, WireError, body_of, in_format_of, is_anthropic
from server.http.streaming import DONE, event, named_event

_SUMMED = ("aborted", "dropped", "pending", "server_load")  # counts over all replicas
_NAME = re.compile(r"[A-Za-z_:][\w:]*")
RESPONSES_PATH = "/v1/responses"


class Answer(NamedTuple):
    """A whole response of one replica."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


def merged(answers: Mapping[str, Answer]) -> tuple[int, Any]:
    """Return status and JSON for the answers of all replicas (by name) to one admin request.

    If one failed, the status and the message of the first that did, with the names of all that did and did not. If the
    bodies are equal, that body. Else the first one with counts summed, and all bodies under "replicas".
    """
    bodies = {name: _json(answer.body) for name, answer in answers.items()}
    failed = [name for name, answer in answers.items() if answer.status >= 400]
    if failed:
        first = bodies[failed[0]]
        error = dict(first["error"]) if isinstance(first, dict) and isinstance(first.get("error"), dict) else {}
        done = [name for name in answers if name not in failed]
        where = f"replicas {', '.join(failed)} failed; {', '.join(done) or 'none'} succeeded"
        error["message"] = f"{error.get('message', 'failed')} ({where})" if done else error.get("message", "failed")
        return answers[failed[0]].status, {"error": error | {"failed": failed, "succeeded": done}}
    values = list(bodies.values())
    are_equal = all(value == values[0] for value in values)
    if not all(isinstance(value, dict) for value in values):
        return 200, values[0] if are_equal else {"replicas": bodies}
    sums = {name: sum(value[name] for value in values) for name in _SUMMED if all(name in value for value in values)}
    return 200, values[0] | sums | ({} if are_equal else {"replicas": bodies})


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")


def merged_metrics(texts: Mapping[str, str]) -> str:
    """Return the metrics of all replicas (by name) as one text, each sample with the label `replica`.

    Takes Prometheus' text format and OpenMetrics. The samples of a family stay together, as both demand.
    """
    families: dict[str, tuple[list[str], list[str]]] = {}  # name -> its comments, its samples
    ends = ""
    for replica, text in texts.items():
        samples: list[str] = []
        for line in text.splitlines():
            if line.startswith("# EOF"):
                ends = "# EOF\n"
            elif line.startswith("# "):
                name = line.split(" ", 3)[2]
                comments, samples = families.setdefault(name, ([], []))
                if line not in comments:
                    comments.append(line)
            elif line:
                samples.append(labelled(line, replica))
    lines = [line for comments, samples in families.values() for line in (*comments, *samples)]
    return "\n".join(lines) + "\n" + ends


def labelled(sample: str, replica: str) -> str:
    """Return a line of metrics with the label `replica` as its first."""
    found = _NAME.match(sample)
    assert found is not None, sample
    name, rest = found[0], sample[found.end() :]
    label = f'replica="{replica}"'
    if rest.startswith("{}"):
        return f"{name}{{{label}}}{rest[2:]}"
    return f"{name}{{{label},{rest[1:]}" if rest.startswith("{") else f"{name}{{{label}}}{rest}"


def broken_stream(scope: Scope, content_type: str, num_events: int, error: WireError) -> bytes | None:
    """Return what ends a stream whose replica has died, in the format of its API; None if it has no such format.

    `num_events` is the number of server-sent events that the client has already.
    """
    status, body, _ = body_of(error)
    path = scope["path"]
    if path.startswith(OLLAMA_PREFIX):
        return (json.dumps(in_format_of(scope, status, body)) + "\n").encode()
    if not content_type.startswith("text/event-stream"):
        return None
    if is_anthropic(scope):
        return named_event("error", in_format_of(scope, status, body)).encode()
    if path.startswith(RESPONSES_PATH):
        found = {"code": body["error"]["code"], "message": body["error"]["message"], "param": None}
        return named_event("error", {"type": "error", "sequence_number": num_events, **found}).encode()
    return event(body).encode() + DONE
