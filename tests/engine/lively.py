"""A tiny random model whose every token depends on its whole context, and the same model in transformers.

Its greedy text does not repeat itself, so that a wrong page, position or weight changes the tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from engine import SamplingParams

SETTINGS = {
    "dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_model_len": 256, "graph_buckets": (8,),
    "graph_manifest": "none",
}  # fmt: skip
PROMPTS = ([5, 9, 200, 31, 7], [17], list(range(3, 40)), [250, 8, 8, 8, 100, 44, 61, 2], [300, 1])


def write_lively_model(tiny: Path, folder: Path, seed: int) -> None:
    """The tiny model's tokenizer and shape with wide random weights of their own: its greedy text does not repeat."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    config = LlamaConfig.from_pretrained(tiny, tie_word_embeddings=False, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


class Reference:
    """The model in transformers, run eagerly over the whole text for every token; shares nothing with the engine."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._greedy: dict[tuple[int, ...], list[int]] = {}

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """[len(ids), vocab]"""
        return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        return self.logits(ids).log_softmax(dim=-1)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """The `count` tokens that follow, each the best of its logits; end-of-text does not end it."""
        found = self._greedy.setdefault(tuple(prompt), [])
        while len(found) < count:
            found.append(int(self.logits([*prompt, *found])[-1].argmax()))
        return found[:count]


def greedy(max_tokens: int = 16, **options: Any) -> SamplingParams:
    """Greedy, past any end-of-text."""
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | options))
