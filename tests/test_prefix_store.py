"""KV that comes from a store: other engines' answers are the same, sooner; float32.

A real server (valkey) and a real LMDB. What these catch: blocks written before their KV was in
place or into other pages, a payload of another layout, a block of other tokens that was believed,
a fault of the store that reaches a request, a request that waits for its blocks for ever.
"""

from __future__ import annotations

import random
from contextlib import closing
from pathlib import Path

import pytest

from bench.reference import generate_greedy
from bench.valkey import Valkey
from specdec.params import CacheScope, SamplingParams
from tests.engines import (
    ALL,
    answer,
    answer_all,
    plain_sampling,
)
from tests.prefix_engines import GREEDY, NEW_TOKENS, PAGE, engine_for, settle, stats_of, text
from tests.tiny_models import tiny_model


@pytest.fixture(params=["redis", "lmdb"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "lmdb":
        return f"lmdb://{tmp_path}/blocks"
    server: Valkey = request.getfixturevalue("valkey")
    return server.url


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "qwen3"])
def test_another_engine_finds_every_length(name: str, url: str) -> None:
    model = tiny_model(name, seed=5)
    known = text(1, 5 * PAGE)
    lengths = range(1, len(known) + 1)
    expected = [generate_greedy(model, known[:n], NEW_TOKENS) for n in lengths]
    with closing(engine_for(model, url)) as first:
        assert answer(first, known, GREEDY)[0] == expected[-1]
        settle(first)
    with closing(engine_for(model, url)) as engine:
        for n, tokens in zip(lengths, expected, strict=True):
            got, stats = answer(engine, known[:n], GREEDY, CacheScope(0, b""))
            assert got == tokens, n
            assert stats.cached_tokens == (n - 1) // PAGE * PAGE
            engine.scheduler.allocator.clear()  # each time from the store, not from the pool
        assert stats_of(engine).hits == sum((n - 1) // PAGE for n in lengths)


def test_a_chat_goes_on_in_another_engine(url: str) -> None:
    """Its answers' blocks too, from engine to engine."""
    model = tiny_model("llama", seed=7)
    history, before = text(3, 9), 0
    for turn in range(4):
        expected = generate_greedy(model, history, NEW_TOKENS)
        with closing(engine_for(model, url)) as engine:
            got, stats = answer(engine, history, GREEDY)
            settle(engine)
        assert got == expected
        if turn:
            assert stats.cached_tokens == (before - 1) // PAGE * PAGE
        before = len(history) + len(got)
        history = history + got + text(10 + turn, 3)


@pytest.mark.parametrize("rule", ["greedy", "seeded"])
def test_many_at_once_in_small_pools(rule: str, valkey: Valkey) -> None:
    """Sharing, eviction, preemption, and blocks that come back from the store."""
    model = tiny_model("llama", seed=8)
    rng = random.Random(4)
    system = [text(20 + i, 2 * PAGE + i) for i in range(3)]
    prompts = [rng.choice(system) + text(30 + i, rng.randrange(1, 12)) for i in range(12)]
    params = [
        SamplingParams(max_tokens=12, temperature=float(rule == "seeded"), seed=i)
        for i in range(len(prompts))
    ]
    expected = [
        plain_sampling(model, prompt, 12, p)
        if rule == "seeded"
        else generate_greedy(model, prompt, 12)
        for prompt, p in zip(prompts, params, strict=True)
    ]
    loaded = preemptions = 0
    with (
        closing(engine_for(model, valkey.url, pages=26, prefill_chunk=7)) as one,
        closing(engine_for(model, valkey.url, pages=26, prefill_chunk=7)) as two,
    ):
        for engine in (one, two, one, two):
            order = list(range(len(prompts)))
            rng.shuffle(order)
            results = answer_all(engine, [(prompts[i], params[i], ALL) for i in order])
            for i, (got, stats) in zip(order, results, strict=True):
                assert got == expected[i], i
                loaded += stats.loaded_tokens
                preemptions += stats.preemptions
            settle(engine)
    assert loaded > 50
    assert preemptions > 0


def test_tenants_share_the_system_prompt_alone(url: str) -> None:
    model = tiny_model("llama", seed=9)
    system, user = text(5, 2 * PAGE + 2), text(6, 3 * PAGE)
    expected = generate_greedy(model, system + user, NEW_TOKENS)
    found = []
    for salt in (b"a", b"a", b"b"):
        with closing(engine_for(model, url)) as engine:
            got, stats = answer(engine, system + user, GREEDY, CacheScope(len(system), salt))
            settle(engine)
        assert got == expected
        found.append(stats.cached_tokens)
    assert found == [0, (len(system + user) - 1) // PAGE * PAGE, 2 * PAGE]
