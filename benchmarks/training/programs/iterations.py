"""Whole training steps through `capture_iteration`."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from benchmarks.training.programs.contrastive import follow
from benchmarks.training.programs.generative import VAE
from benchmarks.training.programs.models import (
    CLASSES,
    GPT,
    LENGTH,
    ROWS,
    WIDTH,
    Block,
    cnn,
    features,
    images,
    labels,
    language_loss,
    mlp,
    tokens,
)
from benchmarks.training.programs.registry import Run, program


def _forward_backward(model, optimizer, loss_of, outside: bool = True):
    """Return a step that leaves gradients, or steps too."""

    def step(*args):
        optimizer.zero_grad()
        loss = loss_of(model, *args)
        loss.backward()
        if not outside:
            optimizer.step()
        return loss.detach()

    return step


def _class_loss(model, x, y):
    return F.cross_entropy(model(x), y)


@program()
def forward_and_backward(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    step = run.iteration(_forward_backward(model, optimizer, _class_loss))
    for _ in run.steps():
        run.log(step(features(), labels()))
        optimizer.step()
    return model, optimizer


@program()
def sgd_inside(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step = run.iteration(_forward_backward(model, optimizer, _class_loss, outside=False))
    for _ in run.steps():
        run.log(step(features(), labels()))
    return model, optimizer


@program()
def adamw_inside(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    step = run.iteration(_forward_backward(model, optimizer, _class_loss, outside=False))
    for _ in run.steps():
        run.log(step(features(), labels()))
    return model, optimizer


@program()
def adamw_fused_inside(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = run.iteration(_forward_backward(model, optimizer, _class_loss, outside=False))
    for _ in run.steps():
        run.log(step(features(), labels()))
    return model, optimizer


def _scheduled(run: Run, optimizer_of, schedule) -> Any:
    model = mlp()
    optimizer = optimizer_of(model.parameters())
    scheduler = schedule(optimizer)
    step = run.iteration(_forward_backward(model, optimizer, _class_loss, outside=False))
    for _ in run.steps():
        run.log(step(features(), labels()))
        scheduler.step()
    return model, optimizer


@program()
def sgd_with_cosine_schedule(run: Run) -> Any:
    return _scheduled(
        run,
        lambda of: torch.optim.SGD(of, lr=0.1, momentum=0.9),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    )


@program()
def sgd_with_warm_up(run: Run) -> Any:
    return _scheduled(
        run,
        lambda of: torch.optim.SGD(of, lr=0.1, weight_decay=0.01),
        lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda n: (n + 1) / 10),
    )


@program()
def sgd_with_steps_of_a_schedule(run: Run) -> Any:
    return _scheduled(
        run, lambda of: torch.optim.SGD(of, lr=0.1), lambda optimizer: lr_scheduler.StepLR(optimizer, 3, 0.5)
    )


@program()
def sgd_with_tensor_rate(run: Run) -> Any:
    return _scheduled(
        run,
        lambda of: torch.optim.SGD(of, lr=torch.tensor(0.1), fused=True),
        lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 8),
    )


@program()
def schedule_outside(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = lr_scheduler.CosineAnnealingLR(optimizer, 8)
    step = run.iteration(_forward_backward(model, optimizer, _class_loss))
    for _ in run.steps():
        run.log(step(features(), labels()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return model, optimizer


@program()
def language_model_step(run: Run) -> Any:
    model = GPT(dropout=0.1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batch):
        optimizer.zero_grad(set_to_none=True)
        loss = language_loss(model(batch), batch)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return loss, norm

    step = run.iteration(train)
    for _ in run.steps():
        run.log(*step(tokens()))
    return model


@program()
def accumulation(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(batches):
        optimizer.zero_grad()
        total = torch.zeros(())
        for x, y in batches:
            loss = F.cross_entropy(model(x), y) / len(batches)
            loss.backward()
            total += loss.detach()
        optimizer.step()
        return total

    step = run.iteration(train)
    for _ in run.steps():
        run.log(step([(features(), labels()) for _ in range(3)]))
    return model


@program()
def gradient_penalty(run: Run) -> Any:
    critic = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.SGD(critic.parameters(), lr=0.01)

    def train(real, fake):
        optimizer.zero_grad()
        share = torch.rand(len(real), 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (grad,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss = critic(fake).mean() - critic(real).mean() + 10 * (grad.norm(dim=1) - 1).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    step = run.iteration(train)
    for _ in run.steps():
        run.log(step(features(), features()))
    return critic


@program()
def forces(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(3, 24), nn.SiLU(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters())

    def train(x, energy, force):
        optimizer.zero_grad()
        x = x.clone().requires_grad_()
        predicted = model(x).sum()
        (grad,) = torch.autograd.grad(predicted, x, create_graph=True)
        loss = (predicted - energy).square() + (grad + force).square().mean()
        loss.backward()
        return loss

    step = run.iteration(train)
    for _ in run.steps():
        run.log(step(torch.randn(6, 3), torch.randn(()), torch.randn(6, 3)))
        optimizer.step()
    return model


@program()
def averages_inside(run: Run) -> Any:
    model = cnn()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        follow(average, model)
        return loss

    step = run.iteration(train)
    for _ in run.steps():
        run.log(step(images(), labels()))
    return model, average


@program()
def adversarial_step(run: Run) -> Any:
    generator, critic = mlp(4, WIDTH), mlp(outputs=1)
    optimizers = [torch.optim.SGD(one.parameters(), lr=0.01) for one in (generator, critic)]

    def train(real):
        fake = generator(torch.randn(len(real), 4))
        optimizers[1].zero_grad()
        loss_d = F.softplus(-critic(real)).mean() + F.softplus(critic(fake.detach())).mean()
        loss_d.backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        loss_g = F.softplus(-critic(fake)).mean()
        loss_g.backward()
        optimizers[0].step()
        return {"generator": loss_g, "critic": loss_d}

    step = run.iteration(train)
    for _ in run.steps():
        run.log(step(features()))
    return generator, critic


@program()
def sharpness(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x, y):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        with torch.no_grad():
            moves = [0.05 * parameter.grad / parameter.grad.norm() for parameter in model.parameters()]
            torch._foreach_add_(list(model.parameters()), moves)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            torch._foreach_sub_(list(model.parameters()), moves)
        optimizer.step()
        return loss

    step = run.iteration(train)
    for _ in run.steps():
        run.log(step(features(), labels()))
    return model


@program()
def autocast_inside(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x, y):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    step = run.iteration(train)
    for _ in run.steps():
        run.log(step(features(), labels()))
    return model


@program()
def loss_read_inside(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.item()

    step = run.iteration(train)
    for _ in run.steps():
        run.log(step(features(), labels()))
    return model


@program()
def step_number_as_argument(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train(x, y, number):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y) * min(1.0, number / 5)
        loss.backward()
        optimizer.step()
        return loss

    step = run.iteration(train)
    for number in run.steps():
        run.log(step(features(), labels(), number))
    return model


@program()
def beta_as_tensor(run: Run) -> Any:
    model = VAE()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def train(x, beta):
        optimizer.zero_grad()
        out, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        loss = F.mse_loss(out, x) + beta * divergence
        loss.backward()
        optimizer.step()
        return loss

    step = run.iteration(train)
    for number in run.steps():
        run.log(step(features(), torch.tensor(number / 8)))
    return model


@program()
def lengths_by_turns(run: Run) -> Any:
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = run.iteration(
        _forward_backward(model, optimizer, lambda model, batch: language_loss(model(batch), batch), outside=False)
    )
    for number in run.steps():
        run.log(step(tokens(length=5 + number % 2)))
    return model


@program()
def checkpointed_step(run: Run) -> Any:
    block, head = Block(dropout=0.1), nn.Linear(WIDTH, CLASSES)
    optimizer = torch.optim.SGD([*block.parameters(), *head.parameters()], lr=0.1)

    def train(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(head(checkpoint(block, x, use_reentrant=False)).mean(1), y)
        loss.backward()
        optimizer.step()
        return loss

    step = run.iteration(train)
    for _ in run.steps():
        run.log(step(torch.randn(ROWS, LENGTH, WIDTH), labels()))
    return block, head


@program()
def recurrent_state_as_argument(run: Run) -> Any:
    cell, out = nn.LSTMCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
    optimizer = torch.optim.SGD([*cell.parameters(), *out.parameters()], lr=0.1)

    def train(x, state):
        optimizer.zero_grad()
        losses = []
        for t in range(x.shape[1] - 1):
            state = cell(x[:, t], state)
            losses.append(F.mse_loss(out(state[0]), x[:, t + 1]))
        loss = torch.stack(losses).mean()
        loss.backward()
        optimizer.step()
        return loss, state

    step = run.iteration(train)
    state = torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, WIDTH)
    for _ in run.steps():
        loss, state = step(torch.randn(ROWS, 4, WIDTH), state)
        run.log(loss)
    return cell, out


class Trainer:
    """A trainer with a step as a method, as people write it."""

    def __init__(self, counts: bool):
        self.model, self.counts, self.global_step = mlp(), counts, 0
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)

    def training_step(self, batch):
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(batch["x"]), batch["y"])
        loss.backward()
        self.optimizer.step()
        if self.counts:
            self.global_step += 1
        return {"loss": loss}


@program()
def method_of_a_trainer(run: Run) -> Any:
    trainer = Trainer(counts=False)
    step = run.iteration(trainer.training_step)
    for _ in run.steps():
        run.log(step({"x": features(), "y": labels()}))
    return trainer.model


@program()
def method_that_counts(run: Run) -> Any:
    trainer = Trainer(counts=True)
    step = run.iteration(trainer.training_step)
    for _ in run.steps():
        run.log(step({"x": features(), "y": labels()}))
    return trainer.model, trainer.global_step
