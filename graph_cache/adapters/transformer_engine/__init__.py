"""Graphs captured by Transformer Engine's `make_graphed_callables`, with inputs recorded from real calls and the checks
that it omits.

Only `installed.py` and `ambient_state.py` import transformer_engine. Independent of Megatron. Reading order: order,
samples, maker, graphs, installed.
"""

from graph_cache.adapters.transformer_engine.graphs import TransformerEngineGraphs

__all__ = ["TransformerEngineGraphs"]
