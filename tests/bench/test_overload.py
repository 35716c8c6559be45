"""What a storm is measured against."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from bench import overload


def test_capacity_counts_the_answers_of_all_who_ask_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = 0

    async def ask(client: httpx.AsyncClient, model: str, number: int) -> overload.Answer:
        nonlocal answered
        await asyncio.sleep(0.02)
        answered += 1
        return overload.Answer(200, 0.02, False, True)

    async def run() -> float:
        async with httpx.AsyncClient() as client:
            return await overload._capacity(client, "m", 0.5)

    monkeypatch.setattr(overload, "ask", ask)
    rate = asyncio.run(run())
    assert rate * 0.5 <= answered <= rate * 0.7
