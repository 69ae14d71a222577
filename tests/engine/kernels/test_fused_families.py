"""Fused steps of every family, prefill and decode, against the model's own layers, which equal transformers'."""

from __future__ import annotations

import json

import pytest
import torch

from tests.support.kernels import DEVICE, INTERPRETED, relative_error  # isort: skip  (before what imports triton)

from engine.attention.kv_cache import KVCache
from engine.attention.metadata import DecodeMetadata
from engine.attention.sdpa import SdpaBackend
from engine.attention.triton import TritonBackend
from engine.distributed.tensor_parallel import TensorParallel
from engine.loader.quantized import weight_methods
from engine.models import config_from_dict
from engine.models.decoder import Decoder
from engine.models.interface import ForwardContext
from engine.models.registry import ENTRIES, build_model
from tests.support.attention import decode_attention, prefill_metadata
from tests.support.families import FAMILIES, VARIANTS, config_of
from tests.support.gloo_ranks import run_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # raised by Triton: ast, numpy scalars
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of sigmoids, in the interpreter: 1 / inf is 0
]
DTYPE = torch.float32 if INTERPRETED else torch.float16
VOCAB, LENGTHS, STEPS, PAGE = 320, (19, 3, 1), 2, 16
SIZES = {} if INTERPRETED else {"hidden_size": 256, "intermediate_size": 384, "head_dim": 64}
WITH_FACTORS = ("phi3-short", "phi3-long-partial")  # rotary factors, as many as suit the size of their heads


def make_model(family: str, dtype: torch.dtype) -> Decoder:
    config = config_of(family, **({} if family in WITH_FACTORS else SIZES))
    [architecture] = [entry.family.architecture for entry in ENTRIES if entry.family.model_type == config.model_type]
    values = json.loads(config.to_json_string(use_diff=False))
    read = config_from_dict({**values, "architectures": [architecture]})
    model = build_model(read, dtype, DEVICE, 256, methods=weight_methods(read))
    generator = torch.Generator().manual_seed(3)
    for name, parameter in model.named_parameters():
        scale, centre = (0.3, 1.0 if "norm" in name and name.endswith("weight") else 0.0)
        drawn = torch.randn(parameter.shape, generator=generator) * (scale if parameter.dim() == 1 else 0.2) + centre
        parameter.data.copy_(drawn)
    return model


def run(model: Decoder, fused: bool, backend: str) -> torch.Tensor:
    """Prefill sequences of LENGTHS tokens, decode STEPS given tokens of each, and return all logits."""
    kv = KVCache(model.config.cache_specs(), 16, PAGE, model.dtype, DEVICE)
    for layer in range(model.config.num_layers):
        for pages in (kv.k[layer], kv.v[layer]):
            pages.fill_(0.0 if backend == "sdpa" else float("nan"))  # a stale page may hold anything
            pages[0].zero_()
    tables = [[1 + 3 * index, 3 + 3 * index] for index in range(len(LENGTHS))]
    attention = TritonBackend(kv, 8)
    step = model.fused(8, 64) if fused else model
    found = []

    def compute(hidden, context, last):
        for index in range(model.config.num_layers):
            hidden = step.layer(index, hidden, context)
        selected = hidden if last is None else hidden[last]
        if not fused:
            return step.compute_logits(selected)
        logits = torch.full((len(selected), VOCAB), float("nan"), device=DEVICE, dtype=step.logits_dtype)
        maxima = step.head(selected, logits, after_layer=last is None)
        if maxima is not None:
            assert torch.equal(maxima.values.max(1).values, logits.float().max(1).values)
        return logits

    tokens = torch.arange(sum(LENGTHS), device=DEVICE) * 7 % VOCAB
    metadata = prefill_metadata(kv, [(0, length) for length in LENGTHS], tables)
    if backend == "sdpa":
        context_attention = SdpaBackend(kv, 8).prefill(metadata)
    else:
        context_attention = attention.prefill(metadata)
    context = ForwardContext(step.rope(metadata.positions), context_attention, metadata.token_rows)
    found.append(compute(step.embed(tokens), context, metadata.ends - 1))
    table = torch.tensor(tables, device=DEVICE)
    slots = torch.arange(len(LENGTHS), device=DEVICE)
    for number in range(STEPS):
        positions = torch.tensor(LENGTHS, device=DEVICE) + number
        last_tokens = (slots * 11 + number * 5) % VOCAB
        if backend == "sdpa":
            decode = decode_attention(kv, table, positions)
        else:
            groups = table.expand(len(kv.groups), *table.shape)
            decode = attention.decode(DecodeMetadata(groups, slots, positions))
        context = ForwardContext(step.rope(positions), decode)
        found.append(compute(step.embed(last_tokens, slots), context, None))
    return torch.cat(found).float()


@pytest.mark.parametrize(
    "family",
    [
        *FAMILIES,
        *(pytest.param(variant, marks=[pytest.mark.slow] if INTERPRETED else []) for variant in VARIANTS),
    ],
)
@torch.inference_mode()
def test_fused_steps_of_a_family_equal_its_own_layers(family):
    model = make_model(family, DTYPE)
    found = run(model, True, "triton")
    if INTERPRETED:
        assert relative_error(found, run(model, False, "sdpa")) < 1e-4
        return
    wanted = run(make_model(family, torch.float32), False, "sdpa")
    own = relative_error(run(model, False, "sdpa"), wanted)
    assert relative_error(found, wanted) < 1.5 * own + 0.01


def logits_of_ranks(parallel: TensorParallel, families: list[str]) -> dict[str, torch.Tensor]:
    """Return the logits of fused steps of this rank's shards."""
    found = {}
    for family in families:
        whole = make_model(family, DTYPE)
        weights = dict(whole.named_weights())
        shard = Decoder(whole.config, DTYPE, DEVICE, 256, parallel)
        for name, slot in shard.weight_slots().items():
            slot.write(weights[name])
        with torch.inference_mode():
            found[family] = run(shard, True, "triton")
    return found


@pytest.mark.slow
@pytest.mark.skipif(not INTERPRETED, reason="ranks on several GPUs: tests/engine/executor/test_tensor_parallel_gpu.py")
def test_fused_steps_of_two_ranks_equal_the_steps_of_one(tmp_path):
    families = ["gemma2", "cohere-qk-norms", "phi"]
    first, second = run_ranks(logits_of_ranks, tmp_path, families)
    for family in families:
        assert torch.equal(first[family], second[family]), family
        with torch.inference_mode():
            wanted = run(make_model(family, DTYPE), False, "sdpa")
        assert relative_error(first[family], wanted) < 1e-4, family
