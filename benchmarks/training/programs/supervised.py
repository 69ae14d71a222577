"""Classification and regression: losses, regularisation, clipping, accumulation, precision and averaging."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.training.programs.models import (
    CLASSES,
    ROWS,
    WIDTH,
    cnn,
    descend,
    features,
    images,
    labels,
    mlp,
)
from benchmarks.training.programs.registry import Run, program


@program()
def classifier(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features()), labels())
        descend(optimizer, loss)
        run.log(loss.item())
    return model, optimizer


@program()
def loader_and_evaluation(run: Run) -> Any:
    model = mlp(dropout=0.1)
    data = DataLoader(TensorDataset(features(32), labels(32)), batch_size=4, shuffle=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    batches = iter(data)
    for step in run.steps():
        x, y = next(batches)
        loss = F.cross_entropy(model(x), y)
        descend(optimizer, loss)
        if step % 3 == 2:
            model.eval()
            with torch.no_grad():
                run.log(F.cross_entropy(model(x), y).item())
            model.train()
    return model


@program()
def last_batch_smaller(run: Run) -> Any:
    model = mlp()
    data = DataLoader(TensorDataset(features(14), labels(14)), batch_size=4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    epochs = ((x, y) for _ in range(4) for x, y in data)
    for _ in run.steps():
        x, y = next(epochs)
        loss = F.cross_entropy(model(x), y)
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def label_smoothing_and_weights(run: Run) -> Any:
    model = mlp()
    criterion = nn.CrossEntropyLoss(weight=torch.rand(CLASSES), label_smoothing=0.1)
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = criterion(model(features()), labels())
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def focal_loss_inside(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self, gamma: float = 2.0):
            super().__init__()
            self.net, self.gamma = mlp(), gamma

        def forward(self, x, y):
            log_p = F.log_softmax(self.net(x), -1).gather(1, y[:, None]).squeeze(1)
            return (-((1 - log_p.exp()) ** self.gamma) * log_p).mean()

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = model(features(), labels())
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def mixup(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model)
    for _ in run.steps():
        x, y = features(), labels()
        lam = random.betavariate(0.4, 0.4)
        order = torch.randperm(ROWS)
        logits = model(lam * x + (1 - lam) * x[order])
        loss = lam * F.cross_entropy(logits, y) + (1 - lam) * F.cross_entropy(logits, y[order])
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def mixup_in_the_model(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(WIDTH, 24), nn.Linear(24, CLASSES)

        def forward(self, x, lam):
            h = torch.relu(self.first(x))
            return self.second(lam * h + (1 - lam) * h.flip(0))

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features(), random.random()), labels())
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def cutmix(run: Run) -> Any:
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        x, y = images(), labels()
        top, left = random.randrange(4), random.randrange(4)
        x[:, :, top : top + 4, left : left + 4] = x.flip(0)[:, :, top : top + 4, left : left + 4]
        logits = model(x)
        loss = 0.75 * F.cross_entropy(logits, y) + 0.25 * F.cross_entropy(logits, y.flip(0))
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def gradient_accumulation(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        for _ in range(3):
            loss = F.cross_entropy(model(features()), labels()) / 3
            loss.backward()
            run.log(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@program()
def accumulation_of_changing_number(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for step in run.steps():
        for _ in range(1 + step % 3):
            F.cross_entropy(model(features()), labels()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@program()
def clipping(run: Run) -> Any:
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(images()), labels())
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        run.log(loss, norm)
    return model


@program()
def skip_of_bad_gradients(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for step in run.steps():
        x = features()
        if step == 5:
            x[0, 0] = float("inf")
        loss = F.cross_entropy(model(x), labels())
        optimizer.zero_grad()
        loss.backward()
        if torch.isfinite(nn.utils.clip_grad_norm_(model.parameters(), 1.0)):
            optimizer.step()
    return model, optimizer


@program()
def autocast_bf16(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = F.cross_entropy(model(features()), labels())
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def gradient_scaler(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=3)
    run.attach(model)
    for _ in run.steps():
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.float16):
            loss = F.cross_entropy(model(features()), labels())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        run.log(loss, scaler.get_scale())
    return model


@program()
def pure_bfloat16(run: Run) -> Any:
    model = mlp().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features().bfloat16()), labels())
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def master_weights(run: Run) -> Any:
    model = mlp().bfloat16()
    masters = [parameter.detach().float().requires_grad_() for parameter in model.parameters()]
    optimizer = torch.optim.AdamW(masters)
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features().bfloat16()).float(), labels())
        loss.backward()
        for master, parameter in zip(masters, model.parameters(), strict=True):
            master.grad, parameter.grad = parameter.grad.float(), None
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, model.parameters(), strict=True):
                parameter.copy_(master)
        run.log(loss)
    return model, masters


@program()
def moving_average(run: Run) -> Any:
    model = mlp()
    average = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features()), labels())
        descend(optimizer, loss)
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.lerp_(fast, 0.01)
            run.log(average(features()))
    return model, average


@program()
def averaged_model(run: Run) -> Any:
    model = cnn()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        descend(optimizer, F.cross_entropy(model(images()), labels()))
        average.update_parameters(model)
    return model, average


@program()
def swapped_average(run: Run) -> Any:
    model = mlp()
    shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for step in run.steps():
        descend(optimizer, F.cross_entropy(model(features()), labels()))
        for name, parameter in model.named_parameters():
            shadow[name].mul_(0.9).add_(parameter.detach(), alpha=0.1)
        if step % 3 == 2:
            backup = copy.deepcopy(model.state_dict())
            model.load_state_dict(shadow)
            with torch.no_grad():
                run.log(model(features()))
            model.load_state_dict(backup)
    return model, shadow


@program()
def swapped_average_by_data(run: Run) -> Any:
    model = mlp()
    shadow = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for step in run.steps():
        descend(optimizer, F.cross_entropy(model(features()), labels()))
        for name, parameter in model.named_parameters():
            shadow[name] = 0.1 * parameter.data + 0.9 * shadow[name]
        if step == 2:
            kept = {name: parameter.data for name, parameter in model.named_parameters()}
            for name, parameter in model.named_parameters():
                parameter.data = shadow[name]
            with torch.no_grad():
                run.log(model(features()))
            for name, parameter in model.named_parameters():
                parameter.data = kept[name]
    return model, shadow


@program()
def sharpness_aware(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        x, y = features(), labels()
        F.cross_entropy(model(x), y).backward()
        norm = torch.norm(torch.stack([parameter.grad.norm() for parameter in model.parameters()]))
        with torch.no_grad():
            moves = [0.05 * parameter.grad / (norm + 1e-12) for parameter in model.parameters()]
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.add_(move)
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        with torch.no_grad():
            for parameter, move in zip(model.parameters(), moves, strict=True):
                parameter.sub_(move)
        optimizer.step()
        optimizer.zero_grad()
        run.log(loss)
    return model


@program()
def rdrop(run: Run) -> Any:
    model = mlp(dropout=0.2)
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        x, y = features(), labels()
        one, other = model(x), model(x)
        agreement = F.kl_div(F.log_softmax(one, -1), F.softmax(other, -1), reduction="batchmean")
        loss = F.cross_entropy(one, y) + F.cross_entropy(other, y) + agreement
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def penalties(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features()), labels())
        loss = loss + 1e-3 * sum(parameter.abs().sum() for parameter in model.parameters())
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def adversarial_inputs(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        x, y = features().requires_grad_(), labels()
        (grad,) = torch.autograd.grad(F.cross_entropy(model(x), y), x)
        loss = F.cross_entropy(model((x + 0.1 * grad.sign()).detach()), y)
        descend(optimizer, loss)
        run.log(loss, grad)
    return model


@program()
def projected_attack(run: Run) -> Any:
    model = cnn()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        x, y = images(), labels()
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(3):
            F.cross_entropy(model(x + delta), y).backward()
            delta.data = (delta + 0.02 * delta.grad.sign()).clamp(-0.1, 0.1)
            delta.grad = None
        model.zero_grad()
        loss = F.cross_entropy(model(x + delta.detach()), y)
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def gradient_penalty_on_inputs(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        x = features().requires_grad_()
        energy = model(x).sum()
        (force,) = torch.autograd.grad(energy, x, create_graph=True)
        loss = (force - 1).square().mean()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def multi_task(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Sequential(nn.Linear(WIDTH, 24), nn.ReLU())
            self.heads = nn.ModuleDict({"class": nn.Linear(24, CLASSES), "value": nn.Linear(24, 1)})

        def forward(self, x):
            h = self.trunk(x)
            return {name: head(h) for name, head in self.heads.items()}

    model, log_variance = Model(), nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.Adam([*model.parameters(), log_variance])
    run.attach(model)
    for _ in run.steps():
        out = model(features())
        losses = torch.stack([F.cross_entropy(out["class"], labels()), F.mse_loss(out["value"], torch.randn(ROWS, 1))])
        loss = (losses * (-log_variance).exp() + log_variance).sum()
        descend(optimizer, loss)
        run.log(loss)
    return model, log_variance


@program()
def alternating_tasks(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = nn.Linear(WIDTH, 24)
            self.heads = nn.ModuleList([nn.Linear(24, CLASSES), nn.Linear(24, 1)])

        def forward(self, x, task: int):
            return self.heads[task](torch.relu(self.trunk(x)))

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for step in run.steps():
        out = model(features(), step % 2)
        loss = F.cross_entropy(out, labels()) if step % 2 == 0 else out.square().mean()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def pcgrad(run: Run) -> Any:
    model = mlp(outputs=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        out = model(features())
        parameters = list(model.parameters())
        first = torch.autograd.grad(out[:, 0].square().mean(), parameters, retain_graph=True)
        second = torch.autograd.grad(out[:, 1].abs().mean(), parameters)
        for parameter, one, other in zip(parameters, first, second, strict=True):
            inner = (one * other).sum()
            parameter.grad = one + other - torch.where(inner < 0, inner / other.square().sum().clamp_min(1e-8), 0) * one
        optimizer.step()
        run.log(out)
    return model


@program()
def quantile_regression(run: Run) -> Any:
    model = mlp(outputs=3)
    quantiles = torch.tensor([0.1, 0.5, 0.9])
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        error = torch.randn(ROWS, 1) - model(features())
        loss = torch.maximum(quantiles * error, (quantiles - 1) * error).mean()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def evidential_outputs(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(outputs=4)

        def forward(self, x):
            mu, v, alpha, beta = self.net(x).chunk(4, -1)
            return mu, F.softplus(v), F.softplus(alpha) + 1, F.softplus(beta)

    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        mu, v, alpha, beta = model(features())
        loss = ((torch.randn(ROWS, 1) - mu).square() * v / beta + torch.lgamma(alpha)).mean()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def hooks_on_activations(run: Run) -> Any:
    model = mlp()
    seen: dict[str, torch.Tensor] = {}
    model[0].register_forward_hook(lambda module, inputs, output: seen.__setitem__("hidden", output.detach().mean()))
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features()), labels())
        descend(optimizer, loss)
        run.log(loss, seen["hidden"])
    return model


@program()
def hooks_on_gradients(run: Run) -> Any:
    model = mlp()
    norms = []
    for parameter in model.parameters():
        parameter.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        parameter.register_post_accumulate_grad_hook(lambda parameter: norms.append(parameter.grad.norm()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        loss = F.cross_entropy(model(features()), labels())
        descend(optimizer, loss)
        run.log(loss, sorted(norm.item() for norm in norms))
        norms.clear()
    return model


@program()
def hook_on_the_model(run: Run) -> Any:
    model = mlp()
    seen = []
    model.register_forward_hook(lambda module, inputs, output: seen.append(output.detach().sum().item()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        descend(optimizer, F.cross_entropy(model(features()), labels()))
    run.log(seen)
    return model


@program()
def backward_hook_of_module(run: Run) -> Any:
    model = mlp()
    norms = []
    model[2].register_full_backward_hook(lambda module, grads, outputs: norms.append(outputs[0].norm().item()))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        descend(optimizer, F.cross_entropy(model(features()), labels()))
    run.log(norms)
    return model


@program()
def loss_weight_that_grows(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, y, weight):
            logits = self.net(x)
            return F.cross_entropy(logits, y) + weight * logits.square().mean()

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        loss = model(features(), labels(), weight=step / 8)
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def step_counter_as_argument(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp()

        def forward(self, x, global_step: int):
            return self.net(x) / (1.0 + 0.01 * global_step)

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for step in run.steps():
        loss = F.cross_entropy(model(features(), step), labels())
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def anomaly_detection(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    with torch.autograd.set_detect_anomaly(True):
        for _ in run.steps():
            descend(optimizer, F.cross_entropy(model(features()), labels()))
    return model
