"""Models: torch modules built from a config.json, with attention passed in as a callable.

`config_from_folder` reads the config, `build_model` creates the model; registry.py lists the supported architectures.
"""

from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.registry import build_model, config_from_dict, config_from_folder, supported_architectures

__all__ = [
    "Decoder",
    "ModelConfig",
    "build_model",
    "config_from_dict",
    "config_from_folder",
    "supported_architectures",
]
