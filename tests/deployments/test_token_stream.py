"""The gateway's side of failover against scripted workers: what no real kill can time.

Real ones are in test_failover.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import pytest

from deployments.attempt import Attempt
from deployments.errors import ApiError
from deployments.failover import TokenStream
from deployments.failover_policy import FailoverPolicy
from deployments.failover_settings import FailoverSettings
from deployments.fleet import Fleet
from deployments.messages import Accepted, Alive, Event, Fault, GenerateRequest
from deployments.probation import Probation
from deployments.retry import Backoff
from specdec.outputs import RequestOutput, RequestStats
from specdec.params import SamplingParams

LOST = Fault("lost", "dead")
ANSWER = tuple(range(100, 130))
ResultT = TypeVar("ResultT")


@dataclass
class Responses:
    """What a worker sends, in place of Ray's generator; behind the last event it is silent."""

    events: Sequence[Event]
    cancelled: bool = False
    sent: int = 0
    gate: asyncio.Event | None = None

    async def __anext__(self) -> Event:
        if self.gate is not None:
            await self.gate.wait()
        if self.sent == len(self.events):
            await asyncio.Event().wait()
        self.sent += 1
        return self.events[self.sent - 1]

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    def cancel(self) -> None:
        self.cancelled = True


def output(
    request: GenerateRequest, *tokens: int, drafted: int = 0, accepted: int = 0, cached: int = 0
) -> RequestOutput:
    return RequestOutput(
        request.attempt_id, tokens, cached_tokens=cached, drafted=drafted, accepted=accepted
    )


def rest(request: GenerateRequest, upto: int | None = None, worker: str = "w") -> list[Event]:
    """A worker that has the answer and sends it token by token, to its end or up to a place."""
    events: list[Event] = [Alive(worker), Accepted()]
    done = len(request.prior_tokens)
    assert request.prior_tokens == ANSWER[:done]
    events += [output(request, token, drafted=2, accepted=1) for token in ANSWER[done:upto]]
    if upto is None:
        stats = RequestStats(3, len(ANSWER), 9, 2, 1, (), (), 0, 0, 0, 0.0, 0.0, 0.0)
        last = cast(RequestOutput, events.pop())
        end = RequestOutput(last.request_id, last.new_tokens, "length", None, stats, 0, 2, 1)
        events.append(end)
    return events


@dataclass
class Workers:
    """Sends each attempt to the next of some scripts."""

    scripts: Sequence[Callable[[GenerateRequest], Sequence[Event]]]
    requests: list[GenerateRequest] = field(default_factory=list)
    responses: list[Responses] = field(default_factory=list)

    def send(self, request: GenerateRequest) -> Attempt:
        script = self.scripts[min(len(self.requests), len(self.scripts) - 1)]
        self.requests.append(request)
        self.responses.append(Responses(script(request)))
        return Attempt(cast(Any, self.responses[-1]))


def policy(fleet: Fleet | None = None, **settings: Any) -> FailoverPolicy:
    known = fleet or Fleet()
    known.update({"w", "v"} if fleet is None else fleet.usable())
    return FailoverPolicy(
        FailoverSettings(**settings),
        handover_s=0,
        retry_after_s=1,
        fleet=known,
        probation=Probation(),
        backoff=Backoff(0.0),
    )


def request(name: str = "r") -> GenerateRequest:
    return GenerateRequest(name, (1, 2, 3), SamplingParams(max_tokens=len(ANSWER)))


async def read(stream: TokenStream) -> list[RequestOutput]:
    await stream.accepted()
    try:
        return [output async for output in stream.outputs()]
    finally:
        stream.close()


def run(workers: Workers, chosen: FailoverPolicy | None = None) -> list[RequestOutput]:
    async def body() -> list[RequestOutput]:
        stream = TokenStream(request(), workers.send, chosen or policy())
        return await asyncio.wait_for(read(stream), 30)

    return asyncio.run(body())


def tokens(outputs: list[RequestOutput]) -> tuple[int, ...]:
    return tuple(token for output in outputs for token in output.new_tokens)


