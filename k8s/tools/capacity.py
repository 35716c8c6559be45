"""What a model needs and what its GPU can give: the tables of docs/capacity.md.

``python -m k8s.tools.capacity`` writes them anew, ``--check`` says whether they are current.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "k8s" / "examples"
DOCUMENT = ROOT / "docs" / "capacity.md"
_BEGIN, _END = "<!-- computed: make capacity -->", "<!-- end -->"
GIB = 2**30
_BYTES = 2  # of a bfloat16 number
#: Of the GPU's memory for CUDA itself, the step's buffers and what fragmentation loses, in GiB.
OVERHEAD_GIB = 3.0
#: Medusa heads: so many, of one residual block each, through the model's own LM head.
HEADS = 3
#: Context of the table's requests, and how many run at once.
_CONTEXT, _BATCHES = 2048, (1, 16, 64)


@dataclass(frozen=True)
class Model:
    """The numbers of a config.json that decide memory and speed."""

    name: str
    gpu: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_size: int
    vocabulary: int
    tied: bool
    qkv_bias: bool = False

    @property
    def parameters(self) -> int:
        """Of a Llama-like model: embeddings, attention, gated MLP, two norms a layer, one more."""
        queries, keys = self.heads * self.head_size, self.kv_heads * self.head_size
        attention = self.hidden * (2 * queries + 2 * keys)
        bias = queries + 2 * keys if self.qkv_bias else 0
        layer = attention + bias + 3 * self.hidden * self.intermediate + 2 * self.hidden
        embeddings = self.vocabulary * self.hidden * (1 if self.tied else 2)
        return embeddings + self.layers * layer + self.hidden

    @property
    def weight_bytes(self) -> int:
        """Of the model in bfloat16."""
        return self.parameters * _BYTES

    @property
    def head_bytes(self) -> int:
        """Of Medusa heads that share the LM head."""
        return HEADS * (self.hidden * self.hidden + self.hidden) * _BYTES

    @property
    def kv_bytes(self) -> int:
        """Of one token's keys and values, over all layers."""
        return 2 * self.layers * self.kv_heads * self.head_size * _BYTES


@dataclass(frozen=True)
class Gpu:
    """Memory in GiB, bandwidth in GB/s."""

    memory_gib: float
    bandwidth_gb_s: float


def load() -> tuple[list[Model], dict[str, Gpu]]:
    """Models and GPUs of k8s/examples/models.yaml."""
    found = yaml.safe_load((EXAMPLES / "models.yaml").read_text(encoding="utf-8"))
    gpus = {name: Gpu(**values) for name, values in found["gpus"].items()}
    return [Model(**values) for values in found["models"]], gpus


def examples() -> dict[str, dict[str, Any]]:
    """The engine's settings of each example, by the name of its model."""
    found = {}
    for path in sorted(EXAMPLES.glob("*.yaml")):
        if path.name != "models.yaml":
            config = yaml.safe_load(path.read_text(encoding="utf-8"))
            engine = config["applications"][0]["args"]["engine"]
            found[Path(engine["model"]).name] = {**engine, "file": path.name}
    return found


def step_s(model: Model, gpu: Gpu, batch: int, context: int) -> float:
    """Least seconds of a step: what it reads from memory, all weights once and each KV once."""
    read = model.weight_bytes + model.head_bytes + batch * context * model.kv_bytes
    return read / (gpu.bandwidth_gb_s * 1e9)


def tables() -> str:
    """Memory, then speed."""
    models, gpus = load()
    settings = examples()
    memory = [
        "| model | parameters | weights | KV per token | GPU | weights + heads + KV pool + rest "
        "| KV pool holds | requests of 2,048 tokens | example |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    speed = [
        "| model | GPU | " + " | ".join(f"batch {batch}" for batch in _BATCHES) + " |",
        "| --- | --- |" + " --- |" * len(_BATCHES),
    ]
    for model in models:
        gpu, engine = gpus[model.gpu], settings[model.name]
        pool = engine["kv"]["memory_gib"]
        tokens = int(pool * GIB) // model.kv_bytes
        weights, heads = model.weight_bytes / GIB, model.head_bytes / GIB
        used = weights + heads + pool + OVERHEAD_GIB
        memory.append(
            f"| {model.name} | {model.parameters / 1e9:.3f} B | {weights:.2f} GiB "
            f"| {model.kv_bytes / 1024:.0f} KiB | {model.gpu}, {gpu.memory_gib:g} GiB "
            f"| {weights:.1f} + {heads:.2f} + {pool:g} + {OVERHEAD_GIB:g} = {used:.1f} GiB "
            f"| {tokens:,} tokens | {tokens // _CONTEXT} "
            f"| [{engine['file']}](../k8s/examples/{engine['file']}) |"
        )
        cells = []
        for batch in _BATCHES:
            fits = batch * _CONTEXT * model.kv_bytes <= pool * GIB
            seconds = step_s(model, gpu, batch, _CONTEXT)
            cells.append(f"{1e3 * seconds:.1f} ms, {batch / seconds:,.0f}/s" if fits else "–")
        speed.append(f"| {model.name} | {model.gpu} | " + " | ".join(cells) + " |")
    least = "Least time of a step, and plain tokens per second at that:"
    return "\n".join([*memory, "", least, "", *speed])


def document() -> str:
    """docs/capacity.md with its tables computed anew."""
    text = DOCUMENT.read_text(encoding="utf-8")
    before, _, rest = text.partition(_BEGIN)
    _, _, after = rest.partition(_END)
    return f"{before}{_BEGIN}\n\n{tables()}\n\n{_END}{after}"


def main() -> int:
    """Write the document, or check it."""
    parser = argparse.ArgumentParser(description="Compute the tables of docs/capacity.md.")
    parser.add_argument("--check", action="store_true", help="write nothing")
    if parser.parse_args().check:
        if DOCUMENT.read_text(encoding="utf-8") != document():
            print("docs/capacity.md is stale: run make capacity", file=sys.stderr)
            return 1
        return 0
    DOCUMENT.write_text(document(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
