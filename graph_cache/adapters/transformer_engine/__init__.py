"""Graphs by Transformer Engine's `make_graphed_callables`: what it needs, built from real calls, and what it omits.

The sole importer of transformer_engine, in `installed.py`. Knows no Megatron; read in the order order, samples, maker,
graphs, installed.
"""

from graph_cache.adapters.transformer_engine.graphs import TransformerEngineGraphs

__all__ = ["TransformerEngineGraphs"]
