"""The engine's error tree. Every error that a caller may handle derives from SpecdecError."""

from __future__ import annotations


class SpecdecError(Exception):
    """Base of all errors raised on purpose by this package."""


class ConfigError(SpecdecError, ValueError):
    """A setting is unknown, of the wrong type or out of range; the message names it."""


class ModelError(SpecdecError):
    """The model cannot be found, loaded or served right."""


class ModelNotFoundError(ModelError):
    """No model under that name: neither alias, folder nor hub repository."""


class UnsupportedModelError(ModelError):
    """The attention hook does not reproduce this model's own forward; it is not served."""


class HeadsError(ModelError):
    """Draft heads are missing, malformed or made for another model; names the tensor."""


class RequestError(SpecdecError, ValueError):
    """A request is invalid. ``param`` names the field at fault, or is None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message)
        self.param = param


class ContextLengthError(RequestError):
    """Prompt and requested output do not fit the model's context or the KV pool."""


class QueueFullError(SpecdecError):
    """Too many requests wait; retry later."""


class NonFiniteError(SpecdecError):
    """The model produced NaN or infinite logits for one request; it alone fails."""


class GrammarError(SpecdecError):
    """A request's grammar cannot be followed any further; it alone fails."""


class IntegrityError(SpecdecError):
    """Pages and owners disagree. A bug: the engine must not go on."""
