"""Continuous batching: the scheduler, admission, KV pages and the prefix cache. Plain integers, no tensors."""
