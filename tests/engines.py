"""Engines around tiny models, drafters that are wrong or right on purpose, and oracles."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import pytest
import torch
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from prefix_cache.cache import PrefixCache
from prefix_cache.settings import PrefixCacheSettings
from specdec.config import BatchSettings, EngineSettings, KvSettings, SpeculationSettings
from specdec.engine import Engine
from specdec.heads.drafter import SampledDraft, SiblingChoice
from specdec.model.runner import ModelRunner
from specdec.noise import uniform
from specdec.outputs import RequestOutput, RequestStats
from specdec.params import CacheScope, SamplingParams
from specdec.policy.budget import Budget
from specdec.policy.constraint import PathLimits
from specdec.policy.tree import DraftTree
from specdec.prefix import pool_identity
from specdec.stored import StoredBlocks
from specdec.timing import measured_budget
from tests.policy.budgets import AnyBudget

#: Shared with every other request.
ALL = CacheScope()

Choose = Callable[[Tensor, tuple[int, ...]], SiblingChoice]


@dataclass
class ScriptedDrafter:
    """Drafts from known answers: all right, all wrong, or a random mix of both.

    Attributes:
        answers: prompt (as a tuple) to the whole text that plain decoding gives.
        kind: ``right``, ``wrong`` or ``random``.
        vocabulary: tokens to take wrong candidates from.
    """

    answers: dict[tuple[int, ...], list[int]]
    kind: str
    vocabulary: int
    max_depth: int = 4
    rng: random.Random = field(default_factory=lambda: random.Random(5))

    def draft(
        self,
        hidden: Tensor,
        contexts: Sequence[Sequence[int]],
        sizes: Sequence[int],
        least: float = 0.0,
        limits: Sequence[PathLimits | None] | None = None,
    ) -> list[DraftTree]:
        """A random tree around the true continuation (or around none)."""
        assert len(hidden) == len(contexts)
        return [self._tree(list(c), size) for c, size in zip(contexts, sizes, strict=True)]

    def draft_sampled(
        self, hidden: Tensor, context: Sequence[int], branching: Sequence[int], choose: Choose
    ) -> SampledDraft:
        """Not used with these drafters."""
        raise NotImplementedError

    def _tree(self, context: list[int], size: int) -> DraftTree:
        truth = self._truth(context)
        tokens, parents, depths = [context[-1]], [-1], [0]
        spine = [0]  # nodes whose path is the truth
        while len(tokens) < size:
            parent = self.rng.choice(spine if self.kind == "right" else range(len(tokens)))
            if depths[parent] == self.max_depth:
                if self.kind == "right" and len(spine) > self.max_depth:
                    break
                continue
            depth = depths[parent] + 1
            taken = {tokens[i] for i, p in enumerate(parents) if p == parent}
            right = truth[depth - 1] if parent in spine and depth <= len(truth) else None
            token = self.rng.randrange(self.vocabulary)
            if right is not None:
                if self.kind == "right" or (self.kind == "random" and self.rng.random() < 0.5):
                    token = right
                elif self.kind == "wrong" and token == right:
                    token = (token + 1) % self.vocabulary
            if token in taken:
                if self.kind == "right":
                    break
                continue
            if token == right:
                spine.append(len(tokens))
            tokens.append(token)
            parents.append(parent)
            depths.append(depth)
        values = tuple(0.9**i for i in range(len(tokens)))
        return DraftTree(tuple(tokens), tuple(parents), tuple(depths), values)

    def _truth(self, context: list[int]) -> list[int]:
        for whole in self.answers.values():
            if whole[: len(context)] == context:
                return whole[len(context) :]
        return []


def tiny_engine(
    model: PreTrainedModel,
    drafter: object,
    *,
    pages: int = 256,
    page_size: int = 4,
    token_budget: int = 64,
    prefill_chunk: int = 32,
    max_sequences: int = 16,
    max_nodes: int = 7,
    lookup: bool = False,
    budget: str = "unlimited",
    store: PrefixCacheSettings | None = None,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Engine:
    """An engine around ``model``; with a tokenizer where stop strings need one.

    ``budget``: ``unlimited``, ``measured`` as in production, or ``random`` (:class:`AnyBudget`).
    ``store``: all engines that use it must be around the same model; to be closed.
    """
    settings = EngineSettings(
        dtype="float32",
        kv=KvSettings(page_size=page_size, pages=pages),
        batch=BatchSettings(
            token_budget=token_budget, prefill_chunk=prefill_chunk, max_sequences=max_sequences
        ),
        speculation=SpeculationSettings(max_nodes=max_nodes, lookup=lookup),
    )
    runner = ModelRunner(model, settings.kv)
    chosen: Budget | None = None
    if budget == "measured":
        chosen = measured_budget(runner, drafter, settings)  # type: ignore[arg-type]
    elif budget == "random":
        chosen = AnyBudget()
    blocks = None
    if store is not None:
        identity = replace(pool_identity(runner.pool), weights=b"the test's one model")
        pool = runner.pool
        cache = PrefixCache.open(store, identity, pool.block_bytes, pool.layout.dtype.itemsize)
        blocks = StoredBlocks(cache, pool, identity, store.read_deadline_ms / 1000)
    return Engine(runner, tokenizer, drafter, settings, budget=chosen, blocks=blocks)  # type: ignore[arg-type]


def run_all(
    engine: Engine, requests: dict[str, tuple[list[int], SamplingParams]]
) -> dict[str, list[RequestOutput]]:
    """Run requests to their end; checks integrity after every step."""
    outputs: dict[str, list[RequestOutput]] = {name: [] for name in requests}
    for name, (prompt, params) in requests.items():
        engine.add_request(name, prompt, params)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    assert engine.pages_in_use == 0
    assert len(engine.drafting.lookup) == 0
    assert all(found and found[-1].finished for found in outputs.values())
    return outputs


def tokens_of(outputs: Sequence[RequestOutput]) -> list[int]:
    """All tokens of one request."""
    return [token for output in outputs for token in output.new_tokens]


def answer(
    engine: Engine, prompt: list[int], params: SamplingParams, scope: CacheScope = ALL
) -> tuple[list[int], RequestStats]:
    """One request, alone: its tokens, and how it went."""
    return answer_all(engine, [(prompt, params, scope)])[0]


def answer_all(
    engine: Engine, requests: list[tuple[list[int], SamplingParams, CacheScope]]
) -> list[tuple[list[int], RequestStats]]:
    """Several requests at once; the engine is checked after every step."""
    outputs: dict[str, list[RequestOutput]] = {str(i): [] for i in range(len(requests))}
    for i, (prompt, params, scope) in enumerate(requests):
        engine.add_request(str(i), prompt, params, scope)
    while engine.has_work:
        for output in engine.step():
            outputs[output.request_id].append(output)
        engine.check_integrity()
    assert engine.pages_in_use == 0
    results = []
    for found in outputs.values():
        stats = found[-1].stats
        assert stats is not None
        assert all(output.cached_tokens == stats.cached_tokens for output in found)
        results.append((tokens_of(found), stats))
    return results


def fail(engine: Engine, prompt: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that ends with an error, as its logits are no numbers."""
    run = engine.runner.run

    def broken(*args: object) -> object:
        output = run(*args)  # type: ignore[arg-type]
        output.logits[:] = torch.nan
        return output

    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", broken)
        engine.add_request("fails", prompt, SamplingParams())
        while engine.has_work:
            outputs = engine.step()
    assert outputs[-1].finish_reason == "error"


@torch.no_grad()
def plain_sampling(
    model: PreTrainedModel, prompt: list[int], count: int, params: SamplingParams
) -> list[int]:
    """Plain decoding with a seed: transformers' forward without cache, transformers'
    processors, and inversion of the cumulative distribution at this seed's uniforms."""
    processors = LogitsProcessorList([TemperatureLogitsWarper(params.temperature)])
    if params.top_k:
        processors.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        processors.append(TopPLogitsWarper(params.top_p))
    if params.min_p:
        processors.append(MinPLogitsWarper(params.min_p))
    tokens = list(prompt)
    for _ in range(count):
        ids = cast(torch.LongTensor, torch.tensor([tokens]))
        rows = cast(torch.FloatTensor, model(ids, use_cache=False).logits[:, -1].float())
        logits = processors(ids, rows)
        mass = logits.softmax(-1).double()[0].cumsum(0)
        draw = uniform(params.seed, len(tokens)) * mass[-1].item()
        tokens.append(int(torch.searchsorted(mass, torch.tensor(draw).double(), right=True)))
    return tokens[len(prompt) :]
