"""A Megatron-Core GPTModel in the engine: its configuration and its weights, from Hugging Face checkpoints and back.

Works on the model's attributes and parameter names and imports no megatron: only `graph_cache/adapters/megatron` does.
"""
