"""Self-distillation data: the target model answers prompts; its hidden states are kept.

Every shard holds, for a batch of prompts, the answer tokens and, for each of them,
the final-norm hidden state that predicted it, so that training the heads needs no
second pass through the backbone. The answers come from the engine itself, without
speculation. Shards are written atomically and named by their number, so an interrupted
run continues where it stopped.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from specdec.engine import Engine
from specdec.errors import HeadsError
from specdec.heads.target import Target, model_digest
from specdec.params import SamplingParams
from specdec.policy.plan import Committed
from specdec.training.prompts import Prompt, balanced_order, encode_chat, take_turns

#: An answer's tokens (N) and the states ``[N, H]`` (bfloat16) that each was predicted from.
Answer = tuple[list[int], Tensor]


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are made.

    Attributes:
        batch_size: prompts of one shard.
        max_new_tokens: longest answer.
        max_prompt_tokens: longer prompts are passed over.
        sampled_share: share of batches answered at ``temperature`` instead of greedily.
        temperature: of the sampled batches.
        seed: of the order of prompts and of the sampling.
    """

    batch_size: int = 64
    max_new_tokens: int = 128
    max_prompt_tokens: int = 192
    sampled_share: float = 0.2
    temperature: float = 0.7
    seed: int = 0


def prompt_batches(
    tokenizer: PreTrainedTokenizerBase, files: Sequence[Sequence[Prompt]], options: AnswerOptions
) -> Iterator[list[list[int]]]:
    """The prompts of each shard, in order; the same for the same options. Files take turns."""
    ordered = take_turns([balanced_order(prompts, options.seed) for prompts in files])
    encoded = (encode_chat(tokenizer, prompt.text) for prompt in ordered)
    fitting = (ids for ids in encoded if 0 < len(ids) <= options.max_prompt_tokens)
    return make_batches(fitting, options)


def make_batches(encoded: Iterable[list[int]], options: AnswerOptions) -> Iterator[list[list[int]]]:
    """Batches of prompts of similar length, so that padding is small."""
    source, start = iter(encoded), 0
    while window := list(islice(source, options.batch_size * 8)):
        window.sort(key=len)
        batches = [
            window[at : at + options.batch_size] for at in range(0, len(window), options.batch_size)
        ]
        random.Random(options.seed + start).shuffle(batches)
        yield from batches
        start += len(window)


def answer_all(
    engine: Engine, requests: Iterable[tuple[str, list[int], SamplingParams]]
) -> Iterator[tuple[str, Answer]]:
    """Answer requests, as many at once as the engine runs; each comes out when it is done.

    Args:
        engine: its speculation is not used.
        requests: name, prompt tokens and parameters.

    Raises:
        HeadsError: the engine failed a request.
    """
    waiting = iter(requests)
    recorder = _Recorder()
    engine.on_committed = recorder
    batch = engine.settings.batch
    at_once = min(batch.max_sequences, batch.max_waiting)
    running: set[str] = set()
    try:
        while True:
            for name, prompt, params in islice(waiting, at_once - len(running)):
                engine.add_request(name, prompt, params)
                running.add(name)
            if not running:
                return
            for output in engine.step():
                if output.error is not None:
                    raise HeadsError(f"no answer to a training prompt: {output.error}")
                if output.finished:
                    running.remove(output.request_id)
                    yield output.request_id, recorder.take(output.request_id)
    finally:
        engine.on_committed = None
        for name in running:
            engine.abort(name)


