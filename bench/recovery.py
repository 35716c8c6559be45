"""Recovery: what checkpoints cost a full batch, and how soon a long generation goes on elsewhere.

python -m bench.recovery
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from pydantic import SecretStr
from tqdm import tqdm

from bench.common import Figure, load_prompts, report, write_results
from bench.valkey import Valkey
from deployments.checkpointing import Checkpointer
from deployments.config import RecoverySettings
from deployments.messages import GenerateRequest, Ticket
from deployments.recorder import NoRecorder, Recorder
from prefix_cache.checkpoints.guarded import open_checkpoints
from prefix_cache.checkpoints.record import FIRST_FENCE
from prefix_cache.checkpoints.settings import CheckpointSettings
from prefix_cache.settings import PrefixCacheSettings
from specdec.chat import encode_prompt
from specdec.config import EngineSettings, KvSettings, PrefixSettings
from specdec.engine import Engine
from specdec.params import CacheScope, SamplingParams
from specdec.policy.tree import DraftTree

COST_TARGET, RESUME_TARGET = 0.98, 0.1
#: About what a gateway keeps of an answer and of its request.
_TICKET = Ticket(FIRST_FENCE, bytes(500), bytes(500))


def run_batch(
    engine: Engine, recorder: Recorder, prompts: Sequence[list[int]], tokens: int, salt: str
) -> float:
    """Tokens per second of a batch whose progress ``recorder`` hears of."""

    def draft_of(attempt_id: str) -> DraftTree | None:
        sequence = engine.scheduler.find(attempt_id)
        return None if sequence is None else sequence.draft

    params = SamplingParams(max_tokens=tokens, ignore_eos=True)
    scope = CacheScope(0, salt.encode())  # by its salt, each run computes its own prompts
    started, emitted = time.perf_counter(), 0
    for number, prompt in enumerate(prompts):
        request = GenerateRequest(f"{salt}-{number}", tuple(prompt), params, scope, ticket=_TICKET)
        engine.add_request(request.attempt_id, prompt, params, scope)
        recorder.begin(request)
    while engine.has_work:
        for output in engine.step():
            emitted += len(output.new_tokens)
            recorder.progressed(output, draft_of)
    return emitted / (time.perf_counter() - started)


def checkpoint_cost(url: str, options: argparse.Namespace) -> float:
    """Throughput with checkpoints, of that without; median of pairs in alternating order."""
    settings = RecoverySettings(store=CheckpointSettings(url=SecretStr(url)))
    assert settings.store is not None
    engine = Engine.from_settings(EngineSettings(kv=KvSettings(memory_gib=2)))
    lost: list[str] = []
    checkpoints = Checkpointer(open_checkpoints(settings.store), settings, "bench", lost.append)
    prompts = [
        encode_prompt(engine.tokenizer, [{"role": "user", "content": prompt.text}])[-256:]
        for prompt in load_prompts(options.batch, options.prompt_file)
    ]
    run_batch(engine, NoRecorder(), prompts, 16, "warm-up")
    ratios = []
    for pair in tqdm(range(options.repeats), desc="checkpoints"):
        speeds = {}
        for recorder in (checkpoints, NoRecorder())[:: 1 if pair % 2 else -1]:
            kind = type(recorder).__name__
            speeds[kind] = run_batch(engine, recorder, prompts, options.tokens, f"{pair} {kind}")
            checkpoints.flush(60)
        ratios.append(speeds["Checkpointer"] / speeds["NoRecorder"])
    assert not lost
    assert not checkpoints.dropped
    checkpoints.close()
    engine.close()
    return median(ratios)


def first_token_s(engine: Engine, prompt: list[int], prior: list[int], salt: bytes) -> float:
    """Seconds until a request with prior tokens emits its next one."""
    params = SamplingParams(max_tokens=len(prior) + 8, ignore_eos=True)
    started, found = time.perf_counter(), 0.0
    engine.add_request("resumed", prompt, params, CacheScope(0, salt), prior)
    while engine.has_work:
        if any(output.new_tokens for output in engine.step()) and not found:
            found = time.perf_counter() - started
    return found


def resume_times(url: str, length: int) -> dict[str, float]:
    """Seconds that a generation of ``length`` tokens took, that another engine takes to go on
    near its end, and that it takes without the store.
    """
    settings = EngineSettings(
        kv=KvSettings(memory_gib=2),
        prefix_cache=PrefixSettings(
            store=PrefixCacheSettings(url=SecretStr(url), queue_bytes=2 * 2**30)
        ),
    )
    engine = Engine.from_settings(settings)
    prompt = encode_prompt(engine.tokenizer, [{"role": "user", "content": "Count up from one."}])
    params = SamplingParams(max_tokens=length, ignore_eos=True)
    tokens: list[int] = []
    started = time.perf_counter()
    engine.add_request("whole", prompt, params, CacheScope(0, b"stored"))
    with tqdm(total=length, desc="generating") as bar:
        while engine.has_work:
            for output in engine.step():
                tokens += output.new_tokens
                bar.update(len(output.new_tokens))
    generated = time.perf_counter() - started
    engine.blocks.flush(120)
    engine.close()
    other = Engine.from_settings(settings)
    times = {
        "generated": generated,
        "resumed": first_token_s(other, prompt, tokens, b"stored"),
        "prefilled": first_token_s(other, prompt, tokens, b"unknown"),
    }
    other.close()
    return times


def measure(options: argparse.Namespace) -> int:
    """Run the parts asked for and print their figures."""
    figures: dict[str, Figure] = {}
    details: dict[str, object] = {}
    with tempfile.TemporaryDirectory(prefix="specdec-recovery-") as folder:
        valkey = Valkey(Path(folder), "--maxmemory", "8gb")
        try:
            if "cost" in options.parts:
                ratio = checkpoint_cost(valkey.url, options)
                figures["checkpoints_throughput"] = Figure(ratio, COST_TARGET)
            if "resume" in options.parts:
                times = resume_times(valkey.url, options.length)
                figures["resume_of_generating"] = Figure(
                    times["resumed"] / times["generated"], RESUME_TARGET, True
                )
                details["resume_s"] = times
                print(", ".join(f"{name}: {seconds:.2f} s" for name, seconds in times.items()))
        finally:
            valkey.stop()
    print(report(figures))
    print("wrote", write_results(options.name, figures, details))
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5, help="pairs of runs with and without")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=128, help="of each answer of a batch")
    parser.add_argument("--length", type=int, default=6000, help="of the generation to resume")
    parser.add_argument("--prompt-file", type=Path)
    parts = ("cost", "resume")
    parser.add_argument("--parts", nargs="+", choices=parts, default=parts)
    parser.add_argument("--name", default="recovery", help="of the results file")
    return measure(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
