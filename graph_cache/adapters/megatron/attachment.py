"""All that capturing a Megatron-Core model takes beside its parts: what is refused, which hooks run before a replay,
which generators draw, and what state outside of modules a capture must leave as it was.
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

from graph_cache.adapters.megatron.ambient_state import MegatronAmbientState
from graph_cache.adapters.megatron.packed import register_packed_sequences
from graph_cache.adapters.megatron.parts import layers_of, parts_of
from graph_cache.adapters.megatron.schedule import weights_in_graphs
from graph_cache.config import GraphConfig
from graph_cache.errors import GraphConfigError
from graph_cache.training.attached import AmbientState, AttachedModule, Attachment, Hook, Part

logger = logging.getLogger(__name__)

PREPROCESS = "moe_preprocess"
WITHOUT_DELAY = {"moe_router", PREPROCESS}  # parts whose own weights Megatron never delays
ROUTING_REPLAY = (
    "moe_enable_routing_replay=True has the host tell routers to record or to replay, and hand them what "
    "to replay: a graph would do for ever what it was told at its capture. Set it False"
)
FP4_NEEDS = (10, 0)  # the compute capability of the first GPUs with fp4


def attachment(models: Sequence[nn.Module], config: GraphConfig, parts: Sequence[Part] | None = None) -> Attachment:
    """Look a model or its chunks over, whose `parts` are captured (None: as the configuration says). Attach after
    wrapping it for data parallelism.

    Raises GraphConfigError for what a graph can't hold, saying what to change: Megatron's own graphs on the same model,
    random draws that no graph can register, hooks inside that a replay would leave out, recompute of whole layers,
    offloading, weight gradients apart from the backward, fp4 without the hardware.
    """
    settings = {id(layer.module.config): layer.module.config for layer in layers_of(models)}
    for one in settings.values():
        check(one, config)
    if parts is None:
        parts = parts_of(models, _capturable(config))
    for part in parts:
        _check_hooks(part)
    register_packed_sequences()
    return Attachment(parts, generators(), AuxLosses(), is_param_gather, _surroundings(settings.values()))


def _capturable(config: GraphConfig) -> list[str]:
    """The modules that are asked for, without what this way of capturing has no way to pass on."""
    modules = list(config.cuda_graph_modules)
    if config.cuda_graph_impl == "transformer_engine" and PREPROCESS in modules:
        modules.remove(PREPROCESS)
        logger.warning(
            "moe_preprocess runs eager under cuda_graph_impl='transformer_engine': what it leaves with the "
            "token dispatcher goes by Encore's own graphs alone (cuda_graph_impl='local')"
        )
    return modules


def check(model_config: Any, config: GraphConfig) -> None:
    """Refuse a model's TransformerConfig that graphs of ours can't serve."""
    impl = getattr(model_config, "cuda_graph_impl", "none")
    if impl != "none":
        raise GraphConfigError(
            f"the model was built with cuda_graph_impl={impl!r}, so Megatron captures it itself: "
            "build it with 'none', and give the setting to Encore's EngineConfig"
        )
    # Megatron's own rules, held by the config of ours that would have come of it.
    GraphConfig.from_megatron(
        model_config,
        cuda_graph_impl=config.cuda_graph_impl,
        cuda_graph_scope=None,
        cuda_graph_modules=config.cuda_graph_modules,
        inference_cuda_graph_scope="none",
        use_cudagraphable_rng=True,
    )  # `generators` looks at the tracker itself
    if getattr(model_config, "fine_grained_activation_offloading", False):
        raise GraphConfigError("fine_grained_activation_offloading=True moves storage that a graph reads: set it False")
    if (
        getattr(model_config, "delay_wgrad_compute", False)
        and config.cuda_graph_impl != "full_iteration"
        and (
            set(config.cuda_graph_modules) - WITHOUT_DELAY
            or not config.cuda_graph_modules
            or weights_in_graphs(model_config, config.cuda_graph_modules)
        )
    ):
        raise GraphConfigError(
            "delay_wgrad_compute=True parts the gradients of weights from a layer's backward, which "
            "Encore's graphs of layers keep together: set it False, capture nothing whose weights "
            "are delayed (cuda_graph_modules=['moe_router'], without shared experts), or take "
            "full_iteration"
        )
    if (
        getattr(model_config, "overlap_moe_expert_parallel_comm", False)
        and config.cuda_graph_impl == "local"
        and (not config.cuda_graph_modules)
    ):
        raise GraphConfigError(
            "overlap_moe_expert_parallel_comm=True calls the parts of a layer and never the layer, "
            "whose graphs would lie idle: name parts by cuda_graph_modules (attn, moe_router)"
        )
    if getattr(model_config, "moe_enable_routing_replay", False) and (
        not config.cuda_graph_modules or {"moe", "moe_router"} & set(config.cuda_graph_modules)
    ):
        raise GraphConfigError(ROUTING_REPLAY + ", or capture no router (cuda_graph_modules=['attn'])")
    if getattr(model_config, "fp4", None):
        found = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
        if found is None or found < FP4_NEEDS:
            raise GraphConfigError(
                f"fp4={model_config.fp4!r} needs a GPU of compute capability "
                f"{'.'.join(map(str, FP4_NEEDS))}, found {found}: use fp8, or bf16"
            )


def generators() -> list[torch.Generator]:
    """The states of Megatron's (or Transformer Engine's) tracker, which graphs must register.

    Raises GraphConfigError where the tracker keeps its states on the host: a replay would draw the same numbers again.
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


def _surroundings(settings: Collection[Any]) -> AmbientState | None:
    """What a capture must know of selective recompute, and of a precision below 16 bits, Transformer Engine's."""
    precision: AmbientState | None = None
    if any(getattr(one, "fp8", None) or getattr(one, "fp4", None) for one in settings):
        from graph_cache.adapters.transformer_engine.ambient_state import Fp8AmbientState  # fp8 layers are made of it

        precision = Fp8AmbientState()
    recomputes = any(getattr(one, "recompute_granularity", None) for one in settings)
    return MegatronAmbientState(precision) if recomputes else precision


def is_param_gather(hook: Hook) -> bool:
    """Whether this is the hook by which Megatron's DDP waits for a module's parameters (overlap_param_gather)."""
    return getattr(hook, "__module__", "") == distributed_data_parallel.__name__


class AuxLosses(Mapping[str, Tensor]):
    """Megatron's sums of auxiliary losses, which routers add to, and the scale of their gradients: those that there are
    at the time of asking.
    """

    def __getitem__(self, name: str) -> Tensor:
        return self._there()[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._there())

    def __len__(self) -> int:
        return len(self._there())

    def _there(self) -> dict[str, Tensor]:
        found = self._sums() | {"main_loss_backward_scale": moe_utils.MoEAuxLossAutoScaler.main_loss_backward_scale}
        return {name: value for name, value in found.items() if isinstance(value, Tensor)}

    def _sums(self) -> dict[str, Tensor | None]:
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
            f"{part.name} has hooks inside that a replay would leave out: "
            f"{', '.join(sorted(names))}; remove them, or leave this part out by "
            "cuda_graph_modules"
        )
