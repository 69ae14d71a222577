"""Generative models: autoencoders, adversarial networks, diffusion, flows, energies."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.training.programs.models import ROWS, WIDTH, Block, cnn, descend, features, images, labels, mlp
from benchmarks.training.programs.registry import Run, program


class VAE(nn.Module):
    """Variational autoencoder: returns the reconstruction, mean and log variance."""

    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = mlp(outputs=8), mlp(4, WIDTH)

    def forward(self, x):
        mean, log_variance = self.encoder(x).chunk(2, -1)
        z = mean + torch.randn_like(mean) * (0.5 * log_variance).exp()
        return self.decoder(z), mean, log_variance


@program()
def variational_autoencoder(run: Run) -> Any:
    model = VAE()
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for step in run.steps():
        x = features()
        out, mean, log_variance = model(x)
        divergence = -0.5 * (1 + log_variance - mean.square() - log_variance.exp()).sum(-1).mean()
        loss = F.mse_loss(out, x) + min(1.0, step / 5) * divergence
        descend(optimizer, loss)
        run.log(loss)
    return model


class Codebook(nn.Module):
    """Vector quantisation with a straight-through gradient; the codes follow a moving average."""

    def __init__(self, averages: bool):
        super().__init__()
        self.averages = averages
        codes = torch.randn(12, 4)
        if averages:
            self.register_buffer("codes", codes)
            self.register_buffer("counts", torch.zeros(12))
            self.register_buffer("sums", codes.clone())
        else:
            self.codes = nn.Parameter(codes)

    def forward(self, z):
        index = torch.cdist(z, self.codes).argmin(-1)
        quantised = F.embedding(index, self.codes)
        if self.averages and self.training:
            with torch.no_grad():
                one_hot = F.one_hot(index, 12).float()
                self.counts.mul_(0.99).add_(one_hot.sum(0), alpha=0.01)
                self.sums.mul_(0.99).add_(one_hot.T @ z, alpha=0.01)
                self.codes.copy_(self.sums / (self.counts[:, None] + 1e-5))
        loss = F.mse_loss(z, quantised.detach()) + (0 if self.averages else F.mse_loss(quantised, z.detach()))
        return z + (quantised - z).detach(), loss


class VQVAE(nn.Module):
    """Autoencoder with quantised codes."""

    def __init__(self, averages: bool):
        super().__init__()
        self.encoder, self.codebook, self.decoder = mlp(outputs=4), Codebook(averages), mlp(4, WIDTH)

    def forward(self, x):
        z, loss = self.codebook(self.encoder(x))
        return self.decoder(z), loss


def _quantised(run: Run, averages: bool) -> Any:
    model = VQVAE(averages)
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        x = features()
        out, commitment = model(x)
        loss = F.mse_loss(out, x) + 0.25 * commitment
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def quantised_autoencoder(run: Run) -> Any:
    return _quantised(run, averages=False)


@program()
def quantised_autoencoder_with_averages(run: Run) -> Any:
    return _quantised(run, averages=True)


@program()
def adversarial_pair(run: Run) -> Any:
    generator, critic = mlp(4, WIDTH), mlp(outputs=1)
    optimizers = [torch.optim.Adam(one.parameters(), betas=(0.5, 0.9)) for one in (generator, critic)]
    run.attach(generator)
    run.attach(critic)
    for _ in run.steps():
        fake = generator(torch.randn(ROWS, 4))
        loss_d = F.softplus(-critic(features())).mean() + F.softplus(critic(fake.detach())).mean()
        descend(optimizers[1], loss_d)
        loss_g = F.softplus(-critic(fake)).mean()
        descend(optimizers[0], loss_g)
        run.log(loss_d, loss_g)
    return generator, critic


@program()
def adversarial_with_several_critic_steps(run: Run) -> Any:
    generator, critic = mlp(4, WIDTH), mlp(outputs=1)
    optimizers = [torch.optim.RMSprop(one.parameters(), lr=1e-3) for one in (generator, critic)]
    run.attach(generator)
    run.attach(critic)
    for _ in run.steps():
        for _ in range(3):
            with torch.no_grad():
                fake = generator(torch.randn(ROWS, 4))
            loss_d = critic(fake).mean() - critic(features()).mean()
            descend(optimizers[1], loss_d)
            for parameter in critic.parameters():
                parameter.data.clamp_(-0.1, 0.1)
        loss_g = -critic(generator(torch.randn(ROWS, 4))).mean()
        descend(optimizers[0], loss_g)
        run.log(loss_d, loss_g)
    return generator, critic


@program()
def adversarial_with_gradient_penalty(run: Run) -> Any:
    generator, critic = mlp(4, WIDTH), nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh(), nn.Linear(24, 1))
    optimizers = [torch.optim.Adam(one.parameters()) for one in (generator, critic)]
    run.attach(generator)
    for _ in run.steps():
        real, fake = features(), generator(torch.randn(ROWS, 4)).detach()
        share = torch.rand(ROWS, 1)
        between = (share * real + (1 - share) * fake).requires_grad_()
        (grad,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        loss_d = critic(fake).mean() - critic(real).mean() + 10 * (grad.norm(dim=1) - 1).square().mean()
        descend(optimizers[1], loss_d)
        loss_g = -critic(generator(torch.randn(ROWS, 4))).mean()
        descend(optimizers[0], loss_g)
        run.log(loss_d, loss_g)
    return generator, critic


@program()
def several_critics(run: Run) -> Any:
    generator = mlp(4, WIDTH)
    critics = nn.ModuleList(mlp(outputs=1) for _ in range(3))
    of_generator = torch.optim.Adam(generator.parameters())
    of_critics = torch.optim.Adam(critics.parameters())
    run.attach(generator)
    for critic in critics:
        run.attach(critic)
    for _ in run.steps():
        fake = generator(torch.randn(ROWS, 4))
        loss_d = sum((critic(features()) - 1).square().mean() + critic(fake.detach()).square().mean()
                     for critic in critics)  # fmt: skip
        descend(of_critics, loss_d)
        critics.requires_grad_(False)
        loss_g = sum((critic(fake) - 1).square().mean() for critic in critics)
        descend(of_generator, loss_g)
        critics.requires_grad_(True)
        run.log(loss_d, loss_g)
    return generator, critics


@program()
def cycle_of_two_generators(run: Run) -> Any:
    forward, backward = mlp(outputs=WIDTH), mlp(outputs=WIDTH)
    optimizer = torch.optim.Adam([*forward.parameters(), *backward.parameters()])
    run.attach(forward)
    run.attach(backward)
    for _ in run.steps():
        a, b = features(), features()
        loss = F.l1_loss(backward(forward(a)), a) + F.l1_loss(forward(backward(b)), b)
        descend(optimizer, loss)
        run.log(loss)
    return forward, backward


class Denoiser(nn.Module):
    """Predicts noise from a noisy input, a time and an optional class."""

    def __init__(self):
        super().__init__()
        self.times, self.classes = nn.Embedding(10, WIDTH), nn.Embedding(6, WIDTH)
        self.net = mlp(outputs=WIDTH)

    def forward(self, x, t, y=None):
        condition = self.times(t) + (0 if y is None else self.classes(y))
        return self.net(x + condition)


@program()
def diffusion(run: Run) -> Any:
    model = Denoiser()
    average = copy.deepcopy(model)
    alphas = torch.cumprod(1 - torch.linspace(1e-2, 0.2, 10), 0)
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        x, t, noise = features(), torch.randint(10, (ROWS,)), torch.randn(ROWS, WIDTH)
        a = alphas[t][:, None]
        loss = F.mse_loss(model(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)
        descend(optimizer, loss)
        with torch.no_grad():
            for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                slow.mul_(0.99).add_(fast, alpha=0.01)
        run.log(loss)
    return model, average


@program()
def diffusion_without_class_sometimes(run: Run) -> Any:
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        y = torch.where(torch.rand(ROWS) < 0.1, 5, labels())
        loss = F.mse_loss(model(features(), torch.randint(10, (ROWS,)), y), torch.randn(ROWS, WIDTH))
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def diffusion_class_or_none(run: Run) -> Any:
    model = Denoiser()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for step in run.steps():
        y = None if step % 3 == 1 else labels()
        loss = F.mse_loss(model(features(), torch.randint(10, (ROWS,)), y), torch.randn(ROWS, WIDTH))
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def diffusion_loss_in_the_model(run: Run) -> Any:
    class Diffusion(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = Denoiser()
            self.register_buffer("alphas", torch.cumprod(1 - torch.linspace(1e-2, 0.2, 10), 0))

        def forward(self, x):
            t = torch.randint(0, 10, (x.shape[0],), device=x.device)
            noise, a = torch.randn_like(x), self.alphas[t][:, None]
            return F.mse_loss(self.net(a.sqrt() * x + (1 - a).sqrt() * noise, t), noise)

    model = Diffusion()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = model(features())
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def flow_matching(run: Run) -> Any:
    model = mlp(WIDTH + 1, WIDTH)
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        noise, x, t = features(), features(), torch.rand(ROWS, 1)
        loss = F.mse_loss(model(torch.cat([(1 - t) * noise + t * x, t], 1)), x - noise)
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def consistency(run: Run) -> Any:
    model = Denoiser()
    teacher = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        x, noise, t = features(), features(), torch.randint(0, 9, (ROWS,))
        with torch.no_grad():
            target = teacher(x + noise * t[:, None] / 10, t)
        loss = F.huber_loss(model(x + noise * (t[:, None] + 1) / 10, t + 1), target)
        descend(optimizer, loss)
        for slow, fast in zip(teacher.parameters(), model.parameters(), strict=True):
            slow.data.mul_(0.95).add_(fast.data, alpha=0.05)
        run.log(loss)
    return model, teacher


@program()
def normalising_flow(run: Run) -> Any:
    class Coupling(nn.Module):
        def __init__(self, flipped):
            super().__init__()
            self.net, self.flipped = mlp(WIDTH // 2, WIDTH), flipped

        def forward(self, x):
            one, two = x.chunk(2, -1) if not self.flipped else x.flip(-1).chunk(2, -1)
            scale, shift = self.net(one).chunk(2, -1)
            scale = torch.tanh(scale)
            return torch.cat([one, two * scale.exp() + shift], -1), scale.sum(-1)

    class Flow(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Coupling(index % 2 == 1) for index in range(3))

        def log_prob(self, x):
            total = 0
            for layer in self.layers:
                x, log_det = layer(x)
                total = total + log_det
            return total + torch.distributions.Normal(0.0, 1.0).log_prob(x).sum(-1)

        def forward(self, x):
            return self.log_prob(x)

    model = Flow()
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = -model(features()).mean()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def energy_with_langevin(run: Run) -> Any:
    model = nn.Sequential(nn.Linear(WIDTH, 24), nn.SiLU(), nn.Linear(24, 1))
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        x = features()
        for _ in range(3):
            x = x.detach().requires_grad_()
            (grad,) = torch.autograd.grad(model(x).sum(), x)
            x = x - 0.1 * grad + 0.01 * torch.randn_like(x)
        loss = model(features()).mean() - model(x.detach()).mean()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def score_matching(run: Run) -> Any:
    model = mlp(outputs=WIDTH)
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        x, noise = features(), features()
        loss = (model(x + 0.1 * noise) + noise / 0.1).square().sum(-1).mean()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def masked_autoencoder(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.decoder = Block(causal=False), Block(causal=False)
            self.mask, self.out = nn.Parameter(torch.zeros(WIDTH)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            rows, length, width = x.shape
            order = torch.rand(rows, length).argsort(1)
            back, kept = order.argsort(1), order[:, : length // 2]
            seen = self.encoder(x.gather(1, kept[..., None].expand(-1, -1, width)))
            padded = torch.cat([seen, self.mask.expand(rows, length - seen.shape[1], -1)], 1)
            out = self.out(self.decoder(padded.gather(1, back[..., None].expand(-1, -1, width))))
            mask = (back >= length // 2).float()
            return ((out - x).square().mean(-1) * mask).sum() / mask.sum()

    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = model(torch.randn(ROWS, 8, WIDTH))
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def style_transfer(run: Run) -> Any:
    encoder = cnn()[:6].eval().requires_grad_(False)
    picture = nn.Parameter(images(1))
    target = images(1)
    optimizer = torch.optim.Adam([picture], lr=0.05)
    run.attach(encoder)
    for _ in run.steps():
        loss = F.mse_loss(encoder(picture), encoder(target).detach())
        descend(optimizer, loss)
        run.log(loss)
    return picture


@program()
def perceptual_loss(run: Run) -> Any:
    model, critic = nn.Conv2d(3, 3, 3, padding=1), cnn()[:6].eval().requires_grad_(False)
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    run.attach(critic)
    for _ in run.steps():
        x = images()
        loss = F.mse_loss(critic(model(x)), critic(x))
        descend(optimizer, loss)
        run.log(loss)
    return model
