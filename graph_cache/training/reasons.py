"""Reasons for eager calls in training, as they are counted. `docs/refusals.md` explains each."""

from __future__ import annotations

from graph_cache.core.keys import CAPTURE_FAILED, EVICTED, NOT_CAPTURED, OTHER_THREAD, STALE, WARMING_UP

UNSEEN = "unseen_signature"
OTHER_PARAMETERS = "other_parameters"
NO_INSTANCE = "no_free_instance"
NO_MEMORY = "argument_without_memory"
ELSEWHERE = "argument_elsewhere"
OBJECT = "object_argument"
ARGUMENT_GRADIENT = "argument_gradient"
NO_GRAD = "no_gradient"
SAVED_TENSOR_HOOKS = "saved_tensor_hooks"
TRANSFORM = "transform"
COMPILED = "compiled"
CACHED_PARAMETRIZATION = "cached_parametrization"
PRECISION_AUTOCAST = "precision_autocast"
OTHER_BACKWARD = "other_backward"
HOOKS = "hooks_inside"

REASONS = (
    WARMING_UP,
    UNSEEN,
    OTHER_PARAMETERS,
    NO_INSTANCE,
    NO_MEMORY,
    ELSEWHERE,
    OBJECT,
    ARGUMENT_GRADIENT,
    NO_GRAD,
    SAVED_TENSOR_HOOKS,
    TRANSFORM,
    COMPILED,
    CACHED_PARAMETRIZATION,
    PRECISION_AUTOCAST,
    OTHER_BACKWARD,
    HOOKS,
    OTHER_THREAD,
    STALE,
    EVICTED,
    NOT_CAPTURED,
    CAPTURE_FAILED,
)
