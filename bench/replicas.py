"""Two workers against one: the same streams, twice the throughput.

Steps take a simulated time, so that workers do not share the machine's cores; gateway, router and
Ray Serve are real, and what they cost shows. A step is long enough for one core to carry all of
these, the small model's own forwards and the clients as well: with steps of 50 ms that core was
full.

    python -m bench.replicas             # some minutes
    python -m bench.replicas --short     # half a minute
"""

from __future__ import annotations

import argparse
import sys
import time

from bench.common import Figure, report, write_results
from bench.local_app import Streams, local_app, replicas

_STEP_S = 0.1
#: Streams; a worker runs so many at once, so that one alone is full and two are as well.
_STREAMS, _AT_ONCE = 16, 8


def tokens_per_second(count: int, seconds: float, tokens: int) -> float:
    """Throughput of ``count`` workers.

    Raises:
        AssertionError: a request failed.
    """
    batch = {"max_sequences": _AT_ONCE, "token_budget": 256}
    arguments = {"engine": {"batch": batch}, "worker": {"replicas": count, "num_cpus": 0.5}}
    with local_app(arguments, _STEP_S) as app:
        assert replicas() == count
        streams = Streams(app, tokens)
        streams.keep(_STREAMS)
        time.sleep(2)  # all of them run; what comes before is not counted
        before, began = streams.tally.tokens, time.monotonic()
        time.sleep(seconds)
        done, took = streams.tally.tokens - before, time.monotonic() - began
        streams.stop()
        assert not streams.tally.failed, streams.tally.failed[:3]
    return done / took


def main() -> int:
    """Measure both, print and write the figure."""
    parser = argparse.ArgumentParser(description="Two workers against one.")
    parser.add_argument("--short", action="store_true", help="half a minute")
    short = parser.parse_args().short
    seconds, tokens = (8.0, 20) if short else (60.0, 40)
    one, two = (tokens_per_second(count, seconds, tokens) for count in (1, 2))
    figures = {"two_workers_against_one": Figure(two / one, 1.8)}
    print(f"one worker {one:.0f} tokens/s, two {two:.0f} (steps of {1e3 * _STEP_S:.0f} ms)")
    print(report(figures))
    if not short:
        write_results("replicas", figures, {"one": one, "two": two, "step_s": _STEP_S})
    return 0 if all(figure.met for figure in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
