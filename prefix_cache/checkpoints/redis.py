"""``redis://``, ``rediss://`` and ``unix://`` with swaps: checkpoints that machines share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from prefix_cache.checkpoints.cells import Swap
from prefix_cache.stores.redis import Command, RedisStore

#: Swaps an entry, if nobody has written to it since its head was read.
#:
#:   KEYS[1]  the entry
#:   ARGV[1]  what it must begin with; empty if it must not be there
#:   ARGV[2]  its new head
#:   ARGV[3]  "set" or "keep": whether ARGV[4] replaces what follows the head
#:   ARGV[4]  its new body
#:   ARGV[5]  ms to live
#:
#: Returns 1 if it was swapped, 0 if it begins otherwise. One key, so that a cluster may route it.
SWAP = """
if redis.call('GETRANGE', KEYS[1], 0, #ARGV[2] - 1) ~= ARGV[1] then return 0 end
if ARGV[3] == 'keep' then
  redis.call('SETRANGE', KEYS[1], 0, ARGV[2])
  redis.call('PEXPIRE', KEYS[1], ARGV[5])
else
  redis.call('SET', KEYS[1], ARGV[2] .. ARGV[4], 'PX', ARGV[5])
end
return 1
"""


class RedisCells(RedisStore):
    """Entries as string values with a TTL; see :class:`prefix_cache.checkpoints.cells.Cells`."""

    def heads(self, keys: Sequence[bytes], size: int, deadline_s: float) -> list[bytes]:
        """See Cells."""
        commands: list[Command] = [
            ("GETRANGE", self._options.key(key), 0, size - 1) for key in keys
        ]
        return cast("list[bytes]", self._run(commands, deadline_s))

    def swap_many(self, swaps: Sequence[Swap], deadline_s: float) -> list[bool]:
        """See Cells."""
        commands: list[Command] = [
            (
                *("EVAL", SWAP, 1, self._options.key(swap.key), swap.expected, swap.head),
                *("keep" if swap.body is None else "set", swap.body or b""),
                max(1, round(swap.ttl_s * 1000)),
            )
            for swap in swaps
        ]
        return [reply == 1 for reply in self._run(commands, deadline_s)]
