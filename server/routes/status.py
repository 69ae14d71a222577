"""GET /: the status page, or its values for clients that accept JSON. GET /chat and GET /docs: pages."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, JSONResponse, Response

from server.pages import chat as chat_page
from server.pages import docs as docs_page
from server.pages import page
from server.pages import status as status_page
from server.serving.status_board import StatusBoard

router = APIRouter(tags=["server"])


@router.head("/", include_in_schema=False)  # how Ollama's command line asks whether a server is there
@router.get("/", include_in_schema=False)
async def status(request: Request) -> Response:
    """Return the status page, which polls this route for JSON every second, or the JSON."""
    accepted = request.headers.get("accept", "")
    if "application/json" in accepted and "text/html" not in accepted:
        board: StatusBoard = request.app.state.board
        return JSONResponse(await board.snapshot(), headers=page.HEADERS)
    return HTMLResponse(status_page.DOCUMENT, headers=status_page.HEADERS)


@router.get("/chat", include_in_schema=False)
async def chat() -> Response:
    """Return the chat page, which sends its requests to /v1/chat/completions."""
    return HTMLResponse(chat_page.DOCUMENT, headers=chat_page.HEADERS)


@router.get("/docs", include_in_schema=False)
async def docs() -> Response:
    """Return the interactive API documentation, which reads /openapi.json."""
    return HTMLResponse(docs_page.DOCUMENT, headers=docs_page.HEADERS)
