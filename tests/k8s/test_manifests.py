"""The manifests as shipped pass, and each kind of fault is refused for its own reason."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import yaml

from deployments.config import AppConfig
from k8s.tools import check
from k8s.tools.build import OVERLAYS, ROOT, Manifest, build, overlay
from k8s.tools.policy import policy_problems
from k8s.tools.schemas import schema_problems
from k8s.tools.serve_config import SHIPPED, patch_path, serve_config, stale
from specdec.config import validate_settings
from tests.k8s.faults import FAULTS, Break


@pytest.fixture(scope="module")
def built() -> dict[str, list[Manifest]]:
    return {name: build(overlay(name)) for name in OVERLAYS}


def problems(manifests: list[Manifest]) -> list[str]:
    found = [problem for manifest in manifests for problem in schema_problems(manifest)]
    return found or policy_problems(manifests)


@pytest.mark.parametrize("name", OVERLAYS)
def test_every_overlay_passes(name: str, built: dict[str, list[Manifest]]) -> None:
    assert problems(built[name]) == []
    assert check.source_problems(ROOT / "k8s") == []


@pytest.mark.parametrize(
    ("fault", "reason"), FAULTS, ids=lambda value: getattr(value, "__name__", "")
)
def test_a_broken_manifest_is_refused(
    fault: Break, reason: str, built: dict[str, list[Manifest]]
) -> None:
    manifests = copy.deepcopy(built["gpu"])
    fault(manifests)
    found = problems(manifests)
    assert any(reason in problem for problem in found), found
    assert not any("hunter2" in problem for problem in found)


def test_what_kustomize_refuses_is_told(tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [missing.yaml]\n")
    (problem,) = check.overlay_problems(tmp_path)
    assert "missing.yaml" in problem


def test_a_version_outside_a_kustomization_is_refused(tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text("spec:\n  containers:\n    - image: valkey:8\n")
    (problem,) = check.source_problems(tmp_path)
    assert "image: valkey:8" in problem


def test_serve_config_is_the_shipped_one() -> None:
    """Base differs from serve_config.yaml in five values, each of which has its reason."""
    shipped = yaml.safe_load(SHIPPED.read_text())
    base = serve_config("base")
    assert base.pop("proxy_location") == "EveryNode"
    assert base["http_options"].pop("host") == "0.0.0.0"
    arguments = base["applications"][0]["args"]
    assert arguments["engine"].pop("cache_dir") == "/opt/specdec/cache"
    assert arguments["gateway"].pop("graceful_shutdown_timeout_s") == 300
    assert arguments["gateway"].pop("limits") == {"request_timeout_s": 300}
    del shipped["proxy_location"], shipped["http_options"]["host"]
    assert base == shipped


@pytest.mark.parametrize("name", ["base", *OVERLAYS])
def test_the_written_patches_are_current(name: str) -> None:
    assert patch_path(name) not in stale()
    written = yaml.safe_load(patch_path(name).read_text())["spec"]["serveConfigV2"]
    assert yaml.safe_load(written) == serve_config(name)
    for application in serve_config(name)["applications"]:
        validate_settings(AppConfig, application["args"])


def test_dashboard_and_rules_are_part_of_the_base() -> None:
    base = yaml.safe_load((ROOT / "k8s" / "base" / "kustomization.yaml").read_text())
    for folder, file in (("grafana", "specdec.json"), ("prometheus", "rules.yaml")):
        if (ROOT / "k8s" / folder / file).is_file():
            assert f"../{folder}" in base["resources"]


def test_promtool_refuses_wrong_rules(tmp_path: Path) -> None:
    rules = tmp_path / "rules.yaml"
    good = "groups: [{name: a, rules: [{alert: A, expr: up == 0}]}]\n"
    rules.write_text(good)
    assert check.rule_problems(rules) == []
    rules.write_text(good.replace("up == 0", "up =="))
    (problem,) = check.rule_problems(rules)
    assert "parse error" in problem


def test_the_command_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "kustomization.yaml").write_text("resources: [missing.yaml]\n")
    monkeypatch.setattr(check, "overlay", lambda _: tmp_path)
    monkeypatch.setattr(check, "RULES", tmp_path / "none")
    assert check.main() == 1
