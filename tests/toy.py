"""A toy target and a toy draft over a few tokens, and everything that can be enumerated."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from scipy import stats
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec.params import SamplingParams
from specdec.policy.tree import DraftTree
from specdec.verify import VerifyInput, sample_siblings_batch, verify_batch

#: Tokens whose prompt every toy sequence starts with.
PROMPT = (0, 1)
Trees = Callable[
    [Sequence[Sequence[int]], Sequence[SamplingParams]], Sequence[tuple[DraftTree, Tensor | None]]
]


def softmax_of(logits: Tensor, params: SamplingParams) -> Tensor:
    """Distributions ``[R, V]`` float64 by transformers' processors."""
    steps = LogitsProcessorList([TemperatureLogitsWarper(float(params.temperature))])
    if params.top_k:
        steps.append(TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(TopPLogitsWarper(params.top_p))
    if params.min_p > 0:
        steps.append(MinPLogitsWarper(params.min_p))
    return steps(None, logits).double().softmax(-1)  # type: ignore[arg-type]


@dataclass(frozen=True)
class Toy:
    """A target that looks at the last two tokens, a draft that looks at the last one.

    Attributes:
        target: ``[V, V, V]`` float32 logits by last two tokens.
        draft: ``[V, V]`` float32 logits by last token.
    """

    target: Tensor
    draft: Tensor

    @staticmethod
    def random(vocabulary: int, seed: int, spread: float = 1.2) -> Toy:
        """Draft and target resemble each other as far as a useful draft does."""
        generator = torch.Generator().manual_seed(seed)
        shape = (vocabulary,) * 3
        target = torch.randn(shape, generator=generator) * spread
        draft = target.mean(0) + torch.randn(shape[1:], generator=generator) * 0.7
        return Toy(target, draft)

    def logits(
        self, committed: Sequence[Sequence[int]], trees: Sequence[DraftTree]
    ) -> tuple[Tensor, ...]:
        """Per sequence ``[N, V]``, views of one tensor: what the target says after each node."""
        before: list[int] = []
        last: list[int] = []
        for tokens, tree in zip(committed, trees, strict=True):
            before.append(tokens[-2])
            before.extend([tree.tokens[parent] for parent in tree.parents[1:]])
            last.extend(tree.tokens)
        rows = self.target[before, last]
        return torch.split(rows, [len(tree) for tree in trees])

    def enumerate(self, length: int, params: SamplingParams) -> NDArray[np.float64]:
        """Probability of every continuation of the prompt, ``[V] * length``."""
        vocabulary = len(self.draft)
        tables = softmax_of(self.target.flatten(0, 1), params).view(self.target.shape).numpy()
        result = np.zeros((vocabulary,) * length)
        for tokens in itertools.product(range(vocabulary), repeat=length):
            context = PROMPT + tokens
            result[tokens] = np.prod(
                [tables[context[i], context[i + 1], context[i + 2]] for i in range(length)]
            )
        return result


@dataclass(frozen=True)
class SampledTrees:
    """Trees of sampled candidates: some siblings at the root, some below each of them.

    Attributes:
        by_probability: deliberately wrong: siblings by falling probability and not as drawn.
    """

    toy: Toy
    siblings: tuple[int, int]
    by_probability: bool = False
    _known: dict[object, tuple[DraftTree, Tensor]] = field(default_factory=dict, init=False)

    def __call__(
        self, committed: Sequence[Sequence[int]], params: Sequence[SamplingParams]
    ) -> list[tuple[DraftTree, Tensor]]:
        """Per sequence a tree and, per node, the draft distribution ``[N, V]``."""
        p = softmax_of(self.toy.draft, params[0]).float()
        roots = np.array([tokens[-1] for tokens in committed])
        seeds = np.array([one.seed for one in params], dtype=np.uint64)
        positions = np.array([len(tokens) for tokens in committed])
        first = self._draw(p, roots, self.siblings[0], seeds, positions)
        below = self._draw(
            p,
            first.clip(0).ravel(),
            self.siblings[1],
            seeds.repeat(self.siblings[0]),
            positions.repeat(self.siblings[0]) + 1,
        ).reshape(len(roots), self.siblings[0], self.siblings[1])
        return [
            self._grown(p, *key)
            for key in zip(
                roots.tolist(),
                map(tuple, first.tolist()),
                map(_tuples, below.tolist()),
                strict=True,
            )
        ]

    def _grown(
        self, p: Tensor, root: int, first: tuple[int, ...], below: tuple[tuple[int, ...], ...]
    ) -> tuple[DraftTree, Tensor]:
        """The tree of these tokens, -1 standing for none, and its draft distributions."""
        key = root, first, below
        if key not in self._known:
            children = [token for token in first if token >= 0]
            pairs = [
                (1 + rank, token)
                for rank, line in enumerate(below[: len(children)])
                for token in line
                if token >= 0
            ]
            tokens = [root, *children, *(token for _, token in pairs)]
            parents = [-1] + [0] * len(children) + [parent for parent, _ in pairs]
            depths = [0] + [1] * len(children) + [2] * len(pairs)
            values = (1.0,) * len(tokens)
            tree = DraftTree(tuple(tokens), tuple(parents), tuple(depths), values)
            self._known[key] = tree, p[tokens]
        return self._known[key]

    def _draw(
        self,
        p: Tensor,
        parents: NDArray[np.int64],
        count: int,
        seeds: NDArray[np.uint64],
        positions: NDArray[np.int64],
    ) -> NDArray[np.int64]:
        tokens, shares = sample_siblings_batch(p[parents], count, seeds, positions)
        if self.by_probability:
            tokens = tokens.gather(1, shares.argsort(-1, descending=True))
        result: NDArray[np.int64] = tokens.numpy()
        return result


def generate(
    toy: Toy, trees: Trees, params: SamplingParams, count: int, length: int
) -> NDArray[np.int64]:
    """Decode ``count`` sequences with seeds 0, 1, ...; returns ``[count, length]`` tokens."""
    batch = 2_000
    gc.disable()  # no cycles here, and looking for some takes half the time
    try:
        requests = _requests(repr(params), params, count)
        parts = [
            _generate(toy, trees, requests[first : first + batch], length)
            for first in range(0, count, batch)
        ]
    finally:
        gc.enable()
    return np.concatenate(parts)


_REQUESTS: dict[tuple[str, int], list[SamplingParams]] = {}


def _requests(name: str, params: SamplingParams, count: int) -> list[SamplingParams]:
    if (name, count) not in _REQUESTS:
        _REQUESTS[name, count] = [replace(params, seed=seed) for seed in range(count)]
    return _REQUESTS[name, count]


def _generate(
    toy: Toy,
    trees: Trees,
    requests: Sequence[SamplingParams],
    length: int,
) -> NDArray[np.int64]:
    texts = [list(PROMPT) for _ in requests]
    open_ = list(range(len(requests)))
    while open_:
        committed = [texts[i] for i in open_]
        chosen = [requests[i] for i in open_]
        drafts = trees(committed, chosen)
        rows = toy.logits(committed, [tree for tree, _ in drafts])
        inputs = [
            VerifyInput(logits, tree, request, text, len(PROMPT), draft)
            for logits, text, request, (tree, draft) in zip(
                rows, committed, chosen, drafts, strict=True
            )
        ]
        for text, verdict in zip(committed, verify_batch(inputs), strict=True):
            assert verdict.error is None
            text.extend(verdict.tokens)
        open_ = [i for i in open_ if len(texts[i]) < len(PROMPT) + length]
    return np.array([text[len(PROMPT) :][:length] for text in texts])


def _tuples(rows: list[list[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, rows))


def p_value(toy: Toy, trees: Trees, params: SamplingParams, count: int, length: int) -> float:
    """Of :func:`chi_square` for what :func:`generate` emits."""
    emitted = generate(toy, trees, params, count, length)
    return chi_square(emitted, toy.enumerate(length, params))


def chi_square(emitted: NDArray[np.int64], expected: NDArray[np.float64]) -> float:
    """P-value of Pearson's test of emitted tokens ``[n, length]`` against probabilities.

    Cells with fewer than 5 expected are pooled; one impossible outcome gives 0.
    """
    counts = np.zeros(expected.shape)
    np.add.at(counts, tuple(emitted.T), 1)
    if counts[expected == 0].any():
        return 0.0
    wanted = expected * len(emitted)
    rare = wanted < 5
    observed = np.append(counts[~rare], counts[rare].sum())
    wanted = np.append(wanted[~rare], wanted[rare].sum())
    if wanted[-1] < 5:  # fold a small pool into the rarest of the others
        last = wanted[:-1].argmin()
        observed[last] += observed[-1]
        wanted[last] += wanted[-1]
        observed, wanted = observed[:-1], wanted[:-1]
    return float(stats.chisquare(observed, wanted * observed.sum() / wanted.sum()).pvalue)
