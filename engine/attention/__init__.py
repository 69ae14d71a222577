"""Attention over a paged KV cache.

`KVCache` holds the pages. A model's layers call `DecodeAttention` or `PrefillAttention`. sdpa.py is the reference
backend, triton.py the CUDA decode backend.
"""

from engine.attention.backend import Attention, DecodeAttention, PrefillAttention
from engine.attention.kv_cache import KVCache

__all__ = ["Attention", "DecodeAttention", "KVCache", "PrefillAttention"]
