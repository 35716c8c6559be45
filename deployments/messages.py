"""What gateway and worker say to each other. Holds no torch and no Ray."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from prefix_cache.checkpoints.record import FIRST_FENCE
from prefix_cache.stats import CacheStats
from specdec.outputs import EngineStats, RequestOutput
from specdec.params import CacheScope, SamplingParams

FaultKind = Literal[
    "invalid", "too_long", "busy", "unavailable", "lost", "handover", "superseded", "internal"
]


@dataclass(frozen=True)
class WorkerInfo:
    """What the gateway needs to know of the model behind a worker.

    Attributes:
        max_model_length: most tokens of prompt and answer together.
        eos_token_ids: tokens that end an answer and are no part of its text.
        vocab_size: tokens that the model knows.
        kv_tokens: tokens whose KV one worker can hold.
    """

    max_model_length: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    kv_tokens: int


@dataclass(frozen=True)
class Ticket:
    """What a worker writes checkpoints of a request with.

    Attributes:
        fence: that the gateway has claimed; every attempt adds one.
        request: parameters and scope as the gateway wants them back.
        answer: what a gateway needs to go on with the answer.
    """

    fence: int
    request: bytes
    answer: bytes


@dataclass(frozen=True)
class GenerateRequest:
    """One choice to generate.

    Attributes:
        request_id: unique among all requests.
        prompt_tokens: to continue.
        params: how.
        scope: with whom the prompt's KV is shared.
        prior_tokens: what earlier attempts have emitted; not emitted again.
        attempt: 0, and one more each time the request is sent again. Of two attempts the higher
            one alone counts.
        model: that the tokens are of, as ``AppConfig.weights`` names it; empty fits any.
        trace: the gateway's span, see specdec/tracing/carrier.py; empty if it is not traced.
        ticket: for its checkpoints; None if there are to be none.
    """

    request_id: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams
    scope: CacheScope = field(default_factory=CacheScope)
    prior_tokens: tuple[int, ...] = ()
    attempt: int = 0
    model: str = ""
    trace: Mapping[str, str] = field(default_factory=dict)
    ticket: Ticket | None = None

    @property
    def attempt_id(self) -> str:
        """Unique among all attempts of all requests: the id in the engine."""
        claims = 0 if self.ticket is None else self.ticket.fence - FIRST_FENCE
        number = claims + self.attempt
        return f"{self.request_id}.{number}" if number else self.request_id


@dataclass(frozen=True)
class Alive:
    """A sign of life: the worker is there and its engine moves. Comes first, and whenever there
    is nothing else to tell for a while.

    Attributes:
        worker: the unique part of its replica's id.
    """

    worker: str = ""


@dataclass(frozen=True)
class Accepted:
    """A request waits or runs in the engine."""


@dataclass(frozen=True)
class Fault:
    """The last event of a request that the worker does not answer, or not to its end.

    Attributes:
        kind: ``invalid`` and ``too_long`` blame the request, ``busy`` and ``unavailable`` the
            moment, ``internal`` the server. ``lost``: the worker died with it, or its engine.
            ``handover``: the worker stops in good order; any other may go on. ``superseded``:
            another connection has the answer now.
        message: for the client.
        param: the field at fault, or None.
    """

    kind: FaultKind
    message: str
    param: str | None = None


#: The events of a request in order: Accepted, RequestOutput until a finished one, with Alive
#: anywhere. A Fault may take the place of any of them, and ends the request.
Event = Alive | Accepted | Fault | RequestOutput


@dataclass(frozen=True)
class IntegrityReport:
    """The insides of a worker after ``check_integrity``.

    Attributes:
        problem: what does not add up, or None.
        open_requests: requests whose caller still listens.
        pages_in_use: KV pages held.
        has_work: whether any request is unfinished.
        stats: counts since start.
        stored: counts of the prefix cache's store; None without one.
    """

    problem: str | None
    open_requests: int
    pages_in_use: int
    has_work: bool
    stats: EngineStats
    stored: CacheStats | None
