"""Drives a runner by hand, without a scheduler, and asks the model itself for the truth."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import PreTrainedModel

from specdec.config import KvSettings
from specdec.model.runner import ModelRunner, StepOutput
from specdec.model.segment_rows import SegmentRows
from specdec.policy.tree import DraftTree
from tests.tiny_models import VOCABULARY, tiny_model

#: Largest difference of float32 logits that is rounding, relative to the largest logit.
ROUNDING = 2e-5


def tiny_runner(family: str, seed: int = 0, page_size: int = 4, pages: int = 256) -> ModelRunner:
    return ModelRunner(tiny_model(family, seed), KvSettings(page_size=page_size, pages=pages))


@torch.no_grad()
def own_logits(model: PreTrainedModel, tokens: list[int]) -> Tensor:
    """The logits after each token, ``[len(tokens), V]``, by the untouched model."""
    logits: Tensor = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    return logits


def assert_rounding(got: Tensor, want: Tensor, factor: float = 1.0) -> None:
    """Equal up to ``factor`` times what float32 rounds."""
    bound = factor * ROUNDING * float(want.abs().max())
    torch.testing.assert_close(got, want, rtol=0, atol=bound)


def random_tokens(chance: random.Random, count: int) -> list[int]:
    return [chance.randrange(VOCABULARY) for _ in range(count)]


def random_tree(chance: random.Random, root: int, nodes: int) -> DraftTree:
    """Any parent before its child; siblings may hold the same token."""
    parents, depths = [-1], [0]
    for node in range(1, nodes):
        parents.append(chance.randrange(node))
        depths.append(depths[parents[-1]] + 1)
    tokens = [root, *random_tokens(chance, nodes - 1)]
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths), (1.0,) * nodes)


@dataclass
class Paged:
    """One sequence: its tokens, the ones computed and its pages (in no order)."""

    tokens: list[int]
    pages: list[int]
    computed: int = 0
    slots: list[int] = field(default_factory=list)

    def chunk(self, count: int) -> SegmentRows:
        """The next ``count`` tokens of the prompt."""
        start, stop = self.computed, min(self.computed + count, len(self.tokens))
        self.computed = stop
        return SegmentRows(
            self.pages, start, tuple(self.tokens[start:stop]), None, stop == len(self.tokens)
        )

    def verify(self, tree: DraftTree) -> SegmentRows:
        """A tree whose root is the last token."""
        return SegmentRows(self.pages, len(self.tokens) - 1, tree.tokens, tree, True)

    def accept(self, runner: ModelRunner, tree: DraftTree, leaf: int, bonus: int) -> None:
        """Keep the path to ``leaf``: move its KV, commit its tokens and ``bonus``."""
        walked, size = tree.path_to(leaf), runner.pool.page_size
        first = len(self.tokens) - 1

        def slot(position: int) -> int:
            return self.pages[position // size] * size + position % size

        runner.pool.move(
            [slot(first + node) for node in walked],
            [slot(first + depth) for depth in range(len(walked))],
        )
        self.tokens += [tree.tokens[node] for node in walked[1:]] + [bonus]
        self.computed = len(self.tokens) - 1


def lend_pages(runner: ModelRunner, chance: random.Random, positions: list[int]) -> list[list[int]]:
    """Per sequence pages for that many positions, from all over the pool."""
    pool = chance.sample(range(runner.pool.num_pages), runner.pool.num_pages)
    lent = []
    for count in positions:
        need = -(-count // runner.pool.page_size)
        lent.append([pool.pop() for _ in range(need)])
    return lent


def check_tree(
    model: PreTrainedModel,
    known: list[int],
    tree: DraftTree,
    logits: Tensor,
    factor: float = 1.0,
) -> None:
    """Each node's row equals the model's own after ``known`` and the path to it.

    Args:
        known: committed tokens without the root.
        factor: of what float32 rounds, that may lie between the two.
    """
    assert logits.shape[0] == len(tree)
    for node in range(len(tree)):
        path = [tree.tokens[i] for i in tree.path_to(node)]
        assert_rounding(logits[node], own_logits(model, known + path)[-1], factor)


def rows_of(output: StepOutput, index: int) -> Tensor:
    start, stop = output.spans[index]
    return output.logits[start:stop]
