"""The benchmarks run, in short: what they report is there, whatever the speeds are here.

What these catch: a benchmark that no longer starts, an arm that drops tokens, a figure that
is not written.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from bench import batches, gpu_check, prefix, suite, tracing
from bench.arms import Answer, decoding_speed, throughput, tokens_per_round
from bench.common import RESULTS, ROOT

PROMPTS = [
    ("code", "Write a Python function that adds two numbers."),
    ("qa", "Which planet is the largest?"),
    ("qa", "Name three colours of the rainbow, then name them again."),
]

Run = Callable[..., dict[str, object]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Runs a benchmark's command line and gives what it wrote."""
    prompts = tmp_path / "prompts.jsonl"
    rows = [
        {"question_id": i, "category": category, "turns": [text]}
        for i, (category, text) in enumerate(PROMPTS)
    ]
    prompts.write_text("".join(f"{json.dumps(row)}\n" for row in rows))

    def call(main: Callable[[], int], name: str, *arguments: str) -> dict[str, object]:
        words = [str(prompts) if word == "PROMPTS" else word for word in arguments]
        monkeypatch.setattr("sys.argv", ["bench", *words])
        path = RESULTS / f"{name}.json"
        path.unlink(missing_ok=True)
        assert main() == 0
        found: dict[str, object] = json.loads(path.read_text())
        if name.startswith("test"):
            path.unlink()
        return found

    return call


def test_speeds_count_tokens_and_times() -> None:
    answers = [Answer([1.0, 2.0, 3.0], 2, (1, 0)), Answer([2.0, 4.0], 1, (1,))]
    assert throughput(answers) == pytest.approx(5 / 4)
    # after the last first token, at 2.0: one token at 3.0 and one at 4.0
    assert decoding_speed(answers) == pytest.approx(2 / 2)
    assert tokens_per_round(answers) == pytest.approx((2 + 3) / 3)
    assert answers[0].time_per_token == pytest.approx(1.0)


def test_gpu_check_on_a_cpu(run: Run) -> None:
    figures = run(gpu_check.main, "test-gpu", "--small", "--name", "test-gpu")["figures"]
    assert isinstance(figures, dict)
    assert figures["share_equal_to_generate"]["value"] == 1.0
    assert figures["deviation_from_own_forward"]["value"] < 1e-3


@pytest.mark.slow
def test_suite(run: Run) -> None:
    words = "--blocks 1 --tokens 12 --batches 2 --skip-vllm --name test-suite --prompt-file PROMPTS"
    found = run(suite.main, "test-suite", *words.split())
    figures, cases = found["figures"], found["cases"]
    assert isinstance(figures, dict)
    assert isinstance(cases, dict)
    assert set(figures) == {
        "single_vs_generate",
        "single_speculative_vs_plain",
        "single_sampled_speculative_vs_plain",
        "batch_2_speculative_vs_plain",
        "plain_step_vs_packed_linears",
        "host_share_of_step",
    }
    assert set(cases["single"]) == {"speculative", "plain", "generate", "generate, prompt lookup"}
    assert all(figure["value"] > 0 for figure in figures.values())
    assert (RESULTS / "test-suite.png").stat().st_size > 1000
    (RESULTS / "test-suite.png").unlink()


@pytest.mark.slow
def test_prefix(run: Run) -> None:
    words = "--parts writing --repeats 1 --batch 2 --name test-prefix --prompt-file PROMPTS"
    figures = run(prefix.main, "test-prefix", *words.split())["figures"]
    assert isinstance(figures, dict)
    assert figures["writing_behind_throughput"]["value"] > 0.2


@pytest.mark.slow
def test_tracing(run: Run) -> None:
    words = "--repeats 1 --batch 2 --waves 1 --tokens 4 --name test-tracing --prompt-file PROMPTS"
    found = run(tracing.main, "test-tracing", *words.split())
    figures, speeds = found["figures"], found["tokens_per_s"]
    assert isinstance(figures, dict)
    assert isinstance(speeds, dict)
    assert set(figures) == {f"throughput_{name}" for name in tracing.ARMS if name != tracing.OFF}
    assert all(value > 0 for values in speeds.values() for value in values)


@pytest.mark.slow
def test_batches(run: Run) -> None:
    words = "--batches 1 3 --categories qa --tokens 6 --repeats 1 --name test-batches"
    found = run(batches.main, "test-batches", *words.split(), "--prompt-file", "PROMPTS")
    cells = found["cells"]
    assert isinstance(cells, list)
    assert [cell[:2] for cell in cells] == [[1, "qa"], [3, "qa"]]


@pytest.mark.slow
def test_memory() -> None:
    """In a process of its own, as that of a worker: it does not depend on the machine's speed."""
    words = "--requests 40 --name test-memory"
    subprocess.run([sys.executable, "-m", "bench.memory", *words.split()], cwd=ROOT, check=True)
    results = RESULTS / "test-memory.json"
    figures = json.loads(results.read_text())["figures"]
    results.unlink()
    resident = figures["resident_gib_beyond_kv_pool"]
    assert resident["value"] < resident["target"]
