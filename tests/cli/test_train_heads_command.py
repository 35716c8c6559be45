"""``specdec train-heads``, from a folder of prompts to heads that serve, on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from specdec.cli.main import main
from specdec.errors import HeadsError
from specdec.heads.config import read_config
from specdec.heads.drafting import HeadsDrafter
from specdec.heads.store import make_drafter
from tests.tiny_models import save_tiny
from tests.training.tiny_tokenizer import word_tokenizer


@pytest.fixture(name="command", scope="module")
def _command(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    folder = tmp_path_factory.mktemp("run")
    save_tiny("llama", folder / "model")
    word_tokenizer().save_pretrained(folder / "model")
    lines = [json.dumps({"prompt": f"w{i} w{i * 3 % 90} w{i * 7 % 90}"}) for i in range(127)]
    (folder / "prompts.jsonl").write_text("\n".join(lines))
    arguments = f"""train-heads --model {folder}/model --prompts {folder}/prompts.jsonl
        --answer-tokens 12000 --epochs 2 --width 32 --inner 32 --draft-vocab 100 --held-out 1
        --depths 2 --checkpoint-every 20 --threads 1 --seed 1 --out {folder}/heads"""
    return arguments.split()


def test_a_run_gives_heads_that_serve(
    command: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(command) == 0
    out = Path(command[-1])
    printed = capsys.readouterr().out
    config = read_config(out)
    assert config.provenance.command.startswith("specdec train-heads --model ")
    assert config.provenance.answer_tokens >= 12000
    assert len(config.measured.accuracies) == 2
    assert f"| 8 | {config.measured.tokens_per_round[8]:.3f} |" in printed
    assert config.measured.tokens_per_round[1] == 1.0
    assert config.measured.tokens_per_round[16] > 1.0

    model = AutoModelForCausalLM.from_pretrained(command[2], dtype=torch.float32)

    @torch.inference_mode()
    def hidden_of(tokens: object) -> torch.Tensor:
        assert isinstance(tokens, tuple)
        states: torch.Tensor = model.base_model(torch.tensor([tokens])).last_hidden_state[0]
        return states

    for tree in ("dynamic", "static"):
        drafter = make_drafter(str(out), model, "tiny", tree, hidden_of)
        assert isinstance(drafter, HeadsDrafter)
        (drafted,) = drafter.draft(torch.randn(1, 64), [[3, 4]], [6])
        assert len(drafted) == 6
    with pytest.raises(HeadsError, match="floor"):
        make_drafter(str(out), model, "tiny", "dynamic", lambda tokens: -hidden_of(tokens))


def test_the_same_command_again_repeats_nothing_and_changes_nothing(command: list[str]) -> None:
    out = Path(command[-1])
    if not out.exists():
        assert main(command) == 0
    before = load_file(out / "heads.safetensors")
    work = out.with_name("heads.work")
    times = {path: path.stat().st_mtime_ns for path in work.rglob("*") if path.is_file()}
    assert main(command) == 0
    assert times == {path: path.stat().st_mtime_ns for path in times}
    after = load_file(out / "heads.safetensors")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_bad_options_are_one_line(
    command: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main([*command, "--epochs", "0"]) == 2
    assert "epochs" in capsys.readouterr().err
    assert main([*command, "--prompts", str(tmp_path / "none.jsonl")]) == 2
    assert "none.jsonl" in capsys.readouterr().err
