"""What the benchmarks share: prompts, the environment's description, results on disk."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from specdec.config import EngineSettings, validate_settings

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PROMPT_FOLDERS = (ROOT / "bench" / "data", ROOT.parent / "shared" / "data" / "bench")
PROMPT_FILE = "spec_bench_dev.jsonl"


@dataclass(frozen=True)
class BenchPrompt:
    """One benchmark prompt: the first turn of its conversation."""

    question_id: str
    category: str
    text: str


@dataclass(frozen=True)
class Figure:
    """One measured value and the target that it is held against.

    Attributes:
        at_most: True where smaller is better.
    """

    value: float
    target: float
    at_most: bool = False

    @property
    def met(self) -> bool:
        """Whether the target is reached."""
        return self.value <= self.target if self.at_most else self.value >= self.target


def engine_settings(values: Mapping[str, object]) -> EngineSettings:
    """Settings of an engine whose arms answer the same prompts in turn: each computes them.

    Raises:
        ConfigError: names the key at fault.
    """
    return validate_settings(EngineSettings, {**values, "prefix_cache": {"enabled": False}})


def load_prompts(count: int, path: Path | None = None) -> list[BenchPrompt]:
    """``count`` prompts, the categories in turn, so that every prefix is balanced.

    Raises:
        FileNotFoundError: the prompt file is at none of the known places.
    """
    places = [path] if path else [folder / PROMPT_FILE for folder in PROMPT_FOLDERS]
    found = next((place for place in places if place.exists()), None)
    if found is None:
        raise FileNotFoundError(f"no benchmark prompts at {', '.join(map(str, places))}")
    by_category: dict[str, list[BenchPrompt]] = {}
    for line in found.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        prompt = BenchPrompt(str(row["question_id"]), row["category"], row["turns"][0])
        by_category.setdefault(prompt.category, []).append(prompt)
    groups = [by_category[name] for name in sorted(by_category)]
    longest = max(map(len, groups))
    in_turn = [group[i] for i in range(longest) for group in groups if i < len(group)]
    return in_turn[:count]


def environment() -> dict[str, str]:
    """Machine, versions and commit, for the record."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True
    ).stdout.strip()
    return {
        "commit": commit,
        "python": platform.python_version(),
        "torch": version("torch"),
        "transformers": version("transformers"),
        "cpu": cpu_name(),
        "cores": str(os.cpu_count()),
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "native_bfloat16": str(bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def cpu_name() -> str:
    """The processor's model name, as the kernel gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor()


def write_results(
    name: str, figures: Mapping[str, Figure], details: Mapping[str, object] | None = None
) -> Path:
    """Write ``bench/results/NAME.json`` in one move; ``details`` go beside the figures."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    temporary = path.with_suffix(".tmp")
    content = {
        "figures": {key: asdict(figure) for key, figure in figures.items()},
        "environment": environment(),
        **(details or {}),
    }
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)
    return path


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = ["| " + " | ".join(header) + " |", "|" + " --- |" * len(header)]
    lines += ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows]
    return "\n".join(lines)


def report(figures: Mapping[str, Figure]) -> str:
    """The figures against their targets."""
    return table(
        ("figure", "value", "target", "met"),
        [
            (
                name,
                f"{figure.value:.3g}",
                f"{'≤' if figure.at_most else '≥'} {figure.target:g}",
                "yes" if figure.met else "NO",
            )
            for name, figure in figures.items()
        ],
    )
