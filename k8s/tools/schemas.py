"""Does each object have the form that its kind asks for?

Built-in kinds by Kubernetes' own schemas, RayService by KubeRay's (copied by copy_crd.py), with
unknown fields refused; a PodMonitor by the few fields that are used here.
"""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import kubernetes_validate
from jsonschema import Draft202012Validator

from k8s.tools.build import ROOT, Manifest, label

KUBERNETES = "1.37"
_RAY_SCHEMA = ROOT / "tests" / "k8s" / "rayservice-v1.json"
_STRING_MAP = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION = {"type": "string", "pattern": r"^[0-9]+(ms|s|m|h)$"}
#: Of the Prometheus operator's PodMonitor, monitoring.coreos.com/v1.
_POD_MONITOR: dict[str, Any] = {
    "type": "object",
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "monitoring.coreos.com/v1"},
        "kind": {"const": "PodMonitor"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "required": ["selector", "podMetricsEndpoints"],
            "additionalProperties": False,
            "properties": {
                "selector": {
                    "type": "object",
                    "required": ["matchLabels"],
                    "additionalProperties": False,
                    "properties": {"matchLabels": _STRING_MAP},
                },
                "podMetricsEndpoints": {
                    "type": "array",
                    "minItems": 1,
                    "items": {
                        "type": "object",
                        "required": ["port"],
                        "additionalProperties": False,
                        "properties": {
                            "port": {"type": "string"},
                            "path": {"type": "string"},
                            "interval": _DURATION,
                            "scrapeTimeout": _DURATION,
                        },
                    },
                },
                "podTargetLabels": {"type": "array", "items": {"type": "string"}},
            },
        },
    },
}


def schema_problems(manifest: Manifest) -> list[str]:
    """What is wrong with an object's form; each says which object and where in it."""
    group = str(manifest.get("apiVersion", "")).partition("/")[0]
    if group == "ray.io":
        return _by_schema(manifest, _ray_service())
    if group == "monitoring.coreos.com":
        return _by_schema(manifest, Draft202012Validator(_POD_MONITOR))
    try:
        kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    except kubernetes_validate.SchemaNotFoundError:
        known = f"{manifest.get('apiVersion')} {manifest.get('kind')}"
        return [f"{label(manifest)}: Kubernetes {KUBERNETES} knows no {known}"]
    except kubernetes_validate.ValidationError as error:
        where = ".".join(str(part) for part in error.path)
        return [f"{label(manifest)}: {where}: {error.message}"]
    return []


def _by_schema(manifest: Manifest, validator: Draft202012Validator) -> list[str]:
    return [
        f"{label(manifest)}: {'.'.join(str(part) for part in error.absolute_path)}: "
        f"{error.message:.300}"
        for error in validator.iter_errors(manifest)
    ]


@cache
def _ray_service() -> Draft202012Validator:
    schema = json.loads(_RAY_SCHEMA.read_text(encoding="utf-8"))
    # An object without a schema is anything; apiVersion and kind have none but "string".
    schema["properties"]["apiVersion"] = {"const": "ray.io/v1"}
    schema["properties"]["kind"] = {"const": "RayService"}
    _closed(schema)
    # left open by KubeRay's schema: what any object has
    schema["properties"]["metadata"]["additionalProperties"] = True
    return Draft202012Validator(schema)


def _closed(node: object) -> None:
    """Refuse fields that a schema does not name: an API server drops them without a word."""
    if isinstance(node, dict):
        properties = node.get("properties")
        if (
            isinstance(properties, dict)
            and node.get("type") == "object"
            and "additionalProperties" not in node
            and not node.get("x-kubernetes-preserve-unknown-fields")
        ):
            node["additionalProperties"] = False
        for value in node.values():
            _closed(value)
    elif isinstance(node, list):
        for value in node:
            _closed(value)
