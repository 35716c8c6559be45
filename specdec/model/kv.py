"""The pool of KV pages: keys and values of all layers, addressed by slot."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from specdec.config import KvSettings
from specdec.errors import ConfigError


@dataclass(frozen=True)
class KvLayout:
    """What one token's KV holds, the same in every layer.

    Attributes:
        layers: attention layers.
        kv_heads: key and value heads per layer.
        head_dim: elements of a head, for keys and values alike.
        dtype: of keys and values: the model's activations.
    """

    layers: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """Memory of one token's keys and values over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.dtype.itemsize


def pool_pages(settings: KvSettings, layout: KvLayout) -> int:
    """How many pages the settings ask for.

    Raises:
        ConfigError: ``kv.memory_gib`` holds fewer than two pages of this model.
    """
    if settings.pages is not None:
        return settings.pages
    pages = int(settings.memory_gib * 2**30) // (layout.bytes_per_token * settings.page_size)
    if pages < 2:
        raise ConfigError(
            f"kv.memory_gib: {settings.memory_gib} GiB holds {pages} pages of "
            f"{settings.page_size} tokens ({layout.bytes_per_token} bytes each); "
            "at least 2 are needed"
        )
    return pages


class KvPool:
    """Keys and values of ``num_pages`` pages on one device.

    Slot ``page * page_size + offset`` holds one token. One more slot, the null slot, stands
    behind the last page: it is zero for ever, and padding reads it. Slots that were never
    written hold garbage, so a step may read only what a step wrote (and the null slot).

    Args:
        layout: what a token's KV holds.
        num_pages: pages in the pool.
        page_size: tokens per page.
        device: where the pool lives.
    """

    def __init__(
        self, layout: KvLayout, num_pages: int, page_size: int, device: torch.device
    ) -> None:
        self.layout = layout
        self.num_pages = num_pages
        self.page_size = page_size
        self.null_slot = num_pages * page_size
        shape = (layout.layers, self.null_slot + 1, layout.kv_heads, layout.head_dim)
        #: ``[layers, slots, kv_heads, head_dim]``
        self.keys = torch.empty(shape, dtype=layout.dtype, device=device)
        self.values = torch.empty(shape, dtype=layout.dtype, device=device)
        self.keys[:, self.null_slot] = 0
        self.values[:, self.null_slot] = 0
        #: Per layer keys and values as ``[slots, kv_heads * head_dim]``, views of the above.
        self.flat: list[tuple[Tensor, Tensor]] = [
            (keys.flatten(1), values.flatten(1))
            for keys, values in zip(self.keys, self.values, strict=True)
        ]

    @property
    def device(self) -> torch.device:
        """Where keys and values lie."""
        return self.keys.device

    def slots(self, pages: Sequence[int], start: int, stop: int) -> np.ndarray:
        """Slots of the positions ``start`` to ``stop`` (excluded) of a sequence, ``[stop-start]``.

        Args:
            pages: the sequence's pages, in order.
        """
        size = self.page_size
        first, last = start // size, -(-stop // size)
        table = np.asarray(pages[first:last], dtype=np.int64)[:, None] * size + np.arange(size)
        return table.reshape(-1)[start - first * size : stop - first * size]

    @property
    def block_bytes(self) -> int:
        """Bytes of the KV in one page, as :meth:`read_blocks` gives it."""
        return self.layout.bytes_per_token * self.page_size

    def read_blocks(self, pages: Sequence[int]) -> list[memoryview | None]:
        """Copies of what is in ``pages``: per page keys, then values,
        ``[2, layers, page_size, kv_heads, head_dim]`` in the pool's number format; None of a
        page that holds a number that is not finite.
        """
        shape = (len(pages), 2, *self._block_shape)
        blocks = torch.empty(shape, dtype=self.layout.dtype, device=self.device)
        for block, page in zip(blocks, pages, strict=True):
            for part, store in zip(block, (self.keys, self.values), strict=True):
                part.copy_(store[:, page * self.page_size : (page + 1) * self.page_size])
        blocks = blocks.cpu().view(len(pages), -1)
        finite = blocks.sum(-1, dtype=torch.float32).isfinite().tolist()
        rows = blocks.view(torch.uint8).numpy()
        return [memoryview(row) if good else None for row, good in zip(rows, finite, strict=True)]

    def is_finite(self, payload: bytes | memoryview) -> bool:
        """Whether all numbers of a payload are finite."""
        block = torch.empty(self.block_bytes, dtype=torch.uint8)
        block.numpy()[:] = np.frombuffer(payload, dtype=np.uint8)
        return bool(block.view(self.layout.dtype).sum(dtype=torch.float32).isfinite())

    def write_block(self, page: int, payload: bytes | memoryview) -> None:
        """Put what :meth:`read_blocks` gave of a page into another.

        Raises:
            ValueError: the payload has not the size of a block.
        """
        if len(payload) != self.block_bytes:
            raise ValueError(f"a block has {self.block_bytes} bytes, not {len(payload)}")
        block = torch.empty((2, *self._block_shape), dtype=self.layout.dtype)
        block.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(payload, dtype=np.uint8)
        slots = slice(page * self.page_size, (page + 1) * self.page_size)
        self.keys[:, slots] = block[0].to(self.device)
        self.values[:, slots] = block[1].to(self.device)

    @property
    def _block_shape(self) -> tuple[int, int, int, int]:
        layout = self.layout
        return layout.layers, self.page_size, layout.kv_heads, layout.head_dim

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Copy the KV in ``sources`` to ``targets``, for all layers at once.

        All sources are read before any target is written, so the two may overlap.
        """
        pairs = [(s, t) for s, t in zip(sources, targets, strict=True) if s != t]
        if not pairs:
            return
        moved = torch.tensor(pairs, dtype=torch.int64).to(self.device)
        for store in (self.keys, self.values):
            store.index_copy_(1, moved[:, 1], store.index_select(1, moved[:, 0]))
