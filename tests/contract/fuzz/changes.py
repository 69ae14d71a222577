"""Changes of a model between two steps, by the names in `grammar.CHANGES`.

A change that does not apply to its block does nothing, in eager and captured alike.
"""

from __future__ import annotations

import copy
import functools
import os
import pickle
import types
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from tests.contract.fuzz import blocks
from tests.contract.fuzz.blocks import VALUES, WIDTH
from tests.contract.fuzz.grammar import Change


class Job:
    """What a change may touch: the model, its optimizer, and the handles of its hooks."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer | None, device: torch.device):
        self.model, self.optimizer, self.device = model, optimizer, device
        self.handles: list[Any] = []
        self.clear: Callable[[], None] = _nothing  # drops the graphs
        self.own_state: Callable[[], dict[str, Any]] = dict  # state of the step function
        self.held: list[Any] = []  # results of the last step
        self.class_methods: list[tuple[type, Any]] = []

    def apply(self, change: Change) -> None:
        """Apply a change to the block that it names."""
        where = change.where % len(self.model.blocks) if len(self.model.blocks) else 0
        block = self.model.blocks[where] if len(self.model.blocks) else nn.Identity()
        globals()[f"_{change.kind}"](self, block, where, change.value)

    def end(self) -> None:
        """Undo changes of classes."""
        for owner, forward in self.class_methods:
            owner.forward = forward


def _nothing() -> None:
    """Do nothing."""


def _parameter(block: nn.Module, value: int) -> tuple[nn.Module, str, nn.Parameter] | None:
    found = [
        (module, name, parameter)
        for module in block.modules()
        for name, parameter in module._parameters.items()
        if isinstance(parameter, nn.Parameter) and not isinstance(parameter, nn.parameter.UninitializedParameter)
    ]
    return found[value % len(found)] if found else None


def _buffer(block: nn.Module, value: int) -> tuple[nn.Module, str, torch.Tensor] | None:
    found = [
        (module, name, buffer)
        for module in block.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
    return found[value % len(found)] if found else None


def _innermost(block: nn.Module) -> nn.Module:
    while isinstance(block, blocks.Around):
        block = block.inner
    return block


def _evaluate(job, block, where, value):
    job.model.eval()


def _train(job, block, where, value):
    job.model.train()


def _block_mode(job, block, where, value):
    modules = list(block.modules())
    module = modules[value % len(modules)]
    module.training = not module.training


def _freeze(job, block, where, value):
    if found := _parameter(block, value):
        found[2].requires_grad_(False)


def _unfreeze(job, block, where, value):
    for parameter in job.model.parameters():
        parameter.requires_grad_(True)


def _move_parameter(job, block, where, value):
    if found := _parameter(block, value):
        found[2].data = found[2].data.clone() * 0.5


def _transpose_parameter(job, block, where, value):
    for parameter in block.parameters():
        if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
            parameter.data = parameter.data.t()


def _replace_parameter(job, block, where, value):
    if found := _parameter(block, value):
        module, name, parameter = found
        setattr(module, name, nn.Parameter(parameter.detach() * 0.5))


def _write_parameter(job, block, where, value):
    if found := _parameter(block, value):
        with torch.no_grad():
            found[2].mul_(0.5)


def _load_state_dict(job, block, where, value):
    state = {name: tensor * 0.75 for name, tensor in job.model.state_dict().items() if tensor.is_floating_point()}
    job.model.load_state_dict(state, strict=False, assign=value % 2 == 1)


def _move_buffer(job, block, where, value):
    if found := _buffer(block, value):
        found[2].data = found[2].data.clone()


def _replace_buffer(job, block, where, value):
    if found := _buffer(block, value):
        module, name, buffer = found
        setattr(module, name, buffer.clone() * 2)


def _write_buffer(job, block, where, value):
    if found := _buffer(block, value):
        found[2].mul_(2)


def _set_value(job, block, where, value):
    inner = _innermost(block)
    if isinstance(inner, blocks.reads_value):
        current = next((index for index, make in enumerate(VALUES) if type(make()) is type(inner.value)), 0)
        inner.value = VALUES[(current + 1 + value * 3) % len(VALUES)]() if value else VALUES[current]()


def _change_value(job, block, where, value):
    """Change a value in place."""
    inner = _innermost(block)
    if isinstance(inner, blocks.reads_host_data):
        inner.change_data(value)
        return
    held = getattr(inner, "value", None)
    if isinstance(held, float):
        inner.value = -held if held == 0 else held * 0.5
    elif isinstance(held, bool):
        inner.value = not held
    elif isinstance(held, int):
        inner.value = held + 1
    elif isinstance(held, (list,)):
        held[0] = -held[0] if value % 2 else 0.25
    elif isinstance(held, dict):
        held["a"] = -0.0 if value % 2 else 3.0
    elif isinstance(held, set):
        held.add(7)
    elif hasattr(held, "append"):
        held.append(2.0)
    elif hasattr(held, "scale") and not isinstance(held, blocks.Frozen):
        held.scale = -0.0 if held.scale == 0 else 5.0
    elif isinstance(held, torch.Tensor) or type(held).__name__ == "ndarray":
        held *= 2


def _set_outside(job, block, where, value):
    """Change every number that blocks read outside of modules."""
    blocks.SCALE = 1.5 + value
    blocks.TABLE["scale"] = 1.5 + value
    blocks.TABLE["items"][0] = 1.5 + value
    blocks.Registry.scale = 1.5 + value
    blocks.CONTEXT.set(1.5 + value)
    os.environ[blocks.VARIABLE] = str(1.5 + value)
    inner = _innermost(block)
    if isinstance(inner, blocks.reads_elsewhere):
        inner.held.scale = 1.5 + value


def _number(job, block, where, value):
    """Change a number that a layer of torch reads of itself: a rate, an epsilon, a momentum, a flag."""
    for module in block.modules():
        for name, changed in (
            ("p", 0.25),
            ("eps", 0.5),
            ("momentum", 0.3),
            ("dropout", 0.3),
            ("max_norm", 0.25),
            ("padding", (0,) if value % 2 else (1,)),
            ("norm_first", True),
            ("track_running_stats", False),
            ("approximate", "tanh"),
            ("how", "residual"),
        )[value:]:
            if (
                name in vars(module)
                and not (name == "padding" and value % 2)
                and isinstance(vars(module)[name], (int, float, str, bool, tuple, type(None)))
            ):
                if name != "how" or isinstance(module, blocks.Around):
                    setattr(module, name, changed)
                    return


def _forward_hook(job, block, where, value):
    def hook(module, args, output):
        module.calls = getattr(module, "calls", 0) + 1
        return output * 1.5 if value % 2 else None

    modules = list(block.modules())
    chosen = modules[value % len(modules)]
    job.handles.append(chosen.register_forward_hook(hook if chosen is block else _only_count))


def _only_count(module, args, output):
    module.calls = getattr(module, "calls", 0) + 1


def _pre_hook(job, block, where, value):
    def hook(module, args):
        module.calls = getattr(module, "calls", 0) + 1
        return (args[0] * 1.5,) if value % 2 else None

    job.handles.append(block.register_forward_pre_hook(hook))


def _backward_hook(job, block, where, value):
    def hook(module, grad_input, grad_output):
        return tuple([None if grad is None else grad * 0.5 for grad in grad_input])

    job.handles.append(block.register_full_backward_hook(hook))


def _parameter_hook(job, block, where, value):
    if (found := _parameter(block, value)) and found[2].requires_grad:
        job.handles.append(found[2].register_hook(lambda grad: None if grad is None else grad * 2))


def _accumulate_hook(job, block, where, value):
    def hook(parameter):
        if value % 2:
            parameter.grad = parameter.grad * 0.5
        else:
            parameter.grad.mul_(0.5)

    if (found := _parameter(block, value)) and found[2].requires_grad:
        job.handles.append(found[2].register_post_accumulate_grad_hook(hook))


def _swap_hook(job, block, where, value):
    """Replace a hook by another one: their number stays the same."""
    _remove_hooks(job, block, where, value)
    factor = 1.5 + value
    job.handles.append(block.register_forward_hook(lambda module, args, output: output * factor))


def _shadow(job, block, where, value):
    """Give a module an attribute of its own in place of one of its class."""
    inner = _innermost(block)
    if isinstance(inner, blocks.Base):
        inner.level = 2.5 + value
    elif isinstance(inner, blocks.reads_value):
        inner.forward = lambda x: x * 3.0


def _indirect(job, block, where, value):
    """Change what a module reads indirectly."""
    inner = _innermost(block)
    if isinstance(inner, blocks.reads_indirectly):
        inner.amount += 1 + value
        inner.bound = functools.partial(blocks.number, [1.0 + value])
        inner.settings.inner["deep"][0].scale += 1 + value


def _tie(job, block, where, value):
    """Share one parameter between two modules."""
    owners = [module for module in job.model.modules() if isinstance(module, nn.Linear) and not is_lazy(module.weight)]
    if len(owners) > 1 and owners[0].weight.shape == owners[-1].weight.shape:
        owners[-1].weight = owners[0].weight


def _untie(job, block, where, value):
    for module in job.model.modules():
        if isinstance(module, nn.Linear) and "weight" in module._parameters and not is_lazy(module.weight):
            module.weight = nn.Parameter(module.weight.detach().clone())
            return


def _swap_buffers(job, block, where, value):
    """Exchange the memory of two buffers of one shape."""
    found = [buffer for buffer in job.model.buffers() if buffer.shape == (WIDTH,)]
    if len(found) > 1:
        found[0].data, found[1].data = found[1].data, found[0].data


def _toggle_gradients(job, block, where, value):
    if found := _parameter(block, value):
        found[2].requires_grad_(not found[2].requires_grad)


def _own_mode(job, block, where, value):
    """Switch dropout layers alone."""
    for module in block.modules():
        if isinstance(module, (nn.Dropout, nn.AlphaDropout, nn.BatchNorm1d)):
            module.train(not module.training)


def _remove_hooks(job, block, where, value):
    while job.handles:
        job.handles.pop().remove()


def _new_block(job, value):
    torch.manual_seed(100 + value)
    made = nn.Linear(WIDTH, WIDTH) if value % 2 else nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())
    return made.to(job.device)


def _replace_block(job, block, where, value):
    if len(job.model.blocks):
        job.model.blocks[where] = _new_block(job, value)


def _append_block(job, block, where, value):
    job.model.blocks.append(_new_block(job, value) if value % 2 else nn.Tanh())


def _remove_block(job, block, where, value):
    if len(job.model.blocks) > 1:
        del job.model.blocks[where]


def _swap_blocks(job, block, where, value):
    if len(job.model.blocks) > 1:
        first, second = job.model.blocks[0], job.model.blocks[-1]
        job.model.blocks[0], job.model.blocks[-1] = second, first


def _replace_inner(job, block, where, value):
    for module in block.modules():
        for name, child in module._modules.items():
            if isinstance(child, (nn.Linear, nn.Tanh)):
                setattr(module, name, _new_block(job, value))
                return


def _patch_forward(job, block, where, value):
    """Put another forward on a submodule."""
    patched = types.FunctionType
    modules = [module for module in block.modules() if not isinstance(vars(module).get("forward"), patched)]
    if modules:
        module = modules[-1]
        before = module.forward
        module.forward = lambda *args, **kwargs: _scaled(before(*args, **kwargs), 1.5)


def _scaled(result, factor):
    return result * factor if isinstance(result, torch.Tensor) else result


def _patch_class(job, block, where, value):
    """Put another forward on a class of a block."""
    owner = type(_innermost(block))
    if owner.__module__ != blocks.__name__ or "forward" not in vars(owner):
        return
    before = owner.forward
    job.class_methods.insert(0, (owner, before))
    owner.forward = lambda self, x: before(self, x) * 1.5


def _patch_function(job, block, where, value):
    """Give a block another activation function."""
    inner = _innermost(block)
    if isinstance(inner, blocks.activation):
        inner.function = torch.cos


def _learning_rate(job, block, where, value):
    for group in job.optimizer.param_groups if job.optimizer else ():
        group["lr"] = group["lr"] * 0.5


def _setting(job, block, where, value):
    for group in job.optimizer.param_groups if job.optimizer else ():
        if value % 2 and "momentum" in group:
            group["momentum"] = 0.7
        else:
            group["weight_decay"] = 0.1


def _seed(job, block, where, value):
    torch.manual_seed(40 + value)


def _copy_model(job, block, where, value):
    with torch.no_grad():
        copy.deepcopy(job.model)(torch.zeros(2, blocks.LENGTH, WIDTH, device=job.device))


def _pickle_model(job, block, where, value):
    try:
        pickle.loads(pickle.dumps(block))
    except (TypeError, AttributeError, pickle.PicklingError):
        return


def _clear(job, block, where, value):
    job.clear()


def _rebind_tensor(job, block, where, value):
    """Replace tensors that blocks read besides their parameters."""
    blocks.TENSOR = blocks.TENSOR + 1
    for module in block.modules():
        for name, held in list(vars(module).items()):
            if isinstance(held, torch.Tensor):
                setattr(module, name, (held.detach() + 1).requires_grad_(held.requires_grad))
            elif isinstance(held, list) and held and isinstance(held[0], torch.Tensor):
                held[0] = (held[0].detach() + 1).requires_grad_(held[0].requires_grad)


def _write_tensor(job, block, where, value):
    with torch.no_grad():
        blocks.TENSOR.add_(1)
        blocks.TRAINED.add_(1)
        for module in block.modules():
            for held in vars(module).values():
                for tensor in held if isinstance(held, list) else [held]:
                    if isinstance(tensor, torch.Tensor):
                        tensor.add_(1)


def _scale_gradients(job, block, where, value):
    for parameter in job.model.parameters():
        if parameter.grad is not None:
            parameter.grad.mul_(0.5) if value % 2 else setattr(parameter, "grad", parameter.grad * 0.5)


def _share_gradient(job, block, where, value):
    """Give a parameter a gradient before the step."""
    for parameter in block.parameters():
        parameter.grad = torch.ones_like(parameter)


def _drop_gradients(job, block, where, value):
    for parameter in block.parameters():
        parameter.grad = None


def _reset_optimizer(job, block, where, value):
    if job.optimizer is not None:
        if value % 2:
            job.optimizer.load_state_dict(copy.deepcopy(job.optimizer.state_dict()))
        else:
            job.optimizer.state.clear()


def _cast(job, block, where, value):
    block.to(torch.float64)
    block.to(torch.float32)
