"""Builds an overlay with kustomize, as ``kubectl apply -k`` would."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
OVERLAYS = ("cpu-demo", "gpu", "production")

Manifest = dict[str, Any]


class BuildError(Exception):
    """kustomize refuses the folder; the message is its own."""


def build(folder: Path) -> list[Manifest]:
    """All objects of an overlay.

    Raises:
        BuildError: there is no kubectl, or it refuses the folder.
    """
    # the one in this environment first: its version is pinned
    beside = Path(sys.executable).with_name("kubectl")
    kubectl = str(beside) if beside.is_file() else shutil.which("kubectl")
    if kubectl is None:
        raise BuildError("kubectl is not installed: make setup")
    found = subprocess.run([kubectl, "kustomize", str(folder)], capture_output=True, text=True)
    if found.returncode != 0:
        raise BuildError(found.stderr.strip())
    return [item for item in yaml.safe_load_all(found.stdout) if item is not None]


def overlay(name: str) -> Path:
    """The folder of an overlay."""
    return ROOT / "k8s" / "overlays" / name


def label(manifest: Manifest) -> str:
    """How a message names an object."""
    return f"{manifest.get('kind')}/{manifest.get('metadata', {}).get('name')}"


def pods(manifest: Manifest) -> Iterator[tuple[str, Manifest]]:
    """The pod templates of an object, each with its name in messages."""
    kind, spec = manifest.get("kind"), manifest.get("spec") or {}
    if kind == "RayService":
        cluster = spec["rayClusterConfig"]
        yield f"{label(manifest)} head", cluster["headGroupSpec"]["template"]
        for group in cluster.get("workerGroupSpecs") or ():
            yield f"{label(manifest)} {group['groupName']}", group["template"]
    elif isinstance(spec, dict) and "containers" in (spec.get("template") or {}).get("spec", {}):
        yield label(manifest), spec["template"]


def strings(node: object, path: str = "") -> Iterator[tuple[str, str]]:
    """Every string in an object, with the path to it."""
    if isinstance(node, dict):
        for key, value in node.items():
            yield from strings(value, f"{path}.{key}" if path else str(key))
    elif isinstance(node, list):
        for number, value in enumerate(node):
            yield from strings(value, f"{path}[{number}]")
    elif isinstance(node, str):
        yield path, node
