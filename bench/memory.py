"""Resident memory of a worker: beyond its KV pool, and over many requests.

python -m bench.memory --requests 2000
"""

from __future__ import annotations

import argparse
import gc
import random
from pathlib import Path

from tqdm import tqdm

from bench.common import Figure, report, write_results
from specdec.config import EngineSettings, KvSettings
from specdec.engine import Engine
from specdec.params import SamplingParams

#: Requests before memory counts as settled: allocators have then grown what they need.
_SETTLED = 200
_POOL_GIB = 0.25


def resident_gib() -> float:
    """Resident memory of this process, shared libraries included, as the kernel counts it."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 2**20
    raise OSError("/proc/self/status has no VmRSS")


def measure(options: argparse.Namespace) -> int:
    """Serve requests of mixed lengths and watch."""
    settings = EngineSettings(kv=KvSettings(memory_gib=_POOL_GIB))
    engine = Engine.from_settings(settings)
    pool = engine.runner.pool
    pool_gib = (pool.keys.nbytes + pool.values.nbytes) / 2**30
    for tensor in (pool.keys, pool.values):  # all of the pool is resident from the start
        tensor.zero_()
    rng = random.Random(0)
    settled, loaded = 0.0, resident_gib()
    left = options.requests
    running = 0
    with tqdm(total=options.requests, unit="request") as progress:
        number = 0
        while left or running:
            while left and running < 24:
                prompt = [
                    rng.randrange(10, engine.runner.vocab_size) for _ in range(rng.randint(1, 60))
                ]
                params = SamplingParams(
                    max_tokens=rng.randint(1, 16),
                    temperature=rng.choice([0.0, 0.8]),
                    seed=number,
                )
                engine.add_request(str(number), prompt, params)
                number, left, running = number + 1, left - 1, running + 1
            for output in engine.step():
                if output.finished:
                    running -= 1
                    progress.update()
            if not settled and number - running >= min(_SETTLED, options.requests):
                gc.collect()
                settled = resident_gib()
    engine.check_integrity()
    gc.collect()
    ended = resident_gib()
    figures = {
        "resident_gib_beyond_kv_pool": Figure(ended - pool_gib, 1.2, True),
        "growth_mib_after_settling": Figure((ended - settled) * 1024, 30, True),
    }
    print(
        f"\nGiB: pool {pool_gib:.2f}, loaded {loaded:.2f}, "
        f"settled {settled:.2f}, at the end {ended:.2f}"
    )
    print(report(figures))
    print("wrote", write_results(options.name, figures))
    return 0


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--name", default="memory", help="of the results file")
    return measure(parser.parse_args())


if __name__ == "__main__":
    raise SystemExit(main())
