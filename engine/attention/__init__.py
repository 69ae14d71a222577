"""Attention over a paged key/value cache.

KVCache holds the pages; DecodeAttention and PrefillAttention are the callables a model's layers are
given. sdpa.py has the reference kernels, triton_decode.py the CUDA decode kernel.
"""

from engine.attention.base import Attention, DecodeAttention, KVCache, PrefillAttention

__all__ = ["Attention", "DecodeAttention", "KVCache", "PrefillAttention"]
