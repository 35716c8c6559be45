"""Under which keys the KV of a sequence can be found again."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import transformers

from prefix_cache.keys import Identity, KeyChain
from specdec.model.kv import KvPool
from specdec.model.native.build import kernels_version
from specdec.model.runner import ModelRunner
from specdec.params import CacheScope

#: Weights and tokenizer of blocks that never leave the process that computed them.
_THIS_PROCESS = b"this process"
#: Of the files that a model's numbers or tokens can depend on.
_MODEL_SUFFIXES = frozenset({".safetensors", ".bin", ".pt", ".gguf", ".json", ".model", ".txt"})


def pool_identity(pool: KvPool) -> Identity:
    """What the blocks in a pool have in common; they are found in that pool alone."""
    return _identity(pool, _THIS_PROCESS, _THIS_PROCESS, "")


def stored_identity(folder: Path, runner: ModelRunner, dtype: str) -> Identity:
    """What the blocks of a model have in common, wherever they were computed.

    Beside the weights it names the way they are computed with, as ways differ in rounding, and so
    may versions of one way: blocks of one must not become part of another's answer.

    Args:
        folder: of the model.
        runner: of the same model.
        dtype: of the weights, as the settings have it.
    """
    if runner.native is not None:
        kernels = f"own-{kernels_version()}/{runner.native.units}"
    else:
        versions = f"torch-{torch.__version__}/transformers-{transformers.__version__}"
        kernels = f"{runner.device.type}/{versions}"
    tokenizer = [p for p in _files(folder) if p.name.startswith("token")]
    weights = [p for p in _files(folder) if p not in tokenizer]
    return _identity(runner.pool, _digest(weights), _digest(tokenizer), f"/{dtype}/{kernels}")


def _identity(pool: KvPool, weights: bytes, tokenizer: bytes, way: str) -> Identity:
    layout = pool.layout
    return Identity(
        weights=weights,
        tokenizer=tokenizer,
        dtype=str(layout.dtype).removeprefix("torch.") + way,
        layers=layout.layers,
        kv_heads=layout.kv_heads,
        head_dim=layout.head_dim,
        block_size=pool.page_size,
    )


def _files(folder: Path) -> list[Path]:
    """Files that a model is made of, by name: weights, configuration and tokenizer."""
    return sorted(path for path in folder.iterdir() if path.suffix in _MODEL_SUFFIXES)


def _digest(files: Sequence[Path]) -> bytes:
    """SHA-256 over names and contents."""

    def of_file(path: Path) -> bytes:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").digest()

    with ThreadPoolExecutor(4) as threads:  # hashing lets go of the interpreter
        digests = list(threads.map(of_file, files))
    total = hashlib.sha256()
    for path, digest in zip(files, digests, strict=True):
        total.update(hashlib.sha256(path.name.encode()).digest() + digest)
    return total.digest()


class SequenceKeys:
    """Keys of one sequence's blocks; :class:`specdec.policy.sequence.BlockKeys`.

    Args:
        identity: of model and pool.
        scope: of the request.
    """

    def __init__(self, identity: Identity, scope: CacheScope) -> None:
        self._chain = KeyChain(identity, scope.shared_tokens, scope.salt)

    def keys(self, tokens: Sequence[int], count: int) -> Sequence[bytes]:
        """Keys of the first ``count`` blocks."""
        if len(self._chain.keys) < count:
            self._chain.grow(tokens)
        return self._chain.keys[:count]
