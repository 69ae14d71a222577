"""Graphs for Megatron-Core: what of its models is captured, in its own vocabulary, by versions 0.16 to 0.19.

The sole importer of megatron. Knows no requests and no pages; the graphs are `graph_cache.training`'s.
"""
