"""Models to begin with, by their names on the Hugging Face hub. All are served in 16 bits by the engine's families."""

from __future__ import annotations

from typing import NamedTuple

from engine.config import DEFAULT_MODEL


class Recommended(NamedTuple):
    """A recommended model. `parameters` in millions; a gated model requires HF_TOKEN and its licence's acceptance."""

    name: str
    family: str
    parameters: int
    licence: str
    gated: bool = False


RECOMMENDED = (
    Recommended(DEFAULT_MODEL, "llama", 135, "Apache-2.0"),
    Recommended("Qwen/Qwen3-0.6B", "qwen3", 752, "Apache-2.0"),
    Recommended("google/gemma-3-1b-it", "gemma3_text", 1000, "Gemma terms", gated=True),
    Recommended("HuggingFaceTB/SmolLM2-1.7B-Instruct", "llama", 1711, "Apache-2.0"),
    Recommended("Qwen/Qwen3-4B", "qwen3", 4022, "Apache-2.0"),
    Recommended("mistralai/Mistral-7B-Instruct-v0.3", "mistral", 7248, "Apache-2.0"),
    Recommended("Qwen/Qwen2.5-7B-Instruct", "qwen2", 7616, "Apache-2.0"),
    Recommended("meta-llama/Llama-3.1-8B-Instruct", "llama", 8030, "Llama 3.1 Community", gated=True),
    Recommended("Qwen/Qwen3-8B", "qwen3", 8191, "Apache-2.0"),
    Recommended("Qwen/Qwen3-30B-A3B", "qwen3_moe", 30532, "Apache-2.0"),
)
