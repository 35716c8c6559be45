"""The default model with the heads that ship: exact, faster in tokens per round, from the shell."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from bench import exactness, generation
from bench.common import RESULTS, Figure
from specdec.config import DEFAULT_MODEL, EngineSettings, validate_settings
from specdec.engine import Engine
from specdec.heads.drafting import HeadsDrafter
from specdec.model.resolve import resolve_model

pytestmark = pytest.mark.slow

QUESTIONS = (
    "Explain how rainbows form.",
    "Write a Python function that checks whether a word is a palindrome.",
    "Tom has 3 boxes with 12 apples each and eats 5 apples. How many are left?",
    "Translate to French: The weather is nice today.",
)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The questions in the benchmark's format."""
    path = tmp_path_factory.mktemp("prompts") / "prompts.jsonl"
    rows = [
        {"question_id": number, "category": f"c{number}", "turns": [text]}
        for number, text in enumerate(QUESTIONS)
    ]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_float32_answers_equal_generate(
    prompt_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The short form of ``python -m bench.exactness``: no divergence without excuse."""
    monkeypatch.setattr(exactness, "write_results", lambda *_: RESULTS / "unwritten")
    arguments = ["exactness", "--prompts", "3", "--tokens", "24", "--prompt-file", str(prompt_file)]
    monkeypatch.setattr(sys, "argv", arguments)
    assert exactness.main() == 0


def test_short_benchmark(prompt_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The short form of ``make bench``: it runs, and the shipped heads are accepted.

    Speed is not asserted: a test machine is noisy. Tokens per round do not depend on it;
    random heads give 1.0 here.
    """
    figures: dict[str, object] = {}
    monkeypatch.setattr(
        generation, "write_results", lambda name, found, details: figures.update(found)
    )
    arguments = ["generation", "--prompts", "2", "--tokens", "24", "--max-nodes", "16"]
    monkeypatch.setattr(sys, "argv", [*arguments, "--prompt-file", str(prompt_file)])
    assert generation.main() == 0
    found = figures["tokens_per_round"]
    assert isinstance(found, Figure)
    assert found.value > 1.3
    assert "tokens_per_round_heads_alone" in figures
    assert "speculative_vs_generate" in figures


def test_engine_takes_the_shipped_heads() -> None:
    settings = validate_settings(EngineSettings, {"dtype": "float32", "kv": {"pages": 64}})
    engine = Engine.from_settings(settings)
    assert engine.model_folder == resolve_model(DEFAULT_MODEL, settings.cache_dir)
    assert isinstance(engine.drafting.drafter, HeadsDrafter)
    assert engine.tokenizer.chat_template


def run_specdec(*arguments: str) -> subprocess.CompletedProcess[str]:
    """The installed command."""
    return subprocess.run(
        [str(Path(sys.executable).with_name("specdec")), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_generate_command() -> None:
    done = run_specdec(
        "generate", "What is the capital of France?", "--max-tokens", "40", "--stats"
    )
    assert done.returncode == 0, done.stderr
    assert "Paris" in done.stdout
    assert "<|im_end|>" not in done.stdout
    for word in ("tokens per round", "accepted by depth", "tokens/s"):
        assert word in done.stderr


def test_generate_command_says_what_is_wrong() -> None:
    done = run_specdec("generate", "Hi", "--temperature", "-1")
    assert done.returncode == 2
    assert done.stderr.strip() == "specdec generate: temperature must be 0 or more, not -1.0"
    done = run_specdec("generate", "Hi", "--model", "/nowhere/at/all")
    assert done.returncode == 2
    assert "/nowhere/at/all" in done.stderr
    assert "Traceback" not in done.stderr
