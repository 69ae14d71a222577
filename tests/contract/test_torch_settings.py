"""PyTorch's global settings that select kernels: a graph serves calls under the settings of its capture only."""

from __future__ import annotations

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from graph_cache.core.stats import CacheStats
from graph_cache.errors import CaptureRefused
from graph_cache.guards.torch_settings import modes_active, recreated, settings
from tests.contract.training_models import WIDTH, assert_same, attached, iteration_of, twins

HEADS, LENGTH = 4, 24


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        rows, length, _ = x.shape
        q, k, v = self.qkv(x).view(rows, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(rows, length, WIDTH)


@contextlib.contextmanager
def setting(get, put, value):
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


def flag(owner, name, value):
    return setting(lambda: getattr(owner, name), lambda new: setattr(owner, name, new), value)


def deterministic():
    return setting(torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, True)


CONTEXTS = {
    "sdpa_math": lambda: sdpa_kernel(SDPBackend.MATH),
    "sdpa_priority": lambda: sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION], set_priority=True),
    "no_flash": lambda: setting(torch.backends.cuda.flash_sdp_enabled, torch.backends.cuda.enable_flash_sdp, False),
    "matmul_precision": lambda: setting(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "allow_tf32": lambda: flag(torch.backends.cuda.matmul, "allow_tf32", True),
    "fp32_precision": lambda: flag(torch.backends.mkldnn.matmul, "fp32_precision", "bf16"),
    "cudnn": lambda: torch.backends.cudnn.flags(enabled=False),
    "cudnn_benchmark": lambda: flag(torch.backends.cudnn, "benchmark", True),
    "mkldnn": lambda: flag(torch.backends.mkldnn, "enabled", False),
    "deterministic": deterministic,
    "bf16_sums": lambda: flag(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", False),
    "default_dtype": lambda: setting(torch.get_default_dtype, torch.set_default_dtype, torch.float64),
    "default_device": lambda: torch.device("meta"),
    "fast_path": lambda: setting(
        torch.backends.mha.get_fastpath_enabled, torch.backends.mha.set_fastpath_enabled, False
    ),
}


@pytest.fixture(autouse=True)
def explicit_precisions():
    """Set what the tests restore: PyTorch distinguishes an unset precision from its default."""
    torch.set_float32_matmul_precision("highest")


@pytest.mark.parametrize("name", CONTEXTS)
def test_every_switch_is_among_the_settings(device, name):
    before = settings()
    with CONTEXTS[name]():
        assert settings() != before
    assert settings() == before


def train(model, run, switched, device):
    """Train with a switch on in some steps. Returns every loss and gradient."""
    generator, log = torch.Generator().manual_seed(3), []
    for step in range(9):
        model.zero_grad()
        x = torch.randn(2, LENGTH, WIDTH, generator=generator).to(device)
        with switched() if step % 3 == 2 else contextlib.nullcontext():
            loss = run(x)
        if loss.requires_grad:
            loss.backward()
        log.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
    return log


SWITCHED = ["sdpa_math", "matmul_precision", "mkldnn", "default_dtype", "deterministic"]


@pytest.mark.parametrize("name", SWITCHED)
def test_attached_modules_have_graphs_per_setting(pool, device, name):
    if device.type == "cuda" and name == "deterministic":
        pytest.skip("needs CUBLAS_WORKSPACE_CONFIG")
    eager, graphed = twins(Attention, device)
    _, stats = attached(graphed, [""], pool, warmup=1)
    ours = train(graphed, lambda x: graphed(x).pow(2).sum(), CONTEXTS[name], device)
    assert_same(ours, train(eager, lambda x: eager(x).pow(2).sum(), CONTEXTS[name], device))
    refused = name == "matmul_precision"  # it can't be recreated where the next step begins
    assert stats.fallbacks["model", "forward", "warming_up"] == 2  # with the switch on and off
    assert sum(stats.replays.values()) == (5 if refused else 7)
    assert ("set it for the whole step" in stats.failures.get("model", "")) == refused


@pytest.mark.parametrize("name", SWITCHED)
def test_iterations_have_graphs_per_setting(pool, device, name):
    if device.type == "cuda" and name == "deterministic":
        pytest.skip("needs CUBLAS_WORKSPACE_CONFIG")
    eager, graphed = twins(Attention, device)
    stats = CacheStats()

    def step_of(model):
        def step(x):
            loss = model(x).pow(2).sum()
            loss.backward()
            return loss.detach()

        return step

    ours = train(graphed, iteration_of(pool, stats, step_of(graphed)), CONTEXTS[name], device)
    assert_same(ours, train(eager, step_of(eager), CONTEXTS[name], device))
    assert sum(stats.replays.values()) >= 2


def test_a_backward_under_other_settings_than_recorded_runs_eager(pool, device):
    eager, graphed = twins(Attention, device)
    _, stats = attached(graphed, [""], pool)

    def steps(model):
        generator, log = torch.Generator().manual_seed(3), []
        for step in range(8):
            model.zero_grad()
            loss = model(torch.randn(2, LENGTH, WIDTH, generator=generator).to(device)).pow(2).sum()
            with CONTEXTS["mkldnn"]() if step in (5, 6) else contextlib.nullcontext():
                loss.backward()
            log.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
        return log

    assert_same(steps(graphed), steps(eager))
    assert sum(stats.replays.values()) == 6
    assert stats.fallbacks["model", "backward", "other_backward"] == 2


@pytest.mark.parametrize("where", ["inside", "outside"])
def test_a_backward_inside_autocast_equals_eager(pool, device, where):
    eager, graphed = twins(Attention, device)
    _, stats = attached(graphed, [""], pool)

    def steps(model):
        generator, log = torch.Generator().manual_seed(3), []
        for _ in range(6):
            model.zero_grad()
            x = torch.randn(2, LENGTH, WIDTH, generator=generator).to(device)
            with torch.autocast(device.type, torch.bfloat16):
                loss = (model(x).float() @ x.transpose(1, 2)).float().pow(2).sum()
                if where == "inside":
                    loss.backward()
            if where == "outside":
                loss.backward()
            log.append([loss.detach().clone(), *[parameter.grad.clone() for parameter in model.parameters()]])
        return log

    assert_same(steps(graphed), steps(eager))
    assert sum(stats.replays.values()) == 4 and not stats.fallbacks["model", "backward", "other_backward"]


def test_settings_that_differ_at_the_capture_are_recreated_or_refused():
    plain = settings()
    with sdpa_kernel(SDPBackend.MATH), torch.device("meta"):
        switched = settings()
    with recreated(switched):
        assert settings() == switched and torch.empty(1).device.type == "meta"
    assert settings() == plain
    with CONTEXTS["matmul_precision"]():
        precise = settings()
    with pytest.raises(CaptureRefused, match="fp32_precision of cuda matmul"), recreated(precise):
        pass
    assert settings() == plain


def test_modes_that_see_operations_keep_calls_eager(pool, device):
    from torch.utils.flop_counter import FlopCounterMode

    eager, graphed = twins(Attention, device)
    _, stats = attached(graphed, [""], pool)
    for step in range(5):
        x = torch.randn(2, LENGTH, WIDTH, device=device)
        if step == 4:
            with FlopCounterMode(display=False) as ours:
                graphed(x).sum().backward()
            with FlopCounterMode(display=False) as theirs:
                eager(x).sum().backward()
            assert ours.get_total_flops() == theirs.get_total_flops() > 0
        else:
            graphed(x).sum().backward()
    assert stats.fallbacks["model", "forward", "transform"] == 1 and sum(stats.replays.values()) == 2
    assert not modes_active()
