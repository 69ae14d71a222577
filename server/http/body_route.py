"""A route that keeps neither the bytes nor the JSON of a body while its request runs."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import HTTPException, Request
from fastapi.routing import APIRoute
from starlette.responses import Response

from graph_cache.utils.garbage import no_garbage_collections

LARGE_BYTES = 256 * 1024  # parsing takes up to 10 ms


class BodyRoute(APIRoute):
    """A FastAPI route whose requests forget their body once it is parsed.

    Starlette caches both until the response is complete: 8 MB and their JSON objects for each waiting request. FastAPI
    holds the JSON until the endpoint returns: an endpoint that waits is `long_running`.
    """

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, called with a request that caches nothing."""
        handle = super().get_route_handler()

        async def handle_uncached(request: Request) -> Response:
            return await handle(_UncachedRequest(request.scope, request.receive))

        return handle_uncached


class _UncachedRequest(Request):
    _unparsed: bytes = b""

    async def body(self) -> bytes:
        self._unparsed = b"".join([chunk async for chunk in self.stream()])
        return self._unparsed

    async def json(self) -> Any:
        """Parse what `body` read; once."""
        content, self._unparsed = self._unparsed, b""
        if len(content) <= LARGE_BYTES:
            return _loaded(content)
        # One at a time: between two of them the event loop does the other work that is due.
        async with self.app.state.large_body:
            await asyncio.sleep(0)
            with no_garbage_collections():  # they take 1 s for 8 MB of lists
                found = _loaded(content)
            await asyncio.sleep(0)  # the checks of a large body take as long as its parsing
            return found


def _loaded(content: bytes) -> Any:
    """Parse JSON. Raises JSONDecodeError for invalid JSON, HTTPException for other bodies that can't be read.

    FastAPI replaces other exceptions by one that doesn't say what is wrong.
    """
    try:
        return json.loads(content.decode("utf-8-sig"))  # of bytes, json.loads also takes UTF-16 and lone surrogates
    except RecursionError as error:
        raise HTTPException(400, "the body has too many nested objects and lists: flatten it") from error
    except UnicodeDecodeError as error:
        raise HTTPException(
            400, f"the body is not valid UTF-8: {error.reason} at byte {error.start}; send JSON in UTF-8"
        ) from error
    except json.JSONDecodeError:
        raise
    except ValueError as error:  # Python refuses to convert so many digits
        limit = sys.get_int_max_str_digits()
        raise HTTPException(400, f"the body has an integer of more than {limit} digits: shorten it") from error
