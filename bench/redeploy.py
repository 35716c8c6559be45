"""Deploys a changed configuration to a server that runs, as ``serve deploy`` does where Ray's
dashboard runs.

    RAY_ADDRESS=… python -m bench.redeploy serve.yaml
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from bench.server import ROOT, Server, ray_address


def redeploy(server: Server, changes: Mapping[str, Mapping[str, Any]]) -> None:
    """Change some of a running server's arguments, by section; returns once all of it is rolled
    out.
    """
    folder = server.log.parent
    path = folder / "serve.yaml"
    config = yaml.safe_load(path.read_text())
    for section, values in changes.items():
        config["applications"][0]["args"].setdefault(section, {}).update(values)
    path.write_text(yaml.safe_dump(config))
    # the raylet's sockets lie in the folder; a cluster that a program starts asks for a token
    environment = {
        "RAY_ADDRESS": ray_address(server),
        "RAY_TMPDIR": str(folder),
        "RAY_AUTH_MODE": os.environ.get("RAY_AUTH_MODE", "token"),
    }
    done = subprocess.run(
        [sys.executable, "-m", "bench.redeploy", str(path)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"the deployment failed:\n{done.stdout}{done.stderr}"


def main() -> int:
    """Deploy the file that is named."""
    import ray
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    ray.init(namespace="serve", log_to_driver=False)
    client = _get_global_client()
    assert client is not None
    config = yaml.safe_load(Path(sys.argv[1]).read_text())
    client.deploy_apps(ServeDeploySchema.model_validate(config), _blocking=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
