"""100,000 scheduler steps in worlds of different scarcity, and proof that faults are seen."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import replace

import pytest

from specdec.errors import IntegrityError
from specdec.policy import outcome, pages, roster, scheduler
from specdec.policy.plan import KvMove, PublishedBlock, SchedulerConfig, Segment
from specdec.policy.sequence import Sequence
from tests.policy.simulation import Simulation
from tests.policy.world import Blocks, Memory, Mover, World, move_at_once, move_in_order

STEPS = 17_000


def limits(
    budget: int, sequences: int, chunk: int, *, nodes: int = 6, length: int = 40
) -> SchedulerConfig:
    return SchedulerConfig(budget, sequences, 8, nodes, chunk, length)


WORLDS = {
    # What is scarce, by name.
    "pages": World(limits(24, 6, 7), 12, 2, 10, 20, arrival=0.3),
    "rows": World(limits(3, 5, 2, nodes=4), 40, 3, 9, 15, arrival=0.2),
    "slots": World(limits(20, 6, 5, length=24), 23, 1, 12, 30, arrival=0.3, eos=0.3),
    "length": World(limits(16, 4, 16, length=18), 5, 8, 17, 40, arrival=0.3, acceptance=0.9),
    "shared pages": World(limits(24, 6, 7), 12, 2, 10, 20, arrival=0.3, tenants=2, error=0.003),
    "nothing": World(limits(64, 8, 16, nodes=8, length=64), 100, 4, 20, 30, arrival=0.5),
}
#: More requests than can be served: the queue is full at all times.
CROWD = World(limits(4, 1, 4, length=12), 20, 2, 5, 5, arrival=1.0)


@pytest.mark.parametrize("name", WORLDS)
def test_every_request_ends_with_its_own_text(name: str) -> None:
    move = move_at_once if name in ("pages", "shared pages") else move_in_order
    simulation = Simulation(WORLDS[name], seed=len(name), move=move)
    simulation.run(STEPS)
    counts = simulation.counts
    assert simulation.step_number >= STEPS
    for seen in ("stop", "length", "error", "abort", "crash", "moves", "accepted"):
        assert counts[seen] > 10, counts
    if "shared" in name:
        assert counts["cached"] > 1000, counts
        assert counts["loads"] > 1000, counts
        assert simulation.allocator.evicted > 1000
    if name in ("pages", "slots", "shared pages"):
        assert counts["preemptions"] > 100, counts
    if name in ("rows", "nothing"):
        assert counts["preemptions"] == 0, counts


def forget(memory: Memory, moves: KvMove, page_size: int) -> None:
    """Accepted nodes stay where they were written."""


def shift_target(memory: Memory, moves: KvMove, page_size: int) -> None:
    slots = len(memory) * page_size
    targets = [(slot + 1) % slots for slot in moves.target_slots]
    move_in_order(memory, KvMove(moves.source_slots, targets), page_size)


def shift_source(memory: Memory, moves: KvMove, page_size: int) -> None:
    sources = [max(slot - 1, 0) for slot in moves.source_slots]
    move_in_order(memory, KvMove(sources, moves.target_slots), page_size)


def reverse(memory: Memory, moves: KvMove, page_size: int) -> None:
    """The order of the pairs matters where a target is an earlier pair's source."""
    reversed_moves = KvMove(moves.source_slots[::-1], moves.target_slots[::-1])
    move_in_order(memory, reversed_moves, page_size)


@pytest.mark.parametrize("move", [forget, shift_target, shift_source, reverse])
def test_a_wrong_move_is_seen(move: Mover) -> None:
    with pytest.raises(AssertionError):
        Simulation(WORLDS["nothing"], seed=1, move=move).run(2_000)


def contiguous(moves: KvMove, segment: Segment, nodes: tuple[int, ...]) -> None:
    """Takes the pages of a sequence for neighbours."""
    lease = segment.sequence.lease
    assert lease is not None
    first = lease.slot(0)
    for place, node in enumerate(nodes):
        if node != place:
            moves.source_slots.append(first + segment.start + node)
            moves.target_slots.append(first + segment.start + place)


def one_too_far(moves: KvMove, segment: Segment, nodes: tuple[int, ...]) -> None:
    """Leaves out the last accepted node."""
    outcome.add_moves(moves, segment, nodes[:-1])


