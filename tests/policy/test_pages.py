from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import IntegrityError
from specdec.policy.pages import OutOfPages, PageAllocator


def test_a_position_lies_in_its_page() -> None:
    allocator = PageAllocator(8, 4)
    lease = allocator.allocate(3)
    lease.pages[:] = [5, 0, 7]
    assert [lease.slot(p) for p in (0, 3, 4, 11)] == [20, 23, 0, 31]
    assert lease.capacity == 12


def test_too_few_pages_take_none() -> None:
    allocator = PageAllocator(4, 4)
    lease = allocator.allocate(3)
    with pytest.raises(OutOfPages, match="2 pages wanted, 1 of 4 free"):
        allocator.grow(lease, 2)
    with pytest.raises(OutOfPages):
        allocator.allocate(2)
    assert len(lease.pages) == 3
    assert allocator.free_pages == 1


def test_release_twice_frees_once() -> None:
    allocator = PageAllocator(4, 4)
    lease = allocator.allocate(2)
    lease.release()
    other = allocator.allocate(4)
    lease.release()
    allocator.check_integrity([other])
    assert allocator.free_pages == 0


def test_integrity_names_lost_and_shared_pages() -> None:
    allocator = PageAllocator(4, 4)
    first, second = allocator.allocate(1), allocator.allocate(1)
    allocator.check_integrity([first, second])
    with pytest.raises(IntegrityError, match=r"without an owner: \[1\]"):
        allocator.check_integrity([first])
    second.pages[0] = first.pages[0]
    with pytest.raises(IntegrityError, match=r"\[1\]; with several: \[0\]"):
        allocator.check_integrity([first, second])


@pytest.mark.parametrize(("pages", "size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        PageAllocator(pages, size)


@given(
    st.lists(
        st.tuples(st.sampled_from(["allocate", "grow", "shrink", "release"]), st.integers(0, 5)),
        max_size=60,
    )
)
def test_churn_keeps_each_page_owned_once(actions: list[tuple[str, int]]) -> None:
    allocator = PageAllocator(10, 2)
    leases = [allocator.allocate(0)]
    for number, (action, count) in enumerate(actions):
        lease = leases[number % len(leases)]
        kept = list(lease.pages)
        free = allocator.free_pages
        try:
            if action == "allocate":
                leases.append(allocator.allocate(count))
            elif action == "grow":
                allocator.grow(lease, count)
                assert lease.pages[: len(kept)] == kept
            elif action == "shrink":
                allocator.shrink(lease, count)
                assert lease.pages == kept[:count]
            else:
                lease.release()
                assert not lease.pages
        except OutOfPages:
            assert count > free
        allocator.check_integrity(leases)
        assert allocator.free_pages + sum(len(x.pages) for x in leases) == 10
