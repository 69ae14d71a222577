"""Rules that reject unsupported combinations of graph settings, each with what to change.

A rule takes a resolved config and returns an error message, or None. The rules are Megatron-Core's, except that `local`
without inference graphs is allowed here and means training only.
"""

from __future__ import annotations

from typing import Protocol

from graph_cache.errors import GraphConfigError


class GraphSettings(Protocol):
    """The fields of MegatronGraphConfig that the rules read."""

    @property
    def cuda_graph_impl(self) -> str: ...

    @property
    def inference_cuda_graph_scope(self) -> str: ...

    @property
    def cuda_graph_modules(self) -> tuple[str, ...]: ...

    @property
    def training(self) -> bool: ...

    @property
    def num_moe_experts(self) -> int | None: ...

    @property
    def moe_layer_freq(self) -> int | tuple[int, ...]: ...

    @property
    def moe_pad_expert_input_to_capacity(self) -> bool: ...

    @property
    def is_hybrid_model(self) -> bool: ...

    @property
    def moe_dropless(self) -> bool: ...

    @property
    def recompute_granularity(self) -> str | None: ...

    @property
    def cpu_offloading(self) -> bool: ...

    @property
    def check_for_nan_in_loss_and_grad(self) -> bool: ...

    @property
    def use_te_rng_tracker(self) -> bool: ...

    @property
    def use_cudagraphable_rng(self) -> bool: ...

    @property
    def expandable_segments(self) -> bool: ...

    @property
    def nccl_graph_register(self) -> bool: ...

    @property
    def model_facts_known(self) -> bool: ...


def refuse_contradictions(config: GraphSettings) -> None:
    """Raise one GraphConfigError that lists every rule `config` breaks, if any."""
    rules = _RULES + _MODEL_RULES if config.model_facts_known else _RULES
    broken = [message for rule in rules if (message := rule(config)) is not None]
    if broken:
        raise GraphConfigError("\n".join(broken))


def _inference_scope_needs_local(config: GraphSettings) -> str | None:
    impl, scope = config.cuda_graph_impl, config.inference_cuda_graph_scope
    if impl == "local" or scope == "none":
        return None
    return (
        f"cuda_graph_impl={impl!r} has no inference graphs, but inference_cuda_graph_scope is {scope!r}: "
        "set cuda_graph_impl='local', or inference_cuda_graph_scope='none'"
    )


def _full_iteration_has_no_parts(config: GraphSettings) -> str | None:
    if config.cuda_graph_impl != "full_iteration" or not config.cuda_graph_modules:
        return None
    return (
        f"cuda_graph_impl='full_iteration' captures the whole iteration, but cuda_graph_modules is "
        f"{list(config.cuda_graph_modules)}: leave the modules empty, or set cuda_graph_impl='local'"
    )


def _moe_modules_need_experts(config: GraphSettings) -> str | None:
    moe = [module for module in config.cuda_graph_modules if module.startswith("moe")]
    if not moe or _has_experts(config):
        return None
    return f"cuda_graph_modules has {moe}, but num_moe_experts is {config.num_moe_experts}: use 'mlp' for a dense model"


def _moe_whole_or_router(config: GraphSettings) -> str | None:
    if not {"moe", "moe_router"} <= set(config.cuda_graph_modules):
        return None
    return "cuda_graph_modules has both 'moe', the whole MoE layer, and 'moe_router', a part of it: choose one"


def _moe_needs_fixed_shapes(config: GraphSettings) -> str | None:
    fixed = config.moe_pad_expert_input_to_capacity or config.moe_dropless
    if "moe" not in config.cuda_graph_modules or fixed or not _has_experts(config):
        return None
    return (
        "cuda_graph_modules has 'moe', whose shapes depend on the routing: set moe_pad_expert_input_to_capacity=True "
        "(drop-and-pad), cuda_graph_moe_dropless=True for experts on one device, or capture 'moe_router' instead"
    )


def _preprocess_needs_router(config: GraphSettings) -> str | None:
    if "moe_preprocess" not in config.cuda_graph_modules or "moe_router" in config.cuda_graph_modules:
        return None
    return "cuda_graph_modules has 'moe_preprocess' without 'moe_router', which comes before it: add 'moe_router'"


def _mlp_needs_dense_layers(config: GraphSettings) -> str | None:
    freq = config.moe_layer_freq
    all_moe = _has_experts(config) and (freq == 1 if isinstance(freq, int) else all(freq))
    if "mlp" not in config.cuda_graph_modules or not all_moe or config.is_hybrid_model:
        return None
    return "cuda_graph_modules has 'mlp', but every layer is an MoE layer: use 'moe' or 'moe_router'"


def _full_recompute_needs_full_iteration(config: GraphSettings) -> str | None:
    outside = config.cuda_graph_impl in ("none", "full_iteration")
    if outside or not config.training or config.recompute_granularity != "full":
        return None
    return (
        f"recompute_granularity='full' recomputes layers outside the graphs of cuda_graph_impl="
        f"{config.cuda_graph_impl!r}: set recompute_granularity='selective', or cuda_graph_impl='full_iteration'"
    )


def _offloading_needs_eager(config: GraphSettings) -> str | None:
    if config.cuda_graph_impl == "none" or not config.cpu_offloading:
        return None
    return "cpu_offloading moves storage that graphs read: set cpu_offloading=False, or cuda_graph_impl='none'"


def _dropout_needs_a_registered_generator(config: GraphSettings) -> str | None:
    rates = [name for name in ("hidden_dropout", "attention_dropout") if getattr(config, name) > 0]
    safe = config.use_te_rng_tracker or config.use_cudagraphable_rng
    if config.cuda_graph_impl == "none" or not config.training or not rates or safe:
        return None
    return (
        f"{' and '.join(rates)} above 0 in a graph would replay the same mask every time: set use_te_rng_tracker=True "
        "or use_cudagraphable_rng=True if the generators can be registered with a graph, set dropout to 0, "
        "or set training=False for inference only"
    )


def _nan_checks_read_the_host(config: GraphSettings) -> str | None:
    checked = config.check_for_nan_in_loss_and_grad and config.training
    if config.cuda_graph_impl != "full_iteration" or not checked:
        return None
    return (
        "check_for_nan_in_loss_and_grad synchronises with the device, which a full-iteration graph cannot do: "
        "set check_for_nan_in_loss_and_grad=False and return torch.isfinite(loss) with the loss, a check on the "
        "device; or set cuda_graph_impl='local'"
    )


def _expandable_segments_and_nccl(config: GraphSettings) -> str | None:
    if config.cuda_graph_impl != "transformer_engine" or not config.expandable_segments:
        return None
    if not config.nccl_graph_register:
        return None
    return (
        "cuda_graph_impl='transformer_engine' with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True makes NCCL "
        "register memory that moves: set NCCL_GRAPH_REGISTER=0 in the environment, or turn expandable segments off"
    )


def _has_experts(config: GraphSettings) -> bool:
    return (config.num_moe_experts or 0) > 1


_RULES = (
    _inference_scope_needs_local,
    _full_iteration_has_no_parts,
    _moe_whole_or_router,
    _preprocess_needs_router,
    _full_recompute_needs_full_iteration,
    _offloading_needs_eager,
    _dropout_needs_a_registered_generator,
    _nan_checks_read_the_host,
    _expandable_segments_and_nccl,
)

# Rules that depend on the model, which a training engine first sees at `attach`.
_MODEL_RULES = (_moe_modules_need_experts, _moe_needs_fixed_shapes, _mlp_needs_dense_layers)
