"""Which replica a request suits best: the one that holds most of its prompt, unless it is busy.

Holds no Ray.
"""

from __future__ import annotations

import random
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Generic, TypedDict, TypeVar

from prefix_cache.keys import Identity, block_keys
from specdec.params import CacheScope

#: Bytes of a key that a summary keeps. A summary is a hint: a worker compares whole keys.
KEY_PART = 8
#: Blocks in a summary, the most recently held ones.
MOST_BLOCKS = 8192
#: Blocks whose replica is remembered, and for how long: by then it has reported them itself, or
#: given them up.
_REMEMBERED, _REMEMBERED_S = 65536, 20.0
#: Blocks of a prompt that are worth as much as one request less to wait behind.
_BLOCKS_PER_REQUEST = 2

ReplicaT = TypeVar("ReplicaT", bound=Hashable)


class RoutingStats(TypedDict):
    """What a worker publishes of the blocks in its pool.

    Attributes:
        requests: that the worker has.
        identity: fields of the blocks' Identity; None where it shares none. Plain values, as Ray's
            controller unpickles them.
        keys: first ``KEY_PART`` bytes of each block's key, one after the other.
    """

    requests: int
    identity: tuple[object, ...] | None
    keys: bytes


def summary_of(requests: int, identity: Identity | None, keys: Iterable[bytes]) -> RoutingStats:
    """A worker's summary; the same for the same blocks, so that Ray has no news to pass on."""
    parts = b"".join(sorted(key[:KEY_PART] for key in keys))
    fields = None if identity is None else astuple(identity)
    return {"requests": requests, "identity": fields, "keys": parts}


@dataclass(frozen=True)
class Balance:
    """How much busier a replica may be than the least busy one and still be preferred.

    Attributes:
        factor: times its requests …
        slack: … plus so many.
    """

    factor: float = 1.5
    slack: int = 4

    def allows(self, load: int, least: int) -> bool:
        """Whether ``load`` requests are not too many where another replica has ``least``."""
        return load <= self.factor * least + self.slack


class Affinity(Generic[ReplicaT]):
    """Remembers who holds what.

    Args:
        balance: between affinity and load.
        rng: breaks ties.
        clock: seconds.
    """

    def __init__(
        self,
        balance: Balance,
        rng: random.Random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._balance = balance
        self._rng = rng
        self._clock = clock
        self._identity: Identity | None = None
        self._reported: dict[ReplicaT, tuple[bytes, frozenset[bytes]]] = {}
        self._sent: OrderedDict[bytes, tuple[ReplicaT, float]] = OrderedDict()

    def keys(self, tokens: Sequence[int], scope: CacheScope) -> list[bytes]:
        """Parts of the keys of a prompt's full blocks; none before a replica has reported, nor of
        what is no prompt.
        """
        if self._identity is None:
            return []
        try:
            keys = block_keys(self._identity, tokens, scope.shared_tokens, scope.salt)
        except ValueError:  # ids that are none: the worker will say so
            return []
        return [key[:KEY_PART] for key in keys]

    def report(self, replica: ReplicaT, stats: Mapping[str, object]) -> None:
        """Enter what a replica published. Cheap where nothing has changed."""
        fields, keys = stats.get("identity"), stats.get("keys")
        if not isinstance(fields, tuple) or not isinstance(keys, bytes):
            return
        known = self._reported.get(replica)
        if known is None or known[0] is not keys:
            self._identity = Identity(*fields)
            parts = range(0, len(keys), KEY_PART)
            self._reported[replica] = keys, frozenset(keys[i : i + KEY_PART] for i in parts)

    def keep(self, replicas: Iterable[ReplicaT]) -> None:
        """Forget all other replicas."""
        alive = set(replicas)
        for replica in self._reported.keys() - alive:
            del self._reported[replica]

    def sent(self, keys: Sequence[bytes], replica: ReplicaT) -> None:
        """A request with these blocks went to a replica, and will be there before it reports."""
        now = self._clock()
        for key in keys:
            self._sent[key] = replica, now
            self._sent.move_to_end(key)
        while len(self._sent) > _REMEMBERED:
            self._sent.popitem(last=False)

    def rank(self, keys: Sequence[bytes], loads: Mapping[ReplicaT, int]) -> list[ReplicaT]:
        """Replicas, the best first.

        First those that are not too busy, by the blocks that they hold less a few for each request
        that they have. Then the others, by load.

        Args:
            keys: of the request.
            loads: requests at each replica.
        """
        least = min(loads.values(), default=0)

        def place(replica: ReplicaT) -> tuple[bool, int, float]:
            busy = not self._balance.allows(loads[replica], least)
            held = 0 if busy else self._held(replica, keys)
            return busy, _BLOCKS_PER_REQUEST * loads[replica] - held, self._rng.random()

        return sorted(loads, key=place)

    def _held(self, replica: ReplicaT, keys: Sequence[bytes]) -> int:
        """How many of the first blocks a replica holds without a gap."""
        _, reported = self._reported.get(replica, (b"", frozenset[bytes]()))
        since = self._clock() - _REMEMBERED_S
        for count, key in enumerate(keys):
            to, when = self._sent.get(key, (None, 0.0))
            if key not in reported and (to != replica or when < since):
                return count
        return len(keys)
