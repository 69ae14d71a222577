"""The engine's exceptions, one tree.

EngineError
├── ConfigError            settings that can't be meant (also ValueError)
├── ModelError             a model that can't be found, read or supported
├── RequestError           a request that can't be accepted (also ValueError); .param names the field
│   └── PromptTooLong      a prompt that can never fit
├── QueueFull              accepted nothing: try again later
├── ReaderTooSlow          a stream whose reader left too much unread; its sequences were aborted
├── WeightUpdateError      an update that was refused whole; the old weights still serve
└── EngineDead             the loop has ended; nothing more will be answered
"""

from __future__ import annotations


class EngineError(Exception):
    """Anything the engine refuses or fails at, with a message that says what to do."""


class ConfigError(EngineError, ValueError):
    """A setting that can't be meant."""


class ModelError(EngineError):
    """A model that can't be found, read or supported."""


class RequestError(EngineError, ValueError):
    """A request that can't be accepted; `param` names the field at fault, where one is."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """Prompt and output together exceed the context or the KV cache."""


class QueueFull(EngineError):
    """The waiting queue is at its bound; nothing was accepted."""


class ReaderTooSlow(EngineError):
    """A stream's reader left more unread than is kept for it; its sequences were aborted."""


class WeightUpdateError(EngineError):
    """An update that was refused whole; the weights are as they were."""


class EngineDead(EngineError):
    """The engine loop has ended or hangs; pending requests end with this."""
