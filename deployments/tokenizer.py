"""Loads the tokenizer of a model, where it can be done without importing torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

#: Classes of tokenizer_config.json that mean: whatever tokenizer.json says.
_GENERIC = ("PreTrainedTokenizerFast", "TokenizersBackend")


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The same tokenizer as from ``AutoTokenizer``.

    That class imports every model's configuration and with them torch, which costs a gateway
    seconds of its start and 200 MB. Most tokenizers do not need it.
    """
    tokenizer: PreTrainedTokenizerBase
    if _is_generic(folder):
        from transformers import PreTrainedTokenizerFast

        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder, local_files_only=True)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    return tokenizer


def _is_generic(folder: Path) -> bool:
    try:
        config = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return False
    return config.get("tokenizer_class") in _GENERIC and (folder / "tokenizer.json").is_file()
