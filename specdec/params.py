"""What a request asks for. Holds no torch, so that policy and gateway can use it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from specdec.errors import RequestError

AcceptanceRule = Literal["match", "rejection", "typical"]
GrammarKind = Literal["json_schema", "regex", "lark"]

#: Most alternatives per token that may be asked for, as in OpenAI's API.
MAX_LOGPROBS = 20

#: Counts end up in integers of 64 bits and less: numpy's, torch's, those of a span.
MAX_COUNT = 2**31 - 1

#: Within these, logits times or over it stay finite in float32.
REPETITION_PENALTIES = (1e-3, 1e3)

#: Seeds and positions are 64-bit counters of the noise function.
MAX_SEED = 2**64 - 1


@dataclass(frozen=True)
class GrammarSpec:
    """What every output must be a sentence of; compiled by :mod:`specdec.grammar`.

    Attributes:
        kind: ``json_schema``, ``regex`` (Rust's syntax, matched in full) or ``lark`` (a
            context-free grammar in Lark's notation).
        source: the schema as JSON, the expression or the grammar.
        param: the field to blame where it cannot be compiled.
    """

    kind: GrammarKind
    source: str
    param: str = field(default="grammar", compare=False)


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when a request ends. Validated on construction.

    Attributes:
        max_tokens: most tokens to emit.
        temperature: 0 means greedy.
        top_k: keep the k most likely tokens; 0 keeps all.
        top_p: keep the smallest set of most likely tokens whose mass reaches it; 1 keeps all.
        min_p: keep tokens at least this share as likely as the likeliest; 0 keeps all.
        repetition_penalty: above 1 discourages tokens of prompt and output (Keskar et al. 2019).
        presence_penalty: subtracted once from the logit of each token already emitted.
        frequency_penalty: subtracted per occurrence in the output.
        logit_bias: added to the logits of these tokens.
        seed: of the counter-based noise; with the position it determines every draw.
        stop: strings that end the request; not part of the output.
        stop_token_ids: tokens that end the request, in addition to the model's own.
        ignore_eos: do not end at the model's end tokens.
        min_tokens: before so many are emitted no end token is drawn, and a stop string that
            is complete by then does not end the request.
        include_stop: what ends the text, a stop string or a stop token, is part of it.
        grammar: of the output; the request ends where the grammar lets nothing follow.
        logprobs: tell each token's log-probability and those of so many likeliest tokens; None
            tells none. They are the model's own: before grammar, bias, penalties, temperature.
        prompt_logprobs: the same for the prompt's tokens but the first. Such a request shares no
            KV, since the prompt's logits are needed.
        speculation: draft and verify; off means one token per step. Never changes the text
            under a lossless rule.
        max_nodes: most nodes of a draft tree, root included; None leaves it to the engine.
        acceptance: ``match`` and ``rejection`` are lossless, ``typical`` is lossy.
        typical_epsilon: Medusa's hard threshold, used by ``typical``.
        typical_delta: Medusa's entropy factor, used by ``typical``.

    Raises:
        RequestError: a value is out of range; ``param`` names it.
    """

    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    ignore_eos: bool = False
    min_tokens: int = 0
    include_stop: bool = False
    grammar: GrammarSpec | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    speculation: bool = True
    max_nodes: int | None = None
    acceptance: AcceptanceRule = "match"
    typical_epsilon: float = 0.09
    typical_delta: float = 0.3

    def __post_init__(self) -> None:
        _require(
            "max_tokens", self.max_tokens, 1 <= self.max_tokens <= MAX_COUNT, f"1 to {MAX_COUNT}"
        )
        _require("temperature", self.temperature, self.temperature >= 0, "0 or more")
        _require("top_k", self.top_k, 0 <= self.top_k <= MAX_COUNT, f"0 (off) to {MAX_COUNT}")
        _require("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1")
        _require("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1")
        least, most = REPETITION_PENALTIES
        _require(
            "repetition_penalty",
            self.repetition_penalty,
            least <= self.repetition_penalty <= most,
            f"between {least:g} and {most:g}",
        )
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _require(name, value, -2 <= value <= 2, "between -2 and 2")
        for token, bias in self.logit_bias.items():
            _require("logit_bias", bias, token >= 0 and -100 <= bias <= 100, "token: -100 to 100")
        _require("seed", self.seed, 0 <= self.seed <= MAX_SEED, "a 64-bit unsigned integer")
        _require("stop", self.stop, all(self.stop), "non-empty strings")
        _require(
            "min_tokens",
            self.min_tokens,
            0 <= self.min_tokens <= self.max_tokens,
            "between 0 and max_tokens",
        )
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            _require(
                name, value, value is None or 0 <= value <= MAX_LOGPROBS, f"0 to {MAX_LOGPROBS}"
            )
        _require(
            "max_nodes",
            self.max_nodes,
            self.max_nodes is None or 1 <= self.max_nodes <= MAX_COUNT,
            f"1 to {MAX_COUNT}",
        )
        _require(
            "acceptance",
            self.acceptance,
            self.acceptance in ("match", "rejection", "typical"),
            "match, rejection or typical",
        )
        _require(
            "typical_epsilon", self.typical_epsilon, 0 < self.typical_epsilon <= 1, "in (0, 1]"
        )
        _require("typical_delta", self.typical_delta, 0 < self.typical_delta <= 1, "in (0, 1]")

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature == 0

    @property
    def has_penalties(self) -> bool:
        """Whether the distribution depends on which tokens came before."""
        return (
            self.repetition_penalty != 1
            or self.presence_penalty != 0
            or self.frequency_penalty != 0
        )

    @property
    def is_constrained(self) -> bool:
        """Whether some tokens are forbidden, depending on which came before."""
        return self.grammar is not None or self.min_tokens > 0


@dataclass(frozen=True)
class CacheScope:
    """With whom a request shares the KV of its tokens.

    Attributes:
        shared_tokens: first tokens of the prompt that every request may share: a system prompt.
        salt: what reaches behind them is shared between requests of the same salt only.
    """

    shared_tokens: int = 0
    salt: bytes = b""


def _require(name: str, value: object, ok: bool, want: str) -> None:
    if isinstance(value, float) and not math.isfinite(value):
        ok = False
    if not ok:
        raise RequestError(f"{name} must be {want}, not {value!r}", param=name)
