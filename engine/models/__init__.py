"""Models: what a config.json describes, as torch modules over an attention callable.

`config_from_folder` reads a description, `build_model` makes the model; registry.py lists what is supported.
"""

from engine.models.config import ModelConfig
from engine.models.dense import DenseModel
from engine.models.registry import build_model, config_from_dict, config_from_folder, supported_architectures

__all__ = [
    "DenseModel",
    "ModelConfig",
    "build_model",
    "config_from_dict",
    "config_from_folder",
    "supported_architectures",
]
