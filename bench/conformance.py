"""The tests that clients' libraries run against this server, run against another one.

Without a URL that is vLLM's, started here with the default model. What it is known to answer
otherwise stands, with the reason, in a file of differences: those tests must fail, and all others
pass.

    python -m bench.conformance
    python -m bench.conformance --server http://127.0.0.1:8000 --model smollm2-135m-instruct
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from bench.common import RESULTS, ROOT
from bench.peer import VENV, vllm_server
from specdec.config import DEFAULT_MODEL
from specdec.model.resolve import resolve_model

TESTS = ROOT / "tests" / "deployments"
DIFFERENCES = TESTS / "vllm_differences.toml"
#: What a client can see of a server, whatever that is.
MODULES = (
    "test_sdk.py",
    "test_curl.py",
    "test_clients.py",
    "test_tools.py",
    "test_structured.py",
    "test_openapi.py::test_tokens_and_back",
)
#: As a user who wants calls of functions starts it; compiled code would only take time to make,
#: and without it its texts in bfloat16 were not the model's, on a CPU with AMX.
_VLLM_FLAGS = (
    *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
    *("--dtype", "float32", "--enforce-eager"),
)


def run_tests(url: str, model: str, differences: Path | None, arguments: Sequence[str]) -> int:
    """Exit status of pytest."""
    command = [
        *(sys.executable, "-m", "pytest", "-q", "--server", url, "--model", model),
        *(str(TESTS / name) for name in MODULES),
        *arguments,
    ]
    if differences is not None:
        command += ["--differences", str(differences)]
    return subprocess.run(command, cwd=ROOT).returncode


def main() -> int:
    """Command line; what it does not know goes to pytest. Status that of pytest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", help="URL without a path; vLLM is started if absent")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="name under which it serves")
    parser.add_argument("--differences", type=Path, help="TOML; vLLM's own if vLLM is started")
    parser.add_argument("--vllm", type=Path, default=VENV, help="its virtual environment")
    options, arguments = parser.parse_known_args()
    if options.server:
        return run_tests(options.server, options.model, options.differences, arguments)
    RESULTS.mkdir(parents=True, exist_ok=True)
    log = RESULTS / "vllm conformance.log"
    with vllm_server(resolve_model(DEFAULT_MODEL), options.vllm, log, _VLLM_FLAGS) as url:
        return run_tests(url, DEFAULT_MODEL, options.differences or DIFFERENCES, arguments)


if __name__ == "__main__":
    raise SystemExit(main())
