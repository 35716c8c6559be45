"""Prompts for self-distillation: reading, mixing and encoding them."""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdec.errors import ConfigError


@dataclass(frozen=True)
class Prompt:
    """One line of a prompt file."""

    source: str
    text: str


def read_prompts(path: Path) -> list[Prompt]:
    """Read JSONL (optionally gzipped) with a ``prompt`` and an optional ``source`` per line.

    Raises:
        ConfigError: the file is missing, or a line is no JSON object with text under
            ``prompt``; names the line.
    """
    if not path.is_file():
        raise ConfigError(f"there is no prompt file {path}")
    opener = gzip.open if path.suffix == ".gz" else open
    prompts: list[Prompt] = []
    with opener(path, "rt", encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
                prompts.append(Prompt(str(row.get("source", "")), str(row["prompt"])))
            except (json.JSONDecodeError, KeyError, AttributeError) as error:
                raise ConfigError(
                    f'{path}, line {number}: expected a JSON object with "prompt", '
                    f"got {line[:80]!r}"
                ) from error
    return prompts


def balanced_order(prompts: Sequence[Prompt], seed: int) -> list[Prompt]:
    """Shuffle, then interleave the sources so that every stretch mixes them.

    A source's share goes with the square root of its size: small, varied sources
    are not drowned by large, uniform ones.
    """
    rng = random.Random(seed)
    by_source: dict[str, list[Prompt]] = {}
    for prompt in prompts:
        by_source.setdefault(prompt.source, []).append(prompt)
    keyed: list[tuple[float, Prompt]] = []
    for source in sorted(by_source):
        group = by_source[source]
        rng.shuffle(group)
        step = len(group) ** -0.5
        keyed.extend(((index + rng.random()) * step, prompt) for index, prompt in enumerate(group))
    keyed.sort(key=lambda item: item[0])
    return [prompt for _, prompt in keyed]


def take_turns(files: Sequence[Sequence[Prompt]]) -> list[Prompt]:
    """One prompt of each file in turn; a file that ends leaves the turns to the others."""
    longest = max(map(len, files), default=0)
    return [prompts[i] for i in range(longest) for prompts in files if i < len(prompts)]


def encode_chat(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    """Token ids of one user turn under the model's chat template (plain text without one)."""
    if tokenizer.chat_template is None:
        return list(tokenizer(text)["input_ids"])
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], add_generation_prompt=True, tokenize=False
    )
    return list(tokenizer(rendered, add_special_tokens=False)["input_ids"])


def common_ending(encoded: Sequence[Sequence[int]]) -> list[int]:
    """The longest ending that all prompts share: what the chat template puts before answers."""
    ending: list[int] = []
    for tokens in zip(*(reversed(ids) for ids in encoded), strict=False):
        if len(set(tokens)) > 1:
            break
        ending.append(tokens[0])
    return ending[::-1]
