"""The drafter against an enumeration of what its heads propose."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import cast

import pytest
import torch
from torch import Tensor

from specdec.config import EngineSettings
from specdec.heads.base import DraftHeads, pack_for_inference
from specdec.heads.drafter import NullDrafter, SiblingChoice
from specdec.heads.drafting import HeadsDrafter
from specdec.heads.layouts import heads_from_tensors
from specdec.heads.native import NativeHeads, accelerate
from specdec.model.native.build import load_kernels
from specdec.model.native.linear import BrainLinear
from specdec.policy.shapes import static_tree
from specdec.policy.tree import DraftTree
from tests.heads.making import HIDDEN, VOCAB, original_tensors, small_sequential, small_target

Path = tuple[int, ...]
TOKEN_MAP = torch.tensor([2, 3, 5, 8, 13, 21])


def small_medusa() -> DraftHeads:
    tensors = {n: t * 0.3 for n, t in original_tensors(3, 1).items()}
    heads = heads_from_tensors(tensors, HIDDEN, VOCAB)
    heads.attach(small_target())
    heads.requires_grad_(False)
    return heads


def follow(heads: DraftHeads, hidden: Tensor, context: Sequence[int], path: Path) -> Tensor:
    """Probabilities ``[V]`` of what follows ``path``, one node at a time."""
    wanted = heads.recent + 1
    known = ([-1] * wanted + list(context))[-wanted:]
    state = heads.begin(hidden[None], torch.tensor([known]))
    for depth, token in enumerate(path, 1):
        state = heads.advance(depth, state, torch.tensor([token]))
    q = heads.logits(len(path) + 1, state)[0].softmax(-1)
    if heads.token_map is None:
        return q
    return torch.zeros(VOCAB).scatter(0, heads.token_map, q)


def best_values(
    heads: DraftHeads, hidden: Tensor, context: Sequence[int], size: int
) -> list[float]:
    """Values of the best nodes of the complete tree."""
    values: dict[Path, float] = {(): 1.0}
    tokens = range(VOCAB) if heads.token_map is None else heads.token_map.tolist()
    for depth in range(heads.depths):
        for path in itertools.product(tokens, repeat=depth):
            if values.get(path, 0) > 1e-5:
                q = follow(heads, hidden, context, path)
                values |= {(*path, t): values[path] * float(q[t]) for t in tokens}
    del values[()]
    return sorted(values.values(), reverse=True)[: size - 1]


def check_values(
    tree: DraftTree, heads: DraftHeads, hidden: Tensor, context: Sequence[int]
) -> None:
    """Every node's value is the product of what its heads say along its path."""
    for node in range(1, len(tree)):
        *above, last = (tree.tokens[n] for n in tree.path_to(node)[1:])
        parent = tree.values[tree.parents[node]]
        q = follow(heads, hidden, context, tuple(above))
        assert tree.values[node] == pytest.approx(parent * float(q[last]), rel=1e-3)


@pytest.mark.parametrize("recent", [0, 2])
@pytest.mark.parametrize("token_map", [None, TOKEN_MAP])
def test_sequential_heads_give_the_best_tree(recent: int, token_map: Tensor | None) -> None:
    heads = small_sequential(3, recent, token_map)
    drafter = HeadsDrafter(heads, candidates=VOCAB, frontier=100)
    hidden = torch.randn(2, HIDDEN, generator=torch.Generator().manual_seed(3))
    contexts = [[4, 9, 1, 7], [6]]
    for row, tree in enumerate(drafter.draft(hidden, contexts, [9, 9])):
        assert tree.tokens[0] == contexts[row][-1]
        check_values(tree, heads, hidden[row], contexts[row])
        expected = best_values(heads, hidden[row], contexts[row], 9)
        assert sorted(tree.values[1:], reverse=True) == pytest.approx(expected, rel=1e-3)


def test_medusa_heads_give_the_best_tree() -> None:
    heads = small_medusa()
    hidden = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(3))
    (tree,) = HeadsDrafter(heads, candidates=VOCAB).draft(hidden[None], [[4, 9]], [9])
    check_values(tree, heads, hidden, [4, 9])
    expected = best_values(heads, hidden, [4, 9], 9)
    assert list(tree.values[1:]) == pytest.approx(expected, rel=1e-3)


