"""Segments that attend together: padding, slots and masks of one attention call."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.model.kv import KvPool
from specdec.model.segment_rows import Bools, Ints, SegmentRows

#: Padding in a group of segments may add half of the useful work, or this many
#: query-key pairs: less than what one more call of the attention kernel costs.
PADDING_RATIO = 1.5
PADDING_FREE = 2048


def group_segments(sizes: Sequence[tuple[int, int]]) -> list[list[int]]:
    """Put segments together whose padding to a common shape is cheap.

    Args:
        sizes: per segment its rows and the slots that they attend to.

    Returns:
        Groups of indices into ``sizes``, each in rising order.
    """
    order = sorted(range(len(sizes)), key=lambda i: (sizes[i][0].bit_length(), sizes[i][1]))
    groups: list[list[int]] = []
    width = length = work = 0
    for index in order:
        rows, slots = sizes[index]
        wide, long, useful = max(width, rows), max(length, slots), work + rows * slots
        padded = (len(groups[-1]) + 1) * wide * long if groups else 0
        if groups and padded <= PADDING_RATIO * useful + PADDING_FREE:
            groups[-1].append(index)
            width, length, work = wide, long, useful
        else:
            groups.append([index])
            width, length, work = rows, slots, rows * slots
    return [sorted(group) for group in groups]


@dataclass(frozen=True)
class AttentionGroup:
    """``G`` segments that attend in one kernel call, padded to ``Q`` rows and ``L`` slots.

    Attributes:
        count, width, length: G, Q and L.
        rows: the queries, where they are consecutive rows without padding; else None.
        gather_rows: ``[G * Q]`` rows of the queries; padding reads row 0.
        scatter_rows: ``[G * Q]`` rows of the results; padding goes to row T, behind the last.
        slots: the slots, where there is one segment and its slots are consecutive; else None.
        gather_slots: ``[G * L]`` slots; padding reads the null slot.
        biases: per sliding window of the model (None: no window) what is added to the
            scores, ``[G, 1, repeats * Q, L]`` of 0 and -inf, or None where all is visible.
    """

    count: int
    width: int
    length: int
    rows: slice | None
    gather_rows: Tensor
    scatter_rows: Tensor
    slots: slice | None
    gather_slots: Tensor
    biases: Mapping[int | None, Tensor | None]


@dataclass(frozen=True)
class GroupLayout:
    """The host side of an :class:`AttentionGroup`."""

    width: int
    length: int
    rows: slice | None
    gather_rows: Ints
    scatter_rows: Ints
    slots: slice | None
    gather_slots: Ints

    @staticmethod
    def of(
        group: Sequence[int],
        segments: Sequence[SegmentRows],
        offsets: Ints,
        slots: Sequence[Ints],
        null_slot: int,
    ) -> GroupLayout:
        """Lay out one group.

        Args:
            group: indices of its segments.
            segments: all of the step.
            offsets: per segment its first packed row, and T at the end.
            slots: per segment the slots of its positions.
            null_slot: what padding reads.
        """
        width = max(segments[m].width for m in group)
        length = max(segments[m].length for m in group)
        gather = np.zeros((len(group), width), np.int64)
        scatter = np.full((len(group), width), offsets[-1], np.int64)
        table = np.full((len(group), length), null_slot, np.int64)
        for line, member in enumerate(group):
            rows = np.arange(offsets[member], offsets[member + 1])
            gather[line, : rows.size] = rows
            scatter[line, : rows.size] = rows
            table[line, : slots[member].size] = slots[member]
        flat, taken = scatter.reshape(-1), table.reshape(-1)
        return GroupLayout(
            width=width,
            length=length,
            rows=_as_slice(flat) if flat.max() < offsets[-1] else None,
            gather_rows=gather.reshape(-1),
            scatter_rows=flat,
            slots=_as_slice(taken) if len(group) == 1 else None,
            gather_slots=taken,
        )


def _as_slice(index: Ints) -> slice | None:
    """The slice that takes the same elements, if there is one."""
    first = int(index[0])
    if index.size > 1 and not bool(np.all(np.diff(index) == 1)):
        return None
    return slice(first, first + index.size)


def attention_biases(
    segments: Sequence[SegmentRows],
    layout: GroupLayout,
    windows: frozenset[int | None],
    repeats: int,
    pool: KvPool,
) -> dict[int | None, Tensor | None]:
    """Per window the additive mask; windows that hide nothing share the plain one."""
    shape = (len(segments), layout.width, layout.length)
    causal = np.zeros(shape, np.bool_)
    # True positions of rows and slots, for the windows. Rows that only pad see everything:
    # nobody reads them, but a row that sees nothing would be NaN.
    row_position = np.zeros(shape[:2], np.int64)
    slot_position = np.zeros((shape[0], shape[2]), np.int64)
    for line, segment in enumerate(segments):
        start, stop, width = segment.start, segment.length, segment.width
        causal[line, :width, :start] = True
        causal[line, :width, start:stop] = segment.visible()
        causal[line, width:] = True
        row_position[line, :width] = segment.positions()
        slot_position[line, :start] = np.arange(start)
        slot_position[line, start:stop] = row_position[line, :width]
    reach = int(row_position.max())
    biases: dict[int | None, Tensor | None] = {}
    plain = _bias(causal, repeats, pool)
    for window in windows:
        if window is None or window > reach:
            biases[window] = plain
            continue
        near = slot_position[:, None, :] > row_position[:, :, None] - window
        biases[window] = _bias(causal & near, repeats, pool)
    return biases


def _bias(visible: Bools, repeats: int, pool: KvPool) -> Tensor | None:
    if visible.all():
        return None
    hidden = torch.from_numpy(~visible).to(pool.device)[:, None]
    bias = torch.zeros(hidden.shape, dtype=pool.layout.dtype, device=pool.device)
    return bias.masked_fill_(hidden, float("-inf")).repeat(1, 1, repeats, 1)
