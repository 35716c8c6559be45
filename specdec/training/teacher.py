"""Soft labels: the target's own distribution at every position, kept as its likeliest tokens."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

#: Tokens kept per position; they hold nearly all of the distribution.
KEPT = 32
_ROWS = 512


@dataclass(frozen=True)
class Teacher:
    """The target's distribution over the draft vocabulary, ``N`` positions.

    Attributes:
        indices: ``[N, KEPT]`` int32 rows of the draft vocabulary.
        log_probabilities: ``[N, KEPT]`` float16, falling.
    """

    indices: Tensor
    log_probabilities: Tensor


def load_teacher(
    shards: Sequence[Path],
    rows: Tensor,
    token_map: Tensor | None,
    folder: Path,
    on_progress: Callable[[int], None] = lambda positions: None,
) -> Teacher:
    """Soft labels of all positions of ``shards``; computed once and kept in ``folder``.

    Args:
        shards: of answers.
        rows: ``[V', H]`` output rows of the draft vocabulary.
        token_map: of the draft vocabulary; part of the name under which labels are kept.
        folder: of the kept labels.
        on_progress: told how many positions were done, shard by shard.
    """
    folder.mkdir(parents=True, exist_ok=True)
    name = "all" if token_map is None else _digest(token_map)
    parts = []
    for shard in shards:
        path = folder / f"teacher-{name}-{shard.stem}.safetensors"
        if not path.exists():
            _write(path, load_file(shard)["hidden"], rows)
        part = load_file(path)
        parts.append((part["indices"], part["log_probabilities"]))
        on_progress(len(part["indices"]))
    indices, log_probabilities = (torch.cat(column) for column in zip(*parts, strict=True))
    return Teacher(indices, log_probabilities)


@torch.inference_mode()
def _write(path: Path, hidden: Tensor, rows: Tensor) -> None:
    kept = min(KEPT, len(rows))
    indices, values = [], []
    for chunk in hidden.split(_ROWS):
        top = (chunk.to(rows) @ rows.T).log_softmax(-1).topk(kept, -1)
        indices.append(top.indices.int().cpu())
        values.append(top.values.half().cpu())
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    save_file({"indices": torch.cat(indices), "log_probabilities": torch.cat(values)}, temporary)
    os.replace(temporary, path)


def _digest(token_map: Tensor) -> str:
    return hashlib.sha256(token_map.long().cpu().numpy().tobytes()).hexdigest()[:12]