class _Recorder:
    """Keeps tokens and states of the answers that are being made."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[list[int], list[Tensor]]] = {}

    def __call__(self, committed: Sequence[Committed], hidden: Tensor) -> None:
        states = hidden[[entry.logits_row for entry in committed]].bfloat16().cpu()
        for entry, state in zip(committed, states, strict=True):
            answer = self._answers.setdefault(entry.sequence.request_id, ([], []))
            answer[0].extend(entry.tokens)
            answer[1].append(state)

    def take(self, name: str) -> Answer:
        tokens, states = self._answers.pop(name)
        return tokens, torch.stack(states)


def make_answers(
    engine: Engine,
    batches: Iterable[list[list[int]]],
    folder: Path,
    *,
    tokens_wanted: int,
    options: AnswerOptions,
    on_progress: Callable[[int], None] = lambda tokens: None,
) -> list[Path]:
    """Write shards of answers until they hold ``tokens_wanted`` tokens or prompts run out.

    Existing shards are kept and counted.

    Raises:
        HeadsError: a shard in the folder is broken, or answers other prompts, or was made by
            another model or with other options.

    Args:
        engine: the target.
        batches: prompts of each shard, from :func:`prompt_batches`.
        folder: of the shards.
        tokens_wanted: in all of them.
        options: lengths and temperature.
        on_progress: told the tokens in finished shards.

    Returns:
        The shards, in order. Each holds ``tokens`` [N] int32, ``lengths`` [prompts] int32
        and ``hidden`` [N, H] bfloat16, answers one after the other.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total = 0
    written: set[int] = set()
    open_shards: dict[int, dict[int, Answer]] = {}
    sizes: dict[int, int] = {}
    identities: dict[int, str] = {}
    model = model_digest(Target.of(engine.runner.model))

    def finish(number: int) -> None:
        nonlocal total
        total += count_tokens(shard_path(folder, number))
        written.add(number)
        on_progress(total)

    def requests() -> Iterator[tuple[str, list[int], SamplingParams]]:
        for number, batch in enumerate(batches):
            if total >= tokens_wanted:
                return
            identities[number] = _identity(model, batch, options, number)
            if shard_path(folder, number).exists():
                check_shard(shard_path(folder, number), identities[number])
                finish(number)
                continue
            open_shards[number], sizes[number] = {}, len(batch)
            for index, prompt in enumerate(batch):
                yield f"{number}/{index}", prompt, _params(options, number, index)

    for name, answer in answer_all(engine, requests()):
        number, index = map(int, name.split("/"))
        shard = open_shards[number]
        shard[index] = answer
        if len(shard) == sizes[number]:
            del open_shards[number]
            answers = [shard[i] for i in range(len(shard))]
            write_shard(shard_path(folder, number), answers, identities[number])
            finish(number)
    return [shard_path(folder, number) for number in sorted(written)]


def _identity(
    model: str, prompts: Sequence[Sequence[int]], options: AnswerOptions, number: int
) -> str:
    """What a shard's answers depend on, as a digest."""
    seed = sampling_seed(options, number)
    parts = [
        model,
        prompts,
        options.max_new_tokens,
        seed,
        None if seed is None else options.temperature,
    ]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def check_shard(path: Path, identity: str) -> None:
    """See that a shard is what it would be if it were made now.

    Raises:
        HeadsError: it is not, or cannot be read.
    """
    try:
        with safe_open(path, "pt") as shard:
            found = (shard.metadata() or {}).get("identity")
    except (SafetensorError, OSError) as error:
        raise HeadsError(f"{path}: no shard of answers ({error}); remove it") from error
    if found != identity:
        raise HeadsError(
            f"{path} answers other prompts, or was made by another model or with another seed; "
            "give another --answers folder, or empty this one"
        )


def shard_path(folder: Path, number: int) -> Path:
    """Where a shard lies."""
    return folder / f"answers-{number:05d}.safetensors"


def _params(options: AnswerOptions, number: int, index: int) -> SamplingParams:
    seed = sampling_seed(options, number)
    return SamplingParams(
        max_tokens=options.max_new_tokens,
        temperature=0.0 if seed is None else options.temperature,
        seed=0 if seed is None else (seed + index) % 2**32,
        speculation=False,
    )


def sampling_seed(options: AnswerOptions, number: int) -> int | None:
    """Seed of the noise of shard ``number``; None if its answers are greedy."""
    rng = random.Random(options.seed * 1_000_003 + number)
    return rng.getrandbits(32) if rng.random() < options.sampled_share else None


def write_shard(path: Path, answers: Sequence[Answer], identity: str = "") -> None:
    """Write one shard, under a temporary name first."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    save_file(
        {
            "tokens": torch.tensor([t for tokens, _ in answers for t in tokens], dtype=torch.int32),
            "lengths": torch.tensor([len(tokens) for tokens, _ in answers], dtype=torch.int32),
            "hidden": torch.cat([states for _, states in answers]),
        },
        temporary,
        metadata={"identity": identity},
    )
    os.replace(temporary, path)


def count_tokens(path: Path) -> int:
    """Number of answer tokens in a shard (reads only its header)."""
    with safe_open(path, "pt") as shard:
        return int(shard.get_slice("tokens").get_shape()[0])
