"""The "lively" model: a tiny random model in which every token depends on the whole context, and a reference for it.

Its greedy text does not repeat itself, so a wrong page, position or weight changes the tokens.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from engine import SamplingParams
from engine.core.loop import EngineLoop
from engine.protocol.request import EngineRequest, TokenEvent

SETTINGS = {
    "dtype": "float32", "num_threads": 1, "max_num_seqs": 8, "max_model_len": 256, "graph_buckets": (8,),
    "graph_manifest": "none",
}  # fmt: skip
SAMPLING_VARIANTS = 6  # graphs of the sampling step per bucket, on a CPU
MANY = [[10 + i, 20 + i, 30 + i] for i in range(8)]  # a full batch: no padding
PROMPTS = ([5, 9, 200, 31, 7], [17], list(range(3, 40)), [250, 8, 8, 8, 100, 44, 61, 2], [300, 1])


def write_lively_model(tiny: Path, folder: Path, seed: int) -> None:
    """Save a model with the tiny model's tokenizer and shape and wide random weights, so that its text varies."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shutil.copytree(tiny, folder, dirs_exist_ok=True)
    config = LlamaConfig.from_pretrained(tiny, tie_word_embeddings=False, initializer_range=0.2)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        LlamaForCausalLM(config).to(torch.float32).save_pretrained(folder)


class Reference:
    """The same model in transformers, run over the whole text for every token. Shares no code with the engine."""

    def __init__(self, folder: Path):
        from transformers import AutoModelForCausalLM

        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._greedy: dict[tuple[int, ...], list[int]] = {}

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Return logits [len(ids), vocab]."""
        return self.model(torch.tensor([list(ids)]), use_cache=False).logits[0]

    def logprobs(self, ids: Sequence[int]) -> torch.Tensor:
        return self.logits(ids).log_softmax(dim=-1)

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the next `count` greedy tokens, ignoring EOS."""
        found = self._greedy.setdefault(tuple(prompt), [])
        while len(found) < count:
            found.append(int(self.logits([*prompt, *found])[-1].argmax()))
        return found[:count]


def greedy(max_tokens: int = 16, **options: Any) -> SamplingParams:
    """Return greedy sampling params that ignore EOS."""
    return SamplingParams(**({"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True} | options))


def request(name: str, prompt: Sequence[int], params: SamplingParams, priority: int = 0) -> EngineRequest:
    return EngineRequest(request_id=name, prompt_token_ids=list(prompt), params=params, priority=priority, seed=42)


def drain(loop: EngineLoop, aborts: Mapping[int, Sequence[str]] | None = None) -> dict[str, list[TokenEvent]]:
    """Step until all requests have ended and return their events, after checking that each ends exactly once.

    `aborts` maps a step number to requests to abort before it.
    """
    events: dict[str, list[TokenEvent]] = {}
    for step in itertools.count():
        loop.abort((aborts or {}).get(step, ()))
        if not loop.has_work:
            break
        for event in loop.step():
            events.setdefault(event.request_id, []).append(event)
        assert step < 5000, "the loop does not come to an end"
    for own in events.values():
        assert [event.finish_reason is not None for event in own] == [False] * (len(own) - 1) + [True]
        assert all(event.queue_time is None and event.prompt_logprobs is None for event in own[1:])
    return events


def tokens(events: Sequence[TokenEvent]) -> list[int]:
    return [token for event in events for token in event.token_ids]
