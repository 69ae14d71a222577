"""Triton mixture-of-experts kernels against a loop in float64: routings, tiles, padding, NaN poison, capture."""

from __future__ import annotations

import pytest
import torch

from tests.support.kernels import DEVICE, DTYPE, INTERPRETED, relative_error  # isort: skip  (before what imports triton)

from engine.checkpoint.quantization import WeightScheme
from engine.kernels.moe import GemmTile, choose_tile, max_tiles, reads, run_experts
from engine.kernels.moe_kernels import sort_kernel
from engine.layers.formats import build_method
from engine.layers.moe import ExpertWeights, run_experts_grouped
from tests.support.moe_reference import experts_reference, random_experts, random_routing

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # raised by Triton: ast, numpy scalars
]
TOLERANCE = {torch.float32: 2e-6, torch.float16: 3e-3, torch.bfloat16: 1e-2}
SHAPES = [(4, 2, 32, 24), (5, 5, 48, 16), (1, 1, 16, 40)]  # experts, top_k, hidden, width
TOKENS = [1, 7, 33]
if not INTERPRETED:
    SHAPES += [(128, 8, 2048, 768), (60, 4, 1024, 1408)]
    TOKENS += [256, 3000]


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_equal_the_reference(shape: tuple[int, int, int, int], tokens: int, dtype: torch.dtype) -> None:
    experts, top_k, hidden, width = shape
    torch.manual_seed(tokens)
    gate_up, down = random_experts(experts, hidden, width, dtype, DEVICE)
    x, (weights, chosen) = torch.randn(tokens, hidden).to(DEVICE, dtype), random_routing(tokens, experts, top_k, DEVICE)
    chosen[tokens // 2] = -1
    if tokens * hidden * width * top_k < 1e8:
        expected = experts_reference(x, weights, chosen, gate_up, down)
    else:
        wide = [tensor.float().cpu() for tensor in (x, weights)]
        expected = run_experts_grouped(*wide, chosen.cpu(), gate_up.float().cpu(), down.float().cpu())
    found = run_experts(x, weights, chosen, gate_up, down)
    assert not found[tokens // 2].any()
    if tokens > 1:
        assert relative_error(found.cpu(), expected) < TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
@pytest.mark.parametrize("limit", [None, 0.7])
@pytest.mark.parametrize("biases", [(True, True), (True, False), (False, False)])
def test_biases_and_the_clamped_activation(biases: tuple[bool, bool], limit: float | None, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    gate_up, down = random_experts(5, 32, 24, dtype, DEVICE)
    options = {"limit": limit, "alpha": 1.0 if limit is None else 1.7}
    for has_bias, name, columns in zip(biases, ("gate_up_bias", "down_bias"), (48, 32), strict=True):
        if has_bias:
            options[name] = torch.randn(5, columns).to(DEVICE, dtype)
    x, (weights, chosen) = torch.randn(19, 32).to(DEVICE, dtype), random_routing(19, 5, 2, DEVICE)
    chosen[7] = -1
    found = run_experts(x, weights, chosen, gate_up, down, **options)
    wanted = experts_reference(x, weights, chosen, gate_up, down, **options)
    assert relative_error(found.cpu(), wanted) < TOLERANCE[dtype]


@pytest.mark.parametrize("rows", [16, 32, 128])
@pytest.mark.parametrize("routing", ["one_expert", "last_expert", "nobody", "first_rows_padded"])
def test_uneven_routings_with_every_tile_height(routing: str, rows: int) -> None:
    torch.manual_seed(1)
    tokens, experts, top_k = 40, 6, 2
    gate_up, down = random_experts(experts, 32, 16, torch.float32, DEVICE)
    x, (weights, chosen) = torch.randn(tokens, 32, device=DEVICE), random_routing(tokens, experts, top_k, DEVICE)
    if routing == "first_rows_padded":
        chosen[:17] = -1
    else:
        chosen[:] = {"one_expert": torch.tensor([2, 3]), "last_expert": torch.tensor([5, 0])}.get(
            routing, torch.tensor([-1, -1])
        )
    x[chosen[:, 0] < 0] = float("nan")
    weights[chosen[:, 0] < 0] = float("nan")  # as the router's are for such a row
    tile = GemmTile(rows, 16, 16, 4, 2)
    found = run_experts(x, weights, chosen, gate_up, down, tile).cpu()
    expected = experts_reference(x.nan_to_num(), weights, chosen, gate_up, down)
    torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("entries", [1, 100, 700])
def test_sort_is_stable_and_skips_entries_without_expert(entries: int) -> None:
    torch.manual_seed(entries)
    ids = torch.randint(-1, 5, (entries,)).to(DEVICE)
    order = torch.full((entries,), -7, dtype=torch.int32, device=DEVICE)
    starts = torch.empty(6, dtype=torch.int32, device=DEVICE)
    sort_kernel[(5,)](ids, order, starts, entries, E=5, BLOCK=128)
    expected = [[at for at, expert in enumerate(ids.tolist()) if expert == e] for e in range(5)]
    bounds = starts.tolist()
    assert [order[bounds[e] : bounds[e + 1]].tolist() for e in range(5)] == expected
    assert order[bounds[5] :].eq(-7).all()


@pytest.mark.parametrize("dtype", [torch.float32, DTYPE])
def test_a_rows_bits_do_not_depend_on_the_other_rows(dtype: torch.dtype) -> None:
    torch.manual_seed(2)
    gate_up, down = random_experts(4, 32, 24, dtype, DEVICE)
    x, (weights, chosen) = torch.randn(20, 32).to(DEVICE, dtype), random_routing(20, 4, 2, DEVICE)
    first = run_experts(x, weights, chosen, gate_up, down)
    x[1:] = torch.randn(19, 32).to(x)
    chosen[1:10] = -1
    chosen[10:] = chosen[0]
    second = run_experts(x, weights, chosen, gate_up, down)
    assert torch.equal(first[0], second[0])
    assert not torch.equal(first[1:], second[1:])


@pytest.mark.parametrize(("entries", "experts", "rows"), [(1, 8, 16), (8, 8, 16), (1000, 8, 16), (65536, 128, 128)])
def test_max_tiles_bounds_every_routing_and_is_reached(entries: int, experts: int, rows: int) -> None:
    bound = max_tiles(entries, experts, rows)
    used = min(entries, experts)
    # one row in every expert but the last few, which is the worst case: each expert's last tile is nearly empty
    extra, counts = entries - used, [1] * used
    counts[0] += extra
    assert sum(-(-count // rows) for count in counts) == bound
    generator = torch.Generator().manual_seed(0)
    for _ in range(20):
        chosen = torch.randint(0, experts, (entries,), generator=generator).bincount(minlength=experts)
        assert int(((chosen + rows - 1) // rows).sum()) <= bound


def test_tiles_grow_with_the_rows_per_expert() -> None:
    heights = [choose_tile(8 * tokens, 128, True, DTYPE).rows for tokens in (1, 256, 512, 1024, 8192)]
    assert heights == [16, 16, 32, 64, 128]


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
def test_a_captured_call_follows_rows_and_routing() -> None:
    gate_up, down = random_experts(16, 256, 128, DTYPE, DEVICE)
    x, (weights, chosen) = torch.randn(32, 256).to(DEVICE, DTYPE), random_routing(32, 16, 4, DEVICE)
    run_experts(x, weights, chosen, gate_up, down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run_experts(x, weights, chosen, gate_up, down)
    for used in (32, 5, 0):
        x.normal_()
        chosen.copy_(random_routing(32, 16, 4, DEVICE)[1])
        chosen[used:] = -1
        graph.replay()
        assert torch.equal(out, run_experts(x, weights, chosen, gate_up, down))
        assert bool(out[:used].any(dim=1).all()) and not out[used:].any()


@pytest.mark.parametrize(
    ("element", "block", "symmetric"),
    [("fp8", (1, None), True), ("fp8", (32, 64), True), ("int8", (1, 64), False), ("int4", (1, 32), False),
     ("mxfp4", (1, 32), True)],
)  # fmt: skip
@pytest.mark.parametrize("tokens", [1, 33] if INTERPRETED else [1, 7, 33, 256, 3000])
def test_quantised_experts_equal_their_dequantised_weights(element, block, symmetric, tokens):
    """Both products, with biases and the clamped activation, in the bytes of the format."""
    experts, top_k, hidden, width = (5, 2, 96, 64) if INTERPRETED else (32, 4, 1024, 736)
    scheme = WeightScheme(layout="online", element=element, block=block, symmetric=symmetric)
    dense, stored = [], []
    generator = torch.Generator().manual_seed(3)
    for outputs, inputs, parts in ((2 * width, hidden, {"a": width, "b": width}), (hidden, width, {"c": hidden})):
        method = build_method(scheme, parts)
        layer = ExpertWeights(experts, outputs, inputs, dtype=DTYPE, device=torch.device(DEVICE), method=method)
        for expert in range(experts):
            for start, rows in ((0, width), (width, width)) if len(parts) == 2 else ((0, hidden),):
                plain = torch.randn(rows, inputs, generator=generator) / inputs**0.5
                layer.stored(expert, start, rows)["weight"].slot.write(plain)
        dense.append(layer.dense(torch.float32))
        stored.append(layer.linear_weight)
        assert reads(layer.linear_weight, DTYPE)
    x, (weights, chosen) = torch.randn(tokens, hidden).to(DEVICE, DTYPE), random_routing(tokens, experts, top_k, DEVICE)
    chosen[tokens // 2] = -1
    options = {
        "gate_up_bias": torch.randn(experts, 2 * width).to(DEVICE, DTYPE),
        "down_bias": torch.randn(experts, hidden).to(DEVICE, DTYPE),
        "limit": 0.7,
        "alpha": 1.7,
    }
    found = run_experts(x, weights, chosen, *stored, **options)
    biases = {name: value.float().cpu() for name, value in options.items() if isinstance(value, torch.Tensor)}
    wanted = run_experts_grouped(
        x.float().cpu(), weights.cpu(), chosen.cpu(), dense[0].cpu(), dense[1].cpu(), **(options | biases)
    )
    assert not found[tokens // 2].any()
    if tokens > 1:
        assert relative_error(found.cpu(), wanted) < TOLERANCE[DTYPE]
