"""Fused steps of quantised decoders against the dequantised model in float32: logits, replays, and memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest
import torch

from tests.support.kernels import DEVICE, DTYPE, INTERPRETED, relative_error  # isort: skip  (before what imports triton)

from engine.attention.kv_cache import KVCache
from engine.attention.metadata import DecodeMetadata
from engine.attention.triton import TritonBackend
from engine.checkpoint.quantization import Quantization, WeightScheme
from engine.kernels.quantized_gemm import MAX_ROWS, TILE_WEIGHTS
from engine.loader.quantized import weight_methods
from engine.models import build_model, config_from_dict
from engine.models.decoder import Decoder
from engine.models.fused_decoder import FusedDecoder
from engine.models.interface import ForwardContext
from engine.worker.input_buffers import Layout
from tests.support.attention import decode_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # raised by Triton: ast, numpy scalars
]
MAX_LOGIT_ERROR, MAX_KL = 0.03, 3e-3
"""Bounds of logits in 16 bits beside the dequantised model in float32: relative error, and KL divergence per token."""

SCHEMES = {
    "fp8": ("fp8", (1, None), True),
    "fp8 blocks": ("fp8", (128, 128), True),
    "int8": ("int8", (1, None), True),
    "int4": ("int4", (1, 128), False),
    "mxfp4": ("mxfp4", (1, 32), True),
}
ROWS = [1, 3] if INTERPRETED else [1, 3, 40, MAX_ROWS, MAX_ROWS + 2]
VOCAB, PAGES_EACH = 320, 4


def make_models(scheme: str, architecture: str, **options: int) -> tuple[Decoder, Decoder]:
    """Return a quantised model of DTYPE, and a plain one in float32 with the weights that it stands for."""
    element, block, symmetric = SCHEMES[scheme]
    found = WeightScheme(layout="online", element=element, block=block, symmetric=symmetric)
    values = {
        "architectures": [architecture],
        "vocab_size": VOCAB,
        "hidden_size": 192,  # not a multiple of a block
        "intermediate_size": 320,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 256,
        "tie_word_embeddings": True,
        **options,
    }
    config = config_from_dict(values)
    quantized = dataclasses.replace(config, quantization=Quantization(method="online", schemes=((("Linear",), found),)))
    torch.manual_seed(0)
    model = build_model(quantized, DTYPE, DEVICE, methods=weight_methods(quantized))
    plain = build_model(config, torch.float32, DEVICE)
    slots = plain.weight_slots()
    for name, slot in model.weight_slots().items():
        scale = 0.08 if len(slot.shape) > 1 else 0.2
        slot.write(torch.randn(slot.shape) * scale + (1 if name.endswith("norm.weight") else 0))
        slots[name].write(slot.read())
    for layer, exact in ((model.layers, plain.layers),):
        for one, other in zip(layer.modules(), exact.modules(), strict=True):
            if hasattr(one, "codes"):  # `read` rounds to the model's dtype
                other.weight.data.copy_(one.method.dense(one, torch.float32))
    return model, plain


def start(model: Decoder, rows: int) -> tuple[KVCache, object]:
    """Return a cache with random past, and the state of `rows` sequences."""
    layout = Layout(rows, PAGES_EACH)
    config, pages = model.config, (rows + 1) * PAGES_EACH
    cache = KVCache(config.cache_specs(), pages, 16, model.dtype, DEVICE)
    generator = torch.Generator().manual_seed(2)
    for layer in range(config.num_layers):
        for stored in (cache.k[layer], cache.v[layer]):
            stored.copy_(torch.randn(stored.shape, generator=generator).to(DTYPE))
    state = layout.views(torch.zeros(layout.size, dtype=torch.int64, device=DEVICE))
    state.slots[:rows] = torch.arange(1, rows + 1).to(DEVICE)
    state.positions[:rows] = torch.arange(rows).to(DEVICE) % 37 + 5
    state.last_tokens[1:] = torch.arange(rows).to(DEVICE) * 7 % VOCAB
    state.page_tables[0, 1:] = torch.arange(PAGES_EACH, pages).view(rows, PAGES_EACH).to(DEVICE)
    return cache, state


def fused_step(model: Decoder, rows: int) -> tuple[Callable[[], None], torch.Tensor]:
    """Return a decode step of the fused model, and the logits that it writes."""
    cache, state = start(model, rows)
    fused, attention = model.fused(rows, rows), TritonBackend(cache, rows)
    assert isinstance(fused, FusedDecoder)
    logits = torch.empty(rows, VOCAB, device=DEVICE, dtype=DTYPE)

    def step() -> None:
        metadata = DecodeMetadata(state.page_tables, state.slots[:rows], state.positions[:rows])
        context = ForwardContext((), attention.decode(metadata), state.slots[:rows])
        hidden = fused.embed(state.last_tokens, state.slots[:rows])
        for index in range(model.config.num_layers):
            hidden = fused.layer(index, hidden, context)
        fused.head(hidden, logits, after_layer=True)

    return step, logits


@torch.inference_mode()
def plain_logits(model: Decoder, rows: int) -> torch.Tensor:
    cache, state = start(model, rows)
    attention = decode_attention(cache, state.page_tables[0, 1:], state.positions[:rows])
    return model.compute_logits(model.forward(state.last_tokens[1:], state.positions[:rows], attention))


def divergence(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Return the mean KL divergence of the distributions of `found` from `wanted`, in nats per row."""
    wanted, found = wanted.double().log_softmax(-1), found.double().log_softmax(-1)
    return float((wanted.exp() * (wanted - found)).sum(-1).mean())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Qwen3ForCausalLM"])
