"""What the engine says of a request and of itself. Holds no torch."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

FinishReason = Literal["stop", "length", "abort", "error"]


@dataclass(frozen=True)
class RequestStats:
    """How a finished request went.

    Attributes:
        prompt_tokens: length of the prompt.
        completion_tokens: tokens emitted, an end token included, and those of earlier attempts.
        rounds: verify forwards; the one that ends prefill is not counted.
        drafted: candidate nodes verified, roots not counted.
        accepted: candidate nodes kept.
        accepted_by_depth: of them by depth, from depth 1 on.
        walked_by_depth: rounds that offered a candidate of that depth.
        preemptions: times its pages were taken away.
        cached_tokens: prompt tokens whose KV was found when it started.
        loaded_tokens: of them, those that came from the store.
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
    cached_tokens: int
    loaded_tokens: int
    queue_s: float
    first_token_s: float | None
    total_s: float

    @property
    def tokens_per_round(self) -> float:
        """Mean committed tokens per round (accepted + 1), the acceptance length."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """What the model itself thought of a token, before anything a request asks for.

    Attributes:
        token: the one emitted, or the prompt's.
        logprob: its log-probability, in nats.
        top: the likeliest tokens and theirs, falling; as many as were asked for.
    """

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True)
class RequestOutput:
    """New tokens of one request after a step, and its end where it ended.

    Attributes:
        request_id: whose.
        new_tokens: emitted in this step, an end token included.
        finish_reason: None while it runs.
        error: what went wrong, where ``finish_reason`` is ``error``.
        stats: set when finished.
        cached_tokens: prompt tokens whose KV was found when the request started.
        drafted: candidate nodes verified up to now, prior tokens' left out.
        accepted: of them, those kept.
        logprobs: one per new token, where they were asked for.
        prompt_logprobs: of the prompt's tokens but the first, once, along with the first new
            tokens, where they were asked for.
    """

    request_id: str
    new_tokens: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str | None = None
    stats: RequestStats | None = None
    cached_tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()

    @property
    def finished(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None

    def followed_by(self, later: RequestOutput) -> RequestOutput:
        """This one and the next one of the same request as one."""
        return replace(
            later,
            new_tokens=self.new_tokens + later.new_tokens,
            logprobs=self.logprobs + later.logprobs,
            prompt_logprobs=self.prompt_logprobs + later.prompt_logprobs,
        )


@dataclass
class EngineStats:
    """Counts since start. Seconds are by phase of the step.

    ``prompt_tokens``, ``cached_tokens`` and ``loaded_tokens`` are those of the requests that
    have ended.
    """

    steps: int = 0
    rows: int = 0
    rounds: int = 0
    drafted: int = 0
    accepted: int = 0
    emitted: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    loaded_tokens: int = 0
    finished: dict[str, int] = field(default_factory=dict)
    phase_s: dict[str, float] = field(default_factory=dict)

    @property
    def tokens_per_round(self) -> float:
        """Mean committed tokens per round over all requests."""
        return (self.accepted + self.rounds) / self.rounds if self.rounds else 0.0
