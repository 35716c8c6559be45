r"""``make docs-check``: runs every command of docs/operations.md that can run here.

A command is a line that begins with ``$ `` in a ``console`` block; a line that ends in ``\\`` goes
on. Commands of one block share a shell, so that one may set what the next one uses. A block after
``<!-- cluster -->`` needs a real cluster: it is listed, kubectl's
options in it are checked by kubectl itself, and it is not run. A block after
``<!-- server -->`` is run while a server answers on 127.0.0.1:8000.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs" / "operations.md"
_BLOCK = re.compile(
    r"(?:^ *<!-- (?P<mark>cluster|server) -->\n)?^ *```console\n(?P<body>.*?)^ *```$",
    re.DOTALL | re.MULTILINE,
)


@dataclass(frozen=True)
class Block:
    """Commands that belong together.

    Attributes:
        needs: ``cluster``, ``server`` or nothing.
        commands: in order.
        line: of the document, where it begins.
    """

    needs: str
    commands: tuple[str, ...]
    line: int


def blocks(text: str) -> Iterator[Block]:
    """The blocks of a document, in order."""
    for match in _BLOCK.finditer(text):
        body = match["body"].replace("\\\n", " ")
        lines = (line.strip() for line in body.splitlines())
        commands = [line[2:] for line in lines if line.startswith("$ ")]
        line = text.count("\n", 0, match.start("body")) + 1
        yield Block(match["mark"] or "", tuple(commands), line)


def unknown_commands(found: list[Block]) -> list[str]:
    """Commands of a cluster that kubectl does not know, or with options that it does not."""
    problems = []
    for block in found:
        for command in block.commands:
            if block.needs == "cluster" and command.startswith("kubectl "):
                words = re.split(r"\s+[|&>]", command)[0]
                ours, dashes, theirs = words.partition(" -- ")  # what follows is for the pod
                asked = f"{ours} --help{dashes}{theirs}"
                shown = subprocess.run(
                    ["bash", "-c", asked], capture_output=True, text=True, env=_env()
                )
                if shown.returncode != 0 or "unknown" in shown.stderr:
                    problems.append(f"line {block.line}: {command}: {shown.stderr.strip():.200}")
    return problems


def run(block: Block) -> subprocess.CompletedProcess[str]:
    """Run a block's commands in one shell; the first that fails ends it."""
    script = "set -euo pipefail\n" + "\n".join(block.commands)
    return subprocess.run(
        ["bash", "-c", script], capture_output=True, text=True, cwd=ROOT, env=_env(), timeout=580
    )


def _env() -> dict[str, str]:
    here = str(Path(sys.executable).parent)
    return {**os.environ, "PATH": f"{here}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}


def main() -> int:
    """Run them; 1 where one fails."""
    parser = argparse.ArgumentParser(description="Run the commands of docs/operations.md.")
    parser.add_argument("--no-server", action="store_true", help="leave out those of a server")
    options = parser.parse_args()
    found = list(blocks(DOCUMENT.read_text(encoding="utf-8")))
    failed = unknown_commands(found)
    with ExitStack() as stack:
        if any(block.needs == "server" for block in found) and not options.no_server:
            stack.enter_context(serving())
        for block in found:
            skipped = block.needs == "cluster" or (block.needs == "server" and options.no_server)
            for command in block.commands:
                print(f"{f'needs a {block.needs}' if skipped else 'run':15} {command}", flush=True)
            if skipped:
                continue
            done = run(block)
            if done.returncode != 0:
                failed.append(f"line {block.line}: {done.stdout[-500:]}{done.stderr[-1500:]}")
    for problem in failed:
        print(problem, file=sys.stderr)
    ran = sum(len(block.commands) for block in found if block.needs != "cluster")
    print(f"{ran} commands can run here, {len(failed)} blocks failed")
    return 1 if failed else 0


def serving() -> ExitStack:
    """The server as `make serve` starts it, with its debug page, until the stack is closed."""
    from bench.server import stop, wait_until_ready

    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sd")))
        log = folder / "console.log"
        with log.open("w") as console:
            process = subprocess.Popen(
                [sys.executable, "-m", "deployments", "serve_config.yaml"],
                cwd=ROOT,
                env={**_env(), "RAY_TMPDIR": str(folder)},
                stdout=console,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        stack.callback(stop, process, folder)
        wait_until_ready(process, log)
        return stack.pop_all()


if __name__ == "__main__":
    sys.exit(main())
