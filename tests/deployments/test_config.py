"""Settings: what ships is valid, what is wrong is named."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray import serve

from deployments.app import build_app
from deployments.config import AppConfig
from deployments.launcher import check_config
from specdec.config import DEFAULT_MODEL, validate_settings
from specdec.errors import ConfigError
from tests.deployments.server import ROOT


def test_what_ships_is_valid() -> None:
    url, (engine,) = check_config(str(ROOT / "serve_config.yaml"))
    assert url == "http://127.0.0.1:8000"
    assert engine.model == DEFAULT_MODEL
    config = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    settings = AppConfig.model_validate(config["applications"][0]["args"])
    assert settings == AppConfig()
    assert settings.model_name == DEFAULT_MODEL


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
