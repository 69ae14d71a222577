"""Representation learning, distillation and half-supervised training."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.training.programs.models import CLASSES, ROWS, WIDTH, cnn, descend, features, images, labels, mlp
from benchmarks.training.programs.registry import Run, program


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, share: float = 0.05) -> None:
    """Move the parameters of a slow copy towards a model."""
    for one, other in zip(slow.parameters(), fast.parameters(), strict=True):
        one.mul_(1 - share).add_(other, alpha=share)


@program()
def simclr(run: Run) -> Any:
    model = mlp(outputs=8)
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        x = features()
        z = F.normalize(model(torch.cat([x + 0.1 * torch.randn_like(x), x + 0.1 * torch.randn_like(x)])), dim=-1)
        similar = (z @ z.T / 0.5).masked_fill(torch.eye(2 * ROWS, dtype=torch.bool), float("-inf"))
        loss = F.cross_entropy(similar, torch.arange(2 * ROWS).roll(ROWS))
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def momentum_contrast(run: Run) -> Any:
    model = mlp(outputs=8)
    keys = copy.deepcopy(model).requires_grad_(False)
    queue, place = F.normalize(torch.randn(16, 8), dim=-1), 0
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    run.attach(model)
    for _ in run.steps():
        x = features()
        q = F.normalize(model(x), dim=-1)
        with torch.no_grad():
            follow(keys, model)
            k = F.normalize(keys(x + 0.1), dim=-1)
        logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ queue.T], 1) / 0.2
        loss = F.cross_entropy(logits, torch.zeros(ROWS, dtype=torch.long))
        descend(optimizer, loss)
        queue[place : place + ROWS] = k
        place = (place + ROWS) % 16
        run.log(loss)
    return model, keys, queue


@program()
def momentum_contrast_as_one_module(run: Run) -> Any:
    class MoCo(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = mlp(outputs=8)
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.randn(16, 8), dim=-1))
            self.register_buffer("place", torch.zeros(1, dtype=torch.long))

        @torch.no_grad()
        def enqueue(self, k):
            place = int(self.place)
            self.queue[place : place + len(k)] = k
            self.place[0] = (place + len(k)) % 16

        def forward(self, one, other):
            q = F.normalize(self.query(one), dim=-1)
            with torch.no_grad():
                follow(self.key, self.query)
                k = F.normalize(self.key(other), dim=-1)
            logits = torch.cat([(q * k).sum(-1, keepdim=True), q @ self.queue.clone().T], 1) / 0.2
            self.enqueue(k)
            return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long))

    model = MoCo()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        loss = model(features(), features())
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def queue_written_by_index(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(outputs=8)
            self.register_buffer("queue", F.normalize(torch.randn(16, 8), dim=-1))
            self.register_buffer("place", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            z = F.normalize(self.net(x), dim=-1)
            loss = (z @ self.queue.clone().T).logsumexp(-1).mean()
            with torch.no_grad():
                rows = (self.place + torch.arange(len(x))) % 16
                self.queue.index_copy_(0, rows, z)
                self.place.add_(len(x)).remainder_(16)
            return loss

    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        loss = model(features())
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def byol(run: Run) -> Any:
    online, predictor = nn.Sequential(mlp(outputs=8), nn.BatchNorm1d(8)), mlp(8, 8)
    target = copy.deepcopy(online)
    optimizer = torch.optim.Adam([*online.parameters(), *predictor.parameters()])
    run.attach(online)
    run.attach(predictor)
    for _ in run.steps():
        one, other = features(8), features(8)
        with torch.no_grad():
            z = target(other)
        loss = 2 - 2 * F.cosine_similarity(predictor(online(one)), z).mean()
        descend(optimizer, loss)
        follow(target, online)
        run.log(loss)
    return online, predictor, target


@program()
def simsiam_as_one_module(run: Run) -> Any:
    class SimSiam(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.predictor = mlp(outputs=8), mlp(8, 8)

        def forward(self, one, other):
            z1, z2 = self.encoder(one), self.encoder(other)
            return self.predictor(z1), self.predictor(z2), z1.detach(), z2.detach()

    model, criterion = SimSiam(), nn.CosineSimilarity(dim=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        p1, p2, z1, z2 = model(features(), features())
        loss = -(criterion(p1, z2).mean() + criterion(p2, z1).mean()) * 0.5
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def dino(run: Run) -> Any:
    student = mlp(outputs=8)
    teacher, centre = copy.deepcopy(student).requires_grad_(False), torch.zeros(8)
    optimizer = torch.optim.AdamW(student.parameters())
    run.attach(student)
    for _ in run.steps():
        views = [features() for _ in range(3)]
        with torch.no_grad():
            wanted = [teacher(view) for view in views[:2]]
        found = [student(view) for view in views]
        loss = 0.0
        for index, target in enumerate(wanted):
            p = ((target - centre) / 0.04).softmax(-1)
            loss = loss - sum((p * (f / 0.1).log_softmax(-1)).sum(-1).mean() for i, f in enumerate(found) if i != index)
        descend(optimizer, loss)
        follow(teacher, student)
        centre = 0.9 * centre + 0.1 * torch.cat(wanted).mean(0)
        run.log(loss)
    return student, teacher, centre


@program()
def clip(run: Run) -> Any:
    class CLIP(nn.Module):
        def __init__(self):
            super().__init__()
            self.images, self.texts = cnn(outputs=8), nn.Sequential(nn.EmbeddingBag(30, 12), nn.Linear(12, 8))
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, pictures, text):
            one, other = F.normalize(self.images(pictures), dim=-1), F.normalize(self.texts(text), dim=-1)
            logits = self.scale.exp() * one @ other.T
            return logits, logits.T

    model = CLIP()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        one, other = model(images(), torch.randint(30, (ROWS, 5)))
        target = torch.arange(ROWS)
        loss = (F.cross_entropy(one, target) + F.cross_entropy(other, target)) / 2
        descend(optimizer, loss)
        with torch.no_grad():
            model.scale.clamp_(0, 4.6)
        run.log(loss)
    return model


@program()
def triplets_with_hard_negatives(run: Run) -> Any:
    model = mlp(outputs=8)
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        z, y = model(features(8)), labels(8, 3)
        distance = torch.cdist(z, z)
        same = y[:, None] == y[None]
        positive = distance.masked_fill(~same, float("-inf")).amax(1)
        negative = distance.masked_fill(same, float("inf")).amin(1)
        loss = F.relu(positive - negative.clamp(max=1e4) + 0.2).mean()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def barlow_twins(run: Run) -> Any:
    model = nn.Sequential(mlp(outputs=8), nn.BatchNorm1d(8, affine=False))
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        x = features(8)
        c = model(x + 0.1 * torch.randn_like(x)).T @ model(x + 0.1 * torch.randn_like(x)) / 8
        loss = (c.diagonal() - 1).square().sum() + 0.01 * (c - torch.diag(c.diagonal())).square().sum()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def metric_with_margin(run: Run) -> Any:
    class ArcFace(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.weight = mlp(outputs=8), nn.Parameter(torch.randn(CLASSES, 8))

        def forward(self, x, y):
            cosine = F.linear(F.normalize(self.body(x)), F.normalize(self.weight)).clamp(-0.99, 0.99)
            return 16 * torch.where(F.one_hot(y, CLASSES).bool(), (cosine.acos() + 0.3).cos(), cosine)

    model = ArcFace()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    run.attach(model)
    for _ in run.steps():
        y = labels()
        loss = F.cross_entropy(model(features(), y), y)
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def distillation(run: Run) -> Any:
    teacher, student = mlp(hidden=48).eval(), mlp()
    optimizer = torch.optim.Adam(student.parameters())
    run.attach(student)
    run.attach(teacher)
    for _ in run.steps():
        x, y = features(), labels()
        with torch.no_grad():
            wanted = (teacher(x) / 2).softmax(-1)
        logits = student(x)
        loss = F.cross_entropy(logits, y) + 4 * F.kl_div((logits / 2).log_softmax(-1), wanted, reduction="batchmean")
        descend(optimizer, loss)
        run.log(loss)
    return student


@program()
def distillation_of_features_by_hooks(run: Run) -> Any:
    teacher, student = mlp().eval().requires_grad_(False), mlp()
    kept: dict[str, torch.Tensor] = {}

    def keep(name):
        def hook(module, inputs, output):
            kept[name] = output

        return hook

    teacher[1].register_forward_hook(keep("teacher"))
    student[1].register_forward_hook(keep("student"))
    optimizer = torch.optim.Adam(student.parameters())
    run.attach(student)
    for _ in run.steps():
        x = features()
        with torch.no_grad():
            teacher(x)
        loss = F.cross_entropy(student(x), labels()) + F.mse_loss(kept["student"], kept["teacher"])
        descend(optimizer, loss)
        run.log(loss)
    return student


@program()
def mean_teacher(run: Run) -> Any:
    student = mlp(dropout=0.1)
    teacher = copy.deepcopy(student).requires_grad_(False)
    optimizer = torch.optim.Adam(student.parameters())
    run.attach(student)
    for step in run.steps():
        x, unlabelled = features(), features(8)
        with torch.no_grad():
            wanted = teacher(unlabelled).softmax(-1)
        consistency = F.mse_loss(student(unlabelled).softmax(-1), wanted)
        loss = F.cross_entropy(student(x), labels()) + step / 8 * consistency
        descend(optimizer, loss)
        follow(teacher, student, 1 - min(1 - 1 / (step + 1), 0.99))
        run.log(loss)
    return student, teacher


@program()
def confident_pseudo_labels(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        x, weak, strong = features(), features(8), features(8)
        with torch.no_grad():
            confidence, pseudo = model(weak).softmax(-1).max(-1)
        out = model(torch.cat([x, strong]))
        extra = (F.cross_entropy(out[ROWS:], pseudo, reduction="none") * (confidence > 0.25)).mean()
        loss = F.cross_entropy(out[:ROWS], labels()) + extra
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def selected_rows(run: Run) -> Any:
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run.attach(model)
    for _ in run.steps():
        x, y = features(8), labels(8)
        losses = F.cross_entropy(model(x), y, reduction="none")
        loss = losses.topk(4).values.mean()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def prototypes(run: Run) -> Any:
    model = mlp(outputs=8)
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        z = model(features(15)).view(3, 5, 8)
        centres, queries = z[:, :3].mean(1), z[:, 3:].reshape(-1, 8)
        loss = F.cross_entropy(-torch.cdist(queries, centres), torch.arange(3).repeat_interleave(2))
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def meta_learning_first_order(run: Run) -> Any:
    model = mlp(outputs=1)
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        start = copy.deepcopy(model.state_dict())
        inner = torch.optim.SGD(model.parameters(), lr=0.05)
        for _ in range(3):
            descend(inner, model(features()).square().mean())
        moved = [parameter.detach().clone() for parameter in model.parameters()]
        model.load_state_dict(start)
        optimizer.zero_grad()
        for parameter, end in zip(model.parameters(), moved, strict=True):
            parameter.grad = parameter.detach() - end
        optimizer.step()
    return model


@program()
def meta_learning_with_functional_call(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        weights = dict(model.named_parameters())
        inner = torch.func.functional_call(model, weights, (features(),)).square().mean()
        grads = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        fast = {name: weight - 0.1 * grad for (name, weight), grad in zip(weights.items(), grads, strict=True)}
        loss = torch.func.functional_call(model, fast, (features(),)).square().mean()
        descend(optimizer, loss)
        run.log(loss)
    return model