@pytest.mark.parametrize("wrong", [contiguous, one_too_far])
def test_wrong_slots_are_seen(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[KvMove, Segment, tuple[int, ...]], None]
) -> None:
    monkeypatch.setattr(scheduler, "add_moves", wrong)
    with pytest.raises((AssertionError, IndexError)):
        Simulation(WORLDS["pages"], seed=1).run(2_000)


def blind_to_tenants(self: Blocks, tokens: Items[int], count: int) -> list[bytes]:
    return [bytes(tokens[: (i + 1) * self.page_size]) for i in range(count)]


def blind_to_history(self: Blocks, tokens: Items[int], count: int) -> list[bytes]:
    """A block is known by its own tokens alone."""
    size = self.page_size
    return [bytes([self.tenant, *tokens[i * size : (i + 1) * size]]) for i in range(count)]


@pytest.mark.parametrize("wrong", [blind_to_tenants, blind_to_history])
def test_keys_that_say_too_little_are_seen(
    monkeypatch: pytest.MonkeyPatch, wrong: Callable[[Blocks, Items[int], int], list[bytes]]
) -> None:
    monkeypatch.setattr(Blocks, "keys", wrong)
    with pytest.raises(AssertionError):
        Simulation(WORLDS["shared pages"], seed=1).run(2_000)


def test_a_page_published_before_it_is_computed_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page with the last token's slot, which is written by the next step, if there is one."""

    def eager(self: roster.Roster, sequence: Sequence) -> list[PublishedBlock]:
        lease, keys = sequence.lease, sequence.block_keys
        if lease is not None and keys is not None:
            full = len(sequence.tokens) // self._allocator.page_size
            self._allocator.publish(lease, keys.keys(sequence.tokens, full))
        return []

    monkeypatch.setattr(roster.Roster, "publish", eager)
    # requests that come again with what they have emitted find it
    world = replace(WORLDS["shared pages"], crash=0.2, num_pages=60)
    with pytest.raises(AssertionError):
        Simulation(world, seed=1).run(4_000)


def test_a_whole_prompt_taken_from_pages_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_of_it(self: roster.Roster, sequence: Sequence) -> Items[bytes]:
        assert sequence.block_keys is not None
        full = len(sequence.tokens) // self._allocator.page_size
        return sequence.block_keys.keys(sequence.tokens, full)

    monkeypatch.setattr(roster.Roster, "_keys", all_of_it)
    with pytest.raises((AssertionError, IntegrityError, ValueError)):
        Simulation(WORLDS["shared pages"], seed=1).run(2_000)


def test_a_leak_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pages.PageLease, "release", lambda lease: None)
    with pytest.raises(IntegrityError, match="without an owner"):
        Simulation(WORLDS["pages"], seed=1).run(2_000)


def test_a_page_freed_too_early_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    def drop_too_much(self: roster.Roster, sequence: Sequence) -> None:
        assert sequence.lease is not None
        self._allocator.shrink(sequence.lease, len(sequence.tokens) // 2 // 2)

    monkeypatch.setattr(roster.Roster, "drop_scratch", drop_too_much)
    with pytest.raises((AssertionError, IntegrityError)):
        Simulation(WORLDS["pages"], seed=1).run(2_000)


def test_preempting_the_oldest_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    preempt = roster.Roster._preempt

    def oldest(self: roster.Roster, sequence: Sequence) -> None:
        preempt(self, self.running[0])

    monkeypatch.setattr(roster.Roster, "_preempt", oldest)
    with pytest.raises((AssertionError, IntegrityError)):
        Simulation(WORLDS["pages"], seed=1).run(2_000)


def test_starvation_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    admit = roster.Roster.admit

    def newest(self: roster.Roster) -> Sequence | None:
        self.waiting.rotate(1)
        sequence = admit(self)
        if sequence is None:
            self.waiting.rotate(-1)
        return sequence

    monkeypatch.setattr(roster.Roster, "admit", newest)
    monkeypatch.setattr(roster.Roster, "check_integrity", lambda roster: None)
    with pytest.raises(AssertionError, match="starved"):
        Simulation(CROWD, seed=1).run(2_000)


def test_a_crowd_is_served_in_time() -> None:
    Simulation(CROWD, seed=1).run(2_000)


def test_a_run_is_determined_by_its_seed() -> None:
    first, second = (Simulation(WORLDS["pages"], seed=5) for _ in range(2))
    first.run(500)
    second.run(500)
    assert first.counts == second.counts
