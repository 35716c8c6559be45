"""Answers of a made-up target whose next token follows a rule that heads can learn."""

from __future__ import annotations

from pathlib import Path

import torch

from specdec.heads.target import Target
from specdec.training.answers import write_shard

VOCAB, HIDDEN = 24, 16


def rule_target() -> Target:
    """Orthogonal-ish embeddings, tied."""
    rows = torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(7))
    return Target(rows, rows)


def follower(token: int) -> int:
    """The rule: what greedy decoding emits after a token."""
    return (token * 5 + 3) % VOCAB


def write_rule_answers(folder: Path, shards: int = 4, answers: int = 12) -> list[Path]:
    """Shards in which each token follows from the one before it."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = rule_target().output
    generator = torch.Generator().manual_seed(0)
    paths = []
    for number in range(shards):
        made = []
        for _ in range(answers):
            length = int(torch.randint(3, 15, (1,), generator=generator))
            tokens = [int(torch.randint(VOCAB, (1,), generator=generator))]
            while len(tokens) < length:
                tokens.append(follower(tokens[-1]))
            noise = torch.randn(length, HIDDEN, generator=generator) * 0.05
            made.append((tokens, (rows[tokens] * 2 + noise).bfloat16()))
        paths.append(folder / f"answers-{number:05d}.safetensors")
        write_shard(paths[-1], made)
    return paths
