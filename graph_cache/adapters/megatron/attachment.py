"""Prepare a Megatron-Core model for capture: check its settings, choose its parts, and collect the hooks to run before
a replay, the random generators, and the state outside modules that a capture must preserve.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import distributed_data_parallel
from megatron.core.tensor_parallel import random as rng
from megatron.core.transformer.moe import moe_utils
from torch import Tensor, nn

from graph_cache.adapters.megatron.ambient_state import SelectiveRecompute
from graph_cache.adapters.megatron.config import MegatronGraphConfig
from graph_cache.adapters.megatron.packed import register_packed_sequences
from graph_cache.adapters.megatron.parts import encoder_parts_of, layers_of, parts_of, section_of
from graph_cache.adapters.megatron.routing_replay import with_routing_replay
from graph_cache.adapters.megatron.schedule import delayed_wgrad_in_graphs
from graph_cache.errors import GraphConfigError
from graph_cache.training.ambient_state import AmbientState, combined
from graph_cache.training.attached import AttachedModule, Attachment, Hook, Part

logger = logging.getLogger(__name__)

PREPROCESS = "moe_preprocess"
NEVER_DELAYED = {"moe_router", PREPROCESS}  # parts without delayed weight gradients
ROUTING_REPLAY_ERROR = (
    "moe_enable_routing_replay=True switches routers between recording and replaying from the host: a graph "
    "would repeat the mode and routing of its capture. Use cuda_graph_impl='local', which makes them part of a call"
)
FP4_MIN_CAPABILITY = (10, 0)  # the compute capability of the first GPUs with fp4


def attachment(
    models: Sequence[nn.Module],
    config: MegatronGraphConfig,
    parts: Sequence[Part] | None = None,
    *,
    encoder: bool = False,
) -> Attachment:
    """Check a model or its chunks and describe the capture. `parts`: what to capture (None: by the configuration).
    Call it after wrapping the model for data parallelism. `encoder`: of the vision encoders, else of everything else.

    Raises GraphConfigError, saying what to change, for what can't be captured: Megatron's own graphs on the same model,
    RNG states that a graph can't register, hooks inside parts that a replay would skip, full recompute, offloading,
    delayed weight gradients, fp4 without hardware support.
    """
    layers = section_of(models, encoder=encoder) if parts is None else layers_of(models)
    settings = {id(layer.module.config): layer.module.config for layer in layers}
    for one in settings.values():
        check_config(one, config)
    if parts is None:
        parts = (encoder_parts_of if encoder else parts_of)(models, _capturable(config))
    parts = list(map(with_routing_replay, parts))
    for part in parts:
        _check_hooks(part)
    register_packed_sequences()
    return Attachment(parts, generators(), AuxLosses(), is_param_gather, _ambient_state(settings.values()))


def _capturable(config: MegatronGraphConfig) -> list[str]:
    """Return the requested modules without those that this capture implementation does not support."""
    modules = list(config.cuda_graph_modules)
    if config.cuda_graph_impl == "transformer_engine" and PREPROCESS in modules:
        modules.remove(PREPROCESS)
        logger.warning(
            "moe_preprocess runs eager under cuda_graph_impl='transformer_engine': only Encore's own graphs "
            "(cuda_graph_impl='local') restore the state that it leaves in the token dispatcher"
        )
    return modules


def check_config(model_config: Any, config: MegatronGraphConfig) -> None:
    """Raise GraphConfigError if a model's TransformerConfig is incompatible with Encore's graphs."""
    impl = getattr(model_config, "cuda_graph_impl", "none")
    if impl != "none":
        raise GraphConfigError(
            f"the model was built with cuda_graph_impl={impl!r}, so Megatron captures it itself: "
            "build it with 'none', and give the setting to Encore's EngineConfig"
        )
    # Apply Megatron's own rules by building the equivalent MegatronGraphConfig.
    MegatronGraphConfig.from_megatron(
        model_config,
        cuda_graph_impl=config.cuda_graph_impl,
        cuda_graph_scope=None,
        cuda_graph_modules=config.cuda_graph_modules,
        moe_dropless=config.moe_dropless,
        inference_cuda_graph_scope="none",
        use_cudagraphable_rng=True,
    )  # `generators` checks the tracker itself
    if getattr(model_config, "fine_grained_activation_offloading", False):
        raise GraphConfigError("fine_grained_activation_offloading=True moves storage that a graph reads: set it False")
    if (
        getattr(model_config, "delay_wgrad_compute", False)
        and config.cuda_graph_impl != "full_iteration"
        and (
            set(config.cuda_graph_modules) - NEVER_DELAYED
            or not config.cuda_graph_modules
            or delayed_wgrad_in_graphs(model_config, config.cuda_graph_modules)
        )
    ):
        raise GraphConfigError(
            "delay_wgrad_compute=True runs weight gradients after a layer's backward, but Encore's layer "
            "graphs compute them in the backward: set it False, capture only parts without delayed "
            "weights (cuda_graph_modules=['moe_router'], without shared experts), or use "
            "full_iteration"
        )
    if (
        getattr(model_config, "overlap_moe_expert_parallel_comm", False)
        and config.cuda_graph_impl == "local"
        and (not config.cuda_graph_modules)
    ):
        raise GraphConfigError(
            "overlap_moe_expert_parallel_comm=True calls the parts of a layer and never the layer itself, "
            "so a graph of the whole layer is never replayed: name parts in cuda_graph_modules (attn, moe_router)"
        )
    if (
        getattr(model_config, "moe_enable_routing_replay", False)
        and config.cuda_graph_impl != "local"
        and (not config.cuda_graph_modules or {"moe", "moe_router"} & set(config.cuda_graph_modules))
    ):
        raise GraphConfigError(ROUTING_REPLAY_ERROR + ", or capture no router (cuda_graph_modules=['attn'])")
    if getattr(model_config, "fp4", None):
        found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        if found is None or found < FP4_MIN_CAPABILITY:
            raise GraphConfigError(
                f"fp4={model_config.fp4!r} needs a GPU of compute capability "
                f"{'.'.join(map(str, FP4_MIN_CAPABILITY))}, found {found}: use fp8, or bf16"
            )


def generators() -> list[torch.Generator]:
    """Return the generators of Megatron's (or Transformer Engine's) RNG tracker, which graphs must register.

    Raises GraphConfigError if the tracker keeps its states on the host: every replay would repeat the same numbers.
    """
    if not rng._CUDA_RNG_STATE_TRACKER_INITIALIZED:
        return []
    states = rng.get_all_rng_states() or {}
    on_host = [name for name, state in states.items() if not isinstance(state, torch.Generator)]
    if on_host:
        raise GraphConfigError(
            f"Megatron's RNG tracker keeps {', '.join(on_host)} as tensors on the host, which a graph can't advance: "
            "call model_parallel_cuda_manual_seed(seed, te_rng_tracker=True) (use_te_rng_tracker) or "
            "(seed, use_cudagraphable_rng=True) before building the model"
        )
    return list(states.values())


def _ambient_state(settings: Collection[Any]) -> AmbientState | None:
    """Return the ambient state for selective recompute and for fp8 or fp4; None if the model uses neither."""
    kinds: list[AmbientState] = []
    if any(getattr(one, "recompute_granularity", None) for one in settings):
        kinds.append(SelectiveRecompute())
    if any(getattr(one, "fp8", None) or getattr(one, "fp4", None) for one in settings):
        from graph_cache.adapters.transformer_engine.ambient_state import Fp8AmbientState  # fp8 needs it installed

        kinds.append(Fp8AmbientState())
    return combined(kinds)


def is_param_gather(hook: Hook) -> bool:
    """Return whether this is the DDP hook that waits for a module's parameters (overlap_param_gather)."""
    return getattr(hook, "__module__", "") == distributed_data_parallel.__name__


