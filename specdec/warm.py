"""Computes system prompts before anybody asks, so that the first user finds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from specdec.chat import SystemPrompts, encode_prompt
from specdec.engine import Engine
from specdec.errors import ConfigError, SpecdecError
from specdec.params import CacheScope, SamplingParams


@dataclass(frozen=True)
class Warmed:
    """A system prompt that requests find from now on.

    Attributes:
        tokens: that it has, with what the chat template puts around it.
        cached: of them, found computed already.
    """

    tokens: int
    cached: int


def read_system_prompts(paths: Sequence[Path]) -> list[str]:
    """The texts of files, as they are.

    Raises:
        ConfigError: a file cannot be read or is empty.
    """
    texts = []
    for path in paths:
        try:
            text = path.expanduser().read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"system prompt {path}: {error}") from error
        if not text.strip():
            raise ConfigError(f"system prompt {path}: the file is empty")
        texts.append(text)
    return texts


def warm(engine: Engine, system: str) -> Warmed:
    """Compute a system prompt, so that it lies in the pool and, where there is one, in the store.

    Raises:
        RequestError: the model has no chat template, or the text does not fit its context.
        SpecdecError: the engine failed.
    """
    messages = [{"role": "system", "content": system}, {"role": "user", "content": "Hello"}]
    tokens = encode_prompt(engine.tokenizer, messages)
    shared = SystemPrompts(engine.tokenizer).length(messages, tokens)
    if shared == 0:
        raise SpecdecError("this chat template puts nothing before the user's words")
    # one more token than is to be kept: the last one of a prompt is never shared
    name, scope = "warm-up of a system prompt", CacheScope(shared)
    engine.add_request(name, tokens[: shared + 1], SamplingParams(max_tokens=1), scope)
    cached = 0
    while engine.has_work:
        for output in engine.step():
            if output.error is not None:
                raise SpecdecError(f"the system prompt cannot be computed: {output.error}")
            cached = output.cached_tokens
    return Warmed(shared, cached)
