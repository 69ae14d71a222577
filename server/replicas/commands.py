"""Commands of operators and trainers to all replicas: which ones there are, and which of them new replicas repeat.

A replica that starts later, because another one died or the load grew, must not serve the weights on disk while the
others serve newer ones. `CommandLog` keeps the last command of each kind for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from server.http.errors import WireError
from server.http.keys import ADMIN_PREFIXES

# Path -> kind. The last command of each kind is repeated by replicas that start later.
KINDS: Mapping[str, str] = {
    "/weights/update": "weights",
    "/update_weights_from_disk": "weights",
    "/update_weights": "weights",
    "/update_weight_version": "version",
    "/pause": "pause",
    "/pause_generation": "pause",
    "/resume": "pause",
    "/continue_generation": "pause",
    "/sleep": "sleep",
    "/release_memory_occupation": "sleep",
    "/wake_up": "sleep",
    "/resume_memory_occupation": "sleep",
}
# They end what the command before them began. A replica that has just started has nothing to end.
ENDINGS = frozenset({"/resume", "/continue_generation", "/wake_up", "/resume_memory_occupation"})
# A replica that starts later could not repeat these, and would serve other weights than the rest.
_NOT_SHARED = (
    "/start_weight_update", "/finish_weight_update", "/init_weight", "/collective_rpc", "/destroy_weights_update_group",
    "/update_weights_from_distributed", "/update_weights_from_tensor", "/update_weights_from_ipc",
)  # fmt: skip
KV_BLOCKS = "/kv_blocks"
FROM_DISK = "load weights from files with /weights/update, or generate with engine.integrations.rollout_pool"


@dataclass(frozen=True)
class Command:
    """An admin request that all replicas have run. `sequence` orders the commands of all kinds.

    `model` is the setting of the replicas that have run it: after an upgrade to another model it means nothing.
    """

    sequence: int
    path: str
    query: bytes
    body: bytes
    model: str = ""


class CommandLog:
    """The last command of each kind. A Ray Serve deployment of one replica.

    If it is restarted, the first call of each replica tells it what that replica has run.
    """

    def __init__(self) -> None:
        self._last: dict[str, Command] = {}

    def merge(self, known: Mapping[str, Command]) -> dict[str, Command]:
        """Add what the caller knows, and return the last command of each kind."""
        for kind, command in known.items():
            if kind not in self._last or self._last[kind].sequence < command.sequence:
                self._last[kind] = command
        return dict(self._last)


def newer(latest: Mapping[str, Command], applied: Mapping[str, Command], model: str = "") -> list[tuple[str, Command]]:
    """Return the commands of `latest` that a replica of `model` lacks, which has `applied` others, in their order."""
    missing = [
        (kind, command)
        for kind, command in latest.items()
        if command.model == model
        and (applied[kind].sequence < command.sequence if kind in applied else command.path not in ENDINGS)
    ]
    return sorted(missing, key=lambda one: one[1].sequence)


def is_command(method: str, path: str) -> bool:
    """Return whether a request is an admin request, which goes to all replicas."""
    return path.startswith(ADMIN_PREFIXES) and method in ("GET", "POST")


def refuse_unshared(path: str, body: Any) -> None:
    """Raise WireError 501 for a command to one engine: about its KV blocks, or weights that others can't load later."""
    sent = body if isinstance(body, Mapping) else {}
    if path.startswith(KV_BLOCKS):
        raise WireError(
            501, f"{path} over several replicas: each has its KV cache; name one in the header X-Encore-Replica",
            type="not_implemented_error", code="not_implemented",
        )  # fmt: skip
    is_reset = path == "/weight_checker" and sent.get("action") == "reset"
    if path.startswith(_NOT_SHARED) or is_reset or (path == "/update_weights" and _has_tensors(sent)):
        what = f"{path} with action=reset" if is_reset else path
        raise WireError(
            501, f"{what} over several replicas: not supported, since a replica that starts later could not do the "
            f"same; {FROM_DISK}",
            type="not_implemented_error", code="not_implemented",
        )  # fmt: skip


def _has_tensors(sent: Mapping[str, Any]) -> bool:
    """Return whether the body of /update_weights announces tensors over a group of processes."""
    info = sent.get("update_info")
    return isinstance(info, Mapping) and "names" in info
