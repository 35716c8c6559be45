"""Settings of who may come in, and how often."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from specdec.config import Settings


class KeySettings(Settings):
    """Where the API keys are. With neither, no key is asked for.

    Attributes:
        file: of lines as ``specdec keys new`` prints them. Read again when it changes.
        environment: name of an environment variable that holds such lines, split by newlines.
        reload_s: seconds between two looks at the file.
    """

    file: Path | None = None
    environment: str | None = Field(None, min_length=1)
    reload_s: float = Field(5, gt=0)

    @property
    def wanted(self) -> bool:
        """Whether a request needs a key."""
        return self.file is not None or self.environment is not None


class RateSettings(Settings):
    """How much a key may ask for, unless its own line says otherwise; None is no limit.

    Without keys, all callers together. Each gateway counts for itself: with several, a key gets up
    to so many times as much.

    Attributes:
        requests_per_minute: requests in any 60 seconds.
        tokens_per_minute: tokens of prompts and answers in any 60 seconds. A request counts with
            what it may use at most until it has ended, then with what it did use.
        concurrent_requests: requests at the same time, their streams included.
    """

    requests_per_minute: int | None = Field(None, ge=1)
    tokens_per_minute: int | None = Field(None, ge=1)
    concurrent_requests: int | None = Field(None, ge=1)


class CorsSettings(Settings):
    """Which web pages may call this server from a browser. None by default.

    Attributes:
        origins: as ``https://app.example.com``; ``*`` is every page.
        max_age_s: seconds for which a browser may remember the answer.
    """

    origins: tuple[str, ...] = ()
    max_age_s: int = Field(600, ge=0)


class SecuritySettings(Settings):
    """Who may come in, and how often."""

    keys: KeySettings = KeySettings()
    rates: RateSettings = RateSettings()
    cors: CorsSettings = CorsSettings()
