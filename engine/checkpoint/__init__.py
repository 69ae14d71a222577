"""Where model files come from: names, folders, the hub, the default model, GGUF files."""
