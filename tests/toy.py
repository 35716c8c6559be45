"""A toy target and a toy draft over a few tokens, and everything that can be enumerated."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

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
from specdec.verify import Verdict, VerifyInput, sample_siblings_batch

#: Tokens whose prompt every toy sequence starts with.
PROMPT = (0, 1)
Verify = Callable[[Sequence[VerifyInput]], list[Verdict]]


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

    def logits(self, committed: Sequence[int], tree: DraftTree) -> Tensor:
        """``[N, V]``: what the target says after each node."""
        before = [committed[-2]] + [tree.tokens[parent] for parent in tree.parents[1:]]
        return self.target[before, list(tree.tokens)]

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
        trees = []
        for root, children, grandchildren in zip(roots, first, below, strict=True):
            tokens, parents, depths = [int(root)], [-1], [0]
            for token in children[children >= 0].tolist():
                tokens.append(token)
                parents.append(0)
                depths.append(1)
            for rank, line in enumerate(grandchildren[: len(tokens) - 1]):
                for token in line[line >= 0].tolist():
                    tokens.append(token)
                    parents.append(1 + rank)
                    depths.append(2)
            tree = DraftTree(tuple(tokens), tuple(parents), tuple(depths), (1.0,) * len(tokens))
            trees.append((tree, p[tokens]))
        return trees

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
    toy: Toy, trees: SampledTrees, params: SamplingParams, count: int, length: int, verify: Verify
) -> NDArray[np.int64]:
    """Decode ``count`` sequences with seeds 0, 1, ...; returns ``[count, length]`` tokens."""
    requests = [replace(params, seed=seed) for seed in range(count)]
    texts = [list(PROMPT) for _ in requests]
    open_ = list(range(count))
    while open_:
        committed = [texts[i] for i in open_]
        chosen = [requests[i] for i in open_]
        inputs = [
            VerifyInput(toy.logits(text, tree), tree, request, text, len(PROMPT), draft)
            for text, request, (tree, draft) in zip(
                committed, chosen, trees(committed, chosen), strict=True
            )
        ]
        for text, verdict in zip(committed, verify(inputs), strict=True):
            assert verdict.error is None
            text.extend(verdict.tokens)
        open_ = [i for i in open_ if len(texts[i]) < len(PROMPT) + length]
    return np.array([text[len(PROMPT) :][:length] for text in texts])


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