@pytest.mark.parametrize("make", [small_sequential, small_medusa])
@pytest.mark.parametrize("static", [False, True])
def test_a_sequence_gets_the_same_tree_alone_and_in_a_batch(make: object, static: bool) -> None:
    assert callable(make)
    shape = static_tree([[0.6, 0.2, 0.1], [0.5, 0.2], [0.4, 0.3]], 12) if static else None
    drafter = HeadsDrafter(make(), shape)
    hidden = torch.randn(5, HIDDEN, generator=torch.Generator().manual_seed(4))
    contexts = [[i, i + 1] for i in range(5)]
    sizes = [8, 1, 3, 12, 2]
    together = drafter.draft(hidden, contexts, sizes)
    for row, tree in enumerate(together):
        (alone,) = drafter.draft(hidden[row : row + 1], [contexts[row]], [sizes[row]])
        assert (tree.tokens, tree.parents) == (alone.tokens, alone.parents)
        assert tree.values == pytest.approx(alone.values, rel=1e-3)
        assert len(tree) == sizes[row]


@pytest.mark.parametrize("make", [small_sequential, small_medusa])
def test_a_static_tree_has_its_shape_and_the_ranked_tokens(make: object) -> None:
    assert callable(make)
    heads: DraftHeads = make()
    shape = static_tree([[0.6, 0.2, 0.1], [0.5, 0.2], [0.4, 0.3]], 10)
    hidden = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(5))
    (tree,) = HeadsDrafter(heads, shape).draft(hidden[None], [[3]], [10])
    assert len(tree) == 10
    assert tree.values[1:] == shape.values
    for node, ranks in enumerate(shape.paths, 1):
        above = tuple(tree.tokens[n] for n in tree.path_to(node)[1:-1])
        ranked = follow(heads, hidden, [3], above).argsort(descending=True)
        assert tree.tokens[node] == int(ranked[ranks[-1]])


@pytest.mark.parametrize("token_map", [None, TOKEN_MAP])
def test_sampled_drafts_ask_with_the_logits_of_each_path(token_map: Tensor | None) -> None:
    heads = small_sequential(3, 1, token_map)
    hidden = torch.randn(HIDDEN, generator=torch.Generator().manual_seed(6))
    asked: dict[Path, Tensor] = {}

    def choose(logits: Tensor, path: Path, count: int) -> SiblingChoice:
        q = logits.softmax(-1)
        asked[path] = q
        top = q.topk(count)
        return SiblingChoice(q, list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))

    drafter = HeadsDrafter(heads)
    draft = drafter.draft_sampled(hidden, [4, 7], (3, 2, 1, 1), choose)
    tree = draft.tree
    assert len(tree) == 1 + 3 + 6 + 6
    assert draft.probabilities.shape == (len(tree), VOCAB)
    children = tree.children()
    for node in range(len(tree)):
        path = tuple(tree.tokens[n] for n in tree.path_to(node)[1:])
        if not children[node]:
            assert not draft.probabilities[node].any()
            continue
        expected = follow(heads, hidden, [4, 7], path)
        torch.testing.assert_close(draft.probabilities[node], expected, rtol=1e-3, atol=1e-6)
        assert torch.equal(draft.probabilities[node], asked[path])
    if token_map is not None:
        assert set(tree.tokens[1:]) <= set(token_map.tolist())


def test_packed_heads_draft_as_before() -> None:
    hidden = torch.randn(3, HIDDEN, generator=torch.Generator().manual_seed(7))
    contexts = [[1], [2], [3]]
    heads, to_pack = small_sequential(), small_sequential()
    for each in (heads, to_pack):  # as heads are stored: packing them then loses nothing
        for parameter in each.parameters():
            parameter.data.copy_(parameter.bfloat16())
    before = HeadsDrafter(heads).draft(hidden, contexts, [6, 6, 6])
    packed = pack_for_inference(to_pack, torch.device("cpu"))
    after = HeadsDrafter(packed).draft(hidden, contexts, [6, 6, 6])
    for old, new in zip(before, after, strict=True):
        assert new.tokens == old.tokens
        assert new.values == pytest.approx(old.values, rel=2e-2)


