"""What gateway and worker say to each other. Holds no torch and no Ray."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from specdec.outputs import EngineStats, RequestOutput
from specdec.params import SamplingParams

FaultKind = Literal["invalid", "too_long", "busy", "unavailable", "internal"]


@dataclass(frozen=True)
class WorkerInfo:
    """What the gateway needs to know of the model behind a worker.

    Attributes:
        max_model_length: most tokens of prompt and answer together.
        eos_token_ids: tokens that end an answer and are no part of its text.
    """

    max_model_length: int
    eos_token_ids: frozenset[int]


@dataclass(frozen=True)
class GenerateRequest:
    """One choice to generate."""

    request_id: str
    prompt_tokens: tuple[int, ...]
    params: SamplingParams


@dataclass(frozen=True)
class Accepted:
    """The first event of a request: it waits or runs in the engine."""


@dataclass(frozen=True)
class Fault:
    """The last event of a request that the worker does not answer, or not to its end.

    Attributes:
        kind: ``invalid`` and ``too_long`` blame the request, ``busy`` and ``unavailable`` the
            moment, ``internal`` the server.
        message: for the client.
        param: the field at fault, or None.
    """

    kind: FaultKind
    message: str
    param: str | None = None


#: The events of a request in order: Accepted, RequestOutput until a finished one. A Fault may
#: take the place of any of them, and ends the request.
Event = Accepted | Fault | RequestOutput


@dataclass(frozen=True)
class IntegrityReport:
    """The insides of a worker after ``check_integrity``.

    Attributes:
        problem: what does not add up, or None.
        open_requests: requests whose caller still listens.
        pages_in_use: KV pages held.
        has_work: whether any request is unfinished.
        stats: counts since start.
    """

    problem: str | None
    open_requests: int
    pages_in_use: int
    has_work: bool
    stats: EngineStats
