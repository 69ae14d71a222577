"""Serve Megatron-Core GPTModels, and convert their configuration and weights from and to Hugging Face checkpoints.

Uses the model's attributes and parameter names only; megatron itself is imported in `graph_cache/adapters/megatron`.
"""
