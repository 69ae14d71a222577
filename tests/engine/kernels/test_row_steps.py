"""Row kernels and the epilogues of GEMMs against float64: norms, residual additions, activations, bounds of logits."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.support.kernels import DEVICE, DTYPE, INTERPRETED, relative_error  # isort: skip  (before what imports triton)

from engine.kernels.linear_weight import LinearWeight
from engine.kernels.norm_weights import NormKind, NormWeights
from engine.kernels.row_steps import add_norm, change_qkv
from engine.kernels.small_batch_gemm import Scratch, linear
from engine.layers.activation import ACTIVATIONS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # raised by Triton: ast, numpy scalars
    pytest.mark.filterwarnings("ignore:overflow encountered in exp"),  # of sigmoids, in the interpreter: 1 / inf is 0
]
TOLERANCE = 2e-3 if INTERPRETED else 1e-2
EPS = 1e-5
KINDS = {
    "rms": NormKind(EPS),
    "rms of 1 + weight": NormKind(EPS, offset=1.0),
    "layer": NormKind(EPS, centred=True),
    "layer of 1 + weight": NormKind(EPS, centred=True, offset=1.0),
}
PARAMETERS = ("none", "weight", "weight and bias")


def random(*shape: int, seed: int = 0, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def make_norm(parameters: str, width: int, seed: int) -> NormWeights:
    weight = None if parameters == "none" else random(width, seed=seed)
    return NormWeights(weight, random(width, seed=seed + 1) if parameters == "weight and bias" else None)


def normed(x: Tensor, norm: NormWeights, kind: NormKind) -> Tensor:
    weight = 1.0 if norm.weight is None else norm.weight.double()
    x = x.double() - (x.double().mean(-1, keepdim=True) if kind.centred else 0.0)
    x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + kind.eps) * (weight + kind.offset)
    return x if norm.bias is None else x + norm.bias.double()


@pytest.mark.parametrize("width", [80, 328] if INTERPRETED else [80, 2560, 9216])
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_addition_and_both_norms_equal_float64(kind, parameters, width):
    kind, rows = KINDS[kind], 3
    out_norm, norm = (make_norm(parameters, width, seed) for seed in (10, 20))
    x, hidden, found = random(rows, width, seed=1) + 2, random(rows, width, seed=2) - 1, random(rows, width)
    wanted = hidden.double() + 0.22 * normed(x, out_norm, kind)
    add_norm(hidden, kind, x=x, out_norm=out_norm, scale=0.22, norm=norm, normed=found)
    assert relative_error(hidden, wanted) < TOLERANCE
    assert relative_error(found, normed(hidden, norm, kind)) < TOLERANCE  # of hidden as it is stored


def test_parts_of_a_launch_can_be_left_out():
    kind, norm = KINDS["layer"], make_norm("weight", 80, 5)
    x, before, found = random(2, 80, seed=1), random(2, 80, seed=2), torch.full((2, 80), 7.0).to(DEVICE, DTYPE)
    hidden = before.clone()
    add_norm(hidden, kind, x=x)
    assert relative_error(hidden, before.double() + x.double()) < TOLERANCE and (found == 7.0).all()
    hidden.copy_(before)
    add_norm(hidden, kind, norm=norm, normed=found)
    assert torch.equal(hidden, before) and relative_error(found, normed(before, norm, kind)) < TOLERANCE


@pytest.mark.parametrize("clip", [None, 0.8])
@pytest.mark.parametrize("kind", ["none", "head", "all_heads", "layer"])
@pytest.mark.parametrize(("kv_heads", "group", "dim"), [(2, 3, 16), (1, 4, 24), (3, 1, 64)])
def test_norms_and_clamps_of_q_and_k_equal_float64(kind, clip, kv_heads, group, dim):
    qkv = random(3, (kv_heads * (group + 2)), dim, seed=1) + 0.5
    views = qkv.split((kv_heads * group, kv_heads, kv_heads), dim=1)
    before = [view.double() for view in views]
    shape = (dim,) if kind in ("none", "head") else None
    weights = [random(*(shape or (part.shape[1], dim)), seed=3 + place) for place, part in enumerate(views[:2])]
    offset = 1.0 if kind == "head" else 0.0
    wanted = []
    for part, weight in zip(before, [*weights, None], strict=True):
        if weight is not None and kind != "none":
            dims = (1, 2) if kind == "all_heads" else 2
            part = part - (part.mean(2, keepdim=True) if kind == "layer" else 0.0)
            part = part * torch.rsqrt(part.square().mean(dims, keepdim=True) + EPS) * (weight.double() + offset)
        wanted.append(part if clip is None else part.clamp(-clip, clip))
    q, k, v = views[0].unflatten(1, (kv_heads, group)), *views[1:]
    change_qkv(q, k, v, kind=kind, q_norm=weights[0], k_norm=weights[1], eps=EPS, offset=offset, clip=clip)
    for found, part in zip(views, wanted, strict=True):
        assert relative_error(found, part) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 3, 260])  # 260: a library's GEMM
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activations_equal_torchs(activation, gated, rows):
    outputs, inputs = 48, 80
    x, weight = random(rows, inputs), random(outputs * (1 + gated), inputs, seed=1) / inputs**0.5 * 2
    bias, out = random(len(weight), seed=2), random(rows, outputs)
    scratch = Scratch(rows, rows, inputs, 2 * outputs, 64, DTYPE, torch.device(DEVICE))
    linear(x, LinearWeight.plain(weight), out, scratch, bias=bias, gated=gated, activation=activation)
    y = F.linear(x.double(), weight.double(), bias.double())
    first, *rest = y.chunk(2, -1) if gated else (y,)
    wanted = ACTIVATIONS[activation](first) * (rest[0] if gated else 1.0)
    assert relative_error(out, wanted) < TOLERANCE


@pytest.mark.parametrize("rows", [1, 3, 260])
@pytest.mark.parametrize(("scale", "softcap"), [(0.125, None), (1.0, 2.0), (3.0, 0.5)])
def test_logits_are_scaled_and_bounded_before_their_maxima(scale, softcap, rows):
    outputs, inputs = 200, 64
    x, weight, bias = random(rows, inputs), random(outputs, inputs, seed=1) / inputs**0.5, random(outputs, seed=2)
    scratch = Scratch(rows, rows, inputs, 2 * outputs, outputs, DTYPE, torch.device(DEVICE))
    out = random(rows, outputs)
    tiles = linear(x, LinearWeight.plain(weight), out, scratch, bias=bias, best=True, scale=scale, softcap=softcap)
    wanted = scale * F.linear(x.double(), weight.double(), bias.double())
    wanted = wanted if softcap is None else softcap * (wanted / softcap).tanh()
    assert relative_error(out, wanted) < TOLERANCE
    assert torch.equal(scratch.maxima(rows, tiles)[0].max(1).values, out.float().max(1).values)
