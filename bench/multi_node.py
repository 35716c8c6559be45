"""A cluster loses what a cluster can lose: a worker's node, the head, a node that is emptied.

Head and two workers, each a host of its own (network namespaces, see bench/network.py; needs root
and iproute2). `serve deploy` deploys serve_config.yaml with the tiny model; clients stream through
the workers' proxies meanwhile.

    python -m bench.multi_node             # all of it
    python -m bench.multi_node --short     # deploy, a node killed and back
    python -m bench.multi_node --failover  # with workers whose streams survive them
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.cluster import SERVE_PORT, Cluster, cluster
from bench.local_app import LocalApp, Streams
from bench.network import Host
from bench.small_model import make_small_model
from k8s.tools.serve_config import serve_config

WORKER, GATEWAY = "SimulatedWorker", "Gateway"
_STEP_S = 0.02


def config(model: str, replicas: int) -> dict[str, Any]:
    """The base manifest's serveConfigV2, with the tiny model.

    Args:
        model: its folder.
        replicas: workers; one fits a node.
    """
    found = serve_config("base")
    found["http_options"]["port"] = SERVE_PORT
    (application,) = found["applications"]
    application["import_path"] = "bench.simulated:build_app"
    arguments = application["args"]
    arguments["engine"] = {
        "model": model,
        "threads": 1,
        "dtype": "float32",
        "self_check": False,
    }
    arguments["worker"] = {"replicas": replicas, "num_cpus": 2, "health_check_period_s": 2}
    arguments["gateway"] = {"replicas": 2, "num_cpus": 0.5, "health_check_period_s": 2}
    arguments["step_s"] = _STEP_S
    return found


class Run:
    """The steps of the run, and what they found."""

    def __init__(self, machines: Cluster, survive: bool) -> None:
        self._machines = machines
        self._survive = survive
        self._model = str(make_small_model(machines.folder / "small"))
        self.problems: list[str] = []

    def app(self, host: Host) -> LocalApp:
        """The application behind a host's proxy."""
        return LocalApp(self._machines.url(host), "small")

    def deploy(self) -> None:
        """Head, two workers, the application, an answer through each worker's proxy."""
        machines = self._machines
        began = time.monotonic()
        machines.start_head()
        for host in machines.workers:
            machines.start_worker(host, cpus=3)
        machines.deploy(config(self._model, replicas=2))
        machines.wait(self._complete, "two workers and two gateways run, each on its node")
        for host in machines.workers:
            machines.wait(partial(machines.healthy, host), "its proxy answers")
            self._serves(host)
        self._say(f"deployed in {time.monotonic() - began:.1f} s")

    def lose_node(self) -> None:
        """Kill a node in mid-stream; clients come through the other one's proxy."""
        machines = self._machines
        stays, goes = machines.workers
        streams = Streams(self.app(stays), tokens=150)
        streams.keep(6)
        self._flowing(streams)
        goes.kill()
        lost = time.monotonic()
        machines.wait(lambda: goes.address not in machines.running(WORKER), "the loss is seen")
        seen_s = time.monotonic() - lost
        before = streams.tally.done
        machines.wait(lambda: streams.tally.done >= before + 6, "streams flow without the node")
        machines.start_worker(goes, cpus=3)
        back_s = machines.wait(self._complete, "the node is back and has its replicas")
        machines.wait(lambda: machines.healthy(goes), "its proxy answers")
        self._serves(goes)
        streams.stop()
        self._say(f"node killed: loss seen after {seen_s:.1f} s, replica back after {back_s:.1f} s")
        self._judge("a killed node", streams, may_fail=not self._survive)

    def lose_head(self) -> None:
        """Kill the head in mid-stream and start it again: its tables lie in Valkey."""
        machines = self._machines
        streams = Streams(self.app(machines.workers[0]), tokens=150)
        streams.keep(4)
        self._flowing(streams)
        machines.head.kill()
        before = streams.tally.done
        machines.wait(lambda: streams.tally.done >= before + 8, "streams flow without a head")
        machines.start_head()
        back_s = machines.wait(self._complete, "the head knows its application again")
        streams.stop()
        self._say(f"head restarted: Serve is whole again {back_s:.1f} s after it answers")
        self._judge("a lost head", streams, may_fail=False)

    def drain_node(self) -> None:
        """Stop a node as Kubernetes does: what streams there ends, then it goes."""
        machines = self._machines
        stays, goes = machines.workers
        streams = Streams(self.app(stays), tokens=150)
        streams.keep(6)
        self._flowing(streams)
        began = time.monotonic()
        process = machines.terminate(goes)
        machines.wait(lambda: process.poll() is not None, "the node has gone")
        streams.stop()
        self._say(f"node drained in {time.monotonic() - began:.1f} s")
        self._judge("a drained node", streams, may_fail=False)

    def _complete(self) -> bool:
        expected = sorted(host.address for host in self._machines.workers)
        return (
            sorted(self._machines.running(WORKER)) == expected
            and len(self._machines.running(GATEWAY)) == 2
        )

    def _serves(self, host: Host) -> None:
        streams = Streams(self.app(host), tokens=5)
        streams.keep(1)
        self._machines.wait(lambda: streams.tally.done > 0, f"an answer through {host.name}", 60)
        streams.stop()

    def _flowing(self, streams: Streams) -> None:
        self._machines.wait(lambda: streams.tally.done > 0, "streams flow", 60)

    def _judge(self, what: str, streams: Streams, may_fail: bool) -> None:
        tally = streams.tally
        self._say(f"  {tally.done} streams ended well, {len(tally.failed)} failed")
        if tally.failed and not may_fail:
            self.problems.append(f"{what}: {len(tally.failed)} failed, such as {tally.failed[0]}")

    def _say(self, text: str) -> None:
        print(text, flush=True)


def main() -> int:
    """Run the steps; 1 where one found a failed stream."""
    parser = argparse.ArgumentParser(description="A cluster loses what a cluster can lose.")
    parser.add_argument("--short", action="store_true", help="deploy, a node killed and back")
    parser.add_argument(
        "--failover", action="store_true", help="no stream may fail when its worker is killed"
    )
    options = parser.parse_args()
    with cluster(workers=2) as machines:
        run = Run(machines, options.failover)
        steps: list[Callable[[], None]] = [run.deploy, run.lose_node]
        if not options.short:
            steps += [run.lose_head, run.drain_node]
        for step in steps:
            step()
    for problem in run.problems:
        print(problem, file=sys.stderr)
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