@pytest.mark.parametrize("first", [0, 1, 7, 29])
@pytest.mark.parametrize("second", [4, 9, 29])
def test_tokens_come_once_wherever_workers_die(first: int, second: int) -> None:
    dies_at = [first, first + second]
    workers = Workers(
        [
            lambda r: [*rest(r, dies_at[0]), LOST],
            lambda r: [*rest(r, dies_at[1]), LOST] if dies_at[1] < len(ANSWER) else rest(r),
            rest,
        ]
    )
    outputs = run(workers)
    assert tokens(outputs) == ANSWER
    assert [r.attempt for r in workers.requests] == list(range(len(workers.requests)))
    end = outputs[-1]
    assert end.stats is not None
    # each token but a finished attempt's repeats its attempt's count: 2 drafted, 1 accepted
    assert (end.drafted, end.accepted) == (end.stats.drafted, end.stats.accepted)
    assert end.drafted == 2 * end.accepted > 0
    assert [o.drafted for o in outputs] == sorted(o.drafted for o in outputs)


def test_cached_tokens_are_those_of_the_first_attempt() -> None:
    def first(r: GenerateRequest) -> list[Event]:
        return [Alive("w"), Accepted(), output(r, 100, cached=2), LOST]

    outputs = run(Workers([first, rest]))
    assert {output.cached_tokens for output in outputs} == {2}


def test_what_an_old_attempt_yet_sends_is_not_heard() -> None:
    async def body() -> None:
        chosen = policy(wedge_timeout_s=0.05)
        workers = Workers([lambda r: rest(r, 5), rest])
        stream = TokenStream(request(), workers.send, chosen)
        outputs = await asyncio.wait_for(read(stream), 30)
        assert tokens(outputs) == ANSWER
        zombie = workers.responses[0]
        assert zombie.cancelled
        assert "w" not in chosen.fleet.usable() or len(workers.requests) == 2
        assert zombie.sent == 7  # nobody asked it again

    asyncio.run(body())


def test_the_poisonous_request_alone_fails() -> None:
    """Six at once on one worker; whoever goes on with the poison dies with it."""

    async def body() -> None:
        chosen = policy()
        dead: list[asyncio.Event] = []
        alive: list[tuple[Responses, asyncio.Event]] = []

        def send(sent: GenerateRequest) -> Attempt:
            poisonous = sent.request_id == "poison"
            if poisonous and sent.attempt == 0:
                responses = Responses([*rest(sent, 0), LOST], gate=asyncio.Event())
            elif poisonous:
                responses = Responses([*rest(sent, 0), LOST])
            elif sent.attempt == 0:
                responses = Responses([*rest(sent, 3), LOST])
            else:
                responses = Responses(rest(sent))
            if responses.gate is not None:
                dead.append(responses.gate)
                asyncio.get_running_loop().call_later(0.05, responses.gate.set)
            alive.append((responses, asyncio.Event()))
            return Attempt(cast(Any, responses))

        names = ["a", "b", "poison", "c", "d", "e"]
        streams = [TokenStream(request(name), send, chosen) for name in names]
        results = await asyncio.wait_for(
            asyncio.gather(*map(read, streams), return_exceptions=True), 30
        )
        for name, result in zip(names, results, strict=True):
            if name == "poison":
                assert isinstance(result, ApiError)
                assert (result.status, result.code) == (500, "request_kills_workers")
            else:
                assert not isinstance(result, BaseException)
                assert tokens(result) == ANSWER

    asyncio.run(body())


def test_two_deaths_with_progress_between_them_are_no_poison() -> None:
    scripts = [lambda r, n=n: [*rest(r, n), LOST] for n in (2, 7, 12, 17, 22, 27)]
    assert tokens(run(Workers([*scripts, rest]), policy(retries=1))) == ANSWER


def test_failures_without_progress_are_counted_and_bounded() -> None:
    gone = Fault("unavailable", "gone")
    workers = Workers([lambda r: [Alive("w"), gone]])
    with pytest.raises(ApiError) as caught:
        run(workers, policy(retries=3))
    assert caught.value.status == 503
    assert len(workers.requests) == 4


def test_the_budget_is_shared() -> None:
    chosen = policy(retries=100, retry_burst=5, retries_per_s=1e-6)
    workers = Workers([lambda r: [Alive("w"), Fault("unavailable", "gone")]])
    for sent in (6, 7):  # the second one finds it used up
        with pytest.raises(ApiError):
            run(workers, chosen)
        assert len(workers.requests) == sent


