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
    with pytest.raises(IntegrityError, match=r"\[1\]; .* than counted: \[0, 1\]"):
        allocator.check_integrity([first, second])


@pytest.mark.parametrize(("pages", "size"), [(0, 4), (4, 0)])
def test_an_empty_pool_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match="holds nothing"):
        PageAllocator(pages, size)


def test_a_published_page_is_shared_and_found_again() -> None:
    allocator = PageAllocator(4, 4)
    first = allocator.allocate(2)
    allocator.publish(first, [b"a", b"b"])
    second = allocator.allocate(1, allocator.find([b"a", b"x"]))
    assert second.pages[0] == first.pages[0]
    assert allocator.free_pages == 1
    allocator.check_integrity([first, second])
    first.release()
    assert allocator.free_pages == 2  # the second still holds "a"; "b" is idle
    assert allocator.find([b"a", b"b", b"c"]) == [second.pages[0], 1]
    second.release()
    assert allocator.free_pages == 4
    assert allocator.find([b"b"]) == [1]
    allocator.check_integrity([])


def test_the_end_of_the_least_recent_chain_is_evicted_first() -> None:
    allocator = PageAllocator(4, 4)
    old, new = allocator.allocate(2), allocator.allocate(2)
    allocator.publish(old, [b"a", b"b"])
    allocator.publish(new, [b"c", b"d"])
    old.release()
    new.release()
    allocator.allocate(0, allocator.find([b"a", b"b"])).release()  # now the most recent
    lease = allocator.allocate(1)
    assert allocator.find([b"c", b"d"]) == allocator.find([b"c"]) != []
    allocator.grow(lease, 1)
    assert allocator.find([b"c"]) == []
    assert len(allocator.find([b"a", b"b"])) == 2
    assert allocator.evicted == 2
    allocator.check_integrity([lease])


def test_what_cannot_be_had_leaves_shared_pages_as_they_were() -> None:
    allocator = PageAllocator(3, 4)
    lease = allocator.allocate(1)
    allocator.publish(lease, [b"a"])
    lease.release()
    with pytest.raises(OutOfPages):
        allocator.allocate(3, allocator.find([b"a"]))
    assert allocator.free_pages == 3
    assert allocator.find([b"a"]) == [0]
    allocator.check_integrity([])


def test_of_two_equal_blocks_the_first_is_kept() -> None:
    allocator = PageAllocator(4, 4)
    first, second = allocator.allocate(1), allocator.allocate(1)
    allocator.publish(first, [b"a"])
    allocator.publish(second, [b"a"])
    assert allocator.find([b"a"]) == first.pages
    second.release()
    assert allocator.free_pages == 3
    assert allocator.published_pages == 1
    allocator.check_integrity([first])


def test_withdrawn_pages_are_found_no_more() -> None:
    allocator = PageAllocator(4, 4)
    lease = allocator.allocate(2)
    allocator.publish(lease, [b"a", b"b"])
    sharer = allocator.allocate(0, allocator.find([b"a"]))
    allocator.withdraw(lease)
    assert allocator.find([b"a"]) == []
    lease.release()
    allocator.check_integrity([sharer])
    sharer.release()
    assert allocator.free_pages == 4
    assert allocator.published_pages == 0


@given(
    st.lists(
        st.tuples(
            st.sampled_from(
                ["allocate", "share", "grow", "shrink", "release", "publish", "withdraw", "clear"]
            ),
            st.integers(0, 5),
        ),
        max_size=60,
    )
)
def test_churn_keeps_every_page_accounted_for(actions: list[tuple[str, int]]) -> None:
    allocator = PageAllocator(10, 2)
    leases = [allocator.allocate(0)]
    for number, (action, count) in enumerate(actions):
        lease = leases[number % len(leases)]
        kept = list(lease.pages)
        free = allocator.free_pages
        keys = [bytes([number % 2, i]) for i in range(count)]
        try:
            if action == "allocate":
                leases.append(allocator.allocate(count))
            elif action == "share":
                shared = allocator.find(keys)
                leases.append(allocator.allocate(1, shared))
                assert leases[-1].pages[:-1] == shared
            elif action == "grow":
                allocator.grow(lease, count)
                assert lease.pages[: len(kept)] == kept
            elif action == "shrink":
                allocator.shrink(lease, count)
                assert lease.pages == kept[:count]
            elif action == "publish":
                allocator.publish(lease, keys[: len(kept)])
            elif action == "withdraw":
                allocator.withdraw(lease)
            elif action == "clear":
                allocator.clear()
                assert allocator.published_pages == 0
            else:
                lease.release()
                assert not lease.pages
        except OutOfPages:
            assert count > free or action == "share"
        allocator.check_integrity(leases)
        held = {page for x in leases for page in x.pages}
        assert allocator.free_pages + len(held) == 10
