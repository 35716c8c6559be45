"""The contract of checkpoints that all stores keep: leases, fences, removal, lists."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest

from prefix_cache.checkpoints.cells import open_cells
from prefix_cache.checkpoints.codec import CheckpointCodec
from prefix_cache.checkpoints.record import FIRST_FENCE, Checkpoint, State
from prefix_cache.checkpoints.store import Save, SwappingStore
from prefix_cache.errors import CheckpointTooLarge, FencedError, LeaseHeldError, StoreError
from prefix_cache.store import StoreOptions

SOON = 10.0
LEASE = 30.0


def checkpoint(name: str = "r", tokens: int = 3, **changes: object) -> Checkpoint:
    made = Checkpoint(
        request_id=name,
        prompt=(1, 2, 2**32 - 1),
        emitted=tuple(range(tokens)),
        request=b'{"seed": 7}',
        answer=b"\x00 any \xff bytes",
        draft=(5, 6, 7),
        draft_parents=(-1, 0, 0),
        owner="worker a",
        written_at=1e9 + 0.25,
    )
    return replace(made, **changes)  # type: ignore[arg-type]


def opened(
    url: str,
    namespace: str = "ckpt",
    ttl_s: float = 60.0,
    clock: Callable[[], float] = time.time,
    secret: bytes = b"",
) -> SwappingStore:
    cells = open_cells(url, StoreOptions(namespace, ttl_s, 16 * 2**20))
    return SwappingStore(cells, CheckpointCodec(2**20, secret), ttl_s, clock)


def save(store: SwappingStore, one: Checkpoint, lease_s: float = LEASE) -> bool:
    return store.save([Save(one, lease_s)], SOON)[0]


class Clock:
    """Stands still until told."""

    def __init__(self) -> None:
        self.now = 1e9

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(any_url: str, clock: Clock) -> Iterator[SwappingStore]:
    cells = open_cells(any_url, StoreOptions("ckpt", 60, 16 * 2**20))
    cells.purge(SOON)
    store = SwappingStore(cells, CheckpointCodec(2**20), 60, clock)
    yield store
    store.close()


def test_what_was_saved_is_got(store: SwappingStore) -> None:
    assert store.get("r", SOON) is None
    one = checkpoint()
    assert save(store, one)
    found = store.get("r", SOON)
    assert found is not None
    assert found.checkpoint == one
    assert found.lease_left_s == LEASE
    assert found.checkpoint.position == 6
    later = replace(one, emitted=tuple(range(500)), draft=(), draft_parents=())
    assert save(store, later)
    found = store.get("r", SOON)
    assert found is not None
    assert found.checkpoint == later


def test_an_older_fence_writes_nothing_over_a_newer_one(store: SwappingStore) -> None:
    new = checkpoint(tokens=8, owner="worker b", fence=FIRST_FENCE + 2)
    zombie = checkpoint(tokens=20, fence=FIRST_FENCE + 1)
    assert save(store, zombie)
    assert save(store, new)
    assert not save(store, zombie)
    with pytest.raises(FencedError):
        store.renew("r", zombie.fence, LEASE, SOON)
    store.remove(["r"], zombie.fence, SOON)
    found = store.get("r", SOON)
    assert found is not None
    assert found.checkpoint == new


def test_of_many_in_one_call_each_has_its_own_answer(store: SwappingStore) -> None:
    assert save(store, checkpoint("b", fence=FIRST_FENCE + 5))
    saves = [Save(checkpoint(name), LEASE) for name in "abc"]
    assert store.save(saves, SOON) == [True, False, True]
    assert store.save([], SOON) == []
    with pytest.raises(ValueError, match="two checkpoints"):
        store.save([Save(checkpoint(), LEASE), Save(checkpoint(), LEASE)], SOON)


def test_only_one_creates(store: SwappingStore) -> None:
    created = store.create(checkpoint(fence=0), LEASE, SOON)
    assert created == checkpoint(fence=FIRST_FENCE)
    assert store.create(checkpoint(owner="second"), LEASE, SOON) is None
    found = store.get("r", SOON)
    assert found is not None
    assert found.checkpoint == created
    store.remove(["r"], FIRST_FENCE + 1, SOON)
    again = store.create(checkpoint(owner="second"), LEASE, SOON)
    assert again is not None
    assert not save(store, checkpoint(fence=FIRST_FENCE + 1))  # of before it was removed
    assert save(store, again)


def test_a_lease_keeps_others_away_until_it_ends(store: SwappingStore, clock: Clock) -> None:
    assert store.claim("r", "b", LEASE, SOON) is None
    save(store, checkpoint())
    with pytest.raises(LeaseHeldError) as caught:
        store.claim("r", "b", LEASE, SOON)
    assert caught.value.left_s == LEASE
    clock.now += LEASE - 1
    store.renew("r", FIRST_FENCE, LEASE, SOON)
    clock.now += LEASE - 1
    with pytest.raises(LeaseHeldError):
        store.claim("r", "b", LEASE, SOON)
    clock.now += 2
    claimed = store.claim("r", "b", LEASE, SOON)
    assert claimed is not None
    assert claimed.fence == 2 * FIRST_FENCE
    assert claimed == replace(checkpoint(), fence=claimed.fence, owner="b")
    with pytest.raises(LeaseHeldError):
        store.claim("r", "c", LEASE, SOON)


def test_whom_a_claim_fences_off_has_lost_the_request(store: SwappingStore, clock: Clock) -> None:
    save(store, checkpoint(fence=FIRST_FENCE + 3))
    clock.now += LEASE + 1
    claimed = store.claim("r", "b", LEASE, SOON)
    assert claimed is not None
    for attempt in range(3, 2**16, 9999):  # however often the old gateway sends it anew
        assert not save(store, checkpoint(tokens=30, fence=FIRST_FENCE + attempt))
    assert save(store, replace(claimed, emitted=(9,) * 40))


def test_an_owner_can_let_go(store: SwappingStore) -> None:
    save(store, checkpoint(), lease_s=0)
    claimed = store.claim("r", "b", LEASE, SOON)
    assert claimed is not None
    store.renew("r", claimed.fence, 0, SOON)
    assert store.claim("r", "c", LEASE, SOON) is not None


def test_a_living_owner_can_be_superseded_by_one_caller(store: SwappingStore) -> None:
    save(store, checkpoint())
    found = store.get("r", SOON)
    assert found is not None
    claimed = store.claim("r", "b", LEASE, SOON, supersede=found.checkpoint.fence)
    assert claimed is not None
    with pytest.raises(LeaseHeldError) as caught:
        store.claim("r", "c", LEASE, SOON, supersede=found.checkpoint.fence)
    assert caught.value.fence == claimed.fence


def test_a_finished_request_is_nobodys(store: SwappingStore) -> None:
    done = checkpoint(finished=True, progress=b"stop")
    save(store, checkpoint())
    save(store, done)
    assert store.claim("r", "b", LEASE, SOON) == done
    assert store.claim("r", "c", LEASE, SOON) == done
    found = store.get("r", SOON)
    assert found is not None
    assert found.lease_left_s == 0


def test_what_was_removed_does_not_come_back(store: SwappingStore) -> None:
    save(store, checkpoint("r"))
    save(store, checkpoint("s"))
    store.remove(["r", "unknown"], FIRST_FENCE, SOON)
    assert store.get("r", SOON) is None
    assert store.claim("r", "b", LEASE, SOON) is None
    assert not save(store, checkpoint("r"))
    with pytest.raises(FencedError):
        store.renew("r", FIRST_FENCE, LEASE, SOON)
    assert [listed.request_id for listed in store.list(100, SOON)] == ["s"]


def test_a_list_shows_who_has_what(store: SwappingStore, clock: Clock) -> None:
    save(store, checkpoint("a"))
    save(store, checkpoint("b"), lease_s=0)
    save(store, checkpoint("c", finished=True, fence=FIRST_FENCE + 1))
    listed = {one.request_id: one for one in store.list(100, SOON)}
    assert {name: (one.state, one.fence, one.leased) for name, one in listed.items()} == {
        "a": (State.UNFINISHED, FIRST_FENCE, True),
        "b": (State.UNFINISHED, FIRST_FENCE, False),
        "c": (State.FINISHED, FIRST_FENCE + 1, False),
    }
    clock.now += LEASE + 1
    assert not any(one.leased for one in store.list(100, SOON))


def test_checkpoints_end_with_their_ttl(any_url: str) -> None:
    store = opened(any_url, "short", ttl_s=0.4)
    try:
        save(store, checkpoint())
        store.remove(["gone"], FIRST_FENCE, SOON)
        end = time.monotonic() + 20
        while store.get("r", SOON) is not None:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert store.list(10, SOON) == []
        assert save(store, checkpoint("gone"))
    finally:
        store.close()


def test_one_that_is_too_large_is_refused_and_nothing_written(store: SwappingStore) -> None:
    saves = [Save(checkpoint("a"), LEASE), Save(checkpoint("b", answer=bytes(2**20)), LEASE)]
    with pytest.raises(CheckpointTooLarge):
        store.save(saves, SOON)
    assert store.list(10, SOON) == []


@pytest.mark.parametrize("name", ["", "é", "a\nb", "a" * 300])
def test_odd_ids_are_refused(store: SwappingStore, name: str) -> None:
    with pytest.raises(ValueError, match="request id"):
        save(store, checkpoint(name))
    with pytest.raises(ValueError, match="request id"):
        store.get(name, SOON)


def test_a_closed_store_says_so(any_url: str) -> None:
    store = opened(any_url)
    store.close()
    for call in (
        lambda: save(store, checkpoint()),
        lambda: store.get("r", SOON),
        lambda: store.claim("r", "b", LEASE, SOON),
        lambda: store.list(10, SOON),
    ):
        with pytest.raises(StoreError):
            call()


def test_threads_that_write_one_request_lose_none_to_an_older(shared_url: str) -> None:
    store = opened(shared_url, "threads")
    refused: list[int] = []

    def write(first: int) -> None:
        refused.extend(
            fence
            for fence in range(first, 120, 4)
            if not save(store, checkpoint(tokens=fence, fence=FIRST_FENCE + fence))
        )

    threads = [threading.Thread(target=write, args=(first,)) for first in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found = store.get("r", SOON)
    store.close()
    assert found is not None
    assert len(found.checkpoint.emitted) == 119
    assert 119 not in refused


# Claims many requests that all others claim as well; says which it got.
CLAIMER = """
import sys
from prefix_cache.checkpoints.cells import open_cells
from prefix_cache.checkpoints.codec import CheckpointCodec
from prefix_cache.checkpoints.store import Save, SwappingStore
from prefix_cache.errors import LeaseHeldError
from prefix_cache.store import StoreOptions

