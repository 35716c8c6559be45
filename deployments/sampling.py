"""From the fields of a request to the engine's parameters."""

from __future__ import annotations

import hashlib
import secrets
from dataclasses import replace

from deployments.config import LimitSettings
from deployments.errors import ApiError, from_request_error, invalid
from deployments.grammars import grammar_of
from deployments.schema import ChatRequest, CompletionRequest, SamplingFields
from deployments.tools.plan import forced_call
from specdec.errors import RequestError
from specdec.params import MAX_LOGPROBS, MAX_SEED, GrammarSpec, SamplingParams

#: OpenAI's default of ``max_tokens`` for completions; chats have none.
COMPLETION_MAX_TOKENS = 16
#: Below this temperature the likeliest token has all the probability that float32 can tell.
_GREEDY_BELOW = 1e-5
#: OpenAI's limit; above it nothing but noise comes out.
_MAX_TEMPERATURE = 2.0


def sampling_params(
    fields: SamplingFields, prompt_length: int, max_model_length: int, limits: LimitSettings
) -> SamplingParams:
    """Parameters of a request's first choice.

    Args:
        fields: of the request.
        prompt_length: tokens of its longest prompt.
        max_model_length: most tokens of prompt and answer together.
        limits: what a request may ask for.

    Raises:
        ApiError: 400 that names the field.
    """
    speculation = fields.speculation
    values = {
        "temperature": _temperature(fields.temperature),
        "top_p": fields.top_p,
        "top_k": 0 if fields.top_k == -1 else fields.top_k,  # -1 is "off" in vLLM
        "min_p": fields.min_p,
        "presence_penalty": fields.presence_penalty,
        "frequency_penalty": fields.frequency_penalty,
        "repetition_penalty": fields.repetition_penalty,
        "ignore_eos": fields.ignore_eos,
        "min_tokens": fields.min_tokens,
        "include_stop": fields.include_stop_str_in_output,
        "stop_token_ids": None
        if fields.stop_token_ids is None
        else frozenset(fields.stop_token_ids),
        "max_nodes": None if speculation is None else speculation.max_nodes,
        "speculation": None if speculation is None else speculation.enabled,
        "acceptance": None if speculation is None else speculation.acceptance,
    }
    name, max_tokens = _max_tokens(fields, prompt_length, max_model_length, limits)
    try:
        return SamplingParams(
            max_tokens=max_tokens,
            seed=_seed(fields.seed),
            stop=_stop(fields.stop, limits),
            logit_bias=_logit_bias(fields.logit_bias),
            grammar=_grammar(fields, limits),
            logprobs=_logprobs(fields),
            prompt_logprobs=_prompt_logprobs(fields),
            **{key: value for key, value in values.items() if value is not None},  # type: ignore[arg-type]
        )
    except RequestError as error:
        if error.param == "max_tokens":
            error.param = name
        if error.param == "max_nodes":
            error.param = "speculation.max_nodes"
        raise from_request_error(error) from error


def _grammar(fields: SamplingFields, limits: LimitSettings) -> GrammarSpec | None:
    """What the output must be: what the request says, or a call that it forces."""
    asked, call = grammar_of(fields), forced_call(fields, limits.tools)
    if asked is not None and call is not None:
        raise invalid("tool_choice", f"'tool_choice' and '{asked.param}' exclude each other.")
    return asked or call


def of_choice(params: SamplingParams, index: int) -> SamplingParams:
    """Parameters of the choice with that index: the same but for the seed."""
    if index == 0:
        return params
    digest = hashlib.blake2b(f"{params.seed}/{index}".encode(), digest_size=8).digest()
    return replace(params, seed=int.from_bytes(digest, "big"))


def _temperature(value: float | None) -> float:
    if value is None:
        return 1.0
    if value > _MAX_TEMPERATURE:
        raise invalid("temperature", f"'temperature' must be between 0 and 2, not {value:g}.")
    return 0.0 if 0 < value < _GREEDY_BELOW else value


def _seed(value: int | None) -> int:
    """Negative seeds, which OpenAI allows, as the unsigned number of the same 64 bits."""
    if value is None:
        return secrets.randbits(64)
    if not -(2**63) <= value <= MAX_SEED:
        raise invalid("seed", f"'seed' must fit 64 bits, not {value}.")
    return value % 2**64


def _stop(stops: list[str], limits: LimitSettings) -> tuple[str, ...]:
    if len(stops) > limits.stop_strings:
        raise invalid("stop", f"'stop' may hold at most {limits.stop_strings} strings.")
    if any(len(stop) > limits.stop_characters for stop in stops):
        raise invalid("stop", f"A stop string may have {limits.stop_characters} characters.")
    return tuple(dict.fromkeys(stops))


def _logit_bias(biases: dict[str, float] | None) -> dict[int, float]:
    result = {}
    for token, bias in (biases or {}).items():
        if not (token.isascii() and token.isdecimal() and len(token) < 10):
            raise invalid(
                "logit_bias", f"'logit_bias' has a key that is no token id: {token!r:.40}"
            )
        result[int(token)] = bias
    return result


def _logprobs(fields: SamplingFields) -> int | None:
    """How many alternatives are to be told per token; None where no log-probabilities are."""
    if isinstance(fields, CompletionRequest):
        name, value = "logprobs", fields.logprobs
    elif isinstance(fields, ChatRequest):
        name, value = "top_logprobs", fields.top_logprobs
        if value is not None and not fields.logprobs:
            raise invalid(name, "'top_logprobs' needs 'logprobs' to be true.")
        if value is None and fields.logprobs:
            value = 0
    else:
        return None
    if value is not None and not 0 <= value <= MAX_LOGPROBS:
        raise invalid(name, f"'{name}' must be between 0 and {MAX_LOGPROBS}, not {value}.")
    return value


def _prompt_logprobs(fields: SamplingFields) -> int | None:
    """The same of the prompt's tokens, which an echo has too."""
    return _logprobs(fields) if isinstance(fields, CompletionRequest) and fields.echo else None


def prompt_only(fields: SamplingFields) -> bool:
    """Whether nothing but the prompt is wanted back, with its log-probabilities."""
    return isinstance(fields, CompletionRequest) and bool(fields.echo) and fields.max_tokens == 0


def _max_tokens(
    fields: SamplingFields, prompt_length: int, max_model_length: int, limits: LimitSettings
) -> tuple[str, int]:
    """The field that sets the length of the answer, and the length."""
    name, value = "max_tokens", fields.max_tokens
    default = COMPLETION_MAX_TOKENS
    if isinstance(fields, ChatRequest):
        default = limits.default_max_tokens
        if fields.max_completion_tokens is not None:
            name, value = "max_completion_tokens", fields.max_completion_tokens
    room = max_model_length - prompt_length
    if room < 1:
        prompt = "messages" if isinstance(fields, ChatRequest) else "prompt"
        raise _too_long(prompt, prompt_length, max_model_length, "and leaves no room to answer")
    if value is None:
        return name, min(default, room)
    if prompt_only(fields):
        return name, 1  # the engine draws one; it is not told
    if limits.max_output_tokens is not None and value > limits.max_output_tokens:
        raise invalid(name, f"'{name}' may be at most {limits.max_output_tokens}, not {value}.")
    if value > room:
        raise _too_long(name, prompt_length, max_model_length, f"and '{name}' asks for {value}")
    return name, value


def _too_long(param: str, prompt_length: int, max_model_length: int, more: str) -> ApiError:
    return invalid(
        param,
        f"This model's context holds {max_model_length} tokens; the prompt has {prompt_length}, "
        f"{more}.",
        "context_length_exceeded",
    )
