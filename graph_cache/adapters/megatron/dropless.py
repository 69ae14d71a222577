"""Dropless experts on one device with token counts on the device, so that MoE layers can be captured whole.

Megatron's dispatchers and experts read the tokens per expert on the host. While replaced, tokens are sorted by expert
and the experts' linear layers are torch's grouped GEMM, with the groups' ends as a tensor. Everything else (router,
activations, shared experts) is Megatron's. The experts' own parameters are used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.moe import experts as megatron_experts
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.token_dispatcher import MoETokenDispatcher
from torch import Tensor, nn

from graph_cache.errors import GraphConfigError

logger = logging.getLogger(__name__)

SequentialMLP, TEGroupedMLP = megatron_experts.SequentialMLP, megatron_experts.TEGroupedMLP
_UNSUPPORTED = {
    "moe_expert_capacity_factor": "it drops tokens: set moe_pad_expert_input_to_capacity and capture 'moe' as it is",
    "add_bias_linear": "grouped GEMM adds no bias of experts",
    "moe_apply_probs_on_input": "probabilities are applied after the activation",
    "moe_router_padding_for_quantization": "the padding depends on the counts on the host",
    "moe_shared_expert_overlap": "shared experts run inside Megatron's dispatcher",
    "overlap_moe_expert_parallel_comm": "it calls the parts of Megatron's dispatcher itself",
    "overlap_dispatch_backward_with_experts_wgrad": "it delays weight gradients of Transformer Engine's linear layers",
    "delay_wgrad_compute": "it delays weight gradients of Transformer Engine's linear layers",
    "moe_paged_stash": "it pages activations by counts of Transformer Engine's fused experts",
    "use_transformer_engine_op_fuser": "Transformer Engine's fused experts take counts on the host",
    "fp8": "torch's grouped GEMM is in 16 or 32 bits",
    "fp4": "torch's grouped GEMM is in 16 or 32 bits",
}


def eager_reason(layer: MoELayer) -> str:
    """Return why this layer's experts need counts on the host; empty if they can do without."""
    dispatcher, config = layer.token_dispatcher, layer.config
    if dispatcher.ep_size > 1 or dispatcher.tp_size > 1:
        return "ranks exchange tokens by counts that the host reads: use one device for experts, or drop-and-pad"
    if hasattr(layer, "_inference_token_dispatcher"):
        return "transformer_impl='inference_optimized' switches dispatchers at every call: build it with another"
    for name, reason in _UNSUPPORTED.items():
        if getattr(config, name, None):
            return f"{name}={getattr(config, name)!r}: {reason}"
    if not isinstance(layer.experts, (SequentialMLP, TEGroupedMLP)):
        return f"{type(layer.experts).__name__} reads counts on the host: build TEGroupedMLP (moe_grouped_gemm)"
    if isinstance(layer.experts, SequentialMLP) and any(one._forward_pre_hooks for one in layer.experts.modules()):
        return (
            "hooks wait for each expert's parameters (overlap_param_gather), but its modules are not called: build "
            "TEGroupedMLP (moe_grouped_gemm)"
        )
    if any(weight is None for linear in _linears(layer.experts) for weight in linear.weights()):
        return "the experts' weights are one parameter (single_grouped_weight): build one per expert"
    return ""


