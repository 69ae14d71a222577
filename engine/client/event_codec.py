"""What crosses a process border after every step: plain events as columns, and reports addressed to several fronts.

Owns which events are plain, and on the engine's side which front each request came from. A dataclass a token costs more
to pickle and unpickle than the token costs to compute. Knows no pipe and no loop.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from engine.protocol.messages import (
    Abort,
    AddressedReports,
    ClientDisconnected,
    Command,
    Events,
    Reply,
    Report,
    Submit,
    Tokens,
    client_of,
)
from engine.protocol.request import TokenEvent


def encode_events(events: Iterable[TokenEvent]) -> Events:
    """The events of a step, the plain ones as columns. Of each sequence the order stays as it was."""
    columns: list[Tokens] = []
    rest: list[TokenEvent] = []
    deferred: set[str] = set()  # of whom something stands in `rest`: what follows it must stand behind it
    for event in events:
        if not is_plain(event) or event.request_id in deferred:
            rest.append(event)
            deferred.add(event.request_id)
            continue
        last = columns[-1] if columns else None
        if last is None or last.graph_bucket != event.graph_bucket or last.weight_version != event.weight_version:
            last = Tokens([], [], event.weight_version, event.graph_bucket)
            columns.append(last)
        last.request_ids.append(event.request_id)
        last.token_ids.append(event.token_ids[0])
    return Events(rest, columns)


def is_plain(event: TokenEvent) -> bool:
    """Whether the event is one token, its origin and nothing else."""
    return (
        len(event.token_ids) == 1 and event.finish_reason is None and event.queue_time is None
        and event.logprobs is None and event.prompt_logprobs is None and not event.cached_tokens
        and event.stop_reason is None and event.error is None and event.refusal is None
    )  # fmt: skip


class ReportSplitter:
    """In the engine's process, which serves several fronts: what each of them has under way, and what is for whom."""

    def __init__(self) -> None:
        self._live: dict[int, set[str]] = {}

    def incoming(self, command: Command) -> Command:
        """Note a command on its way to the loop. A front's leaving becomes the abort of all that it has under way."""
        if isinstance(command, Submit):
            for request in command.requests:
                self._live.setdefault(client_of(request.request_id), set()).add(request.request_id)
        elif isinstance(command, ClientDisconnected):
            return Abort(sorted(self._live.pop(command.client, ())))
        return command

    def outgoing(self, report: Report) -> Report:
        """A report as it leaves: in parcels where each front gets its own part, unchanged where it is for all."""
        if isinstance(report, Reply):
            return AddressedReports([(client_of(report.number), _pickled(report))])
        if not isinstance(report, Events):
            return report
        for event in report.events:
            if event.finish_reason is not None:
                self._live.get(client_of(event.request_id), set()).discard(event.request_id)
        return AddressedReports([(client, _pickled(part)) for client, part in _by_client(report).items()])


def _by_client(report: Events) -> dict[int, Events]:
    parts: dict[int, Events] = {}
    for columns in report.tokens:
        columns_by_client: dict[int, Tokens] = {}
        for request_id, token_id in zip(columns.request_ids, columns.token_ids, strict=True):
            client = client_of(request_id)
            own = columns_by_client.get(client)
            if own is None:
                own = columns_by_client[client] = Tokens([], [], columns.weight_version, columns.graph_bucket)
                parts.setdefault(client, Events([])).tokens.append(own)
            own.request_ids.append(request_id)
            own.token_ids.append(token_id)
    for event in report.events:
        parts.setdefault(client_of(event.request_id), Events([])).events.append(event)
    return parts


def _pickled(report: Any) -> bytes:
    return pickle.dumps(report, pickle.HIGHEST_PROTOCOL)
