"""Decode-step kernels against float64: small-batch GEMM, greedy sampling and whole layers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from tests.support.kernels import DEVICE, DTYPE, INTERPRETED, relative_error  # isort: skip  (before what imports triton)

from engine.attention.kv_cache import KVCache
from engine.attention.metadata import DecodeMetadata
from engine.attention.triton import TritonBackend
from engine.errors import ModelError
from engine.kernels.linear_weight import LinearWeight
from engine.kernels.small_batch_gemm import LaunchConfig, Scratch, choose_config, half_normed, linear
from engine.models import config_from_dict
from engine.models.decoder import Decoder
from engine.models.interface import ForwardContext
from engine.sampling.greedy import GreedySampler
from engine.worker.input_buffers import Layout
from tests.support.attention import decode_attention

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # raised by Triton: ast, numpy scalars
]
TOLERANCE = 2e-3 if INTERPRETED else 1e-2
SIZES = [(48, 80), (64, 128)] if INTERPRETED else [(4096, 1024), (1024, 3072), (1000, 328), (6144, 4096)]
ROWS = [1, 3, 17] if INTERPRETED else [1, 2, 8, 24, 64, 200]


def scratch_for(rows: int, outputs: int, inputs: int) -> Scratch:
    scratch = Scratch(rows, rows, max(inputs, outputs), 2 * outputs, max(outputs, 64), DTYPE, torch.device(DEVICE))
    for buffer in (scratch.normed, scratch.partials, scratch.best):
        buffer.fill_(float("nan"))
    return scratch


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, DTYPE)


def expected(x, weight, norm, bias, gated, before):
    x, weight = x.double(), weight.double()
    if norm is not None:
        x = x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * norm.double()
    y = x @ weight.T + (0 if bias is None else bias.double())
    if gated:
        half = y.shape[1] // 2
        y = F.silu(y[:, :half]) * y[:, half:]
    return y if before is None else y + before.double()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), SIZES)
@pytest.mark.parametrize("form", ["plain", "normed", "biased", "added", "gated", "gated_biased"])
def test_linear_equals_float64(rows, outputs, inputs, form):
    gated = form.startswith("gated")
    x, weight = random(rows, inputs), random(outputs * (2 if gated else 1), inputs, seed=1) / inputs**0.5
    norm = random(inputs, seed=2) + 1 if form in ("normed", "gated") else None
    bias = random(len(weight), seed=3) if form.endswith("biased") else None
    out = random(rows, outputs, seed=4) if form == "added" else torch.full((rows, outputs), float("nan")).to(x)
    wanted = expected(x, weight, norm, bias, gated, out if form == "added" else None)
    scratch = scratch_for(rows, outputs, inputs)
    for _ in range(2 if form != "added" else 1):  # twice: the first launch must reset the arrival counts
        matrix = LinearWeight.plain(weight)
        linear(x, matrix, out, scratch, norm=norm, eps=1e-6, bias=bias, gated=gated, add=form == "added")
    assert relative_error(out, wanted) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 3] if INTERPRETED else [1, 3, 24, 64, 200, 300])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 80), (64, 128)] if INTERPRETED else [(1000, 328), (49152, 576)])
def test_a_float32_output_is_not_rounded_and_its_argmax_is_exact(rows, outputs, inputs):
    """The last output is the largest by less than a step of the 16-bit dtype: rounded, the first would be chosen."""
    x, weight = random(rows, inputs), random(outputs, inputs, seed=1) / inputs**0.5
    weight[0] = 4 * x.mean(0)
    weight[-1] = weight[0]
    weight[-1, x[0].abs().argmax()] *= 1 + torch.finfo(DTYPE).eps  # 1 or 2 units in the last place
    scratch, out = scratch_for(rows, outputs, inputs), torch.empty(rows, outputs, device=DEVICE)
    tiles = linear(x, LinearWeight.plain(weight), out, scratch, best=True)
    wanted = expected(x, weight, None, None, False, None)
    assert relative_error(out, wanted) < 1e-5
    if rows == 1:
        assert 0 < out[0, -1] - out[0, 0] < torch.finfo(DTYPE).eps * out[0, 0]
    values, tokens = scratch.maxima(rows, tiles)
    chosen = tokens.gather(1, values.argmax(1, keepdim=True))[:, 0]
    assert torch.equal(chosen.long(), wanted.argmax(1))


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_split_k_sum_does_not_depend_on_the_arrival_order(splits):
    rows, outputs, inputs = 24, 128, 512
    x, weight = random(rows, inputs), random(2 * outputs, inputs, seed=1) / inputs**0.5
    scratch, out = scratch_for(rows, outputs, inputs), torch.empty(rows, outputs, device=DEVICE, dtype=DTYPE)
    runs = []
    for _ in range(3):
        linear(x, LinearWeight.plain(weight), out, scratch, gated=True, pick=LaunchConfig(32, 64, 64, splits, 4, 2))
        runs.append(out.clone())
    assert relative_error(runs[0], expected(x, weight, None, None, True, None)) < TOLERANCE
    assert torch.equal(runs[0], runs[1]) and torch.equal(runs[1], runs[2])
    assert not scratch.arrivals.any()


def test_tiles_fit_the_scratch_for_every_model_and_bucket():
    for outputs, inputs, gated in (
        (4096, 1024, False),
        (3072, 1024, True),
        (12288, 4096, True),
        (151936, 1024, False),
        (4096, 12288, False),
        (192, 64, False),
        (49152, 576, False),
    ):
        for rows in (1, 2, 4, 8, 16, 24, 56, 64, 120, 136, 256, 512):
            pick = choose_config(rows, outputs, inputs, gated)
            assert pick.splits == 1 or inputs % (pick.columns * pick.splits) == 0
            steps = -(-inputs // (pick.columns * pick.splits))
            stage_bytes = (pick.tile_outputs * (2 if gated else 1) + pick.tile_rows) * pick.columns * 2
            shared = stage_bytes * (pick.stages + 1 if steps > 1 else 1)
            assert pick.tile_rows == 0 or shared <= 232_448, (rows, outputs, inputs, gated, pick)


@pytest.mark.parametrize("max_rows", [1, 2, 5, 64])
@pytest.mark.parametrize(("vocab", "hidden"), [(32000, 2048), (32000, 4096), (32064, 3072), (512, 64), (49152, 576)])
def test_tile_argmax_fits_the_scratch(max_rows, vocab, hidden):
    scratch = Scratch(max_rows, max_rows, hidden, 64, vocab, DTYPE, torch.device(DEVICE))
    for rows in range(1, max_rows + 1):
        tiles = -(-vocab // choose_config(rows, vocab, hidden, False).tile_outputs)
        assert rows * tiles <= len(scratch.best) == len(scratch.best_at)


def test_outliers_before_a_norm_stay_finite_in_float16():
    rows, hidden = 3, 128
    scratch = Scratch(rows, rows, hidden, 2 * hidden, 64, torch.float16, torch.device(DEVICE))
    weight = (random(hidden, hidden, seed=1) / hidden**0.5).half()
    norm = torch.full((hidden,), 4.0, dtype=torch.float16, device=DEVICE)
    x, residual, out = (torch.zeros(rows, hidden, dtype=torch.float16, device=DEVICE) for _ in range(3))
    residual[:, 7] = 30000.0
    linear(x, LinearWeight.plain(weight), residual, scratch, add=True, next_norm=norm)
    squares = half_normed(rows, hidden, hidden, x.dtype)
    linear(residual, LinearWeight.plain(weight), out, scratch, norm=norm, eps=1e-6, squares=squares)
    assert relative_error(out, expected(residual, weight, norm, None, False, None)) < 2e-3


def test_a_weight_in_another_format_is_refused():
    scratch, x, out = scratch_for(2, 64, 64), random(2, 64), random(2, 64)
    packed = LinearWeight(torch.zeros(64, 32, dtype=torch.uint8, device=DEVICE), "int4", random(2, 64))
    with pytest.raises(ModelError, match=r"the linear layer of \[64, 32\] stores its weight in format 'int4'"):
        linear(x, packed, out, scratch)


def small_model(dtype: torch.dtype = DTYPE, **options) -> Decoder:
    torch.manual_seed(0)
    config = config_from_dict(
        {
            "architectures": ["Qwen3ForCausalLM"],
            "model_type": "qwen3",
            "vocab_size": 512,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "rms_norm_eps": 1e-6,
            "rope_theta": 10000.0,
            "max_position_embeddings": 256,
            "tie_word_embeddings": True,
            "eos_token_id": 1,
            "bos_token_id": 0,
            "num_experts": 8,
            "num_experts_per_tok": 8,  # all: rounding could change which of fewer are chosen
            "moe_intermediate_size": 32,
            "mlp_only_layers": [0],
        }
        | options
    )
    model = Decoder(config, dtype, DEVICE)
    for parameter in model.parameters():
        parameter.data.copy_(torch.randn(parameter.shape) * 0.2 + (1 if parameter.dim() == 1 else 0))
    return model


@pytest.mark.parametrize("rows", [1, 3] if INTERPRETED else [1, 3, 8, 40])
@pytest.mark.parametrize(
    "architecture",
    ["Qwen3ForCausalLM", "Qwen2ForCausalLM", "LlamaForCausalLM", "Qwen3MoeForCausalLM", "GptOssForCausalLM"],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32 if INTERPRETED else torch.bfloat16], ids=str)
def test_fused_steps_equal_the_unfused_model(rows, architecture, dtype):
    full = {"layer_types": ["full_attention"] * 3}  # one page table
    model = small_model(dtype, architectures=[architecture], num_hidden_layers=3, **full)
    config, steps = model.config, 3
    layout = Layout(rows + 1, 4)
    caches = [KVCache(config.cache_specs(), 64 * 4, 16, dtype, DEVICE) for _ in range(2)]
    past = torch.randn(64 * 4, 16, config.num_kv_heads, config.head_dim)
    for cache in caches:
        for layer in range(config.num_layers):
            cache.k[layer].copy_(past * (layer + 1))
            cache.v[layer].copy_(past.flip(0))
    state = layout.views(torch.zeros(layout.size, dtype=torch.int64, device=DEVICE))
    state.slots[:rows] = torch.randperm(rows, generator=torch.Generator().manual_seed(3)).to(DEVICE) + 1
    state.positions[:rows] = torch.arange(rows).to(DEVICE) % 37 + 5
    state.last_tokens[1:] = torch.arange(rows + 1).to(DEVICE) * 7 % 512
    state.page_tables[0, 1:] = (torch.arange((rows + 1) * 4) + 1).view(rows + 1, 4).to(DEVICE)
    logits, chosen = torch.empty(rows, 512, device=DEVICE, dtype=dtype), torch.empty(rows, dtype=torch.int64).to(DEVICE)
    fused, attention = model.fused(rows, rows), TritonBackend(caches[0], rows)
    sampler = GreedySampler(rows, 512, torch.device(DEVICE))
    slots, positions = state.slots[:rows].clone(), state.positions[:rows].clone()
    tokens = state.last_tokens[slots]
    with torch.inference_mode():
        for _ in range(steps):
            metadata = DecodeMetadata(state.page_tables, state.slots[:rows], state.positions[:rows])
            context = ForwardContext((), attention.decode(metadata), state.slots[:rows])
            hidden = fused.embed(state.last_tokens, state.slots[:rows])
            for index in range(config.num_layers):
                hidden = fused.layer(index, hidden, context)
            maxima = fused.head(hidden, logits, after_layer=True)
            sampler(logits, maxima, state.slots[:rows], state.positions[:rows], state.last_tokens, chosen)
            plain = decode_attention(caches[1], state.page_tables[0, slots], positions)
            wanted = model.compute_logits(model.forward(tokens, positions, plain))
            assert relative_error(logits, wanted) < 4 * TOLERANCE
            assert fused.logits_dtype == logits.dtype and model.logits_dtype == wanted.dtype == torch.float32
            assert torch.equal(chosen, logits.float().argmax(-1))
            tokens, positions = chosen.clone(), positions + 1
            assert torch.equal(state.last_tokens[slots], chosen) and torch.equal(state.positions[:rows], positions)


def test_layers_of_the_fused_model_differ_by_the_norms_that_their_gemms_start():
    model = small_model(num_hidden_layers=5)
    fused = model.fused(4, 4)
    first, *others = fused.layer_kinds()
    assert first not in others and len(set(others)) == 1
    weight = model.layers[3].input_norm.weight
    weight.data = torch.ones(65, device=DEVICE, dtype=DTYPE)[1:]  # 2 bytes from an aligned address
    assert [fused.layer_kinds().index(kind) for kind in fused.layer_kinds()] == [0, 1, 2, 3, 1]


def test_padded_rows_do_not_advance_and_non_finite_logits_give_no_token():
    model = small_model()
    layout = Layout(4, 2)
    state = layout.views(torch.zeros(layout.size, dtype=torch.int64, device=DEVICE))
    state.slots[0], state.positions[0], state.last_tokens[1] = 1, 4, 9
    state.page_tables[0, 1, 0] = 3
    fused, sampler = model.fused(4, 4), GreedySampler(4, 512, torch.device(DEVICE))
    hidden = torch.ones(2, 64, device=DEVICE, dtype=DTYPE)
    logits, chosen = torch.empty(2, 512, device=DEVICE), torch.empty(2, dtype=torch.int64).to(DEVICE)
    hidden[0, 3] = float("nan")
    maxima = fused.head(hidden, logits, after_layer=False)
    sampler(logits, maxima, state.slots[:2], state.positions[:2], state.last_tokens, chosen)
    assert chosen[0] == -1 and chosen[1] >= 0
    assert state.last_tokens.tolist() == [0, 0, 0, 0, 0]
    assert state.positions.tolist() == [5, 0, 0, 0]
