"""API keys for the inference routes and separate keys for the admin routes.

Keys come from files and environment variables. They are stored as digests only, so that no log line, error or object
dump can show one. `http/keys.py` checks the keys of requests.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from engine.errors import ConfigError
from server.config import ServerConfig

API_KEYS, ADMIN_KEYS = "ENCORE_API_KEYS", "ENCORE_ADMIN_KEYS"


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

    def with_admin(self, key: str) -> Keys:
        """Return the same keys and one more admin key."""
        keys = Keys(admin=[key])
        keys._inference, keys._admin = self._inference, (*self._admin, *keys._admin)
        return keys

    @property
    def guards_inference(self) -> bool:
        """Whether the inference routes require a key."""
        return bool(self._inference)

    @property
    def guards_admin(self) -> bool:
        """Whether there are admin keys, without which the admin routes are off."""
        return bool(self._admin)

    def accepts(self, presented: str) -> bool:
        """Return whether `presented` is an inference key."""
        return _matches(presented, self._inference)

    def owner(self, presented: str | None) -> str:
        """Return a digest of an accepted inference key, or "" if inference requires none."""
        return _digest(presented).hex() if self._inference and presented is not None else ""

    def is_admin(self, presented: str | None) -> bool:
        """Return whether `presented` is an admin key."""
        return presented is not None and _matches(presented, self._admin)


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