url, me, supersede = sys.argv[1], sys.argv[2], int(sys.argv[3])
cells = open_cells(url, StoreOptions(f"claims{supersede}", 60, 16 * 2**20))
store = SwappingStore(cells, CheckpointCodec(2**20), 60)
print("ready", flush=True)
sys.stdin.readline()
won = []
for number in range(40):
    try:
        claimed = store.claim(f"r{number}", me, 60, 30, supersede or None)
    except LeaseHeldError:
        continue
    assert claimed is not None
    won.append(str(number))
    assert store.save([Save(claimed, 60)], 30) == [True]
print(" ".join(won))
"""


@pytest.mark.parametrize("supersede", [0, FIRST_FENCE])
def test_of_eight_processes_that_claim_one_wins(shared_url: str, supersede: int) -> None:
    store = opened(shared_url, f"claims{supersede}")
    lease_s = LEASE if supersede else 0.0
    store.save([Save(checkpoint(f"r{n}"), lease_s) for n in range(40)], SOON)
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", CLAIMER, shared_url, f"worker {n}", str(supersede)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for n in range(8)
    ]
    for worker in workers:
        assert worker.stdout is not None
        assert worker.stdout.readline() == "ready\n"
    outcomes = [worker.communicate("go\n", timeout=120) for worker in workers]
    assert [errors for _, errors in outcomes] == [""] * 8
    won = sorted(int(number) for out, _ in outcomes for number in out.split())
    assert won == list(range(40))
    fences = {one.fence for one in store.list(100, SOON)}
    store.close()
    assert fences == {2 * FIRST_FENCE}
