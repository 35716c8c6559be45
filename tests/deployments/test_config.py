"""Settings: what ships is valid, what is wrong is named."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import serve

from bench.server import ROOT
from deployments.app import build_app
from deployments.config import AppConfig
from deployments.launcher import check_config, check_free, missing_gpus
from specdec.config import DEFAULT_MODEL, EngineSettings, validate_settings
from specdec.errors import ConfigError


def test_what_ships_is_valid() -> None:
    address, (application,) = check_config(str(ROOT / "serve_config.yaml"))
    assert (address.host, address.port, address.tls) == ("127.0.0.1", 8000, False)
    assert application.engine.model == DEFAULT_MODEL
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    settings = AppConfig.model_validate(config["applications"][0]["args"])
    assert settings == AppConfig()
    assert settings.model_name == DEFAULT_MODEL


SECRET_URL = "redis://user:hunter2@host:6379"


@pytest.mark.parametrize(
    "store",
    [
        {"url": SECRET_URL, "breaker_backoff_s": 100},
        {"url": SECRET_URL, "secret": "hunter2"},
        {"url": SECRET_URL, "secret": "hunter2" * 4, "secret_file": "x"},
        {"url": SECRET_URL, "ttl_s": 1e30},
        {"url": SECRET_URL, "hunter": 2},
        {"url": [SECRET_URL]},
        {"url": SECRET_URL.replace("redis", "http")},
        SECRET_URL,
        [SECRET_URL],
    ],
)
def test_no_secret_is_in_a_message(store: object) -> None:
    values = {"engine": {"prefix_cache": {"store": store}}}
    with pytest.raises(ConfigError, match=r"prefix_cache\.store") as caught:
        validate_settings(AppConfig, values)
    assert "hunter2" not in str(caught.value)


def test_a_store_without_the_cache_is_refused() -> None:
    values = {"prefix_cache": {"enabled": False, "store": {"url": "memory://"}}}
    with pytest.raises(ConfigError, match="no effect unless enabled"):
        validate_settings(EngineSettings, values)


def test_the_builder_gets_a_validated_tree() -> None:
    """Ray Serve looks at the annotation, which must therefore be a class."""
    assert build_app.__annotations__["config"] is AppConfig
    assert isinstance(build_app(AppConfig()), serve.Application)


@pytest.mark.parametrize(
    ("values", "name"),
    [
        ({"engin": {}}, "engin: unknown setting"),
        ({"gateway": {"limits": {"body": 1}}}, "gateway.limits.body: unknown setting"),
        ({"gateway": {"limits": {"body_bytes": "big"}}}, "gateway.limits.body_bytes"),
        ({"worker": {"num_gpus": -1}}, "worker.num_gpus"),
        ({"engine": {"kv": {"page_size": 0}}}, "engine.kv.page_size"),
        (
            {"gateway": {"limits": {"default_max_tokens": 9, "max_output_tokens": 8}}},
            "gateway.limits.default_max_tokens",
        ),
    ],
)
def test_what_is_wrong_is_named(values: dict[str, Any], name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=name):
        validate_settings(AppConfig, values)
    file = tmp_path / "serve.yaml"
    file.write_text(yaml.safe_dump({"applications": [{"name": "specdec", "args": values}]}))
    with pytest.raises(ConfigError, match=name):
        check_config(str(file))


def test_keys_of_ray_serve_are_checked_too(tmp_path: Path) -> None:
    """Ray itself passes over them: a server on another port than was meant."""
    file = tmp_path / "serve.yaml"
    config = {
        "http_options": {"prot": 1},
        "logging_config": {"level": "INFO"},
        "applications": [{"name": "specdec", "import": "x", "args": {}}],
        "proxy": "HeadOnly",
    }
    file.write_text(yaml.safe_dump(config))
    with pytest.raises(ConfigError) as caught:
        check_config(str(file))
    for key in ("http_options.prot:", "logging_config.level:", "applications.0.import:", "proxy:"):
        assert key in str(caught.value)


def test_a_port_in_use_is_refused() -> None:
    """Ray Serve listens with SO_REUSEPORT: two servers would take requests in turn."""
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        other.bind(("127.0.0.1", 0))
        other.listen(1)
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"127.0.0.1:{port}"):
            check_free("127.0.0.1", port)
    check_free("127.0.0.1", port)
    with pytest.raises(ConfigError, match="cannot listen"):
        check_free("192.0.2.1", port)


def test_more_gpus_than_there_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ray.cluster_resources", lambda: {"CPU": 2.0})
    assert missing_gpus([AppConfig()]) is None
    one = AppConfig.model_validate({"worker": {"num_gpus": 1}})
    assert "num_gpus" in str(missing_gpus([AppConfig(), one]))


@pytest.mark.parametrize("text", ["", "[]", "applications: 5", "{", "applications: [5]"])
def test_what_is_no_configuration_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match="no configuration of Ray Serve"):
        check_config(str(file))


@pytest.mark.parametrize(
    ("model", "name"), [("/models/m32", "m32"), ("./m", "m"), ("org/model", "org/model")]
)
def test_model_name(model: str, name: str) -> None:
    assert AppConfig.model_validate({"engine": {"model": model}}).model_name == name
    named = {"engine": {"model": model}, "gateway": {"model_name": "mine"}}
    assert AppConfig.model_validate(named).model_name == "mine"


def test_the_launcher_names_what_is_wrong_before_it_starts_anything(tmp_path: Path) -> None:
    for values, message in (
        ({"engine": {"model": "/no/such/folder"}}, "/no/such/folder"),
        ({"engine": {"modle": "x"}}, "engine.modle: unknown setting"),
    ):
        file = tmp_path / "serve.yaml"
        file.write_text(yaml.safe_dump({"applications": [{"name": "specdec", "args": values}]}))
        done = subprocess.run(
            [sys.executable, "-m", "deployments", str(file)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert message in done.stderr
        assert "Traceback" not in done.stderr
