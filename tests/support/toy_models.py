"""A toy decoder whose layers each have one of three mixers, on the model interface, and the same in plain torch.

- attention: full attention with grouped heads.
- latent: attention over one latent vector per token.
- recurrent: a gated linear recurrence over a mix of each token with the one before.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor, nn

from engine.attention.cache_spec import CacheSpec, FullAttentionSpec, LatentSpec, RecurrentStateSpec
from engine.distributed.tensor_parallel import SINGLE_RANK, TensorParallel
from engine.layers import Embedding, Linear, RMSNorm
from engine.layers.recurrence import linear_recurrence
from engine.layers.weight_slot import Slot
from engine.models.config import Family, ModelConfig, read_model_config
from engine.models.interface import ForwardContext, Model
from engine.models.registry import Entry

ARCHITECTURE = "ToyMixerForCausalLM"
VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 97, 32, 4, 2, 16
WIDTH, VALUE_WIDTH, LATENT_SCALE = 24, 16, 0.3
EPS = 1e-6


@dataclass(frozen=True, kw_only=True)
class ToyConfig(ModelConfig):
    """ModelConfig with the mixer of each layer."""

    mixers: tuple[str, ...]

    def cache_specs(self) -> tuple[CacheSpec, ...]:
        specs: dict[str, CacheSpec] = {
            "attention": FullAttentionSpec(kv_heads=self.num_kv_heads, head_dim=self.head_dim),
            "latent": LatentSpec(width=WIDTH, value_width=VALUE_WIDTH, scale=LATENT_SCALE),
            "recurrent": RecurrentStateSpec(shapes=((self.hidden_size,), (1, self.hidden_size))),
        }
        return tuple(specs[mixer] for mixer in self.mixers)


def read_config(values: Mapping[str, Any], family: Family, where: str) -> ToyConfig:
    return ToyConfig(**vars(read_model_config(values, family, where)), mixers=tuple(values["mixers"]))


PARTS = {  # per mixer: the fused projections of its input, and the inputs of its output projection
    "attention": ({"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}, HEADS * HEAD_DIM),
    "latent": ({"q": HEADS * WIDTH, "latent": WIDTH}, HEADS * VALUE_WIDTH),
    "recurrent": ({"decay": HIDDEN, "input": HIDDEN}, HIDDEN),
}


class ToyLayer(nn.Module):
    """A mixer with a pre-norm and a residual connection."""

    def __init__(self, config: ToyConfig, index: int, dtype: torch.dtype, device: torch.device):
        super().__init__()
        self.index, self.mixer = index, config.mixers[index]
        parts, outputs = PARTS[self.mixer]
        self.norm = RMSNorm(HIDDEN, EPS, dtype, device)
        self.project = Linear(parts, HIDDEN, bias=False, dtype=dtype, device=device)
        self.out = Linear({"out": HIDDEN}, outputs, bias=False, dtype=dtype, device=device)

    def forward(self, hidden: Tensor, context: ForwardContext) -> Tensor:
        mix = {"attention": self.attend, "latent": self.attend_latent, "recurrent": self.recur}[self.mixer]
        return hidden + self.out(mix(self.norm(hidden), context))

    def attend(self, x: Tensor, context: ForwardContext) -> Tensor:
        heads = self.project(x).view(len(x), -1, HEAD_DIM)
        return context.attention(self.index, *heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1))

    def attend_latent(self, x: Tensor, context: ForwardContext) -> Tensor:
        heads = self.project(x).view(len(x), HEADS + 1, WIDTH)
        return context.attention(self.index, heads[:, :HEADS], heads[:, HEADS:], None)

    def recur(self, x: Tensor, context: ForwardContext) -> Tensor:
        states = context.states
        h, previous = states.read(self.index)  # [C, n] and [C, 1, n]: the state and last token before each chunk
        if states.chunk_of is None:  # a decode step: each row is a chunk of one token
            shifted = previous.squeeze(1)
        else:
            chunk = states.chunk_of
            is_first = (chunk != F.pad(chunk[:-1], (1, 0), value=-2)).unsqueeze(1)
            shifted = F.pad(x[:-1], (0, 0, 1, 0)).where(~is_first, previous.squeeze(1)[chunk.clamp(min=0)])
        decay, inputs = self.project(x + 0.5 * shifted).chunk(2, dim=-1)
        out = linear_recurrence(decay.sigmoid(), inputs, h, states.chunk_of)
        states.write(self.index, states.last(out), states.last(x).unsqueeze(1))
        return out

    def slots(self, prefix: str) -> dict[str, Slot]:
        return {**self.norm.slots(f"{prefix}.norm"), **self.project.slots(prefix), **self.out.slots(prefix)}


class ToyModel(Model, nn.Module):
    config: ToyConfig

    def __init__(
        self,
        config: ToyConfig,
        dtype: torch.dtype,
        device: torch.device | str,
        max_len: int | None = None,
        parallel: TensorParallel = SINGLE_RANK,
    ):
        super().__init__()
        device = torch.device(device)
        self.config, self.dtype, self.device = config, dtype, device
        self.max_len = max_len or config.context_length
        self.embedding = Embedding(VOCAB, HIDDEN, dtype=dtype, device=device)
        self.layers = nn.ModuleList(ToyLayer(config, index, dtype, device) for index in range(config.num_layers))
        self.norm = RMSNorm(HIDDEN, EPS, dtype, device)
        self.lm_head = Linear({"lm_head": VOCAB}, HIDDEN, bias=False, dtype=dtype, device=device)

    def embed(self, tokens: Tensor, index: Tensor | None = None) -> Tensor:
        return self.embedding(tokens if index is None else tokens.index_select(0, index))

    def rope(self, positions: Tensor) -> tuple[Tensor, ...]:
        return ()

    def layer(self, index: int, hidden: Tensor, context: ForwardContext) -> Tensor:
        return self.layers[index](hidden, context)

    def final_norm(self, hidden: Tensor) -> Tensor:
        return self.norm(hidden)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.final_norm(hidden))

    def weight_slots(self) -> dict[str, Slot]:
        slots: dict[str, Slot] = {**self.embedding.slots("embed"), **self.norm.slots("norm")}
        for index, layer in enumerate(self.layers):
            slots |= layer.slots(f"layers.{index}")
        return slots | self.lm_head.slots("head")


ENTRY = Entry(Family(architecture=ARCHITECTURE, model_type="toy_mixer"), read_config, ToyModel)


def write_toy(folder: Path, mixers: Sequence[str], seed: int = 0) -> dict[str, Tensor]:
    """Write a float32 model folder whose text varies, and return its weights."""
    values = {
        "architectures": [ARCHITECTURE],
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "num_hidden_layers": len(mixers),
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": HIDDEN,
        "max_position_embeddings": 512,
        "mixers": list(mixers),
        "dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(values))
    config = read_config(values, ENTRY.family, "config.json")
    generator = torch.Generator().manual_seed(seed)
    weights = {
        name: torch.randn(slot.shape, generator=generator) * 0.4 + ("norm" in name)
        for name, slot in ToyModel(config, torch.float32, "meta").weight_slots().items()
    }
    save_file(weights, str(folder / "model.safetensors"))
    return weights


class ToyReference:
    """The toy model over whole sequences in plain torch. Shares no code with the engine."""

    def __init__(self, weights: Mapping[str, Tensor], mixers: Sequence[str]):
        self.weights, self.mixers = weights, mixers
        self._greedy: dict[tuple[int, ...], list[int]] = {}

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * self.weights[f"{name}.weight"]

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        """q [L, H, D], k [L, H, D], v [L, H, E] -> [L, H * E]."""
        scores = torch.einsum("lhd,shd->hls", q, k) * scale
        later = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
        weights = scores.masked_fill(later, float("-inf")).softmax(-1)
        return torch.einsum("hls,she->lhe", weights, v).reshape(len(q), -1)

    def _mix(self, mixer: str, x: Tensor, name: str) -> Tensor:
        part = lambda part, x=x: x @ self.weights[f"{name}.{part}.weight"].T  # noqa: E731
        length = len(x)
        if mixer == "attention":
            q, k, v = (part(one).view(length, -1, HEAD_DIM) for one in "qkv")
            k, v = (one.repeat_interleave(HEADS // KV_HEADS, dim=1) for one in (k, v))
            return self._attend(q, k, v, HEAD_DIM**-0.5)
        if mixer == "latent":
            latent = part("latent").view(length, 1, WIDTH).expand(-1, HEADS, -1)
            return self._attend(part("q").view(length, HEADS, WIDTH), latent, latent[..., :VALUE_WIDTH], LATENT_SCALE)
        h, previous, outs = torch.zeros(HIDDEN), torch.zeros(HIDDEN), []
        for row in x:
            mixed = row + 0.5 * previous
            h, previous = part("decay", mixed).sigmoid() * h + part("input", mixed), row
            outs.append(h)
        return torch.stack(outs)

    @torch.inference_mode()
    def logits(self, ids: Sequence[int]) -> Tensor:
        """Return logits [len(ids), vocab]."""
        hidden = self.weights["embed.weight"][torch.tensor(list(ids))]
        for index, mixer in enumerate(self.mixers):
            name = f"layers.{index}"
            mixed = self._mix(mixer, self._norm(hidden, f"{name}.norm"), name)
            hidden = hidden + mixed @ self.weights[f"{name}.out.weight"].T
        return self._norm(hidden, "norm") @ self.weights["head.lm_head.weight"].T

    def greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Return the next `count` greedy tokens, ignoring EOS."""
        found = self._greedy.setdefault(tuple(prompt), [])
        while len(found) < count:
            found.append(int(self.logits([*prompt, *found])[-1].argmax()))
        return found[:count]
