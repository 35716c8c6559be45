"""``python -m deployments serve_config.yaml``: ``serve run``, made for one machine.

Starts Ray with a small object store and without its dashboard, unless RAY_ADDRESS names a
cluster that runs already; says when the server is ready; ends with an error where it cannot be.
"""

from __future__ import annotations

import argparse
import os
import sys
import time


def main() -> int:
    """Parse the command line and serve until interrupted."""
    began = time.monotonic()
    parser = argparse.ArgumentParser(
        prog="python -m deployments", description="Serve a model through an OpenAI-compatible API."
    )
    parser.add_argument("config", nargs="?", default="serve_config.yaml")
    options = parser.parse_args()
    # What Ray reads from the environment only. What the user has set stays.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_raylet_start_wait_time_s", "120")
    os.environ.setdefault("RAY_worker_niceness", "0")  # else any other program comes first
    from deployments.launcher import launch  # imports Ray, which reads them

    return launch(options.config, began)


if __name__ == "__main__":
    sys.exit(main())
