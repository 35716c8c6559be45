"""The parts of attention over pages: kernel, masks, grouping and the pool."""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from specdec.errors import UnsupportedModelError
from specdec.model.attention import masked_attention
from specdec.model.groups import PADDING_FREE, PADDING_RATIO, group_segments
from specdec.model.hook import describe_mask, paged_attention, read_window
from specdec.model.kv import KvLayout, KvPool
from specdec.model.plan_inputs import StepInputs, build_inputs
from specdec.model.segment_rows import SegmentRows, ancestors
from tests.model.paged import random_tokens, random_tree

CPU = torch.device("cpu")
REPEATS = 3


def make_pool(pages: int = 64, page_size: int = 3, layers: int = 2) -> KvPool:
    return KvPool(KvLayout(layers, 2, 4, torch.float32), pages, page_size, CPU)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("with_sinks", [False, True])
@pytest.mark.parametrize("scaling", [None, 0.7])
@pytest.mark.parametrize("masked", [False, True])
def test_kernel_equals_the_formula_in_float64(
    softcap: float | None, with_sinks: bool, scaling: float | None, masked: bool
) -> None:
    noise = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, 3, rows, 8, generator=noise, dtype=torch.float64) for rows in (5, 7, 7)
    )
    sinks = torch.randn(1, 3, 5, generator=noise, dtype=torch.float64) if with_sinks else None
    bias: Tensor | None = None
    if masked:
        hidden = torch.rand(2, 1, 5, 7, generator=noise) < 0.5
        hidden[..., 0] = False
        bias = torch.zeros(2, 1, 5, 7, dtype=torch.float64).masked_fill(hidden, float("-inf"))
    scores = torch.einsum("ghqd,ghld->ghql", query, key) * (scaling or 8**-0.5)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    weights = torch.exp(scores if bias is None else scores + bias)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks)[..., None]
    want = torch.einsum("ghql,ghld->ghqd", weights / total, value)
    got = masked_attention(
        query.float(),
        key.float(),
        value.float(),
        None if bias is None else bias.float(),
        scaling,
        softcap,
        None if sinks is None else sinks.float(),
    )
    torch.testing.assert_close(got.double(), want, rtol=0, atol=2e-6)


def test_ancestors_are_the_paths() -> None:
    chance = random.Random(0)
    for nodes in (1, 2, 9, 40):
        tree = random_tree(chance, 5, nodes)
        seen = ancestors(tree.parents)
        for node in range(nodes):
            assert [i for i in range(nodes) if seen[node, i]] == tree.path_to(node)
    with pytest.raises(ValueError, match="read-only"):
        seen[0, 0] = False


@given(st.lists(st.tuples(st.integers(1, 300), st.integers(0, 4000)), min_size=1, max_size=70))
@settings(max_examples=200, deadline=None)
def test_groups_hold_each_segment_once_and_pad_little(sizes: list[tuple[int, int]]) -> None:
    shapes = [(rows, rows + before) for rows, before in sizes]
    groups = group_segments(shapes)
    assert sorted(i for group in groups for i in group) == list(range(len(shapes)))
    for group in groups:
        useful = sum(shapes[i][0] * shapes[i][1] for i in group)
        width, length = (max(shapes[i][axis] for i in group) for axis in (0, 1))
        assert len(group) == 1 or len(group) * width * length <= (
            PADDING_RATIO * useful + PADDING_FREE
        )


def test_equal_segments_attend_together() -> None:
    assert group_segments([(8, 100)] * 16) == [list(range(16))]
    assert len(group_segments([(8, 1000), (200, 200), (8, 1100), (1, 900)])) == 3


def seen_by(
    inputs: StepInputs, window: int | None, row: int, repeat: int
) -> tuple[list[int], list[int]]:
    """What a packed row's query sees, read from the step: slots seen, and slots hidden."""
    for group in inputs.groups:
        rows = group.scatter_rows.tolist()
        if row not in rows:
            continue
        line, column = divmod(rows.index(row), group.width)
        slots = group.gather_slots.view(group.count, group.length)[line].tolist()
        bias = group.biases[window]
        if bias is None:
            return slots, []
        assert bias.shape == (group.count, 1, REPEATS * group.width, group.length)
        values = bias[line, 0, repeat * group.width + column].tolist()
        assert set(values) <= {0.0, float("-inf")}
        return (
            [slot for slot, value in zip(slots, values, strict=True) if value == 0],
            [slot for slot, value in zip(slots, values, strict=True) if value != 0],
        )
    raise AssertionError(f"row {row} is in no group")


