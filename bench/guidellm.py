"""guidellm, a load generator of its own, against an HTTP endpoint."""

from __future__ import annotations

import json
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from bench.common import ROOT, load_prompts

GUIDELLM = ROOT / ".venv-guidellm"


@dataclass(frozen=True)
class Load:
    """What guidellm saw.

    Attributes:
        rate: requests per second that were completed.
        tokens: output tokens per second.
        per_token: milliseconds between tokens, per request: p50, p90, p99 over requests.
        first: milliseconds to the first token, likewise.
        failed: requests that ended with an error.
    """

    rate: float
    tokens: float
    per_token: tuple[float, float, float]
    first: tuple[float, float, float]
    failed: int


def run_guidellm(
    url: str, model: str, profile: str, seconds: int, prompts: Path, venv: Path
) -> Load:
    """One run of the load generator.

    Raises:
        FileNotFoundError: it is not installed.
        RuntimeError: it failed; with what it said.
    """
    program = venv / "bin" / "guidellm"
    if not program.exists():
        raise FileNotFoundError(f"no guidellm in {venv}: run `make bench-peers`")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "report.json")
        done = subprocess.run(
            [
                str(program),
                "run",
                "--backend",
                f"kind=openai_http,target={url},model={model}",
                "--profile",
                profile,
                "--data",
                f"kind=json_file,path={prompts}",
                "--constraint",
                f"kind=max_duration,seconds={seconds}",
                "--output",
                f"kind=json,path={out}",
                "--disable-console-interactive",
            ],
            capture_output=True,
            text=True,
            timeout=seconds * 4 + 300,
        )
        if done.returncode or not out.exists():
            raise RuntimeError(f"guidellm failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
        metrics = json.loads(out.read_text())["benchmarks"][0]["metrics"]

    def percentiles(name: str) -> tuple[float, float, float]:
        found = metrics[name]["successful"]["percentiles"]
        return found["p50"], found["p90"], found["p99"]

    return Load(
        metrics["requests_per_second"]["successful"]["mean"],
        metrics["output_tokens_per_second"]["successful"]["mean"],
        percentiles("inter_token_latency_ms"),
        percentiles("time_to_first_token_ms"),
        metrics["request_totals"]["errored"],
    )


def write_prompts(path: Path, tokens: int, longest: int, prompt_file: Path | None) -> None:
    """Benchmark prompts for guidellm; ``longest`` in characters."""
    prompts = [p.text for p in load_prompts(400, prompt_file) if len(p.text) <= longest]
    lines = (json.dumps({"prompt": text, "output_tokens_count": tokens}) for text in prompts)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
