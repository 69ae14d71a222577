"""The KV block store: list, look up, export and import blocks of the KV cache, by the hashes that KV events publish.

Off unless `--enable-kv-block-api` is set. `http/keys.py` checks the admin key.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated, Any

from fastapi import APIRouter, Query, Request, Response

from engine.protocol.kv_blocks import pack, unpack
from server.config import ServerConfig
from server.http.body_route import BodyRoute
from server.http.errors import WireError
from server.http.middleware import BINARY
from server.http.openapi import ADMIN_REFUSALS, Responses, answered_by
from server.schemas import answers
from server.schemas.requests import KVBlocksBody
from server.serving.service import Service

router = APIRouter(prefix="/kv_blocks", tags=["admin"], responses=ADMIN_REFUSALS, route_class=BodyRoute)
log = logging.getLogger("encore.server")
MAX_LISTED = 65536
_CONTENT = {BINARY: {"schema": {"type": "string", "format": "binary"}}}
BYTES: Responses = {200: {"description": "Success", "content": _CONTENT}}


@router.get("", responses=answered_by(answers.KVBlockList))
async def list_blocks(request: Request, limit: Annotated[int, Query(ge=0, le=MAX_LISTED)] = 1000) -> dict[str, Any]:
    """Return up to `limit` blocks with the media that hold them, the last used first, and how many each holds."""
    return await _client(request).ask("list_kv_blocks", limit)


@router.post("/lookup", responses=answered_by(answers.KVBlocksFound))
async def lookup(body: KVBlocksBody, request: Request) -> dict[str, Any]:
    """Return which of these blocks are held, and by which media. A hash without a block is left out."""
    return await _client(request).ask("lookup_kv_blocks", body.block_hashes)


@router.post("/export", responses=BYTES, response_class=Response)
async def export(body: KVBlocksBody, request: Request) -> Response:
    """Return these blocks as a safetensors file with checksums, of at most `--max-body-bytes`."""
    config: ServerConfig = request.app.state.config
    found = await _client(request).ask("export_kv_blocks", body.block_hashes, config.max_body_bytes)
    return Response(await asyncio.to_thread(pack, found), media_type=BINARY)


@router.post(
    "/import",
    responses=answered_by(answers.KVBlocksImported),
    openapi_extra={"requestBody": {"content": _CONTENT}},
)
async def import_blocks(request: Request) -> dict[str, Any]:
    """Take the blocks of an export into host memory. None is taken if a checksum differs, or if they don't fit here."""
    client = _client(request)
    given = await asyncio.to_thread(unpack, await request.body())
    return await client.ask("import_kv_blocks", given)


def _client(request: Request) -> Any:
    """Return the engine client. Raises WireError 403 if the routes are off, 503 until the engine has started."""
    if not request.app.state.config.enable_kv_block_api:
        raise WireError(
            403, "the routes of KV blocks are off: start the server with --enable-kv-block-api and "
            "--kv-offloading-size",
            type="permission_error", code="kv_block_api_disabled",
        )  # fmt: skip
    service: Service = request.app.state.service
    _ = service.tokens
    log.info("admin: %s %s", request.method, request.url.path)
    return service.client
