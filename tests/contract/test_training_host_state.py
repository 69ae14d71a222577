"""Python state and memory that a forward changes beside its results, and traces that a capture must not leave."""

from __future__ import annotations

import re
import zlib
from collections import OrderedDict

import pytest
import torch
from torch import nn

from graph_cache.core.buffers import BufferSpec
from graph_cache.core.cache import GraphCache
from tests.contract.test_training_side_effects import against_input, both, linear
from tests.contract.training_models import WIDTH


class ReplacesAParameter(nn.Linear):
    """Replaces a frozen parameter, which it does not train."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.ones(()), requires_grad=False)

    def forward(self, x):
        self.scale = nn.Parameter(self.scale * 0.5, requires_grad=False)
        return super().forward(x) * self.scale


class SwapsABuffersMemory(nn.Linear):
    """A moving average whose memory is replaced, as some implementations of vector quantisation do."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x):
        self.average.data = 0.9 * self.average + x.detach().mean(0)
        return super().forward(x - self.average)


class ChangesAContainer(nn.Linear):
    def __init__(self, kind):
        super().__init__(WIDTH, WIDTH)
        self.state = {"list": [1.0], "dict": {"scale": 1.0}, "nested": {"deep": [[1.0]]}, "set": {1}}[kind]
        self.kind = kind

    def forward(self, x):
        if self.kind == "list":
            self.state[0] += 1
            scale = self.state[0]
        elif self.kind == "dict":
            self.state["scale"] += 1
            scale = self.state["scale"]
        elif self.kind == "nested":
            self.state["deep"][0][0] += 1
            scale = self.state["deep"][0][0]
        else:
            self.state.add(len(self.state) + 1)
            scale = len(self.state)
        return super().forward(x) * scale


