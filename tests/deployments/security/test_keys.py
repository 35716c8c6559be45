"""API keys: their lines, their file, and the search for one."""

from __future__ import annotations

import hmac
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from deployments.security.keys import KeyRing
from deployments.security.settings import KeySettings
from specdec.api_keys import ApiKey, digest_of, new_secret, parse_line, parse_lines
from specdec.errors import ConfigError

NOW = datetime(2027, 6, 1, 12, tzinfo=UTC)


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def ring(path: Path, clock: Clock | None = None) -> KeyRing:
    return KeyRing(KeySettings(file=path, reload_s=5), clock or Clock(), lambda: NOW)


def line(name: str, secret: str, expires: datetime | None = None) -> str:
    return ApiKey(name, digest_of(secret), expires).line()


def test_lines_come_back() -> None:
    keys = [
        ApiKey("ann", digest_of("a")),
        ApiKey("b.o-b_@x", digest_of("b"), NOW),
        ApiKey("eve", digest_of("e"), None, frozenset({"m", "org/n"}), 5, 7, 9),
    ]
    text = "# keys\n\n" + "\n".join(key.line() for key in keys) + "\n"
    assert list(parse_lines(text)) == keys


def test_a_date_is_the_last_day_on_which_a_key_is_good() -> None:
    key = parse_line(f"ann:sha256:{digest_of('a').hex()}:2027-05-31")
    assert not key.expired(datetime(2027, 5, 31, 23, 59, tzinfo=UTC))
    assert key.expired(datetime(2027, 6, 1, tzinfo=UTC))


@pytest.mark.parametrize(
    "bad",
    [
        "ann",
        "ann:sha256",
        "ann:sha256:abcd",
        "ann:md5:" + "0" * 64,
        ":sha256:" + "0" * 64,
        "an n:sha256:" + "0" * 64,
        "ann:sha256:" + "0" * 64 + ":soon",
        "ann:sha256:" + "0" * 64 + " modles=x",
        "ann:sha256:" + "0" * 64 + " requests_per_minute=0",
        "ann:sha256:" + "0" * 64 + " requests_per_minute=-1",
    ],
)
def test_a_bad_line_is_named_and_not_shown(bad: str) -> None:
    """Somebody may have put the key itself there."""
    with pytest.raises(ConfigError, match="line 2") as caught:
        list(parse_lines("\n" + bad + " sd-secret"))
    assert "sd-secret" not in str(caught.value)


def test_keys_are_found_expired_or_unknown(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text(
        "\n".join(
            [
                line("ann", "one"),
                line("ann", "two", NOW + timedelta(seconds=1)),
                line("bob", "old", NOW),
                line("eve", "again", NOW),
                line("eve", "again"),
            ]
        )
    )
    keys = ring(file)
    for secret, name in (("one", "ann"), ("two", "ann"), ("again", "eve")):
        found = keys.find(secret)
        assert isinstance(found, ApiKey)
        assert found.name == name
    assert keys.find("old") == "expired"
    for wrong in ("", "On", "one ", "ONE", digest_of("one").hex(), "\ud800", "é" * 10_000):
        assert keys.find(wrong) is None


def test_every_digest_is_compared_whichever_fits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An early end would tell by its time which key a guess comes close to."""
    file = tmp_path / "keys"
    file.write_text("\n".join(line(f"k{i}", str(i)) for i in range(50)))
    keys = ring(file)
    compared: list[bytes] = []
    compare = hmac.compare_digest

    def watched(left: bytes, right: bytes) -> bool:
        compared.append(left)
        return compare(left, right)

    monkeypatch.setattr(hmac, "compare_digest", watched)
    for secret in ("0", "49", "none"):
        compared.clear()
        keys.find(secret)
        assert len(compared) == len(set(compared)) == 50


def fastest_s(secrets: dict[str, str], find: Callable[[str], object]) -> dict[str, float]:
    """Seconds of a search for each, by turns, at its fastest: the rest is noise."""
    best = dict.fromkeys(secrets, float("inf"))
    for _ in range(300):
        for name, secret in secrets.items():
            began = time.perf_counter()
            find(secret)
            best[name] = min(best[name], time.perf_counter() - began)
    return best


def test_a_search_takes_as_long_for_a_wrong_key_as_for_a_good_one(tmp_path: Path) -> None:
    """By the clock. A search that ends where it finds something fails here by hundreds of times."""
    secrets = [new_secret() for _ in range(1000)]
    file = tmp_path / "keys"
    file.write_text(
        "\n".join(line(f"k{i}", s, NOW if i == 500 else None) for i, s in enumerate(secrets))
    )
    keys = ring(file)
    asked = {
        "first": secrets[0],
        "last": secrets[-1],
        "expired": secrets[500],
        "unknown": new_secret(),
        "nearly the first": secrets[0][:-1] + ("b" if secrets[0][-1] == "a" else "a"),
    }
    took = fastest_s(asked, keys.find)
    assert max(took.values()) < 1.15 * min(took.values()), took

    def hasty(secret: str) -> object:
        return next((key for key in keys._keys if key.digest == digest_of(secret)), None)

    hurried = fastest_s(asked, hasty)
    assert hurried["first"] < 0.1 * hurried["last"], "the clock would not show it"


def test_a_file_that_changes_is_read_again(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock()
    file.write_text(line("ann", "one"))
    keys = ring(file, clock)
    file.write_text(line("ann", "one") + "\n" + line("bob", "two"))
    assert keys.find("two") is None, "looked too often"
    clock.seconds = 6
    assert isinstance(keys.find("two"), ApiKey)
    file.write_text("broken")
    clock.seconds = 12
    assert isinstance(keys.find("two"), ApiKey), "a broken file locks everybody out"
    file.unlink()
    clock.seconds = 18
    assert isinstance(keys.find("two"), ApiKey)
    file.write_text(line("bob", "two"))
    clock.seconds = 24
    assert keys.find("one") is None, "a withdrawn key is good for ever"


def test_keys_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = KeySettings(environment="SPECDEC_TEST_KEYS")
    monkeypatch.delenv("SPECDEC_TEST_KEYS", raising=False)
    with pytest.raises(ConfigError, match="SPECDEC_TEST_KEYS is not set"):
        KeyRing(settings)
    monkeypatch.setenv("SPECDEC_TEST_KEYS", line("ann", "one"))
    assert isinstance(KeyRing(settings).find("one"), ApiKey)
    monkeypatch.setenv("SPECDEC_TEST_KEYS", "# none\n")
    with pytest.raises(ConfigError, match="nobody could come in"):
        KeyRing(settings)
    with pytest.raises(ConfigError, match="No such file"):
        ring(tmp_path / "missing")


def test_the_command_makes_a_key_that_the_server_takes(tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "specdec.cli.main", "keys", "new", "ann", "--days", "3"),
            *("--models", "m,n", "--requests-per-minute", "5"),
        ],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ),
    )
    secret = done.stderr.strip().rpartition(" ")[2]
    assert secret.startswith("sd-")
    assert secret not in done.stdout
    file = tmp_path / "keys"
    file.write_text(done.stdout)
    keys = KeyRing(KeySettings(file=file))
    found = keys.find(secret)
    assert isinstance(found, ApiKey)
    assert (found.name, found.requests_per_minute) == ("ann", 5)
    assert found.models == frozenset({"m", "n"})
    assert found.expires is not None
    left = found.expires - datetime.now(UTC)
    assert timedelta(days=2.9) < left <= timedelta(days=3)


def test_secrets_differ_and_are_long() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert min(map(len, secrets)) >= 3 + 43
