"""Requests that no client would send: schemathesis on the server's own document, and good
requests changed at random. No answer may be a 5xx or late, and nothing may be left in the engine.

    python -m bench.fuzz --requests 20000
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field

from tqdm import tqdm

from bench.common import Figure, report, write_results
from bench.mutations import RawRequest, request
from bench.strict import StrictServer, strict_server

_HANG_S = 60.0
_CHECKS = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_schema_conformance",
)


@dataclass
class Found:
    """What came of the requests.

    Attributes:
        statuses: how often each came; 0 is a connection that was closed without an answer.
        faults: requests and what was wrong with their answers, the first few.
        count: of the faults.
    """

    statuses: Counter[int] = field(default_factory=Counter)
    faults: list[str] = field(default_factory=list)
    count: int = 0

    def fault(self, what: str, sent: RawRequest) -> None:
        """Enter one."""
        self.count += 1
        if len(self.faults) < 20:
            self.faults.append(f"{what}: {sent.data[:2000]!r}")


async def send(host: str, port: int, sent: RawRequest) -> bytes:
    """Everything that comes back until the server closes."""
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write(sent.data)
        if not sent.well_formed:
            writer.write_eof()  # it may else wait for what was announced
        await writer.drain()
        return await reader.read()
    except ConnectionError:
        return b""
    finally:
        writer.close()


def judge(answer: bytes, sent: RawRequest, found: Found) -> None:
    """Enter an answer, and what is wrong with it."""
    head, _, body = answer.partition(b"\r\n\r\n")
    status = int(head[9:12]) if head.startswith(b"HTTP/1.1 ") else 0
    found.statuses[status] += 1
    if status >= 500:
        found.fault(f"status {status} {body[:300]!r}", sent)
    elif status == 0 and sent.well_formed:
        found.fault("no answer", sent)
    if b"x-injected" in head.lower():
        found.fault("a header was injected", sent)
    if status >= 400 and sent.well_formed and not sent.data.startswith(b"HEAD"):
        try:
            error = json.loads(body)["error"]
            if set(error) != {"message", "type", "param", "code"}:
                found.fault(f"an error of another shape {body[:300]!r}", sent)
        except (ValueError, KeyError, TypeError):
            found.fault(f"an error that is none of OpenAI's {body[:300]!r}", sent)


async def mutate(strict: StrictServer, count: int, seed: int, at_once: int) -> Found:
    """Send so many changed requests, some at once."""
    found = Found()
    host, _, port = strict.server.url.removeprefix("http://").partition(":")
    rng = random.Random(seed)
    todo = iter([request(rng, strict.server.model, strict.key) for _ in range(count)])
    progress = tqdm(total=count, unit="request", disable=None)

    async def work() -> None:
        for sent in todo:
            try:
                async with asyncio.timeout(_HANG_S):
                    answer = await send(host, int(port), sent)
            except TimeoutError:
                found.fault(f"no end within {_HANG_S:g} s", sent)
            else:
                judge(answer, sent, found)
            progress.update()

    await asyncio.gather(*(work() for _ in range(at_once)))
    progress.close()
    return found


def schemathesis(strict: StrictServer, examples: int, seed: int) -> tuple[int, str]:
    """Run it; returns its exit status and what it said."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "schemathesis.cli", "run"),
            f"{strict.server.url}/openapi.json",
            *("--max-examples", str(examples), "--seed", str(seed)),
            *("--checks", ",".join(_CHECKS), "--phases", "examples,coverage,fuzzing"),
            *("--header", f"Authorization: Bearer {strict.key}"),
            *("--request-timeout", str(_HANG_S), "--no-color"),
        ],
        capture_output=True,
        text=True,
    )
    return done.returncode, done.stdout + done.stderr


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=20_000, help="changed at random")
    parser.add_argument("--examples", type=int, default=200, help="of schemathesis, per path")
    parser.add_argument("--at-once", type=int, default=4)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--name", default="fuzz", help="of the results file")
    options = parser.parse_args()
    with strict_server() as strict:
        found = asyncio.run(mutate(strict, options.requests, options.seed, options.at_once))
        strict.check_rest()
        status, text = schemathesis(strict, options.examples, options.seed)
        strict.check_rest()
    for fault in found.faults:
        print(fault)
    print(dict(sorted(found.statuses.items())))
    print(text[-6000:])
    figures = {
        "requests": Figure(sum(found.statuses.values()), options.requests),
        "faults": Figure(found.count, 0, True),
        "schemathesis_exit_status": Figure(status, 0, True),
    }
    print(report(figures))
    details = {"statuses": {str(k): v for k, v in sorted(found.statuses.items())}}
    print("wrote", write_results(options.name, figures, details))
    return int(not all(figure.met for figure in figures.values()))


if __name__ == "__main__":
    raise SystemExit(main())
