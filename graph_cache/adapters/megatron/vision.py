"""Settings of a vision encoder's graphs, by the names of Megatron Bridge, checked by the rules of language models.

Pure Python: neither torch nor megatron is imported.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from graph_cache.adapters.megatron.config import MegatronGraphConfig
from graph_cache.errors import GraphConfigError
from graph_cache.utils.validation import is_whole_number

logger = logging.getLogger(__name__)

DEFAULT_SEQUENCE_LENGTH = 4096
IMPLS = ("none", "local", "transformer_engine")
MODULES = ("attn", "mlp")
DEFAULT_MAX_IMAGES = 64
# Reasons why a microbatch is not padded.
ABOVE_LARGEST = "above_largest_budget"
TOO_MANY_IMAGES = "too_many_images"
NAMES = (
    "vision_cuda_graph_impl",
    "vision_cuda_graph_scope",
    "max_vision_cuda_graph_seq_length",
    "vision_token_budgets",
    "vision_max_images",
)


@dataclass(frozen=True)
class VisionSettings:
    """Resolved settings of a vision encoder. See EngineConfig for the fields that they come from.

    `graphs`: implementation and modules. `max_length`: patches per microbatch; None: derive it. `budgets`: several
    token budgets, ascending; None: only the maximum length.
    """

    graphs: MegatronGraphConfig
    max_length: int | None = None
    budgets: tuple[int, ...] | None = None
    max_images: int = DEFAULT_MAX_IMAGES

    @property
    def is_explicit(self) -> bool:
        """Whether a length was given."""
        return bool(self.budgets or self.max_length)


def vision_settings(
    impl: Any, scope: Any, max_length: Any, budgets: Any, max_images: Any, *, warmup_steps: int
) -> VisionSettings:
    """Check the settings and return them resolved. Raises GraphConfigError that names the field as given."""
    try:
        graphs = MegatronGraphConfig(
            cuda_graph_impl=impl,
            inference_cuda_graph_scope="none",
            cuda_graph_modules=scope,
            cuda_graph_warmup_steps=warmup_steps,
            model_facts_known=False,
        )
    except GraphConfigError as error:
        text = str(error).replace("cuda_graph_modules", "vision_cuda_graph_scope")
        raise GraphConfigError(text.replace("cuda_graph_impl", "vision_cuda_graph_impl")) from error
    if graphs.cuda_graph_impl not in IMPLS:
        raise GraphConfigError(
            f"vision_cuda_graph_impl={impl!r} is not one of {', '.join(IMPLS)}: an iteration graph holds the encoder "
            "and the language model, set cuda_graph_impl='full_iteration' for it"
        )
    unsupported = [name for name in graphs.cuda_graph_modules if name not in MODULES]
    if unsupported:
        raise GraphConfigError(
            f"vision_cuda_graph_scope has {','.join(unsupported)}: the layers of a vision encoder have "
            f"{' and '.join(MODULES)}; leave it empty for whole layers"
        )
    if max_length is not None and not is_whole_number(max_length, 0):
        raise GraphConfigError(
            f"max_vision_cuda_graph_seq_length={max_length!r} must be a whole number of patches per microbatch; 0 or "
            "None: not given"
        )
    if not is_whole_number(max_images, 1):
        raise GraphConfigError(f"vision_max_images={max_images!r} must be a whole number of at least 1")
    return VisionSettings(graphs, max_length or None, _budgets(budgets, max_length), max_images)


def _budgets(given: Any, max_length: int | None) -> tuple[int, ...] | None:
    if given is None:
        return None
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise GraphConfigError(f"vision_token_budgets={given!r} must be a list of patches per microbatch")
    budgets = tuple(given)
    if not budgets or not all(is_whole_number(one, 1) for one in budgets) or sorted(set(budgets)) != list(budgets):
        raise GraphConfigError(f"vision_token_budgets={budgets!r} must be ascending whole numbers of at least 1")
    if max_length and budgets[-1] != max_length:
        raise GraphConfigError(
            f"vision_token_budgets={budgets!r} ends with another number than "
            f"max_vision_cuda_graph_seq_length={max_length}: leave one of them out"
        )
    return budgets


def vision_sequence_length(
    explicit: int | None = None,
    *,
    num_position_embeddings: int | None = None,
    spatial_merge_size: int | None = None,
    default: int = DEFAULT_SEQUENCE_LENGTH,
) -> int:
    """Return the largest number of patches per microbatch that graphs hold.

    `explicit` (`max_vision_cuda_graph_seq_length`) wins. Else it is the number of position embeddings divided by the
    square of the spatial merge size, with a warning; else `default`. 0 means "not given", as None does. Raises
    GraphConfigError for other values that are not whole numbers of at least 1.
    """
    values = {
        "max_vision_cuda_graph_seq_length": explicit,
        "num_position_embeddings": num_position_embeddings,
        "spatial_merge_size": spatial_merge_size,
        "default": default,
    }
    for name, value in values.items():
        if value is not None and not is_whole_number(value, 0 if name != "default" else 1):
            raise GraphConfigError(f"{name}={value!r} must be a whole number of at least 0, in patches per microbatch")
    if explicit:
        return explicit
    if not num_position_embeddings:
        return default
    merge = spatial_merge_size or 1
    derived = num_position_embeddings // merge**2
    if not derived:
        raise GraphConfigError(
            f"num_position_embeddings={num_position_embeddings} divided by the square of spatial_merge_size={merge} "
            "gives no patches: set max_vision_cuda_graph_seq_length"
        )
    logger.warning(
        "max_vision_cuda_graph_seq_length is not set: derived %d patches per microbatch from %d position embeddings "
        "and a spatial merge size of %d. Images may be larger (448 x 448 pixels are 784 patches of 16 x 16), and their "
        "microbatches run eager: set it to what your data needs, tune_token_budgets chooses",
        derived,
        num_position_embeddings,
        merge,
    )
    return derived


def token_budgets(
    settings: VisionSettings, *, num_position_embeddings: int | None, spatial_merge_size: int | None
) -> tuple[int, ...]:
    """Return an encoder's token budgets, ascending multiples of the square of its spatial merge size.

    Without budgets in the settings it is one, the maximum length. Raises GraphConfigError for a budget that holds no
    image.
    """
    merge = spatial_merge_size or 1
    given = settings.budgets or (
        vision_sequence_length(
            settings.max_length,
            num_position_embeddings=num_position_embeddings,
            spatial_merge_size=merge,
        ),
    )
    budgets = sorted({budget // merge**2 * merge**2 for budget in given})
    if not budgets[0]:
        raise GraphConfigError(
            f"vision_token_budgets or max_vision_cuda_graph_seq_length is below {merge**2} patches, the smallest image "
            f"of an encoder with spatial_merge_size={merge}: raise it"
        )
    return tuple(budgets)
