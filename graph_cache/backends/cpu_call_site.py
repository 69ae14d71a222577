"""Describe the code that reads a tensor on the host, for the message of a refused capture."""

from __future__ import annotations

import os
import sys
from types import FrameType

import torch

from graph_cache.guards.ownership import CORE, TORCH

# What to do where code of a library reads, by the end of the file's path.
ADVICE = {
    os.path.join("transformers", "masking_utils.py"): (
        "Pass a mask of four dimensions as attention_mask, and position_ids: it is used as it is. Or attach the layers"
    ),
    os.path.join("torch", "distributions", "distribution.py"): "Construct the distribution with validate_args=False",
}


def host_read_refusal(what: str) -> str:
    """Return the message for a host read by `what`: where it is, and what to do instead."""
    place, optimizer, found = "", None, ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        caller = frame.f_locals.get("self")
        if optimizer is None and isinstance(caller, torch.optim.Optimizer):
            optimizer = type(caller).__name__
        found = found or next((text for end, text in ADVICE.items() if frame.f_code.co_filename.endswith(end)), "")
        if not place and not frame.f_code.co_filename.startswith((TORCH, CORE)):
            place = f" at {frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    advice = found or "Compute with tensors, or pass the value as an argument that is not a tensor"
    if optimizer is not None:
        what = f"{optimizer}.step() ({what})"
        advice = f"Step {optimizer} outside of the captured function, or on a GPU create it with capturable=True"
    return f"{what}: the host reads a tensor's values here{place}, and a replay would not read them again. {advice}"
