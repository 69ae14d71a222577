"""POST /tokenize and /detokenize, which tokenize as the inference routes do, and GET /tokenizer_info, as in vLLM."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from engine.errors import RequestError
from server.http.body_route import BodyRoute
from server.http.keys import check_own_template
from server.http.openapi import REFUSALS, answered_by
from server.routes.hints import warn_of_unread
from server.schemas import answers
from server.schemas.requests import DetokenizeBody, TokenizeBody
from server.serving.service import Service

router = APIRouter(tags=["tokens"], responses=REFUSALS, route_class=BodyRoute)


@router.post("/tokenize", responses=answered_by(answers.Tokenized))
async def tokenize(body: TokenizeBody, request: Request) -> Response:
    """Return the token ids of a prompt, or of a conversation with the model's chat template."""
    service: Service = request.app.state.service
    tokens = service.tokens
    service.check_model(body.model)
    body.refuse_unsupported()
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("provide exactly one of prompt and messages", param="prompt")
    if body.prompt is not None:
        ids = await tokens.encode(body.prompt, "prompt", body.adds_special_tokens)
    else:
        check_own_template(request, body.chat_template)
        conversation = body.conversation()
        warn_of_unread(request, conversation, body)
        ids = (await tokens.chat(conversation, body.adds_special_tokens)).ids
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": service.client.info().max_model_len,
        "tokens": ids,
        "token_strs": tokens.entries(ids) if body.return_token_strs else None,
    }
    return JSONResponse(answer)


@router.get("/tokenizer_info", responses=answered_by(answers.TokenizerInfo))
async def tokenizer_info(request: Request) -> Response:
    """Return the tokenizer's settings, as vLLM does: tokenizer_config.json with the chat template, without paths."""
    service: Service = request.app.state.service
    return JSONResponse(await service.tokens.description())


@router.post("/detokenize", responses=answered_by(answers.Detokenized))
async def detokenize(body: DetokenizeBody, request: Request) -> Response:
    """Return the text of token ids, including special tokens."""
    service: Service = request.app.state.service
    tokens = service.tokens
    service.check_model(body.model)
    body.refuse_unsupported()
    if body.tokens:
        tokens.check(body.tokens, "tokens")
    return JSONResponse({"prompt": tokens.decode(body.tokens)})
