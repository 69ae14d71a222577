"""The installed distribution's version, from its metadata."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version


def version() -> str:
    """The version of encore-serve; "unknown" where the sources run without having been installed."""
    try:
        return distribution_version("encore-serve")
    except PackageNotFoundError:
        return "unknown"
