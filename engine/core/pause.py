"""The pause of an engine: what happens to running requests, and where new ones wait."""

from __future__ import annotations

from typing import Literal, get_args

from engine.errors import EnginePaused, RequestError
from engine.protocol.request import EngineRequest

PauseMode = Literal["abort", "wait", "keep"]
PAUSE_MODES: tuple[PauseMode, ...] = get_args(PauseMode)


class Pause:
    """State of a pause. `mode` is None while the engine is not paused.

    `obstacle`: why no step can run, whatever the mode, and what ends that; "" if steps can run.

    - abort: running requests were aborted; new ones are refused.
    - wait: running requests run to their end; new ones are held.
    - keep: running requests are frozen, with their KV; new ones are held.
    """

    def __init__(self) -> None:
        self.mode: PauseMode | None = None
        self.obstacle = ""
        self.held: dict[str, EngineRequest] = {}  # new requests, by id, in the order in which they came

    @property
    def is_frozen(self) -> bool:
        """Whether no request runs until the end of the pause."""
        return self.mode == "keep" or bool(self.obstacle)

    @property
    def refusal(self) -> str:
        """Why a request is refused, and what to do."""
        if self.obstacle:
            return f"{self.obstacle}, and send the request again"
        return "the engine is paused and takes no new requests: send the request again after the pause"

    def begin(self, mode: str) -> None:
        """Begin a pause, or change its mode. Raises RequestError for an unknown mode."""
        found = next((known for known in PAUSE_MODES if known == mode), None)
        if found is None:
            raise RequestError(f"mode={mode!r} must be one of {', '.join(PAUSE_MODES)}", param="mode")
        self.mode = found

    def end(self) -> list[EngineRequest]:
        """End the pause and return the requests that were held. Raises RequestError if steps can't run."""
        if self.obstacle:
            raise RequestError(self.obstacle)
        held, self.held = list(self.held.values()), {}
        self.mode = None
        return held

    def holds(self, request: EngineRequest) -> bool:
        """Hold a new request if the mode says so; return whether it is held. Raises EnginePaused if it is refused."""
        if self.mode is None:
            return False
        if self.mode == "abort":
            raise EnginePaused(self.refusal)
        if request.request_id in self.held:
            raise RequestError(f"request_id {request.request_id!r} is in use by a live request", param="request_id")
        self.held[request.request_id] = request
        return True

    def forget(self, request_id: str) -> bool:
        """Drop a held request; return whether there was one."""
        return self.held.pop(request_id, None) is not None
