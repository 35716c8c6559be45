"""The served engine under load: guidellm's Poisson arrivals over HTTP, and a long prompt that
arrives among running streams; vLLM's server under the same load beside it.

    python -m bench.load --seconds 120
"""

from __future__ import annotations

import argparse
import threading
import time
from itertools import pairwise
from pathlib import Path
from statistics import median

from openai import OpenAI

from bench.common import RESULTS, Figure, report, table, write_results
from bench.guidellm import GUIDELLM, Load, run_guidellm, write_prompts
from bench.peer import VENV, vllm_server
from bench.server import running_server
from specdec.config import DEFAULT_MODEL, EngineSettings
from specdec.model.resolve import resolve_model

#: Share of its own capacity that an engine is loaded with.
SHARE = 0.7
#: Words of the long prompt: 4,000 tokens or a little less.
_LONG_WORDS = 2600
_STREAMS = 3


def measure_stall(url: str, model: str) -> tuple[float, float]:
    """Pauses of running streams while a long prompt is computed.

    Returns:
        The longest pause and the usual one (median), in seconds between two chunks.
    """
    client = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    times: list[list[float]] = [[] for _ in range(_STREAMS)]
    done = threading.Event()

    def stream(place: int) -> None:
        chunks = client.completions.create(
            model=model,
            prompt=f"Chapter {place + 1}. Once upon a time",
            max_tokens=4000,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        for _ in chunks:
            times[place].append(time.perf_counter())
            if done.is_set():
                chunks.close()
                break

    threads = [threading.Thread(target=stream, args=(place,)) for place in range(_STREAMS)]
    for thread in threads:
        thread.start()
    while min(map(len, times)) < 20:
        time.sleep(0.05)
    started = time.perf_counter()
    words = " ".join(f"word{i % 10}"[: 4 + i % 2] for i in range(_LONG_WORDS))
    answer = client.completions.create(model=model, prompt=words, max_tokens=1)
    ended = time.perf_counter()
    done.set()
    for thread in threads:
        thread.join()
    assert answer.usage is not None
    if min(row[-1] for row in times) < ended:
        raise RuntimeError("a stream ended before the long prompt did: nothing was measured")
    print(f"long prompt: {answer.usage.prompt_tokens} tokens in {ended - started:.1f} s")
    during = [b - a for row in times for a, b in pairwise(row) if started < b and a < ended]
    usual = [b - a for row in times for a, b in pairwise(row) if b < started]
    during.sort()
    print(
        f"pauses meanwhile: median {median(during) * 1e3:.0f} ms, "
        f"p99 {during[int(0.99 * len(during))] * 1e3:.0f}, longest {during[-1] * 1e3:.0f}"
    )
    return during[-1], median(usual)


def measure(options: argparse.Namespace) -> int:
    """Run everything and print it."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    prompts = RESULTS / "load_prompts.jsonl"
    write_prompts(prompts, options.tokens, options.longest, options.prompt_file)
    loads: dict[str, Load] = {}
    common = (DEFAULT_MODEL,)
    with running_server({}, DEFAULT_MODEL) as server:
        full = f"kind=throughput,max_concurrency={options.concurrency}"
        loads["capacity"] = run_guidellm(
            server.url, *common, full, options.seconds, prompts, options.guidellm
        )
        rate = SHARE * loads["capacity"].rate
        poisson = f"kind=poisson,rate={rate:.3f}"
        loads["poisson"] = run_guidellm(
            server.url, *common, poisson, options.seconds, prompts, options.guidellm
        )
        longest, usual = measure_stall(server.url, DEFAULT_MODEL)
    if not options.skip_vllm:
        folder = resolve_model(DEFAULT_MODEL, EngineSettings().cache_dir)
        with vllm_server(folder, options.vllm, RESULTS / "vllm server.log") as url:
            loads["vllm, capacity"] = run_guidellm(
                url, *common, full, options.seconds, prompts, options.guidellm
            )
            loads["vllm, same load"] = run_guidellm(
                url, *common, poisson, options.seconds, prompts, options.guidellm
            )
    served = loads["poisson"]
    figures = {
        "per_token_p99_over_p50": Figure(served.per_token[2] / served.per_token[0], 2.0, True),
        "stall_in_usual_steps": Figure((longest - usual) / usual, 2.0, True),
        "failed_requests": Figure(served.failed, 0, True),
    }
    rows = [
        (
            name,
            f"{load.rate:.2f}",
            f"{load.tokens:.0f}",
            " / ".join(f"{value:.0f}" for value in load.per_token),
            " / ".join(f"{value:.0f}" for value in load.first),
            load.failed,
        )
        for name, load in loads.items()
    ]
    header = (
        "load",
        "requests/s",
        "tokens/s",
        "ms per token p50/p90/p99",
        "first token, ms",
        "failed",
    )
    print("\n" + table(header, rows))
    print(f"\nlongest pause {longest * 1e3:.0f} ms, usually {usual * 1e3:.0f} ms")
    print("\n" + report(figures))
    details = {"loads": {name: vars(load) for name, load in loads.items()}, "rate": rate}
    print("\nwrote", write_results(options.name, figures, details))
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--seconds", type=int, default=120, help="of each load")
    parser.add_argument("--tokens", type=int, default=64, help="per answer")
    parser.add_argument("--longest", type=int, default=3000, help="prompt, in characters")
    parser.add_argument("--concurrency", type=int, default=32, help="at full load")
    parser.add_argument("--prompt-file", type=Path)
    parser.add_argument("--guidellm", type=Path, default=GUIDELLM, help="its virtual environment")
    parser.add_argument("--vllm", type=Path, default=VENV, help="vLLM's virtual environment")
    parser.add_argument("--skip-vllm", action="store_true")
    parser.add_argument("--name", default="load", help="of the results file")
    return measure(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
