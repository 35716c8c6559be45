"""Workers follow the load: a ramp of streams up and down again, with no failed request.

Steps take a simulated time (bench/simulated.py); Ray, Serve, its autoscaler, gateway and workers
are real.

    python -m bench.autoscale            # some minutes; writes docs/autoscaling.png
    python -m bench.autoscale --short    # half a minute, no picture
    python -m bench.autoscale --to-zero  # down to no worker, and back with the next request
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import httpx

from bench.common import ROOT, Figure, write_results
from bench.local_app import LocalApp, Streams, local_app, replicas

PICTURE = ROOT / "docs" / "autoscaling.png"
_STEP_S = 0.02
_LIMIT_S = 120.0


@dataclass(frozen=True)
class Sample:
    """The state at one moment.

    Attributes:
        at_s: seconds since the beginning.
        streams: that clients keep open.
        replicas: workers that run.
    """

    at_s: float
    streams: int
    replicas: int


@dataclass(frozen=True)
class Ramp:
    """What the ramp came to.

    Attributes:
        samples: over time.
        missed: levels of load that the workers had not followed within the limit.
        done: streams that ended well.
        failed: what went wrong, one text a stream.
        first_token_s: median.
    """

    samples: list[Sample]
    missed: int
    done: int
    failed: list[str]
    first_token_s: float

    @property
    def peak(self) -> int:
        """Most workers."""
        return max(sample.replicas for sample in self.samples)


def settings(short: bool, least: int = 1) -> dict[str, object]:
    """Arguments of the application: four streams a worker, one to three workers."""
    return {
        "worker": {
            "num_cpus": 0.5,
            "health_check_period_s": 2,
            "autoscaling": {
                "min_replicas": least,
                "max_replicas": 3,
                "target_requests": 4,
                "upscale_delay_s": 1 if short else 5,
                "downscale_delay_s": 2 if short else 20,
                "downscale_to_zero_delay_s": 2,
                "look_back_s": 2 if short else 5,
            },
        }
    }


def run_ramp(app: LocalApp, hold_s: float, tokens: int) -> Ramp:
    """2, 6, 12, 6, 2 streams, each for ``hold_s`` at least, and until the workers have followed."""
    streams, samples = Streams(app, tokens), list[Sample]()
    began = time.monotonic()

    def hold(count: int, wanted: int) -> bool:
        streams.keep(count)
        since = time.monotonic()
        while True:
            now = time.monotonic()
            samples.append(Sample(now - began, count, replicas()))
            settled = samples[-1].replicas == wanted and now - since >= hold_s
            if settled or now - since > _LIMIT_S:
                return settled
            time.sleep(0.25)

    try:
        followed = [hold(*level) for level in ((2, 1), (6, 2), (12, 3), (6, 2), (2, 1))]
    finally:
        streams.stop()
    tally = streams.tally
    return Ramp(
        samples, followed.count(False), tally.done, tally.failed, median(tally.first_s or [0.0])
    )


def wait_for(count: int) -> float:
    """Seconds until so many workers run.

    Raises:
        TimeoutError: it takes too long.
    """
    began = time.monotonic()
    while replicas() != count:
        if time.monotonic() - began > _LIMIT_S:
            raise TimeoutError(f"{replicas()} workers run, not {count}")
        time.sleep(0.1)
    return time.monotonic() - began


def to_zero(app: LocalApp) -> tuple[float, float]:
    """Seconds until an idle server has no worker left, and those of the next answer."""
    down_s = wait_for(0)
    began = time.monotonic()
    answer = httpx.post(
        f"{app.url}/v1/completions",
        json={"model": app.model, "prompt": "w1 w2", "max_tokens": 4},
        timeout=_LIMIT_S,
    )
    answer.raise_for_status()
    return down_s, time.monotonic() - began


def draw(ramp: Ramp, path: Path) -> None:
    """Streams and workers over time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, left = plt.subplots(figsize=(8, 3.5))
    right = left.twinx()
    times = [sample.at_s for sample in ramp.samples]
    left.step(times, [sample.streams for sample in ramp.samples], "0.6", where="post")
    right.step(times, [sample.replicas for sample in ramp.samples], "C0", where="post")
    left.set(xlabel="seconds", ylabel="open streams (grey)", ylim=(0, 14))
    right.set(ylabel="workers (blue)", ylim=(0, 3.5), yticks=range(4))
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


def main() -> int:
    """Run one of the three; 1 where a request failed or workers did not follow."""
    parser = argparse.ArgumentParser(description="Workers follow the load.")
    parser.add_argument("--short", action="store_true", help="half a minute, no picture")
    parser.add_argument("--to-zero", action="store_true", help="down to no worker and back")
    options = parser.parse_args()
    if options.to_zero:
        with local_app(settings(short=True, least=0), _STEP_S) as app:
            down_s, answer_s = to_zero(app)
        print(f"idle: no worker after {down_s:.1f} s; the next answer took {answer_s:.1f} s")
        return 0
    with local_app(settings(options.short), _STEP_S) as app:
        ramp = run_ramp(app, 1 if options.short else 40, 50 if options.short else 200)
    end = ramp.samples[-1].replicas
    print(
        f"{ramp.done} answers, {len(ramp.failed)} failed; workers 1 → {ramp.peak} → {end}, "
        f"{ramp.missed} levels missed; "
        f"median first token {1e3 * ramp.first_token_s:.0f} ms; {ramp.samples[-1].at_s:.0f} s"
    )
    for text in ramp.failed[:5]:
        print(text, file=sys.stderr)
    figures = {
        "failed_requests": Figure(len(ramp.failed), 0, at_most=True),
        "levels_missed": Figure(ramp.missed, 0, at_most=True),
        "most_workers": Figure(ramp.peak, 3),
        "workers_at_the_end": Figure(end, 1, at_most=True),
    }
    if not options.short:
        draw(ramp, PICTURE)
        write_results("autoscale", figures, asdict(ramp))
    return 0 if all(figure.met for figure in figures.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
