"""The application with workers whose steps take a given time, whatever the machine has to spare.

The time is slept, so replicas do not slow each other on a machine with fewer cores than replicas:
what is measured is everything around the step, which is the real thing. Named in a configuration
of Ray Serve as ``bench.simulated:build_app``.
"""

# No `from __future__ import annotations` here: see deployments/app.py.

import time

from pydantic import Field
from ray.serve import Application

from deployments.app import application
from deployments.config import AppConfig
from deployments.worker import Worker
from specdec.engine import Engine
from specdec.outputs import RequestOutput


class SimulatedConfig(AppConfig):
    """The application's arguments, and how long a step takes.

    Attributes:
        step_s: added to each step of an engine.
    """

    step_s: float = Field(0.02, ge=0)


class SimulatedWorker(Worker):
    """A worker whose engine sleeps before each step."""

    def __init__(self, config: SimulatedConfig) -> None:
        super().__init__(config)
        slow_down(self._thread.engine, config.step_s)


def slow_down(engine: Engine, seconds: float) -> None:
    """Let each step of an engine take so much longer."""
    step = engine.step

    def slowed() -> list[RequestOutput]:
        time.sleep(seconds)
        return step()

    vars(engine)["step"] = slowed


def build_app(config: SimulatedConfig) -> Application:
    """As ``deployments.app:build_app``."""
    return application(config, SimulatedWorker)
