"""Reinforcement learning and learning from preferences."""

from __future__ import annotations

import copy
import random
from collections import deque
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Normal

from benchmarks.training.programs.models import GPT, ROWS, VOCAB, WIDTH, descend, features, labels, mlp, tokens
from benchmarks.training.programs.registry import Run, program


class ActorCritic(nn.Module):
    """A policy over actions and a value."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(WIDTH, 24), nn.Tanh())
        self.actor, self.critic = nn.Linear(24, 5), nn.Linear(24, 1)

    def forward(self, x):
        h = self.body(x)
        return self.actor(h), self.critic(h).squeeze(-1)


@program()
def reinforce(run: Run) -> Any:
    policy = mlp()
    optimizer = torch.optim.Adam(policy.parameters())
    run.attach(policy)
    for _ in run.steps():
        distribution = Categorical(logits=policy(features(10)))
        action = distribution.sample()
        loss = -(distribution.log_prob(action) * torch.randn(10)).mean()
        descend(optimizer, loss)
        run.log(loss)
    return policy


@program()
def actor_critic(run: Run) -> Any:
    model = ActorCritic()
    optimizer = torch.optim.RMSprop(model.parameters())
    run.attach(model)
    for _ in run.steps():
        logits, value = model(features(8))
        distribution = Categorical(logits=logits)
        action, returns = distribution.sample(), torch.randn(8)
        advantage = (returns - value).detach()
        loss = -(distribution.log_prob(action) * advantage).mean() + F.mse_loss(value, returns)
        loss = loss - 0.01 * distribution.entropy().mean()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def ppo(run: Run) -> Any:
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-4)
    run.attach(model)
    for _ in run.steps():
        x = features(16)
        with torch.no_grad():
            logits, values = model(x)
            action = Categorical(logits=logits).sample()
            old = Categorical(logits=logits).log_prob(action)
        returns = values + torch.randn(16)
        for _ in range(2):
            for rows in torch.randperm(16).split(8):
                logits, value = model(x[rows])
                ratio = (Categorical(logits=logits).log_prob(action[rows]) - old[rows]).exp()
                advantage = (returns - values)[rows]
                clipped = ratio.clamp(0.8, 1.2) * advantage
                loss = -torch.min(ratio * advantage, clipped).mean() + 0.5 * F.mse_loss(value, returns[rows])
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
        run.log(loss)
    return model


@program()
def ppo_in_one_method(run: Run) -> Any:
    class Agent(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.log_std, self.value = mlp(outputs=3), nn.Parameter(torch.zeros(1, 3)), mlp(outputs=1)

        def forward(self, x, action=None):
            distribution = Normal(self.mean(x), self.log_std.exp().expand(len(x), 3))
            if action is None:
                action = distribution.sample()
            return action, distribution.log_prob(action).sum(1), distribution.entropy().sum(1), self.value(x)

    agent = Agent()
    optimizer = torch.optim.Adam(agent.parameters())
    run.attach(agent)
    for _ in run.steps():
        x = features(8)
        with torch.no_grad():
            action, old, _, value = agent(x)
        _, new, entropy, value = agent(x, action)
        loss = -((new - old).exp() * torch.randn(8)).mean() - 0.01 * entropy.mean() + value.square().mean()
        descend(optimizer, loss)
        run.log(loss)
    return agent


@program()
def dqn(run: Run) -> Any:
    model = mlp()
    target = copy.deepcopy(model)
    buffer = deque([(features(1)[0], random.randrange(5), random.random(), features(1)[0]) for _ in range(16)], 32)
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for step in run.steps():
        batch = random.sample(buffer, 6)
        x, following = torch.stack([one[0] for one in batch]), torch.stack([one[3] for one in batch])
        action, reward = torch.tensor([one[1] for one in batch]), torch.tensor([one[2] for one in batch])
        with torch.no_grad():
            wanted = reward + 0.99 * target(following).max(1).values
        loss = F.smooth_l1_loss(model(x).gather(1, action[:, None]).squeeze(1), wanted)
        descend(optimizer, loss)
        buffer.append((features(1)[0], 0, 1.0, features(1)[0]))
        if step % 3 == 2:
            target.load_state_dict(model.state_dict())
        run.log(loss)
    return model, target


@program()
def double_dqn_with_soft_target(run: Run) -> Any:
    model = mlp()
    target = copy.deepcopy(model).requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    run.attach(model)
    for _ in run.steps():
        x, following, action = features(8), features(8), torch.randint(5, (8, 1))
        with torch.no_grad():
            best = model(following).argmax(1, keepdim=True)
            wanted = torch.randn(8, 1) + 0.99 * target(following).gather(1, best)
        loss = F.smooth_l1_loss(model(x).gather(1, action), wanted)
        descend(optimizer, loss)
        state, other = target.state_dict(), model.state_dict()
        for key in state:
            state[key] = other[key] * 0.01 + state[key] * 0.99
        target.load_state_dict(state)
        run.log(loss)
    return model, target


@program()
def ddpg(run: Run) -> Any:
    actor, critic = nn.Sequential(mlp(outputs=2), nn.Tanh()), mlp(WIDTH + 2, 1)
    actor_target, critic_target = copy.deepcopy(actor), copy.deepcopy(critic)
    optimizers = [torch.optim.Adam(one.parameters()) for one in (actor, critic)]
    run.attach(actor)
    run.attach(critic)
    for _ in run.steps():
        x, action, following = features(8), torch.rand(8, 2), features(8)
        with torch.no_grad():
            wanted = torch.randn(8, 1) + critic_target(torch.cat([following, actor_target(following)], 1))
        loss_c = F.mse_loss(critic(torch.cat([x, action], 1)), wanted)
        descend(optimizers[1], loss_c)
        loss_a = -critic(torch.cat([x, actor(x)], 1)).mean()
        descend(optimizers[0], loss_a)
        for slow, fast in ((actor_target, actor), (critic_target, critic)):
            for one, other in zip(slow.parameters(), fast.parameters(), strict=True):
                one.data.copy_(0.99 * one.data + 0.01 * other.data)
        run.log(loss_c, loss_a)
    return actor, critic, critic_target


@program()
def twin_critics_with_delay(run: Run) -> Any:
    class Twin(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.two = mlp(WIDTH + 2, 1), mlp(WIDTH + 2, 1)

        def forward(self, x, action):
            joined = torch.cat([x, action], 1)
            return self.one(joined), self.two(joined)

    actor, critic = nn.Sequential(mlp(outputs=2), nn.Tanh()), Twin()
    target = copy.deepcopy(critic)
    optimizers = [torch.optim.Adam(one.parameters()) for one in (actor, critic)]
    run.attach(actor)
    run.attach(critic)
    for step in run.steps():
        x, action = features(8), torch.rand(8, 2)
        with torch.no_grad():
            wanted = torch.randn(8, 1) + torch.min(*target(x, actor(x)))
        one, two = critic(x, action)
        loss = F.mse_loss(one, wanted) + F.mse_loss(two, wanted)
        descend(optimizers[1], loss)
        if step % 2 == 1:
            descend(optimizers[0], -critic(x, actor(x))[0].mean())
        run.log(loss)
    return actor, critic


@program()
def soft_actor_critic(run: Run) -> Any:
    class Actor(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(outputs=4)

        def forward(self, x):
            mean, log_std = self.net(x).chunk(2, -1)
            distribution = Normal(mean, log_std.clamp(-5, 2).exp())
            raw = distribution.rsample()
            action = torch.tanh(raw)
            log_p = (distribution.log_prob(raw) - torch.log(1 - action.square() + 1e-6)).sum(-1, keepdim=True)
            return action, log_p

    actor, critic, log_alpha = Actor(), mlp(WIDTH + 2, 1), nn.Parameter(torch.zeros(1))
    optimizers = [torch.optim.Adam(one) for one in (actor.parameters(), critic.parameters(), [log_alpha])]
    run.attach(actor)
    run.attach(critic)
    for _ in run.steps():
        x = features(8)
        with torch.no_grad():
            action, log_p = actor(x)
            wanted = torch.randn(8, 1) - log_alpha.exp() * log_p
        descend(optimizers[1], F.mse_loss(critic(torch.cat([x, action], 1)), wanted))
        action, log_p = actor(x)
        loss = (log_alpha.exp().item() * log_p - critic(torch.cat([x, action], 1))).mean()
        descend(optimizers[0], loss)
        descend(optimizers[2], -(log_alpha.exp() * (log_p.detach() - 2)).mean())
        run.log(loss)
    return actor, critic, log_alpha


def log_probabilities(logits, batch):
    """Return the log probability of each next token."""
    return logits[:, :-1].log_softmax(-1).gather(-1, batch[:, 1:, None]).squeeze(-1)


@program()
def grpo(run: Run) -> Any:
    policy = GPT()
    reference = copy.deepcopy(policy).requires_grad_(False).eval()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    run.attach(policy)
    for _ in run.steps():
        sampled = tokens(2).repeat_interleave(3, 0)
        with torch.no_grad():
            for _ in range(3):
                following = Categorical(logits=policy(sampled)[:, -1]).sample()
                sampled = torch.cat([sampled, following[:, None]], 1)
            old, ref = log_probabilities(policy(sampled), sampled), log_probabilities(reference(sampled), sampled)
        reward = (sampled == 3).float().sum(1).view(2, 3)
        advantage = ((reward - reward.mean(1, True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        new = log_probabilities(policy(sampled), sampled)
        ratio, gap = (new - old).exp(), ref - new
        per_token = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage) + 0.04 * (gap.exp() - gap - 1)
        loss = per_token.mean()
        descend(optimizer, loss)
        run.log(loss)
    return policy


@program()
def rollouts_of_changing_length(run: Run) -> Any:
    policy = GPT()
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    run.attach(policy)
    for _ in run.steps():
        length = random.choice((5, 6))
        batch = tokens(4, length)
        loss = -(log_probabilities(policy(batch), batch) * torch.randn(4, 1)).mean()
        descend(optimizer, loss)
        run.log(loss)
    return policy


@program()
def dpo(run: Run) -> Any:
    policy = GPT()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters())
    run.attach(policy)
    for _ in run.steps():
        chosen, rejected = tokens(), tokens()
        with torch.no_grad():
            ref = log_probabilities(reference(chosen), chosen).sum(1)
            ref = ref - log_probabilities(reference(rejected), rejected).sum(1)
        new = log_probabilities(policy(chosen), chosen).sum(1) - log_probabilities(policy(rejected), rejected).sum(1)
        loss = -F.logsigmoid(0.1 * (new - ref)).mean()
        descend(optimizer, loss)
        run.log(loss)
    return policy


@program()
def dpo_concatenated(run: Run) -> Any:
    policy = GPT()
    reference = copy.deepcopy(policy).requires_grad_(False)
    optimizer = torch.optim.AdamW(policy.parameters())
    run.attach(policy)
    run.attach(reference)
    for _ in run.steps():
        batch = torch.cat([tokens(), tokens()])
        with torch.no_grad():
            ref = log_probabilities(reference(batch), batch).sum(1)
        new = log_probabilities(policy(batch), batch).sum(1)
        chosen, rejected = (new - ref).chunk(2)
        loss = -F.logsigmoid(0.1 * (chosen - rejected)).mean()
        descend(optimizer, loss)
        run.log(loss)
    return policy


@program()
def reward_model(run: Run) -> Any:
    class Reward(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.head = GPT(1), nn.Linear(VOCAB, 1)

        def forward(self, batch, last):
            rows = torch.arange(len(batch))
            return self.head(self.body(batch))[rows, last].squeeze(-1)

    model = Reward()
    optimizer = torch.optim.AdamW(model.parameters())
    run.attach(model)
    for _ in run.steps():
        chosen = model(tokens(), torch.randint(1, 6, (ROWS,)))
        rejected = model(tokens(), torch.randint(1, 6, (ROWS,)))
        loss = -F.logsigmoid(chosen - rejected).mean()
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def behaviour_cloning(run: Run) -> Any:
    model = ActorCritic()
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        logits, _ = model(features())
        loss = F.cross_entropy(logits, labels())
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def model_of_the_world(run: Run) -> Any:
    class World(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.prior, self.decode = nn.GRUCell(WIDTH, WIDTH), mlp(outputs=8), mlp(WIDTH + 4, WIDTH)

        def forward(self, x):
            h, losses = torch.zeros(len(x), WIDTH), []
            for t in range(x.shape[1]):
                mean, log_std = self.prior(h).chunk(2, -1)
                z = mean + log_std.exp() * torch.randn_like(mean)
                losses.append(F.mse_loss(self.decode(torch.cat([h, z], 1)), x[:, t]))
                h = self.cell(x[:, t], h)
            return torch.stack(losses).mean()

    model = World()
    optimizer = torch.optim.Adam(model.parameters())
    run.attach(model)
    for _ in run.steps():
        loss = model(torch.randn(ROWS, 5, WIDTH))
        descend(optimizer, loss)
        run.log(loss)
    return model


@program()
def curiosity(run: Run) -> Any:
    frozen, predictor = mlp(outputs=8).requires_grad_(False), mlp(outputs=8)
    policy = ActorCritic()
    optimizer = torch.optim.Adam([*predictor.parameters(), *policy.parameters()])
    run.attach(predictor)
    run.attach(policy)
    for _ in run.steps():
        x = features(8)
        error = (predictor(x) - frozen(x)).square().mean(-1)
        logits, value = policy(x)
        loss = error.mean() + F.mse_loss(value, error.detach()) - Categorical(logits=logits).entropy().mean()
        descend(optimizer, loss)
        run.log(loss)
    return predictor, policy
