"""API keys: how one is made, and the line that a server keeps of it."""

from __future__ import annotations

import hashlib
import re
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from specdec.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")
_PREFIX = "sd-"
_SECRET_BYTES = 32
_RATES = ("requests_per_minute", "tokens_per_minute", "concurrent_requests")


@dataclass(frozen=True)
class ApiKey:
    """What a server keeps of a key, which is not the key.

    Attributes:
        name: whose it is. Keys of one name share limits and cached prompts.
        digest: SHA-256 of the key.
        expires: from when on it is no longer good; None is never.
        models: names of the models that it may use; None is all.
        requests_per_minute: in place of the server's own limit; None leaves that.
        tokens_per_minute: likewise.
        concurrent_requests: likewise.
    """

    name: str
    digest: bytes
    expires: datetime | None = None
    models: frozenset[str] | None = None
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    concurrent_requests: int | None = None

    def expired(self, now: datetime) -> bool:
        """Whether it is too late to use it."""
        return self.expires is not None and now >= self.expires

    def line(self) -> str:
        """As it stands in a file of keys; ``parse_line`` reads it."""
        head = f"{self.name}:sha256:{self.digest.hex()}"
        if self.expires is not None:
            head += f":{self.expires.astimezone(UTC):%Y-%m-%dT%H:%M:%SZ}"
        options = [] if self.models is None else ["models=" + ",".join(sorted(self.models))]
        rates = ((name, getattr(self, name)) for name in _RATES)
        options += [f"{name}={value}" for name, value in rates if value is not None]
        return " ".join([head, *options])


def new_secret() -> str:
    """A key of 256 random bits."""
    return _PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest_of(secret: str) -> bytes:
    """What is kept of a key.

    A plain hash, which is enough for 256 random bits: there is no list of likely keys that a slow
    one would make expensive to try.
    """
    return hashlib.sha256(secret.encode("utf-8", "surrogatepass")).digest()


def parse_lines(text: str) -> Iterator[ApiKey]:
    """The keys of a file; empty lines and those that begin with ``#`` are passed over.

    Raises:
        ConfigError: names the line, and not what is in it.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip() and not line.lstrip().startswith("#"):
            try:
                yield parse_line(line)
            except ConfigError as error:
                raise ConfigError(f"line {number}: {error}") from error


def parse_line(line: str) -> ApiKey:
    """``name:sha256:DIGEST[:EXPIRY] [models=a,b] [requests_per_minute=N] …``.

    An expiry is a time as ``2027-01-31T12:00:00Z``, or a date, the last one on which the key is
    good (UTC).

    Raises:
        ConfigError: says what is wrong, without the line: somebody may have put the key itself in.
    """
    head, *options = line.split()
    name, algorithm, digest, *expiry = [*head.split(":", 3), "", ""][:4]
    if not _NAME.fullmatch(name):
        raise ConfigError("a key's name has 1 to 64 letters, digits, and any of . _ @ -")
    if algorithm != "sha256" or not _DIGEST.fullmatch(digest):
        raise ConfigError(f"key {name}: expected 'sha256:' and 64 hexadecimal digits")
    values: dict[str, int] = {}
    models: frozenset[str] | None = None
    for option in options:
        key, _, value = option.partition("=")
        if key == "models" and value:
            models = frozenset(value.split(","))
        elif key in _RATES and value.isascii() and value.isdecimal() and int(value) > 0:
            values[key] = int(value)
        else:
            raise ConfigError(f"key {name}: expected models=…, or one of {_RATES} and a number")
    return ApiKey(
        name, bytes.fromhex(digest), _expiry(name, "".join(expiry)), models=models, **values
    )


def _expiry(name: str, text: str) -> datetime | None:
    if not text:
        return None
    try:
        when = datetime.fromisoformat(text)
    except ValueError as error:
        raise ConfigError(f"key {name}: the expiry is no date or time") from error
    if len(text) <= len("2027-01-31"):
        return when.replace(tzinfo=UTC) + timedelta(days=1)
    return when if when.tzinfo is not None else when.replace(tzinfo=UTC)
