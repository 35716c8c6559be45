"""Engines with a store, for the tests of it."""

from __future__ import annotations

import copy
import random

from pydantic import SecretStr
from transformers import PreTrainedModel

from prefix_cache.settings import PrefixCacheSettings
from prefix_cache.stats import CacheStats
from specdec.engine import Engine
from specdec.params import SamplingParams
from tests.engines import (
    ScriptedDrafter,
    tiny_engine,
)
from tests.tiny_models import VOCABULARY

PAGE = 4
NEW_TOKENS = 10
GREEDY = SamplingParams(max_tokens=NEW_TOKENS)
DEADLINE_S = 0.3


def settings_for(url: str) -> PrefixCacheSettings:
    return PrefixCacheSettings(
        url=SecretStr(url), read_deadline_ms=DEADLINE_S * 1000, breaker_failures=2
    )


def engine_for(
    model: PreTrainedModel,
    store: str | PrefixCacheSettings,
    *,
    pages: int = 256,
    prefill_chunk: int = 32,
) -> Engine:
    """A replica: a pool of its own, the store in common."""
    return tiny_engine(
        copy.deepcopy(model),
        ScriptedDrafter({}, "random", VOCABULARY),
        page_size=PAGE,
        pages=pages,
        prefill_chunk=prefill_chunk,
        store=settings_for(store) if isinstance(store, str) else store,
    )


def stats_of(engine: Engine) -> CacheStats:
    stats = engine.blocks.stats()
    assert stats is not None
    return stats


def settle(engine: Engine) -> None:
    """Wait until the store has what it is to have."""
    assert engine.blocks.flush(10)


def text(seed: int, length: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]
