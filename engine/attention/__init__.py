"""Attention over a paged KV cache.

`KVCache` holds the pages. `DecodeAttention` and `PrefillAttention` are the callables that a model's layers are given.
sdpa.py is the reference, triton.py the CUDA decode backend.
"""

from engine.attention.backend import Attention, DecodeAttention, PrefillAttention
from engine.attention.kv_cache import KVCache

__all__ = ["Attention", "DecodeAttention", "KVCache", "PrefillAttention"]
