"""``specdec prefix`` on a real store, with the default model."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import pytest
import yaml

from specdec.chat import SystemPrompts, encode_prompt
from specdec.cli.main import main
from specdec.config import DEFAULT_MODEL, EngineSettings, validate_settings
from specdec.engine import Engine
from specdec.params import CacheScope, SamplingParams

SYSTEM = "You are the assistant of a bakery. " + " ".join(f"Loaf {i} costs {i}." for i in range(20))
PAGE = 16


@pytest.fixture
def store(tmp_path: Path) -> str:
    return f"lmdb://{tmp_path}/blocks"


@pytest.fixture
def prompt_file(tmp_path: Path) -> Path:
    path = tmp_path / "system.txt"
    path.write_text(SYSTEM)
    return path


@pytest.mark.slow
def test_what_is_warmed_is_found_by_the_first_user_of_any_tenant(
    store: str, prompt_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"kv": {"pages": 64}, "prefix_cache": {"store": {"url": store}}}
    config_file = prompt_file.with_suffix(".yaml")
    config_file.write_text(yaml.safe_dump({"applications": [{"args": {"engine": config}}]}))
    warm = ["prefix", "warm", "--config", str(config_file), "--system-prompt-file"]
    warm.append(str(prompt_file))
    assert main(warm) == 0
    assert "0 of them found" in capsys.readouterr().out
    assert main(warm) == 0
    assert "stored 0 blocks" in capsys.readouterr().out
    with closing(Engine.from_settings(validate_settings(EngineSettings, config))) as engine:
        messages = [
            {"role": "system", "content": SYSTEM},
            {"role": "user", "content": "What does loaf 7 cost?"},
        ]
        tokens = encode_prompt(engine.tokenizer, messages)
        shared = SystemPrompts(engine.tokenizer).length(messages, tokens)
        scope = CacheScope(shared, b"a tenant")
        engine.add_request("x", tokens, SamplingParams(max_tokens=2), scope)
        while engine.has_work:
            output = engine.step()
        stats = output[-1].stats
        assert stats is not None
        assert stats.loaded_tokens == stats.cached_tokens == shared // PAGE * PAGE > 150
    look_into(store, shared // PAGE, capsys)


def look_into(store: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    """``stats``, ``list`` and ``purge``."""
    assert main(["prefix", "stats", "--store", store]) == 0
    assert int(capsys.readouterr().out.split()[1].rstrip(",")) >= count
    assert main(["prefix", "list", "--store", store, "--model", DEFAULT_MODEL]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) >= count
    assert all("16 tokens, 0.74 MB" in line for line in lines)
    assert any("<|im_start|>" in line for line in lines)
    assert main(["prefix", "purge", "--store", store]) == 0
    assert main(["prefix", "list", "--store", store]) == 0
    assert capsys.readouterr().out == "the namespace is empty\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["stats", "--store", "http://x"], "begins with one of redis://"),
        (["stats", "--store", "redis://127.0.0.1:1"], "Connection refused"),
        (["stats", "--namespace", "a b"], "namespace"),
        (["warm", "--system-prompt-file", "/nowhere"], "No such file"),
        (["stats", "--config", "/nowhere"], "No such file"),
        (["stats", "--config", "/dev/null"], "no configuration"),
        (["warm", "--system-prompt-file", "/dev/null"], "is empty"),
    ],
)
def test_errors_say_what_is_wrong(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["prefix", *arguments]) == 2
    assert message in capsys.readouterr().err