@pytest.mark.parametrize("scheme", SCHEMES)
def test_logits_are_near_the_dequantised_model(scheme: str, architecture: str, rows: int) -> None:
    if architecture == "Qwen3ForCausalLM" and scheme not in ("fp8 blocks", "int4"):
        pytest.skip("the other layers are the same")
    model, plain = make_models(scheme, architecture)
    with torch.inference_mode():
        step, logits = fused_step(model, rows)
        step()
        wanted = plain_logits(plain, rows)
    assert wanted.std() > 0.5
    assert relative_error(logits, wanted) < MAX_LOGIT_ERROR
    assert divergence(logits, wanted) < MAX_KL


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: captures CUDA graphs")
@pytest.mark.parametrize("scheme", SCHEMES)
def test_a_hundred_replays_give_the_bits_of_eager(scheme: str) -> None:
    model, _ = make_models(scheme, "LlamaForCausalLM", hidden_size=1024, intermediate_size=2048)
    with torch.inference_mode():
        for rows in (1, 24):
            step, logits = fused_step(model, rows)
            step()
            wanted = logits.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            for _ in range(100):
                logits.fill_(float("nan"))
                graph.replay()
                assert torch.equal(logits, wanted)


@pytest.mark.skipif(INTERPRETED, reason="needs a GPU: reads its memory")
@pytest.mark.parametrize(("scheme", "per_weight"), [("fp8", 1.0), ("int8", 1.0), ("int4", 0.54), ("mxfp4", 0.532)])
def test_weights_keep_their_bytes_on_the_device(scheme: str, per_weight: float) -> None:
    """A step adds no more than its activations; one of many rows, one dequantised tile."""
    element, block, symmetric = SCHEMES[scheme]
    found = WeightScheme(layout="online", element=element, block=block, symmetric=symmetric)
    hidden, width, layers = 2048, 8192, 4
    values = {
        "architectures": ["LlamaForCausalLM"], "vocab_size": VOCAB, "hidden_size": hidden, "intermediate_size": width,
        "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": 16, "head_dim": 128,
        "max_position_embeddings": 256, "tie_word_embeddings": True,
    }  # fmt: skip
    config = dataclasses.replace(
        config_from_dict(values), quantization=Quantization(method="online", schemes=((("Linear",), found),))
    )
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    model = build_model(config, DTYPE, DEVICE, methods=weight_methods(config))
    for module in model.modules():
        if hasattr(module, "codes"):
            module.codes.view(torch.uint8).fill_(1)
            module.scale.fill_(1)
    weights = layers * (4 * hidden * hidden + 3 * hidden * width)
    stored = torch.cuda.memory_allocated() - before
    assert stored < weights * per_weight * 1.01 + (4 << 20)
    for rows, most in ((16, 16 << 20), (MAX_ROWS + 1, (24 << 20) + 2 * TILE_WEIGHTS)):
        with torch.inference_mode():
            step, _ = fused_step(model, rows)
            torch.cuda.reset_peak_memory_stats()
            held = torch.cuda.memory_allocated()
            step()
        assert torch.cuda.max_memory_allocated() - held < most
        # the attention's scratch, 2 MiB for 129 rows; the smallest matrix in 16 bits would take 8 MiB
        assert torch.cuda.memory_allocated() - held < 4 << 20
        del step
