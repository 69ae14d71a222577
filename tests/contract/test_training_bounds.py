"""What training graphs keep and pass on: gradients, keys of objects, graphs per shape, effects on arguments, hooks."""

from __future__ import annotations

import gc
import inspect
import weakref

import pytest
import torch
import transformers as hf
from torch import nn

from graph_cache.core.stats import CacheStats
from graph_cache.training import iteration as iterations
from tests.contract.training_models import WIDTH, attached, iteration_of, twins


def linear():
    return nn.Linear(WIDTH, WIDTH)


def test_gradients_held_as_storages_keep_their_values(pool, device):
    eager, graphed = twins(lambda: nn.Sequential(linear(), linear()), device)
    _, stats = attached(graphed, ["0", "1"], pool)

    def job(model):
        held = []
        for step in range(6):
            model.zero_grad()
            model(torch.full((2, WIDTH), float(step), device=device)).pow(2).sum().backward()
            grads = [parameter.grad for parameter in model.parameters()]
            held.append([(grad.untyped_storage(), grad.storage_offset(), grad.shape) for grad in grads])
        return [torch.empty(0, device=device).set_(*one).tolist() for step in held for one in step]

    found = job(graphed)
    assert found == job(eager)
    assert stats.replays and len(set(map(str, found[::4]))) == 6


def language_model():
    torch.manual_seed(0)
    config = hf.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    return hf.LlamaForCausalLM(config)


def test_a_new_cache_object_at_every_call_is_not_kept(pool, device):
    model = language_model().to(device).train()
    # transformers 5.24 renamed past_key_values to cache.
    name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
    _, stats = attached(model, ["model.layers.0", "model.layers.1"], pool)
    ids, caches = torch.arange(8, device=device)[None], []
    for _ in range(24):
        cache = hf.DynamicCache()
        model(ids, use_cache=True, labels=ids, **{name: cache}).loss.backward()
        caches.append(weakref.ref(cache))
        del cache
        model.zero_grad()
    gc.collect()
    assert sum(reference() is not None for reference in caches) <= 8
    reasons = {reason for _, _, reason in stats.fallbacks}
    assert "object_argument" in reasons and not stats.replays


def test_generation_with_left_padding_equals_eager(pool, device):
    eager, graphed = language_model().to(device), language_model().to(device)
    attached(graphed, [""], pool)
    ids = torch.tensor([[0, 0, 5, 6, 7], [3, 4, 5, 6, 7]], device=device)
    mask = (ids != 0).long()
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    for model in (eager, graphed):
        model.eval()
    assert torch.equal(graphed.generate(ids, **options), eager.generate(ids, **options))


def test_an_iteration_keeps_a_bounded_number_of_graphs(pool, device, monkeypatch):
    monkeypatch.setattr(iterations, "MAX_GRAPHS", 3)
    model = linear().to(device)

    def step(x):
        model.zero_grad()
        loss = model(x).sum()
        loss.backward()
        return loss

    run = iteration_of(pool, CacheStats(), step)
    for rows in range(1, 7):
        for _ in range(5):
            run(torch.ones(rows, WIDTH, device=device))
    shapes = [row["replays"] for row in run.table()]
    assert len(shapes) == 3 and all(shapes)


class Arguments:
    """Steps with an effect on their argument."""

    def __init__(self, model, how):
        self.model, self.how = model, how

    def __call__(self, x):
        self.model.zero_grad()
        if self.how == "requires_grad":
            x.requires_grad_()
        if self.how == "writes":
            x.mul_(2)
        loss = self.model(x).pow(2).mean()
        loss.backward()
        return loss.detach()


@pytest.mark.parametrize("how", ["requires_grad", "leaf", "history", "kept", "writes", "parameter"])
def test_effects_of_an_iteration_on_its_arguments_equal_eager(pool, device, how):
    def job(model, wrap):
        run, log = wrap(Arguments(model, how)), []
        outside = torch.ones(WIDTH, device=device, requires_grad=True)
        kept = torch.ones(2, WIDTH, device=device, requires_grad=True)
        for index in range(7):
            x = torch.full((2, WIDTH), 1.0 + index, device=device)
            if how == "leaf":
                x.requires_grad_()
            x = {"history": x * outside, "kept": kept, "parameter": model.weight}.get(how, x)
            log.append(run(x).clone())
            grads = [outside.grad, kept.grad, model.weight.grad, x.grad if x.is_leaf else None]
            log += [grad.clone() for grad in grads if grad is not None]
            log += [x.detach().clone(), torch.tensor(x.requires_grad)]
            with torch.no_grad():
                model.weight.sub_(0.1 * model.weight.grad)
        return log

    eager, graphed = twins(linear, device)
    stats = CacheStats()
    found, wanted = job(graphed, lambda step: iteration_of(pool, stats, step)), job(eager, lambda step: step)
    assert len(found) == len(wanted) and all(map(torch.equal, found, wanted))
    reasons = {reason for _, _, reason in stats.fallbacks} - {"warming_up"}
    if how in ("requires_grad", "leaf"):
        assert stats.replays and not reasons
    else:
        expected = "argument_gradient" if how in ("history", "kept") else "capture_failed"
        assert expected in reasons or "argument_gradient" in reasons
        assert not stats.replays


def doubled(parameter):
    parameter.grad.mul_(2)


@pytest.mark.parametrize("kind", ["forward", "parameter", "accumulated", "swapped"])
def test_hooks_that_are_added_between_two_iterations_run(pool, device, kind):
    def job(model, wrap):
        def step(x):
            model.zero_grad()
            loss = model(x).pow(2).mean()
            loss.backward()
            return loss.detach()

        run, log = wrap(step), []
        handle = model.register_forward_hook(lambda module, args, out: out * 1.0) if kind == "swapped" else None
        for index in range(9):
            if index == 5:
                if kind == "parameter":
                    model.weight.register_hook(lambda grad: grad * 2)
                elif kind == "accumulated":
                    model.weight.register_post_accumulate_grad_hook(doubled)
                else:
                    if handle is not None:
                        handle.remove()
                    model.register_forward_hook(lambda module, args, out: out * 2)
            log += [run(torch.ones(2, WIDTH, device=device)).clone(), model.weight.grad.clone()]
        return log

    eager, graphed = twins(linear, device)
    stats = CacheStats()
    found, wanted = job(graphed, lambda step: iteration_of(pool, stats, step)), job(eager, lambda step: step)
    assert all(map(torch.equal, found, wanted))
    assert sum(stats.captures.values()) == 2
