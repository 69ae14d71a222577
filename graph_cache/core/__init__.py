"""The graph cache: buckets, keys, capture state, static buffers, sites, runners, the pool and the cache itself.

Reading order: buckets, keys, buffers, pool, runner, site, cache.
"""
