"""Admin routes: graphs, weights, profiles and settings of a running server.

Each POST route runs an operation in the engine loop, between two steps, and responds when it is done. `http/keys.py`
checks the admin key.
"""

from __future__ import annotations

import logging
from typing import Any, Literal

from fastapi import APIRouter, Request

from server.http.body_route import BodyRoute
from server.http.errors import WireError
from server.http.openapi import ADMIN_REFUSALS, answered_by
from server.schemas import answers
from server.schemas.requests import WeightsBody
from server.serving.server_details import server_details
from server.serving.service import Service

router = APIRouter(tags=["admin"], responses=ADMIN_REFUSALS, route_class=BodyRoute)
log = logging.getLogger("encore.server")


@router.post("/graphs/warm", responses=answered_by(answers.Warming))
async def warm(request: Request) -> dict[str, Any]:
    """Capture all missing graphs in the background, between steps. /ready shows the progress."""
    return {"pending": await _ask(request, "warm")}


@router.post("/graphs/invalidate", responses=answered_by(answers.Dropped))
async def invalidate(request: Request) -> dict[str, Any]:
    """Drop all graphs. Requests run eager until graphs are captured again, according to the warm-up mode."""
    return {"dropped": await _ask(request, "invalidate")}


@router.post("/graphs/recapture", responses=answered_by(answers.Recapturing))
async def recapture(request: Request) -> dict[str, Any]:
    """Drop all graphs and capture them again in the background, between steps."""
    dropped = await _ask(request, "invalidate")
    return {"dropped": dropped, "pending": await _ask(request, "warm")}


@router.post("/weights/update", responses=answered_by(answers.WeightsUpdated))
async def update_weights(body: WeightsBody, request: Request) -> dict[str, Any]:
    """Load new weights in place, all or nothing, from a safetensors file or folder on the server's host.

    Graphs stay valid. Running requests are recomputed with the new weights, and the prefix cache of the old ones is
    dropped. Responses report `version` from then on.
    """
    written = await _ask(request, "load_weights", body.path, body.version)
    return {"updated": written, "weight_version": body.version}


@router.get("/get_server_info", include_in_schema=False)
@router.get("/server_info", responses=answered_by(answers.ServerInfo))
async def server_info(request: Request, config_format: Literal["text", "json"] = "text") -> dict[str, Any]:
    """Return the settings and the state, under the names of vLLM and of SGLang. No value is a key."""
    service: Service = request.app.state.service
    return server_details(service, as_text=config_format == "text")


@router.post("/profile/start", responses=answered_by(answers.Profiling))
async def start_profile(request: Request) -> dict[str, Any]:
    """Profile the engine until /profile/stop. This slows it down."""
    _profile_folder(request)
    await _ask(request, "profile_start")
    return {"profiling": True}


@router.post("/profile/stop", responses=answered_by(answers.Profiled))
async def stop_profile(request: Request) -> dict[str, Any]:
    """Stop profiling and write a Chrome trace to --profile-folder. The response names the file."""
    return {"profiling": False, "file": await _ask(request, "profile_stop", _profile_folder(request))}


async def _ask(request: Request, method: str, *values: Any) -> Any:
    service: Service = request.app.state.service
    _ = service.tokens  # raises 503 until the engine has started
    log.info("admin: %s %s", request.method, request.url.path)
    return await service.client.ask(method, *values)


def _profile_folder(request: Request) -> str:
    folder = request.app.state.config.profile_folder
    if folder is None:
        raise WireError(
            403, "profiling is off: start the server with --profile-folder", type="permission_error",
            code="profile_disabled",
        )  # fmt: skip
    return folder
