"""Compiled CPU kernels beside PyTorch's operations, over random shapes: dense GEMMs, norms, RoPE, SwiGLU, attention."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels import cpu_library
from engine.kernels.cpu_library import cpu_kernels_loaded, dense_linear, paged_decode, rms_norm, rotate, silu_mul
from engine.layers import plain_linear
from engine.layers.activation import gated
from engine.layers.float32_linear import linear_float32
from engine.layers.norm import HeadNorm, RMSNorm
from engine.layers.rotary import rotate as rotate_layer
from graph_cache.backends.cpu import CpuBackend

pytestmark = pytest.mark.skipif(not cpu_kernels_loaded(), reason="needs a C++ compiler and AVX2")

CPU = torch.device("cpu")
BF16 = torch.bfloat16
STEP = 2.0**-8  # of one rounding to bfloat16
SIZES = st.integers(1, 70)
SEEDS = st.integers(0, 2**31)
SOME = settings(max_examples=40, deadline=None, derandomize=True)


def numbers(seed: int, *shape: int, spare: int = 0) -> torch.Tensor:
    """Return random bfloat16 numbers of many magnitudes; with `spare`, rows of a matrix that has more columns."""
    rng = torch.Generator().manual_seed(seed)
    wide = (*shape[:-1], shape[-1] + spare)
    scale = torch.rand(*wide[:-1], 1, generator=rng).mul(8).sub(4).exp2()
    return torch.randn(wide, generator=rng).mul(scale).bfloat16()[..., : shape[-1]]


def torch_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the layers compute as on a machine without a compiler."""
    for module in ("engine.layers.norm", "engine.layers.plain_linear", "engine.kernels.cpu_library"):
        monkeypatch.setattr(f"{module}.computes_bfloat16", lambda x: False)


def check_dense(rows: int, inputs: int, outputs: int, seed: int) -> None:
    """Check a GEMM in both dtypes, with and without a bias, against float64; tensors have gaps between rows."""
    x, weight, bias = numbers(seed, rows, inputs, spare=3), numbers(seed + 1, outputs, inputs, spare=5), None
    for bias in (None, numbers(seed + 2, outputs)):
        exact, size = x.double() @ weight.double().T, x.double().abs() @ weight.double().abs().T
        exact = exact if bias is None else exact + bias.double()
        for dtype, step in ((BF16, STEP), (torch.float32, 2.0**-23)):
            found = dense_linear(x, weight, bias, dtype)
            assert found.dtype == dtype and bool(((found - exact).abs() <= exact.abs() * step + size * 2.0**-18).all())


def check_norm(rows: int, parts: int, size: int, seed: int, offset: bool) -> None:
    """Check an RMSNorm against float64, up to its two roundings."""
    x = numbers(seed, rows, parts, size) if parts > 1 else numbers(seed, rows, size, spare=2).unsqueeze(1)
    weight = numbers(seed + 1, parts, size)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    exact *= weight.double() + (1.0 if offset else 0.0)
    found = rms_norm(x, weight, 1e-5, offset=offset).double()
    assert bool(((found - exact).abs() <= exact.abs() * 2.1 * STEP + 1e-30).all())


