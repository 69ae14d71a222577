"""Ray Serve's request router for replicas: by affinity within a bound on the load, or to a named replica."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from server.replicas.affinity import preferred

TARGET = "target"  # name of the argument that holds a call's Target


@dataclass(frozen=True)
class Target:
    """Where a call goes: to `replica` if it is named and runs, else by `affinity`, to none of `avoided` if possible.

    The replicas of `avoided` have just failed or refused the request. If `replica` has ended, the call reaches another
    one, which refuses it.
    """

    affinity: bytes = b""
    replica: str | None = None
    avoided: frozenset[str] = frozenset()


class ReplicaRouter(RequestRouter):
    """Orders the replicas for each call by its Target. Counts this process's calls in flight for each replica."""

    def initialize_state(self, **kwargs: Any) -> None:
        """Begin without calls in flight."""
        self._in_flight: Counter[ReplicaID] = Counter()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of one replica each: Serve takes the first that accepts the call."""
        target = Target()
        if pending_request is not None:
            target = pending_request.kwargs.get(TARGET, target)
            pending_request.routing_context.should_backoff = True  # while no replica accepts the call
        by_name = {one.replica_id.unique_id: one for one in candidate_replicas}
        if target.replica in by_name:
            return [[by_name[target.replica]]]
        loads = {name: self._load(one.replica_id) for name, one in by_name.items()}
        order = preferred(target.affinity, loads)
        order.sort(key=lambda name: name in target.avoided)  # stable
        return [[by_name[name]] for name in order]

    def _load(self, replica_id: ReplicaID) -> int:
        """Return the calls in flight: this process's, or what the replica has reported lately if that is more.

        Other gateways send calls too.
        """
        return max(self._in_flight[replica_id], self.replica_queue_len_cache.get(replica_id) or 0)

    def on_send_request(self, replica_id: ReplicaID) -> None:
        """Count a call."""
        super().on_send_request(replica_id)
        self._in_flight[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Count the end of a call."""
        super().on_request_completed(replica_id, internal_request_id)
        self._in_flight[replica_id] -= 1
        if self._in_flight[replica_id] <= 0:
            del self._in_flight[replica_id]