@pytest.mark.parametrize("token_map", [None, torch.arange(0, VOCAB, 3)])
def test_heads_on_our_own_kernels_propose_the_same(token_map: Tensor | None) -> None:
    """Catches a state mixed in another order, a depth's bias at another depth, a lost bias."""
    kernels = load_kernels(EngineSettings().cache_dir)
    heads = small_sequential(token_map=token_map)
    packed = pack_for_inference(heads, torch.device("cpu"), kernels)
    native = accelerate(packed)
    if kernels is None:
        assert native is packed
        return
    assert isinstance(native, NativeHeads)
    with pytest.raises(IndexError, match="depths"):
        native.advance(native.depths, torch.zeros(1, 16), torch.tensor([1]))
    generator = torch.Generator().manual_seed(3)
    hidden = torch.randn(5, HIDDEN, generator=generator)
    known = torch.tensor([[0], [3], [7], [-1], [VOCAB - 1]])
    states, own = native.begin(hidden, known), packed.begin(hidden, known)
    rows = native.output.unpacked()
    torch.testing.assert_close(
        rows, cast(BrainLinear, packed.lm_head(1).linear).unpacked(), rtol=0, atol=0.02
    )
    for depth in range(1, native.depths + 1):
        torch.testing.assert_close(states, own, rtol=1e-4, atol=1e-5)
        wanted = (packed.features(depth, own) @ rows.T).softmax(-1)
        for count in (1, 4, 10 * VOCAB):
            tokens, probabilities = native.propose(depth, states, count)
            assert tokens.shape == (5, min(count, native.width))
            torch.testing.assert_close(
                probabilities, wanted.gather(1, tokens), rtol=1e-2, atol=1e-5
            )
            likeliest = wanted.topk(tokens.shape[1], -1).values
            torch.testing.assert_close(probabilities, likeliest, rtol=1e-2, atol=1e-5)
        if depth < native.depths:
            picked = torch.tensor([1, 2, 3, 4, 5])
            states = native.advance(depth, states, picked)
            own = packed.advance(depth, own, picked)


@pytest.mark.parametrize("width", [1, 7, 8, 9, 31, 32, 33, 70])
def test_output_rows_in_8_bits(width: int) -> None:
    """Every number of rows and states that the kernel has a path of its own for."""
    kernels = load_kernels(EngineSettings().cache_dir)
    if kernels is None:
        return
    generator = torch.Generator().manual_seed(width)
    map_of = torch.randint(VOCAB, (width,), generator=generator)
    packed = pack_for_inference(small_sequential(token_map=map_of), torch.device("cpu"), kernels)
    native = accelerate(packed)
    assert isinstance(native, NativeHeads)
    rows = native.output.unpacked()
    for count in range(1, 10):
        states = torch.randn(count, 16, generator=generator)
        tokens, probabilities = native.propose(1, states, width)
        wanted = (packed.features(1, states) @ rows.T).softmax(-1)
        torch.testing.assert_close(probabilities, wanted.gather(1, tokens), rtol=1e-2, atol=1e-5)
        assert torch.equal(tokens.sort(-1).values, torch.arange(width).expand(count, -1))
    spoiled = states.clone()
    spoiled[3, 5] = float("nan")
    again, _ = native.propose(1, spoiled, width)
    others = [i for i in range(len(states)) if i != 3]
    assert torch.equal(again[others], tokens[others])


def test_the_null_drafter_drafts_roots() -> None:
    drafter = NullDrafter(VOCAB)
    assert drafter.max_depth == 0
    assert drafter.draft(torch.zeros(2, HIDDEN), [[1, 2], [3]], [9, 9]) == [
        DraftTree.root_only(2),
        DraftTree.root_only(3),
    ]

    def never(logits: Tensor, path: Path, count: int) -> SiblingChoice:
        raise AssertionError

    sampled = drafter.draft_sampled(torch.zeros(HIDDEN), [4], (2, 1), never)
    assert sampled.tree == DraftTree.root_only(4)
    assert sampled.probabilities.shape == (1, VOCAB)
