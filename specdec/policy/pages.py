"""Who owns which page of the KV pool. Holds no torch."""

from __future__ import annotations

from collections.abc import Iterable

from specdec.errors import IntegrityError, SpecdecError


class OutOfPages(SpecdecError):
    """The pool has fewer free pages than asked for; nothing was taken."""


class PageLease:
    """Pages owned by one sequence; given back by ``release``. Made by the allocator only.

    Position ``p`` of the sequence lies in slot
    ``pages[p // page_size] * page_size + p % page_size``.

    Attributes:
        pages: in the order of positions.
    """

    __slots__ = ("_allocator", "pages")

    def __init__(self, allocator: PageAllocator, pages: list[int]) -> None:
        self._allocator = allocator
        self.pages = pages

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
    """Hands out the pages ``0 .. num_pages - 1``; each has one owner or is free."""

    def __init__(self, num_pages: int, page_size: int) -> None:
        if num_pages < 1 or page_size < 1:
            raise ValueError(f"a pool of {num_pages} pages of {page_size} tokens holds nothing")
        self.num_pages = num_pages
        self.page_size = page_size
        self._free = list(range(num_pages - 1, -1, -1))

    @property
    def free_pages(self) -> int:
        """Pages without an owner."""
        return len(self._free)

    def pages_for(self, tokens: int) -> int:
        """Pages that hold this many tokens."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int) -> PageLease:
        """A lease of ``count`` pages.

        Raises:
            OutOfPages: fewer are free.
        """
        return PageLease(self, self._take(count))

    def grow(self, lease: PageLease, count: int) -> None:
        """Add ``count`` pages to the end of a lease.

        Raises:
            OutOfPages: fewer are free; the lease stays as it is.
        """
        lease.pages.extend(self._take(count))

    def shrink(self, lease: PageLease, keep: int) -> None:
        """Give back all but the first ``keep`` pages of a lease."""
        if keep < len(lease.pages):
            self._free.extend(reversed(lease.pages[keep:]))
            del lease.pages[keep:]

    def check_integrity(self, leases: Iterable[PageLease]) -> None:
        """Prove that each page is free or in exactly one of ``leases``, all that exist.

        Raises:
            IntegrityError: names the pages that leaked or have two owners.
        """
        owners = [0] * self.num_pages
        for pages in (self._free, *(lease.pages for lease in leases)):
            for page in pages:
                owners[page] += 1
        leaked = [page for page, count in enumerate(owners) if count == 0]
        shared = [page for page, count in enumerate(owners) if count > 1]
        if leaked or shared:
            raise IntegrityError(f"pages without an owner: {leaked}; with several: {shared}")

    def _take(self, count: int) -> list[int]:
        if count > len(self._free):
            raise OutOfPages(f"{count} pages wanted, {len(self._free)} of {self.num_pages} free")
        if count <= 0:
            return []
        taken = self._free[: -count - 1 : -1]
        del self._free[-count:]
        return taken
