"""Prompts that the model writes itself: what it continues an empty user turn with.

A chat model's own idea of a user's turn is close to what it was tuned on (as in Magpie, Xu
et al. 2024), which prompt collections often are not.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from specdec.engine import Engine
from specdec.errors import HeadsError
from specdec.params import SamplingParams
from specdec.training.answers import answer_all
from specdec.training.prompts import Prompt, read_prompts

#: Longest turn kept, in tokens; longer ones are cut off and dropped.
_MAX_TOKENS = 96
_MIN_TOKENS = 4
#: Turns tried for one that is kept, at most.
_TRIES = 8
_MARK = "\x00"


def own_prompts(
    engine: Engine,
    tokenizer: PreTrainedTokenizerBase,
    path: Path,
    count: int,
    seed: int,
    on_progress: Callable[[int], None] = lambda prompts: None,
) -> list[Prompt]:
    """``count`` different user turns, written to ``path`` as JSONL; read from there if made before.

    Raises:
        HeadsError: the tokenizer has no chat template, or hardly any turn comes to an end.
    """
    if path.is_file() and len(kept := read_prompts(path)) >= count:
        return kept[:count]
    opening = user_turn_opening(tokenizer)

    def requests() -> Iterator[tuple[str, list[int], SamplingParams]]:
        for number in range(count * _TRIES):
            if len(found) >= count:
                return
            params = SamplingParams(
                max_tokens=_MAX_TOKENS,
                temperature=1.0,
                seed=((seed << 20) + number) % 2**63,
                speculation=False,
            )
            yield str(number), opening, params

    found: dict[str, int] = {}
    for name, (tokens, _) in answer_all(engine, requests()):
        if tokens[-1] not in engine.runner.eos_token_ids or len(tokens) <= _MIN_TOKENS:
            continue
        text = str(tokenizer.decode(tokens[:-1])).strip()
        special = any(token in text for token in tokenizer.all_special_tokens)
        if text and not special:
            found.setdefault(text, int(name))
            on_progress(min(len(found), count))
    if len(found) < count:
        raise HeadsError(
            f"the model wrote {len(found)} of {count} prompts: its user turns rarely end; "
            "give it prompts instead"
        )
    chosen = sorted(found, key=lambda text: found[text])[:count]
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    lines = (json.dumps({"source": "own", "prompt": text}, ensure_ascii=False) for text in chosen)
    temporary.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    os.replace(temporary, path)
    return [Prompt("own", text) for text in chosen]


def user_turn_opening(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """What the chat template puts before a user's turn.

    Raises:
        HeadsError: there is no chat template.
    """
    if tokenizer.chat_template is None:
        raise HeadsError("the model has no chat template, so it cannot write prompts itself")
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": _MARK}], add_generation_prompt=True, tokenize=False
    )
    opening = str(rendered).split(_MARK)[0]
    if not opening:
        raise HeadsError("the chat template begins with the user's words: it opens no user turn")
    return list(tokenizer(opening, add_special_tokens=False)["input_ids"])
