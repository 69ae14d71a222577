"""Choose the parts of a Megatron-Core model to capture: whole layers, or the submodules in `cuda_graph_modules`.

Finds TransformerLayers and MambaLayers in a GPTModel, a HybridModel, a TransformerBlock, behind wrappers
(DistributedDataParallel, Float16Module), and in several model chunks.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from megatron.core import parallel_state
from megatron.core.models.common.vision_module.vision_module import VisionModule
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import nn

from graph_cache.adapters.megatron.moe_dispatch import DispatchState, eager_reason
from graph_cache.errors import GraphConfigError
from graph_cache.training.attached import Part

logger = logging.getLogger(__name__)

WRAPPER_PREFIX = "module."  # prefix that a wrapper adds to the names of its submodules


def layers_of(models: Sequence[nn.Module]) -> list[Part]:
    """Return each whole layer as a part, in execution order. With several chunks, names start with the chunk."""
    found = []
    for index, model in enumerate(models):
        chunk = f"chunks.{index}." if len(models) > 1 else ""
        nested: set[nn.Module] = set()
        for path, module in model.named_modules():
            if isinstance(module, (TransformerLayer, MambaLayer)) and module not in nested:
                nested.update(module.modules())
                name = chunk + _without_wrappers(path)
                found.append(Part(name or type(module).__name__, module, chunk=index))
    return found


def _without_wrappers(path: str) -> str:
    while path.startswith(WRAPPER_PREFIX):
        path = path.removeprefix(WRAPPER_PREFIX)
    return path


def encoders_of(models: Sequence[nn.Module]) -> list[nn.Module]:
    """Return the vision encoders: Megatron's VisionModules, and what a multimodal model calls `vision_model`."""
    found = []
    for model in models:
        for module in model.modules():
            named = getattr(module, "vision_model", None)
            found += [module] if isinstance(module, VisionModule) else []
            found += [named] if isinstance(named, nn.Module) else []
    return list(dict.fromkeys(found))


def encoder_blocks(models: Sequence[nn.Module]) -> list[tuple[str, nn.Module, TransformerBlock]]:
    """Return (name, encoder, block) of each TransformerBlock in a vision encoder, named like layers."""
    owners = {
        block: one for one in encoders_of(models) for block in one.modules() if isinstance(block, TransformerBlock)
    }
    return [
        ((f"chunks.{index}." if len(models) > 1 else "") + _without_wrappers(path), owners[module], module)
        for index, model in enumerate(models)
        for path, module in model.named_modules()
        if module in owners and isinstance(module, TransformerBlock)
    ]


def section_of(models: Sequence[nn.Module], *, encoder: bool) -> list[Part]:
    """Return the whole layers of the vision encoders, or all other whole layers."""
    inside = {module for one in encoders_of(models) for module in one.modules()}
    return [layer for layer in layers_of(models) if (layer.module in inside) == encoder]


def encoder_parts_of(models: Sequence[nn.Module], modules: Sequence[str]) -> list[Part]:
    """Return the parts of the vision encoders to capture; none on a pipeline stage without an encoder.

    Raises GraphConfigError if a model on one stage has no encoder.
    """
    layers = section_of(models, encoder=True)
    if not layers:
        if _is_pipeline_stage():
            return []
        names = ", ".join(type(model).__name__ for model in models)
        raise GraphConfigError(
            f"vision_cuda_graph_impl is set, but {names} has no vision encoder with TransformerLayers: leave it out"
        )
    return _named_parts(layers, modules)


def parts_of(models: Sequence[nn.Module], modules: Sequence[str]) -> list[Part]:
    """Return the parts to capture outside of vision encoders. `modules`: Megatron's names; empty for whole layers.

    If `moe_preprocess` can't be captured, it stays eager with a warning. Raises GraphConfigError for models without
    layers and for modules that no layer has, except on a pipeline stage, which may have none.
    """
    layers = section_of(models, encoder=False)
    if not layers:
        if _is_pipeline_stage() or encoders_of(models):
            return []
        names = ", ".join(type(model).__name__ for model in models)
        raise GraphConfigError(
            f"{names}: found no TransformerLayer and no MambaLayer to capture, give attach() a "
            "Megatron-Core model that has some, or name submodules with modules=…"
        )
    found = _named_parts(layers, modules)
    if not found and not _is_pipeline_stage():
        raise GraphConfigError(
            f"cuda_graph_modules={','.join(modules)}: none of the {len(layers)} layers has one of "
            f"these ({', '.join(sorted({type(layer.module).__name__ for layer in layers}))})"
        )
    return found


def _named_parts(layers: Sequence[Part], modules: Sequence[str]) -> list[Part]:
    if not modules:
        return list(layers)
    return [
        part._replace(chunk=layer.chunk) for layer in layers for part in _layer_parts(layer.name, layer.module, modules)
    ]


def _is_pipeline_stage() -> bool:
    return parallel_state.is_initialized() and parallel_state.get_pipeline_model_parallel_world_size() > 1


def _layer_parts(path: str, layer: nn.Module, modules: Sequence[str]) -> Iterator[Part]:
    """Yield the parts of one layer. A TransformerLayer has one method for attention and one for the MLP."""
    if isinstance(layer, MambaLayer):
        if "mamba" in modules:
            yield Part(path, layer)
        return
    has_attention = not isinstance(layer.self_attention, IdentityOp)
    if "attn" in modules and has_attention:
        yield Part(
            f"{path}.attn",
            layer,
            "_forward_attention",
            (layer.input_layernorm, layer.self_attention, layer.pre_cross_attn_layernorm, layer.cross_attention),
        )
    is_moe = isinstance(layer.mlp, MoELayer)
    mlp_name = "moe" if is_moe else "mlp"
    if mlp_name in modules and not isinstance(layer.mlp, IdentityOp):
        yield Part(f"{path}.{mlp_name}", layer, "_forward_mlp", (layer.pre_mlp_layernorm, layer.mlp))
    elif is_moe and "moe_router" in modules:
        yield from _router_parts(path, layer)
        if "moe_preprocess" in modules:
            yield from _preprocess_parts(path, layer.mlp)


def _preprocess_parts(path: str, layer: MoELayer) -> Iterator[Part]:
    """Yield the token dispatcher's work before communication."""
    reason = eager_reason(layer)
    if reason:  # a warning, not an error: Megatron 0.16 adds moe_preprocess to moe_router by itself
        logger.warning("%s.moe_preprocess runs eager: %s", path, reason)
        return
    projection = getattr(layer, "fc1_latent_proj", None) or nn.Identity()  # the only weights that preprocess uses
    yield Part(f"{path}.moe_preprocess", layer, "preprocess", (projection,), carry=DispatchState(layer))


def _router_parts(path: str, layer: nn.Module) -> Iterator[Part]:
    """Yield the parts before the dispatch: the norm, the router, and shared experts that do not overlap with it."""
    if not isinstance(layer.pre_mlp_layernorm, IdentityOp):
        yield Part(f"{path}.pre_mlp_layernorm", layer.pre_mlp_layernorm)
    yield Part(f"{path}.moe_router", layer.mlp.router)
    if layer.mlp.use_shared_expert and not layer.mlp.shared_expert_overlap:
        yield Part(f"{path}.shared_experts", layer.mlp.shared_experts)
