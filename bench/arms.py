"""What is measured against what: every arm answers the same requests and says when.

All requests of a run arrive at once; times count from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import mean
from typing import Protocol, cast

import torch
from opentelemetry.context import Context
from transformers import GenerationMixin, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

from specdec.engine import Engine
from specdec.outputs import RequestOutput
from specdec.params import CacheScope, SamplingParams


@dataclass(frozen=True)
class Ask:
    """How requests are to be answered.

    Attributes:
        max_tokens: longest answer; an end token ends it sooner.
        temperature: 0 is greedy.
        top_p: nucleus, where sampled.
    """

    max_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0


@dataclass
class Answer:
    """When the tokens of one answer came, in seconds; and with drafts, how they came about.

    Attributes:
        times: per token.
        rounds: verify forwards.
        accepted_by_depth: candidates kept, from depth 1 on.
    """

    times: list[float] = field(default_factory=list)
    rounds: int = 0
    accepted_by_depth: tuple[int, ...] = ()

    @property
    def time_per_token(self) -> float:
        """Seconds per token after the first."""
        return (self.times[-1] - self.times[0]) / max(1, len(self.times) - 1)


class Arm(Protocol):
    """One way to answer."""

    def run(self, prompts: Sequence[list[int]], ask: Ask) -> list[Answer]:
        """Answer all prompts, which arrive at once."""


def throughput(answers: Sequence[Answer]) -> float:
    """Tokens per second from arrival to the last token."""
    tokens = sum(len(answer.times) for answer in answers)
    return tokens / max(answer.times[-1] for answer in answers)


def decoding_speed(answers: Sequence[Answer]) -> float:
    """Tokens per second while all that have not ended are decoding: after the last first token."""
    start = max(answer.times[0] for answer in answers)
    tokens = sum(time > start for answer in answers for time in answer.times)
    return tokens / max(1e-9, max(answer.times[-1] for answer in answers) - start)


def tokens_per_round(answers: Sequence[Answer]) -> float:
    """Mean committed tokens per round; 0 without rounds."""
    rounds = sum(answer.rounds for answer in answers)
    accepted = sum(sum(answer.accepted_by_depth) for answer in answers)
    return (accepted + rounds) / rounds if rounds else 0.0


@dataclass(frozen=True)
class EngineArm:
    """Our engine, stepped in this process: without the server's and any other process's share.

    Attributes:
        caller: makes each request's context of a trace.
        after_step: told of each step's outputs and seconds, as the server's engine thread does.
    """

    engine: Engine
    speculation: bool
    scope: CacheScope = field(default_factory=CacheScope)
    caller: Callable[[], Context | None] = lambda: None
    after_step: Callable[[Engine, list[RequestOutput], float], None] | None = None

    def run(self, prompts: Sequence[list[int]], ask: Ask) -> list[Answer]:
        """See :class:`Arm`."""
        answers = {str(number): Answer() for number in range(len(prompts))}
        started = time.perf_counter()
        for number, prompt in enumerate(prompts):
            params = SamplingParams(
                max_tokens=ask.max_tokens,
                temperature=ask.temperature,
                top_p=ask.top_p if ask.temperature else 1.0,
                seed=number,
                speculation=self.speculation,
            )
            self.engine.add_request(str(number), prompt, params, self.scope, context=self.caller())
        while self.engine.has_work:
            began = time.perf_counter()
            outputs = self.engine.step()
            if self.after_step is not None:
                self.after_step(self.engine, outputs, time.perf_counter() - began)
            for output in outputs:
                answer = answers[output.request_id]
                now = time.perf_counter() - started
                answer.times += [now] * len(output.new_tokens)
                if output.error is not None:
                    raise RuntimeError(output.error)
                if output.stats is not None:
                    answer.rounds = output.stats.rounds
                    answer.accepted_by_depth = output.stats.accepted_by_depth
        return list(answers.values())


class TokenClock(BaseStreamer):
    """Notes when ``generate`` puts out tokens. The first call holds the prompt.

    Attributes:
        started: when it was made, on ``time.perf_counter``.
        times: per token the seconds since then.
    """

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.times: list[float] = []
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        """Called by ``generate``."""
        if self._prompt_seen:
            self.times += [time.perf_counter() - self.started] * value.numel()
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to close."""


@dataclass(frozen=True)
class GenerateArm:
    """``transformers.generate``, one request after the other.

    Attributes:
        lookup: tokens drafted by its prompt lookup; None decodes plainly.
    """

    model: PreTrainedModel
    lookup: int | None = None

    @torch.inference_mode()
    def run(self, prompts: Sequence[list[int]], ask: Ask) -> list[Answer]:
        """See :class:`Arm`; with prompt lookup only the end of an answer is known."""
        answers = []
        offset = 0.0
        for prompt in prompts:
            ids = torch.tensor([prompt], device=self.model.device)
            clock = TokenClock()
            sampling = {"temperature": ask.temperature, "top_p": ask.top_p, "top_k": 0}
            extra = sampling if ask.temperature else {}
            out = cast(GenerationMixin, self.model).generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=ask.max_tokens,
                do_sample=bool(ask.temperature),
                prompt_lookup_num_tokens=self.lookup,
                streamer=None if self.lookup else clock,
                pad_token_id=0,
                **extra,
            )
            total = time.perf_counter() - clock.started
            count = cast(torch.Tensor, out).shape[1] - len(prompt)
            times = clock.times or [total * (i + 1) / count for i in range(count)]
            answers.append(Answer([offset + t for t in times]))
            offset += total
        return answers


def mean_first_token(answers: Sequence[Answer]) -> float:
    """Mean seconds from arrival to the first token."""
    return mean(answer.times[0] for answer in answers)
