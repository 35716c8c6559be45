"""What a decision of the router costs, with many workers that hold many blocks and many requests.

The router is the one that Ray Serve runs, fed by hand: no worker exists behind its replicas.

    python -m bench.routing_cost                  # 64 workers
    python -m bench.routing_cost --decisions 500  # shorter
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
from ray.serve._private.common import DeploymentHandleSource, DeploymentID, ReplicaID

from bench.common import Figure, report, write_results
from deployments.affinity import MOST_BLOCKS, RoutingStats, summary_of
from deployments.messages import GenerateRequest
from deployments.router import PrefixRouter
from prefix_cache.keys import Identity, block_keys
from specdec.params import SamplingParams

_IDENTITY = Identity(b"weights", b"tokenizer", "bfloat16", 30, 3, 64, block_size=16)
_DEPLOYMENT = DeploymentID("Worker", "specdec")
_VOCABULARY = 49152


@dataclass
class Replica:
    """What the router sees of a worker."""

    replica_id: ReplicaID
    routing_stats: RoutingStats

    async def get_queue_len(self, *, deadline_s: float) -> int:
        """Ray asks once, when the replica is new."""
        return 0


def workers(
    count: int, prompt_tokens: int, rng: random.Random
) -> tuple[list[Replica], list[list[int]]]:
    """Workers that report as many blocks as a report may hold, and a prompt that each holds."""
    found, kept = [], []
    for number in range(count):
        kept.append(_prompt(prompt_tokens, rng))
        keys = block_keys(_IDENTITY, kept[-1])
        # of other prompts: any keys will do
        keys += [rng.randbytes(32) for _ in range(MOST_BLOCKS - len(keys))]
        name = ReplicaID(f"w{number}", _DEPLOYMENT)
        found.append(Replica(name, summary_of(0, _IDENTITY, keys)))
    return found, kept


def requests(count: int, kept: list[list[int]], rng: random.Random) -> Iterator[Any]:
    """Pending requests: nine of ten begin as a prompt that some worker holds."""
    for number in range(count):
        tokens = _prompt(len(kept[0]), rng)
        if rng.random() < 0.9:
            shared = rng.randrange(len(tokens))
            tokens[:shared] = rng.choice(kept)[:shared]
        request = GenerateRequest(f"r{number}", tuple(tokens), SamplingParams())
        yield SimpleNamespace(
            args=[request],
            metadata=SimpleNamespace(internal_request_id=f"r{number}"),
            routing_context=SimpleNamespace(should_backoff=False),
        )


async def decisions_ms(
    count: int, decisions: int, prompt_tokens: int = 512, running: int = 1024, seed: int = 0
) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Milliseconds of each decision: from a request's tokens to the note of where it went.

    Args:
        count: of workers.
        decisions: to be made.
        prompt_tokens: of each request.
        running: requests that are under way meanwhile.
        seed: of prompts.
    """
    rng = random.Random(seed)
    replicas, kept = workers(count, prompt_tokens, rng)
    make: Any = PrefixRouter  # untyped in Ray
    router = make(_DEPLOYMENT, DeploymentHandleSource.REPLICA)
    router.initialize_state(factor=1.5, slack=4)
    router.update_replicas(replicas)
    await asyncio.sleep(0)  # the router greets its replicas
    under_way: deque[tuple[ReplicaID, str]] = deque()
    taken = []
    for pending in requests(decisions + running, kept, rng):
        began = time.perf_counter()
        (best, *_), *_ = await router.choose_replicas(replicas, pending)
        router.on_request_routed(pending, best.replica_id, None)
        taken.append(1e3 * (time.perf_counter() - began))
        under_way.append((best.replica_id, pending.metadata.internal_request_id))
        if len(under_way) > running:
            router.on_request_completed(*under_way.popleft())
    return np.array(taken[running:])


def _prompt(tokens: int, rng: random.Random) -> list[int]:
    return rng.choices(range(_VOCABULARY), k=tokens)


def main() -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description="What a decision of the router costs.")
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--decisions", type=int, default=5000)
    parser.add_argument("--prompt-tokens", type=int, default=512)
    options = parser.parse_args()
    taken = asyncio.run(decisions_ms(options.workers, options.decisions, options.prompt_tokens))
    middle, high = (float(value) for value in np.percentile(taken, [50, 99]))
    figures = {"decision_ms_p99": Figure(high, 1.0, at_most=True)}
    print(f"{options.workers} workers: median {middle:.3f} ms, p99 {high:.3f} ms")
    print(report(figures))
    write_results("routing_cost", figures, {"workers": options.workers, "median_ms": middle})
    return 0 if figures["decision_ms_p99"].met else 1


if __name__ == "__main__":
    sys.exit(main())
