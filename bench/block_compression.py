"""Does lossless compression of stored KV blocks pay? Sizes and speeds on real keys and values.

python -m bench.block_compression --tokens 512
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from prefix_cache.packing import pack, unpack, zstd
from specdec.config import DEFAULT_MODEL
from specdec.model.resolve import resolve_model

_BLOCK = 16


def kv_blocks(tokens: int, threads: int) -> list[torch.Tensor]:
    """Blocks of 16 tokens, ``[2, layers, kv_heads, 16, head_dim]`` float32, of this
    repository's own documents under the default model.
    """
    torch.set_num_threads(threads)
    folder = resolve_model(DEFAULT_MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    text = "\n".join(path.read_text() for path in sorted(Path("docs").glob("*.md")))
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :tokens]
    with torch.inference_mode():
        cache = model(ids, use_cache=True).cache
    keys = torch.stack([layer.keys[0] for layer in cache.layers])
    values = torch.stack([layer.values[0] for layer in cache.layers])
    whole = torch.stack([keys, values])
    return [block.contiguous() for block in whole.split(_BLOCK, dim=3)][: tokens // _BLOCK]


def report(name: str, blocks: list[bytes], element_bytes: int) -> None:
    """One line of the table: share of the size that is left, and MB/s either way."""
    packers: dict[str, tuple[Callable[[bytes], bytes], Callable[[bytes], object]]] = {
        "planes + zstd 1": (
            lambda data: pack(data, element_bytes),
            lambda data: unpack(data, len(blocks[0]), element_bytes),
        ),
        "zstd 1": (zstd().ZstdCompressor(level=1).compress, zstd().ZstdDecompressor().decompress),
        "zstd 9": (zstd().ZstdCompressor(level=9).compress, zstd().ZstdDecompressor().decompress),
    }
    total = sum(map(len, blocks))
    for packer, (there, back) in packers.items():
        start = time.perf_counter()
        packed = [there(block) for block in blocks]
        middle = time.perf_counter()
        for data in packed:
            back(data)
        end = time.perf_counter()
        size = sum(map(len, packed)) / total
        speeds = total / (middle - start) / 1e6, total / (end - middle) / 1e6
        print(f"| {name} | {packer} | {size:.3f} | {speeds[0]:.0f} | {speeds[1]:.0f} |", flush=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=512, help="of text")
    parser.add_argument("--threads", type=int, default=1, help="of the forward pass")
    options = parser.parse_args()
    blocks = kv_blocks(options.tokens, options.threads)
    print("| numbers | stored | size | in, MB/s | out, MB/s |\n| --- | --- | --- | --- | --- |")
    report("float32", [block.numpy().tobytes() for block in blocks], 4)
    halves = [block.to(torch.bfloat16).view(torch.int16).numpy().tobytes() for block in blocks]
    report("bfloat16", halves, 2)


if __name__ == "__main__":
    main()
