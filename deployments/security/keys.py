"""The keys that are good, and the search for the one that a request came with."""

from __future__ import annotations

import hmac
import logging
import os
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal

from deployments.security.settings import KeySettings
from specdec.api_keys import ApiKey, digest_of, parse_lines
from specdec.errors import ConfigError

log = logging.getLogger("ray.serve")


class KeyRing:
    """Keys of a file and of an environment variable.

    A file that changed is read again, so that a key can be added or withdrawn without a restart.
    One that cannot be read then leaves the keys as they were, and the log says so.
    """

    def __init__(
        self,
        settings: KeySettings,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        """Args:
            settings: where the keys are.
            clock: seconds, to look at the file now and then.
            now: to tell which keys have expired.

        Raises:
            ConfigError: the keys cannot be read, or there are none.
        """
        self._settings = settings
        self._clock = clock
        self._now = now
        self._fixed = self._from_environment()
        self._stamp = self._file_stamp()
        self._keys = self._fixed + self._from_file()
        self._looked = clock()
        if not self._keys:
            raise ConfigError("gateway.security.keys: there is no key, so nobody could come in")

    def find(self, secret: str) -> ApiKey | Literal["expired"] | None:
        """The key, or why it is none. Takes as long for one as for another.

        Every digest is compared, whichever fits, each in constant time; what the digests are of
        is not known to who guesses.
        """
        self._reload()
        digest = digest_of(secret)
        fitting = [key for key in self._keys if hmac.compare_digest(key.digest, digest)]
        now = self._now()
        good = [key for key in fitting if not key.expired(now)]
        return good[0] if good else "expired" if fitting else None

    def _reload(self) -> None:
        if self._settings.file is None or self._clock() - self._looked < self._settings.reload_s:
            return
        self._looked = self._clock()
        try:
            stamp = self._file_stamp()
            if stamp != self._stamp:
                self._keys = self._fixed + self._from_file()
                self._stamp = stamp
                log.info("API keys read again: %d", len(self._keys))
        except ConfigError as error:
            log.error("the API keys stay as they were: %s", error)

    def _from_environment(self) -> list[ApiKey]:
        name = self._settings.environment
        if name is None:
            return []
        text = os.environ.get(name)
        if text is None:
            raise ConfigError(
                f"gateway.security.keys.environment: {name} is not set where the gateway runs"
            )
        try:
            return list(parse_lines(text))
        except ConfigError as error:
            raise ConfigError(f"gateway.security.keys.environment: {name}: {error}") from error

    def _from_file(self) -> list[ApiKey]:
        path = self._settings.file
        if path is None:
            return []
        try:
            return list(parse_lines(path.read_text(encoding="utf-8")))
        except (OSError, UnicodeDecodeError, ConfigError) as error:
            raise ConfigError(f"gateway.security.keys.file: {path}: {error}") from error

    def _file_stamp(self) -> tuple[int, int, int] | None:
        path = self._settings.file
        if path is None:
            return None
        try:
            stat = path.stat()
        except OSError as error:
            raise ConfigError(f"gateway.security.keys.file: {path}: {error}") from error
        return stat.st_mtime_ns, stat.st_size, stat.st_ino