def test_failover_can_be_turned_off() -> None:
    workers = Workers([lambda r: [*rest(r, 3), LOST]])
    with pytest.raises(ApiError):
        run(workers, policy(retries=0))
    assert len(workers.requests) == 1


@pytest.mark.parametrize(
    ("kind", "status"), [("invalid", 400), ("too_long", 400), ("busy", 429), ("internal", 500)]
)
def test_refusals_of_a_new_request_are_told_at_once(kind: Any, status: int) -> None:
    workers = Workers([lambda r: [Alive("w"), Fault(kind, "no", "prompt")]])
    with pytest.raises(ApiError) as caught:
        run(workers)
    assert caught.value.status == status
    assert len(workers.requests) == 1


def test_a_full_worker_makes_a_resumed_request_wait() -> None:
    scripts = [lambda r: [*rest(r, 3), LOST]]
    scripts += [lambda r: [Alive("w"), Fault("busy", "full")]] * 10
    assert tokens(run(Workers([*scripts, rest]), policy(retries=1))) == ANSWER


def test_a_resumed_request_is_never_blamed_on_the_client() -> None:
    workers = Workers(
        [lambda r: [*rest(r, 3), LOST], lambda r: [Alive("w"), Fault("invalid", "no")]]
    )
    with pytest.raises(ApiError) as caught:
        run(workers)
    assert caught.value.status == 500


def test_a_stopping_workers_answers_are_handed_over_at_no_cost() -> None:
    fleet = Fleet()
    fleet.update({"w", "v"})
    chosen = policy(fleet, retries=0)

    class Leaving(Responses):
        async def __anext__(self) -> Event:
            if self.sent == 7:  # and it goes on sending
                fleet.update({"v"})
            return await super().__anext__()

    sent: list[GenerateRequest] = []
    first = Leaving(rest(request(), None, "w"))

    def send(r: GenerateRequest) -> Attempt:
        sent.append(r)
        return Attempt(cast(Any, first if len(sent) == 1 else Responses(rest(r, None, "v"))))

    async def body() -> list[RequestOutput]:
        return await asyncio.wait_for(read(TokenStream(request(), send, chosen)), 30)

    assert tokens(asyncio.run(body())) == ANSWER
    assert first.cancelled
    assert [len(r.prior_tokens) for r in sent] == [0, 6]


def test_a_stopping_worker_keeps_its_answers_while_there_is_no_other() -> None:
    fleet = Fleet()
    fleet.update({"w"})
    chosen = policy(fleet)

    def leaving(r: GenerateRequest) -> list[Event]:
        fleet.update(set())
        return rest(r, None, "w")

    workers = Workers([leaving])
    assert tokens(run(workers, chosen)) == ANSWER
    assert len(workers.requests) == 1


def test_heartbeats_keep_a_request_that_waits() -> None:
    async def body() -> None:
        chosen = policy(wedge_timeout_s=0.9)

        class Beating(Responses):
            async def __anext__(self) -> Event:
                if 2 <= self.sent < 6:
                    await asyncio.sleep(0.6)
                return await super().__anext__()

        def send(sent: GenerateRequest) -> Attempt:
            events = rest(sent)
            return Attempt(cast(Any, Beating([*events[:2], *[Alive("w")] * 4, *events[2:]])))

        stream = TokenStream(request(), send, chosen)
        assert tokens(await asyncio.wait_for(read(stream), 30)) == ANSWER

    asyncio.run(body())


def test_a_client_that_leaves_in_the_midst_of_a_recovery_leaves_nothing_behind() -> None:
    async def body() -> None:
        chosen = policy()
        turn = await chosen.probation.enter()  # somebody else's
        workers = Workers([lambda r: [*rest(r, 3), LOST], rest])
        stream = TokenStream(request(), workers.send, chosen)
        reading = asyncio.create_task(read(stream))
        while not chosen.probation._waiting:
            await asyncio.sleep(0.01)
        reading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        assert not chosen.probation._waiting
        chosen.probation.leave(turn)
        assert (await asyncio.wait_for(chosen.probation.enter(), 5)).alone
        assert len(workers.requests) == 1

    asyncio.run(body())