class DroplessExperts:
    """Replace dispatcher and expert GEMMs of the models' MoE layers between `begin` and `end`.

    Layers whose experts have a fixed capacity, or that are replaced already, are left alone; layers that can't be
    replaced stay Megatron's, with a warning. Raises GraphConfigError if there are such layers only.
    """

    def __init__(self, models: Sequence[nn.Module]):
        dropless = [
            (path, layer)
            for model in models
            for path, layer in model.named_modules()
            if isinstance(layer, MoELayer)
            and not layer.config.moe_pad_expert_input_to_capacity
            and not isinstance(layer.token_dispatcher, DeviceDispatcher)
        ]
        reasons = [(path, reason) for path, layer in dropless if (reason := eager_reason(layer))]
        if reasons and len(reasons) == len(dropless):
            path, reason = reasons[0]
            raise GraphConfigError(
                f"cuda_graph_moe_dropless=True: no MoE layer can compute without counts on the host; {path}: {reason}"
            )
        for path, reason in reasons:
            logger.warning("%s runs eager: %s", path, reason)
        self._layers = [layer for _, layer in dropless if not eager_reason(layer)]
        self._restore: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Replace, for eager calls too, so that they compute the same as a replay.

        Moves the weights of a layer's experts next to each other where they are separate tensors.
        """
        for layer in self._layers:
            dispatcher = layer.token_dispatcher
            replacement = DeviceDispatcher(dispatcher)
            layer.token_dispatcher = replacement
            self._restore.append(partial(setattr, layer, "token_dispatcher", dispatcher))
            for linear in _linears(layer.experts):
                make_adjacent(linear.weights())
                linear.groups = replacement
                linear.module.forward = linear
                self._restore.append(partial(delattr, linear.module, "forward"))
            if isinstance(layer.experts, SequentialMLP):
                layer.experts.forward = _AllExperts(layer.experts)
                self._restore.append(partial(delattr, layer.experts, "forward"))

    def end(self) -> None:
        """Restore the layers. The weights stay where they are."""
        while self._restore:
            self._restore.pop()()


# ---- dispatch --------------------------------------------------------------------------------------------------------


class DeviceDispatcher(MoETokenDispatcher):
    """Sort tokens by expert, on one device. `ends` is int32 [experts], the end of each expert's rows, while they run.

    Rows are in the order of Megatron's dispatchers: by expert, then by token.
    """

    def __init__(self, replaced: MoETokenDispatcher):
        groups = SimpleNamespace(ep=replaced.ep_group, expt_tp=replaced.tp_group, tp_ep=replaced.tp_ep_group)
        super().__init__(replaced.config, groups)
        self._call: tuple[torch.Size, Tensor, Tensor] | None = None  # shape of the input, and the order of the rows
        self.ends: Tensor | None = None

    def dispatch_preprocess(self, hidden_states: Tensor, routing_map: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens [.., h], map and probs [tokens, experts] -> rows [tokens * top-k, h] and their probs."""
        shape, top_k = hidden_states.shape, self.config.moe_router_topk
        # Not masked_select, whose size the host reads: each token has top-k experts. One that was chosen twice, as
        # replayed ids may say, gets others too, of probability zero.
        experts = routing_map.to(torch.int8).topk(top_k, dim=1).indices
        by_expert, order = experts.flatten().sort(stable=True)
        # the row of each (token, expert)
        rows = torch.empty_like(order).scatter_(0, order, torch.arange(len(order), device=order.device))
        each_expert = torch.arange(routing_map.shape[1], device=order.device)
        self.ends = torch.searchsorted(by_expert, each_expert, right=True, out_int32=True)
        self._call = shape, order, rows
        hidden = ToExperts.apply(hidden_states.reshape(-1, shape[-1]), order, rows, top_k)
        return hidden, probs.gather(1, experts).flatten().index_select(0, order)

    def token_dispatch(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
        """Return the arguments: nothing is sent."""
        return hidden_states, probs

    def dispatch_postprocess(self, hidden_states: Tensor, probs: Tensor) -> tuple[Tensor, DeviceCounts, Tensor]:
        """Return the rows, counts that stay on the device, and the probs."""
        return hidden_states, DeviceCounts(), probs

    def combine_preprocess(self, hidden_states: Tensor) -> Tensor:
        """Return the argument: rows are in the order in which they were dispatched."""
        return hidden_states

    def token_combine(self, hidden_states: Tensor, *args: Any, **options: Any) -> Tensor:
        """Return the argument: nothing is sent."""
        return hidden_states

    def combine_postprocess(self, hidden_states: Tensor) -> Tensor:
        """Sum the rows of each token, and restore the input's shape."""
        assert self._call is not None
        shape, order, rows = self._call
        self._call = self.ends = None
        return ToTokens.apply(hidden_states, order, rows, self.config.moe_router_topk).view(shape)


class DeviceCounts:
    """Stands for Megatron's tokens per expert. Grouped linear layers read the groups from the dispatcher."""

    def tolist(self) -> DeviceCounts:
        """Return itself: nothing is read on the host."""
        return self


def _to_experts(tokens: Tensor, order: Tensor, top_k: int) -> Tensor:
    return tokens.index_select(0, order // top_k)


def _to_tokens(rows: Tensor, row_of: Tensor, top_k: int) -> Tensor:
    return rows.index_select(0, row_of).view(-1, top_k, rows.shape[1]).sum(1)


class ToExperts(torch.autograd.Function):
    """Copy each token to the rows of its experts. The backward sums without atomics, so it is deterministic."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, order: Tensor, row_of: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(row_of)
        ctx.top_k = top_k
        return _to_experts(tokens, order, top_k)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (row_of,) = ctx.saved_tensors
        return _to_tokens(grad, row_of, ctx.top_k), None, None, None


class ToTokens(torch.autograd.Function):
    """Sum the rows of each token."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, row_of: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return _to_tokens(rows, row_of, top_k)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        (order,) = ctx.saved_tensors
        return _to_experts(grad, order, ctx.top_k), None, None, None


# ---- experts ---------------------------------------------------------------------------------------------------------


class GroupedLinear:
    """Replacement `forward` of a linear layer: rows [n, in] -> ([n, out], None), each group by its expert's weight."""

    def __init__(self, module: nn.Module, weights: Callable[[], list[nn.Parameter]]):
        self.module, self.weights = module, weights
        self.groups: DeviceDispatcher | None = None

    def __call__(self, hidden_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, None]:
        assert self.groups is not None
        weight = Stacked.apply(*self.weights())
        return F.grouped_mm(hidden_states.to(weight.dtype), weight.transpose(1, 2), offs=self.groups.ends), None


class _AllExperts:
    """Replacement `forward` of SequentialMLP: all rows through one expert, whose linear layers are grouped."""

    def __init__(self, experts: Any):
        self._experts = experts

    def __call__(self, hidden_states: Tensor, tokens_per_expert: Any, probs: Tensor) -> tuple[Tensor, None]:
        output, _ = self._experts.local_experts[0](hidden_states, probs)
        return output, None


def _linears(experts: Any) -> list[GroupedLinear]:
    """Return the grouped linear layers of SequentialMLP or TEGroupedMLP; for the former they stand in expert 0."""

    def weights_of(name: str) -> list[Any]:
        if isinstance(experts, SequentialMLP):
            return [getattr(expert, name).weight for expert in experts.local_experts]
        return [getattr(getattr(experts, name), f"weight{index}", None) for index in range(experts.num_local_experts)]

    owner = experts.local_experts[0] if isinstance(experts, SequentialMLP) else experts
    return [GroupedLinear(getattr(owner, name), partial(weights_of, name)) for name in ("linear_fc1", "linear_fc2")]


class Stacked(torch.autograd.Function):
    """Stack parameters of one shape: a view if they lie next to each other in memory, else a copy."""

    @staticmethod
    def forward(ctx: Any, *weights: Tensor) -> Tensor:
        first = weights[0]
        if not _are_adjacent(weights):
            return torch.stack(weights)
        return first.detach().as_strided((len(weights), *first.shape), (first.numel(), *first.stride()))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return grad.unbind(0)


def _are_adjacent(weights: Sequence[Tensor]) -> bool:
    first, size = weights[0], weights[0].numel()
    storage, offset = first.untyped_storage().data_ptr(), first.storage_offset()
    return first.is_contiguous() and all(
        weight.untyped_storage().data_ptr() == storage and weight.storage_offset() == offset + index * size
        for index, weight in enumerate(weights)
    )


def make_adjacent(weights: Sequence[nn.Parameter]) -> None:
    """Move parameters next to each other, unless they are, or share memory with others (buffers of an optimizer)."""
    if _are_adjacent(weights) or any(one.untyped_storage().nbytes() != one.nbytes for one in weights):
        return
    stacked = torch.stack([one.detach() for one in weights])
    for index, one in enumerate(weights):
        one.data = stacked[index]
