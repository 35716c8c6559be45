"""Which traces are kept, and how much they tell. Gateway and worker go by the same rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Detail = Literal["spans", "events", "off"]
Kept = Literal["sampled", "slow", "failed"]


@dataclass(frozen=True)
class TraceRules:
    """Attributes:
    detail: what becomes of the rounds: spans, events of the request's span, or nothing.
    slow_s: a request that takes as long is kept, sampled or not.
    most_steps: rounds and prefill chunks of a request that are remembered until its end.
    baggage: entries that are written on the spans of gateway and worker.
    """

    detail: Detail = "spans"
    slow_s: float = 10.0
    most_steps: int = 512
    baggage: tuple[str, ...] = ()

    def why_kept(self, sampled: bool, failed: bool, seconds: float) -> Kept | None:
        """Decided at the end of a request; None lets its trace go.

        Args:
            sampled: the caller's decision, or by ratio.
            failed: it ended with an error.
            seconds: from arrival to end.
        """
        if failed:
            return "failed"
        if seconds >= self.slow_s:
            return "slow"
        return "sampled" if sampled else None
