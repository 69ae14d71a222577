"""Data parallelism in a process group of one process: DistributedDataParallel and FSDP2."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.training.programs.libraries import llama
from benchmarks.training.programs.models import GPT, ROWS, WIDTH, cnn, descend, features, images, labels, mlp, tokens
from benchmarks.training.programs.models import language_loss as loss_of_text
from benchmarks.training.programs.registry import Run, program


@contextmanager
def process_group() -> Iterator[None]:
    """Run the block in a group of one process with gloo."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@program()
def ddp(run: Run) -> Any:
    with process_group():
        model = DistributedDataParallel(mlp())
        optimizer = torch.optim.AdamW(model.parameters())
        run.attach(model)
        for _ in run.steps():
            loss = F.cross_entropy(model(features()), labels())
            descend(optimizer, loss)
            run.log(loss)
        return model.module


@program()
def ddp_over_a_convolutional_network(run: Run) -> Any:
    with process_group():
        model = DistributedDataParallel(cnn())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.attach(model)
        for _ in run.steps():
            loss = F.cross_entropy(model(images()), labels())
            descend(optimizer, loss)
            run.log(loss)
        return model.module


@program()
def ddp_with_accumulation(run: Run) -> Any:
    with process_group():
        model = DistributedDataParallel(GPT(), gradient_as_bucket_view=True)
        optimizer = torch.optim.AdamW(model.parameters())
        run.attach(model)
        for _ in run.steps():
            for part in range(2):
                batch = tokens()
                with model.no_sync() if part == 0 else nullcontext():
                    loss_of_text(model(batch), batch).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model.module


@program()
def ddp_with_unused_parameters(run: Run) -> Any:
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused = mlp(), mlp()

        def forward(self, x):
            return self.used(x)

    with process_group():
        model = DistributedDataParallel(Model(), find_unused_parameters=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.attach(model)
        for _ in run.steps():
            loss = F.cross_entropy(model(features()), labels())
            descend(optimizer, loss)
            run.log(loss)
        return model.module


@program("transformers")
def ddp_over_llama(run: Run) -> Any:
    with process_group():
        model = DistributedDataParallel(llama())
        optimizer = torch.optim.AdamW(model.parameters())
        run.attach(model)
        for _ in run.steps():
            batch = tokens()
            loss = model(input_ids=batch, labels=batch).loss
            descend(optimizer, loss)
            run.log(loss)
        return model.module


def _sharded(run: Run, model: nn.Module, layers: list[nn.Module], inputs, loss_of, **options: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    with process_group():
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for layer in layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(model, mesh=mesh, **options)
        optimizer = torch.optim.AdamW(model.parameters())
        run.attach(model)
        for _ in run.steps():
            batch = inputs()
            loss = loss_of(model(batch), batch)
            descend(optimizer, loss)
            run.log(loss)
        return [parameter.full_tensor().detach().clone() for parameter in model.parameters()]


@program()
def fsdp_root(run: Run) -> Any:
    return _sharded(run, mlp(), [], features, lambda out, _: F.cross_entropy(out, labels()))


@program()
def fsdp_per_layer(run: Run) -> Any:
    model = GPT(tied=False)
    return _sharded(run, model, list(model.blocks), tokens, loss_of_text)


@program()
def fsdp_without_resharding(run: Run) -> Any:
    model = GPT(tied=False)
    return _sharded(run, model, list(model.blocks), tokens, loss_of_text, reshard_after_forward=False)


@program("transformers")
def fsdp_over_llama(run: Run) -> Any:
    model = llama()
    return _sharded(run, model, list(model.model.layers), tokens, lambda out, batch: loss_of_text(out.logits, batch))


@program()
def averaging_by_hand(run: Run) -> Any:
    with process_group():
        model = mlp()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        run.attach(model)
        for _ in run.steps():
            loss = F.cross_entropy(model(features()), labels())
            optimizer.zero_grad()
            loss.backward()
            for parameter in model.parameters():
                dist.all_reduce(parameter.grad)
            optimizer.step()
            run.log(loss)
        return model


@program()
def contrastive_over_all_ranks(run: Run) -> Any:
    with process_group():
        model = mlp(outputs=8)
        other = copy.deepcopy(model)
        optimizer = torch.optim.SGD([*model.parameters(), *other.parameters()], lr=0.1)
        run.attach(model)
        run.attach(other)
        for _ in run.steps():
            one, two = F.normalize(model(features()), dim=-1), F.normalize(other(torch.randn(ROWS, WIDTH)), dim=-1)
            gathered = torch.cat(torch.distributed.nn.functional.all_gather(two))
            loss = F.cross_entropy(one @ gathered.T / 0.1, torch.arange(ROWS))
            descend(optimizer, loss)
            run.log(loss)
        return model, other
