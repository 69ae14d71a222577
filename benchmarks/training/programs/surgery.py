"""Models that change while they train: frozen, extended, pruned, resumed, fed in another form."""

from __future__ import annotations

import copy
import io
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune

from benchmarks.training.programs.models import (
    CLASSES,
    GPT,
    WIDTH,
    cnn,
    descend,
    features,
    images,
    labels,
    language_loss,
    mlp,
    tokens,
)
from benchmarks.training.programs.registry import Run, program


def _step(run: Run, model, optimizer, x=None) -> None:
    loss = F.cross_entropy(model(features() if x is None else x), labels())
    descend(optimizer, loss)
    run.log(loss)


@program()
def unfreeze(run: Run) -> Any:
    model = mlp()
    model[0].requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for step in run.steps():
        if step == 3:
            model[0].requires_grad_(True)
        _step(run, model, optimizer)
    return model


@program()
def linear_probe_then_all(run: Run) -> Any:
    body, head = cnn()[:8], nn.Linear(12, CLASSES)
    body.requires_grad_(False)
    model = nn.Sequential(body, head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        if step == 3:
            body.requires_grad_(True)
            optimizer.add_param_group({"params": list(body.parameters()), "lr": 0.01})
        _step(run, model, optimizer, images())
    return model


@program()
def new_head(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU(), nn.Linear(24, CLASSES))
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for step in run.steps():
        if step == 3:
            model[2] = nn.Linear(24, CLASSES + 2)
            optimizer = torch.optim.Adam(model.parameters())
        _step(run, model, optimizer)
    return model


@program()
def reset_of_the_head(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for step in run.steps():
        if step % 4 == 3:
            model[2].reset_parameters()
        _step(run, model, optimizer)
    return model


@program()
def added_adapters(run: Run) -> Any:
    class Adapted(nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base.requires_grad_(False)
            self.down, self.up = nn.Linear(base.in_features, 2, False), nn.Linear(2, base.out_features, False)

        def forward(self, x):
            return self.base(x) + self.up(self.down(x))

    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        if step == 3:
            model[0] = Adapted(model[0])
            optimizer = torch.optim.SGD([one for one in model.parameters() if one.requires_grad], lr=0.1)
        _step(run, model, optimizer)
    return model


@program()
def pruned_during_training(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        if step == 3:
            prune.l1_unstructured(model[0], "weight", 0.5)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _step(run, model, optimizer)
    return model


@program()
def masks_of_weights(run: Run) -> Any:
    model = mlp()
    masks = [torch.ones_like(parameter) for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        _step(run, model, optimizer)
        if step % 3 == 2:
            masks = [(one.detach().abs() > one.detach().abs().median() * 0.1).float() for one in model.parameters()]
        with torch.no_grad():
            for parameter, mask in zip(model.parameters(), masks, strict=True):
                parameter.mul_(mask)
    return model


@program()
def resumed(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    saved = io.BytesIO()
    for step in run.steps():
        if step == 2:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, saved)
        if step == 4:
            saved.seek(0)
            state = torch.load(saved)
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
        _step(run, model, optimizer)
    return model, optimizer


@program()
def resumed_by_assignment(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        if step == 2:
            state = copy.deepcopy(model.state_dict())
        if step == 3:
            model.load_state_dict(state, assign=True)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _step(run, model, optimizer)
    return model


@program()
def dropout_rate_raised(run: Run) -> Any:
    model = mlp(dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        if step == 3:
            model[2].p = 0.3
        _step(run, model, optimizer)
    return model


@program()
def larger_images_later(run: Run) -> Any:
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        _step(run, model, optimizer, images(size=8 if step < 3 else 12))
    return model


@program()
def frozen_statistics(run: Run) -> Any:
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        model.train()
        for module in model.modules():
            if isinstance(module, nn.BatchNorm2d):
                module.eval()
        _step(run, model, optimizer, images())
    return model


@program()
def longer_sequences_later(run: Run) -> Any:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for step in run.steps():
        batch = tokens(length=4 if step < 3 else 8)
        loss = language_loss(model(batch), batch)
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def another_precision_later(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        if step == 3:
            model.double()
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        _step(run, model, optimizer, features().double() if step >= 3 else None)
    return model


@program()
def grown_by_a_block(run: Run) -> Any:
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for step in run.steps():
        if step == 3:
            model.blocks.append(copy.deepcopy(model.blocks[-1]))
            optimizer = torch.optim.AdamW(model.parameters())
        batch = tokens()
        loss = language_loss(model(batch), batch)
        descend(optimizer, loss)
        run.log(loss)
    return model
