"""The prefix under which a proxy offers the server (--root-path)."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """ASGI middleware that removes the prefix from the paths of requests, for proxies that leave it in.

    It must be the outermost one: all others, the check of keys among them, see the path that is routed. A path without
    the prefix is routed as it is, for proxies that remove it.
    """

    def __init__(self, app: ASGIApp, prefix: str):
        self.app, self.prefix = app, prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and (scope["path"] + "/").startswith(self.prefix + "/"):
            raw, prefix = scope.get("raw_path") or b"", self.prefix.encode()
            scope["path"] = scope["path"][len(self.prefix) :] or "/"  # in place: the handler of a 500 reads it too
            if raw.startswith(prefix):
                scope["raw_path"] = raw[len(prefix) :] or b"/"
        await self.app(scope, receive, send)
