"""Warnings about hints that the model's chat template doesn't read, such as reasoning_effort."""

from __future__ import annotations

import logging
from collections.abc import Mapping

from fastapi import Request

from engine.text.conversation import HINTS, Conversation
from server.schemas.requests import ConversationFields
from server.serving.service import Service

log = logging.getLogger("encore.server")
OWN_NAMES: Mapping[str, str] = {}


def warn_of_unread(
    request: Request, conversation: Conversation, body: ConversationFields, names: Mapping[str, str] = OWN_NAMES
) -> None:
    """Name the hints without effect in the header X-Encore-Warning, and once each in the log.

    `names` maps fields of the chat request to the client's. Other variables that the template doesn't read are refused
    when it is rendered.
    """
    service: Service = request.app.state.service
    tokenizer = service.client.tokenizer
    if tokenizer is None or not conversation.variables:
        return
    template = conversation.template or tokenizer.chat_template(with_tools=bool(conversation.tools))
    for hint in conversation.unread(template):
        if hint not in HINTS:
            continue
        is_variable = hint in (body.chat_template_kwargs or {})
        name = f"chat_template_kwargs.{hint}" if is_variable else names.get(hint, hint)
        warning = f"{name} has no effect: the chat template doesn't read {hint}"
        request.state.warnings.append(warning)
        if hint not in service.unread_hints:
            service.unread_hints.add(hint)
            log.warning("a request was answered although %s; this is logged once", warning)
