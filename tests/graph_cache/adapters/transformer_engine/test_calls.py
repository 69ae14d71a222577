"""Which calls are replayed, and the static inputs that graphs get."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from graph_cache.adapters.transformer_engine import TransformerEngineGraphs
from graph_cache.adapters.transformer_engine.maker import Precision
from graph_cache.adapters.transformer_engine.samples import CallLog, choose_samples, static_inputs
from graph_cache.errors import GraphError
from graph_cache.training.call import flatten_call
from tests.graph_cache.adapters.transformer_engine.static_graphs import StaticMaker
from tests.graph_cache.adapters.transformer_engine.te_stack import (
    TWO_WARMUP_FORWARDS,
    WIDTH,
    attached,
    batch,
    capture_context,
    reasons,
    replays,
    stack,
    step,
    warmed,
)

# ---- calls that run eagerly ------------------------------------------------------------------------------------------


def test_a_changed_shape_or_dtype_runs_eager_correctly():
    model = stack()
    eager = copy.deepcopy(model)
    graphs = warmed(model)
    for x in (batch(7, rows=5), batch(7), batch(7, rows=2)):
        for one in (model, eager):
            one.zero_grad()
            one(x).sum().backward()
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
    assert reasons(graphs) == {"unseen_signature": 6} and replays(graphs) == 3
    model.layers[0](batch(8).double().float().requires_grad_(), scale=1)  # 1 is not 1.0, and was not passed before
    assert reasons(graphs) == {"unseen_signature": 7}
    graphs.detach()


def test_eval_mode_no_gradients_and_hooks_inside_run_eager():
    model = stack()
    graphs = warmed(model)
    with torch.no_grad():
        model(batch(0))
    assert reasons(graphs) == {"no_gradient": 3}
    model.eval()(batch(0)).sum().backward()
    assert reasons(graphs) == {"no_gradient": 3, "unseen_signature": 3}
    model.train()
    seen = []
    handle = model.layers[1].inner.register_forward_hook(lambda module, args, out: seen.append(out.shape))
    model(batch(0)).sum().backward()
    assert reasons(graphs)["hooks_inside"] == 1 and len(seen) == 1 and replays(graphs) == 2
    handle.remove()
    model(batch(0)).sum().backward()
    assert replays(graphs) == 5
    graphs.detach()


def test_hooks_on_a_layer_itself_run_once_a_call_and_not_in_the_capture():
    model = stack()
    seen = []
    model.layers[0].register_forward_pre_hook(lambda module, args: seen.append("before"))
    model.layers[0].register_full_backward_hook(lambda module, inputs, outputs: seen.append("after"))
    graphs = warmed(model)
    assert seen == ["before", "after"] * 4
    model(batch(0)).sum().backward()
    assert seen == ["before", "after"] * 5 and replays(graphs) == 3
    graphs.detach()


def test_selected_hooks_run_before_a_replay():
    def gather(module, args):
        gathered.append(module)

    gathered: list[nn.Module] = []
    model = stack()
    for module in model.modules():
        module.register_forward_pre_hook(gather)
    graphs = warmed(model, fired=lambda hook: hook is gather)
    gathered.clear()
    model(batch(0)).sum().backward()
    assert gathered == [one for one in model.modules() if one is not model.layers] and replays(graphs) == 3
    graphs.detach()


def test_more_forwards_than_were_captured_run_eager_correctly():
    model = stack()
    eager = copy.deepcopy(model)
    graphs = warmed(model, [1, 1, -1, -1])
    for one in (model, eager):
        one.zero_grad()
        step(one, [1, 1, 1, 1, -1, -1, -1, -1], [batch(seed) for seed in range(4)])
    assert reasons(graphs) == {"no_free_instance": 6} and replays(graphs) == 6
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
    graphs.detach()


def test_a_forward_whose_backward_never_comes_frees_its_graphs():
    model = stack()
    graphs = warmed(model)
    loss = model(batch(0)).sum()
    assert not graphs.is_idle
    del loss
    assert graphs.is_idle
    model(batch(1)).sum().backward()
    assert replays(graphs) == 6 and reasons(graphs) == {}
    graphs.detach()


def test_backwards_in_another_order_than_captured_raise():
    model = stack()
    graphs = warmed(model, [1, 1, -1, -1])
    losses = []
    for microbatch in range(2):
        for layer in model.layers:
            layer.current_microbatch = microbatch
        losses.append(model(batch(microbatch)).sum())
    with pytest.raises(GraphError, match="in the order that was given for the capture"):
        losses[1].backward()
    del losses
    graphs.detach()


def test_a_backward_that_is_run_twice_raises():
    model = stack()
    graphs = warmed(model)
    loss = model(batch(0)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(GraphError, match="run twice"):
        loss.backward()
    graphs.detach()


def test_non_constant_arguments_run_eager():
    model = stack(1)
    graphs = attached(model)
    for number in range(5):
        model(batch(number), context=object()).sum().backward()
    assert reasons(graphs) == {"warming_up": 5} and graphs.table() == []
    graphs.detach()


def test_leaf_input_gradients_are_copies():
    model = stack()
    graphs = warmed(model)
    inputs = [batch(seed).requires_grad_() for seed in range(3)]
    for x in inputs:
        hidden = x
        for layer in model.layers:
            hidden, _ = layer(hidden)
        hidden.square().mean().backward()
    assert replays(graphs) == 9
    assert all(torch.isfinite(x.grad).all() for x in inputs)  # later backwards overwrite memory of the graphs
    graphs.detach()


def test_gradient_of_a_twice_used_output_survives_intermediate_backwards():
    model = stack(4)
    eager = copy.deepcopy(model)

    def run(one, seed):
        first, second, third, last = one.layers
        hidden = first(one.embed(batch(seed)))[0]
        long = third(second(hidden)[0])[0]
        (last(hidden)[0] + long).square().mean().backward()

    graphs = attached(model)
    for seed in range(6):
        run(model, seed)
        run(eager, seed)
    assert replays(graphs) == 3 * 4
    for one, other in zip(model.parameters(), eager.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)  # the two gradients are added in another order
    graphs.detach()


def test_outputs_without_a_gradient_have_none_in_a_replay():
    class Counting(nn.Linear):
        def forward(self, x):
            out = super().forward(x)
            return {"out": out, "mean": out.detach().mean(), "count": len(x)}

    model = nn.Sequential(Counting(WIDTH, WIDTH))
    graphs = TransformerEngineGraphs(list(model.named_children()), [1, -1], capture_context(), maker=StaticMaker())
    for seed in range(5):
        found = model(batch(seed))
        assert found["out"].requires_grad and not found["mean"].requires_grad and found["count"] == 4
        assert torch.equal(found["mean"], found["out"].mean())
        found["out"].sum().backward()
    assert replays(graphs) == 2
    graphs.detach()


# ---- arguments -------------------------------------------------------------------------------------------------------


def test_a_mask_shared_by_all_layers_is_one_static_input():
    model = stack()
    eager = copy.deepcopy(model)
    mask, maker = torch.ones(4, WIDTH).tril(), StaticMaker()
    graphs = warmed(model, TWO_WARMUP_FORWARDS, maker, kwargs={"mask": mask})
    assert all(len(sample) == 1 for sample in maker.plan.samples)  # only the hidden state is passed per call
    other = torch.ones(4, WIDTH).triu()
    for given_mask in (mask, other, mask.mul_(0.5)):
        for one in (model, eager):
            one.zero_grad()
            step(one, TWO_WARMUP_FORWARDS, [batch(seed) for seed in range(4)], mask=given_mask)
        assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
    assert reasons(graphs) == {} and replays(graphs) == 3 * 3 * 4
    graphs.detach()


def test_a_shared_input_that_changes_while_graphs_read_it_runs_eager():
    model = stack()
    eager = copy.deepcopy(model)
    graphs = warmed(model, [1, 1, -1, -1], kwargs={"mask": torch.ones(4, WIDTH)})
    for one in (model, eager):
        losses = []
        for microbatch in range(2):
            for layer in one.layers:
                layer.current_microbatch = microbatch
            losses.append(one(batch(microbatch), mask=torch.full((4, WIDTH), microbatch + 2.0)).square().mean())
        for loss in losses:
            loss.backward()
    assert all(torch.equal(a.grad, b.grad) for a, b in zip(model.parameters(), eager.parameters(), strict=True))
    assert reasons(graphs) == {"no_free_instance": 3} and replays(graphs) == 3
    graphs.detach()


def log_of(*calls) -> CallLog:
    """Return the call log of a layer for these (args, kwargs)."""
    found = CallLog()
    for args, kwargs in calls:
        seen = found.record(*flatten_call(args, kwargs, True), args, kwargs, Precision())
        seen.differentiable = (True,)
    return found


def test_static_inputs_are_ordered_by_chunk_microbatch_layer():
    hidden = torch.randn(4, WIDTH, dtype=torch.bfloat16).t().requires_grad_()
    (sample,) = choose_samples([log_of(((hidden,), {"ids": torch.arange(4), "mask": None}))])
    # chunk 0 has two layers, chunk 1 has one; two microbatches of chunk 0 are outstanding at a time, one of chunk 1
    found = static_inputs([[sample, sample], [sample]], [1, 1, -1, 2, -2, -1, 2, -2])
    assert [list(one) for one in found] == [
        ["input0_buffer0", "input1_buffer1"],
        ["input0_buffer2", "input1_buffer3"],
        ["input0_buffer4", "input1_buffer5"],
        ["input0_buffer6", "input1_buffer7"],
        ["input0_buffer0", "input1_buffer1"],  # chunk 1: the first microbatch of chunk 0 is done
        ["input0_buffer0", "input1_buffer1"],
    ]
    first, ids = found[0].values()
    assert (first.shape, first.stride(), first.dtype, first.requires_grad) == (
        hidden.shape,
        hidden.stride(),
        torch.bfloat16,
        True,
    )
    assert ids.dtype == torch.int64 and not ids.requires_grad
    addresses = [one[next(iter(one))].data_ptr() for one in found]
    assert addresses[0] == addresses[4] == addresses[5] and len(set(addresses)) == 4


def test_inputs_of_different_signatures_share_no_memory():
    rows = [choose_samples([log_of(((torch.ones(count, WIDTH),), {}))])[0] for count in (4, 2)]
    first, second = static_inputs([[rows[0]], [rows[1]]], [1, -1, 2, -2])
    assert [one.shape[0] for inputs in (first, second) for one in inputs.values()] == [4, 2]


def test_an_expanded_input_gets_its_own_memory():
    (sample,) = choose_samples([log_of(((torch.ones(1, WIDTH).expand(4, WIDTH),), {}))])
    (one,) = static_inputs([[sample]], [1, -1])
    next(iter(one.values())).copy_(torch.randn(4, WIDTH))  # an expanded tensor could not be copied into


def test_the_most_common_call_is_captured():
    wide, narrow = torch.ones(4, WIDTH), torch.ones(2, WIDTH)
    (sample,) = choose_samples([log_of(((narrow,), {}), ((wide,), {}), ((wide,), {}))])
    assert sample.fits((wide,), {}, True) is not None
    for args, kwargs, training in (
        ((narrow,), {}, True),
        ((wide.double(),), {}, True),
        ((wide.t(),), {}, True),
        ((wide,), {"mask": None}, True),
        ((wide,), {}, False),
        ((wide, wide), {}, True),
        ((wide.clone().requires_grad_(),), {}, True),
        (([wide],), {}, True),
        ((None,), {}, True),
    ):
        assert sample.fits(args, kwargs, training) is None


def test_containers_of_tensors_are_arguments_too():
    pair = torch.ones(2), torch.zeros(2)
    (sample,) = choose_samples([log_of(((torch.ones(4),), {"rotary": pair, "flag": True}))])
    tensors = sample.fits((torch.ones(4),), {"rotary": (torch.ones(2), torch.zeros(2)), "flag": True}, True)
    assert len(tensors) == 3
    args, kwargs = sample.arguments(tensors)
    assert kwargs["flag"] is True and kwargs["rotary"][1] is tensors[2] and args[0] is tensors[0]
    assert sample.fits((torch.ones(4),), {"rotary": pair, "flag": 1}, True) is None
