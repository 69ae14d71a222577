"""The routes of a container on SageMaker: GET /ping, and POST /invocations with the body of several routes."""

from __future__ import annotations

from typing import Any, TypeVar

from fastapi import APIRouter, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import Response
from pydantic import BaseModel, ValidationError

from engine.errors import RequestError
from server.http.body_route import BodyRoute
from server.http.openapi import REFUSALS, answered_by, failing
from server.routes.openai import chat_completions, completions
from server.routes.server_info import health
from server.schemas import answers as wire
from server.schemas.requests import ChatBody, CompletionBody

router = APIRouter(tags=["sagemaker"], responses=REFUSALS, route_class=BodyRoute)
Body = TypeVar("Body", bound=BaseModel)
ANSWERS = answered_by(wire.ChatCompletion | wire.Completion, "text/event-stream")


@router.get("/ping", responses=answered_by(wire.Health) | failing(wire.Health))
@router.post("/ping", include_in_schema=False)
async def ping(request: Request) -> Response:
    """Liveness, as GET /health."""
    return await health(request)


@router.post("/invocations", responses=ANSWERS)
async def invocations(body: dict[str, Any], request: Request) -> Response:
    """Answer a body with `messages` as /v1/chat/completions does, and one with `prompt` as /v1/completions does."""
    if body.get("messages") is not None:
        return await chat_completions(_checked(ChatBody, body), request)
    if body.get("prompt") is not None:
        return await completions(_checked(CompletionBody, body), request)
    raise RequestError("the body has neither messages nor prompt: send one of them", param="messages")


def _checked(kind: type[Body], body: dict[str, Any]) -> Body:
    """Return the body as `kind`. Raises RequestValidationError as FastAPI does for a body of this kind."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        found = [{**one, "loc": ("body", *one["loc"])} for one in error.errors(include_url=False, include_input=False)]
        raise RequestValidationError(found) from error
