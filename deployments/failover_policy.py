"""What the streams of one gateway share when workers are lost. Holds no Ray."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

from deployments.failover_settings import FailoverSettings
from deployments.fleet import Fleet, fleet
from deployments.probation import Probation
from deployments.retry import Backoff, RetryBudget


@dataclass
class FailoverPolicy:
    """What the streams of one gateway have in common.

    Attributes:
        settings: of the failover.
        handover_s: after a worker was told to stop, how long its answers stay with it.
        retry_after_s: for clients that are turned away.
        fleet: of workers.
        probation: of suspects.
        backoff: between attempts.
        clock: seconds; the fleet's.
        counted: told the outcome of each fault: sent again (``resumed``, ``handover``), or not
            (``poisonous``, ``failed``).
    """

    settings: FailoverSettings
    handover_s: float
    retry_after_s: int
    fleet: Fleet = field(default_factory=fleet)
    probation: Probation = field(default_factory=Probation)
    backoff: Backoff = field(default_factory=Backoff)
    clock: Callable[[], float] = time.monotonic
    counted: Callable[[str], None] = lambda outcome: None

    def __post_init__(self) -> None:
        self.budget = RetryBudget(self.settings.retry_burst, self.settings.retries_per_s)
