"""Sends a request to the worker that holds most of its prompt, without waiting for anybody."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict

from ray.serve.request_router import (
    FIFOMixin,
    PendingRequest,
    ReplicaID,
    RequestRouter,
    RunningReplica,
)

from deployments.affinity import Affinity, Balance
from deployments.fleet import fleet
from deployments.messages import GenerateRequest

#: Requests whose keys are kept.
_MOST_REQUESTS = 1024


class PrefixRouter(FIFOMixin, RequestRouter):
    """Ray Serve's router for the workers; see :mod:`deployments.affinity`.

    What it knows came with the replicas' routing stats and from what it sent itself: it asks
    nobody while a request waits. Ray passes it by value to where it runs. In order of arrival:
    without, Ray finds a waiting request by the id of its HTTP request, and of several choices of
    one it would find the last alone.
    """

    def initialize_state(self, **kwargs: float) -> None:
        """Called by Ray with ``request_router_kwargs``: the fields of ``Balance``."""
        balance = Balance(float(kwargs["factor"]), int(kwargs["slack"]))
        self._affinity: Affinity[ReplicaID] = Affinity(balance, random.Random())
        self._keys: OrderedDict[str, list[bytes]] = OrderedDict()
        #: Choices that run, by replica and HTTP request: all choices of one have the same id.
        self._running: Counter[tuple[ReplicaID, str]] = Counter()
        #: Their sum by replica: a decision must not look at each that runs.
        self._sent: Counter[ReplicaID] = Counter()

    def update_replicas(self, replicas: list[RunningReplica]) -> None:
        """Called by Ray with all replicas that take requests."""
        super().update_replicas(replicas)
        fleet().update(replica.replica_id.unique_id for replica in replicas)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """All candidates that move, one per rank, the best first."""
        replicas = {replica.replica_id: replica for replica in candidate_replicas}
        for name, replica in replicas.items():
            self._affinity.report(name, replica.routing_stats)
        self._affinity.keep(replicas)
        loads = {name: self._load(replica) for name, replica in replicas.items()}
        keys: list[bytes] = []
        if pending_request is not None:
            # where every replica is full, wait before the next try
            pending_request.routing_context.should_backoff = True
            keys = self._keys_of(pending_request)
        usable = fleet().usable()
        ranked = [name for name in self._affinity.rank(keys, loads) if name.unique_id in usable]
        if ranked and pending_request is not None and pending_request.args:
            request = pending_request.args[0]
            if isinstance(request, GenerateRequest):
                fleet().chose(request.attempt_id, ranked[0].unique_id)
        return [[replicas[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: object
    ) -> None:
        """Called by Ray once a replica has the request."""
        self._affinity.sent(self._keys_of(pending_request), replica_id)
        self._running[replica_id, pending_request.metadata.internal_request_id] += 1
        self._sent[replica_id] += 1

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        """Called by Ray once a request has ended, however, even one that was never taken."""
        name = replica_id, internal_request_id
        if name not in self._running:
            return
        self._running[name] -= 1
        self._sent[replica_id] -= 1
        if not self._running[name]:
            del self._running[name]
        if not self._sent[replica_id]:
            del self._sent[replica_id]

    def _load(self, replica: RunningReplica) -> int:
        """Requests at a replica: at least those that this gateway sent and that run.

        Of other gateways' requests Ray's count knows, for some seconds after a request; then what
        the replica reported last.
        """
        sent = self._sent[replica.replica_id]
        known = self.replica_queue_len_cache.get(replica.replica_id)
        if known is None:
            known = replica.routing_stats.get("requests")
        return max(sent, known if isinstance(known, int) else 0)

    def _keys_of(self, pending: PendingRequest) -> list[bytes]:
        request = pending.args[0] if pending.args else None
        if not isinstance(request, GenerateRequest):
            return []
        keys = self._keys.get(request.attempt_id)
        if keys is None:
            known = request.prompt_tokens + request.prior_tokens
            keys = self._affinity.keys(known, request.scope)
            self._keys[request.attempt_id] = keys
            if len(self._keys) > _MOST_REQUESTS:
                self._keys.popitem(last=False)
        return keys
