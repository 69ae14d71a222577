"""Check the keys of requests: which routes need one, and what requests may ask for without an admin key."""

from __future__ import annotations

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from server.http.errors import WireError, error_response
from server.http.hosts import host_name, is_loopback
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
# The second part lists the routes of server/routes/trainer.py; some names begin with others.
ADMIN_PREFIXES = (
    "/graphs/", "/weights/", "/profile/", "/kv_blocks", "/server_info", "/get_server_info",
    "/pause", "/resume", "/is_paused", "/continue_generation", "/abort_request", "/reset_prefix_cache", "/flush_cache",
    "/start_weight_update", "/finish_weight_update", "/update_weight", "/weight_info", "/weight_checker",
    "/init_weight", "/destroy_weights_update_group", "/get_weights_by_name", "/get_world_size", "/get_model_info",
    "/collective_rpc", "/model_info", "/weight_version", "/get_weight_version",
    "/sleep", "/wake_up", "/is_sleeping", "/release_memory_occupation", "/release_kv_cache_memory",
)  # fmt: skip
FORWARDED = ("x-forwarded-for", "x-real-ip", "forwarded", "via")  # headers of a request that a proxy passes on


def check_key(keys: Keys, path: str, presented: str | None, is_local: bool = False) -> None:
    """Check the `presented` key for `path`. `is_local`: the request may use the admin routes without one.

    Raises WireError 401 if the key is missing or not accepted, 403 if the admin routes are off.
    """
    if path in OPEN_PATHS or path.startswith(OPEN_PREFIXES):
        return
    if is_admin_route := path.startswith(ADMIN_PREFIXES):
        if is_local and (presented is None or not keys.guards_admin):
            return
        if not keys.guards_admin:
            raise WireError(
                403, f"admin routes are off: start the server with --admin-key-file or {ADMIN_KEYS}, or with "
                "--admin-without-key loopback for clients on this machine",
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

    `local_admin`: whether the admin routes need no key in requests from this machine; see `is_from_this_machine`. Sets
    `state["is_admin"]`: whether the request has an admin key, as its key or in X-Admin-Key. Sets `state["owner"]`:
    who may read what the request stores, a digest of its key; "" if inference requires none. Sets SENDER.
    """

    def __init__(self, app: ASGIApp, keys: Keys, local_admin: bool = False):
        self.app, self.keys, self._local_admin = app, keys, local_admin

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            presented = _presented(headers)
            try:
                check_key(
                    self.keys, scope["path"], presented, self._local_admin and is_from_this_machine(scope, headers)
                )
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


def is_from_this_machine(scope: Scope, headers: Headers) -> bool:
    """Return whether a request came over a loopback address, to a name of it, and neither by a proxy nor a web page."""
    addresses = [(scope.get(end) or ("",))[0] for end in ("client", "server")]
    if not all(address is not None and _is_loopback_name(address) for address in addresses):
        return False
    if not _is_loopback_name(host_name(headers.get("host", ""))):  # a name that a page has pointed here
        return False
    return not any(name in headers for name in ("origin", *FORWARDED))


def _is_loopback_name(name: str) -> bool:
    try:
        return name == "localhost" or is_loopback(name)
    except ValueError:
        return False


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
