"""What the simulation's requests, target model and device memory are like.

The KV of a token is stood for by a hash of its request and all tokens up to it, as KV depends
on these. The target model draws the next token from that hash, so what a request should emit
is known from a plain loop (``plain_answer``).
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Items
from dataclasses import dataclass

from specdec.params import SamplingParams
from specdec.policy.plan import KvMove, SchedulerConfig

VOCAB = 12
EOS = 0
MASK = 2**64 - 1

Memory = list[list[int]]
Mover = Callable[[Memory, KvMove, int], None]


def chain(before: int, token: int) -> int:
    """The KV of ``token`` where ``before`` is that of the token in front of it."""
    return (before * 6364136223846793005 + token * 2 + 1442695040888963407) & MASK


def draw(kv: int) -> int:
    """The token that the target emits after the token with this KV."""
    return (kv >> 40) % VOCAB


def text_of(tokens: list[int]) -> str:
    return "".join("abcdefghijkl"[token] for token in tokens)


def move_in_order(memory: Memory, moves: KvMove, page_size: int) -> None:
    """Pair by pair, as a loop of copies would."""
    for source, target in zip(moves.source_slots, moves.target_slots, strict=True):
        value = memory[source // page_size][source % page_size]
        memory[target // page_size][target % page_size] = value


def move_at_once(memory: Memory, moves: KvMove, page_size: int) -> None:
    """All sources are read before any target is written, as one gather and scatter would."""
    values = [memory[s // page_size][s % page_size] for s in moves.source_slots]
    for target, value in zip(moves.target_slots, values, strict=True):
        memory[target // page_size][target % page_size] = value


@dataclass(frozen=True)
class Blocks:
    """Keys that name all that the KV of a block depends on, tokens and tenant, in full."""

    tenant: int
    page_size: int

    def keys(self, tokens: Items[int], count: int) -> list[bytes]:
        return [bytes([self.tenant, *tokens[: (i + 1) * self.page_size]]) for i in range(count)]


@dataclass(frozen=True)
class World:
    """A scheduler's limits, a pool, and what requests are like.

    With ``tenants``, requests of the same tenant share the KV of what they have in common,
    and their prompts begin with one of a few texts; without, each has KV of its own.
    """

    scheduler: SchedulerConfig
    num_pages: int
    page_size: int
    longest_prompt: int
    longest_answer: int
    arrival: float
    abort: float = 0.002
    crash: float = 0.002
    error: float = 0.001
    acceptance: float = 0.6
    speculation: float = 0.9
    eos: float = 0.7
    tenants: int = 0

    @property
    def slots(self) -> int:
        return self.num_pages * self.page_size

    @property
    def longest(self) -> int:
        """Most tokens that a sequence can have."""
        return min(self.scheduler.max_model_length, self.slots + 1)


def plain_answer(world: World, kv: int, length: int, p: SamplingParams) -> tuple[list[int], str]:
    """What plain decoding emits, and why it ends."""
    answer: list[int] = []
    while True:
        token = draw(kv)
        kv = chain(kv, token)
        answer.append(token)
        if token in p.stop_token_ids or (token == EOS and not p.ignore_eos):
            return answer, "stop"
        if any(stop in text_of(answer) for stop in p.stop):
            return answer, "stop"
        if len(answer) == p.max_tokens or length + len(answer) == world.longest:
            return answer, "length"
