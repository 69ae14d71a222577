"""Graph capture for Megatron-Core 0.16 to 0.19 models: part selection, checks, schedules and whole iterations.

The only package that imports megatron. `config.py` maps Megatron's settings onto the core's and needs neither megatron
nor torch. The graphs themselves are made by `graph_cache.training`.
"""
