"""Requests come and go, and device memory is modelled slot by slot.

KV is written where a segment says, moved as a ``KvMove`` says, and compared with the hash of
the committed tokens wherever a segment reads.
"""

from __future__ import annotations

import random
import struct
from dataclasses import dataclass, field

from specdec.params import SamplingParams
from specdec.policy.pages import PageAllocator
from specdec.policy.plan import CommitResult, Segment, StepPlan
from specdec.policy.scheduler import Scheduler
from specdec.policy.sequence import FoundBlocks, Sequence, Status
from specdec.policy.stop import StopChecker
from specdec.policy.tree import DraftTree, walk
from specdec.policy.verdict import Verdict
from tests.policy.budgets import AnyBudget
from tests.policy.world import (
    EOS,
    VOCAB,
    Blocks,
    Memory,
    Mover,
    World,
    chain,
    draw,
    move_in_order,
    plain_answer,
    text_of,
)


@dataclass
class Request:
    """What the world knows of a request."""

    sequence: Sequence
    answer: list[int]
    reason: str
    kv: list[int]
    deadline: int
    blocks: Blocks | None


@dataclass
class Simulation:
    """One world, run step by step from a seed; every step is checked."""

    world: World
    seed: int
    move: Mover = move_in_order
    requests: dict[str, Request] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    #: Per request that is loading, the first block it waits for and how many will come.
    loading: dict[str, tuple[int, int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        world = self.world
        self.rng = random.Random(self.seed)
        self.step_number = 0
        self.names = 0
        self.allocator = PageAllocator(world.num_pages, world.page_size)
        budget = AnyBudget(random.Random(self.seed)) if self.seed % 2 else None
        self.scheduler = Scheduler(
            world.scheduler, self.allocator, lambda: float(self.step_number), budget
        )
        self.memory: Memory = [[0] * world.page_size for _ in range(world.num_pages)]

    def run(self, steps: int) -> None:
        """Take ``steps`` steps with requests coming, then serve all that are left."""
        for _ in range(steps):
            if self.rng.random() < self.world.arrival:
                self.arrive()
            if self.requests and self.rng.random() < self.world.abort:
                self.leave(crash=False)
            if self.requests and self.rng.random() < self.world.crash:
                self.leave(crash=True)
            self.step()
        while self.requests:
            self.step()
        assert not self.scheduler.has_work
        assert self.allocator.free_pages == self.world.num_pages

    def count(self, what: str, by: int = 1) -> None:
        self.counts[what] = self.counts.get(what, 0) + by

    def arrive(self) -> None:
        rng, world = self.rng, self.world
        length = rng.randint(1, min(world.longest_prompt, world.longest - 2))
        params = SamplingParams(
            max_tokens=rng.randint(1, world.longest_answer),
            ignore_eos=rng.random() >= world.eos,
            stop=("bc", "dad") if rng.random() < 0.2 else (),
            stop_token_ids=frozenset({7}) if rng.random() < 0.1 else frozenset(),
            speculation=rng.random() < world.speculation,
        )
        prompt = [rng.randrange(VOCAB) for _ in range(length)]
        blocks = None
        kv = [rng.getrandbits(64)]
        if world.tenants:
            blocks = Blocks(rng.randrange(world.tenants), world.page_size)
            kv = [blocks.tenant]
            known, text = rng.randint(0, length), rng.randrange(3)
            prompt[:known] = [(text + 5 * i) % VOCAB for i in range(known)]
        for token in prompt:
            kv.append(chain(kv[-1], token))
        answer, reason = plain_answer(world, kv[-1], length, params)
        self.enqueue(prompt, length, params, answer, reason, kv, blocks)

    def enqueue(
        self,
        tokens: list[int],
        prompt_length: int,
        params: SamplingParams,
        answer: list[int],
        reason: str,
        kv: list[int],
        blocks: Blocks | None,
    ) -> None:
        waiting = len(self.scheduler.waiting) + self.scheduler.loading
        if waiting >= self.world.scheduler.max_waiting:
            return
        self.names += 1
        name, limit = str(self.names), self.world.scheduler.max_model_length
        checker = StopChecker(params, (EOS,), limit, prompt_length, text_of)
        sequence = Sequence(name, tokens, prompt_length, params, checker, blocks)
        loading = blocks is not None and self.rng.random() < 0.3
        self.scheduler.add(sequence, loading)
        if loading:
            first, keys = self.scheduler.blocks_wanted(sequence)
            self.loading[name] = (first, self.rng.randint(0, len(keys)))
            self.count("loading")
        # The bound on starvation: the oldest request has rows in every step, each of which
        # computes or commits one of its `longest` tokens at least, and is never preempted.
        # With k requests ahead, a request is the oldest once these have ended.
        self.requests[name] = Request(sequence, answer, reason, kv, self.deadline(), blocks)
        self.count("requests")

    def deadline(self) -> int:
        return self.step_number + (len(self.requests) + 1) * (self.world.longest + 1)

    def load(self) -> None:
        """What some requests wait for comes in, whole or in part."""
        for name in [name for name in self.loading if self.rng.random() < 0.3]:
            first, count = self.loading.pop(name)
            request, size = self.requests[name], self.world.page_size
            payloads = [
                struct.pack(f"<{size}Q", *request.kv[1 + i * size : 1 + (i + 1) * size])
                for i in range(first, first + count)
            ]
            self.scheduler.loaded(request.sequence, FoundBlocks(first, tuple(payloads)))
            request.deadline = self.deadline()

    def leave(self, crash: bool) -> None:
        """A client goes away; or a worker does, and the request comes again with what it has
        emitted so far."""
        request = self.requests[self.rng.choice(list(self.requests))]
        before = request.sequence
        assert self.scheduler.abort(before.request_id)
        assert not self.scheduler.abort(before.request_id)
        assert before.status is Status.FINISHED
        assert before.lease is None
        assert before.finish_reason == "abort"
        del self.requests[before.request_id]
        self.loading.pop(before.request_id, None)
        assert before.emitted == request.answer[: len(before.emitted)]
        self.count("crash" if crash else "abort")
        if crash:
            self.enqueue(
                list(before.tokens),
                before.prompt_length,
                before.params,
                request.answer,
                request.reason,
                request.kv,
                request.blocks,
            )

    def step(self) -> None:
        """One step: schedule, forward, verify, commit, move, draft."""
        self.step_number += 1
        self.load()
        plan = self.scheduler.schedule()
        self.check_plan(plan)
        for load in plan.loads:
            self.memory[load.page][:] = struct.unpack(f"<{self.world.page_size}Q", load.payload)
        self.count("loads", len(plan.loads))
        for segment in plan.segments:
            self.write(segment, self.kv_of_rows(segment))
        for segment in plan.segments:
            self.read(segment)
        if plan.segments and self.rng.random() < self.world.abort:
            self.leave(crash=False)
        verdicts = [self.verify(segment) for segment in plan.segments]
        result = self.scheduler.commit(plan, verdicts)
        self.move(self.memory, result.moves, self.world.page_size)
        self.count("moves", len(result.moves))
        self.enter(plan, result)
        self.scheduler.check_integrity()

    def check_plan(self, plan: StepPlan) -> None:
        world, config = self.world, self.world.scheduler
        assert plan.rows == sum(len(s.tokens) for s in plan.segments) <= config.token_budget
        assert bool(plan.segments) == (len(self.requests) > len(self.loading))
        served = {s.sequence for s in plan.segments}
        assert len(served) == len(plan.segments)
        running = self.scheduler.running
        assert served <= set(running)
        assert len(running) <= min(config.max_sequences, config.token_budget)
        assert all(s in served for s in running if s.decoding)
        assert not running or running[0] in served
        for segment in plan.segments:
            sequence, tree = segment.sequence, segment.tree
            n = len(sequence.tokens)
            if tree is None:
                end = segment.start + len(segment.tokens)
                assert segment.start == sequence.computed
                assert list(segment.tokens) == sequence.tokens[segment.start : end]
                assert len(segment.tokens) <= config.prefill_chunk
                assert segment.wants_logits == (end == n)
                continue
            assert segment.start == sequence.computed == n - 1
            assert segment.tokens == tree.tokens
            assert tree.tokens[0] == sequence.tokens[-1]
            assert len(tree) <= config.max_tree_nodes
            assert max(tree.depths) < max(sequence.remaining, 1)
            assert n + max(tree.depths) < world.longest
            assert len(tree) == 1 or sequence.params.speculation

    def kv_of_rows(self, segment: Segment) -> list[int]:
        kv = self.requests[segment.sequence.request_id].kv
        if segment.tree is None:
            return kv[segment.start + 1 : segment.start + 1 + len(segment.tokens)]
        rows: list[int] = []
        for token, parent in zip(segment.tree.tokens, segment.tree.parents, strict=True):
            rows.append(chain(rows[parent] if parent >= 0 else kv[segment.start], token))
        return rows

    def write(self, segment: Segment, rows: list[int]) -> None:
        lease = segment.sequence.lease
        assert lease is not None
        for position, value in enumerate(rows, segment.start):
            page, offset = divmod(position, self.world.page_size)
            self.memory[lease.pages[page]][offset] = value

    def read(self, segment: Segment) -> None:
        """All committed KV must be there, and what this segment wrote."""
        lease = segment.sequence.lease
        assert lease is not None
        held = [value for page in lease.pages for value in self.memory[page]]
        kv = self.requests[segment.sequence.request_id].kv
        assert held[: segment.start] == kv[1 : segment.start + 1]
        end = segment.start + len(segment.tokens)
        assert held[segment.start : end] == self.kv_of_rows(segment)

    def verify(self, segment: Segment) -> Verdict | None:
        if segment.sequence.request_id not in self.requests:
            return Verdict.failure("of one that left")
        if self.rng.random() < self.world.error:
            return Verdict.failure("injected")
        if not segment.wants_logits:
            return None
        drawn = [draw(kv) for kv in self.kv_of_rows(segment)]
        if segment.tree is None:
            return Verdict((0,), (drawn[-1],))
        nodes, tokens = walk(segment.tree, drawn)
        return Verdict(tuple(nodes), tuple(tokens))

    def enter(self, plan: StepPlan, result: CommitResult) -> None:
        rows: list[tuple[Segment, int]] = []
        with_logits: list[tuple[Segment, int]] = []
        for segment in plan.segments:
            packed = [(segment, row) for row in range(len(segment.tokens))]
            rows += packed
            with_logits += packed if segment.tree else packed[-1:] * segment.wants_logits
        for entry in result.committed:
            sequence = entry.sequence
            request = self.requests[sequence.request_id]
            # The next draft grows from the hidden state of the token before the newest.
            segment, row = rows[entry.row]
            assert (segment, row) == with_logits[entry.logits_row]
            assert segment.sequence is sequence
            assert segment.tokens[row] == sequence.tokens[-2]
            assert sequence.emitted == request.answer[: len(sequence.emitted)]
            for token in entry.tokens:
                request.kv.append(chain(request.kv[-1], token))
            self.count("committed", len(entry.tokens))
            if sequence.status is Status.RUNNING:
                sequence.draft = self.draft(request)
        for sequence in result.finished:
            request = self.requests.pop(sequence.request_id)
            self.count(sequence.finish_reason or "")
            assert sequence.status is Status.FINISHED
            assert sequence.lease is None
            if sequence.finish_reason == "error":
                assert sequence.error == "injected"
                assert sequence.emitted == request.answer[: len(sequence.emitted)]
            else:
                assert sequence.emitted == request.answer
                assert sequence.finish_reason == request.reason
            assert self.step_number <= request.deadline, "starved"
            self.check_stats(sequence)
        for name, request in self.requests.items():
            if name in self.loading:
                continue
            assert self.step_number <= request.deadline, "starved"

    def check_stats(self, sequence: Sequence) -> None:
        stats = sequence.stats
        self.count("preemptions", stats.preemptions)
        self.count("cached", stats.cached)
        self.count("accepted", stats.accepted)
        self.count("drafted", stats.drafted)
        self.count("rounds", stats.rounds)
        assert sum(stats.accepted_by_depth) == stats.accepted <= stats.drafted
        assert all(
            a <= w <= stats.rounds
            for a, w in zip(stats.accepted_by_depth, stats.walked_by_depth, strict=True)
        )

    def draft(self, request: Request) -> DraftTree | None:
        """A random tree, often larger and deeper than allowed; some nodes are right."""
        rng = self.rng
        if rng.random() < 0.1:
            return None
        tokens, parents, depths = [request.sequence.tokens[-1]], [-1], [0]
        kv, seen = [request.kv[-1]], set()
        for _ in range(rng.randint(0, self.world.scheduler.max_tree_nodes)):
            parent = rng.randrange(len(tokens)) if rng.random() < 0.5 else len(tokens) - 1
            right = rng.random() < self.world.acceptance
            token = draw(kv[parent]) if right else rng.randrange(VOCAB)
            if (parent, token) in seen:
                continue
            seen.add((parent, token))
            kv.append(chain(kv[parent], token))
            tokens.append(token)
            parents.append(parent)
            depths.append(depths[parent] + 1)
        values = sorted((rng.random() for _ in tokens), reverse=True)
        return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(values))
