"""Writes serveConfigV2: serve_config.yaml with a cluster's few changes merged into it.

``python -m k8s.tools.serve_config`` writes the patches of base and overlays anew; ``--check``
says which of them are not what it would write.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = ROOT / "serve_config.yaml"
CHANGES = ROOT / "k8s" / "serve"
OVERLAYS = ("cpu-demo", "gpu", "production")

_HEAD = """\
# Written by `make manifests` from serve_config.yaml and {sources}: do not edit.
apiVersion: ray.io/v1
kind: RayService
metadata:
  name: specdec
spec:
  serveConfigV2: |
"""


def merged(base: object, change: object) -> object:
    """``change`` laid over ``base``: mappings key by key, the lists of applications one by one."""
    if isinstance(base, dict) and isinstance(change, dict):
        keys = {**base, **change}
        return {
            key: merged(base[key], change[key]) if key in base and key in change else keys[key]
            for key in keys
        }
    if isinstance(base, list) and isinstance(change, list) and len(base) == len(change):
        return [merged(*pair) for pair in zip(base, change, strict=True)]
    return change


def sources(name: str) -> list[Path]:
    """The changes that make up ``base`` or an overlay, in order."""
    return [CHANGES / "base.yaml"] + ([] if name == "base" else [CHANGES / f"{name}.yaml"])


def serve_config(name: str) -> dict[str, Any]:
    """The configuration of ``base`` or an overlay, as Ray Serve takes it."""
    config: Any = yaml.safe_load(SHIPPED.read_text(encoding="utf-8"))
    for path in sources(name):
        config = merged(config, yaml.safe_load(path.read_text(encoding="utf-8")))
    found: dict[str, Any] = config
    return found


def patch_path(name: str) -> Path:
    """Where the patch of ``base`` or an overlay lies."""
    folder = ROOT / "k8s" / ("base" if name == "base" else f"overlays/{name}")
    return folder / "serve-config.yaml"


def patch(name: str) -> str:
    """The patch itself."""
    text = yaml.safe_dump(serve_config(name), sort_keys=False, width=100)
    named = " and ".join(str(path.relative_to(ROOT)) for path in sources(name))
    body = "".join(f"    {line}\n" for line in text.splitlines())
    return _HEAD.format(sources=named) + body


def stale() -> list[Path]:
    """Patches that are not what :func:`patch` writes."""
    return [
        patch_path(name)
        for name in ("base", *OVERLAYS)
        if not patch_path(name).is_file() or patch_path(name).read_text() != patch(name)
    ]


def main() -> int:
    """Write them, or check them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true", help="write nothing")
    parser.add_argument("--print", dest="shown", choices=("base", *OVERLAYS), help="show one")
    options = parser.parse_args()
    if options.shown is not None:
        print(yaml.safe_dump(serve_config(options.shown), sort_keys=False, width=100), end="")
        return 0
    if options.check:
        for path in stale():
            print(f"{path.relative_to(ROOT)} is stale: run make manifests", file=sys.stderr)
        return 1 if stale() else 0
    for name in ("base", *OVERLAYS):
        patch_path(name).write_text(patch(name), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
