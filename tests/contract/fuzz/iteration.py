"""The step function of a program for `capture_iteration`, with the program's quirks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from tests.contract.fuzz.blocks import WIDTH, Model, tensors_of
from tests.contract.fuzz.grammar import Program


def loss_of(result: Any) -> torch.Tensor | None:
    """Return a loss of everything in a result that has a history."""
    terms = [tensor.float().pow(2).mean() for tensor in tensors_of(result) if tensor.requires_grad]
    return sum(terms[1:], terms[0]) if terms else None


def step_function(
    program: Program, model: Model, optimizer: torch.optim.Optimizer | None, device: torch.device
) -> tuple[Callable[..., Any], Callable[[], dict[str, Any]]]:
    """Return the step function, and a function that returns the state that it keeps."""
    quirks = frozenset(program.quirks)
    count = 0
    losses: list[float] = []
    kept: dict[str, Any] = {}
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5) if optimizer else None
    average = [parameter.detach().clone() for parameter in model.parameters() if _is_initialized(parameter)]
    bare = nn.Parameter(torch.full((WIDTH,), 1.5, device=device))
    torch.manual_seed(2)
    second = nn.Linear(WIDTH, WIDTH, device=device)

    def forward(x, args, kwargs):
        if "no_grad_part" in quirks:
            with torch.no_grad():
                x = x + model(x, *args, **kwargs)[0] if program.result == "tensor" else x
        if "forward_method" in quirks:
            return model.forward(x, *args, **kwargs)
        if "autocast_inside" in quirks:
            with torch.autocast(device.type, torch.bfloat16):
                return model(x, *args, **kwargs)
        return model(x, *args, **kwargs)

    def step(data, backward, clears, *args, **kwargs):
        nonlocal count
        results, waiting = [], []
        if "clear_inside" in quirks:
            for parameter in (*model.parameters(), bare, *second.parameters()):
                parameter.grad = None
        if "count" in quirks:
            count += 1
        if "argument_gradient" in quirks:
            for x in data:
                x.requires_grad_()
        for x in data:
            if "writes_argument" in quirks and not x.requires_grad:
                x.mul_(0.5)
            if "draws" in quirks:
                x = x + torch.rand_like(x)
            if "bare_parameter" in quirks:
                x = x * bare
            if "second_model" in quirks:
                x = second(x.float())
            if "new_module" in quirks:
                x = nn.LayerNorm(WIDTH, device=device)(x.float())
            result = forward(x, args, kwargs)
            loss = loss_of(tensors_of(result)[-1:]) if backward == "partial" else loss_of(result)
            results.append(tree_detached(result))
            if "reads_history" in quirks and losses:
                results.append(losses[-1])
            if loss is None or backward == "none":
                continue
            if "skips_odd_steps" in quirks and count % 2:
                loss = loss * 0.5
            if backward == "penalty":
                weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
                grads = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
                loss = loss + sum(grad.float().pow(2).sum() for grad in grads if grad is not None)
            if "append_loss" in quirks:
                losses.append(loss.detach())
            if "read_loss" in quirks:
                losses.append(loss.item())
            if "keeps_loss" in quirks:
                kept["loss"] = loss.detach()
            if backward == "grad_only":
                weights = [parameter for parameter in model.parameters() if parameter.requires_grad]
                results.append(torch.autograd.grad(loss, weights, allow_unused=True))
            elif backward in ("after", "reversed"):
                waiting.append(loss)
            elif loss.requires_grad:
                loss.backward()
        for loss in reversed(waiting) if backward == "reversed" else waiting:
            loss.backward()
        if "clip" in quirks:
            results.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        if "gradient_on_module" in quirks:
            grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            model.last_gradient = grads[0].clone() if grads else None
        if "step_inside" in quirks and optimizer is not None:
            optimizer.step()
        if "schedule_inside" in quirks and scheduler is not None:
            scheduler.step()
        if "average" in quirks:
            with torch.no_grad():
                for own, parameter in zip(average, model.parameters(), strict=False):
                    own.lerp_(parameter.detach().to(own.dtype), 0.1)
        if "average_swapped" in quirks:
            with torch.no_grad():
                average[:] = [own * 0.9 for own in average]
        if "returns_number" in quirks:
            results.append(count)
        return results

    def state() -> dict[str, Any]:
        return {
            "count": count,
            "losses": losses,
            "kept": kept,
            "average": average,
            "bare": bare,
            "gradient of bare": bare.grad,
            "second": [*second.parameters()],
            "gradients of second": [parameter.grad for parameter in second.parameters()],
            "schedule": scheduler.last_epoch if scheduler else None,
            "settings": [[group["lr"]] for group in optimizer.param_groups] if optimizer else None,
        }

    if "schedule" in quirks and scheduler is not None:  # outside the step
        return step, lambda: (scheduler.step(), state())[1]
    return step, state


def _is_initialized(parameter: nn.Parameter) -> bool:
    return not isinstance(parameter, nn.parameter.UninitializedParameter)


def tree_detached(result: Any) -> Any:
    return [tensor.detach() for tensor in tensors_of(result)]


@contextlib.contextmanager
def around(program: Program, model: Model, device: torch.device):
    """Enter an autocast region around the call, which already holds casts of weights if the program says so."""
    if "autocast_around" not in program.quirks:
        yield
        return
    with torch.autocast(device.type, torch.bfloat16):
        if program.warmup == 2:
            model(torch.zeros(2, 3, WIDTH, device=device))
        yield
