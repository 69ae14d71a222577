"""Which request is being served, and who sent it: the digest of its key, or else its address."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextvars import ContextVar
from typing import Any

SENDER: ContextVar[str] = ContextVar("sender", default="")
"""The sender of the current task's request. What holds a scarce place, such as a slow template, is shared fairly by it.

A context variable, since the work that it decides on is far from the request. KeyMiddleware sets it.
"""
REQUEST_ID: ContextVar[str] = ContextVar("request_id", default="")
"""The id of the current task's request, under which it can be aborted. RequestIds sets it."""


def sender_of(scope: MutableMapping[str, Any], owner: str) -> str:
    """Return the sender of a request: `owner`, the digest of its key, or its address if it needs no key."""
    return owner or str((scope.get("client") or ("",))[0])
