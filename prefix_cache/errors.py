"""The package's error tree. Every error that a caller may handle derives from PrefixCacheError."""

from __future__ import annotations

from enum import StrEnum


class PrefixCacheError(Exception):
    """Base of all errors raised on purpose by this package."""


class StoreConfigError(PrefixCacheError, ValueError):
    """A setting or a store's URL is wrong; the message names it and holds no credentials."""


class StoreFault(StrEnum):
    """What kept a store from doing what was asked."""

    UNAVAILABLE = "unavailable"
    TIMEOUT = "timeout"
    FULL = "full"


class StoreError(PrefixCacheError):
    """A store could not do what was asked. Whatever a client library raises ends up here.

    Attributes:
        fault: the kind.
    """

    def __init__(self, fault: StoreFault, message: str) -> None:
        super().__init__(f"{fault}: {message}")
        self.fault = fault


class Rejection(StrEnum):
    """Why stored bytes are not the block that was asked for."""

    TRUNCATED = "truncated"
    MAGIC = "magic"
    SCHEMA = "schema"
    IDENTITY = "identity"
    KEY = "key"
    TOKENS = "tokens"
    CHECKSUM = "checksum"
    MAC = "mac"
    COMPRESSION = "compression"


class FencedError(PrefixCacheError):
    """Another owner has the request by now, or it was removed: whoever gets this is to stop."""


class LeaseHeldError(PrefixCacheError):
    """Another owner has the request, and is taken to live.

    Attributes:
        left_s: seconds until it is not, unless it renews its lease.
        fence: of that owner.
    """

    def __init__(self, left_s: float, fence: int) -> None:
        super().__init__(f"another has the request for {left_s:.1f} s at least")
        self.left_s = left_s
        self.fence = fence


class CheckpointTooLarge(PrefixCacheError, ValueError):
    """A checkpoint has more bytes than one may have."""


class CheckpointRejected(PrefixCacheError):
    """Stored bytes are no sound checkpoint of that request: there is none.

    Attributes:
        reason: the first check that failed.
    """

    def __init__(self, reason: Rejection) -> None:
        super().__init__(f"stored checkpoint rejected: {reason}")
        self.reason = reason


class BlockRejected(PrefixCacheError):
    """Stored bytes failed verification: a miss.

    Attributes:
        reason: the first check that failed.
    """

    def __init__(self, reason: Rejection) -> None:
        super().__init__(f"stored block rejected: {reason}")
        self.reason = reason
