"""KV found in the pool changes when a text comes, never which: float32, against transformers.

What these catch: a block found under another prefix or for another tenant, a page written while
others read it, one published before its KV was in place, a last token that is not recomputed, a
window or position that counts from the first computed token instead of from the sequence's.
"""

from __future__ import annotations

import copy
import random
from dataclasses import replace

import pytest
from transformers import PreTrainedModel

from bench.reference import generate_greedy
from specdec.engine import Engine
from specdec.params import CacheScope, SamplingParams
from tests.engines import (
    ALL,
    ScriptedDrafter,
    answer,
    answer_all,
    fail,
    plain_sampling,
    tiny_engine,
)
from tests.prefix_engines import GREEDY, NEW_TOKENS, PAGE, text
from tests.tiny_models import VOCABULARY, tiny_model

#: Full attention, learned positions, sliding windows, normed heads.
FAMILIES = ("llama", "gpt2", "gemma2", "qwen3")


def engine_for(model: PreTrainedModel, pages: int = 256, prefill_chunk: int = 32) -> Engine:
    """Drafts are random, so that trees write scratch KV in every round."""
    return tiny_engine(
        copy.deepcopy(model),
        ScriptedDrafter({}, "random", VOCABULARY),
        page_size=PAGE,
        pages=pages,
        prefill_chunk=prefill_chunk,
    )


@pytest.mark.parametrize("name", FAMILIES)
def test_every_length_of_a_known_prompt(name: str) -> None:
    """On a block's boundary and off it, whole and in part."""
    model = tiny_model(name, seed=5)
    known = text(1, 5 * PAGE)
    expected = {
        length: generate_greedy(model, known[:length], NEW_TOKENS)
        for length in range(1, len(known) + 1)
    }
    engine = engine_for(model)
    assert answer(engine, known, GREEDY)[0] == expected[len(known)]
    for length, tokens in expected.items():
        got, stats = answer(engine, known[:length], GREEDY)
        assert got == tokens, length
        assert stats.cached_tokens == (length - 1) // PAGE * PAGE


@pytest.mark.parametrize("name", FAMILIES)
def test_prompts_that_part_from_a_known_one(name: str) -> None:
    model = tiny_model(name, seed=6)
    known, other = text(1, 4 * PAGE), text(2, 4 * PAGE)
    prompts = [known[:at] + other[at:] for at in range(len(known))]
    expected = [generate_greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    engine = engine_for(model)
    answer(engine, known, GREEDY)
    for at, (prompt, tokens) in enumerate(zip(prompts, expected, strict=True)):
        got, stats = answer(engine, prompt, GREEDY)
        assert got == tokens, at
        assert stats.cached_tokens >= at // PAGE * PAGE


@pytest.mark.parametrize("name", FAMILIES)
def test_a_chat_finds_its_history(name: str) -> None:
    """The answer's own tokens as well, those of its last round included."""
    model = tiny_model(name, seed=7)
    engine = engine_for(model)
    history, before = text(3, 9), 0
    for turn in range(4):
        expected = generate_greedy(model, history, NEW_TOKENS)
        got, stats = answer(engine, history, GREEDY)
        assert got == expected
        if turn:
            # all of the turn before but its last token, whose KV was never computed
            assert stats.cached_tokens == (before - 1) // PAGE * PAGE
        before = len(history) + len(got)
        history = history + got + text(10 + turn, 3)


@pytest.mark.parametrize("rule", ["greedy", "seeded"])
@pytest.mark.parametrize("name", FAMILIES)
def test_many_at_once_in_a_small_pool(name: str, rule: str) -> None:
    """Sharing, eviction and preemption at the same time, three times over."""
    model = tiny_model(name, seed=8)
    rng = random.Random(4)
    system = [text(20 + i, 2 * PAGE + i) for i in range(3)]
    prompts = [rng.choice(system) + text(30 + i, rng.randrange(1, 12)) for i in range(12)]
    params = [
        SamplingParams(max_tokens=12, temperature=float(rule == "seeded"), seed=i)
        for i in range(len(prompts))
    ]
    if rule == "greedy":
        expected = [generate_greedy(model, prompt, 12) for prompt in prompts]
    else:
        expected = [
            plain_sampling(model, prompt, 12, p) for prompt, p in zip(prompts, params, strict=True)
        ]
    engine = engine_for(model, pages=26, prefill_chunk=7)
    cached = preemptions = 0
    for _ in range(3):
        order = list(range(len(prompts)))
        rng.shuffle(order)
        results = answer_all(engine, [(prompts[i], params[i], CacheScope()) for i in order])
        for i, (got, stats) in zip(order, results, strict=True):
            assert got == expected[i], i
            cached += stats.cached_tokens
            preemptions += stats.preemptions
    assert cached > 100
    assert preemptions > 0
    assert engine.scheduler.allocator.evicted > 0
    assert engine.stats.cached_tokens == cached


def test_of_many_at_once_one_computes_what_they_have_in_common() -> None:
    model = tiny_model("llama", seed=9)
    common = text(5, 10 * PAGE)
    prompts = [common + text(40 + i, 3) for i in range(8)]
    expected = [generate_greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    plain = replace(GREEDY, speculation=False)
    engine = engine_for(model, prefill_chunk=8)
    results = answer_all(engine, [(prompt, plain, ALL) for prompt in prompts])
    assert [got for got, _ in results] == expected
    assert [stats.cached_tokens for _, stats in results] == [0] + [len(common)] * 7
    # rows of the common part once, of the ends and of all but the last token of each answer
    assert engine.stats.rows == len(common) + 8 * 3 + 8 * (NEW_TOKENS - 1)


def test_tenants_share_the_system_prompt_and_nothing_else() -> None:
    model = tiny_model("llama", seed=9)
    engine = engine_for(model)
    system, user = text(5, 2 * PAGE + 2), text(6, 3 * PAGE)
    prompt = system + user
    expected = generate_greedy(model, prompt, NEW_TOKENS)

    def cached(salt: bytes) -> int:
        got, stats = answer(engine, prompt, GREEDY, CacheScope(len(system), salt))
        assert got == expected
        return stats.cached_tokens

    assert [cached(b"a"), cached(b"a")] == [0, (len(prompt) - 1) // PAGE * PAGE]
    # the block in which the system prompt ends holds the user's words too
    assert cached(b"b") == len(system) // PAGE * PAGE == 2 * PAGE
    assert cached(b"") == 2 * PAGE


def test_without_the_setting_nothing_is_found() -> None:
    model = tiny_model("llama", seed=9)
    engine = engine_for(model)
    off = engine.settings.prefix_cache.model_copy(update={"enabled": False})
    settings = engine.settings.model_copy(update={"prefix_cache": off})
    engine = Engine(engine.runner, None, engine.drafting.drafter, settings)
    for _ in range(2):
        assert answer(engine, text(1, 30), GREEDY)[1].cached_tokens == 0
    assert engine.scheduler.allocator.published_pages == 0


def test_a_failed_request_leaves_nothing_to_find(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its KV may be what made it fail."""
    model = tiny_model("llama", seed=9)
    engine = engine_for(model)
    prompt = text(7, 20)
    fail(engine, prompt, monkeypatch)
    got, stats = answer(engine, prompt, GREEDY)
    assert stats.cached_tokens == 0
    assert got == generate_greedy(model, prompt, NEW_TOKENS)
