"""The prefix cache's settings: frozen, validated once. Every default is written here only."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Self

from pydantic import BaseModel, ConfigDict, Field, SecretStr, field_validator, model_validator

from prefix_cache.breaker import CircuitBreaker
from prefix_cache.codec import Compression
from prefix_cache.errors import StoreConfigError
from prefix_cache.packing import zstd
from prefix_cache.store import StoreOptions, check_scheme

_SECRET_BYTES = 16
NAMESPACE = r"^[A-Za-z0-9._-]{1,64}$"
#: An hour, and ten years: what is longer was meant otherwise.
LONGEST_MS, LONGEST_S = 3_600_000, 10 * 365 * 24 * 3600


class StoreSettings(BaseModel):
    """What every use of a store is told.

    Attributes:
        url: ``lmdb:///folder``, ``redis://``, ``rediss://``, ``unix://`` or ``memory://``; see
            prefix_cache/stores/. Never shown, as it may hold a password.
        url_file: a file that holds it instead, as a mounted secret; read when the store is opened.
        namespace: uses of different namespaces do not see each other's entries.
        ttl_s: an entry that was not used for so long is gone.
        max_bytes: size of the LMDB file or of the entries in memory. A Redis server has its own
            ``maxmemory``.
        secret: with it entries carry a MAC, and only those of the same secret are believed. To be
            set wherever others may write to the store. At least 16 bytes.
        secret_file: a file that holds it instead.
        breaker_failures: failures in a row after which the store is left alone.
        breaker_backoff_s: for how long, doubled with each failed try.
        breaker_backoff_cap_s: up to so long.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", allow_inf_nan=False, hide_input_in_errors=True
    )

    url: SecretStr
    url_file: Path | None = None
    namespace: str = Field(pattern=NAMESPACE)
    ttl_s: float = Field(gt=0, le=LONGEST_S)
    max_bytes: int = Field(ge=2**20)
    secret: SecretStr | None = None
    secret_file: Path | None = None
    breaker_failures: int = Field(5, ge=1)
    breaker_backoff_s: float = Field(1.0, gt=0)
    breaker_backoff_cap_s: float = Field(60.0, gt=0)

    @field_validator("url")
    @classmethod
    def _kind_is_known(cls, value: SecretStr) -> SecretStr:
        check_scheme(value.get_secret_value())
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.secret is not None and self.secret_file is not None:
            raise ValueError("secret and secret_file exclude each other")
        if self.url_file is not None and "url" in self.model_fields_set:
            raise ValueError("url and url_file exclude each other")
        if self.secret is not None:
            _long_enough(self.secret.get_secret_value().encode(), "secret")
        if self.breaker_backoff_s > self.breaker_backoff_cap_s:
            raise ValueError("breaker_backoff_s is above breaker_backoff_cap_s")
        return self

    def store_url(self) -> str:
        """Where blocks are kept, from ``url`` or ``url_file``.

        Raises:
            StoreConfigError: the file cannot be read, or holds no URL of a known kind.
        """
        if self.url_file is None:
            return self.url.get_secret_value()
        try:
            url = self.url_file.read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise StoreConfigError(f"url_file: {self.url_file} cannot be read") from error
        check_scheme(url)
        return url

    def secret_bytes(self) -> bytes:
        """The secret, or nothing where none is set.

        Raises:
            StoreConfigError: the file cannot be read, or holds too little.
        """
        if self.secret is not None:
            return self.secret.get_secret_value().encode()
        if self.secret_file is None:
            return b""
        try:
            return _long_enough(self.secret_file.read_bytes().strip(), "secret_file")
        except OSError as error:
            raise StoreConfigError(f"secret_file: {error}") from error

    def store_options(self) -> StoreOptions:
        """What a store is told of all this."""
        return StoreOptions(self.namespace, self.ttl_s, self.max_bytes)

    def breaker(self, clock: Callable[[], float] = time.monotonic) -> CircuitBreaker:
        """A new breaker for calls to the store."""
        return CircuitBreaker(
            self.breaker_failures, self.breaker_backoff_s, self.breaker_backoff_cap_s, clock
        )


class PrefixCacheSettings(StoreSettings):
    """Where blocks are kept, and what that may cost; see also StoreSettings.

    Attributes:
        read_deadline_ms: how long a prompt may wait for its reading to begin, and then for each
            24 MB or so of its blocks: a store that answers is read to the end, one that does not
            costs this much.
        write_deadline_ms: of a write, which nobody waits for.
        queue_bytes: blocks that wait to be written; more are dropped.
        compression: ``zstd`` stores a sixth more float32 blocks in the same room, a third more of
            bfloat16, and reads them later than ``none`` on any but slow networks.
    """

    url: SecretStr = SecretStr("lmdb:///~/.cache/specdec/prefix")
    namespace: str = Field("kv", pattern=NAMESPACE)
    read_deadline_ms: float = Field(500, gt=0, le=LONGEST_MS)
    write_deadline_ms: float = Field(5000, gt=0, le=LONGEST_MS)
    ttl_s: float = Field(7 * 24 * 3600, gt=0, le=LONGEST_S)
    max_bytes: int = Field(4 * 2**30, ge=2**20)
    queue_bytes: int = Field(256 * 2**20, ge=1)
    compression: Compression = "none"

    @field_validator("compression")
    @classmethod
    def _compression_is_installed(cls, value: Compression) -> Compression:
        if value == "zstd":
            zstd()
        return value


def _long_enough(secret: bytes, name: str) -> bytes:
    if len(secret) < _SECRET_BYTES:
        raise StoreConfigError(f"{name} must have at least {_SECRET_BYTES} bytes")
    return secret
