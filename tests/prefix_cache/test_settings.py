from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from prefix_cache.errors import StoreConfigError
from prefix_cache.settings import PrefixCacheSettings

SECRET = "correct horse battery"


@pytest.mark.parametrize(
    "bad",
    [
        {"ur1": "memory://"},
        {"namespace": "a:b"},
        {"namespace": ""},
        {"read_deadline_ms": 0},
        {"ttl_s": float("inf")},
        {"max_bytes": 1000},
        {"compression": "gzip"},
        {"secret": "short"},
        {"secret": SECRET, "secret_file": "/file"},
        {"breaker_backoff_s": 100},
        {"url": "memory://", "url_file": "/file"},
    ],
)
def test_wrong_settings_are_refused(bad: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PrefixCacheSettings.model_validate(bad)


def test_secrets_are_not_shown() -> None:
    settings = PrefixCacheSettings.model_validate(
        {"url": "redis://:hunter2@host", "secret": SECRET}
    )
    shown = repr(settings) + str(settings.model_dump()) + settings.model_dump_json()
    assert "hunter2" not in shown
    assert SECRET not in shown
    with pytest.raises(ValidationError) as caught:
        PrefixCacheSettings.model_validate({"url": ["redis://:hunter2@host"], "secret": "hunter2"})
    assert "hunter2" not in str(caught.value)


def test_a_secret_comes_from_the_settings_or_a_file(tmp_path: Path) -> None:
    path = tmp_path / "secret"
    path.write_text(SECRET + "\n")
    assert PrefixCacheSettings().secret_bytes() == b""
    assert PrefixCacheSettings.model_validate({"secret": SECRET}).secret_bytes() == SECRET.encode()
    assert PrefixCacheSettings(secret_file=path).secret_bytes() == SECRET.encode()
    path.write_text("short\n")
    with pytest.raises(StoreConfigError, match="at least 16"):
        PrefixCacheSettings(secret_file=path).secret_bytes()
    with pytest.raises(StoreConfigError, match="secret_file"):
        PrefixCacheSettings(secret_file=tmp_path / "none").secret_bytes()


def test_the_url_may_lie_in_a_file(tmp_path: Path) -> None:
    path = tmp_path / "url"
    path.write_text("redis://:hunter2@host:6379/0\n")
    settings = PrefixCacheSettings(url_file=path)
    assert settings.store_url() == "redis://:hunter2@host:6379/0"
    assert "hunter2" not in repr(settings)
    path.write_text("http://:hunter2@host")
    with pytest.raises(StoreConfigError) as caught:
        settings.store_url()
    assert "hunter2" not in str(caught.value)
    with pytest.raises(StoreConfigError, match="url_file"):
        PrefixCacheSettings(url_file=tmp_path / "none").store_url()
