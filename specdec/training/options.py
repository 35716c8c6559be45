"""Settings of a training run. Every default is written here only."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from specdec.config import Settings


class TrainOptions(Settings):
    """How heads are trained. The defaults made the set that ships for the default model.

    Attributes:
        kind: ``sequential`` heads see the tokens drafted above, ``medusa`` heads do not.
        depths: how many tokens ahead of the root.
        width: of a node's state (sequential).
        inner: of the gated layer (sequential).
        blocks: gated blocks (sequential) or residual blocks (medusa) per depth.
        recent: committed tokens before the root that sequential heads see.
        draft_vocab: most frequent tokens that can be drafted; None for all.
        epochs: passes over the positions.
        batch_size: positions per step; each teaches all depths.
        learning_rate: at its peak; it rises over ``warmup`` steps and falls by a cosine.
        warmup: steps.
        weight_decay: of AdamW.
        hard: share of tokens against soft labels, see :class:`~.objective.Objective`.
        decay: weight of a depth against the one above.
        negatives: random tokens per batch to compete against.
        seed: of initial weights, order and negatives.
        checkpoint_every: steps between checkpoints.
        held_out: shards kept for measuring.
    """

    kind: Literal["sequential", "medusa"] = "sequential"
    depths: int = Field(4, ge=1, le=16)
    width: int = Field(576, ge=1)
    inner: int = Field(768, ge=1)
    blocks: int = Field(1, ge=1)
    recent: int = Field(0, ge=0)
    draft_vocab: int | None = Field(8192, ge=1)
    epochs: float = Field(3.0, gt=0)
    batch_size: int = Field(128, ge=1)
    learning_rate: float = Field(2e-3, gt=0)
    warmup: int = Field(60, ge=0)
    weight_decay: float = Field(0.02, ge=0)
    hard: float = Field(0.3, ge=0, le=1)
    decay: float = Field(0.8, gt=0, le=1)
    negatives: int = Field(256, ge=0)
    seed: int = 0
    checkpoint_every: int = Field(200, ge=1)
    held_out: int = Field(2, ge=1)
