"""Limit the compiled kernels that oneDNN keeps on a CPU, through the environment, before torch loads the library.

oneDNN compiles a kernel per shape of a matrix product, about half a megabyte each in bf16, and a prompt's length is
part of the shape. It keeps 1,024 of them, and torch as many beside them: prompts of 500 lengths were seen to take 1 GB.
The products of decode steps have few shapes, which stay among the latest.
"""

from __future__ import annotations

import os

KERNELS = "128"
VARIABLES = ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY")  # the latter is torch's


def limit_onednn_caches() -> None:
    """Keep KERNELS compiled kernels in each cache, unless its variable is set. Call before torch is imported."""
    for name in VARIABLES:
        os.environ.setdefault(name, KERNELS)
