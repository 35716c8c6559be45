"""Who owns which page of the KV pool, and which page holds which block. Holds no torch.

A page is held by one or several leases, or idle, or free. A page whose KV is complete can be
*published* under the key of its block: then later sequences with the same prefix find it and
share it. Published pages that nobody holds are idle: they count as free, and are taken, the
least recently held first, once no empty page is left.

    free ──allocate──▶ held ──release──▶ free
                        │ ▲
                publish ▼ │ allocate(shared)
                  held, published ──release──▶ idle ──evict──▶ held by another

Whoever writes KV does so behind the published part of its lease only.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import chain, islice

from specdec.errors import IntegrityError, SpecdecError


class OutOfPages(SpecdecError):
    """The pool has fewer free pages than asked for; nothing was taken."""


class PageLease:
    """Pages held by one sequence; given back by ``release``. Made by the allocator only.

    Position ``p`` of the sequence lies in slot
    ``pages[p // page_size] * page_size + p % page_size``.

    Attributes:
        pages: in the order of positions.
        published: how many of the first pages are published, or need not be.
    """

    __slots__ = ("_allocator", "pages", "published")

    def __init__(self, allocator: PageAllocator, pages: list[int], published: int = 0) -> None:
        self._allocator = allocator
        self.pages = pages
        self.published = published

    @property
    def capacity(self) -> int:
        """Positions covered."""
        return len(self.pages) * self._allocator.page_size

    def slot(self, position: int) -> int:
        """The slot of a position below ``capacity``."""
        page, offset = divmod(position, self._allocator.page_size)
        return self.pages[page] * self._allocator.page_size + offset

    def release(self) -> None:
        """Give all pages back. Further calls do nothing."""
        self._allocator.shrink(self, 0)


class PageAllocator:
    """Hands out the pages ``0 .. num_pages - 1``.

    Attributes:
        evicted: idle pages whose block was given up so far, for want of empty ones.
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens holds nothing")
        self.num_pages = num_pages
        self.page_size = page_size
        self.evicted = 0
        self._empty = list(range(num_pages - 1, -1, -1))
        self._holders = [0] * num_pages
        self._keys: dict[int, bytes] = {}
        self._by_key: dict[bytes, int] = {}
        #: Published pages that nobody holds, the least recently held first.
        self._idle: OrderedDict[int, None] = OrderedDict()

    @property
    def free_pages(self) -> int:
        """Pages that nobody holds."""
        return len(self._empty) + len(self._idle)

    @property
    def published_pages(self) -> int:
        """Pages that can be found by a key, held or idle."""
        return len(self._by_key)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def find(self, keys: Iterable[bytes]) -> list[int]:
        """Pages of the first blocks of a chain, as far as they are published without a gap."""
        found: list[int] = []
        for key in keys:
            page = self._by_key.get(key)
            if page is None:
                break
            found.append(page)
        return found

    def missing(self, tokens: int, shared: Sequence[int]) -> int:
        """Free pages that ``allocate`` uses up for this many tokens, idle ones among ``shared``
        included.
        """
        return self.pages_for(tokens) - sum(self._holders[page] > 0 for page in shared)

    def allocate(self, count: int, shared: Sequence[int] = ()) -> PageLease:
        """A lease of ``shared``, found just now, and ``count`` other pages behind them.

        Raises:
            OutOfPages: fewer are free.
        """
        for page in shared:
            self._hold(page)
        try:
            return PageLease(self, [*shared, *self._take(count)], len(shared))
        except OutOfPages:
            self._give_back(shared)
            raise

    def grow(self, lease: PageLease, count: int) -> None:
        """Add ``count`` pages to the end of a lease.

        Raises:
            OutOfPages: fewer are free; the lease stays as it is.
        """
        lease.pages.extend(self._take(count))

    def shrink(self, lease: PageLease, keep: int) -> None:
        """Give back all but the first ``keep`` pages of a lease."""
        if keep < len(lease.pages):
            self._give_back(lease.pages[keep:])
            del lease.pages[keep:]
            lease.published = min(lease.published, keep)

    def publish(self, lease: PageLease, keys: Sequence[bytes]) -> list[int]:
        """Let the first pages of a lease be found, whose KV is complete and stays as it is.

        Args:
            keys: of the lease's first blocks, those published before included. A block that
                another page holds already stays with that one.

        Returns:
            Indices of the blocks that no page had before.
        """
        fresh = []
        for index in range(lease.published, len(keys)):
            page, key = lease.pages[index], keys[index]
            if key not in self._by_key and page not in self._keys:
                self._keys[page] = key
                self._by_key[key] = page
                fresh.append(index)
        lease.published = max(lease.published, len(keys))
        return fresh

    def recent_keys(self, most: int) -> list[bytes]:
        """Keys of published pages: those held now, then idle ones, the most recent first."""
        held = (page for page in self._keys if self._holders[page])
        pages = islice(chain(held, reversed(self._idle)), most)
        return [self._keys[page] for page in pages]

    def withdraw(self, lease: PageLease) -> list[bytes]:
        """Let none of a lease's pages be found any more, because their KV is in doubt.

        Returns:
            The keys of their blocks.
        """
        keys = [self._keys[page] for page in lease.pages if page in self._keys]
        for page in lease.pages:
            self._unpublish(page)
        return keys

    def clear(self) -> None:
        """Forget all blocks; idle pages become empty ones."""
        self._by_key.clear()
        self._keys.clear()
        self._empty.extend(self._idle)
        self._idle.clear()

    def check_integrity(self, leases: Iterable[PageLease]) -> None:
        """Prove that each page is empty, idle, or held by as many of ``leases``, all that
        exist, as it counts, and that keys and pages agree.

        Raises:
            IntegrityError: names the pages at fault.
        """
        holders = [0] * self.num_pages
        for lease in leases:
            for page in lease.pages:
                holders[page] += 1
        unheld = [0] * self.num_pages
        for page in (*self._empty, *self._idle):
            unheld[page] += 1
        faults = {
            "pages without an owner": [
                p for p in range(self.num_pages) if not holders[p] and not unheld[p]
            ],
            "pages both held and free, or free twice": [
                p for p in range(self.num_pages) if unheld[p] + bool(holders[p]) > 1
            ],
            "pages held by other leases than counted": [
                p for p in range(self.num_pages) if holders[p] != self._holders[p]
            ],
            "idle pages without a block": [p for p in self._idle if p not in self._keys],
            "pages whose block is another's": [
                p for p, key in self._keys.items() if self._by_key.get(key) != p
            ],
        }
        told = [f"{what}: {pages}" for what, pages in faults.items() if pages]
        if len(self._keys) != len(self._by_key):
            told.append(f"{len(self._by_key)} keys for {len(self._keys)} pages")
        if told:
            raise IntegrityError("; ".join(told))

    def _hold(self, page: int) -> None:
        if self._holders[page] == 0:
            del self._idle[page]
        self._holders[page] += 1

    def _take(self, count: int) -> list[int]:
        if count > self.free_pages:
            raise OutOfPages(f"{count} pages wanted, {self.free_pages} of {self.num_pages} free")
        taken = []
        for _ in range(count):
            if self._empty:
                page = self._empty.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._unpublish(page)
                self.evicted += 1
            self._holders[page] = 1
            taken.append(page)
        return taken

    def _give_back(self, pages: Sequence[int]) -> None:
        # from the end, so that the beginning of a chain, without which nothing behind it is
        # found, is evicted last
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._keys:
                    self._idle[page] = None
                else:
                    self._empty.append(page)

    def _unpublish(self, page: int) -> None:
        key = self._keys.pop(page, None)
        if key is not None:
            del self._by_key[key]
