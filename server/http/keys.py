"""API keys for the inference routes and separate keys for the admin routes.

Keys come from files and environment variables. They are stored as digests only, so that no log line, error or object
dump can show one.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from engine.errors import ConfigError
from server.config import ServerConfig
from server.http.errors import WireError, error_response

API_KEYS, ADMIN_KEYS = "ENCORE_API_KEYS", "ENCORE_ADMIN_KEYS"
# Routes for monitoring, load balancers and browsers. All others need an API key if any is configured.
OPEN_PATHS = frozenset(
    {"/", "/chat", "/health", "/health_generate", "/load", "/ready", "/metrics", "/version", "/graphs", "/openapi.json"}
)
OPEN_PREFIX = "/chat/"  # the files of the chat page
ADMIN_PREFIXES = ("/graphs/", "/weights/", "/profile/", "/server_info")


class Keys:
    """The accepted keys. Without inference keys, inference is open; without admin keys, the admin routes are off."""

    def __init__(self, inference: Iterable[str] = (), admin: Iterable[str] = ()):
        self._inference = tuple(map(_digest, inference))
        self._admin = tuple(map(_digest, admin))

    def __repr__(self) -> str:
        return f"{len(self._inference) or 'none'} for inference, {len(self._admin) or 'none'} for admin"

    @classmethod
    def load(cls, config: ServerConfig, environ: Mapping[str, str]) -> Keys:
        """Load keys from the configured files and from `environ`. Raises ConfigError for a file without keys."""
        return cls(
            [*_from_file(config.api_key_file), *_from_list(environ, API_KEYS)],
            [*_from_file(config.admin_key_file), *_from_list(environ, ADMIN_KEYS)],
        )

    @classmethod
    def take(cls, config: ServerConfig, environ: MutableMapping[str, str]) -> Keys:
        """Load keys like `load` and remove them from `environ`, which processes started later would inherit."""
        keys = cls.load(config, environ)
        for name in (API_KEYS, ADMIN_KEYS):
            environ.pop(name, None)
        return keys

    @property
    def guards_inference(self) -> bool:
        """Whether the inference routes require a key."""
        return bool(self._inference)

    def check(self, path: str, presented: str | None) -> None:
        """Check the `presented` key for `path`.

        Raises WireError 401 if the key is missing or not accepted, 403 if the admin routes are off.
        """
        if path in OPEN_PATHS or path.startswith(OPEN_PREFIX):
            return
        if path.startswith(ADMIN_PREFIXES):
            if not self._admin:
                raise WireError(
                    403, f"admin routes are off: start the server with --admin-key-file or {ADMIN_KEYS}",
                    type="permission_error", code="admin_disabled",
                )  # fmt: skip
            accepted = self._admin
        elif not self._inference:
            return
        else:
            accepted = self._inference
        if presented is None:
            raise _refusal("this route requires a key: send Authorization: Bearer KEY or X-Api-Key: KEY")
        if not _matches(presented, accepted):
            raise _refusal("the key is not accepted")

    def owner(self, presented: str | None) -> str:
        """Return a digest of an accepted inference key, or "" if inference requires none."""
        return _digest(presented).hex() if self._inference and presented is not None else ""

    def is_admin(self, presented: str | None) -> bool:
        """Return whether `presented` is an admin key."""
        return presented is not None and _matches(presented, self._admin)


class KeyMiddleware:
    """ASGI middleware that refuses requests without an accepted key before their body is read.

    Sets `state["is_admin"]`: whether the request has an admin key, as its key or in X-Admin-Key. Sets `state["owner"]`:
    who may read what the request stores, a digest of its key; "" if inference requires none.
    """

    def __init__(self, app: ASGIApp, keys: Keys):
        self.app, self.keys = app, keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            presented = _presented(headers)
            try:
                self.keys.check(scope["path"], presented)
            except WireError as refusal:
                response = error_response(refusal, scope)
                if refusal.status == 401:
                    response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
            scope.setdefault("state", {})["owner"] = self.keys.owner(presented)
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


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def _matches(presented: str, accepted: tuple[bytes, ...]) -> bool:
    """Return whether `presented` is an accepted key, in constant time: all keys are compared."""
    digest, found = _digest(presented), False
    for known in accepted:
        found |= hmac.compare_digest(digest, known)
    return found


def _from_file(path: str | None) -> list[str]:
    """Read one key per line. Empty lines and lines that start with # are skipped."""
    if path is None:
        return []
    try:
        lines = [line.strip() for line in Path(path).read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"the key file {path} can't be read: {getattr(exc, 'strerror', None) or exc}") from exc
    found = [line for line in lines if line and not line.startswith("#")]
    if not found:  # an empty file must not open the server to everyone
        raise ConfigError(f"the key file {path} contains no key: write one key per line")
    return _checked(found, f"the key file {path}")


def _from_list(environ: Mapping[str, str], name: str) -> list[str]:
    return _checked([key.strip() for key in environ.get(name, "").split(",") if key.strip()], name)


def _checked(found: list[str], where: str) -> list[str]:
    for number, key in enumerate(found, 1):
        if not (key.isascii() and key.isprintable()) or " " in key:  # never show the key itself
            raise ConfigError(f"key {number} of {where} can't be sent in a header: use ASCII characters without spaces")
    return found
