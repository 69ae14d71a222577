"""Encode a step's events for another process: plain events as columns, and reports addressed to several clients.

Pickling and unpickling a dataclass per token costs more than computing the token.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from engine.protocol.logprobs import TokenLogprobs
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
    """Encode the events of a step, with plain ones as columns. The order within each sequence is kept."""
    columns: list[Tokens] = []
    open_columns: dict[bool, Tokens] = {}  # by presence of logprobs, which a request's events all have or all lack
    rest: list[TokenEvent] = []
    deferred: set[str] = set()  # requests with an event in `rest`; their later events go there too, to keep the order
    for event in events:
        if not is_plain(event) or event.request_id in deferred:
            rest.append(event)
            deferred.add(event.request_id)
            continue
        has_logprobs = event.logprobs is not None
        last = open_columns.get(has_logprobs)
        if last is None or last.graph_bucket != event.graph_bucket or last.weight_version != event.weight_version:
            last = open_columns[has_logprobs] = Tokens([], [], event.weight_version, event.graph_bucket)
            columns.append(last)
        last.request_ids.append(event.request_id)
        last.token_ids.append(event.token_ids[0])
        if event.logprobs is not None:
            last.logprobs.extend(event.logprobs.records)
    return Events(rest, columns)


def is_plain(event: TokenEvent) -> bool:
    """Return whether the event holds one token with weight version, bucket and log-probabilities, and nothing else."""
    return (
        len(event.token_ids) == 1 and event.finish_reason is None and event.queue_time is None
        and (event.logprobs is None or isinstance(event.logprobs, TokenLogprobs))
        and event.prompt_logprobs is None and not event.cached_tokens
        and event.hidden_states is None and event.routed_experts is None
        and event.stop_reason is None and event.error is None and event.refusal is None
        and not event.grammar_ended
    )  # fmt: skip


class ReportSplitter:
    """Address reports to the clients of one engine, and track each client's running requests.

    Runs in the engine process. `incoming` and `outgoing` see every command and report.
    """

    def __init__(self) -> None:
        self._live: dict[int, set[str]] = {}

    def incoming(self, command: Command) -> Command:
        """Record a command for the loop and return it. ClientDisconnected becomes an Abort of the client's requests."""
        if isinstance(command, Submit):
            for request in command.requests:
                self._live.setdefault(client_of(request.request_id), set()).add(request.request_id)
        elif isinstance(command, ClientDisconnected):
            return Abort(sorted(self._live.pop(command.client, ())))
        return command

    def outgoing(self, report: Report) -> Report:
        """Return Reply and Events as AddressedReports, one part per client, and broadcast reports unchanged."""
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
        logprobs = columns.logprobs or [b""] * len(columns.token_ids)
        for request_id, token_id, record in zip(columns.request_ids, columns.token_ids, logprobs, strict=True):
            client = client_of(request_id)
            own = columns_by_client.get(client)
            if own is None:
                own = columns_by_client[client] = Tokens([], [], columns.weight_version, columns.graph_bucket)
                parts.setdefault(client, Events([])).tokens.append(own)
            own.request_ids.append(request_id)
            own.token_ids.append(token_id)
            if record:
                own.logprobs.append(record)
    for event in report.events:
        parts.setdefault(client_of(event.request_id), Events([])).events.append(event)
    return parts


def _pickled(report: Any) -> bytes:
    return pickle.dumps(report, pickle.HIGHEST_PROTOCOL)