class AuxLosses(Mapping[str, Tensor]):
    """Mapping of Megatron's auxiliary loss accumulators, which routers add to, and their gradient scale. Looked up at
    each access, since Megatron replaces them.
    """

    def __getitem__(self, name: str) -> Tensor:
        return self._current()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._current())

    def __len__(self) -> int:
        return len(self._current())

    def _current(self) -> dict[str, Tensor]:
        found = self._loss_sums() | {
            "main_loss_backward_scale": moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale
        }
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _loss_sums(self) -> dict[str, Tensor | None]:
        metrics = getattr(moe_utils, "get_moe_metrics_tracker", None)
        if metrics is not None:  # from 0.19 on
            return {name: one.values for name, one in metrics().metrics.items()}
        tracker = moe_utils.get_moe_layer_wise_logging_tracker()
        return {name: one.get("values") for name, one in tracker.items()}


def _check_hooks(part: Part) -> None:
    attached = AttachedModule(part, is_param_gather)
    if attached.hooks_inside:
        names = {
            getattr(hook, "__qualname__", repr(hook))
            for hooks in attached.hooks
            for hook in hooks.values()
            if not is_param_gather(hook)
        }
        raise GraphConfigError(
            f"{part.name} has hooks inside that a replay would skip: "
            f"{', '.join(sorted(names))}; remove them, or exclude this part with "
            "cuda_graph_modules"
        )
