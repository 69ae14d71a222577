"""The experts of a decode step against float64: routing, norms, padding rows, biases, captures."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.support.kernels import DEVICE, DTYPE, INTERPRETED, relative_error  # isort: skip  (before what imports triton)

from engine.kernels.expert_step import MAX_ROWS, ExpertScratch, ExpertTensors, add_experts, route
from engine.kernels.linear_weight import LinearWeight
from tests.support.moe_reference import experts_reference, random_experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.interpretable,
    pytest.mark.filterwarnings("default::DeprecationWarning"),  # raised by Triton: ast, numpy scalars
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # raised by Triton's interpreter for NaN
]
EPS = 1e-5
TOLERANCE = 2e-2  # relative; of what the experts add
SHAPES = [(5, 2, 48, 24), (8, 3, 136, 40), (1, 1, 16, 8)]  # experts, top_k, hidden, width
ROWS = [1, 2, 7, 16, 17, 40]
if not INTERPRETED:
    SHAPES += [(128, 8, 2048, 768), (32, 4, 2880, 2880), (60, 4, 2048, 1408)]
    ROWS += [3, 64, 128, MAX_ROWS]


def make(
    experts: int, top_k: int, hidden: int, width: int, *, bias: bool = False, limit: float | None = None,
    normalize: bool = True,
) -> tuple[ExpertTensors, ExpertScratch, Tensor]:  # fmt: skip
    """Return random experts, their scratch and the weight of a norm."""
    torch.manual_seed(experts + width)
    gate_up, down = random_experts(experts, hidden, width, DTYPE, DEVICE)

    def random_bias(*shape: int) -> Tensor | None:
        return torch.randn(shape).to(DEVICE, DTYPE) if bias else None

    tensors = ExpertTensors(
        torch.randn(experts, hidden).to(DEVICE, DTYPE), random_bias(experts), top_k, normalize,
        LinearWeight.plain(gate_up), random_bias(experts, 2 * width), LinearWeight.plain(down),
        random_bias(experts, hidden), limit, 1.0 if limit is None else 1.7,
    )  # fmt: skip
    norm = (1 + 0.3 * torch.randn(hidden)).to(DEVICE, DTYPE)
    return tensors, ExpertScratch(MAX_ROWS, tensors, DTYPE, torch.device(DEVICE)), norm


def check(tensors: ExpertTensors, scratch: ExpertScratch, norm: Tensor, hidden: Tensor, valid: Tensor | None) -> None:
    """Compare a call with float64, given its own choice of experts, which is compared with torch's."""
    rows, before = len(hidden), hidden.clone()
    normed = add_experts(hidden, tensors, scratch, norm=norm, eps=EPS, valid=valid)
    x = before.cpu().double()
    wanted = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS) * norm.cpu().double()
    assert relative_error(normed.cpu(), wanted) < 5e-3
    logits = normed.cpu().double() @ tensors.router.cpu().double().T
    if tensors.router_bias is not None:
        logits += tensors.router_bias.cpu().double()
    probabilities = logits.softmax(-1)
    chosen, weights = scratch.chosen[:rows].cpu().long(), scratch.weights[:rows].cpu().double()
    used = torch.ones(rows, dtype=torch.bool) if valid is None else valid.cpu()
    assert (chosen[~used] == -1).all()
    best = probabilities.topk(tensors.top_k).values
    mine = probabilities.gather(1, chosen.clamp(min=0))
    torch.testing.assert_close(mine[used], best[used], atol=1e-4, rtol=1e-3)
    assert all(len(set(row)) == tensors.top_k for row in chosen[used].tolist())
    expected = best / best.sum(-1, keepdim=True) if tensors.normalize else best
    torch.testing.assert_close(weights[used], expected[used], atol=1e-4, rtol=1e-3)
    found = (hidden.cpu().double() - before.cpu().double())[used]
    if rows * tensors.down.weight.shape[2] * tensors.top_k > 4e5:  # the loop takes long: look at some rows
        few = torch.arange(0, rows, max(1, rows // 8))
        found, used = found[few], used & False
        used[few] = True
    assert not (hidden - before)[~(used if valid is None else valid.cpu())].any() or valid is None
    options = {"limit": tensors.limit, "alpha": tensors.alpha}
    if tensors.gate_up_bias is not None:
        options |= {"gate_up_bias": tensors.gate_up_bias, "down_bias": tensors.down_bias}
    added = experts_reference(
        normed.cpu()[used], weights[used], chosen[used], tensors.gate_up.weight, tensors.down.weight, **options
    )
    assert relative_error(found, added) < TOLERANCE


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("shape", SHAPES)
def test_experts_equal_the_reference(shape: tuple[int, int, int, int], rows: int) -> None:
    tensors, scratch, norm = make(*shape)
    check(tensors, scratch, norm, 0.1 * torch.randn(rows, shape[2]).to(DEVICE, DTYPE), None)


@pytest.mark.parametrize("rows", [1, 5, 20])
@pytest.mark.parametrize(("bias", "limit", "normalize"), [(True, 0.7, True), (True, None, False), (False, 0.7, False)])
def test_biases_limits_and_weights_that_are_not_normalised(
    bias: bool, limit: float | None, normalize: bool, rows: int
) -> None:
    tensors, scratch, norm = make(6, 3, 64, 40, bias=bias, limit=limit, normalize=normalize)
    check(tensors, scratch, norm, 0.1 * torch.randn(rows, 64).to(DEVICE, DTYPE), None)


@pytest.mark.parametrize("rows", [2, 16, 33])
def test_rows_that_are_not_valid_stay_and_use_no_expert(rows: int) -> None:
    tensors, scratch, norm = make(6, 2, 64, 40)
    hidden = 0.1 * torch.randn(rows, 64).to(DEVICE, DTYPE)
    hidden[-1] = float("nan")
    valid = torch.arange(rows, device=DEVICE) < rows - 1
    before = hidden[:-1].clone()
    add_experts(hidden, tensors, scratch, norm=norm, eps=EPS, valid=valid)
    assert hidden[-1].isnan().all() and (scratch.chosen[rows - 1] == -1).all()
    mine = hidden[:-1].clone()
    alone = before.clone()
    for row in range(rows - 1):  # by the kernels of one row
        add_experts(alone[row : row + 1], tensors, scratch, norm=norm, eps=EPS)
    torch.testing.assert_close(mine.float() - before.float(), alone.float() - before.float(), atol=5e-3, rtol=2e-2)


def test_one_row_that_is_not_valid_stays() -> None:
    tensors, scratch, norm = make(6, 2, 64, 40)
    hidden = torch.randn(1, 64).to(DEVICE, DTYPE)
    before = hidden.clone()
    add_experts(hidden, tensors, scratch, norm=norm, eps=EPS, valid=torch.zeros(1, dtype=torch.bool, device=DEVICE))
    assert torch.equal(hidden, before)


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_scores_that_are_nan_choose_experts_that_exist(rows: int) -> None:
    tensors, scratch, norm = make(5, 3, 48, 24)
    hidden = torch.full((rows, 48), float("nan")).to(DEVICE, DTYPE)
    route(hidden, tensors, scratch, norm=norm, eps=EPS, valid=None)
    assert ((scratch.chosen[:rows] >= 0) & (scratch.chosen[:rows] < 5)).all()


def test_a_rows_bits_do_not_depend_on_the_other_rows() -> None:
    tensors, scratch, norm = make(6, 2, 64, 40)
    for rows in (9, 30):
        hidden = 0.1 * torch.randn(rows, 64).to(DEVICE, DTYPE)
        other = hidden.clone()
        other[1:] = torch.randn(rows - 1, 64).to(hidden)
        add_experts(hidden, tensors, scratch, norm=norm, eps=EPS)
        add_experts(other, tensors, scratch, norm=norm, eps=EPS)
        assert torch.equal(hidden[0], other[0]) and not torch.equal(hidden[1:], other[1:])


@pytest.mark.skipif(INTERPRETED, reason="CUDA graphs need a GPU")
@pytest.mark.parametrize("rows", [1, 8, 64])
def test_a_captured_call_follows_its_rows(rows: int) -> None:
    tensors, scratch, norm = make(16, 4, 256, 128)
    source, hidden = (torch.randn(rows, 256).to(DEVICE, DTYPE) for _ in range(2))
    valid = torch.ones(rows, dtype=torch.bool, device=DEVICE)
    add_experts(hidden.clone(), tensors, scratch, norm=norm, eps=EPS, valid=valid)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        hidden.copy_(source)
        add_experts(hidden, tensors, scratch, norm=norm, eps=EPS, valid=valid)
    for used in (rows, rows // 2, 0):
        source.normal_()
        valid.copy_(torch.arange(rows, device=DEVICE) < used)
        graph.replay()
        again = source.clone()
        mine = hidden.clone()
        add_experts(again, tensors, scratch, norm=norm, eps=EPS, valid=valid)
        assert torch.equal(mine, again)
