"""Attention over a paged KV cache.

`KVCache` holds the pages, in groups of layers with equal cache specs; `RecurrentStates` holds what layers without pages
keep per slot. selection.py chooses a backend (sdpa.py on a CPU, triton.py on CUDA), which gives the attention of each
step to the model's layers (interface.py).
"""
