"""Side effects and ambient state of a forward: equal to eager, or refused with a reason."""

from __future__ import annotations

import gc
import re
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from graph_cache.core.stats import CacheStats
from tests.contract.training_models import WIDTH, assert_same, attached, iteration_of, twins

STEPS = 8


def linear():
    return nn.Linear(WIDTH, WIDTH)


def two():
    return nn.Sequential(linear(), linear())


def train(model, loss_of, device, observe=lambda model: []):
    """Return losses, gradients (None if there is none) and `observe(model)` of every step."""
    generator, optimizer = torch.Generator().manual_seed(1), torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    torch.manual_seed(1)
    log = []
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, torch.randn(4, WIDTH, generator=generator).to(device), step)
        loss.backward()
        log.append(
            (
                loss.detach().clone(),
                [None if p.grad is None else p.grad.clone() for p in model.parameters()],
                observe(model),
            )
        )
        optimizer.step()
    return log


def both(build, paths, loss_of, pool, device, observe=lambda model: []):
    torch.manual_seed(0)
    eager = build().to(device)
    torch.manual_seed(0)
    graphed = build().to(device)
    graphs, stats = attached(graphed, paths, pool)
    found, wanted = train(graphed, loss_of, device, observe), train(eager, loss_of, device, observe)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    return graphs, stats


# ---- ambient state -----------------------------------------------------------------------------------------------


def autocast_first(model, x, step):
    with torch.autocast(x.device.type, torch.bfloat16):
        hidden = model[0](x)
    return model[1](hidden.float()).pow(2).mean()


def autocast_last(model, x, step):
    hidden = model[0](x)
    with torch.autocast(x.device.type, torch.bfloat16):
        return model[1](hidden).float().pow(2).mean()


def autocast_all(model, x, step):
    with torch.autocast(x.device.type, torch.bfloat16):
        return model(x).float().pow(2).mean()


def autocast_sometimes(model, x, step):
    with torch.autocast(x.device.type, torch.bfloat16, enabled=step % 3 == 0):
        return model(x).float().pow(2).mean()


@pytest.mark.parametrize("loss_of", [autocast_first, autocast_last, autocast_all, autocast_sometimes])
def test_each_module_is_captured_under_its_own_autocast(pool, device, loss_of):
    _, stats = both(two, ["0", "1"], loss_of, pool, device)
    assert sum(stats.replays.values()) >= 2 * 3 and not stats.failed_captures


@pytest.mark.parametrize("is_leaf", [False, True])
def test_gradients_of_an_input_that_autocast_casts_twice_are_added_as_in_eager(pool, device, is_leaf):
    """Autocast caches the cast of a leaf, and casts any other tensor at each use."""

    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(WIDTH, 2), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

        def forward(self, x):
            weights = self.router(x).softmax(-1)
            return weights[..., :1] * self.experts[0](x) + weights[..., 1:] * self.experts[1](x)

    class Scale(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(WIDTH))

    def loss_of(model, x, step):
        hidden = (x if is_leaf else x * model[0].scale).requires_grad_()
        with torch.autocast(x.device.type, torch.bfloat16):
            result = model[1](hidden)
        inputs.append(hidden)
        hidden.retain_grad()
        return result.float().pow(2).mean()

    inputs: list[torch.Tensor] = []
    _, stats = both(
        lambda: nn.Sequential(Scale(), Experts()), ["1"], loss_of, pool, device, lambda model: [inputs[-1].grad.clone()]
    )
    assert stats.replays and not stats.failed_captures


def test_a_region_without_autocast_inside_a_module_has_a_backward_without_it(pool, device):
    class Inner(nn.Linear):
        def forward(self, x):
            with torch.autocast(x.device.type, enabled=False):
                return super().forward(x.float())

    both(lambda: nn.Sequential(linear(), Inner(WIDTH, WIDTH)), [""], autocast_all, pool, device)


@pytest.mark.parametrize(
    ("initial", "early", "late"), [(0.5, 0.25, 0.75), (0, 0, 0.75), (0, 0, 1), (1, 1, 0.25), (1, 1, 0)]
)
def test_the_dropout_rate_is_checked_every_step(pool, device, initial, early, late):
    def loss_of(model, x, step):
        model[1].p = early if step < 5 else late
        return model(x).pow(2).mean()

    _, stats = both(lambda: nn.Sequential(linear(), nn.Dropout(initial)), [""], loss_of, pool, device)
    assert sum(stats.replays.values()) == 3 + 1


