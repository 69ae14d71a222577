"""Check the keys of requests: which routes need one, and what requests may ask for without an admin key."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import WireError, error_response
from server.http.sender import SENDER, sender_of
from server.keys import ADMIN_KEYS, Keys

# Routes for monitoring, load balancers and browsers. All others need an API key if any is configured.
OPEN_PATHS = frozenset(
    {
        "/",
        "/chat",
        "/docs",
        "/health",
        "/health_generate",
        "/ping",
        "/load",
        "/ready",
        "/metrics",
        "/version",
        "/graphs",
        "/openapi.json",
    }
)
OPEN_PREFIXES = ("/chat/", "/docs/")  # the files of these pages
ADMIN_PREFIXES = ("/graphs/", "/weights/", "/profile/", "/server_info")


def check_key(keys: Keys, path: str, presented: str | None) -> None:
    """Check the `presented` key for `path`.

    Raises WireError 401 if the key is missing or not accepted, 403 if the admin routes are off.
    """
    if path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
        return
    if is_admin_route := path.startswith(ADMIN_PREFIXES):
        if not keys.guards_admin:
            raise WireError(
                403, f"admin routes are off: start the server with --admin-key-file or {ADMIN_KEYS}",
                type="permission_error", code="admin_disabled",
            )  # fmt: skip
    elif not keys.guards_inference:
        return
    if presented is None:
        raise _refusal("this route requires a key: send Authorization: Bearer KEY or X-Api-Key: KEY")
    if not (keys.is_admin(presented) if is_admin_route else keys.accepts(presented)):
        raise _refusal("the key is not accepted")


class KeyMiddleware:
    """ASGI middleware that refuses requests without an accepted key before their body is read.

    Sets `state["is_admin"]`: whether the request has an admin key, as its key or in X-Admin-Key. Sets `state["owner"]`:
    who may read what the request stores, a digest of its key; "" if inference requires none. Sets SENDER.
    """

    def __init__(self, app: ASGIApp, keys: Keys):
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            presented = _presented(headers)
            try:
                check_key(self.keys, scope["path"], presented)
            except WireError as refusal:
                response = error_response(refusal, scope)
                if refusal.status == 401:
                    response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            owner = scope.setdefault("state", {})["owner"] = self.keys.owner(presented)
            SENDER.set(sender_of(scope, owner))
            scope["state"]["is_admin"] = self.keys.is_admin(presented) or self.keys.is_admin(headers.get("x-admin-key"))
        await self.app(scope, receive, send)


def _presented(headers: Headers) -> str | None:
    """Return the key of a request: its bearer token, or X-Api-Key, as Anthropic's clients send it."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    bearer = key.strip() if scheme.lower() == "bearer" else ""
    return bearer or headers.get("x-api-key", "").strip() or None


def check_priority(request: Request, priority: int) -> None:
    """Raise WireError 403 for a priority other than 0 without an admin key, unless --allow-priority allows it to all.

    Any client could otherwise run before all others.
    """
    if priority and not (request.state.is_admin or request.app.state.config.allow_priority):
        raise WireError(
            403,
            f"priority={priority} requires an admin key: send X-Admin-Key: KEY, remove the field, or start the server "
            "with --allow-priority",
            type="permission_error", param="priority", code="priority_not_allowed",
        )  # fmt: skip


def check_own_template(request: Request, template: str | None) -> None:
    """Raise WireError 403 for a chat template in a request, unless the operator allows them."""
    if template is not None and not request.app.state.config.trust_request_chat_template:
        raise WireError(
            403, "chat_template is not allowed: remove it, or start the server with --trust-request-chat-template",
            type="permission_error", param="chat_template", code="chat_template_not_allowed",
        )  # fmt: skip


def _refusal(message: str) -> WireError:
    return WireError(401, message, type="authentication_error", code="invalid_api_key")
