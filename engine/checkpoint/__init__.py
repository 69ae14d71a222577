"""Locate and read model files: names, folders, the Hugging Face hub, the default model, GGUF files."""
