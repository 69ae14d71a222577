"""One chat request on its way through the engine. Each route for chats translates its own format to and from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

from fastapi import Request

from engine.text.parsing.chat import ChatParser
from server.http.keys import check_own_template, check_priority
from server.routes.hints import OWN_NAMES, warn_of_unread
from server.schemas.requests import ChatBody, naming
from server.schemas.translation import translated_errors
from server.serving.chat_formats import MakeParser
from server.serving.jobs import Job
from server.serving.request_log import started
from server.serving.service import Service


class ChatRun:
    """The checks of a chat request, made at construction, and its job, made by `tokenize`.

    `names` maps fields of the chat request to the client's and `places` its messages to theirs, for errors and
    warnings. `stops_at_context`: shorten `max_tokens` to what the context holds after the prompt, instead of refusing
    it. `tokenize` sets `make_parser` and `short_ids`: how to parse each output (None: all text is content), and whether
    the model's template takes call ids of nine letters and digits only. Raises RequestError, WireError.
    """

    def __init__(
        self, service: Service, request: Request, body: ChatBody, public_id: str, names: Mapping[str, str] = OWN_NAMES,
        places: Sequence[str] = (), stops_at_context: bool = False,
    ):  # fmt: skip
        self._service, self._request, self._body = service, request, body
        self._public_id, self._stops_at_context = public_id, stops_at_context
        self._names, self._places = names, places
        self.make_parser: MakeParser | None = None
        self.short_ids = False
        with self.translated():
            service.check_model(body.model)
            body.refuse_unsupported()
            check_priority(request, body.priority)
            check_own_template(request, body.chat_template)
            self.params = body.sampling(service.sampling_defaults())
            self.conversation, self._use = body.conversation(), body.tool_use()
            warn_of_unread(request, self.conversation, body, names)
            self._truncation = body.truncation
            self._formats = service.chat_formats_of(self._use)

    def translated(self) -> AbstractContextManager[None]:
        """Return a context in which RequestErrors name fields as the client sent them."""
        return translated_errors(self._names, self._places) if self._names else nullcontext()

    def parser(self) -> ChatParser:
        """Return a parser of one output."""
        return self.make_parser() if self.make_parser is not None else ChatParser()

    async def tokenize(self) -> Job:
        """Render and tokenize the prompt and return the job. Reserve capacity for it before."""
        body, service = self._body, self._service
        with self.translated():
            prompt = await service.tokens.chat(self.conversation, body.add_special_tokens is True)
            plan = self._formats.plan(
                prompt.text, self.conversation, self._use, self.params.structured_outputs, body.thinking_token_budget,
                body.separate_reasoning is not False,
            )  # fmt: skip
            self.make_parser = plan.make_parser
            self.short_ids = self._formats.tools is not None and self._formats.tools.short_ids
            params = dataclasses.replace(self.params, structured_outputs=plan.constraint, show_markers=True)
            room = service.client.info().max_model_len - len(prompt.ids)
            if self._stops_at_context and params.max_tokens is not None and 0 < room < params.max_tokens:
                params = dataclasses.replace(params, max_tokens=room)
            with naming(body.sent_names()):
                job = service.jobs.of_ids(
                    self._public_id, None, prompt.ids, "messages", params, body.priority, self._truncation
                )
        started(self._request, [job])
        return job
