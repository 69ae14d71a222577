"""What an operator may do to a running server, with an admin key: graphs, weights, profiles.

Each route asks the engine's loop, between two of its steps, and answers when it is done. Who may come here is
keys.py's to say.
"""

from __future__ import annotations

import logging
from typing import Any

from fastapi import APIRouter, Request

from server.http.errors import WireError
from server.http.openapi import ADMIN_REFUSALS, answered_by
from server.schemas import responses as answers
from server.schemas.requests import WeightsBody
from server.serving.service import Service

router = APIRouter(tags=["admin"], responses=ADMIN_REFUSALS)
log = logging.getLogger("encore.server")


@router.post("/graphs/warm", responses=answered_by(answers.Warming))
async def warm(request: Request) -> dict[str, Any]:
    """Capture every graph that is wanted ahead and missing, between steps from now on; /ready shows the progress."""
    return {"pending": await _ask(request, "operations.warm")}


@router.post("/graphs/invalidate", responses=answered_by(answers.Dropped))
async def invalidate(request: Request) -> dict[str, Any]:
    """Drop every graph. Requests run eager until graphs are captured again, as the warm-up mode has it."""
    return {"dropped": await _ask(request, "operations.invalidate")}


@router.post("/graphs/recapture", responses=answered_by(answers.Recapturing))
async def recapture(request: Request) -> dict[str, Any]:
    """Drop every graph and capture those that are wanted ahead again, between steps from now on."""
    dropped = await _ask(request, "operations.invalidate")
    return {"dropped": dropped, "pending": await _ask(request, "operations.warm")}


@router.post("/weights/update", responses=answered_by(answers.WeightsUpdated))
async def update_weights(body: WeightsBody, request: Request) -> dict[str, Any]:
    """Write new weights in place, all or nothing, from a safetensors file or folder on the server's machine.

    Graphs stay valid. Running requests are recomputed under the new weights, and cached prefixes of the old ones are
    dropped; answers carry `version` from then on.
    """
    written = await _ask(request, "operations.load_weights", body.path, body.version)
    return {"updated": written, "weight_version": body.version}


@router.post("/profile/start", responses=answered_by(answers.Profiling))
async def start_profile(request: Request) -> dict[str, Any]:
    """Record what the engine does, until /profile/stop. Slows it down."""
    _profile_folder(request)
    await _ask(request, "operations.profile_start")
    return {"profiling": True}


@router.post("/profile/stop", responses=answered_by(answers.Profiled))
async def stop_profile(request: Request) -> dict[str, Any]:
    """End the recording and write it as a Chrome trace into --profile-folder; the answer names the file."""
    return {"profiling": False, "file": await _ask(request, "operations.profile_stop", _profile_folder(request))}


async def _ask(request: Request, method: str, *values: Any) -> Any:
    service: Service = request.app.state.service
    _ = service.tokens  # 503 until there is an engine to ask
    log.info("admin: %s %s", request.method, request.url.path)
    return await service.client.ask(method, *values)


def _profile_folder(request: Request) -> str:
    folder = request.app.state.config.profile_folder
    if folder is None:
        raise WireError(
            403, "profiles are off: start the server with --profile-folder", type="permission_error",
            code="profile_disabled",
        )  # fmt: skip
    return folder
