"""The engine's exception hierarchy::

    EngineError
    ├── ConfigError         invalid settings (also ValueError)
    ├── ModelError          a model that is missing, unreadable or unsupported
    │   └── NoTokenizer     a model without a usable tokenizer; token ids still work
    ├── RequestError        an invalid request (also ValueError)
    │   └── PromptTooLong   a prompt that can never fit
    ├── QueueFull           the request was not accepted: try again later
    ├── EnginePaused        the engine is paused and takes no new requests
    ├── ReaderTooSlow       too much unread output; the sequences were aborted
    ├── WeightUpdateError   a refused update; the old weights stay in use
    └── EngineDead          the engine loop has ended; no request is answered

Messages name the field or file at fault.
"""

from __future__ import annotations


class EngineError(Exception):
    """Base class of the engine's errors; the message says what to do."""


class ConfigError(EngineError, ValueError):
    """An invalid setting or combination of settings."""


class ModelError(EngineError):
    """A model that is missing, unreadable or unsupported."""


class NoTokenizer(ModelError):
    """The model has no usable tokenizer; prompts given as token ids still work."""


class RequestError(EngineError, ValueError):
    """An invalid request; `param` names the field at fault, or is None."""

    def __init__(self, message: str, param: str | None = None):
        super().__init__(message)
        self.param = param


class PromptTooLong(RequestError):
    """Prompt and output together exceed the context or the KV cache."""


class QueueFull(EngineError):
    """The waiting queue is full; the request was not accepted."""


class EnginePaused(EngineError):
    """The engine is paused; the request was not accepted, or its generation would not end before `resume`."""


class ReaderTooSlow(EngineError):
    """The reader of a stream left more output unread than the limit; its sequences were aborted."""


class WeightUpdateError(EngineError):
    """A weight update that was rejected as a whole; no weight was changed."""


class EngineDead(EngineError):
    """The engine loop has ended or hangs; pending requests fail with this error."""
