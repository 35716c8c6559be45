"""A cluster loses what a cluster can lose: a worker's node, the head, a node that is emptied.

Head and two workers, each a host of its own (namespaces of network, processes and files, see
bench/network.py; needs root and iproute2). `serve deploy` deploys serve_config.yaml with the small
model; clients stream through the workers' proxies meanwhile, and none of their streams may fail or
lack a token.

    python -m bench.multi_node             # all of it; writes bench/results/multi_node.json
    python -m bench.multi_node --short     # deploy, a node killed and back
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

from bench.cluster import SERVE_PORT, Cluster, cluster
from bench.common import Figure, write_results
from bench.local_app import LocalApp, Streams
from bench.network import Host, missing
from bench.small_model import make_small_model
from k8s.tools.serve_config import serve_config

WORKER, GATEWAY = "SimulatedWorker", "Gateway"
_STEP_S = 0.02
#: In a worker's log, for each request that it has answered.
_CALLED = "CALL generate OK"


def config(model: str, replicas: int) -> dict[str, Any]:
    """The base manifest's serveConfigV2, with the small model.

    Args:
        model: its folder.
        replicas: workers; one fits a node.
    """
    found = serve_config("base")
    found["http_options"]["port"] = SERVE_PORT
    found["logging_config"]["enable_access_log"] = True  # tells which node takes load
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

    def __init__(self, machines: Cluster) -> None:
        self._machines = machines
        self._model = str(make_small_model(machines.folder / "small"))
        self.problems: list[str] = []
        #: Seconds and counts, by name.
        self.found: dict[str, float] = {}

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
        self._say("deployed_s", time.monotonic() - began)

    def lose_node(self) -> None:
        """Kill a node in mid-stream; clients come through the other one's proxy."""
        machines = self._machines
        stays, goes = machines.workers
        streams = self._flowing(stays, 6)
        goes.kill()
        lost = time.monotonic()
        machines.wait(lambda: goes.address not in machines.running(WORKER), "the loss is seen")
        self._say("node_loss_seen_s", time.monotonic() - lost)
        before = streams.tally.done
        machines.wait(lambda: streams.tally.done >= before + 6, "streams flow without the node")
        moved = machines.logged(stays, GATEWAY, "goes on elsewhere")
        self._say("streams_taken_over", moved)
        if not moved:
            self.problems.append("a killed node: no stream ran there, so none was taken over")
        served = machines.logged(goes, WORKER, _CALLED)
        machines.start_worker(goes, cpus=3)
        back_s = machines.wait(self._complete, "the node is back and has its replicas")
        self._say("node_back_s", back_s)
        machines.wait(lambda: machines.healthy(goes), "its proxy answers")
        self._serves(goes)
        machines.wait(
            lambda: machines.logged(goes, WORKER, _CALLED) >= served + 6, "the node takes load"
        )
        self._judge("node_killed", streams)

    def lose_head(self) -> None:
        """Kill the head in mid-stream and start it again: its tables lie in Valkey."""
        machines = self._machines
        deployed = machines.deployed()
        streams = self._flowing(machines.workers[0], 4)
        machines.head.kill()
        before = streams.tally.done
        machines.wait(lambda: streams.tally.done >= before + 8, "streams flow without a head")
        machines.start_head()
        back_s = machines.wait(self._complete, "the head knows its application again")
        self._say("head_whole_again_s", back_s)
        if machines.deployed() != deployed:
            self.problems.append(f"a lost head: {machines.deployed()} runs, not {deployed}")
        before = streams.tally.done
        machines.wait(lambda: streams.tally.done >= before + 8, "streams flow with the new head")
        self._judge("head_restarted", streams)

    def drain_node(self) -> None:
        """Stop a node as Kubernetes does: what streams there ends, then it goes.

        No new client comes to it, as its Service sends none from the moment it is to go.
        """
        machines = self._machines
        stays, goes = machines.workers
        streams, leaving = self._flowing(stays, 6), self._flowing(goes, 3)
        leaving.keep(0)
        began = time.monotonic()
        process = machines.terminate(goes)
        machines.wait(lambda: process.poll() is not None, "the node has gone")
        self._say("node_drained_s", time.monotonic() - began)
        before = streams.tally.done
        machines.wait(lambda: streams.tally.done >= before + 6, "streams flow without the node")
        self._judge("node_drained", streams, leaving)

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

    def _flowing(self, host: Host, count: int) -> Streams:
        """So many streams through a host's proxy, all of them under way."""
        streams = Streams(self.app(host), tokens=150)
        streams.keep(count)
        self._machines.wait(lambda: streams.tally.done >= count, "streams flow", 60)
        return streams

    def _judge(self, what: str, *all_streams: Streams) -> None:
        """Let them end, and count those that failed."""
        for streams in all_streams:
            streams.stop()
        failed = [text for streams in all_streams for text in streams.tally.failed]
        self._say(f"{what}_streams", sum(streams.tally.done for streams in all_streams))
        self._say(f"{what}_failed", len(failed))
        if failed:
            self.problems.append(f"{what}: {len(failed)} failed, such as {failed[0]}")

    def _say(self, name: str, value: float) -> None:
        self.found[name] = round(value, 1)
        print(f"{name}: {value:.3g}", flush=True)


def main() -> int:
    """Run the steps; 1 where a stream failed, 2 where this machine has not what it takes."""
    parser = argparse.ArgumentParser(description="A cluster loses what a cluster can lose.")
    parser.add_argument("--short", action="store_true", help="deploy, a node killed and back")
    short = parser.parse_args().short
    if (problem := missing()) is not None:
        print(problem, file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the hosts are to go then too
    with cluster(workers=2) as machines:
        run = Run(machines)
        steps: list[Callable[[], None]] = [run.deploy, run.lose_node]
        if not short:
            steps += [run.lose_head, run.drain_node]
        for step in steps:
            step()
    for problem in run.problems:
        print(problem, file=sys.stderr)
    if not short:
        figures = {
            name: Figure(value, 0, at_most=True)
            for name, value in run.found.items()
            if name.endswith("_failed")
        }
        write_results("multi_node", figures, {"found": run.found, "problems": run.problems})
    return 1 if run.problems else 0


if __name__ == "__main__":
    sys.exit(main())