def check_rotation(rows: int, heads: int, size: int, dims: int, seed: int, interleaved: bool) -> None:
    """Check RoPE against the layer's own operations: the same bits."""
    x = numbers(seed, rows, heads + 2, size)[:, 1 : 1 + heads]
    angles = torch.rand(rows, 1, dims, generator=torch.Generator().manual_seed(seed)) * 6
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    wanted = x * cos if dims == size else torch.cat((x[..., :dims] * cos, x[..., dims:]), -1)
    pairs = torch.arange(dims) ^ 1 if interleaved else torch.arange(dims).roll(dims // 2)
    wanted[..., :dims].addcmul_(x[..., pairs], sin)
    assert torch.equal(rotate(x, cos, sin, interleaved=interleaved), wanted)


def check_gate(rows: int, size: int, seed: int) -> None:
    """Check SwiGLU against float64 up to its two roundings, also for large and infinite gates."""
    both = numbers(seed, rows, 2 * size) * 8
    both[0, 0], both[-1, size - 1] = -100.0, math.inf
    gate, up = both.chunk(2, dim=-1)
    exact = F.silu(gate.double()) * up.double()
    found = silu_mul(gate, up).double()
    finite = exact.isfinite()
    assert torch.equal(found[~finite], exact[~finite])
    assert bool(((found - exact).abs() <= exact.abs() * 2.1 * STEP + up.double().abs() * 1e-30)[finite].all())


def check_attention(heads: int, kv_heads: int, size: int, lengths: list[int], window: int | None, seed: int) -> None:
    """Check decode attention against float64, and that each row alone has the same bits."""
    page, rng = 16, torch.Generator().manual_seed(seed)
    width = -(-max(lengths) // page)
    tables = torch.randperm(len(lengths) * width, generator=rng).view(len(lengths), width)
    pages = [numbers(seed + i, tables.numel(), page, kv_heads, size) for i in (1, 2)]
    q, k, v = numbers(seed, len(lengths), heads + 2 * kv_heads, size).split((heads, kv_heads, kv_heads), dim=1)
    rows, positions = torch.arange(len(lengths)), torch.tensor(lengths) - 1

    def attend(some: slice) -> tuple[torch.Tensor, list[torch.Tensor]]:
        held = [one.clone() for one in pages]
        where = (tables, rows[some], positions[some])
        return paged_decode(q[some], k[some], v[some], *held, *where, size**-0.5, window), held

    found, held = attend(slice(None))
    for row, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        keys, values = (one[tables[row]].flatten(0, 1)[first:length].double().transpose(0, 1) for one in held)
        assert torch.equal(keys[:, -1], k[row].double()) and torch.equal(values[:, -1], v[row].double())
        wanted = F.scaled_dot_product_attention(q[row].double().unsqueeze(1), keys, values, enable_gqa=True).flatten()
        assert (found[row].double() - wanted).abs().max() <= 2 * STEP * values.abs().max()
        assert torch.equal(attend(slice(row, row + 1))[0][0], found[row])


def check_operations() -> None:
    """Check all operations of this process on a few shapes."""
    for rows, inputs, outputs in ((1, 1, 1), (3, 40, 17), (4, 576, 48), (9, 31, 33)):
        check_dense(rows, inputs, outputs, rows)
    for size in (1, 15, 64, 576):
        check_norm(5, 3, size, size, offset=size == 64)
        check_gate(3, size, size)
    for size, dims, interleaved in ((64, 64, False), (40, 20, True), (6, 2, False), (80, 32, False)):
        check_rotation(4, 3, size, dims, size, interleaved)
    for heads, kv_heads, size in ((9, 3, 64), (5, 1, 80), (14, 2, 16)):
        check_attention(heads, kv_heads, size, [1, 17, 513], None, heads)


@SOME
@given(st.integers(1, 20), SIZES, SIZES, SEEDS)
def test_a_dense_product_is_exact_up_to_sums_and_one_rounding(rows: int, inputs: int, outputs: int, seed: int) -> None:
    check_dense(rows, inputs, outputs, seed)


@SOME
@given(SIZES, st.integers(1, 5), SIZES, SEEDS, st.booleans())
def test_a_norm_is_exact_up_to_its_roundings(rows: int, parts: int, size: int, seed: int, offset: bool) -> None:
    check_norm(rows, parts, size, seed, offset)


@SOME
@given(SIZES, st.integers(1, 5), st.integers(1, 40), st.integers(1, 40), SEEDS, st.booleans())
def test_a_rotation_has_the_bits_of_pytorch(
    rows: int, heads: int, half: int, half_size: int, seed: int, interleaved: bool
) -> None:
    check_rotation(rows, heads, 2 * max(half, half_size), 2 * half, seed, interleaved)


@SOME
@given(SIZES, SIZES, SEEDS)
def test_swiglu_is_exact_up_to_its_roundings(rows: int, size: int, seed: int) -> None:
    check_gate(rows, size, seed)


@settings(SOME, max_examples=25)
@given(
    st.sampled_from([1, 2, 3, 5, 8]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([16, 48, 64, 80, 256]),
    st.lists(st.one_of(st.integers(1, 1100), st.sampled_from([511, 512, 513, 1024, 1025])), min_size=1, max_size=4),
    st.one_of(st.none(), st.integers(1, 700)),
    SEEDS,
)
def test_attention_matches_over_spans_of_tokens(
    group: int, kv_heads: int, size: int, lengths: list[int], window: int | None, seed: int
) -> None:
    check_attention(group * kv_heads, kv_heads, size, lengths, window, seed)


def test_a_dense_row_has_the_same_bits_in_any_batch_and_with_any_threads() -> None:
    x, weight = numbers(0, 13, 600), numbers(1, 333, 600)
    before, whole = torch.get_num_threads(), dense_linear(x, weight, None, torch.float32)
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            assert torch.equal(dense_linear(x, weight, None, torch.float32), whole)
            for first, last in ((0, 1), (3, 5), (4, 13)):
                assert torch.equal(dense_linear(x[first:last], weight, None, torch.float32), whole[first:last])
    finally:
        torch.set_num_threads(before)


def test_layers_compute_the_same_with_and_without_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = numbers(0, 5, 96), numbers(1, 40, 96), numbers(2, 40)
    heads = numbers(3, 5, 8, 24)[:, :6]
    norm, offset = RMSNorm(96, 1e-5, BF16, CPU), RMSNorm(96, 1e-5, BF16, CPU, weight_offset=True)
    head_norm = HeadNorm(4, 2, 24, 1e-6, BF16, CPU)
    for number, parameter in enumerate((norm.weight, offset.weight, head_norm.q_weight, head_norm.k_weight)):
        parameter.copy_(numbers(number + 10, len(parameter)))
    angles = torch.rand(5, 1, 16) * 6

    def results() -> list[torch.Tensor]:
        return [
            plain_linear.linear(x, weight, bias),
            linear_float32(x, weight),
            norm(x),
            norm(x.view(5, 1, 96)).view(5, 96),
            offset(x),
            head_norm(heads),
            rotate_layer(heads, angles.cos().bfloat16(), angles.sin().bfloat16()),
            gated("silu")(x, x.flip(0)),
            gated("gelu")(x, x.flip(0)),
        ]

    compiled = results()
    torch_path(monkeypatch)
    assert not cpu_library.computes_bfloat16(x)
    for number, (found, wanted) in enumerate(zip(compiled, results(), strict=True)):
        assert found.shape == wanted.shape and found.dtype == wanted.dtype
        assert (found - wanted).abs().max() <= 2 * STEP * wanted.abs().max(), number


def test_many_rows_float32_and_other_devices_keep_pytorchs_operations() -> None:
    weight = numbers(0, 40, 96)
    assert plain_linear.has_few_rows(numbers(1, plain_linear.FEW_ROWS, 96), weight)
    assert not plain_linear.has_few_rows(numbers(1, plain_linear.FEW_ROWS + 1, 96), weight)
    assert not plain_linear.has_few_rows(torch.zeros(1, 96), weight.float())
    assert not plain_linear.has_few_rows(torch.zeros(1, 96, dtype=BF16, device="meta"), weight)


def test_a_capture_replays_the_operations_with_the_bits_of_eager() -> None:
    x, weight, gain, backend = numbers(0, 3, 96), numbers(1, 192, 96), numbers(2, 1, 96), CpuBackend()
    cos, sin, out = numbers(3, 3, 1, 32), numbers(4, 3, 1, 32), torch.empty(3, 96, dtype=BF16)

    def step() -> None:
        normed = rms_norm(x.unsqueeze(1), gain, 1e-5, offset=False).squeeze(1)
        rotated = rotate(normed.view(3, 3, 32), cos, sin, interleaved=False).view(3, 96)
        out.copy_(silu_mul(*dense_linear(rotated, weight, None, BF16).chunk(2, dim=-1)))

    graph = backend.capture(step, backend.new_memory(), [], None)
    assert graph.engine == "torchscript"
    for seed in (5, 6):
        x.copy_(numbers(seed, 3, 96))
        graph.replay()
        replayed = out.clone()
        step()
        assert torch.equal(replayed, out)


def test_wrong_tensors_are_refused() -> None:
    x, weight = numbers(0, 2, 96), numbers(1, 40, 96)
    wrong = [
        lambda: dense_linear(x.float(), weight, None, BF16),
        lambda: dense_linear(x[:, :64], weight, None, BF16),
        lambda: dense_linear(x, weight, numbers(2, 39), BF16),
        lambda: dense_linear(x, weight, None, torch.float16),
        lambda: rms_norm(x.unsqueeze(1), numbers(2, 1, 95), 1e-5, offset=False),
        lambda: rms_norm(x.float().unsqueeze(1), numbers(2, 1, 96), 1e-5, offset=False),
        lambda: rotate(x.unsqueeze(1), numbers(2, 2, 1, 98), numbers(2, 2, 1, 98), interleaved=False),
        lambda: rotate(x.unsqueeze(1), numbers(2, 1, 1, 96), numbers(2, 1, 1, 96), interleaved=False),
        lambda: silu_mul(x, x[:, :95]),
        lambda: silu_mul(x.float(), x.float()),
    ]
    for number, call in enumerate(wrong):
        with pytest.raises(RuntimeError, match="encore_cpu"):
            pytest.fail(f"call {number} returned {call()}")