@pytest.mark.parametrize("seed", range(6))
def test_every_row_sees_what_it_should(seed: int) -> None:
    chance = random.Random(seed)
    pool = make_pool(pages=200)
    free = chance.sample(range(200), 200)
    segments = []
    for _ in range(chance.randrange(1, 9)):
        before, rows = chance.randrange(0, 40), chance.randrange(1, 12)
        tree = random_tree(chance, 1, rows) if chance.random() < 0.6 else None
        tokens = tree.tokens if tree else tuple(random_tokens(chance, rows))
        pages = [free.pop() for _ in range(-(-(before + rows) // 3))]
        segments.append(SegmentRows(pages, before, tokens, tree, chance.random() < 0.5))
    windows = (None, 1, 4, 1000)
    inputs = build_inputs(segments, pool, windows, REPEATS)

    row = 0
    wanted_rows: list[int] = []
    for segment, span in zip(segments, inputs.spans, strict=True):
        slots = [segment.pages[p // 3] * 3 + p % 3 for p in range(segment.length)]
        assert span[1] - span[0] == segment.logit_count
        wanted_rows += range(row + segment.width - segment.logit_count, row + segment.width)
        for i in range(segment.width):
            if segment.tree is not None:
                path, depth = segment.tree.path_to(i), segment.tree.depths[i]
                places = {segment.start + n: segment.start + segment.tree.depths[n] for n in path}
            else:
                depth = i
                places = {segment.start + n: segment.start + n for n in range(i + 1)}
            places |= {p: p for p in range(segment.start)}
            here = segment.start + depth
            assert inputs.input_ids[0, row] == segment.tokens[i]
            assert inputs.position_ids[0, row] == here
            assert inputs.write_slots[row] == slots[segment.start + i]
            for window in windows:
                want = {slots[p] for p, at in places.items() if at > here - (window or 10**9)}
                for repeat in range(REPEATS):
                    seen, _ = seen_by(inputs, window, row, repeat)
                    assert set(seen) == want
            row += 1
    assert inputs.logit_rows.tolist() == (wanted_rows or [0])
    total = sum(len(group.scatter_rows) for group in inputs.groups)
    padding = sum((group.scatter_rows == row).sum().item() for group in inputs.groups)
    assert total - padding == row


def test_a_plain_decode_needs_no_mask_and_no_gather() -> None:
    pool = make_pool()
    segment = SegmentRows([4, 5, 6], 7, (3,), None, True)
    (group,) = build_inputs([segment], pool, (None, 100), REPEATS).groups
    assert group.rows == slice(0, 1)
    assert group.slots == slice(12, 20)
    assert group.biases == {None: None, 100: None}


def test_pool_moves_read_before_they_write() -> None:
    pool = make_pool()
    pool.keys.copy_(torch.arange(pool.keys.numel()).view_as(pool.keys))
    pool.values.copy_(-pool.keys)
    before = pool.keys.clone()
    pool.move([5, 9, 7, 7], [5, 7, 9, 8])
    for source, target in ((5, 5), (9, 7), (7, 9), (7, 8), (6, 6)):
        assert torch.equal(pool.keys[:, target], before[:, source])
        assert torch.equal(pool.values[:, target], -before[:, source])
    after = pool.keys.clone()
    pool.move([], [])
    pool.move([3], [3])
    assert torch.equal(pool.keys, after)
    with pytest.raises(ValueError, match="shorter"):
        pool.move([1, 2], [3])


def test_pool_slots_and_null_slot() -> None:
    pool = make_pool(pages=8, page_size=3)
    assert pool.slots([7, 0, 3], 0, 8).tolist() == [21, 22, 23, 0, 1, 2, 9, 10]
    assert pool.slots([7, 0, 3], 4, 7).tolist() == [1, 2, 9]
    assert pool.slots([7, 0, 3], 3, 3).tolist() == []
    assert pool.null_slot == 24
    assert not pool.keys[:, 24].any()
    assert not pool.values[:, 24].any()


def test_layers_of_the_pool_are_views() -> None:
    pool = make_pool()
    pool.flat[1][0][5] = 1.5
    assert torch.equal(pool.keys[1, 5], torch.full((2, 4), 1.5))


def causal(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return key <= query


def test_masks_tell_their_window() -> None:
    def sliding(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key > query - 5000)

    assert read_window(describe_mask(causal)) is None
    assert read_window(describe_mask(sliding, local_size=5000)) == 5000


@pytest.mark.parametrize("size", [None, 64])
def test_other_masks_are_refused(size: int | None) -> None:
    def everything(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return query >= 0

    def chunks(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key // 64 == query // 64)

    def off_by_one(_: Tensor, __: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key <= query) & (key >= query - 64)

    for function in (everything, chunks, off_by_one):
        with pytest.raises(UnsupportedModelError, match="neither causal nor"):
            describe_mask(function, local_size=size)


def test_a_changed_mask_is_noticed() -> None:
    mask = describe_mask(causal)
    for other in (None, mask + 1, mask[..., :1], torch.zeros(1, 1, 1, 2)):
        with pytest.raises(UnsupportedModelError, match="position bias"):
            read_window(other)


def test_the_hook_says_when_it_gets_no_context() -> None:
    heads = torch.zeros(1, 1, 1, 4)
    with pytest.raises(UnsupportedModelError, match="keyword arguments"):
        paged_attention(torch.nn.Identity(), heads, heads, heads, None)
