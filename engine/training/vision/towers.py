"""Find the vision towers of a transformers model, and the layers of towers and decoders that are captured."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from torch import nn

from engine.errors import ConfigError
from graph_cache.training.attached import Part

VISUAL = {"image", "video"}
# Names of a layer's submodules, by module name in the settings.
SUBMODULES = {"attn": ("attn", "self_attn", "attention"), "mlp": ("mlp", "feed_forward")}


def is_transformers(model: nn.Module) -> bool:
    """Return whether the model is one of transformers. If it is, transformers is already imported."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(model, transformers.PreTrainedModel)


def towers_of(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Return (path, module) of each vision tower in a transformers model; the path is "" if it is the model itself."""
    found: list[tuple[str, nn.Module]] = []
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside or not is_transformers(module):
            continue
        modalities = module.input_modalities
        names = {modalities} if isinstance(modalities, str) else set(modalities)
        if names <= VISUAL or is_packed_tower(module):  # Qwen2.5-VL's tower has the modalities of the whole model
            inside.update(module.modules())
            found.append((path, module))
    return found


def is_packed_tower(tower: nn.Module) -> bool:
    """Whether the tower takes images packed into one sequence, described by `grid_thw`, as Qwen's do."""
    needed = ("spatial_merge_size", "rotary_pos_emb", "blocks", "patch_embed")
    return all(hasattr(tower, name) for name in needed) and (is_windowed(tower) or interpolates(tower))


def is_windowed(tower: nn.Module) -> bool:
    """Whether some layers attend within windows, as in Qwen2.5-VL."""
    return hasattr(tower, "window_size") and hasattr(tower, "fullatt_block_indexes")


def interpolates(tower: nn.Module) -> bool:
    """Whether learned position embeddings are interpolated, as in Qwen3-VL."""
    return hasattr(tower, "num_grid_per_side") and hasattr(tower, "interpolation_mode")


def layer_parts(
    root: nn.Module, modules: Sequence[str], *, path: str = "", without: Sequence[nn.Module] = ()
) -> list[Part]:
    """Return the layers below `root`, or the submodules of each that `modules` names (`attn`, `mlp`), by path.

    Layers are transformers' GradientCheckpointingLayers, in order; those inside `without` are left out. Raises
    ConfigError for a name that no layer has.
    """
    from transformers.modeling_layers import GradientCheckpointingLayer

    excluded = {module for one in without for module in one.modules()}
    layers = []
    for name, layer in root.named_modules(prefix=path):
        if isinstance(layer, GradientCheckpointingLayer) and layer not in excluded:
            excluded.update(layer.modules())  # layers inside this one
            layers.append((name, layer))
    if not modules:
        return [Part(name, layer) for name, layer in layers]
    found = [part for name, layer in layers for part in _submodules(name, layer, modules)]
    missing = [name for name in modules if not any(_child(layer, name) for _, layer in layers)]
    if missing and layers:
        raise ConfigError(
            f"{','.join(missing)}: the layers of {type(root).__name__} have no such module, they have "
            f"{', '.join(sorted(name for name, _ in layers[0][1].named_children()))}"
        )
    return found


def _submodules(path: str, layer: nn.Module, modules: Sequence[str]) -> Iterator[Part]:
    for name in modules:
        child = _child(layer, name)
        if child is not None:
            yield Part(f"{path}.{child}", layer.get_submodule(child))


def _child(layer: nn.Module, name: str) -> str | None:
    """Return the name of the layer's submodule for a module name, or None."""
    children = dict(layer.named_children())
    return next((child for child in SUBMODULES.get(name, ()) if child in children), None)
