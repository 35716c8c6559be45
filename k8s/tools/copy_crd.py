"""Copies KubeRay's schema of a RayService, by which the manifests are checked.

Source: https://github.com/ray-project/kuberay, the file
``ray-operator/config/crd/bases/ray.io_rayservices.yaml`` (Apache-2.0).

    python -m k8s.tools.copy_crd path/to/ray.io_rayservices.yaml

Keeps the schema of version v1 without its descriptions, in one line of JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import yaml

TARGET = Path(__file__).resolve().parents[2] / "tests" / "k8s" / "rayservice-v1.json"
SOURCE = "https://github.com/ray-project/kuberay ray-operator/config/crd/bases"


def without_descriptions(node: object) -> object:
    """The same schema; a property that is itself called ``description`` stays."""
    if isinstance(node, dict):
        return {
            key: without_descriptions(value)
            for key, value in node.items()
            if not (key == "description" and isinstance(value, str))
        }
    if isinstance(node, list):
        return [without_descriptions(value) for value in node]
    return node


def main() -> int:
    """Read the CRD, write the schema."""
    parser = argparse.ArgumentParser(description="Copy the schema of a RayService.")
    parser.add_argument("crd", type=Path)
    crd = yaml.safe_load(parser.parse_args().crd.read_text(encoding="utf-8"))
    (version,) = [found for found in crd["spec"]["versions"] if found["name"] == "v1"]
    schema = {
        "$comment": f"{SOURCE} (Apache-2.0), version v1; see k8s/tools/copy_crd.py",
        **version["schema"]["openAPIV3Schema"],
    }
    TARGET.parent.mkdir(parents=True, exist_ok=True)
    TARGET.write_text(json.dumps(without_descriptions(schema)) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
