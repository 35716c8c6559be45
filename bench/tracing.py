"""What it costs to be observed: throughput at batch 16, by settings, of that with all off.

One engine in this process, stepped; its arms take turns, and each ratio is of two runs side by
side. Spans go to a real OTLP endpoint in a process of its own, which throws them away.

    python -m bench.tracing
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import grpc
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import NonRecordingSpan, SpanContext, TraceFlags
from tqdm import tqdm

from bench.arms import Ask, EngineArm, throughput
from bench.common import Figure, engine_settings, load_prompts, report, table, write_results
from bench.server import free_port
from deployments.config import AppConfig
from deployments.metrics.engine_watch import EngineWatch
from deployments.metrics.recorder import Recorder
from deployments.metrics.start import start_publisher
from deployments.tracing.setup import Tracing
from specdec.chat import encode_prompt
from specdec.config import validate_settings
from specdec.engine import Engine
from specdec.outputs import RequestOutput

AfterStep = Callable[[Engine, list[RequestOutput], float], None]
OFF = "off"
#: Seconds that the slow endpoint takes for each export.
_SLOW_S = 2.0


@dataclass(frozen=True)
class ObservedArm:
    """One way to be observed.

    Attributes:
        changes: to the sections of AppConfig that concern it; ``endpoint`` says which one is
            filled in.
        endpoint: ``live``, ``slow`` or ``dead``.
        target: throughput, of that with all off.
    """

    changes: Mapping[str, Mapping[str, Any]]
    endpoint: str
    target: float


def _all_on(ratio: float) -> dict[str, dict[str, Any]]:
    return {
        "traces": {"enabled": True, "sample_ratio": ratio, "detail": "spans"},
        "metrics": {"enabled": True},
    }


ARMS: dict[str, ObservedArm] = {
    OFF: ObservedArm({"traces": {"enabled": False}, "metrics": {"enabled": False}}, "live", 1.0),
    "metrics_and_all_spans": ObservedArm(_all_on(1.0), "live", 0.97),
    "metrics_and_1_percent": ObservedArm(_all_on(0.01), "live", 0.99),
    "slow_endpoint": ObservedArm(_all_on(1.0), "slow", 0.97),
    "dead_endpoint": ObservedArm(_all_on(1.0), "dead", 0.97),
}


@contextmanager
def observed(engine: Engine, config: AppConfig) -> Iterator[AfterStep]:
    """The engine as a worker with these settings would have it, for the time of the block.

    All that watches an engine is attached here, so that an arm is nothing but settings. Yields
    what is to be called after each step.
    """
    tracing = Tracing(config.traces, "worker")
    before, engine.observer = engine.observer, tracing.observer()
    recorder = Recorder(config.metrics.enabled)
    watch, due = EngineWatch(recorder), threading.Event()
    publisher = start_publisher(config.metrics, recorder, "worker", config.model_name, due.set)

    def after_step(engine: Engine, outputs: list[RequestOutput], seconds: float) -> None:
        watch.after_step(engine, outputs, seconds)
        if due.is_set():
            due.clear()
            watch.read(engine)

    try:
        yield after_step
    finally:
        engine.observer.close(10)
        engine.observer = before
        tracing.close(1)
        if publisher is not None:
            publisher.close()


def caller(ratio: float, rng: random.Random) -> Callable[[], Context]:
    """Makes the context of a gateway's span, sampled by ratio."""

    def make() -> Context:
        flags = TraceFlags(TraceFlags.SAMPLED if rng.random() < ratio else 0)
        span = SpanContext(secrets.randbits(128) | 1, secrets.randbits(64) | 1, True, flags)
        return trace.set_span_in_context(NonRecordingSpan(span), Context())

    return make


@contextmanager
def endpoint(delay_s: float) -> Iterator[str]:
    """The URL of an OTLP endpoint that answers after a delay and keeps nothing."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_listen, args=(theirs, delay_s), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{ours.recv()}"
    finally:
        process.terminate()
        process.join()


def _listen(pipe: Connection, delay_s: float) -> None:
    def answer(_request: bytes, _context: grpc.ServicerContext) -> bytes:
        time.sleep(delay_s)
        return b""  # a response without fields

    method: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_unary_rpc_method_handler(answer)
    service = "opentelemetry.proto.collector.trace.v1.TraceService"
    server = grpc.server(ThreadPoolExecutor(2))
    server.add_generic_rpc_handlers(
        (grpc.method_handlers_generic_handler(service, {"Export": method}),)
    )
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    pipe.send(port)
    server.wait_for_termination()


def measure(options: argparse.Namespace, urls: Mapping[str, str]) -> dict[str, list[float]]:
    """Tokens per second of each arm, one value a repeat."""
    engine = Engine.from_settings(engine_settings({"batch": {"max_sequences": options.batch}}))
    chosen = load_prompts(options.batch, options.prompt_file)
    prompts = [
        encode_prompt(engine.tokenizer, [{"role": "user", "content": prompt.text}])[-256:]
        for prompt in chosen
    ]
    # Requests end while others run: spans are made and sent meanwhile, as in a server.
    prompts *= options.waves
    rng = random.Random(1)
    EngineArm(engine, True).run(prompts, Ask(options.tokens))
    speeds: dict[str, list[float]] = {name: [] for name in ARMS}
    order = list(ARMS)
    for _ in tqdm(range(options.repeats), desc="observed"):
        for name in order:
            arm = ARMS[name]
            changes = {section: dict(values) for section, values in arm.changes.items()}
            changes["traces"] |= {"endpoint": urls[arm.endpoint], "protocol": "grpc"}
            config = validate_settings(AppConfig, changes)
            ratio = config.traces.sample_ratio
            with observed(engine, config) as after_step:
                run = EngineArm(engine, True, caller=caller(ratio, rng), after_step=after_step)
                speeds[name].append(throughput(run.run(prompts, Ask(options.tokens))))
        order = [*order[1:], order[0]]
    engine.close()
    return speeds


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--waves", type=int, default=4, help="requests, in batches")
    parser.add_argument("--tokens", type=int, default=96, help="of an answer, at most")
    parser.add_argument("--prompt-file", type=Path)
    parser.add_argument("--name", default="tracing", help="of the results file")
    options = parser.parse_args()
    with endpoint(0.0) as live, endpoint(_SLOW_S) as slow:
        urls = {"live": live, "slow": slow, "dead": f"http://127.0.0.1:{free_port()}"}
        speeds = measure(options, urls)
    ratios = {
        name: median(a / b for a, b in zip(values, speeds[OFF], strict=True))
        for name, values in speeds.items()
        if name != OFF
    }
    figures = {
        f"throughput_{name}": Figure(ratio, ARMS[name].target) for name, ratio in ratios.items()
    }
    rows = [(name, f"{median(values):.1f}") for name, values in speeds.items()]
    print(table(("arm", "tokens/s"), rows), report(figures), sep="\n\n")
    print("wrote", write_results(options.name, figures, {"tokens_per_s": speeds}))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
