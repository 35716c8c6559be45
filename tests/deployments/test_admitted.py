"""Deadlines of answers, and what is given back at their end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import cast

import pytest

from deployments import admitted
from deployments.admission import Admission, Need, NoRoomError
from deployments.admitted import AdmittedGeneration, no_room
from deployments.errors import ApiError
from deployments.generation import Generation, Piece
from deployments.responses import CompletionTokensDetails, PromptTokensDetails, Usage
from deployments.security.guard import Caller
from deployments.security.rates import Account, Rates
from deployments.tracing.request import current_trace


class SlowGeneration:
    """A generation that yields one piece, and then nothing for a long time."""

    def __init__(self) -> None:
        self.closed = 0
        self.trace = current_trace()

    async def start(self) -> None:
        pass

    async def pieces(self) -> AsyncGenerator[Piece]:
        yield Piece(0, "a", None)
        await asyncio.sleep(60)

    async def close(self) -> None:
        self.closed += 1

    @property
    def usage(self) -> Usage:
        return Usage(
            prompt_tokens=3,
            completion_tokens=1,
            total_tokens=4,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=0),
            completion_tokens_details=CompletionTokensDetails(
                accepted_prediction_tokens=0, rejected_prediction_tokens=0
            ),
        )


def test_an_answer_that_takes_too_long_ends_and_gives_its_room_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(admitted, "_GRACE_S", 0.01)

    async def run(reads: bool) -> None:
        admission = Admission(lambda: Need(1, 10), 10, 60)
        account = Account(Rates(tokens_per_minute=100), lambda: 0.0)
        caller = Caller("ann", b"", None, account.enter())
        caller.reserve(50)
        inner = SlowGeneration()
        generation = AdmittedGeneration(
            cast(Generation, inner), await admission.admit(Need(1, 10)), caller, 0.05
        )
        await generation.start()
        pieces = generation.pieces()
        assert (await anext(pieces)).text == "a"
        if reads:
            with pytest.raises(ApiError) as caught:
                await anext(pieces)
            assert (caught.value.status, caught.value.code) == (408, "request_timeout")
            await generation.close()
        # a client that does not read: nobody asks for another piece
        (await admission.admit(Need(1, 10))).release()
        assert inner.closed >= 1
        await pieces.aclose()
        await generation.close()
        assert caller.lease is not None
        caller.lease.release()
        assert account.standings()["tokens"].remaining == 96

    asyncio.run(run(True))
    asyncio.run(run(False))


@pytest.mark.parametrize(
    ("error", "status", "retry"),
    [
        (NoRoomError("x", False, None), 429, "2"),
        (NoRoomError("x", False, 0.1), 429, "2"),
        (NoRoomError("x", False, 7.2), 429, "8"),
        (NoRoomError("x", True, 1e9), 503, "60"),
    ],
)
def test_what_a_client_is_told(error: NoRoomError, status: int, retry: str) -> None:
    answer = no_room(error, 2)
    assert (answer.status, answer.headers["Retry-After"]) == (status, retry)
