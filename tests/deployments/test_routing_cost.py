from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
from ray.serve._private.common import DeploymentHandleSource, ReplicaID

from bench.routing_cost import _DEPLOYMENT, decisions_ms
from deployments.router import PrefixRouter


def test_a_decision_among_64_workers_costs_little() -> None:
    """Below 1 ms on a machine that does nothing else; here others may run, so the median counts.

    What this catches: a decision that looks at every running request, or at every block.
    """
    taken = asyncio.run(decisions_ms(64, 300, prompt_tokens=512, running=512))
    assert len(taken) == 300
    assert float(np.median(taken)) < 5.0


def test_requests_are_counted_until_they_end() -> None:
    async def run() -> None:
        make: Any = PrefixRouter  # untyped in Ray
        router = make(_DEPLOYMENT, DeploymentHandleSource.REPLICA)
        router.initialize_state(factor=1.5, slack=4)
        name = ReplicaID("a", _DEPLOYMENT)
        # a choice's end comes once per choice, also for one that was never taken
        router.on_request_completed(name, "never")
        assert not router._sent
        router._sent[name] += 2
        router._running[name, "r"] += 2
        router.on_request_completed(name, "r")
        assert router._sent[name] == 1
        router.on_request_completed(name, "r")
        router.on_request_completed(name, "r")
        assert not router._sent
        assert not router._running

    asyncio.run(run())
