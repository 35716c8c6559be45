"""What the engine says of a request and of itself. Holds no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class RequestStats:
    """How a finished request went.

    Attributes:
        prompt_tokens: length of the prompt.
        completion_tokens: tokens emitted, an end token included.
        rounds: verify forwards; the one that ends prefill is not counted.
        drafted: candidate nodes verified, roots not counted.
        accepted: candidate nodes kept.
        accepted_by_depth: of them by depth, from depth 1 on.
        walked_by_depth: rounds that offered a candidate of that depth.
        preemptions: times its pages were taken away.
        queue_s: seconds from arrival to the first scheduled step.
        first_token_s: seconds from arrival to the first token, or None.
        total_s: seconds from arrival to the end.
    """

    prompt_tokens: int
    completion_tokens: int
    rounds: int
    drafted: int
    accepted: int
    accepted_by_depth: tuple[int, ...]
    walked_by_depth: tuple[int, ...]
    preemptions: int
    queue_s: float
    first_token_s: float | None
    total_s: float

    @property
    def tokens_per_round(self) -> float:
        """Mean committed tokens per round (accepted + 1), the acceptance length."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True)
class RequestOutput:
    """New tokens of one request after a step, and its end where it ended.

    Attributes:
        request_id: whose.
        new_tokens: emitted in this step, an end token included.
        finish_reason: None while it runs.
        error: what went wrong, where ``finish_reason`` is ``error``.
        stats: set when finished.
    """

    request_id: str
    new_tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: RequestStats | None = None

    @property
    def finished(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None


@dataclass
class EngineStats:
    """Counts since start. Seconds are by phase of the step."""

    steps: int = 0
    rows: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    phase_s: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_round(self) -> float:
        """Mean committed tokens per round over all requests."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0
