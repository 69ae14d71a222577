"""Start Ray on this machine, or connect to the cluster of the environment variable RAY_ADDRESS."""

from __future__ import annotations

import logging
import os
import secrets
import sys
from typing import Any

# Ray runs code of anyone who reaches its ports, which are open on all addresses. With a token, of this program's user
# alone. Ray reads these variables when it is imported.
if "ray" not in sys.modules and "RAY_ADDRESS" not in os.environ and "RAY_AUTH_MODE" not in os.environ:
    os.environ |= {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}

import ray  # noqa: E402


def is_local() -> bool:
    """Return whether `start_ray` starts Ray on this machine."""
    return "RAY_ADDRESS" not in os.environ


def start_ray(processors: int) -> None:
    """Start Ray with this many logical processors, or connect to the cluster."""
    options: dict[str, Any] = {"logging_level": logging.ERROR}
    if is_local():
        options |= {"num_cpus": processors, "include_dashboard": False}
    try:
        ray.init(**options)
    except Exception as error:  # a plain Exception, if reading Ray's files the first time takes more than 30 s
        if "timed out during startup" not in str(error):
            raise
        ray.shutdown()
        ray.init(**options)
