"""A store of verified KV blocks, shared between requests, replicas and restarts.

The lowest layer: it holds bytes and knows neither tensors nor models, so nothing in here
imports torch, ray or specdec. What the store promises to the engine above it:

- A block is found by its key: a hash over everything that its content depends on (weights,
  tokenizer, dtype, layout, the block's tokens and the chain of blocks before it).
- What is returned was verified against its header, token ids and checksum. A mismatch is
  a miss, counted and logged, never an answer.
- Any fault costs time only: reads have a deadline, writes are behind and bounded, and a
  store that is down is a store without entries.
"""
