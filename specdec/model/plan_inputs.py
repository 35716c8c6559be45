"""From the segments of a plan to the tensors of one step, built once, shared by all layers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.model.groups import AttentionGroup, GroupLayout, attention_biases, group_segments
from specdec.model.kv import KvPool
from specdec.model.segment_rows import Ints, PackedRows, SegmentRows


@dataclass(frozen=True)
class StepInputs:
    """One packed step of ``T`` rows.

    Attributes:
        input_ids: ``[1, T]``.
        position_ids: ``[1, T]`` true positions.
        write_slots: ``[T]`` where each row's KV goes.
        logit_rows: ``[R]`` rows that need logits; row 0 alone where none does.
        tree_rows: ``[N]`` rows that are nodes of draft trees, or None where there is none.
        spans: per segment the half-open range of its rows in the logits.
        groups: every row is in exactly one.
    """

    input_ids: Tensor
    position_ids: Tensor
    write_slots: Tensor
    logit_rows: Tensor
    tree_rows: Tensor | None
    spans: tuple[tuple[int, int], ...]
    groups: tuple[AttentionGroup, ...]


def build_inputs(
    segments: Sequence[SegmentRows],
    pool: KvPool,
    windows: Iterable[int | None],
    repeats: int,
) -> StepInputs:
    """Lay out one step on the host and send its integers to the pool's device at once.

    Args:
        segments: at least one, of at least one row each.
        pool: where the KV lies; gives page size, device and dtype.
        windows: the sliding windows of the model's layers, in tokens; None for no window.
        repeats: query heads per KV head; they are folded into the query rows.
    """
    packed = PackedRows.of(segments)
    offsets, logit_rows = packed.offsets, packed.logit_rows
    total = int(offsets[-1])
    slots = [pool.slots(s.pages, 0, s.length) for s in segments]
    positions = [s.positions() for s in segments]
    trees = [i for i, segment in enumerate(segments) if segment.tree is not None]
    tree_rows = [np.arange(offsets[i], offsets[i + 1]) for i in trees]
    transfer = _Transfer()
    transfer.add(np.fromiter((t for s in segments for t in s.tokens), np.int64, total))
    transfer.add(np.concatenate(positions))
    transfer.add(np.concatenate([t[s.start :] for s, t in zip(segments, slots, strict=True)]))
    transfer.add(logit_rows if logit_rows.size else np.zeros(1, np.int64))
    transfer.add(np.concatenate(tree_rows) if tree_rows else np.zeros(0, np.int64))

    members = group_segments([(s.width, s.length) for s in segments])
    layouts = [GroupLayout.of(group, segments, offsets, slots, pool.null_slot) for group in members]
    for layout in layouts:
        transfer.add(layout.gather_rows)
        transfer.add(layout.scatter_rows)
        transfer.add(layout.gather_slots)
    tensors = transfer.send(pool.device)

    kinds = frozenset(windows)
    groups = []
    for i, (layout, group) in enumerate(zip(layouts, members, strict=True)):
        gather_rows, scatter_rows, gather_slots = tensors[5 + 3 * i : 8 + 3 * i]
        groups.append(
            AttentionGroup(
                len(group),
                layout.width,
                layout.length,
                layout.rows,
                gather_rows,
                scatter_rows,
                layout.slots,
                gather_slots,
                attention_biases([segments[m] for m in group], layout, kinds, repeats, pool),
            )
        )
    return StepInputs(
        input_ids=tensors[0][None],
        position_ids=tensors[1][None],
        write_slots=tensors[2],
        logit_rows=tensors[3],
        tree_rows=tensors[4] if tree_rows else None,
        spans=packed.spans,
        groups=tuple(groups),
    )


class _Transfer:
    """Integer arrays that travel to the device in one copy."""

    def __init__(self) -> None:
        self._arrays: list[Ints] = []

    def add(self, array: Ints) -> None:
        self._arrays.append(array)

    def send(self, device: torch.device) -> tuple[Tensor, ...]:
        joined = torch.from_numpy(np.concatenate(self._arrays))
        if device.type == "cuda":
            joined = joined.pin_memory().to(device, non_blocking=True)
        parts: tuple[Tensor, ...] = torch.split(joined, [array.size for array in self._arrays])
        return parts
