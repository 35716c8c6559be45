"""The gateway's short way to a tokenizer gives the same one."""

from __future__ import annotations

import subprocess
import sys

from transformers import AutoTokenizer

from deployments.tokenizer import load_tokenizer
from specdec.chat import encode_prompt
from specdec.config import DEFAULT_MODEL
from specdec.model.resolve import resolve_model

TEXTS = [
    "Hello world",
    " two  spaces\n\ttab",
    "日本語 👩‍👩‍👧‍👦 é",
    "<|im_start|>user\nhi<|im_end|>",
    "",
]


def test_equals_autotokenizer() -> None:
    folder = resolve_model(DEFAULT_MODEL)
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder)
    for text in TEXTS:
        tokens = encode_prompt(ours, text)
        assert tokens == encode_prompt(theirs, text)
        assert ours.decode(tokens) == theirs.decode(tokens)
        messages = [{"role": "user", "content": text}]
        assert encode_prompt(ours, messages) == encode_prompt(theirs, messages)
    assert ours.all_special_ids == theirs.all_special_ids


def test_the_gateway_needs_no_torch() -> None:
    program = (
        "import sys, warnings; warnings.simplefilter('ignore')\n"
        "import deployments.app\n"
        "from deployments.tokenizer import load_tokenizer\n"
        "from specdec.model.resolve import resolve_model\n"
        "from specdec.config import DEFAULT_MODEL\n"
        "from specdec.detokenize import IncrementalDetokenizer\n"
        "IncrementalDetokenizer(load_tokenizer(resolve_model(DEFAULT_MODEL)))\n"
        "assert 'torch' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
