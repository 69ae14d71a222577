"""Process-wide state of Transformer Engine, which needs a GPU: here a module with the names of its state stands for it.

`tests/graph_cache/adapters/transformer_engine/test_precision_gpu.py` tests the same with Transformer Engine.
"""

from __future__ import annotations

import cProfile
import sys
from contextlib import nullcontext
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

from graph_cache.core.buffers import BufferSpec
from graph_cache.core.cache import GraphCache
from graph_cache.core.stats import CacheStats
from graph_cache.errors import CaptureRefused
from graph_cache.guards.library_state import is_of_transformer_engine, precision_autocast, weight_update_flag
from graph_cache.guards.quantizers import refuse_new_quantizers
from graph_cache.training.ambient_state import AmbientStates, combined
from graph_cache.training.iteration import SCOPE
from tests.contract.training_models import WIDTH, iteration_of


class Manager:
    """FP8GlobalStateManager's part that captures depend on."""

    enabled = calibrating = False
    recipe = "delayed"
    quantization_state = SimpleNamespace(skip_fp8_weight_update_tensor=None)

    @classmethod
    def is_fp8_enabled(cls):
        return cls.enabled

    @classmethod
    def is_fp8_calibration(cls):
        return cls.calibrating

    @classmethod
    def get_fp8_recipe(cls):
        return cls.recipe

    @classmethod
    def get_fp8_group(cls):
        return None


class Quantized(nn.Linear):
    """Has a quantizer, which another recipe replaces, and scales its input by it."""

    __module__ = "transformer_engine.pytorch.stand_in"

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.quantizers = {"input": 1.0}

    def forward(self, x):
        if Manager.enabled and Manager.recipe not in self.quantizers:
            self.quantizers = {Manager.recipe: 0.5}
        return super().forward(x * sum(self.quantizers.values()))


@pytest.fixture
def manager(monkeypatch):
    library = ModuleType("transformer_engine.pytorch.quantization")
    library.FP8GlobalStateManager = Manager
    monkeypatch.setitem(sys.modules, library.__name__, library)
    for name in ("enabled", "calibrating", "recipe"):
        monkeypatch.setattr(Manager, name, getattr(Manager, name))
    return Manager


def test_there_is_no_state_without_the_library():
    assert precision_autocast() is None
    with weight_update_flag(torch.ones(1)):
        assert precision_autocast() is None


def test_the_autocast_is_its_recipe_and_group(manager):
    assert precision_autocast() is None
    manager.enabled = True
    delayed = precision_autocast()
    manager.recipe = "current"
    assert precision_autocast() != delayed
    manager.enabled, manager.calibrating = False, True
    assert precision_autocast() is not None


def test_the_flag_of_other_captures_is_removed_and_restored(manager, monkeypatch):
    flag = torch.ones(1)
    monkeypatch.setattr(manager.quantization_state, "skip_fp8_weight_update_tensor", flag)
    with weight_update_flag(None):
        assert manager.quantization_state.skip_fp8_weight_update_tensor is None
    with pytest.raises(ZeroDivisionError), weight_update_flag(None):
        raise ZeroDivisionError
    assert manager.quantization_state.skip_fp8_weight_update_tensor is flag


def test_an_iteration_inside_an_autocast_runs_eager_and_is_counted(manager, pool, device):
    torch.manual_seed(0)
    model, stats = Quantized().to(device), CacheStats()
    step = iteration_of(pool, stats, lambda x: model(x).sum().detach())
    x = torch.ones(2, WIDTH, device=device)
    for number in range(8):
        manager.enabled = number % 2 == 1
        assert torch.equal(step(x), model(x).sum().detach())
    assert stats.fallbacks["iteration", SCOPE, "precision_autocast"] == 4


def test_an_iteration_drops_its_graphs_when_quantizers_are_replaced(pool, device):
    torch.manual_seed(0)
    model, stats = Quantized().to(device), CacheStats()
    step = iteration_of(pool, stats, lambda x: model(x).sum().detach())
    x = torch.ones(2, WIDTH, device=device)
    for number in range(12):
        if number == 6:
            model.quantizers = {"other": 0.25}
        assert torch.equal(step(x), model(x).sum().detach())
    assert stats.invalidations["stale_address"] == 1 and sum(stats.replays.values()) >= 4


def test_a_cached_function_runs_eager_after_its_quantizers_were_replaced(manager, pool, device):
    torch.manual_seed(0)
    model, cache = Quantized().to(device), GraphCache(device=device, pool=pool)
    run = cache.graphed(
        "model", lambda x: model(x), {"x": BufferSpec(("batch", WIDTH), torch.float32)}, buckets=(4,), watch=model
    )
    x = torch.ones(4, WIDTH, device=device)
    with torch.inference_mode():
        for number in range(8):
            manager.enabled = number in (4, 5)
            assert torch.equal(run(x=x), model(x)), number
    assert cache.stats.fallbacks["model", "decode", "other_modes"] == 4, cache.stats.fallbacks
    assert sum(cache.stats.replays.values()) >= 2


def test_a_capture_that_creates_quantizers_is_refused(manager):
    model = Quantized()
    manager.enabled = True
    with pytest.raises(CaptureRefused, match="another recipe"), refuse_new_quantizers([model]):
        model(torch.ones(2, WIDTH))
    with refuse_new_quantizers([model]):
        model(torch.ones(2, WIDTH))


def test_modules_are_found_by_their_base_classes():
    class Derived(Quantized):
        pass

    assert is_of_transformer_engine(Derived()) and not is_of_transformer_engine(nn.Linear(2, 2))


class Kind:
    def __init__(self, name, log):
        self.name, self.log, self.holds = name, log, True

    def of(self, modules):
        return self.name

    def recreate(self, modules, seen):
        self.log.append(("recreate", seen))
        return torch.no_grad() if self.name == "first" else nullcontext()

    def watch(self, modules):
        return lambda: self.holds

    def replaying(self, modules):
        self.log.append(("replaying", self.name))

    def replayed(self, modules):
        self.log.append(("replayed", self.name))


def test_several_ambient_states_act_as_one():
    log = []
    kinds = [Kind("first", log), Kind("second", log)]
    assert combined([]) is None and combined(kinds[:1]) is kinds[0]
    both = AmbientStates(kinds)
    assert both.of([]) == ("first", "second")
    with both.recreate([], both.of([])):
        assert not torch.is_grad_enabled()
    assert torch.is_grad_enabled()
    both.replaying([])
    both.replayed([])
    steps = ("recreate", "replaying", "replayed")
    assert log == [(step, name) for step in steps for name in ("first", "second")]
    check = both.watch([])
    assert check()
    kinds[1].holds = False
    assert not check()


def test_a_profiler_of_the_callers_goes_on_after_a_capture(pool, device):
    """cProfile's profiler is an object, which can't be set as a function again."""
    cache = GraphCache(device=device, pool=pool)
    run = cache.graphed("model", torch.tanh, {"input": BufferSpec(("batch", WIDTH), torch.float32)}, buckets=(4,))
    x = torch.randn(4, WIDTH, device=device)
    profile = cProfile.Profile()
    with torch.inference_mode(), profile:
        for _ in range(4):
            assert torch.equal(run(input=x), torch.tanh(x))
        hash("after the capture")
    assert not cache.stats.failed_captures and cache.stats.replays.total() >= 2
    names = {entry.code if isinstance(entry.code, str) else entry.code.co_name for entry in profile.getstats()}
    assert "<built-in method builtins.hash>" in names