def test_a_counter_on_a_module_does_not_keep_it_eager(pool, device):
    class Counting(nn.Linear):
        num_dropped = p = 0

    def loss_of(model, x, step):
        model[0].num_dropped, model[0].p = model[0].num_dropped + 3, step
        return model(x).pow(2).mean()

    _, stats = both(lambda: nn.Sequential(Counting(WIDTH, WIDTH), linear()), [""], loss_of, pool, device)
    assert sum(stats.replays.values()) > 0


def test_hooks_on_all_modules_keep_modules_with_submodules_eager(pool, device):
    eager, graphed = twins(two, device)
    _, stats = attached(graphed, [""], pool)
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: output + 0.01)
    try:
        loss_of = lambda model, x, step: model(x).pow(2).mean()  # noqa: E731
        torch.testing.assert_close(train(graphed, loss_of, device), train(eager, loss_of, device), rtol=0, atol=0)
    finally:
        handle.remove()
    assert stats.fallbacks["model", "forward", "hooks_inside"] == STEPS


def test_functional_call_parameters_are_never_replaced_by_the_modules_own(pool, device):
    def loss_of(model, x, step):
        student = model(x)
        teacher = {name: 0.5 * parameter.detach() for name, parameter in model.named_parameters()}
        return (student - torch.func.functional_call(model, teacher, (x,))).pow(2).mean()

    _, stats = both(two, [""], loss_of, pool, device)
    assert stats.fallbacks["model", "forward", "other_parameters"] == STEPS
    assert sum(stats.replays.values()) == STEPS - 2


@pytest.mark.parametrize("first", range(STEPS))
def test_a_step_that_begins_with_other_parameters_captures_nothing(pool, device, first):
    """A recorded step waits for its capture when the call comes, whose tensors have a history of their own."""

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = linear()

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    def loss_of(model, x, step):
        if step != first:
            return model(x).pow(2).mean()
        halves = {name: 0.5 * parameter for name, parameter in model.named_parameters()}
        return torch.func.functional_call(model, halves, (x,)).pow(2).mean()

    _, stats = both(lambda: nn.Sequential(Checkpointed()), ["0"], loss_of, pool, device)
    assert stats.fallbacks["0", "forward", "other_parameters"] == 1 and not stats.invalidations
    assert sum(stats.replays.values()) > 0


def test_an_unresolved_conjugate_is_not_mistaken_for_its_base(pool, device):
    class Complex(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=torch.complex64) for _ in range(2))

        def forward(self, x):
            return self.parts[1](self.parts[0](torch.complex(x, x + 1)).conj())

    _, stats = both(Complex, ["parts.0", "parts.1"], lambda model, x, step: model(x).abs().mean(), pool, device)
    assert stats.fallbacks["parts.1", "forward", "argument_without_memory"] == STEPS


# ---- side effects ------------------------------------------------------------------------------------------------


class LeavesALoss(nn.Module):
    def __init__(self, inside):
        super().__init__()
        self.main, self.router, self.inside = linear(), linear(), inside
        self.aux = [] if inside == "a_list" else None

    def forward(self, x):
        aux = self.router(x).pow(2).mean()
        if self.inside == "a_list":
            self.aux[:] = [aux]
        else:
            self.aux = aux
        return self.main(x)


class Counts(nn.Module):
    """Count calls in a buffer that is replaced, or in an attribute."""

    def __init__(self, where):
        super().__init__()
        self.main, self.where, self.calls = linear(), where, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x):
        if self.where == "buffer":
            self.count = self.count + 1
        else:
            self.calls += 1
        return self.main(x) * (1 + (self.count if self.where == "buffer" else self.calls))


class Writes(nn.Linear):
    def forward(self, x):
        x.mul_(2)
        return super().forward(x)


def with_aux(model, x, step):
    out = model(x).pow(2).mean()
    aux = model.aux[0] if model.inside == "a_list" else model.aux
    return out + aux if step % 2 else out


def against_input(model, x, step):
    return (model(x) - x).pow(2).mean()


