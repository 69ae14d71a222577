"""Optimizers, schedules and what people put around a step of an optimizer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from benchmarks.training.programs.models import GPT, cnn, descend, features, images, labels, language_loss, mlp, tokens
from benchmarks.training.programs.registry import Run, program

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "sgd": lambda of: torch.optim.SGD(of, lr=0.1),
    "sgd_nesterov": lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "adam_foreach": lambda of: torch.optim.Adam(of, foreach=True),
    "adamw_fused": lambda of: torch.optim.AdamW(of, fused=True),
    "adamax": lambda of: torch.optim.Adamax(of),
    "nadam": lambda of: torch.optim.NAdam(of),
    "radam": lambda of: torch.optim.RAdam(of),
    "rmsprop": lambda of: torch.optim.RMSprop(of, momentum=0.9, centered=True),
    "adagrad": lambda of: torch.optim.Adagrad(of),
    "adadelta": lambda of: torch.optim.Adadelta(of),
    "rprop": lambda of: torch.optim.Rprop(of),
    "asgd": lambda of: torch.optim.ASGD(of),
    "adafactor": lambda of: torch.optim.Adafactor(of),
}


def _train(run: Run, optimizer_of: Callable[..., torch.optim.Optimizer], schedule=None) -> Any:
    model = mlp()
    optimizer = optimizer_of(model.parameters())
    scheduler = None if schedule is None else schedule(optimizer)
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features()), labels())
        descend(optimizer, loss)
        if scheduler is not None:
            scheduler.step()
        run.log(loss)
    return model, optimizer


def _register(name: str, optimizer_of: Callable[..., torch.optim.Optimizer]) -> None:
    def train(run: Run) -> Any:
        return _train(run, optimizer_of)

    train.__name__ = name
    program()(train)


for _name, _optimizer_of in OPTIMIZERS.items():
    _register(_name, _optimizer_of)


@program()
def muon(run: Run) -> Any:
    model = GPT(tied=False)
    matrices = [parameter for name, parameter in model.named_parameters() if parameter.dim() == 2 and "blocks" in name]
    others = [parameter for parameter in model.parameters() if all(parameter is not matrix for matrix in matrices)]
    optimizers = [torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others)]
    run.attach(model)
    for _ in run.steps():
        batch = tokens()
        loss = language_loss(model(batch), batch)
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        run.log(loss)
    return model


@program()
def lion_by_hand(run: Run) -> Any:
    class Lion(torch.optim.Optimizer):
        def __init__(self, params, lr=1e-3):
            super().__init__(params, {"lr": lr})

        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    m = self.state[p].setdefault("m", torch.zeros_like(p))
                    p.add_((0.9 * m + 0.1 * p.grad).sign(), alpha=-group["lr"])
                    m.lerp_(p.grad, 0.01)

    return _train(run, Lion)


@program()
def newton_steps_with_closure(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    run.attach(model)
    for _ in run.steps():
        x, y = features(), labels()

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            return loss

        run.log(optimizer.step(closure))
    return model


@program()
def cosine_schedule(run: Run) -> Any:
    return _train(run, torch.optim.AdamW, lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8))


@program()
def one_cycle(run: Run) -> Any:
    return _train(run, torch.optim.AdamW, lambda optimizer: lr_scheduler.OneCycleLR(optimizer, 0.01, total_steps=10))


@program()
def warm_up_by_lambda(run: Run) -> Any:
    return _train(run, torch.optim.AdamW, lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: min(1, n / 4)))


@program()
def plateau(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=1)
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features()), labels())
        descend(optimizer, loss)
        scheduler.step(loss.item())
    return model


@program()
def groups_with_layer_decay(run: Run) -> Any:
    model = cnn()
    groups = [
        {"params": list(layer.parameters()), "lr": 0.01 * 0.8**index, "weight_decay": 0.0 if index % 2 else 0.1}
        for index, layer in enumerate(model)
        if list(layer.parameters())
    ]
    optimizer = torch.optim.AdamW(groups)
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(images()), labels())
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def step_in_the_backward(run: Run) -> Any:
    model = mlp()
    optimizers = {parameter: torch.optim.Adam([parameter]) for parameter in model.parameters()}

    def step(parameter):
        optimizers[parameter].step()
        optimizers[parameter].zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(step)
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features()), labels())
        loss.backward()
        run.log(loss)
    return model


@program()
def noise_on_gradients(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        loss = F.cross_entropy(model(features()), labels())
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        for parameter in model.parameters():
            parameter.grad.add_(torch.randn_like(parameter.grad), alpha=math.sqrt(0.01 / (1 + step) ** 0.55))
        optimizer.step()
        run.log(loss)
    return model


@program()
def private_gradients_by_vmap(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)

    def loss_of(weights, x, y):
        return F.cross_entropy(torch.func.functional_call(model, weights, (x[None],)), y[None])

    for _ in run.steps():
        weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
        grads = torch.func.vmap(torch.func.grad(loss_of), (None, 0, 0))(weights, features(), labels())
        for name, parameter in model.named_parameters():
            parameter.grad = grads[name].clamp(-1, 1).mean(0)
        optimizer.step()
    return model


@program()
def looking_ahead(run: Run) -> Any:
    model = mlp()
    slow = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        loss = F.cross_entropy(model(features()), labels())
        descend(optimizer, loss)
        if step % 3 == 2:
            with torch.no_grad():
                for one, fast in zip(slow, model.parameters(), strict=True):
                    one.lerp_(fast, 0.5)
                    fast.copy_(one)
        run.log(loss)
    return model


@program()
def stochastic_weight_averaging(run: Run) -> Any:
    model = cnn()
    average = swa_utils.AveragedModel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = swa_utils.SWALR(optimizer, swa_lr=0.05)
    data = [images() for _ in range(3)]
    run.attach(model)
    for step in run.steps():
        descend(optimizer, F.cross_entropy(model(data[step % 3]), labels()))
        if step > 3:
            average.update_parameters(model)
            scheduler.step()
    swa_utils.update_bn(data, average)
    return model, average


@program()
def clipping_of_values_and_centring(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features()), labels())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(model.parameters(), 0.1)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.grad -= parameter.grad.mean(1, keepdim=True)
        optimizer.step()
    return model


@program()
def zero_and_freeze_by_turns(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        model[0].requires_grad_(step % 2 == 0)
        loss = F.cross_entropy(model(features()), labels())
        descend(optimizer, loss)
        run.log(loss)
    return model
