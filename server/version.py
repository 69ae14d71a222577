"""The version of the installed distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as distribution_version

OLLAMA_VERSION = "0.15.0"  # reported by /api/version: clients compare it with what they need of Ollama's API
VLLM_VERSION = "0.33.0"  # the vLLM release whose API and metrics --compat vllm follows


def version() -> str:
    """Return the version of encore-serve, or "unknown" if it is not installed."""
    try:
        return distribution_version("encore-serve")
    except PackageNotFoundError:
        return "unknown"