REFUSED = {
    "a_loss": (
        lambda: LeavesALoss("an_attribute"),
        with_aux,
        r"changes LeavesALoss\.aux",
    ),
    "losses": (lambda: LeavesALoss("a_list"), with_aux, r"changes LeavesALoss\.aux"),
    "a_buffer": (lambda: Counts("buffer"), against_input, r"changes Counts\.count"),
    "a_count": (lambda: Counts("attribute"), against_input, r"changes Counts\.calls"),
    "its_argument": (lambda: Writes(WIDTH, WIDTH), against_input, "writes to its argument 0"),
    "weights_of_hooks": (
        lambda: nn.Sequential(nn.utils.weight_norm(linear())),
        against_input,
        "reads weight, which a hook computes",
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("effect", REFUSED)
def test_side_effects_that_a_replay_would_skip_are_refused_and_undone(pool, device, effect):
    build, loss_of, message = REFUSED[effect]
    observe = lambda model: [getattr(model, "calls", 0), *map(torch.clone, model.buffers())]  # noqa: E731
    _, stats = both(build, ["0" if effect == "weights_of_hooks" else ""], loss_of, pool, device, observe)
    assert sum(stats.failed_captures.values()) == 1 and not stats.replays
    assert re.search(message, next(iter(stats.failures.values())))


class Remembers(nn.Linear):
    """Replace a number by the last output, and keep a NaN."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.last, self.best = 0.0, float("nan")

    def forward(self, x):
        out = super().forward(x)
        self.last = out.detach()
        return out


def test_an_attribute_that_was_a_number_may_become_a_tensor(pool, device):
    _, stats = both(
        lambda: nn.Sequential(Remembers(), linear()),
        ["0", "1"],
        lambda model, x, step: model(x).pow(2).mean(),
        pool,
        device,
    )
    assert not stats.failed_captures
    assert sum(stats.replays.values()) >= 2 * (STEPS - 3)


def test_a_number_set_every_step_keeps_its_module_eager_and_is_logged(pool, device, caplog):
    def loss_of(model, x, step):
        loss = model(x).pow(2).mean()
        model[0].last = loss.item()
        return loss

    def build():
        model = two()
        model[0].last = 0.0
        return model

    _, stats = both(build, ["0"], lambda *call: sum(loss_of(*call) for _ in range(2)), pool, device)
    assert not stats.replays
    train_more = build().to(device)
    attached(train_more, ["0"], pool)
    for _ in range(2):
        train(train_more, loss_of, device)
    assert "the attribute last of a graphed module changes repeatedly" in caplog.text


def test_a_parameter_sharing_anothers_storage_gets_its_own_gradient(pool, device):
    def loss_of(model, x, step):
        if step == 4:
            model[0].weight = nn.Parameter(model[0].weight.data)
        return model(x).pow(2).mean()

    _, stats = both(two, ["0", "1"], loss_of, pool, device)
    assert stats.invalidations == {"stale_address": 1}


def test_a_detached_model_can_be_freed(pool, device):
    model = two().to(device)
    graphs, _ = attached(model, ["0", "1"], pool)
    train(model, lambda model, x, step: model(x).pow(2).mean(), device)
    graphs.detach()
    weight = weakref.ref(model[0].weight)
    del model
    gc.collect()
    assert weight() is None


# ---- outputs that are kept, or used in part ----------------------------------------------------------------------


def self_distilled(model, x, step):
    return (model(x).detach() - model(x + 1)).pow(2).mean()


def several_teachers(model, x, step):
    held = [model(x + shift).detach() for shift in range(3)]
    return sum((one - model(x)).pow(2).mean() for one in held)


@pytest.mark.parametrize("loss_of", [self_distilled, several_teachers])
def test_an_output_without_backward_keeps_its_values_while_held(pool, device, loss_of):
    _, stats = both(two, ["0", "1"], loss_of, pool, device)
    assert stats.replays


def test_losses_returned_by_a_module_may_be_kept_until_the_step_ends(pool, device):
    class Whole(nn.Linear):
        def forward(self, x):
            return super().forward(x).pow(2).mean()

    eager, graphed = twins(lambda: Whole(WIDTH, WIDTH), device)
    _, stats = attached(graphed, [""], pool)
    log = []
    for model in (graphed, eager):
        log.append([])
        for step in range(6):
            model.zero_grad()
            kept = []
            for micro in range(3):
                generator = torch.Generator().manual_seed(3 * step + micro)
                loss = model(torch.randn(4, WIDTH, generator=generator).to(device))
                loss.backward()
                kept.append(loss.detach())
            log[-1].append([*map(torch.clone, kept), model.weight.grad.clone()])
    assert_same(*log)
    assert sum(stats.replays.values()) == 6 * 3 - 2  # each microbatch is a step here


class Heads(nn.Module):
    """Two outputs, each with a submodule of its own and one that both share."""

    def __init__(self):
        super().__init__()
        self.shared, self.first, self.second = linear(), linear(), linear()

    def forward(self, x):
        hidden = self.shared(x)
        return {"first": self.first(hidden), "second": (self.second(hidden), hidden)}


@pytest.mark.parametrize("used", ["first", "second", "in_turn"])
def test_tensors_that_reach_only_unused_outputs_get_no_gradient(pool, device, used):
    def loss_of(model, x, step):
        found = model(x)
        name = used if used != "in_turn" else ("first", "second")[step % 2]
        return (found[name] if name == "first" else found[name][0]).pow(2).mean()

    _, stats = both(Heads, [""], loss_of, pool, device)
    assert sum(stats.replays.values()) == STEPS - 2


# ---- hooks on gradients ------------------------------------------------------------------------------------------


class Hooked(nn.Module):
    """Adds a hook on a gradient at every call."""

    def __init__(self, where):
        super().__init__()
        self.linear, self.where, self.same = linear(), where, nn.Dropout(0.0)

    def forward(self, x):
        if self.where == "parameter":
            self.linear.weight.register_hook(lambda grad: grad * 0.5)
        elif self.where == "argument":
            x.register_hook(lambda grad: grad * 0.5)
        elif self.where == "result that is the argument":
            self.same(x).register_hook(lambda grad: grad * 0.5)
        elif self.where == "retained":
            x.retain_grad()
        elif self.where == "computed":
            x = x.view_as(x)
            x.register_hook(lambda grad: grad * 0.5)
        return self.linear(x)


@pytest.mark.parametrize("is_leaf", [False, True])
@pytest.mark.parametrize("where", ["parameter", "argument", "result that is the argument", "retained", "computed"])
def test_a_hook_on_a_gradient_of_an_argument_or_parameter_is_refused(pool, device, where, is_leaf):
    eager, graphed = twins(lambda: Hooked(where), device)
    _, stats = attached(graphed, [""], pool)

    def steps(model):
        leaf, log = torch.ones(4, WIDTH, device=device, requires_grad=True), []
        for _ in range(STEPS):
            model.zero_grad()
            leaf.grad = None
            x = leaf if is_leaf else leaf * 2
            model(x).square().sum().backward()
            retained = [x.grad] if x.retains_grad else []
            log.append([leaf.grad, model.linear.weight.grad.clone(), *retained])
        return log

    assert_same(steps(graphed), steps(eager))
    replays = where == "computed" or (where == "retained" and is_leaf)  # a leaf's gradient is retained anyway
    assert ("adds a hook to the gradient" in stats.failures.get("model", "")) != replays
    assert (sum(stats.replays.values()) > 0) == replays


@pytest.mark.parametrize("where", ["argument", "computed"])
def test_an_iteration_that_hooks_its_argument_runs_eager(pool, device, where):
    eager, graphed = twins(lambda: Hooked(where), device)
    stats = CacheStats()

    def step_of(model):
        def step(x):
            loss = model(x).square().sum()
            loss.backward()
            return loss.detach()

        return step

    def steps(model, run):
        log = []
        for number in range(STEPS):
            model.zero_grad()
            x = torch.full((4, WIDTH), 1.0 + number, device=device, requires_grad=True)
            loss = run(x)
            log.append([loss, x.grad, *[parameter.grad.clone() for parameter in model.parameters()]])
            if number % 2:
                (x * 3).sum().backward()  # a hook on x stays there
                log.append([x.grad])
        return log

    assert_same(steps(graphed, iteration_of(pool, stats, step_of(graphed))), steps(eager, step_of(eager)))
    assert (sum(stats.replays.values()) > 0) == (where == "computed")