class ReadsItsLastResult(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.mean = torch.zeros(())

    def forward(self, x):
        self.mean = 0.9 * self.mean.to(x.device) + x.detach().mean()
        return super().forward(x) + self.mean


REFUSED = {
    "parameter": (ReplacesAParameter, "scale"),
    "memory": (SwapsABuffersMemory, "the memory of .*average"),
    "list": (lambda: ChangesAContainer("list"), r"state\[0\]"),
    "dict": (lambda: ChangesAContainer("dict"), r"state\['scale'\]"),
    "nested": (lambda: ChangesAContainer("nested"), "state"),
    "set": (lambda: ChangesAContainer("set"), "state"),
    "result": (ReadsItsLastResult, "mean"),
}


class Seeds(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WIDTH)

    def forward(self, x):
        torch.manual_seed(11)
        return super().forward(x) + torch.rand_like(x)


def test_a_forward_that_seeds_a_generator_runs_eager(pool, device):
    """A replay continues a generator's numbers. Eager begins them anew, at a seed that the generator may have."""
    _, stats = both(lambda: nn.Sequential(Seeds(), linear()), ["0"], against_input, pool, device)
    assert not stats.replays and sum(stats.failed_captures.values()) == 1


def test_a_fused_norm_is_the_same_in_an_observed_step(pool, device):
    """RMSNorm has a kernel of its own on a GPU, and none on a CPU."""
    _, stats = both(lambda: nn.Sequential(nn.RMSNorm(WIDTH), linear()), ["0"], against_input, pool, device)
    assert stats.replays


def state_of(model):
    found = [value for module in model.modules() for value in (getattr(module, "state", 0), getattr(module, "mean", 0))]
    return [zlib.crc32(repr(found).encode()), *[buffer.clone() for buffer in model.buffers()]]


@pytest.mark.parametrize("case", REFUSED)
def test_python_state_that_a_forward_changes_keeps_it_eager_and_is_restored(pool, device, case):
    build, names = REFUSED[case]
    _, stats = both(lambda: nn.Sequential(build(), linear()), ["0"], against_input, pool, device, state_of)
    assert not stats.replays and sum(stats.failed_captures.values()) == 1
    assert re.search(f"changes .*{names}", next(iter(stats.failures.values())))


# ---- traces of a capture -----------------------------------------------------------------------------------------


class WritesAnAttribute(nn.Linear):
    """Counts calls in a plain tensor attribute, in place."""

    def __init__(self, refuses=False):
        super().__init__(WIDTH, WIDTH)
        self.calls, self.refuses = [torch.zeros(())], refuses

    def _apply(self, fn, recurse=True):
        self.calls[0] = fn(self.calls[0])
        return super()._apply(fn, recurse)

    def forward(self, x):
        self.calls[0].add_(1)
        out = super().forward(x) + self.calls[0]
        return out * out.sum().item() if self.refuses else out


@pytest.mark.parametrize("refuses", [False, True])
def test_a_capture_does_not_repeat_writes_to_plain_tensors(pool, device, refuses):
    _, stats = both(
        lambda: nn.Sequential(WritesAnAttribute(refuses), linear()),
        ["0"],
        lambda model, x, step: model(x).tanh().pow(2).mean(),
        pool,
        device,
        lambda model: [model[0].calls[0].clone()],
    )
    assert bool(stats.replays) is not refuses


class Renormalised(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.linear = nn.Embedding(8, WIDTH, max_norm=0.5), linear()

    def forward(self, x):
        tokens = torch.arange(len(x), device=x.device)
        return self.linear(self.embedding(tokens) + x)


def test_a_capture_does_not_repeat_writes_to_parameters(pool, device):
    both(Renormalised, [""], against_input, pool, device, lambda model: [model.embedding.weight.detach().clone()])


class CountsGradients(nn.Linear):
    """Puts a hook on its output in each forward, which counts in Python."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.counted = []

    def forward(self, x):
        out = super().forward(x)
        out.register_hook(lambda grad: self.counted.append(len(self.counted)))
        return out


def test_a_backward_that_changes_python_state_is_refused(pool, device):
    """Abandoned forwards hide the change until the capture."""

    def loss_of(model, x, step):
        for _ in range(3):
            model(x)
        return against_input(model, x, step)

    def observe(model):
        return [torch.tensor(model.counted)]

    _, stats = both(CountsGradients, [""], loss_of, pool, device, observe)
    assert stats.failed_captures and not stats.replays
    both(CountsGradients, [""], against_input, pool, device, observe)


def test_a_replaced_tensor_attribute_drops_the_graphs_that_read_it(pool, device):
    class Masked(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.mask = torch.ones(WIDTH)

        def forward(self, x):
            return super().forward(x) * self.mask

        def _apply(self, fn, recurse=True):
            self.mask = fn(self.mask)
            return super()._apply(fn, recurse)

    def loss_of(model, x, step):
        if step == 5:
            model[0].mask = torch.zeros_like(model[0].mask)
        return model(x).pow(2).mean()

    _, stats = both(lambda: nn.Sequential(Masked(), linear()), ["0"], loss_of, pool, device)
    assert stats.invalidations == {"stale_address": 1} and stats.replays


def test_warming_a_cache_leaves_a_watched_batch_norm_as_it_was(pool, device):
    def build():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)).to(device)

    eager, graphed = build(), build()
    before = {name: value.clone() for name, value in graphed.state_dict().items()}
    cache = GraphCache(device=device, pool=pool)
    run = cache.graphed(
        "norm",
        lambda x: graphed(x),
        {"x": BufferSpec(("batch", WIDTH), torch.float32)},
        independent_rows=True,
        buckets=(4, 8),
        watch=graphed,
    )
    cache.warm()
    assert all(torch.equal(value, before[name]) for name, value in graphed.state_dict().items())
    x = torch.randn(8, WIDTH, device=device)
    with torch.no_grad():
        assert torch.equal(run(x=x), eager(x))
    assert all(torch.equal(value, eager.state_dict()[name]) for name, value in graphed.state_dict().items())


class Activations(OrderedDict):
    """Creates a module when an item is read, as the table of activations in transformers does.

    Its keys are others than those stored, as in the tables of model classes there.
    """

    def __iter__(self):
        return iter(["computed"])

    def __len__(self):
        return 1

    def __getitem__(self, name):
        return super().__getitem__(name)()


ACTIVATIONS = Activations(gelu=nn.GELU, silu=nn.SiLU)


def test_a_dictionary_that_creates_items_when_read_stays_as_it_was(pool, device):
    class Activated(nn.Linear):
        def __init__(self):
            super().__init__(WIDTH, WIDTH)
            self.table = ACTIVATIONS

        def forward(self, x):
            return self.table["silu"](super().forward(x)) + ACTIVATIONS["gelu"](x)

    _, stats = both(lambda: nn.Sequential(Activated(), linear()), ["0"], against_input, pool, device)
    assert stats.replays and not stats.invalidations

    assert list(dict.values(ACTIVATIONS)) == [nn.GELU, nn.SiLU]
