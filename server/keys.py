"""API keys for the inference routes and separate keys for the admin routes.

Keys come from files and environment variables. They are stored as digests only, so that no log line, error or object
dump can show one. A file that changes is read again, in every process that checks keys. `http/keys.py` checks the keys
of requests.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import time
from collections.abc import Iterable, Mapping, MutableMapping
from pathlib import Path

from engine.errors import ConfigError
from server.config import ServerConfig

API_KEYS, ADMIN_KEYS = "ENCORE_API_KEYS", "ENCORE_ADMIN_KEYS"


log = logging.getLogger("encore.server")
CHECK_SECONDS = 1.0  # between two looks at a file


class KeyFile:
    """The keys of one file, read again when the file has changed. Raises ConfigError if it can't be read at first.

    A file that can't be read later, or has no valid keys, leaves the keys as they are: the log says so.
    """

    def __init__(self, path: str):
        self._path = os.path.abspath(path)  # replicas have other working directories
        self._stamp = _stamp(self._path)
        self._next_check = 0.0
        self._digests = tuple(map(_digest, _from_file(path)))

    def digests(self) -> tuple[bytes, ...]:
        """Return the digests of the keys that the file has now, or had less than CHECK_SECONDS ago."""
        if (now := time.monotonic()) >= self._next_check:
            self._next_check = now + CHECK_SECONDS
            if (stamp := _stamp(self._path)) != self._stamp:
                self._stamp = stamp
                self._reload()
        return self._digests

    def _reload(self) -> None:
        try:
            self._digests = tuple(map(_digest, _from_file(self._path)))
            log.info("read %s again: %d keys", self._path, len(self._digests))
        except ConfigError as error:
            log.error("%s; its earlier %d keys stay accepted", error, len(self._digests))

    def __getstate__(self) -> dict:
        return vars(self) | {"_next_check": 0.0}  # another process has another clock


class Keys:
    """The accepted keys. Without inference keys, inference is open; without admin keys, the admin routes are off.

    `api_key_file`, `admin_key_file`: paths of files with further keys, see KeyFile.
    """

    def __init__(
        self,
        inference: Iterable[str] = (),
        admin: Iterable[str] = (),
        api_key_file: str | None = None,
        admin_key_file: str | None = None,
    ):
        self._fixed_inference = tuple(map(_digest, inference))
        self._fixed_admin = tuple(map(_digest, admin))
        self._inference_file = None if api_key_file is None else KeyFile(api_key_file)
        self._admin_file = None if admin_key_file is None else KeyFile(admin_key_file)

    @property
    def _inference(self) -> tuple[bytes, ...]:
        file = self._inference_file
        return self._fixed_inference if file is None else (*file.digests(), *self._fixed_inference)

    @property
    def _admin(self) -> tuple[bytes, ...]:
        file = self._admin_file
        return self._fixed_admin if file is None else (*file.digests(), *self._fixed_admin)

    def __repr__(self) -> str:
        return f"{len(self._inference) or 'none'} for inference, {len(self._admin) or 'none'} for admin"

    @classmethod
    def load(cls, config: ServerConfig, environ: Mapping[str, str]) -> Keys:
        """Load keys from the configured files and from `environ`. Raises ConfigError for a file without keys."""
        return cls(
            _from_list(environ, API_KEYS), _from_list(environ, ADMIN_KEYS), config.api_key_file, config.admin_key_file
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
        keys._fixed_inference = self._fixed_inference
        keys._fixed_admin = (*self._fixed_admin, *keys._fixed_admin)
        keys._inference_file, keys._admin_file = self._inference_file, self._admin_file
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


def _stamp(path: str) -> tuple[int, ...]:
    """Return what changes when a file is written or replaced; () if it can't be read."""
    try:
        found = os.stat(path)
    except OSError:
        return ()
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_dev


def _from_file(path: str) -> list[str]:
    """Read one key per line. Empty lines and lines that start with # are skipped."""
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
